"""Every hook of LightningModule, LightningDataModule and Callback of the installed Lightning.

Each is called as in a plain run on the data of one client, argument by argument and in the same
order, or is listed below with what it does instead. A hook that a later Lightning adds is in no
list, and fails ``test_every_hook_is_known``.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.core import hooks
from torch import Tensor
from torch.optim import Optimizer

from lightning_pfl import FederatedStrategy
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing.fitting import quiet
from lightning_pfl.trainer.progress import ClientBatch
from tests.trainer.plain import QUIET, Regression, loader

# --- the lists ---

AROUND_STEPS = frozenset(
    [
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
    ]
)
EPOCHS = frozenset(
    [
        "on_fit_start",
        "on_fit_end",
        "on_train_start",
        "on_train_end",
        "on_train_epoch_start",
        "on_train_epoch_end",
        "on_validation_start",
        "on_validation_end",
        "on_validation_epoch_start",
        "on_validation_epoch_end",
        "on_test_start",
        "on_test_end",
        "on_test_epoch_start",
        "on_test_epoch_end",
        "on_predict_start",
        "on_predict_end",
        "on_predict_epoch_start",
        "on_predict_epoch_end",
        "setup",
        "teardown",
    ]
)
TRANSFERS = frozenset(
    ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
)
LOADERS = frozenset(["train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"])
ELSEWHERE = LOADERS | {"lr_scheduler_step"}
DATA = LOADERS | {"prepare_data"}
CHECKPOINTS = frozenset(["on_save_checkpoint", "on_load_checkpoint"])
PER_CLIENT = frozenset(
    f"on_{stage}_batch_{end}"
    for stage in ("validation", "test", "predict")
    for end in ("start", "end")
)
"""Called once per client, with its id as ``batch``: docs/modules.md."""

SAME_OF_MODULE = (
    AROUND_STEPS
    | EPOCHS
    | TRANSFERS
    | DATA
    | frozenset(
        [
            "configure_model",
            "configure_optimizers",
            "configure_callbacks",
            "training_step",
            "validation_step",
            "test_step",
            "predict_step",
            "backward",
            "optimizer_step",
            "optimizer_zero_grad",
            "configure_gradient_clipping",
            "lr_scheduler_step",
            "on_validation_model_eval",
            "on_validation_model_train",
            "on_validation_model_zero_grad",
            "on_test_model_eval",
            "on_test_model_train",
            "on_predict_model_eval",
        ]
    )
)
NO_HOOKS_OF_MODULE = frozenset(
    [
        "all_gather",
        "clip_gradients",
        "forward",
        "freeze",
        "unfreeze",
        "load_from_checkpoint",
        "log",
        "log_dict",
        "lr_schedulers",
        "manual_backward",
        "optimizers",
        "print",
        "to_onnx",
        "to_torchscript",
        "to_tensorrt",
        "toggle_optimizer",
        "untoggle_optimizer",
        "toggled_optimizer",
    ]
)
REFUSED_OF_MODULE = frozenset(["configure_sharded_model"])
"""Refused by Lightning itself, with every strategy."""

SAME_OF_CALLBACK = (AROUND_STEPS | EPOCHS) - {"on_train_batch_start", "on_train_batch_end"}
PER_CLIENT_OF_CALLBACK = PER_CLIENT | {"on_train_batch_start", "on_train_batch_end"}
SANITY = frozenset(["on_sanity_check_start", "on_sanity_check_end"])
STATE = frozenset(["state_dict", "load_state_dict"])
EXCEPTION = frozenset(["on_exception"])

SAME_OF_DATA = frozenset(["setup", "teardown"]) | DATA | TRANSFERS
NO_HOOKS_OF_DATA = frozenset(["from_datasets", "load_from_checkpoint"])


def public(classes: Iterable[type]) -> set[str]:
    """Names of the functions that the classes define."""
    kinds = (staticmethod, classmethod)
    return {
        name
        for one in classes
        for name, value in vars(one).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds))
    }


def bases(kind: type) -> list[type]:
    """Classes of Lightning that hold hooks of a class: itself, and those of ``hooks``."""
    return [kind, *(one for one in kind.__mro__ if one.__module__ == hooks.__name__)]


def test_every_hook_is_known() -> None:
    module, data = bases(L.LightningModule), bases(L.LightningDataModule)
    assert {hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks} < set(module)
    assert hooks.DataHooks in data
    known = SAME_OF_MODULE | PER_CLIENT | CHECKPOINTS | REFUSED_OF_MODULE | NO_HOOKS_OF_MODULE
    assert public(module) == known | {"on_predict_model_train"} & public(module)
    known = SAME_OF_CALLBACK | PER_CLIENT_OF_CALLBACK | SANITY | STATE | EXCEPTION | CHECKPOINTS
    assert public([L.Callback]) == known
    known = SAME_OF_DATA | STATE | EXCEPTION | NO_HOOKS_OF_DATA
    assert public(data) == known


@pytest.mark.parametrize(
    "owner", [L.LightningModule, hooks.ModelHooks, L.LightningDataModule, L.Callback]
)
def test_a_hook_of_a_later_lightning_is_noticed(
    owner: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "on_before_lunch", lambda self: None, raising=False)
    with pytest.raises(AssertionError, match="on_before_lunch"):
        test_every_hook_is_known()


# --- recording ---


def said(value: Any) -> Any:
    """What an argument is, so that those of two runs can be compared."""
    if isinstance(value, Tensor):
        return [round(float(number), 8) for number in value.detach().flatten()]
    if isinstance(value, Optimizer):
        return [{k: v for k, v in group.items() if k != "params"} for group in value.param_groups]
    if isinstance(value, dict):
        return {key: said(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [said(one) for one in value]
    if value is None or isinstance(value, (int, float, str, torch.device)):
        return value
    if isinstance(value, (L.Trainer, torch.optim.lr_scheduler.LRScheduler)):
        return type(value).__name__
    return "a function" if callable(value) else type(value).__name__


def recording(kind: type, names: Collection[str], calls: list[Any]) -> Any:
    """Make a subclass that records the calls of these hooks, with what they get."""

    def recorded(name: str) -> Any:
        original = getattr(kind, name)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((name, [said(one) for one in args], said(kwargs)))
            return original(self, *args, **kwargs)

        return hook

    return type(kind.__name__, (kind,), {name: recorded(name) for name in names})


class Loaders:
    """One client's loaders, or a dict of them by client."""

    federated = False

    def train_dataloader(self) -> Any:
        return {"ada": loader()} if self.federated else loader()

    def val_dataloader(self) -> Any:
        return Loaders.train_dataloader(self)

    def test_dataloader(self) -> Any:
        return Loaders.train_dataloader(self)

    def predict_dataloader(self) -> Any:
        return Loaders.train_dataloader(self)


class Data(Loaders, L.LightningDataModule):
    """A data module of them."""


class Whole(Loaders, Regression):
    """Has all steps, its data, and a schedule of epochs."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", (self(batch[0]) - batch[1]).square().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def everything(
    federated: bool,
    module: Any = None,
    data: Any = None,
    callbacks: Any = None,
    engine: Any = "sequential",
    **flags: Any,
) -> L.Trainer:
    """Fit for two epochs with validation, test and predict."""
    flags = {**QUIET, **flags}
    if federated:
        flags["strategy"] = FederatedStrategy(FedAvg(), seed=0, engine=engine)
    module = module or Whole()
    with quiet():
        trainer = L.Trainer(max_epochs=2, callbacks=callbacks, **flags)
        trainer.fit(module, data)
        trainer.test(module, data, verbose=False)
        trainer.predict(module, data)
    return trainer


def compare(ours: list[Any], plain: list[Any], names: Collection[str]) -> None:
    """Require equal calls, one after another, and each hook at least once.

    Clients are known before their optimizers, so data are loaded before; schedules of epochs step
    after the server's update. These are called as often, at another place.
    """
    for name in names:
        mine, theirs = ([one for one in calls if one[0] == name] for calls in (ours, plain))
        assert mine == theirs, name
    ours, plain = ([one for one in calls if one[0] not in ELSEWHERE] for calls in (ours, plain))
    for number, (found, wanted) in enumerate(zip(ours, plain, strict=False)):
        assert found == wanted, f"call {number} after {[name for name, *_ in plain[:number]]}"
    assert {name for name, *_ in plain} == set(names) - ELSEWHERE


# --- the walks ---


def test_hooks_of_a_module() -> None:
    plain, ours = list[Any](), list[Any]()
    for calls, federated in ((plain, False), (ours, True)):
        module = recording(Whole, SAME_OF_MODULE, calls)()
        module.federated = federated
        everything(federated, module)
    compare(ours, plain, SAME_OF_MODULE)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_hooks_of_a_data_module(engine: str) -> None:
    # Those on a batch see many clients at once: tests/trainer/test_client_loop.py.
    names = SAME_OF_DATA - (TRANSFERS if engine == "vectorized" else frozenset())
    plain, ours = list[Any](), list[Any]()
    for calls, federated in ((plain, False), (ours, True)):
        data = recording(Data, names, calls)()
        data.federated = federated
        everything(federated, data=data, engine=engine)
    compare(ours, plain, names)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_hooks_of_a_callback(engine: str) -> None:
    names = SAME_OF_CALLBACK - (AROUND_STEPS if engine == "vectorized" else frozenset())
    plain, ours = list[Any](), list[Any]()
    for calls, federated in ((plain, False), (ours, True)):
        module, callback = Whole(), recording(L.Callback, names, calls)()
        module.federated = federated
        everything(federated, module, callbacks=[callback], engine=engine)
    compare(ours, plain, names)


@pytest.mark.parametrize("owner", ["module", "callback"])
def test_hooks_per_client_get_its_id_and_number(owner: str) -> None:
    names = PER_CLIENT if owner == "module" else PER_CLIENT_OF_CALLBACK
    calls = list[Any]()
    kind = recording(Whole if owner == "module" else L.Callback, names, calls)
    module = kind() if owner == "module" else Whole()
    module.federated = True
    trainer = everything(True, module, callbacks=None if owner == "module" else [kind()])
    rounds = {"train": 2, "validation": 2, "test": 1, "predict": 1}
    for name in names:
        found = [arguments for hook, arguments, _ in calls if hook == name]
        assert len(found) == rounds[name.split("_")[1]]
        # The client's id, and the clients before it.
        assert all(one[-2:] == [0, 0] for one in found), (name, found)
    assert trainer.lightning_module is module


def test_batches_of_hooks_per_client_have_no_samples() -> None:
    found = list[Any]()

    class Keeping(L.Callback):
        def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
            found.append(batch)

        def on_predict_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any
        ) -> None:
            found.append(batch)

    module = Whole()
    module.federated = True
    everything(True, module, callbacks=[Keeping()])
    assert len(found) == 3
    assert all(isinstance(batch, ClientBatch) and batch == 0 for batch in found)


def test_hooks_of_checkpoints(tmp_path: Path) -> None:
    """They get a checkpoint with all that a plain one has."""
    keys = dict[bool, set[str]]()
    for federated in (False, True):
        calls = list[Any]()
        module = recording(Whole, CHECKPOINTS, calls)()
        data = recording(Data, STATE, calls)()
        module.federated = data.federated = federated
        callback = recording(L.Callback, CHECKPOINTS | STATE, calls)()
        trainer = everything(federated, module, data, [callback])
        path = tmp_path / f"{federated}.ckpt"
        trainer.save_checkpoint(path)
        saved = [(name, sorted(arguments[-1]) if arguments else []) for name, arguments, _ in calls]
        calls.clear()
        with quiet():
            trainer.fit(module, data, ckpt_path=path)
        loaded = [name for name, *_ in calls]
        # The callback and the module; Lightning leaves states out that are empty.
        assert [name for name, _ in saved].count("on_save_checkpoint") == 2
        assert {name for name, _ in saved} == {"on_save_checkpoint", "state_dict"}
        assert loaded.count("on_load_checkpoint") == 2
        keys[federated] = set.intersection(*(set(k) for name, k in saved if k))
    assert keys[False] <= keys[True]
    assert "federated" not in keys[False]


@pytest.mark.parametrize("federated", [False, True])
def test_hooks_of_the_sanity_check(federated: bool) -> None:
    calls = list[Any]()
    module = Whole()
    module.federated = federated
    callback = recording(L.Callback, SANITY, calls)()
    everything(federated, module, callbacks=[callback], num_sanity_val_steps=1)
    assert [name for name, *_ in calls] == ["on_sanity_check_start", "on_sanity_check_end"]


@pytest.mark.parametrize("federated", [False, True])
def test_hooks_of_an_exception(federated: bool) -> None:
    calls = list[Any]()

    class Failing(Whole):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("broken")

    data = recording(Data, EXCEPTION, calls)()
    data.federated = federated
    callback = recording(L.Callback, EXCEPTION, calls)()
    with pytest.raises(Exception, match="broken"):
        everything(federated, Failing(), data, [callback])
    assert [name for name, *_ in calls] == ["on_exception", "on_exception"]
