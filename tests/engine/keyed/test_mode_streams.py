"""Dropout and augmentation depend on (seed, round, client) and on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.methods import FedAvg, FedRep
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.rounds import LocalRound, assert_trees_equal, local_round
from tests.engine.nets import CLASSES, cnn, compare, image_clients

CHUNKS = (1, 3)


def jitter(batch: Any) -> Any:
    """Flips and noise, as an augmentation on the device would do them."""
    x, y = batch
    flipped = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x)
    return flipped + 0.1 * torch.randn_like(x), y


class Heads(nn.Module):
    """Attention with dropout over the rows of a picture."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.attention = nn.MultiheadAttention(5, 1, dropout=0.3, batch_first=batch_first)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = x.flatten(1, 2)
        rows = rows if self.batch_first else rows.transpose(0, 1)
        rows = self.dropout(self.attention(rows, rows, rows, need_weights=False)[0])
        rows = rows if self.batch_first else rows.transpose(0, 1)
        return rows.flatten(1)


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1, 2)
        return F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.3).flatten(1)


def over(backbone: Callable[[], nn.Module]) -> Callable[[], PersonalizedModule]:
    return lambda: PersonalizedModule(backbone(), nn.Linear(25, CLASSES), lr=0.1).double()


NETWORKS: dict[str, Callable[[], Any]] = {
    "dropout": lambda: cnn(dropout=0.4),
    "dropout without BatchNorm": lambda: cnn(norm=False, dropout=0.4),
    "multi-head attention": over(Heads),
    "attention with time first": over(lambda: Heads(batch_first=False)),
    "scaled dot product": over(Scaled),
    "channel dropout": over(lambda: nn.Sequential(nn.Dropout2d(0.5), nn.Flatten())),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_masks_are_those_of_the_sequential_engine_for_every_chunking(name: str) -> None:
    compare(NETWORKS[name], image_clients(), chunk_sizes=CHUNKS)


class TimeFirst(nn.Module):
    """Drops hardly ever, in rows of which those of a sample don't lie one after another."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1, 2).transpose(0, 1)
        dropped = F.dropout(rows.flatten(0, 1), 1e-3, self.training)
        return dropped.view(rows.shape).transpose(0, 1).flatten(1)


class Shared(nn.Module):
    """Scales all samples by what was drawn for all of them."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) * F.dropout(torch.ones_like(x.flatten(1)), 0.01, self.training).mean(0)


class Rare(nn.Module):
    """Draws its own mask, of which hardly any element counts."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) * (torch.rand_like(x.flatten(1)) > 1e-3)


MORE: dict[str, Callable[[], Any]] = {
    "time first": over(TimeFirst),
    "shared": over(Shared),
    "rare": over(Rare),
}
PADDED = (
    *("dropout without BatchNorm", "multi-head attention", "scaled dot product"),
    "channel dropout",
)


@pytest.mark.parametrize("name", [*NETWORKS, *MORE])
def test_minibatches_are_padded_where_each_sample_keeps_its_masks(name: str) -> None:
    """Padded elements lie behind those of the samples, of which each has its own."""
    outcome = local_round(FedAvg(), (NETWORKS | MORE)[name](), image_clients())
    assert isinstance(outcome.engine, VectorizedEngine)
    (found,) = set(outcome.engine.surveys._found.values())
    assert found.draws
    assert found.pads == (name in PADDED)


@pytest.mark.parametrize("name", MORE)
def test_what_is_not_padded_agrees_with_the_sequential_engine(name: str) -> None:
    compare(MORE[name], image_clients(), chunk_sizes=(None,))


@pytest.mark.parametrize("norm", [True, False])
def test_augmentation_is_that_of_the_sequential_engine(norm: bool) -> None:
    compare(lambda: cnn(norm), image_clients(augment=jitter), chunk_sizes=CHUNKS)


def test_masks_of_several_epochs_and_phases() -> None:
    compare(lambda: cnn(dropout=0.4), image_clients(), lambda: FedRep(head_epochs=2), CHUNKS)


def twins(count: int = 3) -> FederatedTensorDataset:
    """Clients with the very same samples in the same order."""
    x, y = image_clients().fields
    return FederatedTensorDataset((x, y), [list(range(8))] * count, batch_size=8, augment=None)


class Masks(PersonalizedModule):
    """Logs a number that tells its dropout masks apart."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        self.log("mask", F.dropout(torch.linspace(1, 2, 64, dtype=torch.float64), 0.5).sum())
        return super().training_step(batch, batch_idx)


def masks(engine: Any, seed: int = 0, round: int = 0, epochs: int = 1, data: Any = None) -> Tensor:
    plain = cnn()
    module = Masks(plain.backbone, plain.head).double()
    settings = EngineSettings(seed=seed)
    data = twins() if data is None else data
    method = FedAvg(local_epochs=epochs)
    outcome = local_round(method, module, data, engine, round=round, settings=settings)
    return outcome.result.logs["mask"]


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_masks_differ_by_client_round_step_and_seed(engine: Any) -> None:
    first = masks(engine)
    assert len(first.unique()) == len(first)
    assert not torch.isclose(first, masks(engine, round=1)).any()
    assert not torch.isclose(first, masks(engine, seed=1)).any()
    assert not torch.isclose(first, masks(engine, epochs=2)).any()  # the mean of two steps


class Moved(L.LightningModule):
    """Two vectors of which each step at rate 1 subtracts its own dropout mask."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Parameter(torch.zeros(64, dtype=torch.float64))
        self.head = nn.Parameter(torch.zeros(64, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = F.dropout(torch.ones(64, dtype=torch.float64), 0.5)
        return ((self.body + self.head) * mask).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_the_phases_of_a_round_draw_different_masks(engine: Any) -> None:
    """One step in each phase, the first minibatch of both."""
    method = FedRep(head_steps=1, body_steps=1)
    found = local_round(method, Moved(), twins(), engine).models
    head, body = -found["head"], -found["body"]
    assert set(head.unique().tolist()) == set(body.unique().tolist()) == {0.0, 2.0}
    assert not any(torch.equal(h, b) for h, b in zip(head, body, strict=True))


def test_masks_do_not_depend_on_who_else_is_there() -> None:
    assert torch.equal(masks("vectorized", data=twins(2)), masks("vectorized", data=twins(5))[:2])


def run(engine: Any = "vectorized", **settings: Any) -> LocalRound:
    data = image_clients(augment=jitter)
    return local_round(
        FedAvg(), cnn(dropout=0.4), data, engine, settings=EngineSettings(**settings)
    )


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_the_global_generator_is_neither_read_nor_moved(engine: Any) -> None:
    first = run(engine)
    torch.rand(3)
    assert_trees_equal(run(engine).models, first.models)
    cnn(dropout=0.4)
    before = torch.get_rng_state()
    module, data = cnn(dropout=0.4), image_clients(augment=jitter)
    before = torch.get_rng_state()
    local_round(FedAvg(), module, data, engine)
    assert torch.equal(torch.get_rng_state(), before)


def test_methods_with_one_seed_see_the_same_batches() -> None:
    seen: dict[str, list[Tensor]] = {}

    class Looking(PersonalizedModule):
        name = ""

        def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
            seen.setdefault(self.name, []).append(batch[0])
            return super().training_step(batch, batch_idx)

    for name, method in (("average", FedAvg(local_epochs=2)), ("split", FedRep(head_epochs=1))):
        plain = cnn()
        module = Looking(plain.backbone, plain.head).double()
        module.name = name
        local_round(method, module, image_clients(), "sequential", clients=[3])
    assert len(seen["average"]) == 2 * 4
    assert all(map(torch.equal, seen["average"], seen["split"]))
