"""Figure 6 of the FedRep paper: new clients with new classes fit their head to a representation.

    python -m recipes.experiments.fedrep_figure6 --seeds 0 1 2

100 clients train on five classes of Fashion-MNIST, two each, for five local epochs a round; FedRep
trains its head for ten beside them, as the paper has it on FEMNIST. Then ten new clients that hold
the other five classes train the head alone, on 500 samples for one to fifty passes. A run that was
stopped goes on with what is missing.
"""

from __future__ import annotations

import argparse
import logging
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L

from lightning_pfl import FederatedDataModule, FederatedStrategy
from lightning_pfl.callbacks import NewClientAdaptation
from lightning_pfl.data import FashionMNIST, HeldOutClasses
from lightning_pfl.methods import (
    APFL,
    L2GD,
    FedAvg,
    FedProx,
    FedRep,
    LGFedAvg,
    PerFedAvg,
)
from lightning_pfl.methods.base import Method
from lightning_pfl.models import LeNet
from lightning_pfl.testing.fitting import quiet_trainer
from recipes.experiments.setting import parser
from recipes.plan import Plan
from recipes.results_table import spread

#: Line: the method's class, its arguments, and what new clients begin with.
LINES: dict[str, tuple[type[Method], dict[str, Any], Any]] = {
    "FedRep": (FedRep, {"head_epochs": 10, "body_epochs": 5}, "personal"),
    "FedRep, mean head": (FedRep, {"head_epochs": 10, "body_epochs": 5}, "mean"),
    "FedAvg": (FedAvg, {"local_epochs": 5}, "global"),
    # A body that nobody trains: that of round 0, where it is personal.
    "untrained body": (LGFedAvg, {"local_epochs": 1}, "personal"),
    "LGFedAvg": (LGFedAvg, {"local_epochs": 5}, "mean"),
    "L2GD": (L2GD, {"mixing_weight": 50.0, "local_epochs": 5}, "global"),
    "PerFedAvg": (PerFedAvg, {"inner_lr": 0.01, "local_epochs": 5}, "global"),
    "FedProx": (FedProx, {"prox_weight": 0.1, "local_epochs": 5}, "global"),
    "APFL": (APFL, {"mixing": 0.5, "local_epochs": 5}, "global"),
}
NEW_CLASSES = (5, 6, 7, 8, 9)
ROUNDS, SAMPLES, EPOCHS = 50, 500, (1, 2, 5, 10, 20, 50)
SMALL_ROUNDS, SMALL_EPOCHS = 1, (1, 2)
#: A line for comparison, and one that lies on that of FedAvg.
STYLES: dict[str, dict[str, Any]] = {
    "untrained body": {"color": "black", "linestyle": ":"},
    "APFL": {"linestyle": "--"},
}
#: Accuracies by line and number of passes, one per seed.
Curves = dict[str, dict[int, list[float]]]

NOTE = """
The paper trains on ten letters of FEMNIST and adapts to its ten digits; it shows curves without
numbers, FedRep far above the others. That gap isn't seen here: FedRep, FedAvg, FedProx and
PerFedAvg are within 1.2 points of each other from 10 passes on, which is within the spread over
seeds, and above L2GD and LGFedAvg. The paper doesn't say what a new client begins with. Here that
is the head of round 0 for FedRep, whose heads stay with the clients, and the trained model of the
server for the methods that have one; the mean of the clients' models for LGFedAvg, whose
representations stay with them. What FedRep's new clients begin with isn't the reason: the mean
head, of other classes, gives the same. How long the clients have trained is: with one local epoch
in place of five, 100 rounds and 10 passes (seed 0, not stored) FedRep had 70.8 % and FedAvg 75.8 %.
APFL's server has the model of FedAvg, and so the same line.
"""


def adapt(line: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Train a method, adapt the new clients; their mean test accuracy by number of passes."""
    method, arguments, start = LINES[line]
    L.seed_everything(seed, verbose=False)
    folder = {} if options.data_dir is None else {"data_dir": str(options.data_dir)}
    data = FederatedDataModule(
        FashionMNIST(**folder),
        HeldOutClasses(NEW_CLASSES, new_clients=10),
        num_clients=110,
        new_clients=10,
        seed=seed,
    )
    adaptation = NewClientAdaptation(
        samples=[SAMPLES],
        epochs=SMALL_EPOCHS if options.small else EPOCHS,
        scope="head",
        start=start,
        seed=seed,
    )
    trainer = quiet_trainer(
        FederatedStrategy(method(**arguments), participation=10),
        _rounds(line, options),
        callbacks=[adaptation],
        limit_val_batches=0,
    )
    trainer.fit(LeNet(lr=0.01, momentum=0.5, weight_decay=1e-4), data)
    return {
        str(found.epochs): float(found.evaluation.values["test_acc"].mean())
        for found in adaptation.results
    }


def _rounds(line: str, options: argparse.Namespace) -> int:
    """Check that training doesn't change a frozen body."""
    return SMALL_ROUNDS if options.small or line == "untrained body" else ROUNDS


def measure(options: argparse.Namespace) -> Curves:
    """Run every cell, or take those that are stored."""
    plan = Plan("fedrep_figure6", options.results)
    curves: Curves = {}
    for seed in options.seeds:
        for line, (_, arguments, start) in LINES.items():
            settings = {
                **{"line": line, "arguments": arguments, "start": start, "seed": seed},
                "rounds": _rounds(line, options),
                "epochs": SMALL_EPOCHS if options.small else EPOCHS,
            }
            key, work = f"{line} seed={seed}", partial(adapt, line, seed, options)
            found = plan.stored(key, settings) if options.stored else plan.cell(key, settings, work)
            for epochs, accuracy in (found or {}).items():
                curves.setdefault(line, {}).setdefault(int(epochs), []).append(accuracy)
    return curves


def draw(curves: Curves, path: Path) -> None:
    """Accuracy against passes, a line per method; the band is one standard error over seeds."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.8), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    ranked = sorted(curves, key=lambda line: -sum(curves[line][max(curves[line])]))
    epochs = [*curves[ranked[0]]]
    for line in ranked:
        accuracies = 100 * np.array([*curves[line].values()])
        mean = accuracies.mean(1)
        (drawn,) = axes.plot(epochs, mean, label=line, **STYLES.get(line, {}))
        if accuracies.shape[1] > 1:
            error = accuracies.std(1, ddof=1) / accuracies.shape[1] ** 0.5
            low, high = mean - error, mean + error
            axes.fill_between(epochs, low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel=f"passes over {SAMPLES} samples", ylabel="test accuracy in percent")
    axes.set_xscale("log")
    axes.set_xticks(epochs, [str(epoch) for epoch in epochs])
    axes.minorticks_off()
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def table(curves: Curves) -> str:
    """Accuracies by number of passes, in Markdown."""
    epochs = [*next(iter(curves.values()))]
    lines = ["| method | begins with | " + " | ".join(map(_passes, epochs)) + " |"]
    lines.append("|---" * (len(epochs) + 2) + "|")
    for line, by_epochs in curves.items():
        cells = [spread(by_epochs[epoch]) for epoch in epochs]
        lines.append(f"| {line} | {LINES[line][2]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _passes(epochs: int) -> str:
    return "1 pass" if epochs == 1 else f"{epochs} passes"


def section(curves: Curves, seeds: list[int]) -> str:
    """What stands in README.md."""
    missing = [line for line in LINES if line not in curves]
    note = NOTE.strip() + (f"\nNot run yet: {', '.join(missing)}." if missing else "")
    return (
        "Fashion-MNIST: 100 clients with 2 of "
        f"the classes 0 to 4, 10 a round, {ROUNDS} rounds of 5 local epochs; then 10 new clients "
        f"with the classes 5 to 9 train the head on {SAMPLES} samples, seeds "
        f"{', '.join(map(str, seeds))}; test accuracy in percent.\n\n"
        f"{table(curves)}\n\n![Accuracy against passes](figures/fedrep_figure6.png)\n\n"
        f"{note}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    text, small = "Figure 6 of the FedRep paper", "One round, two numbers of passes."
    options = ("stored", "results", "figures", "readme", "data-dir")
    return parser(text, small, *options, seeds=[0, 1, 2]).parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, draw, and write the section."""
    options = parse(arguments)
    curves = measure(options)
    draw(curves, options.figures / "fedrep_figure6.png")
    plan = Plan("fedrep_figure6", options.results)
    plan.write_section(section(curves, options.seeds), options.readme)
    print(table(curves))


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    main()
