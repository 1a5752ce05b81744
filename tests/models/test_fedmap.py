"""FedMAP's perceptron: balanced accuracy of every client, in both engines."""

from typing import Any, Literal

import lightning as L
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score
from torch import nn

from lightning_pfl import FederatedStrategy
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.methods import FedAvg, FedBN
from lightning_pfl.models import FedMAPMLP
from lightning_pfl.testing.fitting import QUIET


def clients() -> FederatedTensorDataset:
    """Three clients with 40, 30 and 50 samples, the first with fewer of class 1 than the last."""
    x, rows = torch.randn(120, 30), list(torch.arange(120).split([40, 30, 50]))
    y = torch.zeros(120, dtype=torch.long)
    for row, threshold in zip(rows, (1.0, 0.5, 0.0), strict=True):
        y[row] = (x[row, 0] > threshold).long()
    return FederatedTensorDataset((x, y), rows, batch_size=16)


def trainer(**settings: Any) -> L.Trainer:
    return L.Trainer(max_epochs=2, **QUIET, **settings)


@pytest.mark.parametrize("engine", ["auto", "sequential"])
def test_balanced_accuracy_is_the_mean_recall_of_each_client(
    engine: Literal["auto", "sequential"],
) -> None:
    data, module = clients(), FedMAPMLP(optimizer="adam", lr=0.01)
    run = trainer(strategy=FederatedStrategy(FedAvg(local_epochs=10), engine=engine))
    run.fit(module, train_dataloaders=data, val_dataloaders=data)
    run.validate(module, dataloaders=data, verbose=False)
    run.test(module, dataloaders=data, verbose=False)
    model = module_of(run, module)
    x, y = data.fields
    want = [
        balanced_accuracy_score(y[row], (model(x[row])[:, 0] > 0).long()) for row in data.indices
    ]
    assert 0.5 < min(want) < max(want)
    strategy: Any = run.strategy
    for split in ("val", "test"):
        found = strategy.federation.client_results[split].evaluations[""].values
        values = found[f"{split}_balanced_acc"].double()
        torch.testing.assert_close(values, torch.tensor(want).double(), atol=1e-6, rtol=0)
    assert float(run.callback_metrics["test_balanced_acc"]) == pytest.approx(sum(want) / 3)


def module_of(run: L.Trainer, module: FedMAPMLP) -> FedMAPMLP:
    strategy: Any = run.strategy
    twin = FedMAPMLP(**module.hparams)
    twin.load_state_dict(strategy.global_state_dict())
    return twin.eval()


def test_batch_norm_stays_on_the_client_under_fedbn() -> None:
    data, module = clients(), FedMAPMLP(batch_norm=True, lr=0.1)
    layers = [type(layer) for layer in module.backbone.children()]
    assert layers == [nn.Linear, nn.BatchNorm1d, nn.ReLU] * 2
    run = trainer(strategy=FederatedStrategy(FedBN()))
    run.fit(module, train_dataloaders=data, val_dataloaders=data)
    strategy: Any = run.strategy
    one, other = (strategy.client_state_dict(client) for client in (0, 1))
    same = {name for name, value in one.items() if torch.equal(value, other[name])}
    norms = {name for name in one if name.split(".")[1] in ("1", "4")}
    counters = {name for name in norms if name.endswith("num_batches_tracked")}
    assert len(norms) == 10
    assert same == set(one) - norms | (same & counters)
