"""Checkpoints: exact, complete, and clear about what doesn't fit."""

from __future__ import annotations

import os
import stat
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor, nn

from lightning_pfl import FederatedStrategy, PersonalizedModule
from lightning_pfl.core.errors import CheckpointMismatchError
from lightning_pfl.core.tree import leaves
from lightning_pfl.data import ClassesPerClient, Digits, FederatedDataModule
from lightning_pfl.methods import (
    FedAvg,
    FedPer,
    FedRep,
    LocalOnly,
)
from lightning_pfl.methods.base import Method
from lightning_pfl.models import MLP
from lightning_pfl.testing.fitting import QUIET
from lightning_pfl.trainer.checkpoint_io import AtomicCheckpointIO
from tests.trainer.setting import Quadratic, classes, network, points, trainer


class Scheduled(PersonalizedModule):
    """Two schedulers' worth of state: one that counts, one that looks at a value."""

    monitor = "val_loss"

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        step = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": plateau, "monitor": self.monitor}, step]


def scheduled() -> Scheduled:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
    return Scheduled(
        backbone, nn.Linear(8, 3), optimizer="adam", lr=0.05, momentum=0.0, num_classes=3
    )


def saver(path: Path, **kwargs: Any) -> ModelCheckpoint:
    return ModelCheckpoint(path, **{"save_last": True, **kwargs})


def server_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


METHODS: dict[str, Any] = {
    "fedavg": lambda: FedAvg(server_optimizer=server_adam),
    "fedrep": lambda: FedRep(head_epochs=2),
    "local": LocalOnly,
}
# Where a ModelCheckpoint can be told to save: after the round, after validation, after the server's
# step.
SAVES: dict[str, dict[str, Any]] = {
    "epoch_end": {},
    "validation_end": {"save_on_train_epoch_end": False},
    "step": {"every_n_train_steps": 1},
}


def everything(run: Any) -> dict[str, list[Tensor]]:
    strategy: Any = run.strategy
    return {
        "server": list(leaves(strategy.server)),
        "client_states": list(leaves(strategy.federation.client_states.tree)),
        "module": list(run.lightning_module.state_dict().values()),
        "lr": [torch.tensor(architecture["lr"]) for architecture in run.optimizers[0].param_groups],
        "history": [
            torch.tensor(value) for value in strategy.federation.history.summary().values()
        ],
    }


def assert_same(a: Any, b: Any) -> None:
    first, second = everything(a), everything(b)
    assert first["server"] or first["client_states"]
    for part, tensors in first.items():
        assert len(tensors) == len(second[part])
        for x, y in zip(tensors, second[part], strict=True):
            assert torch.equal(x, y), part


def fitted(method: Method, engine: str, rounds: int, *callbacks: Callback, **fit: Any) -> Any:
    run = trainer(
        method,
        participation=3,
        engine=engine,
        max_epochs=rounds,
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks),
        callbacks=list(callbacks),
    )
    run.fit(scheduled(), *classes(), **fit)
    return run


@cache
def uninterrupted(method: str, engine: str) -> Any:
    """A run of four rounds that others are compared with."""
    return fitted(METHODS[method](), engine, 4)


@pytest.mark.sweep(5)
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.quick
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(
    method: str, save: str, tmp_path: Path
) -> None:
    def run(rounds: int, **fit: Any) -> Any:
        callbacks = saver(tmp_path, **SAVES[save]), EarlyStopping("val_loss", patience=50)
        return fitted(METHODS[method](), "auto", rounds, *callbacks, **fit)

    run(2)
    resumed = run(4, ckpt_path="last")
    assert (resumed.current_epoch, resumed.global_step) == (4, 4)
    assert_same(uninterrupted(method, "auto"), resumed)


class StopAt(Exception):
    pass


class Bomb(Callback):
    """Ends the run at a hook of a round, as a kill would."""

    def __init__(self, hook: str, round: int) -> None:
        def explode(trainer: L.Trainer, *_: Any) -> None:
            if trainer.current_epoch == round and not trainer.sanity_checking:
                raise StopAt

        setattr(self, hook, explode)


@pytest.mark.sweep(6)
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(
    "hook",
    ["on_train_epoch_start", "on_validation_start", "on_validation_end", "on_train_epoch_end"],
)
def test_a_run_killed_inside_a_round_repeats_or_continues_it(
    hook: str, save: str, tmp_path: Path
) -> None:
    class Count(Callback):
        ends = 0

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.ends += 1

        def state_dict(self) -> dict[str, Any]:
            return {"ends": self.ends}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.ends = state_dict["ends"]

    def run(*callbacks: Callback, **fit: Any) -> Any:
        saves = saver(tmp_path, **SAVES[save])
        return fitted(METHODS["fedrep"](), "sequential", 4, *callbacks, saves, **fit)

    with pytest.raises(StopAt):
        run(Count(), Bomb(hook, 2))
    count = Count()
    resumed = run(count, ckpt_path="last")
    assert_same(uninterrupted("fedrep", "sequential"), resumed)
    assert count.ends == 4


def saved(
    tmp_path: Path,
    method: Method | None = None,
    module: L.LightningModule | None = None,
    **kwargs: Any,
) -> str:
    """A checkpoint after one round."""
    run = trainer(method or FedRep(head_epochs=2), max_epochs=1, **kwargs)
    run.fit(module or network(), *classes())
    path = str(tmp_path / "round.ckpt")
    run.save_checkpoint(path)
    return path


def test_a_checkpoint_holds_tensors_and_plain_values_only(tmp_path: Path) -> None:
    loaded = torch.load(saved(tmp_path), weights_only=True)
    assert loaded["federated"]["method"] == "FedRep"
    assert loaded["federated"]["client_states"]["model"]["head.weight"].shape == (5, 3, 8)
    assert loaded["federated"]["seed"] == 3


@pytest.mark.parametrize("function", ["validate", "test", "predict"])
def test_evaluation_from_a_checkpoint_uses_every_clients_model(
    function: str, tmp_path: Path
) -> None:
    fitted = trainer(FedRep(head_epochs=2), max_epochs=1)
    fitted.fit(network(), *classes())
    fitted.save_checkpoint(tmp_path / "a.ckpt")
    fresh = trainer(FedRep(head_epochs=2))
    result = getattr(fresh, function)(
        network(seed=9), classes()[1], ckpt_path=str(tmp_path / "a.ckpt")
    )
    assert result
    for client in range(5):
        theirs = fresh.strategy.client_state_dict(client)
        for name, value in fitted.strategy.client_state_dict(client).items():
            assert torch.equal(value, theirs[name])
    if function == "validate":
        assert result[0]["val_acc"] == pytest.approx(float(fitted.callback_metrics["val_acc"]))


def test_a_resumed_run_keeps_its_seed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    resumed = trainer(FedRep(head_epochs=2), seed=8, max_epochs=2)
    with pytest.warns(UserWarning, match="continues with the checkpoint's seed 3, not with seed=8"):
        resumed.fit(network(), *classes(), ckpt_path=path)
    whole = trainer(FedRep(head_epochs=2), seed=3, max_epochs=2)
    whole.fit(network(), *classes())
    assert_same(whole, resumed)


def wider() -> PersonalizedModule:
    return PersonalizedModule(
        nn.Sequential(nn.Linear(6, 9), nn.ReLU()), nn.Linear(9, 3), num_classes=3
    )


@pytest.mark.parametrize(
    ("method", "module", "clients", "match"),
    [
        (FedAvg(), network, 5, "Expected a checkpoint of FedAvg, but got one of FedRep"),
        (
            FedRep(head_epochs=2),
            wider,
            5,
            r"backbone.0.weight: shared \(8, 6\) in the checkpoint, shared \(9, 6\) in the module",
        ),
        (
            FedRep(personal="head.bias"),
            network,
            5,
            r"head.weight: personal \(3, 8\) in the checkpoint, shared \(3, 8\)",
        ),
        (
            FedRep(head_epochs=2),
            network,
            4,
            "Expected the 5 clients of the checkpoint .* but got a list of 4",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    method: Method, module: Any, clients: int, match: str, tmp_path: Path
) -> None:
    path = saved(tmp_path)
    with pytest.raises(CheckpointMismatchError, match=match):
        trainer(method, max_epochs=2).fit(module(), *classes(clients), ckpt_path=path)


def test_clients_in_another_order_are_the_same(tmp_path: Path) -> None:
    path = saved(tmp_path)
    other = trainer(FedRep(head_epochs=2), max_epochs=2)
    train, val = (data.subset([1, 0, 2, 3, 4]) for data in classes())
    other.fit(network(), train, val, ckpt_path=path)
    run = trainer(FedRep(head_epochs=2), max_epochs=2)
    run.fit(network(), *classes(), ckpt_path=path)
    assert_same(run, other)


class Remembers(FedPer):
    """Has the name of a method and another memory."""

    def init_client_state(self, model: Any) -> Any:
        return {**super().init_client_state(model), "extra": torch.zeros(2)}


def test_other_client_states_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, FedPer())
    Remembers.__name__ = "FedPer"
    with pytest.raises(CheckpointMismatchError, match=r"Expected client states with .*'extra'"):
        trainer(Remembers(), max_epochs=2).fit(network(), *classes(), ckpt_path=path)


class Plain(Quadratic):
    validation_step: Any = L.LightningModule.validation_step


def test_a_checkpoint_without_federation_is_refused(tmp_path: Path) -> None:
    plain = L.Trainer(max_epochs=1, **QUIET, limit_val_batches=0)
    plain.fit(
        Plain(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(2, 2)))
    )
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointMismatchError, match="got one without FederatedStrategy"):
        trainer().fit(Quadratic(), points(), points(), ckpt_path=str(tmp_path / "plain.ckpt"))


@pytest.mark.parametrize("kind", ["truncated", "empty", "text", "foreign", "code"])
def test_a_broken_file_is_named_and_left_alone(kind: str, tmp_path: Path) -> None:
    path = Path(saved(tmp_path))
    whole = path.read_bytes()
    if kind == "foreign":
        torch.save({"weight": torch.zeros(2)}, path)
    elif kind == "code":
        torch.save({"module": nn.Linear(1, 1)}, path)
    else:
        path.write_bytes(
            {"truncated": whole[: len(whole) // 2], "empty": b"", "text": b"not a checkpoint"}[kind]
        )
    before = path.read_bytes()
    error, match = {
        "foreign": (CheckpointMismatchError, "holds a dict. Load weights"),
        "code": (RuntimeError, "reading it would run code"),
    }.get(kind, (RuntimeError, "to be a checkpoint, but it is truncated or of another format"))
    with pytest.raises(error, match=match):
        trainer(FedRep(head_epochs=2), max_epochs=2).fit(network(), *classes(), ckpt_path=str(path))
    assert path.read_bytes() == before


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"round": 1}, path)
    with pytest.raises(Exception, match="pickle"):
        AtomicCheckpointIO().save_checkpoint({"round": 2, "bad": lambda: None}, path)
    assert torch.load(path, weights_only=True) == {"round": 1}
    # What is left behind isn't taken for a checkpoint, and the next write replaces it.
    assert not [name for name in tmp_path.iterdir() if name.suffix == ".ckpt" and name != path]
    AtomicCheckpointIO().save_checkpoint({"round": 3}, path)
    assert [name.name for name in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.skipif(os.name != "posix", reason="only there can a folder be synchronised")
def test_the_data_reach_the_disk_before_the_name_and_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, rename, path = os.fsync, Path.replace, tmp_path / "last.ckpt"
    events: list[str | int] = []

    def fsync(handle: int) -> None:
        state = os.fstat(handle)
        events.append("folder" if stat.S_ISDIR(state.st_mode) else state.st_size)
        sync(handle)

    def replace(old: Path, new: Path) -> Path:
        events.append("name")
        return rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    AtomicCheckpointIO().save_checkpoint({"round": 1}, path)
    assert events == [path.stat().st_size, "name", "folder"]


def test_a_users_checkpoint_plugin_is_used(tmp_path: Path) -> None:
    class Own(AtomicCheckpointIO):
        written = 0

        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            self.written += 1
            super().save_checkpoint(*args, **kwargs)

    plugin = Own()
    run = trainer(
        strategy=FederatedStrategy(FedRep(head_epochs=2), seed=1), plugins=[plugin], max_epochs=1
    )
    run.fit(network(), *classes())
    run.save_checkpoint(tmp_path / "a.ckpt")
    assert plugin.written == 1


def test_a_checkpoint_of_another_partition_is_said(tmp_path: Path) -> None:
    def module_of(seed: int) -> FederatedDataModule:
        return FederatedDataModule(
            Digits(), ClassesPerClient(2), num_clients=5, val_fraction=0.2, seed=seed
        )

    def mlp() -> MLP:
        return MLP([64, 10])

    run = trainer(FedRep(head_epochs=2), max_epochs=1)
    run.fit(mlp(), module_of(0))
    path = str(tmp_path / "a.ckpt")
    run.save_checkpoint(path)
    trainer(FedRep(head_epochs=2)).test(
        mlp(), module_of(0), ckpt_path=path
    )  # warnings are errors here
    match = "trained on other samples than those of this data module"
    with pytest.warns(UserWarning, match=match):
        trainer(FedRep(head_epochs=2)).test(mlp(), module_of(1), ckpt_path=path)
    with pytest.warns(UserWarning, match=match):
        run.test(run.lightning_module, module_of(1))
    run.save_checkpoint(path)  # after that test, its clients are still those of the fit
    trainer(FedRep(head_epochs=2)).test(mlp(), module_of(0), ckpt_path=path)
