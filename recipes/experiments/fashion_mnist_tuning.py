"""Hyper-parameters that the papers leave open, chosen on validation data of other clients.

    python -m recipes.experiments.fashion_mnist_tuning

Every setting of :data:`GRIDS` trains for 30 rounds on Fashion-MNIST split over 100 clients with two
classes, by a partition and a seed that no table uses. The score is the accuracy on a fifth of each
client's training samples, which then don't train; nothing is chosen by the test split. A subset of
methods runs what is missing of it; the section in README.md always shows all that is stored.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from recipes.experiments.setting import parser
from recipes.outcome import RECIPES
from recipes.plan import Plan
from recipes.results_table import spread

#: Method: its recipe, and the grid of arguments for the command line.
GRIDS: dict[str, tuple[str, dict[str, tuple[Any, ...]]]] = {
    "FedProx": ("fedprox", {"method.prox_weight": (0.001, 0.01, 0.1, 1.0)}),
    "SCAFFOLD": (
        "scaffold",
        {"method.server_lr": (0.1, 1.0), "model.momentum": (0.0, 0.5)},
    ),
    "PerFedAvg": ("per_fedavg", {"method.inner_lr": (0.003, 0.01, 0.03, 0.1)}),
    "Ditto": ("ditto", {"method.prox_weight": (0.01, 0.1, 1.0, 3.0)}),
    "APFL": ("apfl", {"method.mixing": (0.25, 0.5, 0.75)}),
    # As many expected passes in each: one epoch in nine of ten rounds, or two in every other. The
    # weights move a client by a tenth, half or nearly all of its distance to the mean.
    "L2GD": (
        "l2gd",
        {
            "method.aggregation_probability,method.local_epochs,method.mixing_weight": (
                (0.1, 1, 1.0),
                (0.1, 1, 5.0),
                (0.1, 1, 10.0),
                (0.5, 2, 10.0),
                (0.5, 2, 50.0),
            )
        },
    ),
    "FedMTL": ("fedmtl", {"method.regularization": (0.0001, 0.001, 0.01)}),
    # Its relationship is learned after 60 rounds at the latest, so it takes all 100 of the recipe.
    "MOCHA": (
        "mocha",
        {
            "trainer.max_epochs": (100,),
            "method.inner_iterations": (10, 60),
            "method.bound": ("common", "own"),
            "method.regularization": (0.001, 0.01, 0.1),
        },
    ),
    "PFedMe": (
        "pfedme",
        {"method.moreau_weight": (1.0, 15.0), "method.inner_lr": (0.01, 0.05)},
    ),
    "FedMAP": (
        "fedmap",
        {"method.prior.init_args.variance": (1.0, 15.0, 100.0, 1000.0)},
    ),
    # A sample's loss counts for a component by its responsibility, so steps are smaller than the
    # other methods'.
    "FedEM": (
        "fedem",
        {"method.components,model.lr": ((2, 0.01), (2, 0.03), (2, 0.1), (2, 0.2), (3, 0.03))},
    ),
    # Another network than the other methods'.
    "HeteroFL": ("heterofl", {"model.lr": (0.01, 0.03, 0.1)}),
    # One setting is changed at a time: the divergence counts for its weight over 600 samples.
    "PFedBayes": (
        "pfedbayes",
        {
            "method.kl_weight,model.lr": (
                (0.01, 0.03),
                (0.1, 0.01),
                (0.1, 0.03),
                (0.1, 0.1),
                (1.0, 0.03),
            )
        },
    ),
    "FedPop": (
        "fedpop",
        {
            "method.step_size,method.server_lr": (
                (0.01, 0.3),
                (0.03, 0.1),
                (0.03, 0.3),
                (0.03, 1.0),
                (0.1, 0.3),
                (0.3, 0.3),
                (1.0, 0.3),
                (3.0, 0.3),
                (10.0, 0.3),
                (30.0, 0.3),
            )
        },
    ),
    "FedMD": (
        "fedmd",
        {"method.distance": ("l1", "kl"), "method.digest_lr": (0.001, 0.01)},
    ),
    "FedASA": (
        "fedasa",
        {
            "method.threshold,method.every,model.lr": (
                (0.0, 5, 0.01),
                (0.0, 1, 0.01),
                (0.0, 20, 0.01),
                (0.3, 1, 0.01),
                (0.3, 5, 0.01),
                (0.6, 5, 0.01),
                (0.9, 5, 0.01),
                (0.3, 5, 0.03),
                (0.6, 1, 0.01),
                (0.9, 1, 0.01),
                (0.3, 1, 0.03),
                (0.6, 1, 0.03),
                (0.3, 1, 0.1),
            )
        },
    ),
    # A step of the server is on 256 images with all the clients' models: 20 take as long as the
    # clients' training.
    "FedDF": (
        "feddf",
        {"method.server_steps,method.server_lr": ((20, 1e-4), (20, 1e-3), (5, 1e-3))},
    ),
    "PerAda": ("perada", {"method.prox_weight": (0.1, 0.5, 1.0)}),
    "MatchedFedAvg": ("matched_fedavg", {"method.sweeps": (10, 1)}),
    "NearestNeighbours": (
        "fedavg_knn",
        {"trainer.callbacks.init_args.share": (0.25, 0.5, 0.75, 0.9)},
    ),
}
ROUNDS, SEED = 30, 100
SMALL_ROUNDS, SMALL_VALUES, SMALL_METHODS = 2, 2, ("FedProx", "MOCHA")
#: Score by setting, by method.
Scores = dict[str, dict[str, float]]


def settings(grid: dict[str, tuple[Any, ...]]) -> list[list[str]]:
    """The command lines of all points of a grid."""
    points = []
    for values in product(*grid.values()):
        point: list[str] = []
        for names, value in zip(grid, values, strict=True):
            together = value if isinstance(value, tuple) else (value,)
            pairs = zip(names.split(","), together, strict=True)
            point += [f"--{name}={single}" for name, single in pairs]
        points.append(point)
    return points


def short(setting: str) -> str:
    """``--method.prox_weight=0.1`` as it is shown: ``prox_weight=0.1``."""
    name, _, value = setting.partition("=")
    return f"{name.rpartition('.')[2]}={value}"


def points(name: str, options: argparse.Namespace) -> dict[str, tuple[Path, list[str]]]:
    """The settings of a method's grid as they are shown: recipe and command line of each."""
    recipe, grid = GRIDS[name]
    common = [
        *("--data.val_split=train", "--data.val_fraction=0.2", f"--data.seed={SEED}"),
        f"--trainer.max_epochs={ROUNDS}",
    ]
    last = [f"--trainer.max_epochs={SMALL_ROUNDS}"] if options.small else []
    if options.data_dir is not None:
        last.append(f"--data.source.data_dir={options.data_dir}")
    return {
        ", ".join(map(short, point)): (
            RECIPES / f"{recipe}_fashion_mnist.yaml",
            [*common, *point, *last],
        )
        for point in settings(grid)[: SMALL_VALUES if options.small else None]
    }


def identity(name: str, extra: list[str]) -> dict[str, Any]:
    """Collect the settings that a score depends on, without the arguments of the grid."""
    file, grid = GRIDS[name]
    recipe = yaml.safe_load((RECIPES / f"{file}_fashion_mnist.yaml").read_text())
    for argument in ["trainer.max_epochs", *(n for names in grid for n in names.split(","))]:
        section, *path, name = argument.split(".")
        place = recipe[section].get("init_args", recipe[section])
        for key in path:
            # The command line's settings of callbacks are the last one's.
            place = place[key][-1] if isinstance(place[key], list) else place[key]
        place.pop(name, None)
    return {"recipe": recipe, "extra": extra, "seed": SEED}


def score(outcome: dict[str, Any]) -> float:
    """Return the mean accuracy on validation data; with neighbours' votes where there are some."""
    found = outcome["last10"]
    return float(found.get("knn/val_acc", found["val_acc"])["mean"])


def measure(options: argparse.Namespace) -> Scores:
    """Run what is missing of the chosen methods; all stored scores by method and setting."""
    plan = Plan("fashion_mnist_tuning", options.results, options.logs)
    chosen = options.methods or (SMALL_METHODS if options.small else tuple(GRIDS))
    scores: Scores = {}
    for name in GRIDS:
        scores[name] = {}
        for shown, (recipe, extra) in points(name, options).items():
            key, depends_on = f"{name} {shown}", identity(name, extra)
            if name in chosen:
                plan.recipe(key, recipe, SEED, extra, depends_on)
            outcome = plan.stored(key, depends_on)
            if outcome is not None:
                scores[name][shown] = score(outcome)
    return scores


def table(scores: Scores) -> str:
    """A line per method with all scores; the best, which the recipes use, in bold."""
    lines = ["| method | validation accuracy in percent by setting |", "|---|---|"]
    for name, by_setting in scores.items():
        best = max(by_setting, key=lambda shown: by_setting[shown], default=None)
        cells = [
            f"**{shown}: {spread([score])}**" if shown == best else f"{shown}: {spread([score])}"
            for shown, score in by_setting.items()
        ]
        lines.append(f"| {name} | {'; '.join(cells) or '-'} |")
    return "\n".join(lines)


def section(scores: Scores) -> str:
    """What stands in README.md."""
    return (
        f"Fashion-MNIST, 100 clients with 2 classes, 10 a round, {ROUNDS} rounds unless said "
        f"otherwise, seed {SEED} and a partition of its own; mean over clients and the last 10 "
        "rounds, on a fifth of the training samples. The best setting, in bold, is that of the "
        "recipes.\n\n"
        f"{table(scores)}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    text, small = (
        "Choose hyper-parameters on validation data",
        "Two rounds, two methods, two values.",
    )
    command = parser(text, small, "results", "logs", "readme", "data-dir")
    command.add_argument("--methods", nargs="+", choices=GRIDS, help="Not all.")
    return command.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and write the section."""
    options = parse(arguments)
    scores = measure(options)
    plan = Plan("fashion_mnist_tuning", options.results)
    plan.write_section(section(scores), options.readme)
    print(table(scores))


if __name__ == "__main__":
    main()
