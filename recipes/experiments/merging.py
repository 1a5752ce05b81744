"""One model from clients that trained alone: matched units (PFNM) and beta-predictive Bayes.

    python -m recipes.experiments.merging --seeds 0 1 2

Five clients, whose classes are skewed, train a small network each and exchange nothing. Then their
networks are merged in several ways, and each result is tested on all test images: where all began
with the same weights, and where each had its own. A run that was stopped goes on with what is
missing.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_pfl import ClientModules, FederatedDataModule, FederatedStrategy
from lightning_pfl.data import Dirichlet, FashionMNIST
from lightning_pfl.merging import BetaPredictive, matched
from lightning_pfl.methods import LocalOnly
from lightning_pfl.models import MLP
from lightning_pfl.testing.fitting import quiet_trainer
from recipes.experiments.setting import parser
from recipes.plan import Plan
from recipes.results_table import spread

CLIENTS, ALPHA, PUBLIC = 5, 0.5, 5000
ROUNDS, DRAWS, SMALL_ROUNDS = 10, 5, 2
SIZES, POOL, LR, BATCH = (196, 50, 10), 2, 0.1, 100
DISTIL_EPOCHS, DISTIL_LR = 20, 1e-3
SETTING = {
    "clients": CLIENTS, "alpha": ALPHA, "public": PUBLIC, "draws": DRAWS, "sizes": SIZES,
    "pool": POOL, "lr": LR, "batch": BATCH, "distil": (DISTIL_EPOCHS, DISTIL_LR),
}  # fmt: skip
ACCURACIES = (
    "the clients' own, their mean",
    "mean of the parameters",
    "PFNM",
    "mean of the predictions",
    "their product",
    "between them, beta chosen",
    "distilled from it",
)

CHOSEN = {"units": "PFNM's hidden units", "beta": "the chosen beta"}
STARTS = {"equal": "equal starts", "own": "starts of their own"}

NOTE = """
With equal starts the units stay in their places, and PFNM's network is the mean but for the prior.
With starts of their own PFNM is 15 points above the mean of the parameters, which is below the
clients' own networks, and 3 points below what equal starts give. It has unit variances and
concentration 1, as its authors' code, and made no network wider than the clients'.

The predictions are worth more than any merged network, at the cost of all networks at once. Their
product is meant for draws of exact posteriors; here the networks of the last rounds stand for a
client's draws, and the chosen beta is near the mean. Beta is chosen on half of the public
images, with their labels, for the smallest log loss, which isn't the highest accuracy; the student
learns from all of them, without labels.
"""

Outcome = dict[str, float]
Found = dict[str, list[Outcome]]


class LastModels(L.Callback):
    """Keeps the clients' networks of the last rounds.

    Args:
        draws: Rounds.
    """

    def __init__(self, draws: int) -> None:
        self.draws = draws
        self.rounds: list[list[nn.Module]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add those of this round, and forget the oldest."""
        strategy: Any = trainer.strategy
        now = [strategy.client_module(k) for k in range(CLIENTS)]
        self.rounds = [*self.rounds, now][-self.draws :]


def network() -> MLP:
    """A network with weights of the generator's next numbers."""
    return MLP(SIZES, POOL, lr=LR, momentum=0.0, weight_decay=0.0)


def run(start: str, seed: int, rounds: int, data_dir: Path | None) -> Outcome:
    """Train the clients and merge them: accuracies, the chosen beta and PFNM's units."""
    L.seed_everything(seed, verbose=False)
    torch.set_num_threads(1)
    data = FederatedDataModule(
        FashionMNIST() if data_dir is None else FashionMNIST(str(data_dir)),
        Dirichlet(ALPHA),
        CLIENTS,
        batch_size=BATCH,
        seed=seed,
        public_samples=PUBLIC if data_dir is None else BATCH,
    )
    kept = LastModels(DRAWS)
    trainer = quiet_trainer(
        FederatedStrategy(LocalOnly(), seed=seed),
        rounds,
        callbacks=[kept],
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    own_starts = ClientModules({f"client{k}": network() for k in range(CLIENTS)})
    trainer.fit(network() if start == "equal" else own_starts, data)
    test, public = data.test_dataloader(), data.public_dataloader()
    assert public is not None
    inputs, labels = test.gather(torch.cat([*test.indices]))

    def accuracy(network: nn.Module) -> float:
        with torch.no_grad():
            return float((network.eval()(inputs).argmax(1) == labels).double().mean())

    own = kept.rounds[-1]
    merged = matched(own)
    together = BetaPredictive([list(networks) for networks in zip(*kept.rounds, strict=True)])
    shown = [public.gather(rows) for rows in public.indices[0].split(BATCH)]
    found = {"beta": together.choose_beta(shown[: len(shown) // 2] or shown)}
    chosen = accuracy(together)
    student = together.distil(copy.deepcopy(own[0]), shown, DISTIL_EPOCHS, DISTIL_LR)
    ends = {}
    for name, beta in ((ACCURACIES[3], 0.0), (ACCURACIES[4], 1.0)):
        together.beta = beta
        ends[name] = accuracy(together)
    values = (
        statistics.mean(map(accuracy, own)),
        accuracy(averaged(own)),
        accuracy(merged),
        *ends.values(),
        chosen,
        accuracy(student),
    )
    layer: Any = merged.get_submodule("head")
    return {**found, "units": layer.in_features, **dict(zip(ACCURACIES, values, strict=True))}


def averaged(networks: Sequence[nn.Module]) -> nn.Module:
    """A network with the mean of the others' parameters."""
    states: list[dict[str, Tensor]] = [each.state_dict() for each in networks]
    mean = copy.deepcopy(networks[0])
    mean.load_state_dict({n: torch.stack([s[n] for s in states]).mean(0) for n in states[0]})
    return mean


def measure(options: argparse.Namespace) -> Found:
    """Run every cell, or take those that are stored; by start, one per seed."""
    plan = Plan("merging", options.results)
    rounds = SMALL_ROUNDS if options.small else ROUNDS
    found: Found = {start: [] for start in STARTS}
    for seed in options.seeds:
        for start, outcomes in found.items():
            key = f"{start} seed={seed}"
            settings = {**SETTING, "start": start, "seed": seed, "rounds": rounds}
            if not options.stored:
                work = partial(run, start, seed, rounds, options.data_dir)
                outcomes.append(plan.cell(key, settings, work))
            elif (outcome := plan.stored(key, settings)) is not None:
                outcomes.append(outcome)
    return found


def table(found: Found) -> str:
    """Accuracies, in Markdown."""
    lines = [f"| model | {' | '.join(STARTS.values())} |", "|---" * (1 + len(STARTS)) + "|"]
    for name in ACCURACIES:
        cells = [spread([one[name] for one in found[start]]) for start in STARTS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name, digits in (("units", 0), ("beta", 2)):
        cells = [", ".join(f"{one[name]:.{digits}f}" for one in found[start]) for start in STARTS]
        lines.append(f"| {CHOSEN[name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def section(found: Found, seeds: Sequence[int], rounds: int) -> str:
    """What stands in README.md."""
    return (
        f"**Fashion-MNIST**, {CLIENTS} clients with classes from Dirichlet({ALPHA}); MLP "
        f"{'-'.join(map(str, SIZES))} on images averaged over 2 x 2 pixels, lr {LR}, minibatches "
        f"of {BATCH}, {rounds} epochs alone; {PUBLIC} public images; seeds "
        f"{', '.join(map(str, seeds))}. Accuracy on all test images in percent, mean ± standard "
        f"deviation over seeds; the last lines seed by seed.\n\n{table(found)}\n\n{NOTE.strip()}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    text, small = "One model from clients that trained alone", "Two epochs."
    options = ("stored", "results", "readme", "data-dir")
    return parser(text, small, *options, seeds=[0, 1, 2]).parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and write the section."""
    options = parse(arguments)
    found = measure(options)
    rounds = SMALL_ROUNDS if options.small else ROUNDS
    plan = Plan("merging", options.results)
    plan.write_section(section(found, options.seeds, rounds), options.readme)
    print(table(found))


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    main()
