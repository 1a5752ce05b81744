"""``compare``: the results of many runs side by side."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_pfl.metrics.history import AT_END, higher_is_better
from lightning_pfl.results.figures import Line
from lightning_pfl.results.groups import FURTHER, Group, differing, group_runs, show
from lightning_pfl.results.notes import NAMED, notes_of
from lightning_pfl.results.page import Page, Section
from lightning_pfl.results.paired import Paired, pair
from lightning_pfl.results.runs import WINDOW, Run, find_runs

if TYPE_CHECKING:
    from pandas import DataFrame

BYTES = ("round/bytes_down", "round/bytes_up")
BASELINES = ("LocalOnly", "FedAvg")
MEGA = 1e6


def compare(
    *runs: str | Path,
    metric: str | None = None,
    rounds: int | None = None,
    baselines: Sequence[str] = BASELINES,
) -> Comparison:
    """Compare runs: means over seeds, differences over clients, and a page of pictures.

    Runs with equal settings but for the seeds are one group. What is compared, and what the groups
    are sorted by, are values of the validation data; values of the test data are shown beside them
    and choose nothing. Runs that were stopped or have not enough rounds are left out and named in
    :attr:`Comparison.notes`.

    Needs pandas (``lightning-pfl[tables]``); the page also needs matplotlib
    (``lightning-pfl[plots]``).

    Args:
        *runs: Folders of runs (``trainer.log_dir``), folders above them, or globs of either.
        metric: The compared validation value, such as ``"val_acc"``. None takes the first one that
            most runs evaluated for all clients and for which larger is better.
        rounds: Compare after this many rounds, also runs that went on or were stopped later. None
            compares finished runs, each after its last round.
        baselines: Methods that the others are compared with, client by client, where there are
            runs of them.

    Returns:
        The comparison: ``print(comparison)``, data frames, ``comparison.to_html("page.html")``.

    Raises:
        ValueError: If a path holds no run, no run has the metric, or ``rounds`` is below 1.

    Example:
        >>> compare("nowhere/at/all")
        Traceback (most recent call last):
        ...
        ValueError: Expected the folder of a run ... but got 'nowhere/at/all', which isn't there.
    """
    if rounds is not None and rounds < 1:
        raise ValueError(
            f"Expected `rounds` to be at least 1, but got rounds={rounds!r}. Leave it out to "
            "compare finished runs."
        )
    if not runs:
        raise ValueError(
            "Expected at least one run, but got none. Pass folders or globs, such as 'logs/*'."
        )
    found = find_runs(runs)
    return Comparison(found, _metric(found, metric), rounds, tuple(baselines))


def _metric(runs: Sequence[Run], metric: str | None) -> str:
    """Find the metric to compare, or check the given one."""
    counts = Counter(
        name
        for run in runs
        for name in run.scalars.values
        if f"{name}/worst_decile" in run.scalars.values
        and not name.startswith((*AT_END, "test", "global/", *FURTHER))
    )
    if metric is None and counts:
        usual = sorted(counts, key=lambda name: (not higher_is_better(name), -counts[name]))
        return usual[0]
    if metric is not None and metric.startswith("test"):
        raise ValueError(
            f"Expected `metric` to be a validation value, but got metric={metric!r}: nothing is "
            "compared or sorted by test data. Name the validation's, such as 'val_acc'."
        )
    if not any(run.scalars.values for run in runs):
        raise ValueError(
            f"Expected runs with logged values, but got {', '.join(map(str, runs[:NAMED]))}, which "
            "hold settings alone: they failed or were stopped in their first round, or logged "
            "elsewhere. Run them again, with a TensorBoardLogger or a CSVLogger."
        )
    if metric is None or metric not in counts:
        raise ValueError(
            f"Expected `metric` to be one of {sorted(counts)}, but got metric={metric!r}. "
            "Runs need a validation of all clients with values from `validation_step`."
        )
    return metric


class Comparison:
    """Runs in groups, with tables and a page; made by :func:`compare`.

    Args:
        runs: The runs.
        metric: The compared validation value.
        rounds: The number of rounds after which runs are compared, or None.
        baselines: Methods to compare the others with.

    Attributes:
        larger_is_better: The direction of the metric.
        groups: The groups with runs that count, best first within the same data.
    """

    def __init__(
        self, runs: Sequence[Run], metric: str, rounds: int | None, baselines: Sequence[str]
    ) -> None:
        self.metric, self.rounds, self.baselines = metric, rounds, baselines
        self.larger_is_better = higher_is_better(metric)
        self._all_groups = group_runs(runs, self._counts)
        counted = [group for group in self._all_groups if group.runs]
        self.groups = sorted(counted, key=lambda group: (group.data_label, -self.score(group)))

    def _counts(self, run: Run) -> bool:
        """Whether a run came far enough, and has the metric."""
        far = run.finished if self.rounds is None else run.rounds >= self.rounds
        return far and bool(run.series(self.metric, self.rounds))

    # --- numbers ----------------------------------------------------------------------------------

    def values(self, group: Group, name: str) -> list[float]:
        """Return a value of each run: its mean over the last ten evaluated rounds."""
        found = [list(run.series(name, self.rounds).values())[-WINDOW:] for run in group.runs]
        return [float(np.mean(values)) for values in found if values]

    def score(self, group: Group) -> float:
        """Return the mean of the metric over runs, by which groups are sorted: larger is better.

        A loss counts negatively, and nan is the worst.
        """
        values = self.values(group, group.prefix + self.metric)
        mean = float(np.mean(values)) if values else math.nan
        sign = 1.0 if self.larger_is_better else -1.0
        return -math.inf if math.isnan(mean) else sign * mean

    def totals(self, group: Group, *names: str) -> list[float]:
        """Return the sum of values over the rounds, of each run that logged them."""
        found = [run.total(*names) for run in group.runs]
        ends = [[v for r, v in t.items() if self.rounds is None or r < self.rounds] for t in found]
        return [values[-1] for values in ends if values]

    def seconds(self, group: Group) -> list[float]:
        """Return the seconds of each run until its last round."""
        last = math.inf if self.rounds is None else self.rounds
        found = [[s for r, s in run.scalars.seconds.items() if r < last] for run in group.runs]
        return [max(values) for values in found if values]

    @cached_property
    def client_values(self) -> dict[int, dict[str, float]]:
        """Each client's value by the group's index: the mean over its last rounds, and its runs.

        Clients of different partitions are different clients: where runs differ in ``data.seed``,
        a client's name goes with it.
        """
        seeds = {run.settings.data_seed for group in self.groups for run in group.runs}
        found: dict[int, dict[str, float]] = {}
        for index, group in enumerate(self.groups):
            of_client: dict[str, list[float]] = {}
            for run in group.runs:
                ending = f" (data.seed {run.settings.data_seed})" if len(seeds) > 1 else ""
                name = group.prefix + self.metric
                for client, value in run.clients(name, self.rounds).items():
                    of_client.setdefault(client + ending, []).append(value)
            found[index] = {client: float(np.mean(v)) for client, v in of_client.items()}
        return found

    @cached_property
    def pairs(self) -> dict[tuple[int, int], Paired]:
        """The comparisons of groups with baselines, by the indices of both.

        Of several groups of a baseline the one with the best validation value counts.
        """
        found = {}
        for data in dict.fromkeys(group.data_label for group in self.groups):
            members = [
                index
                for index, group in enumerate(self.groups)
                # A model that ended in nan has clients' values of earlier rounds alone.
                if group.data_label == data and math.isfinite(self.score(group))
            ]
            for name in self.baselines:
                base = next((i for i in members if self.groups[i].method == name), -1)
                for index in members:
                    if base in (-1, index):
                        continue
                    values = self.client_values
                    paired = pair(values[index], values[base], self.larger_is_better)
                    if paired is not None:
                        found[index, base] = paired
        return found

    # --- tables -----------------------------------------------------------------------------------

    @cached_property
    def table(self) -> DataFrame:
        """A row for each group: means and standard deviations over its runs.

        Columns ``<name>`` and ``<name> sd`` (the sample standard deviation, nan for one run) of the
        metric, its worst decile, spread over clients and worst client, and the global model's and
        the test's value; ``MB`` sent by and to all clients, ``seconds``, ``rounds`` and ``runs``.
        Columns without a value in any group are missing.
        """
        import pandas as pd

        rows = []
        for group in self.groups:
            prefix, metric = group.prefix, self.metric
            test = prefix + metric.replace("val", "test", 1)
            numbers = {
                metric: self.values(group, prefix + metric),
                "worst decile": self.values(group, f"{prefix}{metric}/worst_decile"),
                "worst client": self.values(group, f"{prefix}{metric}/worst"),
                "sd over clients": self.values(group, f"{prefix}{metric}/std"),
                "global model": self.values(group, f"global/{metric}"),
                test.removeprefix(prefix): self.values(group, test),
                "MB": [total / MEGA for total in self.totals(group, *BYTES)],
                "seconds": self.seconds(group),
            }
            row: dict[str, Any] = {"data": group.data_label, "method": group.label}
            for name, values in numbers.items():
                row[name] = float(np.mean(values)) if values else math.nan
                row[f"{name} sd"] = _deviation(values)
            counted = sorted({min(run.rounds, self.rounds or run.rounds) for run in group.runs})
            row |= {"rounds": ", ".join(map(str, counted)), "runs": len(group.runs)}
            rows.append(row)
        table = pd.DataFrame(rows)
        empty = [name for name in table.columns if table[name].isna().all()]
        kept = table.drop(columns=[name for name in empty if not name.endswith(" sd")])
        gone = [f"{name} sd" for name in empty]
        return kept.drop(columns=[name for name in gone if name in kept])

    @cached_property
    def shown(self) -> DataFrame:
        """The table as people read it: text, with mean ± standard deviation in one column."""
        import pandas as pd

        table, columns = self.table, {}
        for name in table.columns:
            if name == "data" and not table["data"].any():
                continue
            if f"{name} sd" in table:
                pairs = zip(table[name], table[f"{name} sd"], strict=True)
                columns[name] = [_spread(mean, deviation) for mean, deviation in pairs]
            elif not name.endswith(" sd"):
                columns[name] = [str(value) for value in table[name]]
        return pd.DataFrame(columns)

    @cached_property
    def clients(self) -> DataFrame:
        """A row for each group and client: ``data``, ``method``, ``client``, ``value``."""
        import pandas as pd

        rows = [
            (self.groups[index].data_label, self.groups[index].label, client, value)
            for index, values in self.client_values.items()
            for client, value in values.items()
        ]
        return pd.DataFrame(rows, columns=["data", "method", "client", "value"])

    @cached_property
    def differences(self) -> DataFrame:
        """A row for each group and baseline: the mean difference over clients, and who gains.

        ``difference`` is positive where the method is better; ``low`` and ``high`` are its 95 %
        bootstrap interval over clients; ``better`` and ``worse`` count clients.
        """
        import pandas as pd

        rows = [
            {
                "data": self.groups[index].data_label,
                "method": self.groups[index].label,
                "against": self.groups[base].label,
                "difference": paired.mean,
                "low": paired.low,
                "high": paired.high,
                "better": paired.better,
                "worse": paired.worse,
                "verdict": paired.verdict,
            }
            for (index, base), paired in self.pairs.items()
        ]
        names = ["data", "method", "against", "difference", "low", "high", "better", "worse"]
        return pd.DataFrame(rows, columns=[*names, "verdict"])

    @cached_property
    def shown_differences(self) -> DataFrame:
        """The differences as people read them: text, with the interval in one column."""
        table = self.differences
        cells = zip(table["low"], table["high"], strict=True)
        shown = table.assign(
            difference=[f"{value:+.4f}" for value in table["difference"]],
            low=[f"{low:+.4f} to {high:+.4f}" for low, high in cells],
            better=[f"{b} / {w}" for b, w in zip(table["better"], table["worse"], strict=True)],
        ).rename(columns={"low": "95 % interval", "better": "better / worse"})
        unneeded = ["high", "worse"] if table["data"].any() else ["data", "high", "worse"]
        return shown.drop(columns=unneeded).astype(str)

    @cached_property
    def settings(self) -> DataFrame:
        """The settings in which groups differ: a row for each setting, a column for each group."""
        import pandas as pd

        several = len({group.data_label for group in self.groups}) > 1
        titles = [
            f"{group.label}; {group.data_label}" if several else group.label
            for group in self.groups
        ]
        rows = {
            name: [show(group.settings.get(name)) for group in self.groups]
            for name in differing(self.groups)
        }
        return pd.DataFrame.from_dict(rows, orient="index", columns=titles)

    @cached_property
    def runs(self) -> DataFrame:
        """A row for each run: its group, seeds, rounds, state and folder."""
        import pandas as pd

        rows = [
            {
                "method": group.label,
                "data": group.data_label,
                "seed": run.settings.seed,
                "data.seed": run.settings.data_seed,
                "rounds": run.rounds,
                "planned": run.settings.rounds,
                "counts": run in group.runs,
                "folder": str(run.folder),
            }
            for group in self._all_groups
            for run in group.all_runs
        ]
        return pd.DataFrame(rows).convert_dtypes()

    @cached_property
    def notes(self) -> list[str]:
        """Sentences that a reader needs: runs left out, and what the ± does not cover."""
        return notes_of(self.groups, self._all_groups, self.metric, self.rounds)

    # --- files ------------------------------------------------------------------------------------

    def to_csv(self, path: str | Path) -> None:
        """Write :attr:`table`, with numbers in full."""
        self.table.to_csv(path, index=False)

    def to_markdown(self) -> str:
        """Return :attr:`shown` as a Markdown table."""
        lines = [list(self.shown.columns), ["---"] * len(self.shown.columns)]
        lines += self.shown.values.tolist()
        return "".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
        )

    def to_latex(self) -> str:
        """Return :attr:`shown` as a LaTeX table for the package booktabs."""
        latex: str = self.shown.to_latex(index=False, escape=True)
        return latex.replace("±", r"$\pm$")

    def to_html(self, path: str | Path) -> None:
        """Write the page: tables and pictures in one file, which needs no network.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
        """
        data = dict.fromkeys(group.data_label for group in self.groups)
        page = Page(
            self.metric,
            self.larger_is_better,
            [self._section(label) for label in data],
            self.notes,
            self.settings,
            self.runs,
        )
        page.write(Path(path))

    def _section(self, data: str) -> Section:
        """Collect what the page shows of one kind of data."""
        members = [i for i, group in enumerate(self.groups) if group.data_label == data]
        gains: dict[int, dict[int, Paired]] = {}
        for (index, base), paired in self.pairs.items():
            if index in members:
                gains.setdefault(base, {})[index] = paired
        differences = self.shown_differences[(self.differences["data"] == data).to_numpy()]
        shown = self.shown[(self.table["data"] == data).to_numpy()]
        return Section(
            data,
            shown.drop(columns="data", errors="ignore"),
            differences.drop(columns="data", errors="ignore"),
            [self._line(index) for index in members],
            gains,
        )

    def _line(self, index: int) -> Line:
        group, rounds = self.groups[index], self.rounds
        name = group.prefix + self.metric
        # Models are tuned at the end: the curve is that of the untuned ones.
        curve = name if all(len(run.series(name)) > 1 for run in group.runs) else self.metric
        ends = [self.values(group, value) for value in (name, f"{name}/worst_decile")]
        return Line(
            index,
            group.label,
            metric=[run.series(curve, rounds) for run in group.runs],
            worst=[run.series(f"{curve}/worst_decile", rounds) for run in group.runs],
            megabytes=[
                {round: total / MEGA for round, total in run.total(*BYTES).items()}
                for run in group.runs
            ],
            seconds=[run.scalars.seconds for run in group.runs],
            clients=self.client_values[index],
            end=(float(np.mean(ends[0])), float(np.mean(ends[1]))) if all(ends) else None,
            is_before_tuning=curve != name,
        )

    def __str__(self) -> str:
        """Return the tables and the notes as text."""
        compared = self.shown_differences
        return "\n\n".join(
            [
                self.shown.to_string(index=False),
                *([] if compared.empty else [compared.to_string(index=False)]),
                *self.notes,
            ]
        )

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        html: str = self.shown.to_html(index=False)
        return html


def _deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation: nan for one value, exactly 0 for equal ones.

    Their mean is rounded, so that NumPy's is not 0 for all of them.

    Example:
        >>> _deviation([0.9216] * 3), _deviation([1.0, 2.0, 3.0])
        (0.0, 1.0)
    """
    if len(values) < 2:
        return math.nan
    return 0.0 if min(values) == max(values) else float(np.std(values, ddof=1))


def _spread(mean: float, deviation: float) -> str:
    """Write a mean and a standard deviation with as many digits as they deserve."""
    if math.isnan(mean):
        return "-"
    if not deviation:
        return _number(mean, mean)
    text = _number(mean, mean)
    return text if math.isnan(deviation) else f"{text} ± {_number(deviation, mean)}"


def _number(value: float, mean: float) -> str:
    """Write a number with as many digits after the point as its mean deserves.

    Two that count for small means, three after the point for others, fewer for large ones.

    Example:
        >>> _number(0.00033, 0.0217), _number(0.0217, 0.0217), _number(12.345, 12.3)
        ('0.000', '0.022', '12.35')
    """
    if 0 < abs(mean) < 0.1:
        return f"{value:.{1 - math.floor(math.log10(abs(mean)))}f}"
    return f"{value:.{1 if abs(mean) >= 100 else 2 if abs(mean) >= 10 else 3}f}"
