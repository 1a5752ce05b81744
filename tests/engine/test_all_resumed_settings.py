"""A run that goes on from any round's checkpoint ends with the bits of the whole run.

Though something that steps read is another in each round, and clients have unequal sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine import large_operators, operators
from lightning_pfl.engine.operators import has_onednn
from lightning_pfl.engine.probe import Estimate, Probe
from lightning_pfl.methods import SCAFFOLD, FedAvg, FedRep
from lightning_pfl.methods.base import Method
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.fitting import Fit, fit
from lightning_pfl.testing.rounds import assert_trees_close, assert_trees_equal

CLASSES = 3
WORLD = {"noise": 0.0}


def clients(dtype: torch.dtype, sizes: tuple[int, ...] = (8, 5, 13, 3)) -> FederatedTensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(sizes), 25, generator=generator).to(dtype)
    y = torch.randint(CLASSES, (sum(sizes),), generator=generator)
    indices = torch.randperm(len(x), generator=generator).split(list(sizes))
    return FederatedTensorDataset((x, y), indices, batch_size=8, shuffle=True)


# --- layers, and how they change from round to round ----------------------------------------------


class Held(nn.Module):
    """Adds noise by an attribute, scales by another and centres by a third."""

    def __init__(self) -> None:
        super().__init__()
        self.noise, self.gain, self.centred = 0.0, 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.noise * torch.randn_like(x) if self.noise else x
        return (x - x.mean(0) if self.centred else x) * self.gain


class OfWorld(nn.Module):
    """Adds noise by a global dict, which isn't known to stay the same."""

    def forward(self, x: Tensor) -> Tensor:
        return x + WORLD["noise"] * torch.randn_like(x) if WORLD["noise"] else x


class Drawing(nn.Module):
    """Draws from a generator of its own, if it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.generator is None:
            return x
        return x + 0.1 * torch.randn(x.shape, generator=self.generator, dtype=x.dtype)


def seed(*rounds: int) -> Callable[[Any, int], None]:
    """Give the layer a generator in some rounds alone."""

    def change(module: Any, round: int) -> None:
        made = torch.Generator().manual_seed(round) if round in rounds else None
        layer_of(module).generator = made

    return change


def doubled(layer: nn.Module, x: Tensor) -> Tensor:
    return 2 * x


class OfClass(nn.Module):
    """Its function is another one in some rounds."""

    forward = doubled


def hold(name: str, *values: Any) -> Callable[[Any, int], None]:
    """Set an attribute of the layer to the round's value."""
    return lambda module, round: setattr(layer_of(module), name, values[round])


def layer_of(module: Any) -> Any:
    return module.get_submodule("backbone.1")


def replace_by(gain: float, *rounds: int) -> Callable[[Any, int], None]:
    """Replace the layer's function in some rounds by one whose code isn't known."""

    def change(module: Any, round: int) -> None:
        kind: Any = OfClass
        kind.forward = (lambda _, x: x * gain) if round in rounds else doubled

    return change


def of_world(module: Any, round: int) -> None:
    WORLD["noise"] = (0.0, 0.3, 0.0, 0.3)[round]


def rest(module: Any, round: int) -> None:
    layer_of(module).train(round % 2 == 0)


def hook(kind: str, *rounds: int) -> Callable[[Any, int], None]:
    """Register a hook in some rounds alone."""
    handles: list[Any] = []

    def change(module: Any, round: int) -> None:
        while handles:
            handles.pop().remove()
        if round not in rounds:
            return
        layer, optimizer = layer_of(module), module.trainer.optimizers[0]
        if kind == "scales":
            handles.append(layer.register_forward_hook(lambda *given: given[-1] * 1.5))
        elif kind == "reads":
            handles.append(layer.register_forward_hook(lambda *given: given[-1] * sign(given[-1])))
        elif kind == "gradient":
            handles.append(layer.register_full_backward_pre_hook(lambda _, given: (given[0] / 2,)))
        else:
            handles.append(optimizer.register_step_pre_hook(lambda *_: None))

    return change


def sign(x: Tensor) -> float:
    """A number in a tensor, which a program of many clients hasn't."""
    return 1.0 if float(x.detach().sum()) > 0 else -1.0


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, int], None]]] = {
    "an attribute that nothing reads": (nn.Tanh, hold("k", 1.0, 1.1, 1.2, 1.3)),
    "a gain": (Held, hold("gain", 1.0, 1.1, 0.9, 1.2)),
    "noise that begins": (Held, hold("noise", 0.0, 0.3, 0.0, 0.3)),
    "noise that ends": (Held, hold("noise", 0.3, 0.0, 0.0, 0.0)),
    "noise of the world": (OfWorld, of_world),
    "dropout that begins": (nn.Dropout, hold("p", 0.0, 0.3, 0.0, 0.0)),
    "dropout that ends": (nn.Dropout, hold("p", 0.3, 0.0, 0.0, 0.3)),
    "centring that begins": (Held, hold("centred", 0, 1, 0, 1)),
    "centring that ends": (Held, hold("centred", 1, 0, 0, 1)),
    "BatchNorm that rests": (lambda: nn.BatchNorm1d(6), rest),
    "an unknown function that begins": (OfClass, replace_by(1.5, 2, 3)),
    "an unknown function that ends": (OfClass, replace_by(1.5, 0, 1)),
    "a generator that begins": (Drawing, seed(1, 3)),
    "a generator that ends": (Drawing, seed(0)),
    "a hook that begins": (nn.Tanh, hook("scales", 2, 3)),
    "a hook that ends": (nn.Tanh, hook("scales", 0, 1)),
    "a hook for one client that begins": (nn.Tanh, hook("reads", 1, 2)),
    "a hook for one client that ends": (nn.Tanh, hook("reads", 0)),
    "a gradient's hook that begins": (nn.Tanh, hook("gradient", 1, 2)),
    "a gradient's hook that ends": (nn.Tanh, hook("gradient", 0)),
    "an optimizer's hook that begins": (nn.Tanh, hook("optimizer", 1, 2)),
    "an optimizer's hook that ends": (nn.Tanh, hook("optimizer", 0, 3)),
}


class Change(Callback):
    """Changes a layer before each round, and writes a checkpoint after it."""

    def __init__(self, change: Callable[[Any, int], None], folder: Path | None) -> None:
        self.change, self.folder = change, folder

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Change it as a function of the round alone."""
        self.change(pl_module, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the checkpoint."""
        if self.folder is not None:
            trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


class Own(L.LightningModule):
    """A module of a user's own."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        x, y = batch
        loss = F.cross_entropy(self.head(self.backbone(x)), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.head(self.backbone(x)), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def run(
    name: str,
    folder: Path | None = None,
    engine: str = "auto",
    ckpt_path: Path | None = None,
    method: Callable[[], Method] = lambda: FedAvg(local_epochs=2),
    kind: Any = PersonalizedModule,
    dtype: torch.dtype = torch.float64,
    rounds: int = 3,
) -> Fit:
    """Train with a change, and keep a checkpoint of each round in a folder."""
    layer, change = CHANGES[name]
    WORLD["noise"] = 0.0
    torch.manual_seed(1)
    body = nn.Sequential(nn.Linear(25, 6), layer(), nn.Tanh(), nn.Linear(6, 6))
    options = {} if kind is Own else {"lr": 0.1, "momentum": 0.9}
    module = kind(body, nn.Linear(6, CLASSES), **options).to(dtype)
    return fit(
        method(), clients(dtype), module, rounds, engine,
        val_data=clients(dtype), callbacks=[Change(change, folder)], ckpt_path=ckpt_path,
        options={"chunk_size": 3},
    )  # fmt: skip


def require_resumed(
    name: str,
    together: bool,
    tmp_path: Path,
    patch: pytest.MonkeyPatch,
    rounds: int = 3,
    **problem: Any,
) -> None:
    """Require a run resumed after each round to have the whole run's bits.

    Products in single precision are oneDNN's, as large ones are on a processor that suits it.
    """
    patch.setattr(large_operators, "LARGE", 100)
    patch.setattr(operators, "prefers_onednn", has_onednn)
    for kind in ("training", "evaluation"):
        patch.setattr(Probe, f"{kind}_estimate", lambda *_: Estimate(1e9, together))
    problem["rounds"] = rounds
    whole = run(name, tmp_path, **problem)
    if problem.get("dtype", torch.float64) == torch.float64:
        reference = run(name, engine="reference", **problem)
        assert_trees_close(whole.server, reference.server, rtol=1e-9)
        assert_trees_close(whole.client_state, reference.client_state, rtol=1e-9)
    for round in range(rounds - 1):
        resumed = run(name, ckpt_path=tmp_path / f"{round}.ckpt", **problem)
        assert len(resumed.recorder.rounds) == rounds - 1 - round
        message = f"resumed after round {round}"
        assert_trees_equal(resumed.server, whole.server, message)
        assert_trees_equal(resumed.client_state, whole.client_state, message)
        assert resumed.metrics == whole.metrics, message


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "name",
    [
        "an attribute that nothing reads",
        "noise of the world",
        "dropout that begins",
        "centring that begins",
        "BatchNorm that rests",
        "a hook for one client that ends",
        "a gradient's hook that begins",
        "an optimizer's hook that ends",
    ],
)
def test_a_resumed_run_has_the_whole_runs_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_resumed(name, True, tmp_path, monkeypatch)


def test_a_generator_of_the_modules_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client draws by its key, also where no step drew before."""
    require_resumed("a generator that begins", False, tmp_path, monkeypatch)


@pytest.mark.parametrize("together", [True, False])
def test_kernels_of_recorded_steps_where_code_is_no_longer_known(
    together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_resumed(
        "an unknown function that begins", together, tmp_path, monkeypatch,
        kind=Own, dtype=torch.float32,
    )  # fmt: skip


@pytest.mark.parametrize("together", [True, False])
def test_features_of_a_backbone_that_begins_to_draw_are_not_kept(
    together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_resumed(
        "noise that begins", together, tmp_path, monkeypatch, method=lambda: FedRep(head_epochs=2)
    )


@pytest.mark.parametrize("name", ["noise that begins", "noise of the world"])
def test_an_evaluation_that_draws_in_some_rounds_falls_back_in_these_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a resumed run begins with such a round."""
    problem: dict[str, Any] = {"method": FedAvg, "kind": Own, "dtype": torch.float32}
    require_resumed(name, True, tmp_path, monkeypatch, **problem)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "together"), [(PersonalizedModule, True), (PersonalizedModule, False), (Own, True)]
)
@pytest.mark.parametrize(
    ("method", "dtype"),
    [(FedAvg, torch.float32), (SCAFFOLD, torch.float64), (FedRep, torch.float64)],
)
@pytest.mark.parametrize("name", CHANGES)
def test_all_kinds(
    name: str,
    method: Any,
    dtype: torch.dtype,
    kind: Any,
    together: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem: dict[str, Any] = {"method": method, "kind": kind, "dtype": dtype}
    require_resumed(name, together, tmp_path, monkeypatch, rounds=4, **problem)
