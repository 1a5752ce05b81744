"""The page of a comparison: one HTML file with all its pictures, which needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_pfl.results import figures
from lightning_pfl.results.figures import Line
from lightning_pfl.results.paired import Paired

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

SHOWN = 8
"""Largest number of groups whose lines are shown at first; others are a tick away."""
NAMED = 20
"""Number of clients in the table of the worst ones."""
TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Section:
    """Groups that are compared on the same data.

    Attributes:
        title: The settings of the data; empty where all groups have the same.
        table: A row for each group, as text.
        differences: A row for each group and baseline, as text.
        lines: The groups, best first.
        gains: Baseline to group to what each client gains.
    """

    title: str
    table: DataFrame
    differences: DataFrame
    lines: Sequence[Line]
    gains: Mapping[int, Mapping[int, Paired]]


@dataclass(frozen=True)
class Page:
    """The contents of the page.

    Attributes:
        metric: The compared value.
        larger_is_better: Its direction.
        sections: One for each data.
        notes: Sentences above the tables.
        settings: The settings in which groups differ.
        runs: All runs.
    """

    metric: str
    larger_is_better: bool
    sections: Sequence[Section]
    notes: Sequence[str]
    settings: DataFrame
    runs: DataFrame

    def write(self, path: Path) -> None:
        """Write the page.

        Args:
            path: The file; its folder is made when needed.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
        """
        import jinja2

        try:
            import matplotlib  # noqa: F401
        except ImportError as cause:
            raise ModuleNotFoundError(
                "Expected matplotlib for the page's pictures, but it isn't installed. Install "
                "'lightning-pfl[plots]'."
            ) from cause
        template = jinja2.Template(TEMPLATE.read_text(), autoescape=True, trim_blocks=True)
        html = template.render(
            metric=self.metric,
            notes=self.notes,
            sections=[self._section(i, section) for i, section in enumerate(self.sections)],
            settings=_html(self.settings, index=True),
            runs=_html(self.runs),
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8")

    def _section(self, number: int, section: Section) -> dict[str, Any]:
        """Make the HTML of a section's tables and pictures."""
        baselines = {*section.gains}
        shown = [line for line in section.lines if line.index in baselines]
        shown += [line for line in section.lines if line not in shown][: SHOWN - len(shown)]
        pictures = [
            (title, text, figures.to_svg(figure, f"s{number}p{i}", escape(title, quote=True)))
            for i, (title, text, figure) in enumerate(self._pictures(section))
        ]
        return {
            "title": section.title,
            "table": _html(section.table),
            "differences": _html(section.differences) if len(section.differences) else "",
            "lines": [(line, line in shown) for line in section.lines],
            "pictures": pictures,
            "worst": _html(self._worst_clients(section, shown)),
        }

    def _pictures(self, section: Section) -> list[tuple[str, str, Figure]]:
        """Draw a section: titles, sentences and figures."""
        drawn = [*self._of_rounds(section), *self._of_clients(section)]
        return [(title, text, figure) for title, text, figure in drawn if figure is not None]

    def _of_rounds(self, section: Section) -> list[tuple[str, str, Figure | None]]:
        """Draw means over the clients."""
        lines, metric = section.lines, self.metric
        before = any(line.is_before_tuning for line in lines)
        untuned = " Where models are tuned at the end: before that." if before else ""
        return [
            (
                f"{metric} by round",
                f"Mean over clients; the band is one standard deviation over seeds.{untuned}",
                figures.draw_curves(lines, "metric", metric),
            ),
            (
                "Worst decile by round",
                f"Mean over the worst tenth of the clients.{untuned}",
                figures.draw_curves(lines, "worst", f"{metric}, worst decile"),
            ),
            (
                f"{metric} against bytes",
                "All that clients had received and sent; methods that send nothing aren't shown."
                + untuned,
                figures.draw_costs(lines, "megabytes", "MB sent so far", metric),
            ),
            (
                f"{metric} against time",
                f"Wall-clock time on the machine of each run.{untuned}",
                figures.draw_costs(lines, "seconds", "seconds so far", metric),
            ),
            (
                "Fairness",
                "A dot for each method; both values are means over the last ten rounds.",
                figures.draw_fairness(lines, metric),
            ),
        ]

    def _of_clients(self, section: Section) -> Iterator[tuple[str, str, Figure | None]]:
        """Draw each client's values, and how they differ between methods."""
        lines = [line for line in section.lines if line.clients]
        if lines:
            yield (
                "Every client",
                "Mean over the last ten rounds and all seeds.",
                figures.draw_clients(lines, self.metric, self.larger_is_better),
            )
        if len(lines) > 1 and lines[0].clients.keys() & lines[-1].clients.keys():
            yield (
                "Best against worst method",
                "A dot for each client; it is better off with the best method where the dot lies "
                f"{'above' if self.larger_is_better else 'below'} the line.",
                figures.draw_best_against_worst(lines[0], lines[-1], self.metric),
            )
        labels = {line.index: line.label for line in section.lines}
        for base, gains in section.gains.items():
            yield (
                f"Who gains and who loses against {labels[base]}",
                "Each client's difference, positive where the method is better.",
                figures.draw_gains(section.lines, gains, labels[base]),
            )

    def _worst_clients(self, section: Section, shown: Sequence[Line]) -> DataFrame:
        """List the clients that are worst off with the best method, under all shown methods."""
        import pandas as pd

        best = next((line for line in section.lines if line.clients), None)
        if best is None:
            return pd.DataFrame()
        order = sorted(
            best.clients, key=best.clients.__getitem__, reverse=not self.larger_is_better
        )
        columns = [best, *(line for line in shown if line is not best and line.clients)]
        return pd.DataFrame(
            [
                {
                    "client": client,
                    **{
                        line.label: f"{line.clients[client]:.4f}" if client in line.clients else "-"
                        for line in columns
                    },
                }
                for client in order[:NAMED]
            ]
        )


def _html(table: DataFrame, index: bool = False) -> str:
    """Write a table that a narrow screen can scroll."""
    html: str = table.to_html(index=index, border=0, na_rep="-")
    return html if len(table) else ""
