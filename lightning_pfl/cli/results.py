"""The results table at the end of a command."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import SupportsFloat

from lightning.fabric.utilities import rank_zero_only
from rich.console import Console
from rich.table import Column, Table

from lightning_pfl.metrics import STATISTICS
from lightning_pfl.metrics.summary import STANDARD_ERROR

#: Columns of the results table, with the suffix of the value's name.
COLUMNS = {
    statistic or "mean": f"/{statistic}" if statistic else ""
    for statistic in (*STATISTICS, STANDARD_ERROR)
}
#: Values of ClusterMonitor, shown below the table.
CLUSTERS = ("clusters/number", "clusters/ari")
DIGITS = re.compile(r"(\d+)")


def summary_rows(metrics: Mapping[str, SupportsFloat]) -> dict[str, dict[str, float]]:
    """Select the values that were evaluated for every client.

    Args:
        metrics: Logged values by name, for instance ``trainer.callback_metrics``.

    Returns:
        For each name with a ``/worst_decile`` value its statistics, by the names of
        :data:`COLUMNS`, as far as they are logged.

    Example:
        >>> logged = {"val_acc": 0.9, "val_acc/worst_decile": 0.5, "train_loss": 1.0}
        >>> summary_rows(logged)["val_acc"]["worst_decile"]
        0.5
    """
    # `@20` before `@100`.
    names = sorted(
        (name for name in metrics if f"{name}/worst_decile" in metrics),
        key=lambda name: [int(part) if part.isdigit() else part for part in DIGITS.split(name)],
    )
    return {
        name: {
            title: float(metrics[name + suffix])
            for title, suffix in COLUMNS.items()
            if name + suffix in metrics
        }
        for name in names
    }


@rank_zero_only
def print_results(metrics: Mapping[str, SupportsFloat], title: str = "After training") -> None:
    """Print a table of the values that were evaluated for every client, if there are any."""
    rows = summary_rows(metrics)
    if not rows:
        return
    clusters = ", ".join(f"{k} {float(v):.4g}" for k, v in metrics.items() if k in CLUSTERS)
    estimated = any(name.endswith(f"/{STANDARD_ERROR}") for name in metrics)
    columns = [name for name in COLUMNS if estimated or name != STANDARD_ERROR]
    # On narrow screens headers wrap, but names stay whole.
    shown = (Column(name.replace("_", " "), overflow="fold") for name in columns)
    table = Table(
        Column("over clients", no_wrap=True), *shown, title=title, caption=clusters or None
    )
    for name, statistics in rows.items():
        cells = (f"{statistics[c]:.4f}" if c in statistics else "-" for c in columns)
        table.add_row(name, *cells)
    Console().print(table)
