"""One client after another, with recorded steps and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine import large_operators, operators
from lightning_pfl.engine.operators import has_onednn
from lightning_pfl.engine.probe import Estimate, Probe
from lightning_pfl.methods import SCAFFOLD, Ditto, FedAvg, FedRep
from lightning_pfl.methods.base import Method
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.fitting import Fit, fit
from lightning_pfl.testing.rounds import assert_trees_close, assert_trees_equal

WIDTH, HIDDEN, BATCH = 400, 200, 20
METHODS: dict[str, Any] = {
    "FedAvg": lambda: FedAvg(local_epochs=2),
    "FedRep": lambda: FedRep(head_epochs=2),
    "Ditto": lambda: Ditto(0.5),
    "SCAFFOLD": lambda: SCAFFOLD(local_epochs=2),
}


def clients(dtype: torch.dtype) -> FederatedTensorDataset:
    """Clients with short last minibatches, and one without a whole one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, WIDTH, generator=generator).to(dtype)
    y = torch.randint(3, (120,), generator=generator)
    indices = torch.arange(120).split([40, 25, 8, 47])
    return FederatedTensorDataset((x, y), indices, batch_size=BATCH, shuffle=True)


def run(
    method: Method,
    engine: str,
    rounds: int = 3,
    dtype: torch.dtype = torch.float32,
    ckpt_path: Path | None = None,
) -> Fit:
    torch.manual_seed(1)
    backbone = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU())
    module = PersonalizedModule(backbone, nn.Linear(HIDDEN, 3), lr=0.05, momentum=0.9).to(dtype)
    data = clients(dtype)
    return fit(
        method, data, module, rounds, engine, 3, val_data=data, ckpt_path=ckpt_path,
        precision="64-true" if dtype == torch.float64 else "32-true",
    )  # fmt: skip


def replays(made: Fit) -> int:
    engine: Any = made.strategy.federation.engine._engines["training_step"]
    return int(engine.traces.used + engine.whole.used)


def require_same(found: Fit, expected: Fit) -> None:
    assert_trees_equal(found.server, expected.server)
    assert_trees_equal(found.client_state, expected.client_state)
    assert found.metrics == expected.metrics


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", METHODS)
def test_recorded_steps_have_the_bits_of_auto_and_a_resumed_run_too(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also a product that oneDNN runs in recorded steps, and in others of the same run."""
    assert BATCH * WIDTH * HIDDEN >= large_operators.LARGE
    monkeypatch.setattr(operators, "prefers_onednn", has_onednn)
    made = METHODS[name]
    found = run(made(), "sequential")
    assert found.strategy.federation.engine.choices["training_step"] == "sequential (as asked)"
    assert replays(found) > 0
    path = run(made(), "sequential", rounds=1).save(tmp_path / "half.ckpt")
    require_same(run(made(), "sequential", ckpt_path=path), found)
    for name in ("training_estimate", "evaluation_estimate"):  # as for a large network
        monkeypatch.setattr(Probe, name, lambda *_: Estimate(1e9, pays=False))
    auto = run(made(), "auto")
    assert auto.strategy.federation.engine.choices["training_step"].startswith("sequential (many")
    require_same(auto, found)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", METHODS)
def test_the_reference_has_the_same_numbers_without_recordings(name: str, tmp_path: Path) -> None:
    """And a run goes on with recordings that began without, as those of earlier versions did."""
    made, double = METHODS[name], torch.float64
    expected = run(made(), "reference", dtype=double)
    choice = expected.strategy.federation.engine.choices["training_step"]
    assert choice == "sequential (as asked, without recordings)"
    assert replays(expected) == 0
    path = run(made(), "reference", 1, double).save(tmp_path / "half.ckpt")
    for found in (
        run(made(), "sequential", dtype=double),
        run(made(), "sequential", dtype=double, ckpt_path=path),
    ):
        assert replays(found) > 0
        assert_trees_close(found.server, expected.server)
        assert_trees_close(found.client_state, expected.client_state)
