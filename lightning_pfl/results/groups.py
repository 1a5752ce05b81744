"""Runs that differ in their seeds alone, and what each such group is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lightning_pfl.results.runs import Run
from lightning_pfl.results.settings import Settings

MISSING = "-"
FURTHER = {"ft/": "FT", "knn/": "kNN"}
"""Prefixes of values of other models than the trained ones, and what tables add to the method."""


@dataclass
class Group:
    """Runs of one method with equal settings, but for the seeds.

    Attributes:
        runs: The runs that count.
        left_out: Runs that were stopped, with fewer rounds.
        prefix: Prefix of the compared models' values: fine-tuned ones, if there are some.
        label: The method, and the settings in which groups of it differ.
        data_label: The settings of the data in which the groups differ.
    """

    runs: list[Run] = field(default_factory=list)
    left_out: list[Run] = field(default_factory=list)
    prefix: str = ""
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
        added = f" + {FURTHER[self.prefix]}" if self.prefix else ""
        return (first.settings.method or first.folder.parent.name) + added

    @cached_property
    def first(self) -> Settings:
        """The settings of the run that knows most of them."""
        known = (run.settings for run in self.all_runs if run.settings.is_complete)
        return next(known, self.all_runs[0].settings)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the runs, without seeds."""
        return self.first.values


def group_runs(runs: Sequence[Run], counts: Callable[[Run], bool]) -> list[Group]:
    """Put runs with equal settings together, and find labels by which they differ.

    Args:
        runs: The runs.
        counts: Whether a run came far enough.
    """
    alike: dict[tuple[Any, ...], dict[tuple[str, ...], Group]] = {}
    # Runs of which not all is known come last, and join the one group that has what they logged.
    for run in sorted(runs, key=lambda run: not run.settings.is_complete):
        has = (p for p in FURTHER if any(name.startswith(p) for name in run.scalars.values))
        prefix = next(has, "")
        # Without settings, the folder above holds a method's seeds.
        where = "" if run.settings.method else str(run.folder.parent)
        place = (run.settings.method, where, prefix, *_texts(run.settings.logged))
        groups = alike.setdefault(place, {})
        if run.settings.is_complete or len(groups) != 1:
            group = groups.setdefault(_texts(run.settings.values), Group(prefix=prefix))
        else:
            (group,) = groups.values()
        (group.runs if counts(run) else group.left_out).append(run)
    found = [group for groups in alike.values() for group in groups.values()]
    # What is left out has no row, and makes no difference to the labels of the rows.
    _name(found)
    _name([group for group in found if group.runs])
    return found


def _texts(settings: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(map(repr, settings.items())))


def _name(groups: Sequence[Group]) -> None:
    of_data = [name for name in differing(groups) if name.startswith("data")]
    for group in groups:
        group.data_label = _words(group.settings, of_data)
    of_method: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        of_method.setdefault((group.method, group.data_label), []).append(group)
    for (method, _), alike in of_method.items():
        names = [name for name in differing(alike) if not name.startswith("data")]
        for group in alike:
            # How an argument differs follows from the callback that one of the groups lacks.
            label = _words(group.settings, [name for name in names if ".callbacks." not in name])
            label = label or _words(group.settings, names)
            group.label = f"{method} ({label})" if label else method


def differing(groups: Sequence[Group]) -> list[str]:
    """List the settings that aren't equal in all groups that know them, as they appear."""
    names = dict.fromkeys(name for group in groups for name in group.settings)
    return [name for name in names if len(_values(groups, name)) > 1]


def _values(groups: Sequence[Group], name: str) -> set[str]:
    return {
        repr(group.settings.get(name))
        for group in groups
        if group.first.is_complete or name in group.settings
    }


def _words(settings: Mapping[str, Any], names: Sequence[str]) -> str:
    """Write some settings by the last parts of their names."""
    return ", ".join(
        f"{name.rpartition('.')[2]} {show(settings[name])}" for name in names if name in settings
    )


def show(value: Any) -> str:
    """Write the value of a setting in a table."""
    if value is None:
        return MISSING
    return f"{value:g}" if isinstance(value, float) else str(value)
