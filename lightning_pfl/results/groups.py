"""Runs that differ in their seeds alone, and what each such group is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_pfl.results.runs import Run

MISSING = "-"
FINE_TUNED = "ft/"


@dataclass
class Group:
    """Runs of one method with equal settings, but for the seeds.

    Attributes:
        runs: The runs that count.
        left_out: Runs that were stopped, with fewer rounds.
        tuned: Whether the compared models are fine-tuned ones.
        label: The method, and the settings in which groups of it differ.
        data_label: The settings of the data in which the groups differ.
    """

    runs: list[Run] = field(default_factory=list)
    left_out: list[Run] = field(default_factory=list)
    tuned: bool = False
    label: str = ""
    data_label: str = ""

    @property
    def all_runs(self) -> list[Run]:
        """All runs, those left out at the end."""
        return [*self.runs, *self.left_out]

    @property
    def method(self) -> str:
        """The method, as tables call it."""
        first = self.all_runs[0]
        return (first.settings.method or first.folder.parent.name) + " + FT" * self.tuned

    @property
    def prefix(self) -> str:
        """Prefix of the compared models' values."""
        return FINE_TUNED if self.tuned else ""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the runs, without seeds."""
        return dict(self.all_runs[0].settings.values)


def group_runs(runs: Sequence[Run], counts: Callable[[Run], bool]) -> list[Group]:
    """Put runs with equal settings together, and find labels by which they differ.

    Args:
        runs: The runs.
        counts: Whether a run came far enough.
    """
    groups: dict[tuple[Any, ...], Group] = {}
    for run in runs:
        tuned = any(name.startswith(FINE_TUNED) for name in run.scalars.values)
        # Without settings, the folder above holds a method's seeds.
        where = "" if run.settings.method else str(run.folder.parent)
        key = (run.settings.method, where, tuned, *sorted(map(repr, run.settings.values.items())))
        group = groups.setdefault(key, Group(tuned=tuned))
        (group.runs if counts(run) else group.left_out).append(run)
    _name(list(groups.values()))
    return list(groups.values())


def _name(groups: Sequence[Group]) -> None:
    of_data = differing([{"": "", **_of_data(group)} for group in groups])
    for group in groups:
        group.data_label = _words(_of_data(group), of_data)
    for group in groups:
        alike = [g for g in groups if g.method == group.method and g.data_label == group.data_label]
        names = differing([g.settings for g in alike])
        # How an argument differs follows from the callback that one of the groups lacks.
        label = _words(group.settings, [name for name in names if ".callbacks." not in name])
        if len(alike) > 1 and not label:
            label = _words(group.settings, names)
        group.label = f"{group.method} ({label})" if label else group.method


def _of_data(group: Group) -> dict[str, Any]:
    return group.all_runs[0].settings.data


def differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    """List the names of settings that aren't equal everywhere, in the order of their appearance."""
    names = list(dict.fromkeys(name for each in settings for name in each))
    return [name for name in names if len({repr(each.get(name)) for each in settings}) > 1]


def _words(settings: dict[str, Any], names: Sequence[str]) -> str:
    """Write some settings by the last parts of their names."""
    return ", ".join(
        f"{name.rpartition('.')[2]} {show(settings[name])}" for name in names if name in settings
    )


def show(value: Any) -> str:
    """Write the value of a setting in a table."""
    if value is None:
        return MISSING
    return f"{value:g}" if isinstance(value, float) else str(value)
