"""Secure aggregation: means without models, by Flower's protocol in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.deploy.loop import LoopLine
from lightning_pfl.deploy.node import Node
from lightning_pfl.deploy.nodes import Presence
from lightning_pfl.deploy.packet import Packet, PacketError
from lightning_pfl.deploy.secure import (
    LEVELS,
    MODULUS,
    Aggregation,
    Masks,
    check_masked,
    draw_masks,
    from_bytes,
    to_bytes,
)
from lightning_pfl.deploy.server import serve
from tests.deploy.setting import CLIENTS, HOMES, LeftOut, leaves_of, make_nodes, recipe_of, simulate

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="Flower needs Python 3.11"),
    pytest.mark.usefixtures("a_task"),
]
WEIGHTS = {1: 3.0, 2: 1.0, 3: 2.0, 4: 0.5}
CLIP = 4.0
NAMES = [str(client) for client in range(CLIENTS)]
OWNERS = {name: str(100 + k) for name in NAMES for k, home in enumerate(HOMES) if name in home}


def models() -> dict[int, Tensor]:
    torch.manual_seed(0)
    return {party: torch.rand(16).double() * 2 - 1 for party in WEIGHTS}


def aggregate(
    found: dict[int, Tensor],
    gone: Callable[[int, int], bool] = lambda stage, party: False,
    lie: Callable[[int, dict[int, Any]], None] = lambda stage, answers: None,
) -> tuple[Aggregation, list[dict[int, Any]]]:
    """Run the protocol; `gone` says who doesn't answer in which stage, from 0."""
    nodes = {party: Masks() for party in WEIGHTS}
    said: list[dict[int, Any]] = []

    def ask(records: Mapping[int, Any], training: bool) -> dict[int, Any]:
        answers = {}
        for party, record in records.items():
            if not gone(len(said), party):
                model = (lambda k=party: (found[k], WEIGHTS[k])) if training else None
                sent = from_bytes(to_bytes(record))  # as it travels
                answers[party] = nodes[party].answer(party, sent, model)
        lie(len(said), answers)
        said.append(answers)
        return {party: from_bytes(to_bytes(record)) for party, record in answers.items()}

    aggregation = Aggregation(WEIGHTS, CLIP, ask)
    aggregation.run()
    return aggregation, said


def error(aggregation: Aggregation, found: dict[int, Tensor], parties: set[int]) -> float:
    """The largest difference to the weighted mean of some parties' entries."""
    assert aggregation.mean is not None
    total = sum(WEIGHTS[k] for k in parties)
    exact = torch.stack([WEIGHTS[k] / total * found[k] for k in parties]).sum(0)
    return float(np.abs(aggregation.mean - exact.numpy()).max())


def bound(parties: set[int]) -> float:
    """A node's entries and its weight are each rounded to a level."""
    ratios = sum(WEIGHTS[k] for k in parties) / max(WEIGHTS.values())
    return len(parties) * (2 * CLIP + 1) / LEVELS / ratios


@pytest.mark.parametrize(
    ("stage", "party", "included"),
    [(9, 0, {1, 2, 3, 4}), (0, 2, {1, 3, 4}), (1, 2, {1, 3, 4}), (2, 2, {1, 3, 4})],
    ids=["all", "gone at the setup", "gone before the shares", "gone before the masked model"],
)
def test_the_mean_is_that_of_who_stayed(stage: int, party: int, included: set[int]) -> None:
    found = models()
    aggregation, _ = aggregate(found, lambda s, k: s >= stage and k == party)
    assert aggregation.included == included
    assert error(aggregation, found, included) <= bound(included)


def test_who_leaves_after_its_masked_model_is_in_the_mean() -> None:
    found = models()
    aggregation, _ = aggregate(found, lambda s, k: s == 3 and k == 2)
    assert aggregation.included == {1, 2, 3, 4}
    assert error(aggregation, found, {1, 2, 3, 4}) <= bound({1, 2, 3, 4})


def test_there_is_no_mean_if_too_few_stay() -> None:
    aggregation, _ = aggregate(models(), lambda s, k: s >= 2 and k in {2, 3})
    assert aggregation.mean is None


def test_what_is_sent_looks_like_noise_and_differs_each_time() -> None:
    from flwr.common import bytes_to_ndarray

    sent = []
    for _ in range(2):
        _, said = aggregate({k: torch.zeros(10000).double() for k in WEIGHTS})
        record = said[2][1].config_records["secaggplus_configs"]
        sent.append(bytes_to_ndarray(record["masked_params"][1]))
    first, second = (each / MODULUS for each in sent)
    for each in (first, second):  # uniform on [0, 1): the standard error of the mean is 0.003
        assert abs(each.mean() - 0.5) < 0.02
        assert abs(each.std() - 12**-0.5) < 0.02
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.06


def test_masks_are_the_key_stream_of_the_whole_secret() -> None:
    (one,) = draw_masks(b"a" * 32, MODULUS, [(2, 3)])
    (same,) = draw_masks(b"a" * 32, MODULUS, [(2, 3)])
    # Flower folds a secret into 32 bits, which are 0 for both of these.
    (other,) = draw_masks(b"b" * 32, MODULUS, [(2, 3)])
    assert (one == same).all()
    assert (one != other).any()


@pytest.mark.parametrize(
    ("name", "value"),
    [("sample_num", 2), ("share_num", 3), ("threshold", 2), ("target_range", 2), ("mod_range", 1)],
)
def test_a_node_refuses_masks_that_are_no_secret(name: str, value: int) -> None:
    from flwr.app import ConfigRecord, RecordDict

    good: dict[str, Any] = {"sample_num": 4, "share_num": 4, "threshold": 3, "clipping_range": 1.0}
    good |= {"target_range": LEVELS, "mod_range": MODULUS, "max_weight": 1.0, "stage": "setup"}
    Masks().answer(1, RecordDict({"secaggplus_configs": ConfigRecord(dict(good))}))
    bad = RecordDict({"secaggplus_configs": ConfigRecord(good | {name: value})})
    with pytest.raises(PacketError, match="no secret"):
        Masks().answer(1, bad)


def test_a_node_keeps_one_of_the_masks_of_each_node() -> None:
    from flwr.app import ConfigRecord, RecordDict

    asked = ConfigRecord({"stage": "unmask", "active_nids": [1, 2, 3], "dead_nids": [2]})
    with pytest.raises(PacketError, match="no secret"):
        Masks().answer(1, RecordDict({"secaggplus_configs": asked}))


def test_shares_that_are_a_lie_end_in_no_mean() -> None:
    def lie(stage: int, answers: dict[int, Any]) -> None:
        if stage == 3:
            answers[1].config_records["secaggplus_configs"]["shares"] = [b"?"] * 4

    assert aggregate(models(), lie=lie)[0].mean is None


def test_a_masked_model_must_have_its_form() -> None:
    _, said = aggregate(models())
    record = said[2][1]
    check_masked(record, 16)
    with pytest.raises(PacketError, match="isn't 17 numbers"):
        check_masked(record, 17)
    with pytest.raises(PacketError, match="another form"):
        check_masked(said[1][1], 16)
    parts = record.config_records["secaggplus_configs"]["masked_params"]
    record.config_records["secaggplus_configs"]["masked_params"] = [parts[0], parts[1][:-8]]
    with pytest.raises(PacketError, match="isn't 16 numbers"):
        check_masked(record, 16)


def test_what_is_no_record_is_refused() -> None:
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    array = ArrayRecord({"a": Array("uint8", (3,), "packet", b"abc")})
    good = to_bytes(RecordDict({"c": ConfigRecord({"n": 1, "l": [1.5]}), "a": array}))
    assert from_bytes(good).config_records["c"]["n"] == 1
    draw, refused = np.random.default_rng(0), 0
    for _ in range(3000):
        data = good.copy()
        data[draw.integers(len(data), size=3)] = draw.integers(256, size=3)
        try:
            from_bytes(data)
        except PacketError:
            refused += 1
    assert refused > 1000


def test_a_model_beyond_the_clipping_range_is_named(caplog: pytest.LogCaptureFixture) -> None:
    found = models()
    found[2][0] = 5
    assert aggregate(found)[0].mean is None
    assert "an entry of the model is beyond clipping_range=4.0" in caplog.text


class Named(LoopLine):
    """A network in which nodes have keys."""

    def present(self) -> Sequence[Presence]:
        return [Presence(node, str(node)) for node in self.nodes]


class Leaver(Named):
    """A network in which node 101 doesn't train, and so leaves its masks behind."""

    def send(self, node: int, kind: str, data: bytes) -> str:
        if node == 101 and kind == "train":
            return "nobody"
        return super().send(node, kind, data)


def plain_models(line: LoopLine) -> list[str]:
    """Name the uploads that were sent as they are."""
    return [
        path
        for _, _, data in line.sent
        for path, array in Packet.from_bytes(data).arrays.items()
        if path.startswith("upload/") and array.nbytes
    ]


@pytest.mark.parametrize("method", ["FedAvg", pytest.param("FedRep", marks=pytest.mark.slow)])
def test_rounds_with_secure_aggregation_follow_the_simulation(method: str, tmp_path: Path) -> None:
    recipe = recipe_of(method, rounds=2, participation=1.0, limit_val_batches=0)
    simulated = simulate(recipe, tmp_path)
    line = Named(make_nodes(recipe, tmp_path))
    trainer: Any = serve(recipe, line, tmp_path / "server", OWNERS, pause=0, secure=8.0)
    assert plain_models(line) == []
    ours = leaves_of(simulated.strategy.federation.server)
    found = leaves_of(trainer.strategy.federation.server)
    assert ours.keys() == found.keys()
    for path, leaf in found.items():  # a second round starts from where the first one ended
        assert torch.allclose(leaf, ours[path], rtol=0, atol=2e-5), path
    assert trainer.strategy.federation.versions.tolist() == [1] * len(NAMES)


@pytest.mark.filterwarnings("ignore:Round . left out 2 of 6 clients")
def test_the_mean_is_that_of_the_nodes_that_stayed(tmp_path: Path) -> None:
    recipe = recipe_of("FedAvg", rounds=1, participation=1.0, limit_val_batches=0)
    simulated = simulate(recipe, tmp_path, (LeftOut([0], HOMES[1]),))
    line = Leaver(make_nodes(recipe, tmp_path))
    trainer: Any = serve(recipe, line, tmp_path / "server", OWNERS, timeout=5, pause=0, secure=8.0)
    ours = leaves_of(simulated.strategy.federation.server)
    for path, leaf in leaves_of(trainer.strategy.federation.server).items():
        assert torch.allclose(leaf, ours[path], rtol=0, atol=1e-5), path
    versions = trainer.strategy.federation.versions.tolist()
    assert [NAMES[k] for k, version in enumerate(versions) if version < 0] == HOMES[1]


def test_a_node_may_train_for_such_a_server_alone(tmp_path: Path) -> None:
    recipe = recipe_of("FedAvg", rounds=1, participation=1.0, limit_val_batches=0)
    nodes = {k: Node(recipe, tmp_path / str(k), [n], secure=True) for k, n in enumerate(NAMES[:1])}
    line = LoopLine(nodes)
    with (
        pytest.warns(UserWarning, match="left out 1 of 1"),
        pytest.raises(RuntimeError, match="this node trains with secure aggregation alone"),
    ):
        serve(recipe, line, tmp_path / "server", NAMES[:1], pause=0)


def test_a_method_that_needs_more_than_a_mean_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="FedMAP with `secure_aggregation`"):
        serve(recipe_of("FedMAP"), LoopLine({}), tmp_path, OWNERS, secure=8.0)
