"""What a node says is checked before it is used; a lie costs the liar its round, and is named."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_pfl.core.tree import leaves
from lightning_pfl.deploy.loop import LoopLine
from lightning_pfl.deploy.nodes import Nodes, Reply
from lightning_pfl.deploy.packet import MAGIC, UNREADABLE, Packet
from lightning_pfl.deploy.remote import RemoteCohort, ServerFederation
from lightning_pfl.deploy.states import NONE
from tests.deploy.setting import deploy, make_nodes, recipe_of

PWNED = Path(tempfile.gettempdir()) / f"lightning-pfl-pwned-{os.getpid()}"
Lie = Callable[[Packet], Any]
"""Changes an answer; what isn't None stands in its place, as bytes."""
HEAD = "upload/model/backbone.0.weight"


class LyingLine(LoopLine):
    """A network in which node 101 tells another lie in every round."""

    def send(self, node: int, kind: str, data: bytes) -> str:
        question = super().send(node, kind, data)
        packet = Packet.from_bytes(self.sent[-1][2])
        lies = {"trained": UPLOADS, "evaluated": EVALUATIONS}.get(packet.kind, {})
        number = packet.meta.get("round", packet.meta.get("rounds", 0) - 1)
        if node == 101 and 0 <= number < len(lies):
            lie, _ = list(lies.values())[number]
            told = lie(packet)
            self._replies[question] = Reply(
                question, told if isinstance(told, bytes) else packet.to_bytes()
            )
        return question


def meta(**changes: Any) -> Lie:
    return lambda packet: packet.meta.update(changes)


def without(name: str) -> Lie:
    def lie(packet: Packet) -> None:
        del packet.meta[name]

    return lie


def array(change: Callable[[Any], Any]) -> Lie:
    def lie(packet: Packet) -> None:
        packet.arrays[first(packet)] = change(packet.arrays[first(packet)].copy())

    return lie


def first(packet: Packet) -> str:
    return next(path for path in packet.arrays if path.startswith("upload/"))


def remove(packet: Packet) -> None:
    del packet.arrays[first(packet)]


def add(packet: Packet) -> None:
    packet.arrays["upload/model/evil"] = np.zeros(3, np.float32)


def kind(packet: Packet) -> None:
    packet.kind = "evaluated"


class Evil:
    """Runs code where somebody unpickles it."""

    def __reduce__(self) -> Any:
        return (Path.touch, (PWNED,))


def bomb(packet: Packet) -> bytes:
    header = {"kind": "trained", "meta": packet.meta, "arrays": [[HEAD, "float32", [10**12]]]}
    text = json.dumps(header).encode()
    return MAGIC + len(text).to_bytes(8, "little") + text + b"1234"


def deep(packet: Packet) -> bytes:
    text = b"[" * 10**6
    return MAGIC + len(text).to_bytes(8, "little") + text


def padded(packet: Packet) -> bytes:
    return packet.to_bytes() + bytes(2**23)


def object_array(packet: Packet) -> bytes:
    return packet.to_bytes().replace(b'"float32"', b'"object "', 1)


def logs(**changes: Any) -> Lie:
    def lie(packet: Packet) -> None:
        packet.meta["logs"]["train_loss"] |= changes

    return lie


UPLOADS: dict[str, tuple[Lie, str]] = {
    "a pickle": (lambda packet: pickle.dumps(Evil()), "another format"),
    "an array of objects": (object_array, "can't be read|of dtype"),
    "a bomb": (bomb, "message ends before"),
    "a header without end": (deep, "can't be read"),
    "a message that is too long": (padded, "more than the"),
    "a truncated message": (lambda packet: packet.to_bytes()[:-9], "message ends before"),
    "nothing": (lambda packet: b"", "another format"),
    "another kind": (kind, "answer is 'evaluated'"),
    "NaN": (array(lambda a: a * np.float32("nan")), "upload is not finite"),
    "infinity": (array(lambda a: a * 0 + np.float32("inf")), "upload is not finite"),
    "a huge norm": (array(lambda a: a + np.float32(1e6)), "update norm above"),
    "another shape": (array(lambda a: a[..., :1]), "not float32"),
    "another dtype": (array(lambda a: a.astype(np.float64)), "is float64"),
    "more rows": (array(lambda a: np.concatenate([a, a])), "not float32"),
    "a missing entry": (remove, "is missing"),
    "one more entry": (add, "unknown entry 'upload/model/evil'"),
    "another round": (meta(round=0), "answer has round 0"),
    "a round to come": (meta(round=2), "answer has round 2"),
    "another client's id": (meta(clients=["0"]), "answer has clients"),
    "another federation": (meta(federation="0" * 16), "answer has federation"),
    "a federation that moves the cursor": (meta(federation="\x1b[2Jx"), r"has federation \[2Jx,"),
    "a federation that no file can hold": (meta(federation="\ud800x"), "has federation x,"),
    "a huge count of steps": (meta(steps=[10**9]), "answer has steps"),
    "steps that are no list": (meta(steps=3), "'steps' of trained is a int"),
    "no loss": (without("loss"), "trained lacks 'loss'"),
    "a loss of text": (meta(loss=["low"]), "'loss' holds a str"),
    "an infinite loss": (meta(loss=[float("inf")]), "loss is not finite"),
    "a loss larger than any float": (meta(loss=[10**400]), "int too large"),
    "two losses": (meta(loss=[0.1, 0.1]), "isn't one number"),
    "a state that isn't finite": (meta(sane=[False]), "client state is not finite"),
    "sane of another kind": (meta(sane=["yes"]), "'sane' isn't true or false"),
    "a huge logged value": (logs(values=[1e30]), "is not within"),
    "five logged values": (logs(values=[0.0] * 5), "isn't one number"),
    "options of another form": (logs(options=[1, 2]), "of another form"),
    "a thousand values": (
        meta(logs={str(i): {"values": [0.0], "options": [False, True, None]} for i in range(1000)}),
        "aren't at most 100",
    ),
    "a name that moves the cursor": (
        meta(logs={"\x1b[2J": {"values": [0.0], "options": [False, True, None]}}),
        "a name of another form",
    ),
}


def results(prefix: str = "", **changes: Any) -> Lie:
    """Changes the results of the personal models, or those of the global one."""

    def lie(packet: Packet) -> None:
        found = packet.meta["results"]
        found[prefix] = found[""] | changes

    return lie


EVALUATIONS: dict[str, tuple[Lie, str]] = {
    "a pickle": (lambda packet: pickle.dumps(Evil()), "another format"),
    "another kind": (lambda packet: setattr(packet, "kind", "trained"), "answer is 'trained'"),
    "another number of rounds": (meta(rounds=99), "answer has rounds 99"),
    "another client": (meta(clients=["0"]), "answer has clients"),
    "no results": (meta(results={}), "results are of"),
    "results of another model": (results("other/"), "results are of '', 'other/'"),
    "results that are a list": (meta(results=[]), "'results' of evaluated is a list"),
    "more samples than enrolled": (results(counts=[10**6]), "not a count up to"),
    "fewer samples than none": (results(counts=[-1]), "not a count up to"),
    "counts of text": (results(counts="many"), "isn't one count"),
    "values that are a list": (results(values=[1.0]), "aren't at most 100 by name"),
    "a huge value": (
        results(values={"val_acc": {"values": [1e30], "options": [False, True, None]}}),
        "is not within",
    ),
    "an infinite value": (
        results(values={"val_acc": {"values": [float("inf")], "options": [False, True, None]}}),
        "is not within",
    ),
    "no options": (results(values={"val_acc": {"values": [0.5]}}), "options"),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the server has said; the end is checked here."""
    folder, recipe = tmp_path_factory.mktemp("lies"), recipe_of("FedAvg", len(UPLOADS), 1.0, 3)
    recipe["trainer"] |= {"limit_train_batches": 1, "limit_val_batches": 1}
    recipe["trainer"]["strategy"]["init_args"]["max_update_norm"] = 50.0
    line = LyingLine(make_nodes(recipe, folder, [["0"], ["1"], ["2"]]))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Round \d+ left out 1 of 3 clients")
        trainer, _ = deploy(recipe, folder, line)
    federation = trainer.strategy.federation
    last = len(UPLOADS) - 1
    assert federation.versions.tolist() == [last, NONE, last]
    assert all(leaf.isfinite().all() for leaf in leaves(federation.server))
    return (folder / "server" / "progress.log").read_text().splitlines()


@pytest.mark.parametrize("lie", UPLOADS)
def test_a_lying_upload_is_named_and_left_out(lie: str, said: list[str]) -> None:
    rounds = [text for text in said if "] Round " in text]
    text = rounds[list(UPLOADS).index(lie)]
    assert re.search(rf"3 clients, without 1 \(.*({UPLOADS[lie][1]})", text)
    assert not PWNED.exists()


@pytest.mark.parametrize("lie", EVALUATIONS)
def test_a_lying_evaluation_is_named_and_left_out(lie: str, said: list[str]) -> None:
    named = [text for text in said if "] Evaluation without" in text]
    assert len(named) == len(EVALUATIONS)
    text = named[list(EVALUATIONS).index(lie)]
    assert re.search(rf"without 1: .*({EVALUATIONS[lie][1]})", text)


def test_the_pickle_would_have_been_noticed() -> None:
    assert not PWNED.exists()
    pickle.loads(pickle.dumps(Evil()))
    assert PWNED.exists()
    PWNED.unlink()


ODD: list[Any] = [
    None, True, -1, 0, 10**400, 1e308, float("nan"), float("-inf"), "", "\ud800", "x" * 10**5,
    [], [[]], [None], [True], [10**400], ["\ud800"], {}, {"": {}}, {"\ud800": []},
    json.loads("[" * 500 + "]" * 500),
]  # fmt: skip
"""Values of every kind, for the place of any other."""


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Walk over the places of plain values."""
    yield path
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from paths_of(value[key], (*path, key))


def changed(meta: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Copy plain values with another one in a place."""
    found = copy.deepcopy(meta)
    place: Any = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return found


def test_no_value_in_any_place_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: Counter[str] = Counter()

    def trying(owner: Any, name: str, at: int, wrap: Callable[[Any, Packet], Any]) -> None:
        """Let a reader read an answer with every odd value in every place, before the true one."""
        read = getattr(owner, name)

        def reader(*given: Any) -> Any:
            packet = given[at] if isinstance(given[at], Packet) else given[at].packet
            for path in [*paths_of(packet.meta)][1:] if not tried[name] else ():
                for value in ODD:
                    lie = Packet(packet.kind, changed(packet.meta, path, value), packet.arrays)
                    tried[name] += 1
                    with contextlib.suppress(*UNREADABLE):
                        read(*given[:at], wrap(given[at], lie), *given[at + 1 :])
            return read(*given)

        monkeypatch.setattr(owner, name, reader)

    trying(RemoteCohort, "_read", 1, lambda answer, lie: replace(answer, packet=lie))
    trying(ServerFederation, "_read_evaluation", 1, lambda answer, lie: replace(answer, packet=lie))
    trying(Nodes, "_read_hello", 1, lambda packet, lie: lie)
    recipe = recipe_of("FedAvg", 1, 1.0, 2)
    deploy(recipe, tmp_path, LoopLine(make_nodes(recipe, tmp_path, [["0"], ["1"]])))
    assert len(tried) == 3
    assert min(tried.values()) > 10 * len(ODD)
