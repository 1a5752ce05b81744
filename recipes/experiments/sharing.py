"""Where sharing pays: accuracy against the samples of a client, and against participation.

    python -m recipes.experiments.sharing
    python -m recipes.experiments.sharing --seeds 0 --methods LocalOnly FedAvg

100 clients with 2 or 5 classes of Fashion-MNIST have 10 to 600 training images each. LocalOnly is
shown twice: after as many passes over a client's data as the other methods make (equal passes), and
after as many rounds, in each of which all clients train (equal rounds). Cells run in an order in
which those that are stored make a figure at any time; a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch

from lightning_pfl import FederatedCallback, FederatedDataModule, FederatedStrategy
from lightning_pfl.callbacks import HeadFineTuning
from lightning_pfl.contract.records import ClientResults
from lightning_pfl.data import ClassesPerClient, FashionMNIST
from lightning_pfl.data.sources.base import Source, SourceData
from lightning_pfl.methods import APFL, Ditto, FedAvg, FedMAP, FedPer, FedRep, LocalOnly
from lightning_pfl.methods.base import Method
from lightning_pfl.models import MLP
from lightning_pfl.priors import GaussianPrior
from lightning_pfl.testing.fitting import quiet_trainer
from recipes.experiments.setting import parser
from recipes.plan import Plan
from recipes.results_table import spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLIENTS = 100
SAMPLES = (10, 20, 50, 100, 300, 600)
CLASSES = (2, 5)
PARTICIPATIONS = (0.05, 0.1, 0.5, 1.0)
USUAL = 0.1
#: Where participation is varied.
VARIED_SAMPLES, VARIED_CLASSES = 50, 5
ROUNDS, SMALL_ROUNDS = 100, 2
SMALL_METHODS = ("LocalOnly", "FedAvg")
EPOCHS = 5
LR, MOMENTUM, BATCH = 0.05, 0.5, 10
SIZES, POOL = (196, 64, 10), 2
TUNING = 10
SETTING = {
    "clients": CLIENTS, "lr": LR, "momentum": MOMENTUM, "batch": BATCH, "sizes": SIZES,
    "pool": POOL, "tuning": TUNING,
}  # fmt: skip

#: How each method is made. All make EPOCHS passes a round; Ditto and APFL train two models in them.
METHODS: dict[str, Callable[[], Method]] = {
    "LocalOnly": partial(LocalOnly, local_epochs=EPOCHS),
    "FedAvg": partial(FedAvg, local_epochs=EPOCHS),
    "FedPer": partial(FedPer, local_epochs=EPOCHS),
    "FedRep": partial(FedRep, head_epochs=EPOCHS - 1, body_epochs=1),
    "Ditto": partial(Ditto, prox_weight=1.0, local_epochs=EPOCHS),
    "FedMAP": lambda: FedMAP(GaussianPrior(1000.0), local_epochs=EPOCHS),
    "APFL": partial(APFL, mixing=0.5, adaptive=False, local_epochs=EPOCHS),
}
PASSES, EQUAL_ROUNDS, TUNED = "LocalOnly, equal passes", "LocalOnly, equal rounds", "FedAvg + FT"
#: The lines of tables and figures, and the method whose runs they show.
LINES = {
    PASSES: "LocalOnly", EQUAL_ROUNDS: "LocalOnly", "FedAvg": "FedAvg", TUNED: "FedAvg",
    **{name: name for name in METHODS if name not in ("LocalOnly", "FedAvg")},
}  # fmt: skip

NOTE = """
Every method makes 5 passes over a client's data in a round that the client takes part in, so 50 in
all on average; Ditto and APFL train two models in each. Step size, momentum and the methods'
settings (those of the recipes) are the same everywhere and were not tuned for the number of
samples. "+ FT": the heads are tuned for 10 passes more, after the last round.
"""


@dataclass(frozen=True)
class Cell:
    """One run.

    Args:
        method: Its name in METHODS.
        classes: Classes of a client, at most.
        samples: Training images of a client.
        participation: Share of the clients in a round; LocalOnly trains all of them.
        rounds: Communication rounds.
        seed: Of the clients, of the initial weights and of who takes part.
    """

    method: str
    classes: int
    samples: int
    participation: float
    rounds: int
    seed: int

    @property
    def key(self) -> str:
        """Its name in the file of results."""
        return (
            f"{self.method} ({self.classes}, {self.samples}) {self.participation} "
            f"{self.rounds} rounds seed={self.seed}"
        )

    @property
    def settings(self) -> dict[str, Any]:
        """All that the outcome depends on."""
        return {**SETTING, **METHODS[self.method]().settings(), **asdict(self)}


Point = tuple[int, int, float, bool]
"""Classes, samples, participation, and whether all participations have as many rounds, or as many
passes over a client's data."""


def cell(line: str, point: Point, rounds: int, seed: int) -> Cell:
    """The run that a line of a figure shows at a point.

    Args:
        line: Its name in LINES.
        point: The point.
        rounds: Communication rounds at the usual participation.
        seed: The seed.
    """
    classes, samples, participation, equal_rounds = point
    method = LINES[line]
    few = max(1, round(rounds * USUAL))
    if method == "LocalOnly":
        rounds = rounds if line == EQUAL_ROUNDS else few
        return Cell(method, classes, samples, 1.0, rounds, seed)
    if not equal_rounds:
        rounds = max(1, round(rounds * USUAL / participation))
    return Cell(method, classes, samples, participation, rounds, seed)


def points() -> Iterator[Point]:
    """All points."""
    for samples in SAMPLES:
        for classes in CLASSES:
            yield classes, samples, USUAL, True
    for equal_rounds in (False, True):
        for participation in PARTICIPATIONS:
            yield VARIED_CLASSES, VARIED_SAMPLES, participation, equal_rounds


def planned(seeds: Sequence[int], rounds: int = ROUNDS) -> Iterator[Cell]:
    """All runs, each once, in the order in which they run: for each seed the short ones first."""
    for seed in seeds:
        runs = dict.fromkeys(
            cell(line, point, rounds, seed) for point in points() for line in LINES
        )
        yield from sorted(runs, key=lambda run: run.samples * run.rounds * run.participation)


# --- a run ---


class Fewer(Source):
    """The first images of each class, and the whole test set.

    Args:
        source: The whole source.
        per_class: Training images of each class.
    """

    def __init__(self, source: Source, per_class: int) -> None:
        self.source, self.per_class = source, per_class

    def prepare(self) -> None:
        """Download, if the source does."""
        self.source.prepare()

    def load(self) -> SourceData:
        """Return a part of the training images."""
        whole = self.source.load()
        labels = np.asarray(whole.labels)
        firsts = [np.nonzero(labels == label)[0][: self.per_class] for label in np.unique(labels)]
        kept = np.sort(np.concatenate(firsts))
        fields = tuple(field[torch.from_numpy(kept)] for field in whole.fields)
        return replace(whole, fields=fields, labels=labels[kept])


class LastRounds(FederatedCallback):
    """Keeps accuracies of the rounds from ``first`` on: of the mean client, and the worst tenth."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.means: dict[int, float] = {}
        self.worst: dict[int, float] = {}

    def on_clients_evaluated(
        self, trainer: L.Trainer, module: L.LightningModule, results: ClientResults
    ) -> None:
        """Take note of an evaluation of the clients' models."""
        if results.round >= self.first:
            values = results.evaluations[""].values["val_acc"].double().sort().values
            self.means[results.round] = float(values.mean())
            self.worst[results.round] = float(values[: len(values) // 10].mean())


@cache
def source(data_dir: Path | None) -> FashionMNIST:
    """The data set."""
    return FashionMNIST() if data_dir is None else FashionMNIST(str(data_dir))


def run(wanted: Cell, data_dir: Path | None) -> dict[str, float]:
    """Train; returns means over the last fifth of the rounds, and the values of tuned models."""
    L.seed_everything(wanted.seed, verbose=False)
    torch.set_num_threads(1)
    data = FederatedDataModule(
        Fewer(source(data_dir), wanted.samples * CLIENTS // 10),
        ClassesPerClient(wanted.classes),
        CLIENTS,
        batch_size=BATCH,
        seed=wanted.seed,
        val_split="test",  # nothing is chosen by it
    )
    last = LastRounds(wanted.rounds - max(1, wanted.rounds // 5))
    tuning = [HeadFineTuning(epochs=TUNING)] if wanted.method == "FedAvg" else []
    strategy = FederatedStrategy(
        METHODS[wanted.method](), participation=wanted.participation, seed=wanted.seed
    )
    trainer = quiet_trainer(
        strategy,
        wanted.rounds,
        callbacks=[last, *tuning],
        num_sanity_val_steps=0,
        check_val_every_n_epoch=max(1, wanted.rounds // 50),
    )
    trainer.fit(MLP(SIZES, POOL, lr=LR, momentum=MOMENTUM, weight_decay=0.0), data)
    found = {
        "acc": statistics.mean(last.means.values()),
        "worst": statistics.mean(last.worst.values()),
    }
    if tuning:
        metrics = trainer.callback_metrics
        found["ft_acc"] = float(metrics["ft/val_acc"])
        found["ft_worst"] = float(metrics["ft/val_acc/worst_decile"])
    return found


# --- what is shown ---


class Stored:
    """The outcomes that there are.

    Args:
        plan: The file of results.
        seeds: The seeds that are shown.
        rounds: Communication rounds at the usual participation.
    """

    def __init__(self, plan: Plan, seeds: Sequence[int], rounds: int) -> None:
        self.seeds, self.rounds = seeds, rounds
        runs = planned(seeds, rounds)
        self.found = {each: plan.stored(each.key, each.settings) for each in runs}

    def values(self, line: str, point: Point) -> dict[int, float]:
        """Accuracies of a line at a point by seed, of the seeds that are stored."""
        name = "ft_acc" if line == TUNED else "acc"
        outcomes = {seed: self.found[cell(line, point, self.rounds, seed)] for seed in self.seeds}
        return {
            seed: float(outcome[name]) for seed, outcome in outcomes.items() if outcome is not None
        }

    def best(self, point: Point) -> str | None:
        """The best line at a point, over the seeds that all lines have; None without such seeds."""
        values = {line: self.values(line, point) for line in LINES}
        shared = set(self.seeds).intersection(*values.values())
        if not shared:
            return None
        return max(LINES, key=lambda line: statistics.mean(values[line][seed] for seed in shared))

    @property
    def share(self) -> tuple[int, int]:
        """How many runs are stored, and how many there are."""
        return sum(outcome is not None for outcome in self.found.values()), len(self.found)


def table(stored: Stored, classes: int) -> str:
    """Accuracy against samples, the best of a column in bold, in Markdown."""
    columns: list[Point] = [(classes, samples, USUAL, True) for samples in SAMPLES]
    best = [stored.best(point) for point in columns]
    lines = [f"| {classes} classes | " + " | ".join(map(str, SAMPLES)) + " |"]
    lines.append("|---" * (len(SAMPLES) + 1) + "|")
    for line in LINES:
        texts = [spread([*stored.values(line, point).values()]) for point in columns]
        cells = [f"**{t}**" if line == b else t for t, b in zip(texts, best, strict=True)]
        lines.append(f"| {line} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(stored: Stored, path: Path) -> None:
    """Accuracy against samples at 2 and 5 classes, and against participation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7.6), dpi=100, layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    for place, classes in zip(axes, CLASSES, strict=False):
        draw_lines(place, stored, [((classes, n, USUAL, True), n) for n in SAMPLES])
        title = f"{classes} classes each, {USUAL:.0%} of the clients a round"
        place.set(xlabel="training images of a client", title=title)
        place.set_xticks(SAMPLES, list(map(str, SAMPLES)))
    for place, equal_rounds in zip(axes[2:], (False, True), strict=True):
        varied = [(VARIED_CLASSES, VARIED_SAMPLES, p, equal_rounds) for p in PARTICIPATIONS]
        draw_lines(place, stored, list(zip(varied, PARTICIPATIONS, strict=True)))
        how = f"{stored.rounds} rounds" if equal_rounds else "equal passes"
        title = f"{VARIED_CLASSES} classes, {VARIED_SAMPLES} images, {how}"
        place.set(xlabel="share of the clients in a round", title=title)
        place.set_xticks(PARTICIPATIONS, list(map(str, PARTICIPATIONS)))
    for place in axes[::2]:
        place.set_ylabel("accuracy, mean over clients (%)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_lines(axes: Axes, stored: Stored, points: Sequence[tuple[Point, float]]) -> None:
    """Draw each line's means over seeds with a band of one standard deviation."""
    for number, line in enumerate(LINES):
        found = [(x, [*v.values()]) for point, x in points if (v := stored.values(line, point))]
        x = [each[0] for each in found]
        means = np.array([100 * statistics.mean(values) for _, values in found])
        deviations = [100 * statistics.stdev(v) if len(v) > 1 else 0.0 for _, v in found]
        style = "--o" if line == PASSES else "-o"
        colour = "black" if line in (PASSES, EQUAL_ROUNDS) else f"C{number - 2}"
        axes.plot(x, means, style, color=colour, label=line, markersize=3.5, linewidth=1.4)
        low, high = means - deviations, means + deviations
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.set_xlim(points[0][1] / 1.15, points[-1][1] * 1.15)
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def section(stored: Stored) -> str:
    """What stands in README.md."""
    done, whole = stored.share
    state = (
        ""
        if done == whole
        else f" {done} of {whole} runs are done; without ±: one seed; a dash: not yet."
    )
    tables = "\n\n".join(table(stored, classes) for classes in CLASSES)
    return (
        f"**Fashion-MNIST**, {CLIENTS} clients, a tenth of them a round, {stored.rounds} rounds; "
        f"MLP 196-64-10 on images averaged over 2 x 2 pixels, lr {LR}, momentum {MOMENTUM}, "
        f"minibatches of {BATCH}. Test accuracy in percent against the training images of a "
        "client: mean over clients and the last fifth of the rounds, mean ± standard deviation "
        f"over seeds {', '.join(map(str, stored.seeds))}; the best of a column, over "
        f"the seeds that all of it have, in bold.{state}\n\n"
        f"{tables}\n\n![Accuracy against samples and participation](figures/sharing.png)\n\n"
        f"{NOTE.strip()}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    text = "Accuracy against the samples of a client, and against participation"
    options = ("stored", "results", "figures", "readme", "data-dir")
    command = parser(text, "Two rounds of two methods with few images.", *options, seeds=[0, 1, 2])
    command.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    return command.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing of what was asked for, draw, and write the section."""
    options = parse(arguments)
    plan = Plan("sharing", options.results)
    rounds = SMALL_ROUNDS if options.small else ROUNDS
    methods = SMALL_METHODS if options.small else options.methods
    wanted = [each for each in planned(options.seeds, rounds) if each.method in methods]
    if options.small:
        wanted = [each for each in wanted if each.samples == SAMPLES[0]]
    for each in [] if options.stored else wanted:
        plan.cell(each.key, each.settings, partial(run, each, options.data_dir))
    stored = Stored(plan, options.seeds, rounds)
    draw(stored, options.figures / "sharing.png")
    plan.write_section(section(stored), options.readme)
    for classes in CLASSES:
        print(table(stored, classes), end="\n\n")


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    main()
