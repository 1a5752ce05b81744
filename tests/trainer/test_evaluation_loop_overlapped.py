"""Values of a validation that are read once the next round's training is launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger

from lightning_pfl.callbacks import BestRound, HeadFineTuning
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.contract.records import ClientResults, Round
from lightning_pfl.federation.cohort import Cohort
from lightning_pfl.methods import Ditto, FedAvg, FedRep
from lightning_pfl.methods.base import Method
from lightning_pfl.testing.conformance import small_clients, small_module
from lightning_pfl.testing.fitting import Fit, fit
from lightning_pfl.trainer.evaluation_loop import FederatedEvaluationLoop
from tests.engine.pretended_device import PretendedDevice, pretended_accelerator
from tests.trainer.setting import Quadratic, points

ROUNDS = 3


class Heard(Logger):
    """Keeps what it's sent: the rows, and by step the values."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "heard"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.sent.append((step, dict(metrics)))

    def values(self) -> dict[tuple[int | None, str], float]:
        """Each value by its step and name, but for seconds."""
        return {
            (step, name): value
            for step, row in self.sent
            for name, value in row.items()
            if name != "round/seconds"
        }


class Order(FederatedCallback):
    """Notes in which order rounds are trained and evaluations are known."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_local_training_end(
        self, trainer: L.Trainer, module: L.LightningModule, round: Round
    ) -> None:
        self.seen.append(f"trained {round.number}")

    def on_clients_evaluated(
        self, trainer: L.Trainer, module: L.LightningModule, results: ClientResults
    ) -> None:
        self.seen.append(f"known {results.round}")


def run(overlap: bool, method: Method, callbacks: list[Callback], **flags: Any) -> Fit:
    """Some rounds of four ragged clients on the pretended device, three of them in each."""
    data = small_clients()
    options = {"overlap_evaluation": overlap}
    given = {"rounds": ROUNDS, "participation": 3, "options": options, **flags}
    return fit(
        method, data, small_module(), val_data=data, callbacks=callbacks,
        accelerator=pretended_accelerator(), inference_mode=False, **given,
    )  # fmt: skip


@contextmanager
def waits_after_validations(device: PretendedDevice) -> Iterator[list[int]]:
    """Count how often the host waits from each validation's begin to the next training's end."""
    begun: list[int] = []
    waited: list[int] = []
    validate, train = FederatedEvaluationLoop.run, Cohort.train

    def begin(self: Any) -> Any:
        begun.append(device.waits.total())
        return validate(self)

    def end(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = train(self, *args, **kwargs)
        if begun:
            waited.append(device.waits.total() - begun[-1])
        return found

    with patch.object(FederatedEvaluationLoop, "run", begin), patch.object(Cohort, "train", end):
        yield waited


@pytest.mark.parametrize("method", [FedAvg, pytest.param(FedRep, marks=pytest.mark.slow)])
def test_the_host_waits_for_nothing_between_a_validation_and_the_next_rounds_training(
    method: type[Method],
) -> None:
    def waited(overlap: bool) -> list[int]:
        with PretendedDevice() as device, waits_after_validations(device) as found:
            # Of the same clients, as a recording is compared with its step in its first use.
            run(overlap, method(), [], rounds=6, participation=4)
        return found[3:]  # replayed from the third one on

    assert waited(True) == [0, 0]
    assert all(count > 0 for count in waited(False))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("callbacks", [lambda: [], lambda: [HeadFineTuning(), BestRound()]])
@pytest.mark.parametrize(
    "method",
    [FedRep, *(pytest.param(method, marks=pytest.mark.slow) for method in (FedAvg, Ditto))],
)
def test_the_values_are_those_of_a_run_that_waits(
    method: type[Method], callbacks: Any, tmp_path: Path
) -> None:
    def found(overlap: bool) -> tuple[Heard, Fit]:
        heard = Heard()
        folder = tmp_path / str(overlap)
        with PretendedDevice():
            made = run(overlap, method(), callbacks(), logger=heard, default_root_dir=folder)
        return heard, made

    (late, overlapped), (heard, waited) = found(True), found(False)
    assert late.values() == heard.values()
    assert {step for step, name in late.values() if name == "val_acc"} == set(range(ROUNDS))
    # A round's own values come first, as those of its validation are read later.
    first = [next(row for step, row in one.sent if step == 1) for one in (late, heard)]
    assert ["val_acc" in row for row in first] == [False, True]
    assert overlapped.metrics == waited.metrics
    assert overlapped.strategy.client_metrics() == waited.strategy.client_metrics()
    history = overlapped.strategy.federation.history.state_dict()
    assert history == waited.strategy.federation.history.state_dict()
    for client in range(4):
        mine, other = (one.strategy.client_state_dict(client) for one in (overlapped, waited))
        for name, leaf in mine.items():
            assert torch.equal(leaf, other[name]), name


@pytest.mark.gpu
def test_on_a_gpu_the_values_are_those_of_a_run_that_waits() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")

    def found(overlap: bool) -> dict[tuple[int | None, str], float]:
        heard, data = Heard(), small_clients()
        fit(
            FedRep(), data, small_module(), rounds=6, val_data=data, logger=heard,
            accelerator="gpu", devices=1, options={"overlap_evaluation": overlap},
        )  # fmt: skip
        return heard.values()

    assert found(True) == pytest.approx(found(False), rel=1e-9, nan_ok=True)


def test_values_are_known_after_the_next_rounds_training_and_at_the_end() -> None:
    order = Order()
    with PretendedDevice():
        run(True, FedAvg(), [order], rounds=3)
    assert order.seen == [
        "trained 0", "known 0", "trained 1", "known 1", "trained 2", "known 2"
    ]  # fmt: skip


def test_a_checkpoint_reads_the_values_first(tmp_path: Path) -> None:
    def saved(overlap: bool) -> list[dict[str, Any]]:
        folder = tmp_path / str(overlap)
        every = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        with PretendedDevice():
            run(overlap, FedAvg(), [every], enable_checkpointing=True)
        files = sorted(folder.glob("*.ckpt"))
        assert len(files) == ROUNDS
        return [torch.load(file, weights_only=False) for file in files]

    for late, other in zip(saved(True), saved(False), strict=True):
        assert late["federated"]["history"] == other["federated"]["history"]
        assert late["loops"]["fit_loop"]["state_dict"] == other["loops"]["fit_loop"]["state_dict"]


def test_a_resumed_run_ends_as_one_without_a_stop(tmp_path: Path) -> None:
    def ended(**flags: Any) -> Fit:
        with PretendedDevice():
            return run(True, FedRep(), [], **flags)

    ended(rounds=2).save(tmp_path / "half.ckpt")
    resumed, whole = ended(ckpt_path=tmp_path / "half.ckpt"), ended()
    assert resumed.metrics == whole.metrics
    history = resumed.strategy.federation.history.state_dict()
    assert history == whole.strategy.federation.history.state_dict()


def test_values_are_known_where_the_next_rounds_training_fails() -> None:
    order = Order()

    class Fails(FederatedCallback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == 1:
                raise RuntimeError("no power")

    with PretendedDevice(), pytest.raises(RuntimeError, match="no power"):
        run(True, FedAvg(), [order, Fails()])
    assert order.seen == ["trained 0", "known 0"]


def test_values_of_a_fit_that_failed_are_not_those_of_the_next() -> None:
    class Fails(FederatedCallback):
        def on_round_start(self, trainer: Any, module: Any, round: Round) -> None:
            if round.number == 1:
                raise RuntimeError("no power")

    loops: list[Any] = []
    validate = FederatedEvaluationLoop.run

    def kept(self: Any) -> Any:
        loops.append(self)
        return validate(self)

    with PretendedDevice():
        with (
            patch.object(FederatedEvaluationLoop, "run", kept),
            pytest.raises(RuntimeError, match="no power"),
        ):
            run(True, FedAvg(), [Fails()])
        (loop,) = loops
        loop.report()
    assert loop.federation.client_results == {}


def test_a_cpu_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"Expected a GPU with .* runs on 'cpu'"):
        fit(FedAvg(), points(), Quadratic(), options={"overlap_evaluation": True})


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (lambda: EarlyStopping("val_loss"), r"EarlyStopping\(monitor='val_loss'\)"),
        (lambda: ModelCheckpoint(monitor="val_acc"), r"ModelCheckpoint\(monitor='val_acc'\)"),
    ],
)
def test_a_callback_that_decides_by_the_values_is_refused(callback: Any, said: str) -> None:
    flags = {"enable_checkpointing": True}
    with PretendedDevice(), pytest.raises(MisconfigurationException, match=f"but got {said}. Leav"):
        run(True, FedAvg(), [callback()], **flags)


def test_a_scheduler_that_decides_by_the_values_is_refused() -> None:
    class Plateau(Quadratic):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
            }

    said = r"but got ReduceLROnPlateau \(monitor 'val_loss'\). Leave out"
    with PretendedDevice(), pytest.raises(MisconfigurationException, match=said):
        fit(
            FedAvg(), points(), Plateau(), val_data=points(), inference_mode=False,
            accelerator=pretended_accelerator(), options={"overlap_evaluation": True},
        )  # fmt: skip
