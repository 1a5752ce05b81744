"""Notes on the runs of a comparison for its reader, in sentences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from lightning_pfl.metrics.summary import LEFT_OUT
from lightning_pfl.results.groups import Group
from lightning_pfl.results.runs import Run

NAMED = 5
"""Largest number of runs that a note names."""


def notes_of(
    groups: Sequence[Group], every: Sequence[Group], metric: str, rounds: int | None
) -> list[str]:
    """Say which runs are left out, what is odd about the others, and what ± does not cover.

    Args:
        groups: The groups with runs that count.
        every: These and those without.
        metric: The compared value.
        rounds: The number of rounds after which runs are compared, or None.
    """
    found = [*_left_out(every, metric, rounds), *_without_a_number(groups, metric, rounds)]
    for group in groups:
        found += _of_group(group, metric, rounds)
    for data in dict.fromkeys(group.data_label for group in groups):
        found += _of_data([group for group in groups if group.data_label == data], rounds)
    splits = {run.settings.data_seed for group in groups for run in group.runs}
    if len(splits) == 1 and None not in splits and any(len(g.runs) > 1 for g in groups):
        found.append(
            f"All runs have data.seed {min(s for s in splits if s is not None)}, so ± is over "
            "the seeds of training on one split of the data. Vary data.seed, too, for more."
        )
    return list(dict.fromkeys(found))


def _left_out(groups: Sequence[Group], metric: str, rounds: int | None) -> Iterator[str]:
    """Name the runs that don't count, a sentence for each reason."""
    reasons: dict[str, list[Run]] = {}
    for run in (run for group in groups for run in group.left_out):
        reasons.setdefault(_why_left_out(run, metric, rounds), []).append(run)
    for reason, runs in reasons.items():
        yield f"Left out, {reason}: {_names(runs)}."
    stopped = [run.rounds for group in groups for run in group.left_out if run.rounds]
    if stopped and rounds is None:
        yield f"Pass --rounds {min(stopped)} to compare all runs that came so far."


def _without_a_number(groups: Sequence[Group], metric: str, rounds: int | None) -> Iterator[str]:
    """Name the runs whose statistics leave clients out, a sentence for each number of them."""
    counts: dict[float, list[Run]] = {}
    for group in groups:
        for run in group.runs:
            key = f"{group.prefix}{metric}/{LEFT_OUT}"
            if count := max(run.series(key, rounds).values(), default=0):
                counts.setdefault(count, []).append(run)
    for count, runs in counts.items():
        yield (
            f"{_names(runs)}: up to {count:.0f} clients of a round have no number for {metric}. "
            "The statistics leave them out."
        )


def _names(runs: Sequence[Run]) -> str:
    more = f" and {len(runs) - NAMED} more" if len(runs) > NAMED else ""
    return ", ".join(map(str, runs[:NAMED])) + more


def _why_left_out(run: Run, metric: str, rounds: int | None) -> str:
    if not run.rounds:
        tested = any(name.startswith("test") for name in run.scalars.values)
        if tested:
            return "a test alone"
        return "failed or stopped in the first round, or logged elsewhere"
    far = run.finished if rounds is None else run.rounds >= rounds
    if far:
        return f"without {metric}"
    return f"stopped after {run.rounds} of {run.settings.rounds or 'more'} rounds"


def _of_group(group: Group, metric: str, rounds: int | None) -> Iterator[str]:
    """Say which runs broke, have gaps or count twice."""
    names = (group.prefix + metric, metric)
    for run in group.runs:
        if any(math.isnan(v) for name in names for v in [*run.series(name).values()][-1:]):
            yield f"{run} ended in nan: a model of {group.label} broke."
    for run in group.runs:
        if run.begin:
            yield (
                f"{run} has no rounds before {run.begin}: it went on in a new folder. Its MB, "
                "seconds and means are of its own rounds alone."
            )
    seeds = Counter((run.settings.seed, run.settings.data_seed) for run in group.runs)
    for (seed, _), count in seeds.items():
        if count > 1 and seed is not None:
            yield f"{group.label} has {count} runs of seed {seed}, which all count. Remove copies."


def _of_data(groups: Sequence[Group], rounds: int | None) -> Iterator[str]:
    """Say how groups of one kind of data differ that are compared with each other."""
    lengths = sorted({run.rounds for group in groups for run in group.runs})
    if rounds is None and len(lengths) > 1:
        yield (
            f"Runs differ in their number of rounds ({', '.join(map(str, lengths))}). Pass "
            f"--rounds {lengths[0]} to compare them after as many."
        )
    if len({tuple(sorted({str(run.settings.seed) for run in g.runs})) for g in groups}) > 1:
        yield "Methods differ in the seeds that they were run with."
