"""DataLoaders whose samples require gradients."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_pfl.data.datasets import FederatedLoaders, FederatedTensorDataset
from lightning_pfl.engine.trace import Traces
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing import Fit, fit
from lightning_pfl.testing.rounds import assert_trees_close, assert_trees_equal
from tests.engine.nets import cnn, image_clients


class AskingForGradients(Dataset[tuple[Tensor, ...]]):
    """Samples that require gradients, if asked to."""

    def __init__(self, data: FederatedTensorDataset, client: int, asks: bool) -> None:
        self.fields, self.rows, self.asks = data.fields, data.indices[client], asks

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> tuple[Tensor, ...]:
        x, y = (field[self.rows[at]] for field in self.fields)
        return x.clone().requires_grad_(self.asks), y


def trained(asks: bool, engine: str, rounds: int = 3, path: Path | None = None) -> Fit:
    data = image_clients((8, 8, 5))
    loaders = [
        DataLoader(AskingForGradients(data, client, asks), batch_size=4, shuffle=True)
        for client in range(3)
    ]
    all_of = FederatedLoaders(loaders)
    return fit(FedAvg(local_epochs=2), all_of, cnn(), rounds, engine, ckpt_path=path)


@cache
def of_plain_samples() -> Fit:
    return trained(False, "reference")


@pytest.mark.parametrize("engine", ["reference", "sequential", "vectorized", "auto"])
def test_samples_of_dataloaders_may_require_gradients(engine: str, tmp_path: Path) -> None:
    """Each step is taken, with the same result, also after a resume."""
    found = trained(True, engine)
    assert_trees_close(found.server, of_plain_samples().server)
    resumed = trained(True, engine, path=trained(True, engine, 1).save(tmp_path / "run.ckpt"))
    assert_trees_equal(resumed.server, found.server)


def test_a_function_is_called_whose_argument_asks_for_gradients() -> None:
    """A replay's operators write to memory of their own, which doesn't differentiate."""
    traces, x = Traces(True), torch.ones(2, 2, requires_grad=True)
    traces.enter("any")
    for _ in range(4):
        (found,) = torch.autograd.grad(traces.run(lambda x: (x @ x).sum(), x), x)
        assert torch.equal(found, torch.full((2, 2), 4.0))
