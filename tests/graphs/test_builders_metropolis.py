"""Metropolis weights, and gossip averaging with them."""

from __future__ import annotations

from typing import Any

import networkx
import pytest
import torch

from lightning_pfl.graphs import Complete, GraphBuilder, Metropolis, Ring, resolve_graph
from lightning_pfl.methods import FedAvg, FedU
from lightning_pfl.testing import QuadraticModule, descend, fit, quadratic_clients


class Star(GraphBuilder):
    """The first client and its four neighbours, two of which know each other."""

    def __call__(self, num_clients: int, seed: int) -> Any:
        graph = networkx.star_graph(num_clients - 1)
        graph.add_edge(1, 2, weight=7.0)
        return graph


# 1 / (1 + max of the degrees 4, 2, 2, 1, 1).
W = torch.tensor(
    [
        [0.2, 0.2, 0.2, 0.2, 0.2],
        [0.2, 1 - 0.2 - 1 / 3, 1 / 3, 0, 0],
        [0.2, 1 / 3, 1 - 0.2 - 1 / 3, 0, 0],
        [0.2, 0, 0, 0.8, 0],
        [0.2, 0, 0, 0, 0.8],
    ],
    dtype=torch.float64,
)
A = torch.tensor([1.0, 3.0, 0.5, 2.0, 1.5], dtype=torch.float64)
C = torch.tensor([[0.0], [1.0], [3.0], [-1.0], [2.0]], dtype=torch.float64)


def test_weights_are_those_of_the_formula() -> None:
    rows = resolve_graph(Metropolis(Star()), 5).rows
    found = torch.zeros(5, 5).double()
    found[rows[:, 0].long(), rows[:, 1].long()] = rows[:, 2].double()
    found = torch.maximum(found, found.T)
    expected = W - W.diag().diag()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_fedu_with_them_is_gossip_averaging(engine: str) -> None:
    """x <- W y after two local steps, with the learning rate 0.1: 1 / (0.1 * 2) = 5."""
    method = FedU(Metropolis(Star()), 5.0, decentralized=True, local_steps=2)
    run = fit(method, quadratic_clients(A, C), QuadraticModule(lr=0.1), 3, engine)
    x = torch.zeros(5, 1).double()
    for _ in range(3):
        x = W @ descend(x, A, C, 0.1, 2)
    torch.testing.assert_close(run.models["w"], x)


def test_on_the_complete_graph_it_is_fedavg_without_a_server() -> None:
    data = quadratic_clients(A, C)
    method = FedU(Metropolis(Complete()), 5.0, decentralized=True, local_steps=2)
    run = fit(method, data, QuadraticModule(lr=0.1), 3)
    average = fit(FedAvg(local_steps=2, weighting="uniform"), data, QuadraticModule(lr=0.1), 3)
    expected = average.server["model"]["w"].expand(5, 1)
    torch.testing.assert_close(run.models["w"], expected)
    # A model for each of four neighbours, eight bytes a number, and nothing to a server.
    assert run.recorder.rounds[0].bytes_exchanged == 5 * 4 * 8
    assert run.recorder.rounds[0].bytes_up == 0


def test_a_family_of_graphs_is_needed() -> None:
    with pytest.raises(TypeError, match="`graph` to be a builder of graphs, but got graph='ring'"):
        Metropolis("ring")  # type: ignore[arg-type]


def test_the_builder_says_what_it_is() -> None:
    assert repr(Metropolis(Ring())) == "Metropolis(graph=Ring())"
