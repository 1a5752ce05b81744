"""Figure 1 of the FedRep paper: errors of Local, FedAvg and FedRep on linear regressions.

    python -m recipes.experiments.fedrep_figure1 --seeds 0 1 2 3 4

100 clients with m samples each of a 20-dimensional regression, whose solutions share a subspace of
dimension 2. The samples are the same in all rounds. A run that was stopped goes on with what is
missing.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from functools import partial
from typing import Any

import torch

from lightning_pfl import FederatedDataModule
from lightning_pfl.data import LinearRepresentation
from lightning_pfl.methods import FedAvg, LinearFedRep
from lightning_pfl.solvers.least_squares import least_squares
from recipes.experiments.linear_regressions import (
    RIDGE,
    by_samples,
    figure,
    parse,
    risks,
    samples_of,
    train,
    with_heads,
)
from recipes.plan import Plan

CLIENTS, NEW, DIM, RANK, ROUNDS, SAMPLES = 100, 100, 20, 2, 500, (5, 10, 20)
SMALL_CLIENTS, SMALL_ROUNDS = 20, 10
NEW_SAMPLES = 20
#: FedAvg's step is the notebook's, and a small one that keeps more of the moments.
FEDREP_LR, FEDAVG_LR, SMALL_LR = 0.2, 0.5, 0.02
#: By method: for m = 5, 10, 20, what a simulation of the same problem in NumPy gave.
EXPECTED = {
    "Local": ("0.76", "0.50", "no number"),
    "FedAvg": ("1.03", "1.00", "0.99"),
    "FedAvg, heads refitted": ("0.82", "0.25", "0.12"),
    "FedAvg, step 0.02, heads refitted": ("0.82", "0.25", "0.12"),
    "FedAvg from a random start, heads refitted": ("-", "-", "-"),
    "FedRep": ("7.0e-04", "1.9e-04", "7e-05"),
}

NOTE = """
The paper's figure has no numbers; what was expected comes from a simulation in NumPy with other
draws. Local is least squares with a ridge of 1e-5, the notebook's. FedAvg's model can't be better
than 1, half the mean squared distance of the clients' solutions from their mean, however many
samples there are. FedRep and FedAvg begin with the moments; the notebook begins at random and
scales inputs and steps in another way. The noise has the variance 1e-3 that the text states, while
the notebook has a standard deviation of 1e-3. What was expected of
FedAvg's representation, without its step, lies between the two steps shown: FedAvg forgets the
moments as it trains, and faster with the notebook's step, 0.5 (its 0.005 on the sum of 100
gradients).
"""


def source(seed: int, samples: int, small: bool) -> LinearRepresentation:
    """The clients, and as many new ones for Figure 4."""
    clients = SMALL_CLIENTS if small else CLIENTS
    return LinearRepresentation(
        clients + NEW, DIM, RANK, samples, test_samples=1, seed=seed, new_clients=NEW,
        new_samples=NEW_SAMPLES,
    )  # fmt: skip


def learn(seed: int, samples: int, small: bool) -> dict[str, Any]:
    """Train both methods; their representations ``(d, k)`` and the mean risks over clients."""
    of, rounds = source(seed, samples, small), SMALL_ROUNDS if small else ROUNDS
    old = slice(0, of.num_clients - NEW)
    data = FederatedDataModule(of, batch_size=NEW_SAMPLES, new_clients=NEW)
    body, head = "backbone.weight", "head.weight"
    fedrep = train(LinearFedRep(body_lr=FEDREP_LR), data, rounds, seed=seed)
    fedrep_basis = fedrep.server["model"][body].double().T
    fedrep_models = (
        fedrep.federation.client_states.tree["model"][head].double()[:, 0] @ fedrep_basis.T
    )
    moments = train(LinearFedRep(body_lr=FEDREP_LR), data, 1, seed=seed).server["model"][body]
    shared = []
    for start, lr in ((moments, FEDAVG_LR), (moments, SMALL_LR), (None, FEDAVG_LR)):
        method = FedAvg(local_epochs=None, local_steps=1)
        shared.append(train(method, data, rounds, lr=lr, seed=seed, start=start))
    bases = [one.server["model"][body].double().T for one in shared]
    fedavg_model = shared[0].server["model"][head].double() @ bases[0].T
    x, y = samples_of(of, old, samples)
    found = {
        "Local": least_squares(x, y, ridge=RIDGE),
        "FedAvg": fedavg_model,
        "FedAvg, heads refitted": with_heads(bases[0], x, y),
        "FedAvg, step 0.02, heads refitted": with_heads(bases[1], x, y),
        "FedAvg from a random start, heads refitted": with_heads(bases[2], x, y),
        "FedRep": fedrep_models,
    }
    return {
        "risks": {name: float(risks(models, of, old).mean()) for name, models in found.items()},
        "FedRep": fedrep_basis.tolist(),
        "FedAvg": bases[0].tolist(),
        "FedAvg, step 0.02": bases[1].tolist(),
    }


def learned(options: argparse.Namespace, seed: int, samples: int) -> dict[str, Any]:
    """The stored cell of a seed and a number of samples; run if it isn't there."""
    rounds, clients = (SMALL_ROUNDS, SMALL_CLIENTS) if options.small else (ROUNDS, CLIENTS)
    settings = {"seed": seed, "samples": samples, "small": options.small, "rounds": rounds}
    settings |= {"clients": clients, "lr": [FEDREP_LR, FEDAVG_LR, SMALL_LR]}
    settings |= {"FedAvg": "from the moments"}
    plan = Plan("fedrep_figure1", options.results)
    work = partial(learn, seed, samples, options.small)
    found: dict[str, Any] = plan.cell(f"m={samples} seed={seed}", settings, work)
    return found


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Medians over seeds of the mean risk, for each method by number of samples."""
    cells = {m: [learned(options, seed, m)["risks"] for seed in options.seeds] for m in SAMPLES}
    return {
        name: [statistics.median(cell[name] for cell in cells[m]) for m in SAMPLES]
        for name in EXPECTED
    }


def draw(found: dict[str, list[float]], axes: Any) -> None:
    """A group of bars for each number of samples."""
    places = torch.arange(len(SAMPLES)).double()
    for at, (name, values) in enumerate(found.items()):
        axes.bar(places + 0.13 * (at - (len(found) - 1) / 2), values, 0.12, label=name)
    axes.set_xticks(places, [f"m = {m}\n({m / DIM:g} d)" for m in SAMPLES])
    axes.set(yscale="log", ylabel="error", xlabel="samples of each client")
    axes.figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    axes.grid(axis="y", alpha=0.3)


def section(found: dict[str, list[float]], seeds: list[int]) -> str:
    """What stands in README.md."""
    return (
        f"**Error against samples (FedRep, Figure 1)**, {CLIENTS} clients, d = {DIM}, k = {RANK}, "
        f"{ROUNDS} rounds of all clients; half the squared distance to the client's true solution, "
        f"mean over clients, median of {len(seeds)} seeds.\n\n"
        f"{by_samples(EXPECTED, found, SAMPLES)}\n\n"
        f"![Error against samples](figures/fedrep_figure1.png)\n\n{NOTE.strip()}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, draw, and write the section."""
    options = parse(arguments, "Figure 1 of the FedRep paper")
    found = measure(options)
    figure(options.figures / "fedrep_figure1.png", 6.0, lambda axes: draw(found, axes))
    text = section(found, options.seeds)
    Plan("fedrep_figure1", options.results).write_section(text, options.readme)
    print(text)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    main()
