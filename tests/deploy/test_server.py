"""A deployment gives the models of the simulation, bit by bit."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl import methods
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.contract.records import ClientInfo, Round
from lightning_pfl.core.tree import Tree, weighted_mean
from lightning_pfl.deploy.loop import LoopLine
from lightning_pfl.deploy.node import Node
from lightning_pfl.deploy.nodes import Presence
from lightning_pfl.deploy.packet import Packet
from lightning_pfl.deploy.server import serve
from lightning_pfl.methods.base import Method
from lightning_pfl.trainer.checkpoint_io import AtomicCheckpointIO
from tests.deploy.setting import (
    HOMES,
    LeftOut,
    deploy,
    differences,
    make_nodes,
    recipe_of,
    simulate,
)

LETTERS, PUBLIC = "write to each other", "needs them on the server and all nodes"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{name: ({}, PUBLIC) for name in methods.__all__ if getattr(methods, name).needs_public_data},
    "GTVMin": ({"graph": "ring"}, LETTERS),
    "HomologicalConstraints": ({"graph": "ring"}, LETTERS),
    "LinearFedRep": ({}, "measures them"),
    "PerAda": ({}, PUBLIC),
    "SheafFMTL": ({"graph": "ring"}, LETTERS),
}
"""Methods that can't be deployed, their settings and the reason; every other one must be equal."""


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=() if method in ("FedMAP", "SCAFFOLD") else pytest.mark.slow)
        for method in methods.__all__
        if method not in REFUSED
    ],
)
def test_models_and_values_equal_those_of_the_simulation(method: str, tmp_path: Path) -> None:
    recipe = recipe_of(method)
    simulated = simulate(recipe, tmp_path)
    trainer, line = deploy(recipe, tmp_path)
    ours, theirs = simulated.strategy.federation, trainer.strategy.federation
    assert differences(ours, theirs, line.nodes) == []
    expected = {k: float(v) for k, v in simulated.callback_metrics.items()}
    found = {k: float(v) for k, v in trainer.callback_metrics.items()}
    assert found.keys() == expected.keys()
    assert [k for k, v in expected.items() if not math.isnan(v) and found[k] != v] == []


class ByLabels(Method):
    """Uses everybody's label counts on the server, and a client's own where it trains."""

    needs_label_counts: ClassVar[bool] = True

    def classes(self, info: ClientInfo) -> Tensor:
        """Count the classes that clients hold, float64 ``(clients,)``."""
        counts = self.known.require_label_counts("ByLabels")[info.index.cpu()]
        return (counts > 0).sum(1).double()

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        factor = 1 + 1e-3 * self.classes(info).float()
        scaled = {
            name: leaf * factor.view(-1, *[1] * (leaf.ndim - 1))
            for name, leaf in state["model"].items()
        }
        return {"model": scaled}, client_state

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        weights = self.classes(info)
        return {"model": weighted_mean(uploads["model"], weights / weights.sum())}


def test_label_counts_reach_those_who_need_them(tmp_path: Path) -> None:
    recipe = recipe_of("FedAvg", rounds=2, limit_val_batches=0)
    recipe["method"] = {"class_path": f"{__name__}.ByLabels"}
    dirichlet = {"class_path": "Dirichlet", "init_args": {"alpha": 0.5}}
    recipe["data"]["init_args"]["partition"] = dirichlet
    simulated = simulate(recipe, tmp_path)
    trainer, line = deploy(recipe, tmp_path)
    ours, theirs = simulated.strategy.federation, trainer.strategy.federation
    assert len(ours.method.classes(ours.info(torch.arange(6), 0)).unique()) > 1
    assert differences(ours, theirs, line.nodes) == []
    hello = Packet.from_bytes(line.sent[0][2])
    assert sum(hello.meta["labels"]["0"]) == hello.meta["counts"]["0"]["train"]["samples"]


AWAY = (1, 2)
"""Rounds in which node 101 is away."""


class AwayLine(LoopLine):
    """A network from which a node is gone for two rounds."""

    round = -1

    def present(self) -> Sequence[Presence]:
        gone = self.round in AWAY
        since = "later" if self.round > max(AWAY) else "first"
        return [
            Presence(node, since=since if node == 101 else "")
            for node in self.nodes
            if not (gone and node == 101)
        ]


class Rounds(FederatedCallback):
    """Says the round to a network."""

    line: AwayLine

    def on_round_start(self, trainer: Any, module: Any, round: Round) -> None:
        self.line.round = round.number
        for _ in range(3):  # who came back says hello and joins, before its time to answer runs
            trainer.strategy.federation.nodes.look()


@pytest.mark.filterwarnings("ignore:Round . left out 2 of 6 clients")
@pytest.mark.parametrize("method", ["SCAFFOLD", pytest.param("FedMAP", marks=pytest.mark.slow)])
def test_a_node_that_is_away_is_left_out_and_goes_on_later(method: str, tmp_path: Path) -> None:
    recipe = recipe_of(method, 4, 1.0, limit_val_batches=0, limit_train_batches=2)
    simulated = simulate(recipe, tmp_path, (LeftOut(AWAY, HOMES[1]),))
    recipe["trainer"]["callbacks"] = [{"class_path": f"{__name__}.Rounds"}]
    line = AwayLine(make_nodes(recipe, tmp_path))
    Rounds.line = line
    trainer, _ = deploy(recipe, tmp_path, line, timeout=0.05)
    ours, theirs = simulated.strategy.federation, trainer.strategy.federation
    assert differences(ours, theirs, line.nodes) == []


class FullLine(LoopLine):
    """A network in which the disk of node 101 is full for two rounds."""

    def send(self, node: int, kind: str, data: bytes) -> str:
        full = node == 101 and kind == "train" and Packet.from_bytes(data).meta["round"] in AWAY
        with pytest.MonkeyPatch.context() as patch:
            if full:
                patch.setattr(AtomicCheckpointIO, "save_checkpoint", no_space)
            return super().send(node, kind, data)


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.filterwarnings("ignore:Round . left out 2 of 6 clients")
def test_a_node_whose_disk_is_full_is_left_out_and_goes_on_later(tmp_path: Path) -> None:
    recipe = recipe_of("SCAFFOLD", 4, 1.0, limit_val_batches=0, limit_train_batches=2)
    simulated = simulate(recipe, tmp_path, (LeftOut(AWAY, HOMES[1]),))
    line = FullLine(make_nodes(recipe, tmp_path))
    trainer, _ = deploy(recipe, tmp_path, line)
    ours, theirs = simulated.strategy.federation, trainer.strategy.federation
    assert differences(ours, theirs, line.nodes) == []
    assert any("without 1 (the node refuses: OSError in" in text for text in log_of(tmp_path))


class Killed(Exception):
    """Stands for SIGKILL of the server."""


class KillServer(FederatedCallback):
    """Ends the server after the nodes have trained, before anything of the round is written."""

    at = 2

    def on_aggregation_start(self, trainer: Any, module: Any, round: Round) -> None:
        if round.number == KillServer.at:
            KillServer.at = -1
            raise Killed


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize(
    "method",
    ["SCAFFOLD", *(pytest.param(name, marks=pytest.mark.slow) for name in ("FedMAP", "Ditto"))],
)
def test_a_server_that_was_killed_goes_on_with_new_nodes(method: str, tmp_path: Path) -> None:
    recipe = recipe_of(method, limit_train_batches=2)
    simulated = simulate(recipe, tmp_path)
    recipe["trainer"]["callbacks"] = [{"class_path": f"{__name__}.KillServer"}]
    KillServer.at = 2
    with pytest.raises(Killed):
        deploy(recipe, tmp_path)
    trainer, line = deploy(recipe, tmp_path)  # and all nodes are new objects over the same disks
    assert any("Resuming" in text for text in log_of(tmp_path))
    ours, theirs = simulated.strategy.federation, trainer.strategy.federation
    assert differences(ours, theirs, line.nodes) == []
    again = [Packet.from_bytes(q).meta["round"] for _, q, _ in line.sent if b'"train"' in q[:40]]
    assert min(again) == 2


def log_of(folder: Path) -> list[str]:
    return (folder / "server" / "progress.log").read_text().splitlines()


def test_the_same_question_gets_the_same_answer_and_changes_nothing(tmp_path: Path) -> None:
    recipe = recipe_of("SCAFFOLD", 2, 1.0, limit_val_batches=0, limit_train_batches=2)
    _, line = deploy(recipe, tmp_path)
    asked = [(node, q, a) for node, q, a in line.sent if Packet.from_bytes(q).kind == "train"]
    node, question, answer = asked[-1]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("version-*.pt")}
    assert line.nodes[node].handle(question) == answer
    restarted = make_nodes(recipe, tmp_path)[node]
    assert restarted.handle(question) == answer
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("version-*.pt")} == before


def test_a_node_whose_states_are_lost_or_damaged_says_so(tmp_path: Path) -> None:
    recipe = recipe_of("SCAFFOLD", 2, 1.0, limit_val_batches=0, limit_train_batches=2)
    _, line = deploy(recipe, tmp_path)
    node, question, _ = next(
        sent for sent in reversed(line.sent) if Packet.from_bytes(sent[1]).kind == "train"
    )
    held = {path: path.read_bytes() for path in tmp_path.rglob("version-*.pt")}
    for path in [*held, *tmp_path.rglob("answer.bin")]:
        path.unlink()

    def reason() -> str:
        refused = Packet.from_bytes(line.nodes[node].handle(question))
        assert refused.kind == "refused"
        return str(refused.meta["reason"])

    assert "should have its state of round 0" in reason()
    for path, state in held.items():
        path.with_name("version-00000000.pt").write_bytes(state[:-100])
    assert "has its state of round 0, but the file on this node is damaged" in reason()


def test_files_of_a_server_that_are_lost_or_damaged_are_named(tmp_path: Path) -> None:
    def served() -> None:
        serve(recipe_of("FedAvg"), LoopLine({}), tmp_path, ["0"])

    begun = {"id": "0" * 16, "seed": 3, "names": ["0"]}
    (tmp_path / "federation.json").write_text(json.dumps(begun))
    (tmp_path / "counts.json").write_text('{"counts": {"0"')
    with pytest.raises(ValueError, match=r"counts.json' to be as it was.*Remove it: the nodes"):
        served()
    (tmp_path / "federation.json").write_bytes(bytes(90))
    with pytest.raises(ValueError, match=r"federation.json' to be as it was.*from a copy"):
        served()
    (tmp_path / "federation.json").unlink()
    (tmp_path / "last.ckpt").touch()
    with pytest.raises(MisconfigurationException, match=r"Bring it back, or take another folder"):
        served()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"federation": "../../etc"}, "isn't 16 hexadecimal digits"),
        ({"digest": {"model": "another"}}, "has another recipe: model differs"),
        ({"names": ["x"]}, "no client '0'"),
    ],
)
def test_a_node_joins_no_other_federation(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    node = Node(recipe_of("FedAvg"), tmp_path, ["0"])
    meta = {"federation": "0" * 16, "names": ["0"], "seed": 0, "digest": node.digest}
    answer = Packet.from_bytes(node.handle(Packet("join", meta | change).to_bytes()))
    assert (answer.kind, reason in answer.meta["reason"]) == ("refused", True)


def test_a_node_refuses_several_sets_of_a_split() -> None:
    class Sets(LightningDataModule):
        def train_dataloader(self) -> Any:
            return [DataLoader(TensorDataset(torch.zeros(2, 1)))]

        def val_dataloader(self) -> Any:
            return {"own": self.train_dataloader(), "shifted": self.train_dataloader()}

    with pytest.raises(ValueError, match=r"`val_dataloader` .* evaluates one set of each split"):
        Node._load(SimpleNamespace(datamodule=Sets()))


@pytest.mark.parametrize("method", [*REFUSED, "FedU"])
def test_what_cannot_be_deployed_is_refused_with_the_reason(method: str, tmp_path: Path) -> None:
    recipe = recipe_of("FedAvg")
    settings, reason = REFUSED.get(method, ({"graph": "ring", "decentralized": True}, LETTERS))
    recipe["method"] = {"class_path": method, "init_args": settings}
    with pytest.raises(MisconfigurationException, match=reason):
        serve(recipe, LoopLine({}), tmp_path, ["0"])


@pytest.mark.parametrize("name", ["HeadFineTuning", "NearestNeighbours", "BestRound"])
def test_a_callback_that_reads_clients_is_refused_before_the_nodes_join(
    name: str, tmp_path: Path
) -> None:
    recipe = recipe_of("FedRep")
    recipe["trainer"]["callbacks"] = [{"class_path": f"lightning_pfl.callbacks.{name}"}]
    with pytest.raises(MisconfigurationException, match=f"but got {name}"):
        serve(recipe, LoopLine({}), tmp_path, ["0"])


@pytest.mark.parametrize("name", ["keep_optimizer_state", "overlap_evaluation"])
def test_a_setting_that_the_nodes_would_not_hear_of_is_refused(name: str, tmp_path: Path) -> None:
    recipe = recipe_of("FedAvg")
    strategy = {"class_path": "lightning_pfl.FederatedStrategy", "init_args": {name: True}}
    recipe["trainer"]["strategy"] = strategy
    with pytest.raises(MisconfigurationException, match=f"Expected {name}=False in a deployment"):
        serve(recipe, LoopLine({}), tmp_path, ["0"])
