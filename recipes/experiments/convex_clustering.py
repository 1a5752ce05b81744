"""Figures 1 and 2 of the convex clustering paper: accuracy and distance against the weight.

    python -m recipes.experiments.convex_clustering --seeds 0

60 clients of three clusters, 10 samples each, squared hinge loss. Five methods: every client alone,
one model for all, the sum of norms, the squared penalty, and one model per true cluster. The sweep
over weights is solved directly (ADMM, Newton), each weight from the one before; for some weights
the federated methods run too, to show that they go to the same solution. A run that was stopped
goes on with what is missing.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.data import EllipseClusters, FederatedDataModule
from lightning_pfl.methods import ConvexClustering, SquaredPenalty
from lightning_pfl.metrics import adjusted_rand_index, clusters_of_models, within_cluster_distance
from lightning_pfl.models import SquaredHingeClassifier
from lightning_pfl.solvers.pairs import Pairs
from lightning_pfl.testing import fit
from recipes.centralized.losses import ClientLosses, Grouped
from recipes.centralized.newtons_method import newton, proximal_newton
from recipes.centralized.recovery import consensus_weight, recovery_interval
from recipes.centralized.sum_of_norms import SumOfNorms, solve_squared
from recipes.experiments.convex_clustering_report import TOLERANCE, Cells, draw_all, section
from recipes.experiments.setting import parser
from recipes.plan import Plan

NAME = "convex_clustering"
SETTINGS = ("overlap", "recovery")
GRID = [10 ** (-4 + step / 4) for step in range(17)]
EXTRA = [0.003, 0.02, 0.05, 0.07, 0.09, 0.12, 0.13, 0.14, 0.17, 0.2, 0.25, 0.3]
WEIGHTS = sorted({round(w, 6) for w in [*GRID, *EXTRA]})
SMALL_WEIGHTS = [0.01, 0.3]
#: Weights at which the federated methods run: of the norms, and of their squares.
FEDERATED = {"overlap": ([0.01, 0.14], [0.001]), "recovery": ([0.14, 0.2], [0.001])}
ROUNDS, SMALL_ROUNDS = 400, 3
PENALTY = 0.3


@dataclass(frozen=True)
class Problem:
    """The clients of one setting and seed, and what is measured of their models ``(n, 3)``."""

    setting: str
    seed: int
    clients_per_cluster: int = 20

    @cached_property
    def source(self) -> EllipseClusters:
        """Where the samples come from."""
        settings: dict[str, Any] = {"setting": self.setting, "seed": self.seed}
        return EllipseClusters(
            clients_per_cluster=self.clients_per_cluster, dtype="float64", **settings
        )

    @cached_property
    def data(self) -> FederatedDataModule:
        """The samples, by client; a batch is all of a client's."""
        data = FederatedDataModule(self.source, batch_size=self.source.samples)
        data.setup()
        return data

    @cached_property
    def losses(self) -> ClientLosses:
        """The clients' training losses."""
        return ClientLosses(SquaredHingeClassifier(2), self.data.train_dataloader())

    @property
    def truth(self) -> Tensor:
        """The true clusters."""
        return torch.tensor(self.source.labels)

    @cached_property
    def alone(self) -> Tensor:
        """Every client's own optimum."""
        zeros = torch.zeros(len(self.truth), 3, dtype=torch.float64)
        return proximal_newton(self.losses, zeros, zeros[:, 0], zeros)

    def shared(self, labels: Tensor) -> Tensor:
        """The optimum with one model for each cluster."""
        grouped = Grouped(self.losses, labels)
        start = torch.zeros(grouped.count, 3, dtype=torch.float64)
        return newton(grouped.value, grouped.gradient, grouped.hessian, start)[labels]

    def accuracy(self, models: Tensor) -> float:
        """Mean over clients, each on its cluster's test samples."""
        test = self.data.test_dataloader()
        points, targets = test.fields
        rows = torch.stack(list(test.indices))
        scores = (points[rows] @ models[:, :2].unsqueeze(2)).squeeze(2) + models[:, 2:]
        return float(((scores > 0) == (targets[rows] > 0)).double().mean())

    def measured(self, models: Tensor) -> dict[str, Any]:
        """What the figures and the table show."""
        clusters = clusters_of_models(models)
        return {
            "accuracy": self.accuracy(models),
            "within": within_cluster_distance(models, self.truth),
            "clusters": int(clusters.max()) + 1,
            "rand": adjusted_rand_index(clusters, self.truth),
            "labels": clusters.tolist(),
        }


def reference(problem: Problem) -> dict[str, Any]:
    """Every client alone, one model for all, one per true cluster."""
    return {
        "local": problem.measured(problem.alone),
        "global": problem.measured(problem.shared(torch.zeros_like(problem.truth))),
        "oracle": problem.measured(problem.shared(problem.truth)),
    }


def norms(problem: Problem, weights: list[float], iterations: int) -> list[dict[str, Any]]:
    """The regularisation path of the sum of norms."""
    solver = SumOfNorms(problem.losses, Pairs.complete(len(problem.truth)))
    found: Any = problem.alone
    rows = []
    for weight in weights:
        found = solver.solve(weight, found, iterations, TOLERANCE)
        exact = {"weight": weight, "exact_clusters": int(found.clusters.max()) + 1}
        exact |= {"value": solver.value(found.models, weight), "residual": found.residual}
        rows.append({**exact, **problem.measured(found.models)})
    return rows


def squares(problem: Problem, weights: list[float]) -> list[dict[str, Any]]:
    """The squared penalty for each weight."""
    pairs, models, rows = Pairs.complete(len(problem.truth)), problem.alone, []
    for weight in weights:
        models = solve_squared(problem.losses, pairs, weight, models)
        rows.append({"weight": weight, **problem.measured(models)})
    return rows


def bounds(problem: Problem, weights: list[float]) -> dict[str, Any]:
    """Where the theorems promise the true clusters, and from where on one model."""
    found, interval = recovery_interval(problem.losses, problem.truth, problem.alone, weights)
    at = [[bound.weight, bound.fused, bound.separated] for bound in found]
    consensus = consensus_weight(problem.losses, problem.alone)
    return {"bounds": at, "interval": interval, "consensus": consensus}


def federated(
    problem: Problem, method: Any, weight: float, rounds: int, iterations: int
) -> dict[str, Any]:
    """Run a federated method in the Trainer, and compare it with the direct solution."""
    module = SquaredHingeClassifier(2).double()
    run = fit(method, problem.data.train_dataloader(), module, rounds)
    models = torch.cat([run.models["head.weight"].squeeze(1), run.models["head.bias"]], 1)
    pairs = Pairs.complete(len(problem.truth))
    solver = SumOfNorms(problem.losses, pairs)
    if isinstance(method, ConvexClustering):
        best = solver.solve(weight, problem.alone, iterations, tolerance=1e-7).models
        values = [solver.value(x, weight) for x in (models, best)]
        clusters = method.clusters(run.server)
        extra = {"exact_clusters": int(clusters.max()) + 1}
    else:
        best = solve_squared(problem.losses, pairs, weight, problem.alone)
        values = [
            float(problem.losses.value(x).sum() + weight * torch.pdist(x).square().sum())
            for x in (models, best)
        ]
        extra = {}
    gap = (values[0] - values[1]) / abs(values[1])
    away = float((models - best).norm(dim=1).max())
    return {**problem.measured(models), **extra, "gap": gap, "away": away, "rounds": rounds}


def measure(options: argparse.Namespace) -> Cells:
    """Run every cell; by setting and seed."""
    plan, small = Plan(NAME, options.results), options.small
    weights, per_cluster = (SMALL_WEIGHTS, 2) if small else (WEIGHTS, 20)
    rounds, iterations = (SMALL_ROUNDS, 100) if small else (ROUNDS, 1000)
    cells: Cells = {}
    for setting in SETTINGS:
        for seed in options.seeds:
            problem = Problem(setting, seed, per_cluster)
            cell = cells.setdefault(setting, {}).setdefault(seed, {})

            def run(name: str, settings: dict[str, Any], work: Any, into: Any = cell) -> None:
                key = f"{name} {setting} seed={seed}"  # noqa: B023 - called at once
                known = {"clients": per_cluster, **settings}
                into[name] = plan.cell(key, known, work)

            run("reference", {}, lambda p=problem: reference(p))
            run(
                "norms",
                {"weights": weights, "iterations": iterations},
                lambda p=problem: norms(p, weights, iterations),
            )
            run("squares", {"weights": weights}, lambda p=problem: squares(p, weights))
            run("bounds", {"weights": weights}, lambda p=problem: bounds(p, weights))
            if seed != options.seeds[0]:
                continue
            for weight in FEDERATED[setting][0]:
                method: Any = ConvexClustering(weight, penalty=PENALTY, local_solver="exact")
                known = {"rounds": rounds, "penalty": PENALTY}
                run(
                    f"ConvexClustering {weight:g}",
                    known,
                    lambda p=problem, m=method, w=weight: federated(p, m, w, rounds, iterations),
                )
            for weight in FEDERATED[setting][1]:
                method = SquaredPenalty(weight, local_solver="exact")
                run(
                    f"SquaredPenalty {weight:g}",
                    {"rounds": rounds},
                    lambda p=problem, m=method, w=weight: federated(p, m, w, rounds, iterations),
                )
    return cells


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    text, small = "Figures 1 and 2 of convex clustering", "Six clients, two weights."
    options = ("results", "figures", "readme")
    return parser(text, small, *options, seeds=[0, 1, 2]).parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, draw, and write the section."""
    options = parse(arguments)
    cells = measure(options)
    draw_all(cells, options.figures)
    text = section(cells)
    Plan(NAME, options.results).write_section(text, options.readme)
    print(text)


if __name__ == "__main__":
    main()
