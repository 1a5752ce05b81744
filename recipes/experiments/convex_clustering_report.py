"""Pictures and table of the experiment on convex clustering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_pfl.inspect.dendrogram import draw_dendrogram
from recipes.results_table import spread

Cell = dict[str, Any]
Cells = dict[str, dict[int, Cell]]
"""By setting, seed and name of the cell."""
TITLES = {
    "overlap": "overlap: clusters contradict each other",
    "recovery": "recovery: clusters far apart",
}
STYLES: dict[str, dict[str, Any]] = {
    "local": {"color": "tab:gray", "linestyle": "--", "label": "local"},
    "global": {"color": "black", "linestyle": ":", "label": "global"},
    "oracle": {"color": "tab:green", "linestyle": "-.", "label": "oracle"},
    "norms": {"color": "tab:blue", "marker": "o", "label": "ConvexClustering"},
    "squares": {"color": "tab:orange", "marker": "s", "label": "SquaredPenalty"},
}
TOLERANCE = 1e-6
"""Residual at which the direct solver stops."""
SMALLEST = 1e-6
"""Distances below are shown as this: zero up to the solver's precision."""


def draw_all(cells: Cells, folder: Path) -> None:
    """Both figures and the dendrogram, of the first seed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value, label in (
        ("accuracy", "accuracy", "test accuracy in percent"),
        ("distance", "within", "mean distance within clusters"),
    ):
        draw(cells, value, label, folder / f"convex_clustering_{name}.png")
    first = next(iter(cells["recovery"].values()))
    rows = first["norms"]
    labels = torch.tensor([row["labels"] for row in rows])
    weights = [row["weight"] for row in rows]
    groups = torch.tensor(first["reference"]["oracle"]["labels"])
    figure = draw_dendrogram(labels, weights, groups)
    figure.savefig(folder / "convex_clustering_dendrogram.png")


def draw(cells: Cells, value: str, label: str, path: Path) -> None:
    """A value of all five methods against the weight, a panel for each setting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.8), dpi=100, layout="constrained")
    for axes, (setting, by_seed) in zip(figure.subplots(1, len(cells)), cells.items(), strict=True):
        cell = next(iter(by_seed.values()))
        for name in ("norms", "squares"):
            at = [row["weight"] for row in cell[name]]
            axes.plot(at, [shown(row, value) for row in cell[name]], **STYLES[name], markersize=3)
        for name in ("local", "global", "oracle"):
            row = cell["reference"][name]
            if value == "accuracy" or row[value] > SMALLEST:
                axes.axhline(shown(row, value), **STYLES[name])
        if interval := cell["bounds"]["interval"]:
            axes.axvspan(*interval, color="tab:blue", alpha=0.15, label="theorems 1 and 2")
        axes.set(xscale="log", xlabel="weight over unordered pairs", ylabel=label)
        axes.set_title(TITLES[setting], fontsize=10)
        if value != "accuracy":
            axes.set_yscale("log")
            place = (0.01, 1.3 * SMALLEST)
            note = axes.annotate("zero", place, xycoords=("axes fraction", "data"), fontsize=8)
            # It may lie below the axes: then it isn't drawn, and must not claim room.
            note.set(annotation_clip=True, in_layout=False)
        axes.grid(alpha=0.3)
    if value == "accuracy":
        magnify(axes, cell)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=6, loc="outside lower center")
    figure.savefig(path)


def magnify(axes: Any, cell: Cell) -> None:
    """What lies between local training and the best, which the fall to one model makes small."""
    inset = axes.inset_axes((0.12, 0.14, 0.6, 0.55))
    for name in ("norms", "squares"):
        at = [row["weight"] for row in cell[name]]
        inset.plot(at, [shown(r, "accuracy") for r in cell[name]], **STYLES[name], markersize=2)
    for name in ("local", "oracle"):
        inset.axhline(shown(cell["reference"][name], "accuracy"), **STYLES[name])
    low = shown(cell["reference"]["local"], "accuracy")
    high = max(
        shown(best(cell["norms"]), "accuracy"), shown(cell["reference"]["oracle"], "accuracy")
    )
    room = max((high - low) / 8, 0.1)
    inset.set(xscale="log", ylim=(low - room, high + room))
    inset.tick_params(labelsize=7)
    inset.grid(alpha=0.3)


def shown(row: Cell, value: str) -> float:
    """What is drawn of a row."""
    return 100 * float(row["accuracy"]) if value == "accuracy" else max(row[value], SMALLEST)


def best(rows: list[Cell]) -> Cell:
    """The row of the highest accuracy; the smallest weight of several."""
    return max(rows, key=lambda row: row["accuracy"])


def recovered(rows: list[Cell], exact: bool) -> str:
    """The weights of the grid at which the three true clusters are found."""
    key = "exact_clusters" if exact else "clusters"
    good = [row["weight"] for row in rows if row["rand"] == 1 and row[key] == 3]
    return f"{good[0]:g} to {good[-1]:g}" if good else "none"


def table(cells: Cells) -> str:
    """Best accuracy of each method with its weight, distance and number of models."""
    lines = [
        "| clients | method | accuracy | at weight | within-cluster distance | models |",
        "|---|---|---|---|---|---|",
    ]
    for setting, by_seed in cells.items():
        each = list(by_seed.values())
        found = {name: [cell["reference"][name] for cell in each] for name in ("local", "global")}
        found["sum of norms"] = [best(cell["norms"]) for cell in each]
        found["squared penalty"] = [best(cell["squares"]) for cell in each]
        found["oracle"] = [cell["reference"]["oracle"] for cell in each]
        for name, rows in found.items():
            at = ", ".join(f"{row['weight']:.3g}" for row in rows if "weight" in row) or "-"
            within = ", ".join(f"{row['within']:.3g}" for row in rows)
            models = ", ".join(str(row["clusters"]) for row in rows)
            accuracy = spread([row["accuracy"] for row in rows])
            lines.append(f"| {setting} | {name} | {accuracy} | {at} | {within} | {models} |")
    return "\n".join(lines)


def recovery_table(cells: Cells) -> str:
    """Compare the weights that recover the true clusters with the theorems' bounds."""
    lines = [
        "| clients | seed | equal up to tolerance | equal exactly | promised | one model from |",
        "|---|---|---|---|---|---|",
    ]
    for setting, by_seed in cells.items():
        for seed, cell in by_seed.items():
            rows, interval = cell["norms"], cell["bounds"]["interval"]
            promised = f"{interval[0]:g} to {interval[1]:g}" if interval else "none"
            one = next((f"{row['weight']:g}" for row in rows if row["clusters"] == 1), "-")
            lines.append(
                f"| {setting} | {seed} | {recovered(rows, False)} | {recovered(rows, True)} | "
                f"{promised} | {one} (sufficient: {cell['bounds']['consensus']:.3g}) |"
            )
    return "\n".join(lines)


def federated_table(cells: Cells) -> str:
    """Compare the federated methods with the direct solutions."""
    lines = [
        "| clients | method | weight | rounds | accuracy | direct | models | direct "
        "| objective above the direct solver's | largest distance of a model |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for setting, by_seed in cells.items():
        cell = next(iter(by_seed.values()))
        for name, row in cell.items():
            method, _, weight = name.partition(" ")
            if not weight:
                continue
            kind = "norms" if method == "ConvexClustering" else "squares"
            direct = [r for r in cell[kind] if f"{r['weight']:g}" == weight]
            accuracy = f"{100 * direct[0]['accuracy']:.2f}" if direct else "-"
            models = str(direct[0]["clusters"]) if direct else "-"
            lines.append(
                f"| {setting} | {method} | {weight} | {row['rounds']} | "
                f"{100 * row['accuracy']:.2f} | {accuracy} | {row['clusters']} | {models} | "
                f"{row['gap']:.1e} | {row['away']:.1e} |"
            )
    return "\n".join(lines)


def section(cells: Cells) -> str:
    """What stands in README.md."""
    seeds = ", ".join(str(seed) for seed in next(iter(cells.values())))
    return f"""
**Accuracy and distance against the weight (convex clustering, Figures 1 and 2)**: 60 clients of
three clusters, 10 samples each, squared hinge loss, seeds {seeds}. Test accuracy in percent, mean
over clients, each on all test samples of its cluster. The two penalties are shown at the weight
that is best on these same test samples, as in the paper: an upper bound, not an estimate. Weights
are over unordered pairs. Several numbers are of the seeds in turn; models count as equal within a
thousandth of their median length.

{table(cells)}

![Accuracy against the weight](figures/convex_clustering_accuracy.png)

![Distance within clusters against the weight](figures/convex_clustering_distance.png)

Weights of the grid at which the three true clusters are found, and where the paper's theorems 1 and
2 promise them:

{recovery_table(cells)}

![Dendrogram](figures/convex_clustering_dendrogram.png)

The sweep is solved directly. The federated methods, in the Trainer, with all blocks in each round:

{federated_table(cells)}

{note(cells)}
"""


def compact_from(by_seed: dict[int, Cell]) -> str:
    """The weight from which on the sum of norms is the more compact, in all seeds."""
    rows = [pair for cell in by_seed.values() for pair in zip(*both(cell), strict=True)]
    other = [norms["weight"] for norms, squares in rows if norms["within"] >= squares["within"]]
    after = [norms["weight"] for norms, _ in rows if norms["weight"] > max(other, default=0.0)]
    return f"from {min(after):.3g} on" if after else "at no weight"


def both(cell: Cell) -> tuple[list[Cell], list[Cell]]:
    """The rows of the two penalties."""
    return cell["norms"], cell["squares"]


def unsolved(cells: Cells) -> str:
    """The weights at which the direct solver stopped before its tolerance."""
    found: dict[float, float] = {}
    for row in [r for by_seed in cells.values() for c in by_seed.values() for r in c["norms"]]:
        if row["residual"] > TOLERANCE:
            found[row["weight"]] = max(found.get(row["weight"], 0.0), row["residual"])
    if not found:
        return f"The direct solver reached its tolerance of {TOLERANCE:.0e} at every weight."
    listed = ", ".join(f"{weight:.3g} ({found[weight]:.0e})" for weight in sorted(found))
    return (
        "At these weights the direct solver stopped at its limit of iterations in one or more of "
        f"the runs, above its tolerance of {TOLERANCE:.0e}, with a largest residual of: {listed}."
    )


def note(cells: Cells) -> str:
    """Compare the results with the paper; numbers are computed from the results."""
    overlapping, far = (compact_from(cells[setting]) for setting in ("overlap", "recovery"))
    return f"""{NOTE.strip()}

Its Figure 2 has the sum of norms more compact at every weight; here, at the same weight and in all
seeds, that holds {overlapping} for the overlapping clusters and {far} for the far ones.
{unsolved(cells)}"""


NOTE = """
Beside the paper: its ellipses are not published, these are ours, so only the shape can be compared.
It reports 86.8 for the sum of norms and 86.6 for the squared penalty at their best weights, nearly
a tie as here, both above the local and the global models. It finds three clusters for weights in
(0.0892, 0.0919) of one draw; here the overlapping clusters are found at no weight, and the far ones
on an interval that is wider than the theorems promise. As in the paper the sum of norms ends in
exactly one model and the squared penalty does not.
"""
