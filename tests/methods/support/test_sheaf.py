"""The sheaf of a running federation against its matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pfl import ClientModules
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.methods import SheafFMTL
from lightning_pfl.methods.support.sheaf import SheafOfFederation
from lightning_pfl.testing import QuadraticModule, fit, quadratic_clients
from lightning_pfl.testing.conformance import small_clients
from tests.federation.test_architectures import OF, loaders, modules
from tests.methods.graphs import RAGGED
from tests.methods.networks import plain_module
from tests.methods.references.sheaf_laplacian import sheaf_laplacian
from tests.trainer.setting import SaveInsideTheRound, trainer


def one_architecture() -> Any:
    method = SheafFMTL(RAGGED, 0.1, 0.1, 0.2, map_std=0.1)
    return fit(method, small_clients(), plain_module(), 2).strategy


def two_architectures() -> Any:
    run = trainer(SheafFMTL(RAGGED, 0.1, 0.1, 0.2, map_std=0.1), max_epochs=2)
    run.fit(ClientModules(modules(), OF), loaders(), loaders(1))
    return run.strategy


def maps_of(strategy: Any) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for group in strategy.federation.architectures:
        clients = range(5) if group.clients is None else group.clients.tolist()
        found |= dict(zip(clients, group.client_states.tree["maps"], strict=True))
    return [found[client] for client in range(5)]


@pytest.mark.parametrize("train", [one_architecture, two_architectures])
def test_eigenvalue_and_norms_are_those_of_the_matrix(train: Any) -> None:
    strategy = train()
    sheaf, maps, graph = (
        SheafOfFederation(strategy.federation),
        maps_of(strategy),
        strategy.method.graph,
    )
    largest = float(torch.linalg.eigvalsh(sheaf_laplacian(graph, maps))[-1])
    assert sheaf.largest_eigenvalue(1000) == pytest.approx(largest, rel=1e-6)
    few = sheaf.largest_eigenvalue()
    assert 0.99 * largest < few <= largest * (1 + 1e-9)
    norms = torch.stack([m.square().sum((1, 2)).sqrt() for m in maps])
    torch.testing.assert_close(sheaf.map_norms(), norms)
    squares = [
        sum(
            float(leaf.square().sum())
            for leaf in strategy.client_state_dict(client).values()
            if leaf.is_floating_point()
        )
        for client in range(5)
    ]
    assert sheaf.squared_norms().tolist() == pytest.approx(squares)


def test_a_crowded_spectrum_is_no_obstacle() -> None:
    """A ring of 40: eigenvalues 2 - 2 cos(2 pi k / 40), many of them near 4."""
    data = quadratic_clients([1.0] * 40, torch.zeros(40, 5))
    run = fit(SheafFMTL("ring", 0.1, 0.0, 1.0, maps="identity"), data, QuadraticModule(dim=5), 1)
    sheaf = SheafOfFederation(run.strategy.federation)
    assert 0.98 * 4 < sheaf.largest_eigenvalue() <= 4 * (1 + 1e-9)
    assert sheaf.largest_eigenvalue(100) == pytest.approx(4)


def test_a_run_resumed_inside_a_round_logs_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "inside.ckpt"
    whole = trainer(
        SheafFMTL("ring", edge_dim_ratio=1.0), callbacks=[SaveInsideTheRound(path)], max_epochs=2
    )
    whole.fit(QuadraticModule(dim=3), data(), data())
    resumed = trainer(SheafFMTL("ring", edge_dim_ratio=1.0), max_epochs=2)
    resumed.fit(QuadraticModule(dim=3), data(), data(), ckpt_path=path)
    names = [key for key in whole.callback_metrics if key.startswith("sheaf/")]
    assert len(names) == 3
    for name in names:
        assert resumed.callback_metrics[name] == whole.callback_metrics[name]


def data() -> FederatedTensorDataset:
    return quadratic_clients([1.0, 2.0, 3.0], torch.eye(3))
