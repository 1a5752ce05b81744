"""Figure 3 of the FedRep paper: distance to the true representation against rounds.

    python -m recipes.experiments.fedrep_figure3 --seeds 0 1 2 3 4

Algorithm 2 and its ablations GD-GD and 10GD-GD, which take one or ten gradient steps in the place
of exact heads, for several numbers of clients, with fresh samples in every round. A run that was
stopped goes on with what is missing.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from functools import partial
from typing import Any

from lightning_pfl.data import FreshDataModule, LinearRepresentation
from lightning_pfl.inspect import SubspaceDistance
from lightning_pfl.methods import LinearFedRep
from recipes.experiments.linear_regressions import figure, parse, short, table, train
from recipes.plan import Plan

DIM, RANK, SAMPLES, PARTICIPATION, ROUNDS = 10, 2, 5, 0.1, 200
#: Clients: the body's step. A single client a round needs a small one.
CLIENTS = {10: 0.05, 100: 0.2, 1000: 0.2}
HEAD_LR = 0.2
SMALL_CLIENTS, SMALL_ROUNDS = {20: 0.2, 40: 0.2}, 4
METHODS: dict[str, dict[str, Any]] = {
    "FedRep": {},
    "GD-GD": {"head_solver": "gradient", "head_lr": HEAD_LR},
    "10GD-GD": {"head_solver": "gradient", "head_steps": 10, "head_lr": HEAD_LR},
}
SHOWN = (0, 20, 50, 100)
#: By clients and method: what a simulation of Algorithm 2 in NumPy gave in the rounds shown.
EXPECTED = {
    (10, "FedRep"): ("0.81", "0.70", "0.47", "0.17"),
    (10, "GD-GD"): ("0.81", "0.75", "0.56", "0.22"),
    (100, "FedRep"): (".358", ".041", ".0065", ".0046"),
    (100, "GD-GD"): (".358", ".150", ".026", ".0059"),
    (100, "10GD-GD"): (".358", ".053", ".0060", ".0042"),
    (1000, "FedRep"): (".158", ".011", ".0016", ".0015"),
    (1000, "GD-GD"): (".158", ".058", ".011", ".0020"),
    (1000, "10GD-GD"): (".158", ".016", ".0019", ".0011"),
}
Curves = dict[tuple[int, str], list[float]]

NOTE = """
More clients start nearer (moments of more samples), fall faster and end lower; until round 50
FedRep needs fewer rounds than GD-GD for the same distance, and 10GD-GD lies between, as in the
paper. Late, where only noise is left, GD-GD can end lower. The paper's figure has no numbers; what
was expected comes from a simulation in NumPy with other draws. With n = 10, where a single client
takes part in a round, chance is large: over 4000 draws of the data the median of the start is 0.89,
and nine of ten medians of five draws lie below 0.97, one of ten below 0.80. These are distances
with fresh samples and moments, as in Algorithm 2; the authors' notebook plots the square, with the
same samples in all rounds, another initialisation, and steps tuned for each method. The step 0.2 is
above Theorem 1's bound in some rounds, and the log says so.
"""


def distances(seed: int, clients: int, lr: float, method: str, rounds: int) -> list[float]:
    """The distance after the moments and after each further round."""
    source = LinearRepresentation(clients, DIM, RANK, SAMPLES, test_samples=1, seed=seed)
    monitor = SubspaceDistance()
    train(
        LinearFedRep(body_lr=lr, **METHODS[method]),
        FreshDataModule(source),
        rounds + 1,
        PARTICIPATION,
        seed=seed,
        callbacks=[monitor],
    )
    return [float(f"{monitor.distances[t]:.4g}") for t in range(rounds + 1)]


def measure(options: argparse.Namespace) -> Curves:
    """Run every cell; medians over seeds for every round."""
    plan = Plan("fedrep_figure3", options.results)
    sizes, rounds = (SMALL_CLIENTS, SMALL_ROUNDS) if options.small else (CLIENTS, ROUNDS)
    found: Curves = {}
    for clients, lr in sizes.items():
        for name in METHODS:
            runs = []
            for seed in options.seeds:
                settings = {"method": METHODS[name], "lr": lr, "rounds": rounds, "seed": seed}
                settings |= {"clients": clients, "samples": SAMPLES, "dim": DIM}
                key = f"{name} n={clients} seed={seed}"
                work = partial(distances, seed, clients, lr, name, rounds)
                runs.append(plan.cell(key, settings, work))
            found[clients, name] = [statistics.median(at) for at in zip(*runs, strict=True)]
    return found


def draw(found: Curves, panels: Any) -> None:
    """Distance against rounds, a panel for each number of clients."""
    sizes = dict.fromkeys(clients for clients, _ in found)
    for axes, clients in zip(panels, sizes, strict=True):
        for name in METHODS:
            axes.plot(found[clients, name], label=name if axes is panels[0] else None)
        axes.set(title=f"n = {clients}", yscale="log", xlabel="round")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("principal-angle distance")
    panels[0].figure.legend(loc="outside upper center", ncols=len(METHODS), frameon=False)


def section(found: Curves, seeds: list[int]) -> str:
    """What stands in README.md."""
    rows = []
    for (clients, name), values in found.items():
        shown = [values[t] if t < len(values) else None for t in SHOWN]
        expected = EXPECTED.get((clients, name), ("-",) * len(SHOWN))
        pairs = zip(expected, shown, strict=True)
        cells = [f"{e} / {short(value) if value is not None else '-'}" for e, value in pairs]
        rows.append([str(clients), name, *cells])
    head = ["n", "expected / measured", *(f"t = {t}" for t in SHOWN)]
    return (
        f"**Distance to the true representation (FedRep, Figure 3)**, d = {DIM}, k = {RANK}, "
        f"m = {SAMPLES}, a tenth of the clients in each round, {ROUNDS} rounds after the moments; "
        f"median of {len(seeds)} seeds.\n\n{table(head, rows)}\n\n"
        f"![Distance against rounds](figures/fedrep_figure3.png)\n\n{NOTE.strip()}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, draw, and write the section."""
    options = parse(arguments, "Figure 3 of the FedRep paper")
    found = measure(options)
    panels = len({clients for clients, _ in found})
    path = options.figures / "fedrep_figure3.png"
    figure(path, 3.2 * panels, lambda axes: draw(found, axes), panels)
    text = section(found, options.seeds)
    Plan("fedrep_figure3", options.results).write_section(text, options.readme)
    print(text)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    main()
