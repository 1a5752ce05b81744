"""Recorded steps of a LightningModule of the user's: the numbers of the steps themselves.

Each module reads something that a callback changes during the fit, between rounds or between
clients. A run that records must end with the bits of one that doesn't, and replay honest steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_pfl.core.tree import Tree
from lightning_pfl.engine import trace
from lightning_pfl.methods import Ditto, FedAvg, FedProx, FedRep
from lightning_pfl.methods.base import Method
from lightning_pfl.testing.fitting import Fit, fit
from lightning_pfl.testing.rounds import assert_trees_close, assert_trees_equal
from tests.engine.nets import image_clients
from tests.engine.users_steps import (
    HONEST,
    UNKNOWN,
    BecomesUnknown,
    ComparesNumber,
    HasOneOfTwo,
    Logs,
    Plain,
    ReadsAttribute,
    Regularised,
    Weighted,
    as_they_were,
    nothing,
    set_list_late,
    set_logs,
    set_other_head,
    set_scale,
    set_scale_or_list,
    with_unknown_layer,
)

ROUNDS = 3
SLOW = pytest.mark.slow
ENGINES = pytest.mark.parametrize("together", [True, False], ids=["at once", "one by one"])


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Record at the second call, so that short tests replay."""
    monkeypatch.setattr(trace, "WARM_UP", 1)
    yield
    torch.set_default_dtype(torch.float32)


class Changing(Callback):
    """Changes something before each round but the first, or after each client."""

    def __init__(self, change: Callable[[Any, int], Any], often: bool) -> None:
        self.change, self.often, self.done = change, often, 0

    def _change(self, trainer: L.Trainer) -> None:
        self.done += 1
        self.change(trainer.lightning_module, self.done)

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch and not self.often:
            self._change(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self.often:
            self._change(trainer)


def train(
    make: Callable[[], Any],
    together: bool,
    change: Callable[[Any, int], Any] = lambda *_: None,
    often: bool = False,
    limit: int = 99,
    sizes: tuple[int, ...] = (8, 8, 8, 8),
    method: Method | None = None,
    engine: str = "auto",
    rounds: int = ROUNDS,
    **options: Any,
) -> Fit:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "LIMIT", limit)
        patch.setattr("lightning_pfl.engine.probe.batching_pays", lambda *_: together)
        as_they_were(patch)
        return fit(
            FedAvg(local_epochs=2) if method is None else method,
            image_clients(sizes),
            make(),
            rounds,
            engine,
            callbacks=[Changing(change, often)],
            options={"chunk_size": 2},
            **options,
        )


def replays(run: Fit) -> int:
    selected: Any = run.federation.engine
    engine = selected._engines["training_step"]
    return int(engine.whole.used + engine.traces.used)


def assert_same(recorded: Fit, plain: Fit) -> None:
    assert replays(plain) == 0
    for found, expected in zip(recorded.recorder.servers, plain.recorder.servers, strict=True):
        assert_trees_equal(found, expected)
    assert_trees_equal(recorded.client_state, plain.client_state)
    assert recorded.metrics == plain.metrics
    for one, other in zip(recorded.recorder.rounds, plain.recorder.rounds, strict=True):
        assert one.metrics == other.metrics


def models(run: Fit) -> Tree:
    return {str(number): tree for number, tree in enumerate(run.recorder.servers)}


# Evaluations of all of them are in test_known_code_evaluations.py.
@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("make", "change"), HONEST, ids=lambda value: getattr(value, "__name__", "ReadsHparam")
)
@pytest.mark.parametrize(
    ("often", "sizes", "together", "rounds"),
    [
        pytest.param(False, (8, 8, 8, 8), True, 3, id="rounds, at once"),
        pytest.param(True, (8, 0, 10, 12), False, 2, id="clients, one by one"),
        pytest.param(True, (8, 0, 10, 12), True, 4, id="clients, at once", marks=SLOW),
        pytest.param(False, (8, 8, 8, 8), False, 3, id="rounds, one by one", marks=SLOW),
    ],
)
def test_honest_steps_are_replayed(
    make: Any, change: Any, often: bool, sizes: tuple[int, ...], together: bool, rounds: int
) -> None:
    recorded, plain = (
        train(make, together, change, often, limit, sizes, rounds=rounds) for limit in (99, 0)
    )
    assert_same(recorded, plain)
    assert replays(recorded) > 5


@pytest.mark.sweep(4)
@ENGINES
@pytest.mark.parametrize(
    ("method", "flags"),
    [
        (FedRep(head_epochs=2), {}),
        (Ditto(0.5, local_epochs=2), {"gradient_clip_val": 0.1}),
        (FedProx(0.5, local_epochs=2), {"accumulate_grad_batches": 2}),
        (FedAvg(local_epochs=4), {"accumulate_grad_batches": 2}),
        (FedAvg(local_epochs=2), {"precision": "bf16-mixed"}),
        (FedAvg(local_epochs=2), {"precision": "64-true"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else "-".join(value),
)
def test_methods_and_flags(method: Method, flags: dict[str, Any], together: bool) -> None:
    make = ReadsAttribute if flags.get("precision") != "bf16-mixed" else Single
    options = {"method": method, "sizes": (8, 8, 12, 8), "rounds": 2, **flags}
    recorded, plain = (
        train(make, together, set_scale, limit=limit, **options) for limit in (99, 0)
    )
    assert replays(recorded) > 5
    assert_same(recorded, plain)


class Single(ReadsAttribute):
    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("make", "change"),
    [
        (ReadsAttribute, set_scale),
        (Logs, set_logs),
        (Weighted, set_scale),
        (Regularised, set_scale),
        (ComparesNumber, nothing),
    ],
)
def test_both_engines_agree(make: Any, change: Any) -> None:
    options: dict[str, Any] = {"sizes": (8, 0, 10, 12)}
    reference = train(make, False, change, engine="reference", **options)
    assert replays(reference) == 0
    for together in (True, False):
        recorded = train(make, together, change, **options)
        assert replays(recorded) > 5
        assert_trees_close(models(recorded), models(reference))
        assert recorded.metrics == pytest.approx(reference.metrics, rel=1e-9)


@pytest.mark.sweep(10)
@pytest.mark.parametrize(
    ("make", "change"), UNKNOWN, ids=lambda value: getattr(value, "__name__", str(value))
)
@pytest.mark.parametrize(
    ("often", "together"),
    [
        pytest.param(False, False, id="rounds, one by one"),
        pytest.param(False, True, id="rounds, at once", marks=SLOW),
        pytest.param(True, False, id="clients, one by one", marks=SLOW),
        pytest.param(True, True, id="clients, at once", marks=SLOW),
    ],
)
def test_steps_that_may_read_more_are_taken(
    make: Any, change: Any, often: bool, together: bool
) -> None:
    recorded, plain = (train(make, together, change, often, limit, rounds=2) for limit in (99, 0))
    assert_same(recorded, plain)
    assert replays(recorded) == 0


@pytest.mark.sweep(3)
@ENGINES
@pytest.mark.parametrize("often", [False, True], ids=["rounds", "clients"])
@pytest.mark.parametrize(
    ("make", "change"), [(BecomesUnknown, set_scale_or_list), (HasOneOfTwo, set_other_head)]
)
def test_a_step_is_recorded_while_it_is_known(
    make: Any, change: Any, often: bool, together: bool
) -> None:
    options = {"change": change, "often": often, "rounds": 4}
    recorded, plain = (train(make, together, limit=limit, **options) for limit in (99, 0))
    assert replays(recorded) > 5
    assert_same(recorded, plain)


@ENGINES
def test_steps_of_unknown_layers_are_compared_again_after_a_hook(together: bool) -> None:
    options: dict[str, Any] = {"change": set_list_late, "often": True}
    recorded, plain = (
        train(with_unknown_layer, together, limit=limit, **options) for limit in (99, 0)
    )
    assert replays(recorded) > 5
    assert_same(recorded, plain)


def test_what_a_step_prints_is_printed_in_each(capsys: pytest.CaptureFixture[str]) -> None:
    class Prints(Plain):
        def scaled(self, loss: Tensor) -> Tensor:
            print("a step")
            return loss

    run = train(Prints, together=False)
    steps = ROUNDS * 4 * 4
    assert replays(run) == 0
    assert capsys.readouterr().out.count("a step") >= steps


@ENGINES
def test_a_resumed_run_ends_with_the_same_bits(together: bool, tmp_path: Any) -> None:
    def run(rounds: int, path: Any = None) -> Fit:
        def change(module: Any, _: int) -> None:
            set_logs(module, 1)

        return train(Logs, together, change, rounds=rounds, ckpt_path=path)

    whole = run(3)
    resumed = run(3, run(1).save(tmp_path / "last.ckpt"))
    assert_trees_equal(resumed.server, whole.server)
    assert_trees_equal(resumed.client_state, whole.client_state)
    assert resumed.metrics == whole.metrics
    assert math.isfinite(resumed.metrics["loss"])
