"""What processes gather and agree on, with threads for processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_pfl.contract.records import Evaluation, LocalResult, LogOptions
from lightning_pfl.core import tree
from lightning_pfl.federation import ranks as module
from lightning_pfl.federation.ranks import (
    Ranks,
    RankShard,
    gather_evaluation,
    gather_work,
)
from lightning_pfl.methods import FedAvg, PerFedAvg
from lightning_pfl.methods.base import Method
from lightning_pfl.testing import fit, quadratic_clients
from tests.federation.thread_ranks import everywhere, trees


@pytest.mark.parametrize("block", [1, 2**26])
@pytest.mark.parametrize("owners", [[1] * 5, [0, 1, 0, 1, 1], [2, 2, 0, 1, 2]])
def test_rows_are_gathered_in_the_order_of_the_clients(
    owners: list[int], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    known = trees(5, torch.float32)

    def work(ranks: Ranks) -> tree.Tree:
        shard = ranks.shard(torch.tensor(owners))
        return shard.all_gather(shard.slice(known) if owners.count(ranks.rank) else {})

    found, line = everywhere(3, work)
    for one in found:
        assert one.keys() == known.keys()
        for name, leaf in tree.named_leaves(known).items():
            assert torch.equal(tree.named_leaves(one)[name], leaf), name
    assert line.calls == (5 if block == 1 else 2)


def test_logged_values_are_in_the_order_of_the_clients() -> None:
    def work(ranks: Ranks) -> tuple[LocalResult, Evaluation]:
        shard = ranks.shard(torch.tensor([1, 0, 1]))
        at = shard.index
        values = {"loss": torch.tensor([0.1, 0.2, 0.3])[at]}
        if ranks.rank == 1:
            values["only here"] = torch.tensor([7.0, 8.0])
        work = LocalResult({}, {}, values, {"loss": LogOptions(True)}, torch.arange(3.0)[at])
        counts = torch.tensor([5, 6, 7])[at]
        each = [[f"client {k}"] for k in torch.arange(3)[at].tolist()]
        trained, said = gather_work(shard, work, ranks.rank)
        found, heard = gather_evaluation(shard, Evaluation(values, counts, {}, each), "x" * 10**5)
        assert said == [0, 1]
        assert heard == ["x" * 10**5] * 2  # more than one call takes
        return trained, found

    for trained, found in everywhere(2, work)[0]:
        assert trained.loss.tolist() == [0, 1, 2]
        assert trained.options == {"loss": LogOptions(True)}
        for values in (trained.logs, found.values):
            expected = torch.tensor([0.1, 0.2, 0.3]).double()  # of the float32 that were logged
            assert torch.equal(values["loss"], expected)
            assert values["only here"].isnan().tolist() == [False, True, False]
            assert values["only here"][[0, 2]].tolist() == [7, 8]
        assert found.counts.tolist() == [5, 6, 7]
        assert found.predictions == [["client 0"], ["client 1"], ["client 2"]]


def test_a_shard_of_some_clients_leaves_them_where_they_are() -> None:
    shard = RankShard(Ranks(1, 2), torch.tensor([4, 1, 3, 0]))
    assert shard.owners.tolist() == [0, 1, 1, 0]
    kept = shard.keep(torch.tensor([True, False, True, True]))
    assert kept.owners.tolist() == [0, 1, 0]
    assert torch.as_tensor(kept.index).tolist() == [1]


def test_processes_take_the_choice_that_was_made_first() -> None:
    store = HashStore()
    one, other = (Ranks(rank, 2, store=lambda: store).agreement() for rank in (1, 0))
    assert one("cpu training_step", "forward") == "forward"
    assert one("cpu training_step", "grad") == "forward"
    assert one("cpu validation_step", "") == ""
    assert one("cpu validation_step", "grad") == ""
    # Another fit agrees anew.
    assert other("cpu training_step", "sequential") == "sequential"
    assert Ranks().agreement()("cpu training_step", "grad") == "grad"


# --- whose clients a process works on ---


@pytest.mark.parametrize(
    ("method", "split", "expected"),
    [
        (
            PerFedAvg,
            True,
            [0, 2],
        ),  # a step on the client's own samples, of which others aren't here
        (PerFedAvg, False, [0, 1, 2, 3]),
        (FedAvg, True, [0, 1, 2, 3]),
    ],
)
def test_models_after_a_fit_are_built_where_their_samples_are(
    method: Callable[[], Method], split: bool, expected: list[int]
) -> None:
    """All states are in all processes then."""
    federation = fit(method(), quadratic_clients([1.0] * 4, [1.0] * 4)).federation
    federation.ranks, federation.splits_data = Ranks(0, 2), split
    federation.owners = torch.tensor([0, 1, 0, 1])
    everyone = torch.arange(4)
    assert everyone[federation.shard(everyone).index].tolist() == expected
