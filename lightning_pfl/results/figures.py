"""The pictures of a comparison, as SVG that a page can hold."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_pfl.results.paired import Paired

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind people tell apart, without the yellow that white
# swallows; dashes tell lines of one colour apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ((0, ()), (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
SIZE = (4.6, 3.3)
"""Inches; on a page a picture is as wide as a telephone, so its letters are as on paper."""


@dataclass(frozen=True)
class Line:
    """A group of runs, as pictures show it.

    Attributes:
        index: Its place in the comparison, which chooses its colour.
        label: Its name.
        metric, worst: Value of each run by round: of the mean client, and of the worst decile.
        megabytes, seconds: What each run had sent, and how long it had taken, by round.
        clients: Each client's value.
        end: The mean client's value and the worst decile's, as the table has them; None without.
        is_before_tuning: Whether the curves are those of the models before they were tuned.
    """

    index: int
    label: str
    metric: Sequence[Mapping[int, float]] = ()
    worst: Sequence[Mapping[int, float]] = ()
    megabytes: Sequence[Mapping[int, float]] = ()
    seconds: Sequence[Mapping[int, float]] = ()
    clients: Mapping[str, float] = field(default_factory=dict)
    end: tuple[float, float] | None = None
    is_before_tuning: bool = False

    @property
    def colour(self) -> str:
        """The line's colour."""
        return COLOURS[self.index % len(COLOURS)]

    @property
    def dashes(self) -> tuple[int, tuple[float, ...]]:
        """The line's dashes."""
        return DASHES[self.index // len(COLOURS) % len(DASHES)]

    @property
    def name(self) -> str:
        """The id of its elements in a picture."""
        return f"line-{self.index}"


def average(
    curves: Sequence[Mapping[int, float]],
) -> tuple[list[int], NDArray[np.float64], NDArray[np.float64]]:
    """Average runs over the rounds that all of them have.

    Returns:
        Rounds, means and sample standard deviations (0 for one run).
    """
    filled = [curve for curve in curves if curve]
    rounds = sorted(set.intersection(*(set(curve) for curve in filled))) if filled else []
    values = np.array([[curve[round] for round in rounds] for curve in filled], dtype=float)
    if not rounds:
        return [], np.empty(0), np.empty(0)
    deviation = values.std(0, ddof=1) if len(values) > 1 else np.zeros(len(rounds))
    return rounds, values.mean(0), deviation


def draw_curves(lines: Sequence[Line], what: str, ylabel: str) -> Figure:
    """Draw a value against rounds: the mean over runs, and a band of one standard deviation.

    Args:
        lines: The groups.
        what: ``"metric"`` or ``"worst"``.
        ylabel: Name of the value.
    """
    figure, axes = _new("round", ylabel)
    for line in lines:
        rounds, mean, deviation = average(getattr(line, what))
        _plot(axes, line, np.array(rounds) + 1.0, mean, deviation)
    _at_whole_numbers(axes)
    return figure


def draw_costs(lines: Sequence[Line], what: str, xlabel: str, ylabel: str) -> Figure | None:
    """Draw the metric against a cost that grows over the rounds; None if no run has logged it.

    Args:
        lines: The groups.
        what: ``"megabytes"`` or ``"seconds"``.
        xlabel: Name of the cost.
        ylabel: Name of the metric.
    """
    figure, axes = _new(xlabel, ylabel)
    drawn, largest = False, []
    for line in lines:
        rounds, mean, deviation = average(line.metric)
        known, cost, _ = average(getattr(line, what))
        at = dict(zip(known, cost, strict=True))
        there = np.array([round in at for round in rounds], dtype=bool)
        if there.any() and max(at.values()) > 0:
            x = np.array([at[round] for round in rounds if round in at])
            _plot(axes, line, x, mean[there], deviation[there])
            drawn = True
            largest.append(x.max())
    if drawn and max(largest) > 30 * min(largest):
        axes.set_xscale("log")
    return figure if drawn else None


def draw_clients(lines: Sequence[Line], ylabel: str, larger_is_better: bool) -> Figure:
    """Draw each client's value, sorted for each group by itself from worst to best."""
    figure, axes = _new("clients of each method, worst to best", ylabel)
    for line in lines:
        ordered = np.sort(np.array([*line.clients.values()]))
        ordered = ordered if larger_is_better else ordered[::-1]
        _plot(axes, line, np.arange(len(ordered)) + 1.0, ordered, None)
    _at_whole_numbers(axes)
    return figure


def draw_best_against_worst(best: Line, worst: Line, ylabel: str) -> Figure:
    """Draw a dot for each client: its value with the worst and with the best method."""
    figure, axes = _new(f"{ylabel}, {worst.label}", f"{ylabel}, {best.label}")
    shared = [client for client in best.clients if client in worst.clients]
    x, y = ([line.clients[client] for client in shared] for line in (worst, best))
    axes.scatter(x, y, s=18, color=COLOURS[0], alpha=0.6, linewidth=0)
    low, high = min([*x, *y]), max([*x, *y])
    axes.plot([low, high], [low, high], color="#888888", linewidth=1)
    return figure


def draw_gains(lines: Sequence[Line], gains: Mapping[int, Paired], against: str) -> Figure:
    """Draw each client's gain over a baseline, sorted for each group by itself."""
    figure, axes = _new("clients of each method, by gain", f"gain over {against}")
    axes.axhline(0, color="#888888", linewidth=1)
    for line in lines:
        if line.index in gains:
            ordered = np.sort(gains[line.index].differences)
            _plot(axes, line, np.arange(len(ordered)) + 1.0, ordered, None)
    _at_whole_numbers(axes)
    return figure


def draw_fairness(lines: Sequence[Line], metric: str) -> Figure:
    """Draw a dot for each group: its worst decile against its mean; the best at the top right."""
    figure, axes = _new(f"{metric}, mean over clients", "worst decile")
    for line in lines:
        if line.end is not None:
            mean, worst = line.end
            axes.scatter(
                [mean],
                [worst],
                s=60,
                color=line.colour,
                marker="osD^"[line.index // len(COLOURS) % 4],
                gid=line.name,
            )
    return figure


def to_svg(figure: Figure, prefix: str, title: str) -> str:
    """Write a figure as an ``<svg>`` element with text as text.

    Args:
        figure: The figure.
        prefix: Begins all ids, which must differ between the pictures of a page.
        title: Says to those who can't see it what it shows.
    """
    import matplotlib as mpl

    file = io.StringIO()
    # The salt makes ids of clipping paths the same each time.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    size = re.sub(r'<svg ([^>]*?)height="[^"]*"([^>]*?)width="[^"]*"', r"<svg \1\2", text, count=1)
    size = re.sub(r'<svg ([^>]*?)width="[^"]*"([^>]*?)height="[^"]*"', r"<svg \1\2", size, count=1)
    return size.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def _at_whole_numbers(axes: Axes) -> None:
    """Put the ticks of rounds, or of counted clients, at integers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def _new(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _plot(
    axes: Axes,
    line: Line,
    x: NDArray[Any],
    y: NDArray[Any],
    deviation: NDArray[Any] | None,
) -> None:
    """Draw a line, or a dot for a single value, with its band."""
    if len(x) == 1:
        axes.scatter(x, y, s=40, color=line.colour, gid=line.name)
    elif len(x):
        axes.plot(x, y, color=line.colour, linestyle=line.dashes, linewidth=1.6, gid=line.name)
        if deviation is not None and deviation.any():
            band = axes.fill_between(
                x, y - deviation, y + deviation, color=line.colour, alpha=0.15, linewidth=0
            )
            band.set_gid(f"{line.name}-band")
