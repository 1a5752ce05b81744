"""Figure 5 of the FedRep paper: test error against the number of local epochs, FedRep and FedAvg.

    python -m recipes.experiments.fedrep_figure5 --seeds 0 1

FedRep trains its head for E epochs and its body for one, FedAvg the whole network for E epochs. On
Fashion-MNIST, 100 clients with 2 classes each; both begin with the recipes of that name. A run that
was stopped goes on with what is missing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipes.experiments.setting import parser
from recipes.outcome import RECIPES
from recipes.plan import Plan
from recipes.results_table import spread

#: Method: its recipe, and the argument that the figure varies.
METHODS = {
    "FedRep": ("fedrep_fashion_mnist.yaml", "head_epochs"),
    "FedAvg": ("fedavg_fashion_mnist.yaml", "local_epochs"),
}
EPOCHS, ROUNDS = (1, 2, 5, 10, 15), 50
SMALL_EPOCHS, SMALL_ROUNDS = (1, 3), 2
Errors = dict[str, dict[int, list[float]]]

NOTE = """
The paper shows Figure 5 for CIFAR-10 with the same split, without numbers, and says that FedRep
never loses from more local epochs while FedAvg may. FedRep gains here up to E = 10; at E = 15 it is
level for one seed and half a point worse for the other. FedAvg gains too, from E = 10 on by little:
Fashion-MNIST is easier than CIFAR-10, and after 50 rounds FedAvg is still far from where it ends,
so that more local work is more progress.
"""


def measure(options: argparse.Namespace) -> Errors:
    """Run every cell, or take those that are stored.

    Returns:
        Test errors by method and number of epochs, one per seed.
    """
    plan = Plan("fedrep_figure5", options.results, options.logs)
    epochs, rounds = (SMALL_EPOCHS, SMALL_ROUNDS) if options.small else (EPOCHS, ROUNDS)
    errors: Errors = {name: {epoch: [] for epoch in epochs} for name in METHODS}
    for seed in options.seeds:
        for epoch in epochs:
            for name, (recipe, argument) in METHODS.items():
                settings = [f"--method.{argument}={epoch}", f"--trainer.max_epochs={rounds}"]
                if options.data_dir is not None:
                    settings.append(f"--data.source.data_dir={options.data_dir}")
                key = f"{name} E={epoch} seed={seed}"
                take = plan.stored_recipe if options.stored else plan.recipe
                outcome = take(key, RECIPES / recipe, seed, settings)
                if outcome is not None:
                    errors[name][epoch].append(1 - outcome["last10"]["val_acc"]["mean"])
    return errors


def draw(errors: Errors, path: Path) -> None:
    """Error against epochs, a line per method with the seeds as points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.4), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for name, by_epoch in errors.items():
        means = {e: 100 * sum(found) / len(found) for e, found in by_epoch.items() if found}
        (line,) = axes.plot([*means], [*means.values()], marker="o", label=name)
        for epoch, found in by_epoch.items():
            points = [100 * error for error in found]
            axes.plot([epoch] * len(points), points, ".", color=line.get_color(), alpha=0.4)
    axes.set(xlabel="local epochs E", ylabel="test error in percent", ylim=(0, None))
    axes.set_xticks([*next(iter(errors.values()))])
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def table(errors: Errors) -> str:
    """The rows of the figure, in Markdown."""
    epochs = [*next(iter(errors.values()))]
    lines = ["| method | " + " | ".join(f"E = {epoch}" for epoch in epochs) + " |"]
    lines.append("|---" * (len(epochs) + 1) + "|")
    lines += [
        f"| {name} | " + " | ".join(spread(by_epoch[epoch]) for epoch in epochs) + " |"
        for name, by_epoch in errors.items()
    ]
    return "\n".join(lines)


def section(errors: Errors, seeds: list[int]) -> str:
    """What stands in README.md."""
    return (
        "Fashion-MNIST, 100 clients with 2 "
        f"classes, 10 a round, {ROUNDS} rounds, seeds {', '.join(map(str, seeds))}; test error in "
        "percent, mean over clients and the last 10 rounds.\n\n"
        f"{table(errors)}\n\n![Error against local epochs](figures/fedrep_figure5.png)\n\n"
        f"{NOTE.strip()}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    text, small = "Figure 5 of the FedRep paper", "Two rounds, two numbers of epochs."
    options = ("stored", "results", "logs", "figures", "readme", "data-dir")
    return parser(text, small, *options, seeds=[0, 1]).parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, draw, and write the section."""
    options = parse(arguments)
    errors = measure(options)
    draw(errors, options.figures / "fedrep_figure5.png")
    plan = Plan("fedrep_figure5", options.results)
    plan.write_section(section(errors, options.seeds), options.readme)
    print(table(errors))


if __name__ == "__main__":
    main()
