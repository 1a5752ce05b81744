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
        rounds: Rounds, where nothing is chosen; 0 where the grid and the rounds are.
        epochs: Local epochs a round.
    """

    grid: tuple[dict[str, float], ...]
    batch_norm: bool = False
    rounds: int = 0
    epochs: int = 5


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
#: Groups of clients; the last five are the skewed ones where there are such.
GROUPS = {"1 to 5": [*range(5)], "6 to 10": [*range(5, 10)], "**mean**": [*range(10)]}
#: Differences that are shown.
GAINS = (
    ("FedMAP", "Individual"),
    ("FedMAP + decay", "Individual + decay"),
    ("FedMAP, lr 1e-4, variance 15", "Individual, lr 1e-4"),
    ("FedMAP, lr 1e-4, variance 15", "Individual, lr 1e-4, 100 epochs"),
)
#: How a line is called in the tables.
NAMES = {"FedBN": "FedBN (network with BatchNorm)"}
NOTE = """
The figure shows the draw that settings were chosen on.

FedMAP is above Individual in the mean in all three, most at the skewed clients. *Label skew* is as
in the paper: FedMAP is within a point of its mean, and gains at the skewed clients alone. *Feature
and quantity skew*: the gain is 0.3 points in both (standard error of the mean over seeds 0.1 and
0.3), where the paper has 2.5 and 4.0. FedMAP is better here than in the paper by 2 and 3 points,
Individual by 4 and 7. The paper doesn't say how long Individual trained. With a step size of 0.001
it passes the paper's means of Tables 5 and 6 within 50 epochs; FedMAP with variance 15 passes its
own within 100. At the step size and length chosen here, variance 15 does as well as the chosen one
under label and feature skew, and loses about a point to Individual under quantity skew, where it
holds back the large clients.

*The step size of the authors' code*, 1e-4, doesn't bring the paper's gains either. It is small:
both are still rising after 100 rounds of 5 epochs, and with equally many passes FedMAP is 1 to 2
points below Individual, being held back by the prior. FedMAP is far above, by 10 to 12 points,
where Individual makes 100 epochs and no more. The paper's gains lie between these two comparisons,
and the paper doesn't say which it made.

A prior also keeps weights small, and so does weight decay, which the paper doesn't use. With it
both are better, Individual so much that FedMAP's gain under label skew falls from 5 points to 0.7
and vanishes under the others.

The global methods are far below, as in the paper: every client has an affine map of its own. FedBN
is the only line whose network has BatchNorm; the network of the paper's Table 3 has none, with
which FedBN is FedAvg exactly. FedProx is best with the smallest weight. Deviations are larger than
the paper's, as each seed draws new data here. The paper's averages for Table 6 (75.37, 79.06,
63.80, 61.54, 61.88) and for Individual and FedAvg in Table 5 (83.38, 63.10) aren't the means of the
clients that it prints, which the last rows have.
"""
#: Balanced accuracies by scenario and line, for each seed that of every client.
Found = dict[str, dict[str, list[list[float]]]]
#: Settings by scenario and line.
Choices = dict[str, dict[str, dict[str, float]]]


def table(scenario: str, found: dict[str, list[list[float]]]) -> str:
    """One of the paper's tables: ours, and the paper's mean in parentheses."""
    published = PAPER[scenario]
    names = [NAMES.get(line, line) for line in published if line in found]
    lines = ["| client | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    groups = {str(client + 1): [client] for client in range(10)} | GROUPS
    for title, clients in groups.items():
        cells = [
            f"{of_group(found[line], clients)} ({np.mean([values[k] for k in clients]):.2f})"
            for line, values in published.items()
            if line in found
        ]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def beyond(found: Found) -> str:
    """Make the lines by kind of clients, which the paper doesn't have."""
    lines = ["| skew | line | seeds | " + " | ".join(GROUPS) + " |", "|---" * 6 + "|"]
    for scenario, by_line in found.items():
        for line, seeds in by_line.items():
            if line in ("Individual", "FedMAP") or line not in PAPER[scenario]:
                cells = [of_group(seeds, clients) for clients in GROUPS.values()]
                lines.append(f"| {scenario} | {line} | {len(seeds)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def of_group(seeds: list[list[float]], clients: list[int]) -> str:
    """Mean and deviation over seeds of the mean over some clients."""
    return spread([float(np.mean([values[k] for k in clients])) for values in seeds])


def gains(found: Found, line: str, base: str) -> str:
    """The differences of two lines in percentage points, seed by seed on the same data."""
    lines = ["| skew | " + " | ".join(GROUPS) + " |", "|---" * (len(GROUPS) + 1) + "|"]
    for scenario, by_line in found.items():
        difference = (np.array(by_line[line]) - np.array(by_line[base])).tolist()
        cells = [of_group(difference, clients) for clients in GROUPS.values()]
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
        among_what = offered if len(grid) > 1 else "fixed"
        lines.append(f"| {line} | " + " | ".join(chosen) + f" | {among_what} |")
    return "\n".join(lines)


def edges(choices: Choices, grids: dict[str, tuple[dict[str, float], ...]], rounds: int) -> str:
    """How many of the choices lie at an end of what was offered, in words.

    Args:
        choices: The settings chosen.
        grids: What each line could choose among; those with one setting chose nothing.
        rounds: The most rounds that could be chosen.
    """
    found: dict[str, list[str]] = {}
    for chosen in choices.values():
        for line, setting in chosen.items():
            if len(grids[line]) < 2:
                continue
            for name, value in setting.items():
                offered = {one[name] for one in grids[line]} if name != "rounds" else {0, rounds}
                if len(offered) > 1:
                    ends = {max(offered): "largest", min(offered): "smallest"}
                    found.setdefault(name.replace("_", " "), []).append(ends.get(value, "between"))
    counts = [
        f"{name} the largest in {ends.count('largest')} and the smallest in "
        f"{ends.count('smallest')} of {len(ends)}"
        for name, ends in found.items()
    ]
    return (
        "Many chosen settings lie at an end of what was offered, so better ones may lie beyond: "
        f"{'; '.join(counts)} choices."
    )


def section(
    choices: Choices,
    found: Found,
    grids: dict[str, tuple[dict[str, float], ...]],
    protocol: str,
    rounds: int,
) -> str:
    """What stands in README.md."""
    parts = [protocol]
    parts += [
        f"{TITLES[scenario]}\n\n{table(scenario, lines)}" for scenario, lines in found.items()
    ]
    for line, base in GAINS:
        if all(line in by_line and base in by_line for by_line in found.values()):
            parts.append(f"{line} minus {base}, on the same data:\n\n{gains(found, line, base)}")
    parts.append(f"Lines beyond the paper:\n\n{beyond(found)}")
    parts.append(f"What was chosen:\n\n{choices_table(choices, grids)}")
    parts.append(edges(choices, grids, rounds))
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
