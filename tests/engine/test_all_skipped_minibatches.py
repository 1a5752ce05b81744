"""``training_step`` that returns None for some minibatches, as Lightning allows: a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.methods import (
    APFL,
    Ditto,
    FedAvg,
    FedProx,
    LocalOnly,
)
from lightning_pfl.methods.base import Method
from lightning_pfl.testing.fitting import fit
from lightning_pfl.testing.rounds import assert_trees_close

SIZES, BATCH, ROUNDS, EPOCHS = (6, 4, 3), 2, 2, 2
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
}


def clients() -> FederatedTensorDataset:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(sum(SIZES), 2, generator=generator, dtype=torch.float64)
    return FederatedTensorDataset(
        (x, x.sum(1) ** 2), torch.arange(len(x)).split(SIZES), batch_size=BATCH
    )


class Skips(L.LightningModule):
    """Skips the minibatches whose numbers are in ``skipped``."""

    def __init__(self, skipped: set[int], optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.skipped = nn.Linear(2, 1).double(), frozenset(skipped)
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x).squeeze(-1)
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if batch_idx in self.skipped:
            return None
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        return optimizer


def plain(module: Skips, start: dict[str, Tensor], client: int, accumulate: int) -> Any:
    """One round of a client: its model, and the mean loss over the samples of its minibatches."""
    alone, data = copy.deepcopy(module), clients()
    alone.load_state_dict(start)
    alone.log = lambda *_, **__: None  # type: ignore[method-assign]
    optimizer: Any = alone.configure_optimizers()
    number, total, samples = 0, 0.0, 0
    for _ in range(EPOCHS):
        batches = data.indices[client].split(BATCH)
        for first in range(0, len(batches), accumulate):
            optimizer.zero_grad()
            step = batches[first : first + accumulate]
            for offset, positions in enumerate(step):
                loss = alone.training_step(data.gather(positions), number + offset)
                if loss is not None:
                    (loss / accumulate).backward()
                    total, samples = total + loss.item() * len(positions), samples + len(positions)
            optimizer.step()  # moves nothing where there is no gradient
            number += accumulate
    return alone.state_dict(), total / samples if samples else float("nan")


@pytest.mark.sweep(20)
@pytest.mark.parametrize("engine", ["auto", "sequential"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("skipped", [{0}, {1}, {0, 1}, {3}, set(range(2, 20))], ids=str)
@pytest.mark.usefixtures("clients_at_once")
def test_against_a_plain_loop(
    skipped: set[int],
    optimizer: str,
    accumulate: int,
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_pfl.engine.select.rank_zero_info", said.append)
    module = Skips(skipped, optimizer)
    start: Any = copy.deepcopy(module.state_dict())
    losses = []
    for _ in range(ROUNDS):
        rounds = [plain(module, start, client, accumulate) for client in range(len(SIZES))]
        weights = [size / sum(SIZES) for size in SIZES]
        models = [model for model, _ in rounds]
        start = {
            name: sum(w * model[name] for w, model in zip(weights, models, strict=True))
            for name in start
        }
        losses = [loss for _, loss in rounds]
    run = fit(
        FedAvg(local_epochs=EPOCHS),
        clients(),
        module,
        ROUNDS,
        engine,
        accumulate_grad_batches=accumulate,
    )
    for name, expected in start.items():
        torch.testing.assert_close(run.server["model"][name], expected, rtol=1e-10, atol=1e-12)
    known = [(w, loss) for w, loss in zip(SIZES, losses, strict=True) if loss == loss]
    mean = sum(loss for _, loss in known) / len(known)
    assert run.metrics["train_loss"] == pytest.approx(mean, rel=1e-6)
    if engine == "auto":
        assert sum("`training_step` skips a minibatch" in text for text in said) == 1


METHODS: dict[str, Callable[[], Method]] = {
    "FedAvg": lambda: FedAvg(weighting="uniform"),
    "FedProx": lambda: FedProx(prox_weight=0.5, weighting="uniform"),
    "Ditto": lambda: Ditto(prox_weight=0.5, weighting="uniform"),
    "APFL": lambda: APFL(mixing=0.3, weighting="uniform"),
    "APFL, learned": lambda: APFL(mixing=0.3, adaptive=True, weighting="uniform"),
    "APFL, outputs": lambda: APFL(mixing=0.3, adaptive=True, mix="outputs", weighting="uniform"),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_skipped_minibatch_might_as_well_not_be_there(name: str) -> None:
    """In one pass, and where the server counts clients alike."""
    data = clients()
    rest = FederatedTensorDataset(
        data.fields, [row[BATCH:] for row in data.indices], batch_size=BATCH
    )
    found = fit(METHODS[name](), data, Skips({0}), ROUNDS, "auto")
    expected = fit(METHODS[name](), rest, Skips(set()), ROUNDS, "reference")
    assert_trees_close(found.server, expected.server, rtol=1e-10, atol=1e-12)
    assert_trees_close(found.client_state, expected.client_state, rtol=1e-10, atol=1e-12)
    assert found.metrics["train_loss"] == pytest.approx(expected.metrics["train_loss"], rel=1e-6)


@pytest.mark.filterwarnings("ignore:No client has changed anything in round 0")
@pytest.mark.parametrize("make", [FedAvg, FedProx, LocalOnly])
def test_a_round_whose_minibatches_are_all_skipped(make: type[Method]) -> None:
    """Nobody moves, and nobody has a loss."""
    module = Skips(set(range(20)))
    before: Any = copy.deepcopy(module.state_dict())
    run = fit(make(), clients(), module, ROUNDS, "auto")
    for name, expected in before.items():
        for found in run.models[name]:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)
    assert "train_loss" not in run.metrics
