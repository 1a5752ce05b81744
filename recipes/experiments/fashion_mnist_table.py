"""All methods of the FedRep paper's Table 1 on Fashion-MNIST, at three splits over clients.

    python -m recipes.experiments.fashion_mnist_table
    python -m recipes.experiments.fashion_mnist_table --splits 100,5 --methods FedRep --seeds 0

A split (n, S) has n clients with S classes each; a tenth of them takes part in a round. At (100, 2)
the runs are those of the recipes themselves. A subset runs what is missing of it; the section in
README.md always shows all that is stored.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from recipes.experiments.setting import parser
from recipes.outcome import RECIPES
from recipes.plan import Plan
from recipes.reproduce import Run
from recipes.results_table import spread


@dataclass(frozen=True)
class Split:
    """How the data are split, and how much is trained.

    Args:
        settings: For the command line; empty for the recipes as they are.
        seeds: Of the runs.
        passes: How often as many passes over the data a round as in the recipes.
    """

    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    passes: int = 1


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        recipe: The recipe without ``_fashion_mnist.yaml``.
        paper: Accuracies of Table 1 on CIFAR-10 at the three splits.
        passes: Name of the argument with the passes over the body per round.
        rounds: An argument that counts rounds, and is the same share of them at all splits.
        tuned: Whether the models are the fine-tuned ones.
    """

    recipe: str
    paper: tuple[str, str, str] = ("-", "-", "-")
    passes: str | None = "local_epochs"
    rounds: str | None = None
    tuned: bool = False


SPLITS = {
    "100,2": Split((), (0, 1, 2)),
    "100,5": Split(("--data.partition.classes_per_client=5", "--trainer.max_epochs=50"), (0,)),
    "1000,2": Split(
        (
            "--data.num_clients=1000",
            "--trainer.strategy.participation=100",
            "--trainer.max_epochs=50",
        ),
        (0,),
        passes=2,
    ),
}
ROWS = {
    "LocalOnly": Row("local", ("89.79", "70.68", "78.30"), passes=None),
    "FedAvg": Row("fedavg_ft", ("42.65", "51.78", "44.31")),
    "FedAvg + FT": Row("fedavg_ft", ("87.65", "73.68", "82.04"), tuned=True),
    "FedProx": Row("fedprox_ft", ("39.92", "50.99", "21.93")),
    "FedProx + FT": Row("fedprox_ft", ("85.81", "72.75", "75.41"), tuned=True),
    "SCAFFOLD": Row("scaffold_ft", ("37.72", "47.33", "33.79")),
    "SCAFFOLD + FT": Row("scaffold_ft", ("86.35", "68.23", "78.24"), tuned=True),
    "FedMTL": Row("fedmtl", ("80.46", "58.31", "76.53")),
    "MOCHA": Row("mocha", passes="local_fraction", rounds="inner_iterations"),
    "PerFedAvg": Row("per_fedavg", ("82.27", "67.20", "67.36")),
    "LGFedAvg": Row("lg_fedavg", ("84.14", "63.02", "77.48")),
    "L2GD": Row("l2gd", ("81.04", "59.98", "71.96")),
    "APFL": Row("apfl", ("83.77", "72.29", "82.39")),
    "Ditto": Row("ditto", ("85.39", "70.34", "80.36")),
    "FedPer": Row("fedper", ("87.13", "73.84", "81.73")),
    "FedRep": Row("fedrep", ("87.70", "75.68", "83.27"), passes="body_epochs"),
    "FedBN": Row("fedbn"),
    "PFedMe": Row("pfedme"),
    "FedMAP": Row("fedmap"),
}
SMALL_METHODS = ("FedAvg", "FedAvg + FT", "FedRep")
SUMMARY = """
Fashion-MNIST, 100 or 1000 clients with 2 or 5 classes, a tenth of them a round: accuracy in
percent, mean over clients and the last 10 rounds, the best of a split in bold; processor seconds of
a round at (100, 5), with the evaluation of all clients. Written by
`python -m recipes.experiments.fashion_mnist_table`; rounds, seeds, deviations, the worst clients
and the paper's figures are in [recipes/README.md](../recipes/README.md).
"""
MEANS = """
Fashion-MNIST, a tenth of the clients in a round; {how} over a client's data a round. LocalOnly
trains all clients, one pass a round. Mean over clients and the last 10 rounds in percent, mean ±
standard deviation over seeds. *Paper*: Table 1, CIFAR-10.
"""
COSTS = """
The worst tenth of the clients in the same rounds; processor seconds of a round with the evaluation
of all clients, where they were measured; seeds at the three splits.
"""
CHOOSING = RECIPES.parent / "docs" / "choosing.md"


class Grid:
    """The runs behind the table.

    Args:
        options: The command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.plan = Plan("fashion_mnist_table", options.results, options.logs)

    def run(self, name: str, split: str, seed: int) -> None:
        """Run a cell that isn't stored."""
        recipe, extra = self._recipe(name), self._settings(name, split)
        if not self._is_own(split):
            self.plan.recipe(self._key(name, split, seed), recipe, seed, extra)
        elif not (run := self._own_run(recipe, seed, extra)).is_done() and run.start():
            raise RuntimeError(f"{run.recipe.name} with seed {seed} failed, see above.")

    def stored(self, name: str, split: str) -> list[dict[str, Any]]:
        """The outcomes that there are, one per seed."""
        recipe, extra = self._recipe(name), self._settings(name, split)
        found = []
        for seed in SPLITS[split].seeds:
            if self._is_own(split):
                run = self._own_run(recipe, seed, extra)
                found.append(json.loads(run.outcome.read_text()) if run.is_done() else None)
            else:
                key = self._key(name, split, seed)
                found.append(self.plan.stored_recipe(key, recipe, seed, extra))
        return [outcome for outcome in found if outcome is not None]

    def _is_own(self, split: str) -> bool:
        """Whether a run of the recipe itself is meant, which other tables show as well."""
        return not SPLITS[split].settings

    def _own_run(self, recipe: Path, seed: int, extra: list[str]) -> Run:
        options = argparse.Namespace(logs=self.options.logs, results=self.options.results)
        options.extra = extra
        return Run(recipe, seed, options)

    def _key(self, name: str, split: str, seed: int) -> str:
        return f"{ROWS[name].recipe} ({split}) seed={seed}"

    def _recipe(self, name: str) -> Path:
        return RECIPES / f"{ROWS[name].recipe}_fashion_mnist.yaml"

    def _settings(self, name: str, split: str) -> list[str]:
        extra, row = list(SPLITS[split].settings), ROWS[name]
        settings = yaml.safe_load(self._recipe(name).read_text())["method"]["init_args"]
        if SPLITS[split].passes > 1 and row.passes is not None:
            extra.append(f"--method.{row.passes}={SPLITS[split].passes * settings[row.passes]}")
        if row.rounds is not None and not self._is_own(split):
            share = rounds(split) / rounds(next(iter(SPLITS)))
            extra.append(f"--method.{row.rounds}={round(share * settings[row.rounds])}")
        if self.options.small:
            extra.append("--trainer.max_epochs=2")
        if self.options.data_dir is not None:
            extra.append(f"--data.source.data_dir={self.options.data_dir}")
        return extra


def rounds(split: str) -> int:
    """Rounds of a split: its own, or those of the recipes."""
    for setting in SPLITS[split].settings:
        if setting.startswith("--trainer.max_epochs="):
            return int(setting.partition("=")[2])
    recipe = RECIPES / f"{ROWS['FedRep'].recipe}_fashion_mnist.yaml"
    return int(yaml.safe_load(recipe.read_text())["trainer"]["max_epochs"])


def planned(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Cells in the order in which they run: first seeds first, then split by split."""
    chosen = options.methods or (SMALL_METHODS if options.small else tuple(ROWS))
    seeds = sorted({seed for split in options.splits for seed in SPLITS[split].seeds})
    return [
        (name, split, seed)
        for seed in seeds
        for split in options.splits
        for name in chosen
        if seed in SPLITS[split].seeds and (options.seeds is None or seed in options.seeds)
    ]


def shown(split: str) -> str:
    """A split as the paper writes it."""
    return f"({split})".replace(",", ", ")


def value(name: str, outcomes: list[dict[str, Any]], statistic: str) -> str:
    """Mean and deviation over seeds, in percent."""
    metric = "ft/val_acc" if ROWS[name].tuned else "val_acc"
    return spread([outcome["last10"][metric][statistic] for outcome in outcomes])


def seconds(outcomes: list[dict[str, Any]]) -> str:
    """Processor seconds of a round with its evaluation."""
    found = [o["cpu_seconds"] / o["rounds"] for o in outcomes if "cpu_seconds" in o]
    return f"{statistics.mean(found):.2f}" if found else "-"


def accuracies(grid: Grid) -> str:
    """Compare mean accuracies with the paper's."""
    titles = [title for split in SPLITS for title in (shown(split), "paper")]
    lines = ["| method | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for name, row in ROWS.items():
        cells = []
        for split, paper in zip(SPLITS, row.paper, strict=True):
            cells += [value(name, grid.stored(name, split), "mean"), paper]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def costs(grid: Grid) -> str:
    """Worst decile and time of a round."""
    titles = [f"worst decile {shown(split)}" for split in SPLITS]
    titles += [f"s/round {shown(split)}" for split in SPLITS] + ["seeds"]
    lines = ["| method | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for name in ROWS:
        stored = [grid.stored(name, split) for split in SPLITS]
        cells = [value(name, outcomes, "worst_decile") for outcomes in stored]
        cells += [seconds(outcomes) for outcomes in stored]
        cells.append(", ".join(str(len(outcomes)) for outcomes in stored))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(grid: Grid) -> str:
    """What stands in docs/choosing.md: rounded, the best of each split in bold."""
    lines = ["| method | " + " | ".join(map(shown, SPLITS)) + " | seconds a round |"]
    lines.append("|---" * (len(SPLITS) + 2) + "|")
    means = {
        (name, split): mean(name, grid.stored(name, split)) for name in ROWS for split in SPLITS
    }
    best = {
        split: max((m for (_, s), m in means.items() if s == split and m is not None), default=None)
        for split in SPLITS
    }
    for name in ROWS:
        cells = []
        for split in SPLITS:
            found = means[name, split]
            text = "-" if found is None else f"{100 * found:.1f}"
            ties = found is not None and text == f"{100 * (best[split] or 0):.1f}"
            cells.append(f"**{text}**" if ties else text)
        cells.append(seconds(grid.stored(name, "100,5") or grid.stored(name, "100,2")))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return SUMMARY.strip() + "\n\n" + "\n".join(lines)


def mean(name: str, outcomes: list[dict[str, Any]]) -> float | None:
    """Mean over seeds of a line's accuracy; None without outcomes."""
    metric = "ft/val_acc" if ROWS[name].tuned else "val_acc"
    found = [outcome["last10"][metric]["mean"] for outcome in outcomes]
    return statistics.mean(found) if found else None


def section(grid: Grid) -> str:
    """What stands in README.md."""
    how = "; ".join(
        f"{shown(split)}: {rounds(split)} rounds of {plan.passes} pass{'es' * (plan.passes > 1)}"
        for split, plan in SPLITS.items()
    )
    return "\n\n".join(
        [MEANS.format(how=how).strip(), accuracies(grid), COSTS.strip(), costs(grid)]
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    text, small = "Table 1 of the FedRep paper on Fashion-MNIST", "Two rounds of three methods."
    command = parser(text, small, "results", "logs", "readme", "data-dir")
    command.add_argument("--splits", nargs="+", choices=SPLITS, default=list(SPLITS))
    command.add_argument("--methods", nargs="+", choices=ROWS, help="Not all.")
    command.add_argument("--seeds", nargs="+", type=int, help="Not all; each split has its own.")
    command.add_argument("--choosing", type=Path, default=CHOOSING, help="Where the summary is.")
    options = command.parse_args(arguments)
    options.logs, options.results = options.logs.resolve(), options.results.resolve()
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing of what was asked for, and write the section."""
    options = parse(arguments)
    grid = Grid(options)
    for cell in planned(options):
        grid.run(*cell)
    grid.plan.write_section(section(grid), options.readme)
    grid.plan.write_section(summary(grid), options.choosing)
    print(accuracies(grid), costs(grid), sep="\n\n")


if __name__ == "__main__":
    main()
