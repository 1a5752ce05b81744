"""Kinds of modules: one client with full participation and FedAvg is a plain ``Trainer.fit``.

Manual optimization, GANs, step schedulers, clipping and averages of weights are in
``test_client_loop.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

from tests.trainer.plain import BATCH, SAMPLES, Regression, fields, require_plain


class Moments(Regression):
    """Adam, whose moments last through the epochs of a round."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05, weight_decay=0.01)


class Scheduled(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)]


class OnPlateau(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}


class Tied(Regression):
    """An encoder whose transpose decodes."""

    def build(self) -> None:
        self.layers, self.back, self.out = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.back.weight = self.layers.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.back(self.layers(x).tanh())).squeeze(-1)
        return result


class Normed(Regression):
    def build(self) -> None:
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


class Recurrent(Regression):
    """Reads the numbers one after another."""

    def build(self) -> None:
        self.lstm, self.layers = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.lstm(x.unsqueeze(-1))[0][:, -1])


class Attentive(Regression):
    def build(self) -> None:
        self.embed, self.attention = nn.Linear(1, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.layers = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.unsqueeze(-1))
        return super().forward(self.attention(tokens, tokens, tokens)[0].mean(1))


class Parametrized(Regression):
    """Weight normalisation, and a spectral norm with its buffers."""

    def build(self) -> None:
        parametrizations.weight_norm(self.layers[0])
        parametrizations.spectral_norm(self.layers[2])


class LowRank(nn.Module):
    """A frozen layer with a trained product of two thin matrices, as adapters are."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
        return result


class Adapted(Regression):
    def build(self) -> None:
        self.layers[0] = LowRank(self.layers[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class MetricLearning(Regression):
    """Pulls neighbours in the minibatch together, and pushes the next ones away."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        points = self.layers[0](batch[0])
        loss = F.triplet_margin_loss(points, points.roll(1, 0), points.roll(2, 0), margin=3.0)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return {"loss": loss, "points": points}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        apart = torch.pdist(self.layers[0](batch[0]))
        self.log("val_loss", apart.mean())


class Adversarial(Regression):
    """Moves inputs along a gradient of their own, which leaves gradients of the weights behind."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        inputs: Any = x.clone().requires_grad_()
        F.mse_loss(self(inputs), y).backward()
        return super().training_step((x + 0.1 * inputs.grad.sign(), y), batch_idx)


class Skipping(Regression):
    """Leaves out the second minibatch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


KINDS: dict[str, type[Regression]] = {
    "least squares": Regression,
    "cosine": Scheduled,
    "plateau": OnPlateau,
    "tied": Tied,
    "BatchNorm": Normed,
    "LSTM": Recurrent,
    "attention": Attentive,
    "parametrizations": Parametrized,
    "adapters": Adapted,
    "metric learning": MetricLearning,
    "adversarial": Adversarial,
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_kinds(kind: type[Regression]) -> None:
    require_plain(kind)


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_moments(engine: str) -> None:
    require_plain(Moments, rounds=1, local_epochs=3, engine=engine)


def test_accumulation_and_clipping() -> None:
    require_plain(Regression, accumulate_grad_batches=2, gradient_clip_val=0.5)


@pytest.mark.filterwarnings("ignore:.*returned `None`.*")
def test_skipped_minibatches() -> None:
    # The mean of what is logged: plain Lightning weighs minibatches that log by their samples too.
    require_plain(Skipping)


# --- batches of other forms ---


class MultiTask(Regression):
    """Two heads and losses on dicts of tensors."""

    def build(self) -> None:
        self.other = nn.Linear(3, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first = F.mse_loss(self(batch["x"]), batch["targets"]["number"])
        second = F.cross_entropy(self.other(batch["x"]), batch["targets"]["sign"])
        self.log_dict({"first": first, "second": second}, on_step=False, on_epoch=True)
        return first + 0.3 * second

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch["x"]), batch["targets"]["number"]))


def dicts() -> DataLoader[Any]:
    x, y = fields()
    samples = [
        {"x": a, "targets": {"number": b, "sign": (b > 0).long()}}
        for a, b in zip(x, y, strict=True)
    ]
    return DataLoader(samples, batch_size=BATCH)  # type: ignore[arg-type]


class Detection(Regression):
    """Boxes of pictures of different sizes, in lists, by a sum of losses in a dict."""

    def losses(self, images: Any, targets: Any) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {"box": [], "score": []}
        for image, target in zip(images, targets, strict=True):
            given = torch.cat([image.mean(1), image.amax(1), image.amin(1)])[:3]
            hidden = self.layers[:2](given)
            box = self.layers[2](hidden).expand(len(target["boxes"]), 4)
            found["box"].append(F.l1_loss(box, target["boxes"]))
            found["score"].append((hidden.sum() - target["labels"].sum()).square())
        return {name: torch.stack(values).mean() for name, values in found.items()}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, targets = batch
        losses = self.losses(images, targets)
        total = losses["box"] + 0.1 * losses["score"]
        self.log("loss", total, on_step=False, on_epoch=True, batch_size=len(images))
        return total

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_box", self.losses(*batch)["box"], batch_size=len(batch[0]))


def boxes() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    draw = partial(torch.rand, generator=generator, dtype=torch.float64)
    samples = [
        (
            draw(1, 2 + number % 3),
            {"boxes": draw(1 + number % 2, 4), "labels": torch.ones(1 + number % 2)},
        )
        for number in range(SAMPLES)
    ]
    return DataLoader(samples, batch_size=BATCH, collate_fn=lambda some: tuple(zip(*some)))  # type: ignore[arg-type]  # noqa: B905


@pytest.mark.parametrize(
    ("kind", "data"), [(MultiTask, dicts), (Detection, boxes)], ids=["dicts", "detection"]
)
def test_batches(kind: type[Regression], data: Callable[[], DataLoader[Any]]) -> None:
    require_plain(kind, data=data)


class TwoSources(Regression):
    """Few samples with a target, and many without."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch["labelled"]
        loss = F.mse_loss(self(x), y)
        if batch["free"] is not None:
            loss = loss + self(batch["free"][0]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(x))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch["labelled"]
        self.log("val_loss", F.mse_loss(self(x), y), batch_size=len(x))


def side_by_side(mode: Any, labelled: int = SAMPLES) -> CombinedLoader:
    free = DataLoader(TensorDataset(fields()[0].flip(0) + 1), batch_size=2)
    some = TensorDataset(*(field[:labelled] for field in fields()))
    return CombinedLoader({"labelled": DataLoader(some, batch_size=BATCH), "free": free}, mode)


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
def test_loaders_side_by_side(mode: Any, engine: Any) -> None:
    """Three minibatches with a target, five without."""
    require_plain(TwoSources, data=partial(side_by_side, mode), engine=engine)


# --- precision and compilation ---


class Single(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.float()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([leaf.float() for leaf in batch], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step([leaf.float() for leaf in batch], batch_idx)


def test_mixed_precision() -> None:
    # Many clients at once round otherwise.
    require_plain(Single, precision="bf16-mixed", engine="sequential")


@pytest.mark.parametrize(
    # In float16 the loss is infinite at the large scale: steps are skipped until it is halved.
    ("scale", "rounds", "local_epochs"),
    [(8.0, 2, 1), (2.0**20, 1, 4)],
    ids=["all steps", "skipped steps"],
)
def test_scaled_losses(scale: float, rounds: int, local_epochs: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    require_plain(Single, rounds, local_epochs, engine="sequential", plugins=[plugin])


class Unfused(Regression):
    """A fused step, which clients take by default, rounds otherwise."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, fused=False)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
def test_true_precision(precision: Any) -> None:
    trainer = require_plain(Unfused, precision=precision, engine="sequential")
    dtypes = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    (dtype,) = {leaf.dtype for leaf in trainer.strategy.global_state_dict().values()}
    assert dtype == dtypes[precision.removesuffix("-true")]


class Compiled(Regression):
    def build(self) -> None:
        self.layers = torch.compile(self.layers, backend="eager")


class CompiledGradients(Regression):
    """The backward pass is compiled too."""

    def build(self) -> None:
        self.layers = torch.compile(self.layers, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "sequential"])
@pytest.mark.parametrize("kind", [Compiled, CompiledGradients])
def test_compiled_layers(kind: type[Regression], engine: str) -> None:
    require_plain(kind, engine=engine)
