"""The tables and the figure of `fedmap_synthetic`, with the paper's numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recipes.results_table import spread

#: Balanced accuracy of every client, by the number of rounds.
Curve = dict[str, list[float]]
#: Curves by line, one for each draw.
Curves = dict[str, list[Curve]]


@dataclass(frozen=True)
class Line:
    """What a line of the tables may choose among.

    Attributes:
        grid: Settings.
        batch_norm: Whether its network has BatchNorm.
    """

    grid: tuple[dict[str, float], ...]
    batch_norm: bool = False


TITLES = {
    "label": "Label skew (Table 1): clients 6 to 10 have 85 % of class 0",
    "feature": "Feature skew (Table 5): 2000 balanced samples each",
    "quantity": "Quantity skew (Table 6): clients 6 to 10 have 500 samples, the others 2000",
}
#: The paper's means in percent, clients 1 to 10.
PAPER: dict[str, dict[str, tuple[float, ...]]] = {
    "label": {
        "Individual": (87.32, 88.23, 89.94, 89.35, 86.96, 73.95, 63.86, 61.42, 61.02, 64.28),
        "FedMAP": (89.03, 88.72, 90.92, 90.52, 88.01, 84.25, 79.37, 81.16, 80.52, 75.92),
        "FedBN": (67.11, 65.93, 69.52, 69.41, 68.65, 59.76, 56.85, 59.12, 55.02, 61.41),
        "FedProx": (55.64, 54.92, 56.11, 57.13, 56.50, 53.74, 53.68, 52.37, 53.18, 55.79),
        "FedAvg": (55.30, 55.55, 55.54, 56.33, 56.57, 53.27, 54.68, 52.05, 53.34, 53.98),
    },
    "feature": {
        "Individual": (82.25, 86.24, 80.76, 88.07, 83.03, 80.27, 83.48, 82.21, 85.92, 85.78),
        "FedMAP": (85.26, 88.94, 83.70, 89.70, 84.97, 83.39, 86.55, 85.38, 87.45, 87.38),
        "FedBN": (62.77, 65.86, 66.99, 65.32, 66.46, 61.08, 68.39, 64.47, 66.16, 66.33),
        "FedProx": (58.44, 64.28, 65.99, 62.09, 64.78, 58.92, 67.34, 61.25, 63.14, 63.77),
        "FedAvg": (57.85, 65.35, 66.06, 63.46, 64.74, 60.03, 66.65, 61.54, 63.55, 62.53),
    },
    "quantity": {
        "Individual": (83.37, 88.10, 87.48, 84.40, 78.47, 61.62, 64.07, 63.83, 67.32, 64.04),
        "FedMAP": (84.47, 89.64, 88.88, 86.95, 80.23, 65.48, 72.97, 67.10, 74.92, 71.74),
        "FedBN": (67.69, 72.41, 73.74, 71.38, 66.96, 56.28, 54.96, 48.58, 62.26, 61.99),
        "FedProx": (64.33, 70.10, 72.56, 69.19, 63.93, 54.49, 56.05, 45.45, 60.37, 57.03),
        "FedAvg": (66.45, 70.22, 71.08, 68.82, 62.76, 53.96, 55.02, 46.33, 61.03, 59.73),
    },
}
#: Differences that are shown.
GAINS = (("FedMAP", "Individual"), ("FedMAP + decay", "Individual + decay"))
NOTE = ""
#: Balanced accuracies by scenario and line, for each seed that of every client.
Found = dict[str, dict[str, list[list[float]]]]
#: Settings by scenario and line.
Choices = dict[str, dict[str, dict[str, float]]]


def table(scenario: str, found: dict[str, list[list[float]]]) -> str:
    """One of the paper's tables: ours, and the paper's mean in parentheses."""
    published = PAPER[scenario]
    lines = ["| client | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    groups: list[tuple[str, list[int]]] = [(str(k + 1), [k]) for k in range(10)]
    groups += [("1 to 5", [*range(5)]), ("6 to 10", [*range(5, 10)]), ("**mean**", [*range(10)])]
    for title, clients in groups:
        cells = []
        for line, seeds in found.items():
            ours = spread([float(np.mean([values[k] for k in clients])) for values in seeds])
            if line in published:
                ours += f" ({np.mean([published[line][k] for k in clients]):.2f})"
            cells.append(ours)
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def gains(found: Found, line: str, base: str) -> str:
    """The differences of two lines in percentage points, seed by seed on the same data."""
    lines = ["| skew | clients 1 to 5 | clients 6 to 10 | mean |", "|---|---|---|---|"]
    for scenario, by_line in found.items():
        difference = np.array(by_line[line]) - np.array(by_line[base])
        parts = [difference[:, :5], difference[:, 5:], difference]
        cells = [spread([float(seed.mean()) for seed in part]) for part in parts]
        lines.append(f"| {scenario} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def choices_table(choices: Choices, grids: dict[str, tuple[dict[str, float], ...]]) -> str:
    """What was chosen, and among what."""
    lines = ["| line | " + " | ".join(choices) + " | among |", "|---" * (len(choices) + 2) + "|"]
    for line, grid in grids.items():
        among = {name: sorted({s[name] for s in grid}) for name in grid[0]}
        offered = "; ".join(
            f"{name.replace('_', ' ')} {', '.join(f'{v:g}' for v in values)}"
            for name, values in among.items()
        )
        chosen = [
            ", ".join(f"{k.replace('_', ' ')} {v:g}" for k, v in choices[scenario][line].items())
            for scenario in choices
        ]
        lines.append(f"| {line} | " + " | ".join(chosen) + f" | {offered} |")
    return "\n".join(lines)


def section(
    choices: Choices, found: Found, grids: dict[str, tuple[dict[str, float], ...]], protocol: str
) -> str:
    """What stands in README.md."""
    parts = [protocol]
    parts += [
        f"{TITLES[scenario]}\n\n{table(scenario, lines)}" for scenario, lines in found.items()
    ]
    for line, base in GAINS:
        if all(line in by_line and base in by_line for by_line in found.values()):
            parts.append(f"{line} minus {base}, on the same data:\n\n{gains(found, line, base)}")
    parts.append(f"What was chosen:\n\n{choices_table(choices, grids)}")
    parts += ["![Learning curves](figures/fedmap_synthetic.png)", NOTE.strip()]
    return "\n\n".join(parts)


#: Lines of the figure.
DRAWN = ("Individual", "FedMAP", "FedMAP, variance 15", "FedAvg")


def draw(curves: dict[str, Curves], epochs: int, path: Path) -> None:
    """Mean balanced accuracy of the two halves of the clients against local epochs, by scenario."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), dpi=100, layout="constrained")
    for axes, (scenario, by_line) in zip(
        figure.subplots(1, 3, sharey=True), curves.items(), strict=True
    ):
        for number, line in enumerate(line for line in DRAWN if line in by_line):
            runs = by_line[line]
            rounds = [int(name) for name in runs[0]]
            values = 100 * np.mean([[*run.values()] for run in runs], axis=0)
            passes = [epochs * count for count in rounds]
            style = {"color": f"C{number}", "marker": ".", "markersize": 4}
            axes.plot(passes, values[:, :5].mean(1), linestyle=":", **style)
            axes.plot(passes, values[:, 5:].mean(1), label=line, **style)
        axes.set_title(f"{scenario} skew")
        axes.set_xlabel("local epochs")
        axes.grid(alpha=0.3)
        if scenario == "label":
            axes.set_ylabel("balanced accuracy in percent")
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        title="solid: clients 6 to 10, dotted: clients 1 to 5",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
