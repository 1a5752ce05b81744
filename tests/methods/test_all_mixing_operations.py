"""Mixing over a graph is as many tensor operations for many edges as for few.

SheafFMTL and HomologicalConstraints go slot by slot through their maps (a slot is one neighbour of
every client, so there are as many as the largest degree); with the degree held, edges don't count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from lightning_pfl.contract.known import Known
from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import repeat
from lightning_pfl.graphs.messages import PeerExchange
from lightning_pfl.methods import (
    FedU,
    GTVMin,
    HomologicalConstraints,
    SheafFMTL,
)
from lightning_pfl.methods.base import Method
from lightning_pfl.testing import QuadraticModule


class Count(TorchFunctionMode):
    """Counts calls of torch."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def circulant(clients: int, degree: int) -> Any:
    """Each client and the ``degree`` nearest ones on a circle."""
    matrix = np.zeros((clients, clients))
    for shift in range(1, degree // 2 + 1):
        matrix += np.roll(np.eye(clients), shift, 1) + np.roll(np.eye(clients), -shift, 1)
    return matrix


def operations(method: Method, clients: int) -> tuple[int, int]:
    """Calls of torch in the mixing of a round of all clients, and the graph's edges."""
    module = QuadraticModule(6)
    parameter_split = ParameterSplit(module, method.resolve_personal(ParameterSplit(module)))
    ones = torch.ones(clients, dtype=torch.int64)
    method.bind(Known.of(parameter_split, clients, 0, ones))
    everyone = torch.arange(clients)
    info = ClientInfo(everyone, ones, ones, ones / clients, 0, clients, (0.1,))
    client_state = method.init_client_state_rows(
        repeat(method.init_client_state(parameter_split.model()), clients),
        parameter_split.model(),
        info,
    )
    server = method.init_server(parameter_split.model())
    models = {"w": torch.randn(clients, 6, dtype=torch.float64)}
    client_state = {**client_state, "model": models} if client_state.get("model") else client_state
    with Count() as count:
        for exchange in method.exchanges(0):
            sent = method.send(exchange.name, client_state, info)
            inbox = PeerExchange(method.graph, everyone, "cpu").deliver(exchange, sent)
            client_state = method.receive(exchange.name, client_state, inbox, info)
        method.server_update(server, {"model": models}, info)
    return count.calls, method.graph.edges.shape[1]


CASES: dict[str, Callable[[Any], Method]] = {
    "FedU": lambda graph: FedU(graph, 0.1),
    "FedU, decentralized": lambda graph: FedU(graph, 0.1, decentralized=True),
    "GTVMin": lambda graph: GTVMin(graph, 0.1),
    "GTVMin, squared": lambda graph: GTVMin(graph, 0.1, "squared"),
    "SheafFMTL": lambda graph: SheafFMTL(graph, 0.1, 0.1, 0.5),
    "SheafFMTL, identity": lambda graph: SheafFMTL(graph, 0.1, 0.0, 0.5, maps="identity"),
    "HomologicalConstraints": lambda graph: HomologicalConstraints(graph, maps="random"),
}
#: Methods whose maps are gone through slot by slot.
BY_SLOT = ("SheafFMTL", "HomologicalConstraints")


@pytest.mark.parametrize("name", CASES)
def test_more_edges_are_not_more_operations(name: str) -> None:
    few, edges = operations(CASES[name](circulant(8, 4)), 8)
    many, more = operations(CASES[name](circulant(48, 4)), 48)
    assert (edges, more) == (16, 96)
    assert 0 < many == few


@pytest.mark.parametrize("name", [name for name in CASES if name not in BY_SLOT])
def test_more_neighbours_are_not_more_operations(name: str) -> None:
    few, edges = operations(CASES[name](circulant(24, 2)), 24)
    many, more = operations(CASES[name](circulant(24, 20)), 24)
    assert (edges, more) == (24, 240)
    assert 0 < many == few
