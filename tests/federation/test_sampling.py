"""Sampling: uniform without replacement, a function of seed and round alone."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from lightning_pfl.federation.sampling import (
    check_participation,
    cohort_size,
    sample_cohort,
    sample_evaluated,
)

pytestmark = pytest.mark.quick

ELIGIBLE = torch.tensor([2, 3, 5, 7, 11, 13, 17, 19, 23, 29])


@pytest.mark.parametrize(
    ("participation", "clients", "expected"),
    [
        (1.0, 7, 7),
        (0.1, 100, 10),
        (0.1, 30, 3),
        (0.29, 100, 29),
        (0.57, 100, 57),
        (0.1, 5, 1),
        (0.5, 5, 2),
        (0.3, 5, 1),
        (0.9, 2, 1),
        (3, 5, 3),
        (1, 5, 1),
    ],
)
def test_cohort_size_is_the_floor_of_the_fraction_meant_in_decimal(
    participation: float, clients: int, expected: int
) -> None:
    assert cohort_size(participation, clients) == expected


def test_more_clients_than_there_are_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="at most the 10 clients that can take part, but got participation=11",
    ):
        sample_cohort(0, 0, ELIGIBLE, 11)


@pytest.mark.parametrize("bad", [0, 0.0, -1, -0.5, 1.5, True, "0.1", None, float("nan")])
def test_what_is_neither_fraction_nor_count_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match=r"Expected `participation` to be a fraction in \(0, 1\]"):
        check_participation(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("good", [1, 1.0, 0.001, 250])
def test_fractions_and_counts_are_accepted(good: float) -> None:
    assert check_participation(good) == good


def test_a_cohort_is_sorted_without_repetition_and_within_the_eligible() -> None:
    for round in range(50):
        cohort = sample_cohort(1, round, ELIGIBLE, 4)
        assert len(cohort) == 4
        assert torch.equal(cohort, cohort.unique(sorted=True))
        assert set(cohort.tolist()) <= set(ELIGIBLE.tolist())


def test_a_cohort_is_a_function_of_seed_and_round() -> None:
    before = sample_cohort(1, 3, ELIGIBLE, 4)
    torch.manual_seed(99)
    for round in (5, 0, 4):
        sample_cohort(1, round, ELIGIBLE, 4)
    assert torch.equal(sample_cohort(1, 3, ELIGIBLE, 4), before)


@pytest.mark.parametrize("varied", ["seed", "round"])
def test_other_seeds_and_other_rounds_draw_other_cohorts(varied: str) -> None:
    """Two independent cohorts of 4 of 10 are equal with probability 1/210."""
    pairs = [(k, 3) if varied == "seed" else (1, k) for k in range(20)]
    cohorts = {tuple(sample_cohort(*pair, ELIGIBLE, 4).tolist()) for pair in pairs}
    assert len(cohorts) > 15


def test_full_participation_takes_everyone() -> None:
    assert torch.equal(sample_cohort(0, 0, ELIGIBLE, 1.0), ELIGIBLE)


def test_every_client_is_drawn_equally_often() -> None:
    rounds, size = 4000, 3
    counts = torch.zeros(30)
    for round in range(rounds):
        counts[sample_cohort(0, round, ELIGIBLE, size)] += 1
    # A client's count is binomial(rounds, p); 5 standard deviations fail once in 10^5 runs for ten
    # clients.
    p = size / len(ELIGIBLE)
    bound = 5 * (rounds * p * (1 - p)) ** 0.5
    assert (counts[ELIGIBLE] - rounds * p).abs().max() < bound


def test_pairs_are_drawn_together_as_often_as_independence_says() -> None:
    rounds, size, n = 4000, 3, len(ELIGIBLE)
    together = sum(
        {2, 29} <= set(sample_cohort(0, round, ELIGIBLE, size).tolist()) for round in range(rounds)
    )
    p = size * (size - 1) / (n * (n - 1))
    assert abs(together - rounds * p) < 5 * (rounds * p * (1 - p)) ** 0.5


@pytest.mark.parametrize(("clients", "share", "turns"), [(10, 0.3, 4), (10, 5, 2), (7, 6, 2)])
def test_turns_of_an_evaluation_see_every_client(clients: int, share: float, turns: int) -> None:
    """In ceil(clients / size) turns; each pass over the clients has another order."""
    size = cohort_size(share, clients)
    passes = [
        [tuple(sample_evaluated(2, first + turn, clients, share).tolist()) for turn in range(turns)]
        for first in (0, turns)
    ]
    for each in passes:
        assert {client for turn in each for client in turn} == set(range(clients))
        assert all(len(set(turn)) == size and list(turn) == sorted(turn) for turn in each)
    assert passes[0] != passes[1]
    assert torch.equal(sample_evaluated(2, 5, clients, 1.0), torch.arange(clients))


@pytest.mark.parametrize("turn", [0, 2])
def test_each_turn_of_an_evaluation_alone_is_a_uniform_sample(turn: int) -> None:
    """All ten pairs of five clients are equally likely, also in the last turn of a pass, which
    sees a client again. Five standard deviations of a binomial fail once in 10^5 runs."""
    seeds = 4000
    counts = dict.fromkeys(combinations(range(5), 2), 0)
    for seed in range(seeds):
        counts[tuple(sample_evaluated(seed, turn, 5, 2).tolist())] += 1
    p = 1 / len(counts)
    bound = 5 * (seeds * p * (1 - p)) ** 0.5
    assert all(abs(count - seeds * p) < bound for count in counts.values())


def test_more_evaluated_clients_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="`evaluated_clients` to be at most the 3 clients"):
        sample_evaluated(0, 0, 3, 4)
