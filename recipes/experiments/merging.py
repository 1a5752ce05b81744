"""One model from clients that trained alone: matched units (PFNM) and beta-predictive Bayes.

    python -m recipes.experiments.merging --seeds 0 1 2

Five clients, whose classes are skewed, train a small network each and exchange nothing. Then their
networks are merged in several ways, and each result is tested on all test images. A run that was
stopped goes on with what is missing.
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

from lightning_pfl import FederatedDataModule, FederatedStrategy
from lightning_pfl.data import Dirichlet, FashionMNIST
from lightning_pfl.merging import BetaPredictive, matched
from lightning_pfl.methods import LocalOnly
from lightning_pfl.models import MLP
from recipes.experiments.setting import parser, quiet_trainer
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

NOTE = """
The product of the predictions is meant for draws of exact posteriors. Here the networks of the last
rounds stand for a client's draws, and beta makes up for it. Beta is chosen on half of the public
images, with their labels; the student learns from all of them, without. All clients start from the
same weights, which helps the mean of the parameters. PFNM has unit variances and concentration 1,
as its authors' code; all of a client's units that resemble no other's are kept, halved by the
prior.
"""

Outcome = dict[str, float]


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


def run(seed: int, rounds: int, data_dir: Path | None) -> Outcome:
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
    trainer.fit(MLP(SIZES, POOL, lr=LR, momentum=0.0, weight_decay=0.0), data)
    test, public = data.test_dataloader(), data.public_dataloader()
    assert public is not None
    inputs, labels = test.gather(torch.cat(test.indices))

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


def measure(options: argparse.Namespace) -> list[Outcome]:
    """Run every seed, or take what is stored."""
    plan = Plan("merging", options.results)
    rounds = SMALL_ROUNDS if options.small else ROUNDS
    found = []
    for seed in options.seeds:
        settings = {**SETTING, "seed": seed, "rounds": rounds}
        if not options.stored:
            work = partial(run, seed, rounds, options.data_dir)
            found.append(plan.cell(f"seed={seed}", settings, work))
        elif (outcome := plan.stored(f"seed={seed}", settings)) is not None:
            found.append(outcome)
    return found


def table(found: Sequence[Outcome]) -> str:
    """Accuracies, in Markdown."""
    lines = ["| model | test accuracy |", "|---|---|"]
    return "\n".join(
        [*lines, *(f"| {name} | {spread([one[name] for one in found])} |" for name in ACCURACIES)]
    )


def section(found: Sequence[Outcome], seeds: Sequence[int], rounds: int) -> str:
    """What stands in README.md."""
    units = ", ".join(f"{one['units']:.0f}" for one in found)
    betas = ", ".join(f"{one['beta']:.2f}" for one in found)
    return (
        f"**Fashion-MNIST**, {CLIENTS} clients with classes from Dirichlet({ALPHA}); MLP "
        f"{'-'.join(map(str, SIZES))} on images averaged over 2 x 2 pixels, lr {LR}, minibatches "
        f"of {BATCH}, {rounds} epochs alone; {PUBLIC} public images; seeds "
        f"{', '.join(map(str, seeds))}. Accuracy on all test images in percent, mean ± standard "
        f"deviation over seeds. PFNM's networks have {units} hidden units; the chosen beta is "
        f"{betas}.\n\n{table(found)}\n\n{NOTE.strip()}"
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
    if found:
        plan = Plan("merging", options.results)
        plan.write_section(section(found, options.seeds, rounds), options.readme)
        print(table(found))


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    main()
