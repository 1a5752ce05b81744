"""Runs on disk: where they are, what they logged, and how far they came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lightning_pfl.metrics.history import higher_is_better
from lightning_pfl.metrics.summary import summarize
from lightning_pfl.results.clients import read_table
from lightning_pfl.results.scalars import CSV, EVENTS, Scalars, read_scalars
from lightning_pfl.results.settings import SETTINGS, Settings, read_settings
from lightning_pfl.trainer.client_table import FIXED_COLUMNS

if TYPE_CHECKING:
    from pandas import DataFrame

TABLE = "clients_val.csv"
WINDOW = 10
"""Number of evaluated rounds that are averaged, as in the papers' tables and ``last10/``."""


@dataclass
class Run:
    """A run on disk.

    Attributes:
        folder: Its folder, ``trainer.log_dir``.
        settings: What it was started with.
        scalars: What it logged.
        rounds: Number of rounds of which something was logged.
        begin: The first of them; above 0 for a run that went on in a new folder.
    """

    folder: Path
    settings: Settings
    scalars: Scalars
    rounds: int
    begin: int = 0

    @property
    def finished(self) -> bool:
        """Whether it ended by itself: by its number of rounds, or by an early stop."""
        return self.scalars.ended or self.rounds == self.settings.rounds

    def series(self, name: str, rounds: int | None = None) -> dict[int, float]:
        """Return a value by round, in order, in the first ``rounds`` rounds."""
        last = math.inf if rounds is None else rounds
        return {r: v for r, v in sorted(self.scalars.values.get(name, {}).items()) if r < last}

    def total(self, *names: str) -> dict[int, float]:
        """Sum values by round, and over the rounds so far; empty if nothing was logged."""
        found = [self.scalars.values[name] for name in names if name in self.scalars.values]
        sums, total = {}, 0.0
        for round in sorted(set().union(*found)) if found else ():
            total += sum(values.get(round, 0.0) for values in found)
            sums[round] = total
        return sums

    def clients(self, name: str, rounds: int | None = None) -> dict[str, float]:
        """Return each client's mean of a value over the last evaluated rounds.

        Empty if the run has no table of clients, or the table no such value.
        """
        path = self.folder / TABLE
        table = _read_last(path, name, rounds) if path.is_file() else None
        if table is None or table.empty:
            return {}
        means = table.groupby("client", sort=False)["value"].mean()
        return {str(client): float(value) for client, value in means.items()}

    def __str__(self) -> str:
        """Return the folder as the user knows it, relative to the working folder if below it."""
        here = Path.cwd()
        return str(
            self.folder.relative_to(here) if self.folder.is_relative_to(here) else self.folder
        )


def _read_last(path: Path, name: str, rounds: int | None) -> DataFrame | None:
    """Read a value of the last evaluated rounds, of clients that have one."""
    table = read_table(path, only=name)
    if name not in table.columns:
        return None
    table = table[table[name] != ""]
    if rounds is not None:
        table = table[table["round"] < rounds]
    last = table[table["round"].isin(sorted(table["round"].unique())[-WINDOW:])]
    # As in the statistics over clients, what is NaN is left out.
    return last.assign(value=last[name].astype(float)).dropna(subset="value")


def find_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Find and read runs.

    Args:
        paths: Folders of runs, folders above them, or globs of either.

    Returns:
        The runs, each once, by folder; also those that failed before they had logged a value.

    Raises:
        ValueError: If a path doesn't exist, or there is no run below it.
    """
    found: dict[Path, None] = {}
    for path in paths:
        pattern = str(Path(path).expanduser())
        here = [Path(each) for each in sorted(glob(pattern))]  # noqa: PTH207, absolute ones, too
        below = [folder for each in here for folder in _folders(each)]
        if not below:
            raise ValueError(
                "Expected the folder of a run (`trainer.log_dir`), a folder above runs or a glob, "
                f"but got {str(path)!r}, " + ("which has none." if here else "which isn't there.")
            )
        found |= dict.fromkeys(folder.resolve() for folder in below)
    return [read_run(folder) for folder in sorted(found)]


def _folders(top: Path) -> list[Path]:
    """List the folders of runs at or below a folder."""
    logs, files = (
        {file.parent for name in names for file in top.rglob(name)}
        for names in ((EVENTS, CSV, TABLE), SETTINGS)
    )
    # A run that failed early has left its settings alone; other programs have such files, too.
    return sorted(logs | {folder for folder in files - logs if read_settings(folder).method})


def read_run(folder: Path) -> Run:
    """Read a run's settings and values."""
    scalars = read_scalars(folder)
    rounds = [
        round
        for name, values in scalars.values.items()
        if name.startswith("round/")
        for round in values
    ]
    if not scalars.values and (folder / TABLE).is_file():
        rounds = [*_add_means(folder / TABLE, scalars)]
    settings, last = read_settings(folder), max(rounds, default=-1)
    return Run(folder, settings, scalars, last + 1, min(rounds, default=0))


def _add_means(path: Path, scalars: Scalars) -> list[int]:
    """Add the statistics of a table to a run whose logger keeps its values elsewhere."""
    table = read_table(path)
    for name in table.columns.drop(list(FIXED_COLUMNS)):
        for round, rows in table[table[name] != ""].groupby("round"):
            values = torch.tensor(rows[name].astype(float).to_numpy())
            counts = torch.tensor(rows["num_samples"].to_numpy())
            for statistic, value in summarize(values, counts, higher_is_better(name)).items():
                key = f"{name}/{statistic}" if statistic else str(name)
                scalars.values.setdefault(key, {})[int(round)] = value
    return sorted(int(round) for round in table["round"].unique())
