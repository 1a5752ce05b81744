"""ConvexClustering where clients are away, on nearest neighbours, with linearised updates, in bytes
of memory; GTVMin where clients are away."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.graphs import KNearest, label_histograms, model_features
from lightning_pfl.methods import ConvexClustering, GTVMin, LocalOnly
from lightning_pfl.methods.base import Method
from lightning_pfl.methods.convex_clustering import COPIES
from lightning_pfl.metrics import adjusted_rand_index
from lightning_pfl.solvers.pairs import Pairs
from lightning_pfl.solvers.pdmm import solve
from lightning_pfl.testing import QuadraticModule, fit, quadratic_clients
from tests.methods.quadratics import close
from tests.solvers.problems import L4, Quadratics, l4_solution


def line() -> FederatedTensorDataset:
    return quadratic_clients([1.0] * 4, L4.flatten().tolist())


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        ConvexClustering(0.1, penalty=1.0, local_solver="exact"),
        GTVMin("complete", 0.1, local_solver="exact"),
    ],
    ids=["ConvexClustering", "GTVMin"],
)
def test_two_of_four_clients_a_round_reach_the_solution(method: Method) -> None:
    run = fit(method, line(), QuadraticModule(), 400, participation=2)
    expected = torch.tensor([[0.25], [0.25], [0.85], [0.85]], dtype=torch.float64)
    assert all(len(round.info) == 2 for round in run.recorder.rounds)
    torch.testing.assert_close(run.models["w"], expected, rtol=0, atol=1e-3)


# --- nearest neighbours ---


class Shares(QuadraticModule):
    """1/2 ||w - e_y||^2 for the label y: least where w are the shares of the labels."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Tensor:
        unit = torch.eye(3, dtype=self.w.dtype)[batch[1]]
        return (self.w - unit).square().sum(1).mean() / 2


TRUTH = torch.arange(3).repeat_interleave(4)


def planted() -> FederatedTensorDataset:
    """Sixteen samples a client, of which 12 or 13 have the label of its cluster."""
    labels = []
    for client, main in enumerate(TRUTH.tolist()):
        most = 12 + client % 2
        other = [(main + 1) % 3] * (16 - most - client % 4 // 2)
        labels += [main] * most + other
        labels += [(main + 2) % 3] * (16 - most - len(other))
    fields = torch.zeros(len(labels), 1), torch.tensor(labels)
    return FederatedTensorDataset(fields, torch.arange(len(labels)).split(16), batch_size=16)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["labels", "models"])
def test_planted_clusters_are_found_among_nearest_neighbours(kind: str) -> None:
    """Four nearest of eleven: edges inside the clusters, and some between them."""
    data = planted()
    if kind == "labels":
        features = label_histograms(data, 3)
    else:
        alone = fit(LocalOnly(local_epochs=60), data, Shares(3, lr=0.5))
        models = [alone.strategy.client_state_dict(client) for client in range(12)]
        features = model_features(models)
        torch.testing.assert_close(features, label_histograms(data, 3), rtol=0, atol=1e-9)
    graph = KNearest(features, 4)
    method = ConvexClustering(0.15, penalty=0.3, graph=graph, local_solver="exact")
    run = fit(method, data, Shares(3), 150)
    between = TRUTH[method.graph.edges[0]] != TRUTH[method.graph.edges[1]]
    assert 0 < int(between.sum()) < len(between)
    assert run.server["split"].shape[1] < 11
    assert adjusted_rand_index(method.clusters(run.server), TRUTH) == 1.0


# --- linearised updates ---


@pytest.mark.slow
def test_gradient_steps_with_the_lipschitz_constant_converge() -> None:
    """x <- argmin <f'(x_i), x> + quadratic + L/2 |x - x_i|^2 with curvatures of 0.5 to 3 = L.

    Where they stop is the solution: the exact updates' one.
    """
    losses = Quadratics(L4, torch.tensor([0.5, 1.0, 3.0, 2.0], dtype=torch.float64))
    pairs, zeros = Pairs.complete(4), torch.zeros(4, 1, dtype=torch.float64)

    def linearised(anchor: Tensor, weight: Tensor, start: Tensor) -> Tensor:
        return anchor - losses.gradient(start) / weight.unsqueeze(1)

    found = solve(linearised, pairs, 0.1, zeros, 0.5, iterations=900, proximal=3.0)
    exact = solve(losses.prox, pairs, 0.1, zeros, 0.5, iterations=900)
    torch.testing.assert_close(found.models, exact.models, rtol=0, atol=1e-8)


@pytest.mark.slow
def test_one_local_step_of_the_right_length_is_the_linearised_update() -> None:
    """lr = 1 / (2 rho 3 + eta) with eta = L = 1, and the run ends at the known solution."""
    losses, rho, eta, rounds = Quadratics(L4), 0.5, 1.0, 300

    def linearised(anchor: Tensor, weight: Tensor, start: Tensor) -> Tensor:
        return anchor - losses.gradient(start) / weight.unsqueeze(1)

    settings: dict[str, Any] = {"local_epochs": None, "local_steps": 1}
    method = ConvexClustering(0.1, penalty=rho, proximal_weight=eta, **settings)
    run = fit(method, line(), QuadraticModule(lr=1 / (2 * rho * 3 + eta)), rounds)
    zeros = torch.zeros(4, 1, dtype=torch.float64)
    state = solve(linearised, Pairs.complete(4), 0.1, zeros, rho, iterations=rounds, proximal=eta)
    close(run.models["w"], state.models)
    torch.testing.assert_close(run.models["w"], l4_solution(0.1), rtol=0, atol=1e-6)


# --- memory ---

MEASURE = """
import sys
import lightning as L
import torch
from lightning_pfl import FederatedStrategy
from lightning_pfl.methods import ConvexClustering
from lightning_pfl.methods.support import memory
from lightning_pfl.testing import QuadraticModule, quadratic_clients

torch.set_num_threads(1)
needed = []
require = memory.require
memory.require = lambda count, *rest: needed.append(count) or require(count, *rest)

def peak():
    # Of this program alone: ru_maxrss begins with what the parent had.
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))

def run(clients, dim):
    centers = torch.randn(clients, dim)
    data = quadratic_clients([1.0] * clients, centers, dtype=torch.float32)
    module = QuadraticModule(dim, lr=1e-3, dtype=torch.float32)
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        strategy=FederatedStrategy(ConvexClustering(0.1, penalty=0.01), seed=0),
    )
    trainer.fit(module, data)

run(4, 8)  # what is loaded once
before = peak()
run(200, int(sys.argv[1]))
print(needed[-1], peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_the_announced_memory_of_200_clients_is_what_they_take() -> None:
    """A network of 250 parameters: 40 MB for a tensor of all pairs, so that the rest is small.

    The least of three peaks: a process may also hold what its allocator hasn't given back yet.
    """
    peaks = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", MEASURE, "250"],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        announced, peak = map(int, done.stdout.split()[-2:])
        assert announced == COPIES * 200 * 200 * 250 * 4
        peaks.append(peak)
    assert min(peaks) <= announced <= 3 * min(peaks)
