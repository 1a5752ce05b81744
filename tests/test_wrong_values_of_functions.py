"""Functions that users call say what they expected, whatever they are given."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl import graphs, load_clients
from lightning_pfl.merging import BetaPredictive, matched
from lightning_pfl.methods import FedPer
from lightning_pfl.metrics import adjusted_rand_index, summarize
from lightning_pfl.testing import fit
from lightning_pfl.testing.conformance import small_clients, small_module

#: Right for nothing below.
WRONG = [object(), "no such", 1j, math.nan, 99, 2.5, torch.tensor(0.5), b"x", ["x"], [None]]
LOADER = DataLoader(TensorDataset(*small_clients().fields), batch_size=4)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[Any], Any]]:
    run = fit(FedPer(), small_clients(), small_module(), 1)
    path: Path = run.save(tmp_path_factory.mktemp("run") / "last.ckpt")
    saved = load_clients(path, small_module(), FedPer())
    return {
        "client_state_dict": run.strategy.client_state_dict,
        "client_module": saved.client_module,
        "client_metrics": run.strategy.client_metrics,
        "load_clients path": lambda value: load_clients(value, small_module(), FedPer()),
        "load_clients module": lambda value: load_clients(path, value, FedPer()),
        "load_clients method": lambda value: load_clients(path, small_module(), value),
        "adapt data": saved.adapt,
        "adapt scope": lambda value: saved.adapt(LOADER, scope=value),
        "adapt start": lambda value: saved.adapt(LOADER, start=value),
        "resolve_graph": lambda value: graphs.resolve_graph(value, 4),
        "resolve_graph num_clients": lambda value: graphs.resolve_graph(np.ones((3, 3)), value),
        "resolve_graph seed": lambda value: graphs.resolve_graph("erdos_renyi", 4, value),
        "summarize values": lambda value: summarize(value, torch.ones(2)),
        "summarize weights": lambda value: summarize(torch.ones(2), value),
        "adjusted_rand_index labels": lambda value: adjusted_rand_index(value, [0, 1]),
        "adjusted_rand_index truth": lambda value: adjusted_rand_index([0, 1], value),
        "KNearest": lambda value: graphs.resolve_graph(graphs.KNearest(value), 4),
        "Metropolis": lambda value: graphs.resolve_graph(graphs.Metropolis(value), 4),
        "BetaPredictive": BetaPredictive,
        "matched": matched,
    }


NAMES = [
    "client_state_dict",
    "client_module",
    "client_metrics",
    "load_clients path",
    "load_clients module",
    "load_clients method",
    "adapt data",
    "adapt scope",
    "adapt start",
    "resolve_graph",
    "resolve_graph num_clients",
    "resolve_graph seed",
    "summarize values",
    "summarize weights",
    "adjusted_rand_index labels",
    "adjusted_rand_index truth",
    "KNearest",
    "Metropolis",
    "BetaPredictive",
    "matched",
]


def test_all_calls_are_named(calls: dict[str, Any]) -> None:
    assert list(calls) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_value_is_refused_in_a_sentence(calls: dict[str, Any], name: str) -> None:
    # Any whole number is a seed.
    for value in (one for one in WRONG if one != 99 or not name.endswith("seed")):
        with pytest.raises(
            (TypeError, ValueError, KeyError, FileNotFoundError, MisconfigurationException)
        ) as error:
            calls[name](value)
        assert re.search("Expected .*(but|got)", str(error.value), re.DOTALL), (value, error)


@pytest.mark.parametrize("scope", [[], (), None])
def test_a_scope_of_nothing_is_refused(calls: dict[str, Any], scope: Any) -> None:
    with pytest.raises(ValueError, match=r"Expected `scope` to have parameters that train, .*none"):
        calls["adapt scope"](scope)


def test_ids_of_numpy_and_torch_are_ids(calls: dict[str, Any]) -> None:
    want = calls["client_state_dict"](2)
    for client in (np.int64(2), torch.tensor(2)):
        assert want.keys() == calls["client_state_dict"](client).keys()
        for name, leaf in calls["client_state_dict"](client).items():
            assert torch.equal(leaf, want[name])


def test_what_is_merged_may_be_lists_of_networks() -> None:
    assert len(BetaPredictive([nn.Linear(2, 2), [nn.Linear(2, 2), nn.Linear(2, 2)]]).clients) == 2
