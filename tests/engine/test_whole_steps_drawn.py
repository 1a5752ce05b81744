"""Whole recorded steps that draw random numbers: those of each step's own key, in replays too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_pfl.core.randomness import derive
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine import trace
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.recording import Recorder
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.methods import SCAFFOLD, Ditto, FedAvg, FedMAP, FedRep, PFedMe
from lightning_pfl.methods.base import Method
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.fitting import Fit, fit
from lightning_pfl.testing.rounds import (
    LocalRound,
    assert_rounds_equal,
    assert_trees_close,
    assert_trees_equal,
    local_round,
)
from tests.engine.nets import CLASSES, cnn, image_clients

SIZES = (9, 0, 4, 13)
WIDTH, ROUNDS = 64, 4


pytestmark = pytest.mark.usefixtures("at_once")


def replays(engine: Any) -> int:
    assert isinstance(engine, SequentialEngine)
    return engine.whole.used


# --- which numbers are drawn ----------------------------------------------------------------------


def splitmix(x: Any) -> Any:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def kept(round: int, client: int, minibatch: int, call: int) -> Tensor:
    """Compute which of :data:`WIDTH` elements dropout at one half keeps: those whose first bit is
    set."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    key = np.uint64(derive(0, "random", "local", round, client))
    with np.errstate(over="ignore"):
        start = splitmix(splitmix(key + np.uint64(minibatch)) + np.uint64(call + 1) * golden)
        bits = splitmix(start + np.arange(1, WIDTH + 1, dtype=np.uint64) * golden)
    return torch.from_numpy(bits >> np.uint64(63) == 1)


class Moved(L.LightningModule):
    """Adds up the dropout masks of its steps, of several calls in each."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls
        self.w = nn.Parameter(torch.zeros(calls, WIDTH, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ones = torch.ones(WIDTH, dtype=torch.float64)
        masks = torch.stack([F.dropout(ones, 0.5) for _ in range(self.calls)])
        return -(self.w * masks).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("calls", [1, 19])
def test_every_step_has_the_masks_of_its_own_key(calls: int) -> None:
    """Of all rounds, clients, minibatches and calls within a step."""
    data = FederatedTensorDataset(
        (torch.zeros(30),), [range(10), range(10, 18), range(18, 30)], batch_size=4
    )
    run = fit(FedAvg(local_epochs=2), data, Moved(calls), 2, "sequential")
    engine: Any = run.federation.engine
    assert replays(engine._sequential) > 10
    for number, round in enumerate(run.recorder.rounds):
        assert round.uploads is not None
        assert round.received is not None
        moved = round.uploads["model"]["w"] - round.received["model"]["w"]
        for client, steps in enumerate((6, 4, 6)):
            masks = [
                torch.stack([kept(number, client, step, call) for call in range(calls)])
                for step in range(steps)
            ]
            assert len({tuple(mask.flatten().tolist()) for mask in masks}) == steps
            expected = 2 * torch.stack(masks).sum(0).double()
            # The server's mean has rounded.
            torch.testing.assert_close(moved[client], expected, rtol=0, atol=1e-12)


# --- modules, methods and flags -------------------------------------------------------------------


class Noisy(L.LightningModule):
    """Draws in many ways: by functions with a key, and by some that only torch's generator has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.attention = nn.MultiheadAttention(5, 1, dropout=0.3, batch_first=True)
        self.lstm = nn.LSTM(5, 6, 2, batch_first=True, dropout=0.4)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, CLASSES)
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        rows = x.flatten(1, 2) + 0.1 * torch.randn_like(x.flatten(1, 2))
        rows = rows + self.attention(rows, rows, rows, need_weights=False)[0]
        rows = F.alpha_dropout(rows, 0.2, training=True)
        x = self.norm(self.lstm(F.dropout1d(rows, 0.2))[0][:, -1])
        shift = torch.rand(len(x), 1, dtype=x.dtype)
        loss = F.cross_entropy(self.out(F.rrelu(x, training=True) + shift), y)
        self.log("shift", shift.mean())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Inner(PersonalizedModule):
    """An LSTM whose own dropout draws from torch's generator."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(Last(), nn.Linear(4, CLASSES), lr=0.1)
        self.double()


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, 2, batch_first=True, dropout=0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.flatten(1, 2))[0][:, -1]  # type: ignore[no-any-return]


MODULES: dict[str, Callable[[], Any]] = {
    "dropout": lambda: cnn(dropout=0.4),
    "in many ways": Noisy,
    "torch's generator": Inner,
}


def run(method: Method, module: Any, limit: int = 99, **options: Any) -> LocalRound:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "LIMIT", limit)
        return local_round(method, module, image_clients(SIZES), "sequential", **options)


def require_the_steps(method: Method, make: Callable[[], Any], **options: Any) -> None:
    """Require replays, with the bits of steps in Python, and the numbers of the reference.

    And they leave torch's generator as it is.
    """
    module = make()
    before = torch.get_rng_state()
    recorded = run(method, module, **options)
    assert torch.equal(torch.get_rng_state(), before)
    plain = run(method, make(), limit=0, **options)
    assert replays(recorded.engine) > 1
    assert replays(plain.engine) == 0
    assert_rounds_equal(recorded, plain)
    reference = local_round(method, make(), image_clients(SIZES), "reference", **options)
    assert_trees_close(recorded.models, reference.models)


@pytest.mark.parametrize("name", MODULES)
def test_replayed_steps_are_the_steps(name: str) -> None:
    require_the_steps(FedAvg(local_epochs=2), MODULES[name])


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "method",
    [
        FedRep(head_epochs=2),
        Ditto(0.5, local_epochs=2),
        SCAFFOLD("I", local_epochs=2),
        FedMAP(local_epochs=2),
        PFedMe(local_epochs=2),
    ],
    ids=lambda method: type(method).__name__,
)
def test_steps_of_methods(method: Method) -> None:
    require_the_steps(method, MODULES["dropout"])


def test_each_gradient_of_a_step_begins_with_the_same_numbers() -> None:
    require_the_steps(PFedMe(inner_steps=2, local_epochs=2), MODULES["torch's generator"])


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(EngineSettings(clip_value=0.1), id="clipped"),
        pytest.param(EngineSettings(accumulate=2), id="accumulated"),
        pytest.param(EngineSettings(autocast=torch.bfloat16), id="16-bit"),
    ],
)
def test_flags(settings: EngineSettings) -> None:
    def module() -> PersonalizedModule:
        return cnn(dropout=0.4, dtype=torch.float32)

    data = image_clients(SIZES, dtype=torch.float32)
    found = []
    for limit in (99, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trace, "LIMIT", limit)
            method = FedAvg(local_epochs=3)
            found.append(local_round(method, module(), data, "sequential", settings=settings))
    assert replays(found[0].engine) > 1
    assert_rounds_equal(*found)


# --- what may change ------------------------------------------------------------------------------


class Plain(L.LightningModule):
    """An ordinary module with dropout, which may have a layer of code that isn't known."""

    def __init__(self, p: float = 0.4, layer: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.drop = nn.Linear(25, 16), nn.Dropout(p)
        self.layer = nn.Identity() if layer is None else layer
        self.head = nn.Linear(16, CLASSES)
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.head(self.layer(self.drop(self.body(x.flatten(1)).relu()))), y)
        self.log("seen", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rates(Callback):
    """Sets the rate of dropout before each round, or after each client."""

    def __init__(self, rates: tuple[float, ...], often: bool) -> None:
        self.rates, self.often, self.done = rates, often, 0

    def _change(self, trainer: L.Trainer) -> None:
        module: Any = trainer.lightning_module
        module.drop.p = self.rates[self.done % len(self.rates)]
        self.done += 1

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if not self.often:
            self._change(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self.often:
            self._change(trainer)


def trained(
    engine: str, layer: nn.Module | None = None, rounds: int = ROUNDS, **options: Any
) -> Fit:
    data = image_clients((8, 8, 5, 8))
    method = FedAvg(local_epochs=2)
    return fit(method, data, Plain(layer=layer), rounds, engine, participation=3, **options)


def of_fit(run: Fit) -> SequentialEngine:
    selected: Any = run.federation.engine
    found: SequentialEngine = selected._sequential
    return found


@pytest.mark.sweep(3)
@pytest.mark.parametrize("often", [False, True], ids=["each round", "each client"])
@pytest.mark.parametrize("rates", [(0.4, 0.2), (0.0, 0.5), (0.0, 0.0, 0.0, 0.3)])
def test_a_rate_that_changes_is_followed(rates: tuple[float, ...], often: bool) -> None:
    """Also one that is 0 at first, so that steps draw nothing."""
    found, reference = (
        trained(engine, callbacks=[Rates(rates, often)]) for engine in ("sequential", "reference")
    )
    assert replays(of_fit(found)) > 10
    assert_trees_close(found.server, reference.server)
    assert_trees_close(found.models, reference.models)


def test_a_resumed_run_has_the_bits_of_the_whole(tmp_path: Path) -> None:
    whole, half = trained("sequential"), trained("sequential", rounds=2)
    assert replays(of_fit(half)) > 5
    again = trained("sequential", ckpt_path=half.save(tmp_path / "half.ckpt"))
    assert replays(of_fit(again)) > 5
    assert_trees_equal(again.server, whole.server)


class Outside(nn.Module):
    """Adds a number that NumPy draws."""

    def forward(self, x: Tensor) -> Tensor:
        return x + float(np.random.rand())


def test_steps_of_unknown_code_are_not_replayed_by_a_key_alone() -> None:
    found, reference = (trained(engine, Outside()) for engine in ("sequential", "reference"))
    assert replays(of_fit(found)) == 0
    assert_trees_close(found.server, reference.server)


class Unseeded(Recorder):
    """Doesn't note where a step seeds."""

    def seeds(self, key: Tensor) -> None:
        pass


def test_replays_that_draw_something_else_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_pfl.engine.whole_steps.Recorder", Unseeded)
    recorded, plain = (run(FedAvg(local_epochs=2), Inner(), limit) for limit in (99, 0))
    assert_rounds_equal(recorded, plain)
    assert isinstance(recorded.engine, SequentialEngine)
    assert recorded.engine.whole._refused
