"""A phase of a round that measures on the clients' validation samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.tree import Tree
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.methods.base import LocalStep, Method, Phase
from lightning_pfl.testing import Fit, assert_trees_equal, fit
from lightning_pfl.testing.conformance import small_clients, small_module

HELD: dict[str, list[int]] = {"4": [0, 5, 2, 7], "0": [1], "3": [3, 4]}
"""Validation samples by client; clients 1 and 2 have none."""


class Measures(Method):
    """Sends the trained model's loss on validation samples and their number."""

    def __init__(self, measures: bool = True) -> None:
        super().__init__(local_epochs=2)
        self.measures = measures

    def phases(self, round: int) -> tuple[Phase, ...]:
        local = super().phases(round)
        look = Phase(epochs=1, name="look", evaluate_only=True, data="validation")
        # Measured between two stretches of training, which must not change.
        return (*local, look, *local) if self.measures else (*local, *local)

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        state = super().client_init(received, client_state, info)
        zeros = torch.zeros(len(info), dtype=torch.float64)
        return {**state, "sum": zeros, "count": zeros, "outputs": zeros}

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        if client.phase != "look":
            return super().client_step(state, minibatches, client)
        loss, count = client.loss(state["model"], minibatches)
        outputs = client.outputs(state["model"], minibatches)
        real = client.samples(minibatches)[1]
        total = (outputs.square().sum(2) * real).sum(1)
        return {
            **state,
            "sum": state["sum"] + loss * count,
            "count": state["count"] + count,
            "outputs": state["outputs"] + total,
        }

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        upload, kept = super().client_final(received, client_state, state, info)
        measured = {name: state[name] for name in ("sum", "count", "outputs")}
        return {**upload, **(measured if self.measures else {})}, kept


class MeasuresFirst(Measures):
    """Measures what was received, then trains."""

    def phases(self, round: int) -> tuple[Phase, ...]:
        return super().phases(round)[1:]


def pool() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(8, 1, 5, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (8,), generator=generator)


def tensors() -> FederatedTensorDataset:
    return FederatedTensorDataset(pool(), list(HELD.values()), names=list(HELD), batch_size=3)


class Own(TensorDataset):
    """Loaders over it stay loaders."""

    def __getitem__(self, index: Any) -> Any:
        x, y = self.tensors
        return x[index], y[index]


def loaders() -> Any:
    x, y = pool()
    return {name: DataLoader(Own(x[rows], y[rows]), batch_size=3) for name, rows in HELD.items()}


def run(method: Method, engine: str, val_data: Any, **settings: Any) -> Fit:
    module = small_module()
    return fit(method, small_clients(), module, engine=engine, val_data=val_data, **settings)


@pytest.mark.parametrize("make", [tensors, loaders])
@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_it_measures_each_client_on_its_own_samples(engine: str, make: Any) -> None:
    (round,) = run(MeasuresFirst(), engine, make()).recorder.rounds
    uploads, module = round.uploads or {}, small_module().eval()
    x, y = pool()
    for row, client in enumerate(round.info.index.tolist()):
        at = HELD.get(str(client), [])
        assert uploads["count"][row] == len(at)
        with torch.no_grad():
            outputs = module(x[at]) if at else torch.zeros(0, 3).double()
            loss = nn.functional.cross_entropy(outputs, y[at], reduction="sum")
        assert uploads["sum"][row].item() == pytest.approx(loss.item(), rel=1e-10)
        assert uploads["outputs"][row].item() == pytest.approx(outputs.square().sum().item())


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_training_is_as_without_it(engine: str) -> None:
    """Order of samples, steps and models keep their bits, also under a limit for evaluations."""
    runs = [run(Measures(on), engine, tensors(), rounds=2) for on in (True, False)]
    assert_trees_equal(runs[0].server, runs[1].server)
    for with_it, without in zip(*(r.recorder.rounds for r in runs), strict=True):
        assert torch.equal(with_it.info.steps, without.info.steps)


def test_engines_agree_and_limits_do_not_count() -> None:
    found = [
        run(Measures(), engine, tensors(), limit_val_batches=1).recorder.rounds[0].uploads or {}
        for engine in ("vectorized", "sequential")
    ]
    for name in ("sum", "count", "outputs"):
        torch.testing.assert_close(found[0][name], found[1][name])
    assert found[0]["count"].sum() == 7


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_without_validation_data_it_is_refused(engine: str) -> None:
    with pytest.raises(MisconfigurationException, match=r"on which Measures measures .* `val_frac"):
        run(Measures(), engine, None)


def test_nothing_trains_on_validation_data() -> None:
    with pytest.raises(ValueError, match=r"Expected a phase on validation data to train nothing"):
        Phase(epochs=1, data="validation")
