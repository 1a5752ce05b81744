"""Errors of torch about labels and gradients say which client has them, and what to do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pfl.core.errors import ClientError, naming_clients
from tests.trainer.setting import Quadratic, points, trainer

SCORES = torch.zeros(2, 3)
CLASSES, BINARY, RANGE = r"labels\.long\(\)", r"labels\.float\(\)", "number the classes from 0"


@pytest.mark.parametrize(
    ("labels", "remedy"),
    [
        (torch.tensor([0, 1], dtype=torch.int32), CLASSES),
        (torch.tensor([True, False]), CLASSES),
        (torch.tensor([0.0, 1.0]), CLASSES),
        (torch.tensor([0, 3]), RANGE),
        (torch.tensor([0, -1]), RANGE),
    ],
)
def test_labels_of_classes(labels: Tensor, remedy: str) -> None:
    with (
        pytest.raises(ClientError, match=rf"training_step failed for client 'ann'.*{remedy}"),
        naming_clients("training_step", ["ann"], [0], 0),
    ):
        F.cross_entropy(SCORES, labels)


def require_remedy(layer: nn.Module, samples: Tensor, many: bool, remedy: str) -> None:
    """Require a remedy in the error of a layer, alone or under ``vmap``."""
    weights = {name: value.detach()[None] for name, value in layer.named_parameters()}
    call = partial(torch.func.functional_call, layer)
    step = partial(torch.vmap(call), weights, samples[None]) if many else partial(layer, samples)
    with (
        pytest.raises(ClientError, match=rf"for client 'ann'.* {remedy}"),
        naming_clients("training_step", ["ann"], [0], 0),
    ):
        step()


@pytest.mark.parametrize("many", [False, True], ids=["one", "many at once"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(3, 2), (2, 4)),
        (nn.Conv2d(1, 2, 3), (2, 3, 8, 8)),
        (nn.Conv2d(1, 2, 3), (2, 64)),
        (nn.LayerNorm(3), (2, 4)),
        (nn.LSTM(3, 2), (5, 2, 4)),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, nn.Module) else str(one),
)
def test_samples_of_another_shape_than_the_layers_expect(
    layer: nn.Module, shape: tuple[int, ...], many: bool
) -> None:
    require_remedy(layer, torch.zeros(shape), many, "the shape that the layers expect")


def test_a_minibatch_of_one_sample() -> None:
    with (
        pytest.raises(ClientError, match=r"client 'ann'.*: choose a batch size that leaves none"),
        naming_clients("client_step", ["ann"], [0], 0),
    ):
        nn.BatchNorm1d(3)(torch.zeros(1, 3))


@pytest.mark.parametrize("labels", [torch.tensor([0, 1]), torch.tensor([True, False])])
def test_labels_of_a_binary_loss(labels: Tensor) -> None:
    with (
        pytest.raises(ClientError, match=rf"for client 'ann'.*{BINARY}"),
        naming_clients("training_step", ["ann"], [0], 0),
    ):
        F.binary_cross_entropy_with_logits(SCORES[:, 0], labels)


@pytest.mark.parametrize("many", [False, True], ids=["one", "many at once"])
@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        (nn.Linear(3, 2), torch.float64),
        (nn.Conv1d(3, 2, 1), torch.float64),
        (nn.Conv1d(3, 2, 1), torch.uint8),
    ],
)
def test_samples_of_another_type_than_the_weights(
    layer: nn.Module, dtype: torch.dtype, many: bool
) -> None:
    require_remedy(layer, torch.ones(1, 3, 3, dtype=dtype), many, r"use `inputs\.float\(\)`")


def test_ids_beyond_an_embedding() -> None:
    with (
        pytest.raises(ClientError, match=r"for client 'ann'.* ids from 0 to `num_embeddings` - 1"),
        naming_clients("training_step", ["ann"], [0], 0),
    ):
        nn.Embedding(3, 2)(torch.tensor([2, 3]))


def test_a_loss_of_each_sample() -> None:
    weight = torch.zeros(2, 3, requires_grad=True)
    with (
        pytest.raises(ClientError, match=r"for client 'ann'.*one number from `training_step`"),
        naming_clients("client_step", ["ann"], [0], 0),
    ):
        F.cross_entropy(weight, torch.tensor([0, 1]), reduction="none").backward()


def test_advice_about_the_engine_comes_after_what_to_do() -> None:
    with (
        pytest.raises(ClientError, match=r"an output for each\. Run with another engine\."),
        naming_clients("training_step", ["ann"], [0], 0, "Run with another engine."),
    ):
        F.cross_entropy(SCORES, torch.tensor([0, 3]))


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_a_sparse_gradient_of_the_functional_embedding(engine: Any) -> None:
    class Words(Quadratic):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(3, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            places = batch[0][:, 0].abs().long().clamp_max(2)
            return F.embedding(places, self.words.weight, sparse=True).square().mean()

    run = trainer(engine=engine, limit_val_batches=0)
    match = (
        r"client '\d' in round 0: Expected dense gradients, but that of 'words.weight' is sparse"
    )
    with pytest.raises(ClientError, match=match):
        run.fit(Words(), points(), points())


def test_samples_with_the_graph_of_a_network() -> None:
    made = nn.Linear(3, 2)(torch.ones(2, 3)).exp()
    made.sum().backward()
    with (
        pytest.raises(ClientError, match=r"for client 'ann'.*detach them in the data set"),
        naming_clients("training_step", ["ann"], [0], 0),
    ):
        made.sum().backward()
