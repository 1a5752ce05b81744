"""Steps that do later what the probe didn't see, and what they write where clients meet."""

from __future__ import annotations

import copy
import random
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.safety.compare import difference, together
from lightning_pfl.methods import FedAvg, LocalOnly
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.fitting import Fit, fit
from lightning_pfl.testing.rounds import assert_trees_close, assert_trees_equal
from tests.engine.nets import image_clients

pytestmark = pytest.mark.usefixtures("clients_at_once")
SIZES = (4, 4, 3)


def clients() -> FederatedTensorDataset:
    generator = torch.Generator().manual_seed(4)
    total = sum(SIZES)
    x = torch.randn(total, 2, generator=generator)
    positions = torch.arange(total).split(SIZES)
    return FederatedTensorDataset((x, x.sum(1)), positions, batch_size=2)


class Late(L.LightningModule):
    """Does what ``kind`` says in round 1, or in the second minibatch of every round."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kind = nn.Linear(2, 1), kind
        self.kept: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.layer(batch[0]).squeeze(-1), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        late = self.current_epoch == 1
        if self.kind == "number" and late:
            loss = loss * (1 + abs(loss.item()))
        if self.kind == "keeps" and late:
            self.kept.append(loss.detach())
        if self.kind == "draws" and late:
            loss = loss * random.random()
        if self.kind == "skips" and batch_idx == 1:
            return None
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        value = loss.item() if self.kind == "validates" and self.current_epoch == 1 else loss
        self.log("val_loss", value)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(kind: str, engine: str, **options: Any) -> Fit:
    data = clients()
    return fit(FedAvg(), data, Late(kind), 3, engine, val_data=data, **options)


@pytest.mark.parametrize("kind", ["number", "keeps", "draws", "skips", "validates"])
def test_auto_goes_on_sequentially(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that trains is the vectorized one, and what it can't do, the other one does."""
    expected = run(kind, "reference")
    said: list[str] = []
    monkeypatch.setattr("lightning_pfl.engine.select.rank_zero_info", said.append)
    found = run(kind, "auto")
    assert_trees_close(found.server, expected.server, rtol=1e-5, atol=1e-6)
    assert found.metrics["val_loss"] == pytest.approx(expected.metrics["val_loss"], rel=1e-5)
    step = "validation_step" if kind == "validates" else "training_step"
    assert found.strategy.federation.engine.choices[step].startswith("vectorized")
    # Once, whatever the number of rounds.
    assert sum(text.startswith(f"{step} runs sequential here: ") for text in said) == 1


REASONS = r"vmap|the step changes `kept`|the step draws from|`training_step` skips a minibatch"


@pytest.mark.parametrize("kind", ["number", "keeps", "draws", "skips"])
def test_vectorized_says_what_it_can_not_do(kind: str) -> None:
    with pytest.raises(RuntimeError, match=REASONS):
        run(kind, "vectorized")


def test_what_a_failed_program_kept_is_forgotten() -> None:
    """Every client's three rounds of one or two losses, of round 1: no dead tensors among them."""
    found = run("keeps", "auto")
    kept: Any = found.module.kept
    assert len(kept) == sum(-(-size // 2) for size in SIZES)
    assert all(loss.shape == () and loss.isfinite() for loss in kept)


class Hooking(Callback):
    """Makes gradients shorter from round 1 on, by a hook of a layer or of the optimizer."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch != 1:
            return

        def shorten(optimizer: Any, *_: Any) -> None:
            norm = sum(p.grad.square().sum() for g in optimizer.param_groups for p in g["params"])
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad /= 1 + norm.sqrt()

        if self.what == "layer":
            module.layer.register_full_backward_pre_hook(lambda _, grads: (grads[0] / 2,))
        else:
            trainer.optimizers[0].register_step_pre_hook(shorten)


@pytest.mark.parametrize("what", ["layer", "optimizer"])
def test_hooks_that_come_late_run_one_client_after_another(what: str) -> None:
    """A program of many clients runs no hook of gradients, and has no client's norm."""
    expected = run("nothing", "reference", callbacks=[Hooking(what)])
    without = run("nothing", "reference")
    found = run("nothing", "auto", callbacks=[Hooking(what)])
    assert found.strategy.federation.engine.choices["training_step"].startswith("sequential (")
    assert_trees_close(found.server, expected.server, rtol=1e-5, atol=1e-6)
    moved = found.server["model"]["layer.weight"] - without.server["model"]["layer.weight"]
    assert moved.abs().max() > 1e-2
    with pytest.raises(ValueError, match=r"engine='vectorized', but it can't: .*(differs|hooks)"):
        run("nothing", "vectorized", callbacks=[Hooking(what)])


def test_an_error_of_a_hook_is_nothing_to_go_on_from() -> None:
    class Broken(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.current_epoch == 1:
                raise RuntimeError("broken hook")

    with pytest.raises(RuntimeError, match="broken hook"):
        run("nothing", "auto", callbacks=[Broken()])


def test_memory_that_ran_out_is_no_matter_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    class Later(Callback):
        def on_train_epoch_end(self, *args: Any) -> None:
            monkeypatch.setattr("lightning_pfl.engine.vectorized.chunk.Chunk.run", full)

    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        run("nothing", "auto", callbacks=[Later()])


# --- what clients have in common ---


class Writes(Late):
    """Writes to a weight in its forward pass."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.teacher = nn.Linear(2, 1).requires_grad_(False)
        self.table = nn.Embedding(3, 1, max_norm=0.1)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.kind == "teacher":
            for slow, fast in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
                slow.data.mul_(0.9).add_(fast.detach(), alpha=0.1)
        if self.kind == "clamp":
            with torch.no_grad():
                self.layer.weight.clamp_(-0.01, 0.01)
        if self.kind == "max_norm":
            loss = loss + self.table(batch[0].abs().long() % 3).mean()
        return loss


@pytest.mark.parametrize("engine", ["auto", "sequential"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("teacher", "teacher.weight"), ("clamp", "layer.weight"), ("max_norm", "table.weight")],
)
def test_a_step_that_writes_to_weights_is_refused(kind: str, name: str, engine: str) -> None:
    module = Writes(kind)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(
        ValueError, match=f"`training_step` of Writes writes to '{name}'. Use a buffer"
    ):
        fit(FedAvg(), clients(), module, 1, engine)
    assert_trees_equal(dict(module.state_dict()), dict(before))


def test_a_client_may_write_to_weights_of_its_own() -> None:
    found = fit(LocalOnly(), clients(), Writes("clamp"), 2, "auto")
    # The last step of size 0.1 follows the last clamping.
    assert found.models["layer.weight"].isfinite().all()


# --- the probe ---


def test_the_probe_compares_steps_and_not_weights() -> None:
    """A gradient of 1e-5 beside weights of 1: its sign is far above rounding."""
    start = {"uploads": {"model": {"w": torch.ones(2, 3)}}}
    step = 1e-5 * torch.arange(1.0, 7.0).view(2, 3)
    moved = {"uploads": {"model": {"w": 1 - step}}}
    other = {"uploads": {"model": {"w": 1 + step}}}
    assert difference(moved, moved, start, mixed=False) is None
    assert difference(moved, other, start, mixed=False) == (
        "its step differs from the sequential engine's by more than rounding"
    )


def test_the_probe_forgives_rounding_of_a_gradient_that_is_zero() -> None:
    start = {"uploads": {"model": {"w": torch.zeros(2, 3), "b": torch.ones(2)}}}
    model = {"w": torch.ones(2, 3), "b": 1 + torch.tensor([1e-6, -1e-6])}
    moved, other = (
        {"uploads": {"model": model}},
        {"uploads": {"model": {**model, "b": model["b"].flip(0)}}},
    )
    assert difference(moved, other, start, mixed=False) is None


def test_probed_clients_share_a_program() -> None:
    data, everyone = image_clients((4, 1, 9, 8), batch_size=4), torch.arange(4)
    assert together(data, everyone, torch.tensor([2, 3])).tolist() == [2, 3]
    assert together(data, everyone, torch.tensor([2, 1])).tolist() == [2, 2, 1, 1]
    assert together(data, everyone, torch.tensor([2])).tolist() == [2, 2]


# --- samples of a minibatch that know of each other ---


class Centred(nn.Module):
    """Takes the minibatch's mean from its samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class AsTheyAre(PersonalizedModule):
    """Has steps of its own, so that minibatches are neither filled up nor evaluated in others."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


def test_steps_of_ones_own_get_each_minibatch_as_it_is() -> None:
    """As docs/modules.md says for such layers; clients have two samples in the last one, or one."""
    found = []
    for engine in ("sequential", "vectorized"):
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Linear(2, 3), Centred(), nn.Tanh())
        module = AsTheyAre(backbone, nn.Linear(3, 1), loss="mse", lr=0.1)
        data = clients()
        found.append(fit(FedAvg(), data, module, 2, engine, val_data=data))
    assert_trees_close(found[1].server, found[0].server, rtol=1e-5, atol=1e-6)
    assert found[1].metrics["val_loss"] == pytest.approx(found[0].metrics["val_loss"], rel=1e-5)
