"""Bits of a sheaf's messages: what is sent, and the number that the authors' code reports."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_pfl.graphs import Graph, resolve_graph
from lightning_pfl.methods import SheafFMTL
from lightning_pfl.solvers.sheaf import edge_dims
from lightning_pfl.testing import fit
from lightning_pfl.testing.conformance import SIZES, small_clients
from tests.methods.graphs import RAGGED
from tests.methods.networks import plain_module


def bits_per_round(
    graph: Graph, dims: Tensor, messages: int = 2, bits: int = 32
) -> tuple[int, int]:
    """Bits of a round with full participation: all that clients send, and the authors' number.

    The former is m b sum_i sum_j d_ij, which a run logs as bytes; the latter m b max_i deg(i)
    max_ij d_ij, of a client with the most neighbours. Their "MB" are the latter, over all rounds,
    by 10^6: megabits of one client.
    """
    largest = int(graph.mask.sum(1).max()) * int(dims.max()) if dims.numel() else 0
    return messages * bits * int(dims.sum()), messages * bits * largest


@pytest.mark.parametrize(
    ("clients", "scalars", "ratio", "per_round", "rounds", "megabits"),
    [
        (4, 34_826, 0.01, 66_816, 100, 6.6816),
        (4, 34_826, 0.1, 668_544, 20, 13.37088),
        (2, 3372, 1.0, 215_808, 80, 17.26464),
    ],
    ids=["rotated MNIST", "rotated MNIST, tenth", "HAR"],
)
def test_the_numbers_in_the_authors_result_files(
    clients: int, scalars: int, ratio: float, per_round: int, rounds: int, megabits: float
) -> None:
    graph = resolve_graph("complete", clients)
    dims = edge_dims(graph, torch.full((clients,), scalars), ratio)
    sent, reported = bits_per_round(graph, dims)
    assert reported == per_round
    assert rounds * reported / 1e6 == pytest.approx(megabits, abs=1e-9)
    # On a complete graph every client sends as much.
    assert sent == clients * reported


def test_the_sum_is_over_the_edges_of_each_client() -> None:
    """Degrees 3, 1, 3, 2, 3; sizes that differ make edges of 5, 2 or 1 dimensions."""
    graph = resolve_graph(RAGGED, 5)
    sizes = [10, 5, 10, 2, 10]
    dims = edge_dims(graph, torch.tensor(sizes), 0.5)
    edges = [(0, 2), (0, 3), (0, 4), (2, 3), (2, 4), (1, 4)]
    numbers = sum(min(sizes[i], sizes[j]) // 2 for i, j in edges)
    assert numbers == 5 + 1 + 5 + 1 + 5 + 2
    # Both directions, a message each, of 64 bits a number; the largest edge for all neighbours.
    assert bits_per_round(graph, dims, messages=1, bits=64) == (64 * 2 * numbers, 64 * 3 * 5)


@pytest.mark.parametrize(("map_lr", "messages"), [(0.1, 2), (0.0, 1)])
def test_a_run_logs_the_sum_in_bytes(map_lr: float, messages: int) -> None:
    """Of the clients with samples, which are those that take part."""
    data = small_clients(torch.float32).subset([k for k, size in enumerate(SIZES) if size])
    method = SheafFMTL("complete", 0.1, map_lr, 0.1)
    run = fit(method, data, plain_module().float(), 1)
    sent, _ = bits_per_round(method.graph, method.sheaf.dims, messages)
    assert 8 * run.metrics["round/bytes_up"] == sent


@pytest.mark.filterwarnings("ignore:Expected `graph` to have edges")
def test_without_clients_nothing_travels() -> None:
    graph = resolve_graph(torch.zeros(3, 3).tolist(), 3)
    assert bits_per_round(graph, edge_dims(graph, torch.tensor([4, 4, 4]), 0.5)) == (0, 0)
