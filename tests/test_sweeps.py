"""Tests whose cases run in part: which of them do."""

from itertools import pairwise

import pytest

from tests.conftest import spread, sweeps


@pytest.mark.parametrize("total", [5, 8, 27, 94])
@pytest.mark.parametrize("count", [1, 3, 8, 24, 200])
def test_so_many_cases_run_and_no_part_of_the_list_is_left_out(total: int, count: int) -> None:
    chosen = sorted(spread(total, count))
    assert len(chosen) == min(total, count)
    part = -(-total // len(chosen))
    assert all(after - before < 2 * part for before, after in pairwise([-1, *chosen, total]))
    assert set(chosen) == spread(total, count)


def test_a_list_that_repeats_is_not_read_in_its_period() -> None:
    """Of 48 pairs of a kind and an engine, those of both engines, and not one of each pair."""
    assert {at % 2 for at in spread(96, 48)} == {0, 1}
    assert {at % 2 for at in spread(96, 24)} == {0, 1}


def test_the_rest_of_a_sweep_does_not_run(request: pytest.FixtureRequest) -> None:
    options = request.config.option
    if options.keyword or "not slow" not in options.markexpr:
        pytest.skip("Other options choose the cases.")
    found = [(count, len(cases)) for count, cases in sweeps(request.session.items)]
    assert all(0 < running <= count for count, running in found)
