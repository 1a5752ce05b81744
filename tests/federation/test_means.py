"""The mean over the clients of all processes, with threads for processes."""

from __future__ import annotations

import pytest
import torch

from lightning_pfl.core import tree
from lightning_pfl.federation import means
from lightning_pfl.federation.means import mean_over_ranks
from lightning_pfl.federation.ranks import Ranks, form_of
from tests.core.exact_sums import of_exact_sums
from tests.federation.thread_ranks import everywhere, trees


@pytest.mark.parametrize("owners", [[0] * 6, [0, 1, 0, 1, 1, 0], [2, 2, 0, 0, 2, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_processes_average_to_the_bits_of_one(dtype: torch.dtype, owners: list[int]) -> None:
    uploads, weights = trees(6, dtype), torch.rand(6, dtype=torch.float64)
    weights /= weights.sum()

    def work(ranks: Ranks) -> tree.Tree:
        shard = ranks.shard(torch.tensor(owners))
        mine = shard.slice(uploads) if len(shard.slice({"": weights})[""]) else {}
        return mean_over_ranks(shard, mine, shard.slice({"": weights})[""])

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
        return mean_over_ranks(shard, mine, shard.slice({"": weights})[""], form_of(uploads))

    monkeypatch.setattr(means, "WORTH_A_CALL", 1)
    found, line = everywhere(3, work)
    for name, leaf in uploads.items():
        expected = leaf.amax(0)
        if leaf.is_floating_point():
            expected = of_exact_sums(leaf, weights)
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
        return mean_over_ranks(shard, shard.slice(uploads), weights[:1], form_of(uploads))

    found, line = everywhere(2, work)
    for one in found:
        assert torch.equal(one["w"], row)
    assert line.calls == 1


def test_no_client_has_no_mean() -> None:
    nobody = torch.tensor([], dtype=torch.int64)
    found, _ = everywhere(2, lambda ranks: mean_over_ranks(ranks.shard(nobody), {}, torch.empty(0)))
    assert found == [{}, {}]
