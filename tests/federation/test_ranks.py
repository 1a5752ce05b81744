"""Clients dealt to processes, and what processes add up and gather, with threads for processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_pfl.contract.records import Evaluation, LocalResult, LogOptions
from lightning_pfl.core import tree
from lightning_pfl.core.sums import sum_above
from lightning_pfl.federation import ranks as module
from lightning_pfl.federation.ranks import (
    Ranks,
    RankShard,
    deal,
    deal_evenly,
    form_of,
    gather_evaluation,
    gather_work,
)
from lightning_pfl.methods import FedAvg, PerFedAvg
from lightning_pfl.methods.base import Method
from lightning_pfl.testing import fit, quadratic_clients


class Line:
    """What the threads of a test share."""

    def __init__(self, size: int) -> None:
        self.barrier, self.said, self.calls = Barrier(size, timeout=20), [None] * size, 0


class ThreadRanks(Ranks):
    """Processes that are threads."""

    def __init__(self, rank: int, size: int, line: Line) -> None:
        super().__init__(rank, size)
        self.line = line

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        said: list[Any] = self.line.said
        mine = {distributed.all_reduce: 0}.get(function, 1)
        said[self.rank] = args[mine].clone() if isinstance(args[mine], Tensor) else args[mine]
        self.line.calls += self.rank == 0
        self.line.barrier.wait()
        found = list(said)
        self.line.barrier.wait()
        if function is distributed.all_reduce:
            largest = args[1] == distributed.ReduceOp.MAX
            stacked = torch.stack(found)
            args[0].copy_(stacked.amax(0) if largest else stacked.sum(0))
        elif function is distributed.all_gather:
            assert {len(each) for each in found} == {len(args[1])}  # as backends require
            for place, value in zip(args[0], found, strict=True):
                place.copy_(value)
        else:
            args[0][:] = found


def everywhere(size: int, work: Callable[[ThreadRanks], Any]) -> tuple[list[Any], Line]:
    """Do the work in all processes; return what each finds."""
    line = Line(size)
    with ThreadPoolExecutor(size) as pool:
        runs = [pool.submit(work, ThreadRanks(rank, size, line)) for rank in range(size)]
    return [run.result() for run in runs], line


def trees(count: int, dtype: torch.dtype) -> tree.Tree:
    generator = torch.Generator().manual_seed(count)
    spread = torch.logspace(-9, 9, 35, dtype=torch.float64).view(5, 7)
    drawn = torch.randn(count, 5, 7, generator=generator, dtype=torch.float64) * spread
    return {
        "model": {
            "w": drawn.to(dtype),
            "half": drawn[:, 0].bfloat16(),
            "steps": torch.randint(-(2**60), 2**60, (count,), generator=generator),
            "mask": torch.rand(count, 3, generator=generator) < 0.3,
        },
        "nothing": {},
    }


@pytest.mark.parametrize("owners", [[0] * 6, [0, 1, 0, 1, 1, 0], [2, 2, 0, 0, 2, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_processes_average_to_the_bits_of_one(dtype: torch.dtype, owners: list[int]) -> None:
    uploads, weights = trees(6, dtype), torch.rand(6, dtype=torch.float64)
    weights /= weights.sum()

    def work(ranks: Ranks) -> tree.Tree:
        shard = ranks.shard(torch.tensor(owners))
        mine = shard.slice(uploads) if len(shard.slice({"": weights})[""]) else {}
        return shard.mean(mine, shard.slice({"": weights})[""])

    found, line = everywhere(3, work)
    expected = tree.named_leaves(tree.weighted_mean(uploads, weights))
    for one in found:
        assert one.keys() == uploads.keys()
        for name, leaf in tree.named_leaves(one).items():
            assert leaf.dtype == expected[name].dtype
            assert torch.equal(leaf, expected[name]), name
    # The form, the range of each of three dtypes, and the sums.
    assert line.calls <= 1 + 3 + 1


def large_trees(count: int) -> tree.Tree:
    """Uploads that are large enough for plain sums, with numbers that round with difficulty."""
    generator = torch.Generator().manual_seed(count)
    drawn = torch.randn(count, 300, 200, generator=generator)
    drawn[:, 0, :5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1e-45])
    halfway = torch.ones(count, 50)
    halfway[0] += torch.finfo(torch.float32).eps  # of two: halfway between two numbers
    return {
        "w": drawn[:, 1:],
        "not finite": drawn[:, 0],
        "halfway": halfway,
        "half": torch.randn(count, 40, generator=generator).bfloat16(),
        "double": torch.randn(count, 7, generator=generator, dtype=torch.float64),
        "steps": torch.arange(count) + 2**60,
        "empty": torch.empty(count, 0),
    }


@pytest.mark.parametrize("owners", [[0] * 7, [0, 1, 0, 1, 1, 0, 1], [2, 2, 0, 0, 2, 0, 2], [1, 2]])
@pytest.mark.parametrize("equal", [True, False])
def test_plain_sums_of_large_uploads_have_the_bits_of_exact_ones(
    owners: list[int], equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = large_trees(len(owners))
    weights = torch.ones(len(owners)) if equal else torch.rand(len(owners)) + 0.1
    weights = weights / weights.sum()  # to 1 but for rounding

    def work(ranks: Ranks) -> tree.Tree:
        shard = ranks.shard(torch.tensor(owners))
        mine = shard.slice(uploads) if len(shard.slice({"": weights})[""]) else {}
        return shard.mean(mine, shard.slice({"": weights})[""], form_of(uploads))

    monkeypatch.setattr(module, "WORTH_A_CALL", 1)
    found, line = everywhere(3, work)
    for name, leaf in uploads.items():
        expected = leaf.amax(0)
        if leaf.is_floating_point():
            low, total = sum_above(leaf, weights)
            expected = (low.double() + total).to(leaf.dtype)
        for one in found:
            assert one[name].dtype == leaf.dtype
            assert one[name].shape == leaf.shape[1:]
            assert torch.equal(one[name].nan_to_num(7.0), expected.nan_to_num(7.0)), name
    # The plain sums, the range of each of three dtypes, and the exact sums.
    assert line.calls <= 1 + 3 + 1


def test_plain_sums_alone_are_sent_where_they_round_for_certain() -> None:
    # Means that are exact in single precision: nothing is near to halfway.
    row = torch.arange(2.0**16, 2.0**17)
    uploads = {"w": row.repeat(2, 1)}
    weights = torch.full((2,), 0.5)

    def work(ranks: Ranks) -> tree.Tree:
        shard = ranks.shard(torch.arange(2))
        return shard.mean(shard.slice(uploads), weights[:1], form_of(uploads))

    found, line = everywhere(2, work)
    for one in found:
        assert torch.equal(one["w"], row)
    assert line.calls == 1


def test_no_client_has_no_mean() -> None:
    nobody = torch.tensor([], dtype=torch.int64)
    found, _ = everywhere(2, lambda ranks: ranks.shard(nobody).mean({}, torch.empty(0)))
    assert found == [{}, {}]


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


class TestDeal:
    def test_equal_clients_are_dealt_evenly(self) -> None:
        owners = deal([2.0] * 10, 3)
        assert sorted(owners.count(rank) for rank in range(3)) == [3, 3, 4]

    def test_the_largest_clients_come_first(self) -> None:
        # 6 | 5 | then 4 to the second, 3 to the first, 2 to both's 9: 9 + 2 and 9.
        assert deal([4.0, 2.0, 6.0, 3.0, 5.0], 2) == [1, 0, 0, 0, 1]

    def test_as_few_states_move_as_need_to(self) -> None:
        assert deal([1.0] * 10, 2, homes=[0] * 7 + [1] * 3) == [0] * 5 + [1] * 5
        even = [0, 1, 1, 0]
        assert deal([1.0, 1.0, 1.0, 1.0], 2, homes=even) == even

    def test_a_little_more_to_do_moves_no_state(self) -> None:
        costs, homes = [52.0, 48.0], [0, 1]
        assert deal(costs, 2, homes) == homes
        assert deal([30.0, 30.0, 30.0, 31.0], 2, [0, 0, 1, 1]) == [0, 0, 1, 1]

    def test_clients_without_work_are_dealt_evenly_too(self) -> None:
        assert sorted(deal([0.0] * 4, 2)) == [0, 0, 1, 1]
        assert deal([], 2) == []


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 7, 100])
def test_owned_clients_and_samples_are_about_as_many(size: int, count: int) -> None:
    sizes = torch.distributions.LogNormal(4.0, 0.8)
    torch.manual_seed(count)
    samples = sizes.sample((count,)).long()
    owners = deal_evenly(samples, size)
    clients = torch.bincount(owners, minlength=size)
    held = torch.bincount(owners, samples.double(), minlength=size)
    assert clients.max() - clients.min() <= 1
    # Neighbours in the order differ by at most the largest client all together.
    assert held.max() - held.min() <= samples.max()


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
