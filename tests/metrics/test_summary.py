"""Summaries over clients, against NumPy expressions."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch

from lightning_pfl.metrics import (
    STATISTICS,
    summarize,
)

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("num_clients", [1, 9, 10, 11, 25])
@pytest.mark.parametrize("higher_is_better", [True, False])
def test_matches_numpy(num_clients: int, higher_is_better: bool) -> None:
    values, weights = RNG.random(num_clients), RNG.integers(1, 50, num_clients)
    got = summarize(torch.from_numpy(values), torch.from_numpy(weights), higher_is_better)
    worst_first = np.sort(values) if higher_is_better else np.sort(values)[::-1]
    decile = {1: 1, 9: 1, 10: 1, 11: 2, 25: 3}[num_clients]
    assert got == pytest.approx(
        {
            "": values.mean(),
            "weighted": np.average(values, weights=weights),
            "std": values.std(),
            "worst_decile": worst_first[:decile].mean(),
            "worst": values.min() if higher_is_better else values.max(),
        },
        rel=1e-12,
    )
    assert tuple(got) == STATISTICS


def test_clients_without_samples_are_left_out() -> None:
    values = torch.tensor([0.2, math.nan, 0.6, 0.0])
    weights = torch.tensor([1, 0, 3, 0])
    assert summarize(values, weights) == summarize(values[[0, 2]], weights[[0, 2]])


def test_clients_without_a_number_are_left_out_and_counted() -> None:
    values, weights = torch.tensor([0.2, math.nan, 0.6, math.nan]), torch.tensor([1, 1, 3, 0])
    got = summarize(values, weights)
    assert got.pop("left_out") == 1
    assert got == summarize(values[[0, 2]], weights[[0, 2]])


def test_no_number_at_all_is_not_hidden() -> None:
    got = summarize(torch.tensor([math.nan, math.nan]), torch.tensor([1, 1]))
    assert tuple(got) == STATISTICS
    assert all(math.isnan(value) for value in got.values())


def test_order_of_clients_does_not_matter() -> None:
    values, weights = torch.rand(13, dtype=torch.float64), torch.arange(1, 14)
    order = torch.randperm(13)
    assert summarize(values[order], weights[order]) == pytest.approx(
        summarize(values, weights), rel=1e-12
    )


@pytest.mark.parametrize("drawn", [2, 5, 6])
def test_estimates_of_some_clients_are_right_on_average_over_all_draws(drawn: int) -> None:
    """All ways to draw some of seven clients: the mean of the estimates is the full mean, and the
    mean of the squared standard errors is the estimates' variance, both exactly."""
    values, weights = RNG.random(7), RNG.integers(1, 50, 7)
    estimates, errors = [], []
    for some in combinations(range(7), drawn):
        part, counts = (torch.from_numpy(each[list(some)]) for each in (values, weights))
        got = summarize(part, counts, share=drawn / 7)
        # Of these seven, n = drawn: NumPy's variance with n - 1, and the share that isn't seen.
        expected = np.sqrt((1 - drawn / 7) * values[list(some)].var(ddof=1) / drawn)
        assert got["standard_error"] == pytest.approx(expected, rel=1e-12)
        estimates.append(got[""])
        errors.append(got["standard_error"])
    assert len(estimates) == math.comb(7, drawn)
    assert np.mean(estimates) == pytest.approx(values.mean(), rel=1e-12)
    assert np.square(errors).mean() == pytest.approx(np.var(estimates), rel=1e-10)


def test_all_clients_leave_nothing_to_chance_and_one_client_shows_no_spread() -> None:
    assert "standard_error" not in summarize(torch.rand(3), torch.ones(3), share=1.0)
    assert math.isnan(summarize(torch.rand(1), torch.ones(1), share=0.5)["standard_error"])
    nothing = summarize(torch.tensor([math.nan]), torch.ones(1), share=0.5)
    assert math.isnan(nothing["standard_error"])


class TestGuards:
    @pytest.mark.parametrize("bad", [0.0, -0.5, 1.5, math.nan])
    def test_share(self, bad: float) -> None:
        with pytest.raises(ValueError, match=r"Expected `share` to be in \(0, 1\], but got share="):
            summarize(torch.rand(2), torch.ones(2), share=bad)

    @pytest.mark.parametrize("values", [torch.rand(3), torch.rand(2, 2), torch.tensor(1.0)])
    def test_shapes(self, values: torch.Tensor) -> None:
        with pytest.raises(ValueError, match=r"Expected `values` and `weights` to be vectors of"):
            summarize(values, torch.ones(2))

    @pytest.mark.parametrize("bad", [-1.0, math.nan])
    def test_weights(self, bad: float) -> None:
        with pytest.raises(ValueError, match=r"Expected `weights` to be non-negative, but got"):
            summarize(torch.rand(2), torch.tensor([1.0, bad]))

    def test_no_samples_at_all(self) -> None:
        message = r"positive for at least one client, but got 2 clients without samples"
        with pytest.raises(ValueError, match=message):
            summarize(torch.rand(2), torch.zeros(2))
