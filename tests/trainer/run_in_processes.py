"""Federated runs for test_processes.py, which starts this file in several processes.

Usage: python -m tests.trainer.run_in_processes FOLDER cases|methods|0|1. Two processes run the
cases, or every method, and each writes what it knows at the end to FOLDER/<case>-<rank>.pt; or
process 0, or 1, raises an error; with ``slow``, ``stops0`` or ``stops1`` one is late or stops.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_pfl import FederatedStrategy, PersonalizedModule
from lightning_pfl.callbacks import (
    BestRound,
    HeadFineTuning,
    NearestNeighbours,
    NewClientAdaptation,
)
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.federation.evaluate import personal_models
from lightning_pfl.federation.ranks import Ranks
from lightning_pfl.inspect import PartitionPicture
from lightning_pfl.methods import FedAvg, FedRep, LocalOnly
from lightning_pfl.methods.base import Method
from lightning_pfl.testing.conformance import Problem
from tests.methods.cases import CASES as METHODS
from tests.methods.cases import PROBLEMS

SIZES = (8, 2, 5, 9, 3)
ROUNDS = 3
SILENCE = timedelta(seconds=2)
"""Time after which a process counts as stopped."""


class Seeing(L.Callback):
    """Notes the clients that hooks fire for."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, at: int
    ) -> None:
        self.seen.append(int(batch))


class Counting(PersonalizedModule):
    """Logs a torchmetrics object too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counted = MulticlassAccuracy(3, average="micro")

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.counted.update(self(batch[0]), batch[1])
        self.log("val_counted", self.counted)


class ByHand(PersonalizedModule):
    """Optimizes by hand, in Lightning's own loop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


def network(kind: type[PersonalizedModule] = PersonalizedModule) -> PersonalizedModule:
    """A small network; other numbers in every process, of which those of process 0 count."""
    torch.manual_seed(int(os.environ.get("LOCAL_RANK", "0")))
    backbone = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh())
    return kind(backbone, nn.Linear(5, 3), lr=0.1, momentum=0.9, num_classes=3).double()


def clients(poisoned: int | None = None, first: int = 0) -> list[FederatedTensorDataset]:
    """Training and validation data of ragged clients."""
    generator = torch.Generator().manual_seed(first)
    x = torch.randn(80, 4, generator=generator, dtype=torch.float64)
    y = (x @ torch.randn(4, 3, generator=generator, dtype=torch.float64)).argmax(1)
    starts = torch.tensor((0, *SIZES)).cumsum(0).tolist()
    train = [list(range(a, a + n)) for a, n in zip(starts, SIZES, strict=False)]
    val = [list(range(40 + 5 * k, 45 + 5 * k - k)) for k in range(5)]
    val[2] = []
    if poisoned is not None:
        x[train[poisoned][0]] = torch.nan
    return [
        FederatedTensorDataset((x, y), train, batch_size=3, shuffle=True),
        FederatedTensorDataset((x, y), val, batch_size=3),
    ]


def new_clients(scope: str = "personal") -> NewClientAdaptation:
    """Five others."""
    train, test = clients(first=1)
    return NewClientAdaptation(clients=(train, test), samples=[2], steps=2, scope=scope)


CASES: dict[str, dict[str, Any]] = {
    "fedavg": {
        "method": lambda: FedAvg(),
        "participation": 3,
        "callbacks": lambda: [
            HeadFineTuning(epochs=1),
            EarlyStopping("val_loss", min_delta=1, patience=1),
        ],
    },
    "fedrep": {
        "method": lambda: FedRep(head_epochs=2),
        "participation": 0.6,
        "callbacks": lambda: [HeadFineTuning(epochs=1, when="evaluation"), new_clients()],
    },
    # Sequential: the same bits.
    "local": {
        "method": lambda: LocalOnly(),
        "engine": "sequential",
        "kind": Counting,
        "callbacks": lambda: [Seeing()],
    },
    # More processes than clients in a cohort; validations of some clients in turns.
    "few": {
        "method": lambda: FedRep(head_epochs=1),
        "participation": 1,
        "evaluated_clients": 2,
        "engine": "timed",
        "callbacks": lambda: [Seeing()],
    },
    "by hand": {"method": lambda: FedRep(head_epochs=2), "participation": 3, "kind": ByHand},
    # Client 0 belongs to process 1.
    "poisoned": {"method": lambda: FedRep(head_epochs=1), "poisoned": 0, "engine": "sequential"},
    # Each process has the samples of its clients alone.
    "split": {
        "method": lambda: FedAvg(),
        "participation": 3,
        "split_data": True,
        "callbacks": lambda: [HeadFineTuning(epochs=1), NearestNeighbours(), new_clients("head")],
    },
    "split states": {
        "method": lambda: FedRep(head_epochs=2),
        "participation": 3,
        "split_data": True,
        "callbacks": lambda: [NearestNeighbours(), PartitionPicture()],
    },
    "split by hand": {
        "method": lambda: FedRep(head_epochs=1),
        "kind": ByHand,
        "split_data": True,
        "poisoned": 3,
    },
}
SHARDED: dict[str, Any] = {
    "method": lambda: FedRep(head_epochs=2),
    "participation": 3,
    "engine": "sequential",
    "keep_optimizer_state": True,
    "state_dict_type": "sharded",
    "callbacks": lambda: [BestRound()],
}
CASES["sharded"] = SHARDED
RESUMED = ("fedrep", "few", "sharded")


def run(name: str, folder: Path, devices: int, ckpt_path: Path | None = None) -> dict[str, Any]:
    """Fit, validate and predict; returns all that a process knows at the end."""
    case = CASES[name]
    saving = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}", save_top_k=-1)
    strategy = FederatedStrategy(
        case["method"](),
        seed=5,
        engine=case.get("engine", "auto"),
        participation=case.get("participation", 1.0),
        evaluated_clients=case.get("evaluated_clients", 1.0),
        split_data=case.get("split_data", False),
        keep_optimizer_state=case.get("keep_optimizer_state", False),
        state_dict_type=case.get("state_dict_type", "full"),
    )
    trainer: Any = L.Trainer(
        max_epochs=ROUNDS,
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        logger=CSVLogger(folder, name="logs", version=0),
        callbacks=[*case.get("callbacks", list)(), saving],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
    )
    model = network(case.get("kind", PersonalizedModule))
    train, val = clients(case.get("poisoned"))
    # A clock that counts its readings: two runs by the machine's may choose other engines.
    readings = count()
    with patch("lightning_pfl.engine.probe.clock", lambda device: float(next(readings))):
        trainer.fit(model, train, val, ckpt_path=ckpt_path)
    if name in RESUMED:
        trainer.save_checkpoint(folder / "after.ckpt", weights_only=False)
    if devices > 1 and case.get("split_data"):
        held: Any = strategy.federation.training_data()
        mine = strategy.federation.owners == strategy.ranks.rank
        assert held.pool_size == int(held.num_samples[mine].sum()) < sum(SIZES)
    return {
        **facts(trainer, strategy, model),
        "validated": trainer.validate(model, val, verbose=False),
        "predictions": trainer.predict(model, val),
        "models": personal_models(strategy.federation, torch.arange(5)),
        "per_client": {
            prefix: (found.values, found.counts)
            for prefix, found in strategy.federation.client_results["val"].evaluations.items()
        },
    }


def facts(trainer: Any, strategy: FederatedStrategy, model: Any) -> dict[str, Any]:
    """What is known after a fit."""
    seeing = [callback for callback in trainer.callbacks if isinstance(callback, Seeing)]
    return {
        "server": strategy.server,
        "client_states": strategy.federation.client_states.tree,
        "clients": [strategy.client_state_dict(k) for k in range(5)],
        "module": model.state_dict(),
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "history": strategy.federation.history.state_dict(),
        "rounds": trainer.current_epoch,
        "seen": [client for callback in seeing for client in callback.seen],
        "best": Path(trainer.checkpoint_callback.best_model_path).name,
    }


def fit(
    method: Method,
    module: L.LightningModule,
    data: Any,
    devices: int,
    seed: int | None = 5,
    silence: timedelta | None = None,
    callbacks: tuple[L.Callback, ...] = (),
) -> Any:
    """Two rounds, the clients one after another; returns the strategy."""
    strategy = FederatedStrategy(method, seed=seed, engine="sequential", participation=3)
    if silence is not None:
        strategy.silence = silence
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        callbacks=list(callbacks),
        **quiet,
    )
    trainer.fit(module, data, data)
    return strategy


def ends(name: str, devices: int) -> dict[str, Any]:
    """How a method ends on the problem of its conformance tests, after two fits of the module."""
    problem = Problem(**PROBLEMS.get(name, {}))
    module, data = problem.make_module(torch.float64), problem.make_data(torch.float64, True)
    strategy = fit(METHODS[name](), module, data, devices)
    module.trainer.fit_loop.max_epochs = 3
    module.trainer.fit(module, data, data)
    modules = [strategy.client_module(k) for k in range(strategy.federation.num_clients)]
    return {
        "server": strategy.server,
        "client_states": strategy.federation.client_states.tree,
        "clients": [dict(module.state_dict()) for module in modules],
    }


class Messages(L.Callback):
    """Counts the calls that all processes make together, in each round."""

    def __init__(self) -> None:
        self.rounds: list[list[str]] = []
        before = Ranks.call

        def call(ranks: Ranks, function: Any, *args: Any, **kwargs: Any) -> None:
            if self.rounds:
                self.rounds[-1].append(function.__name__)
            before(ranks, function, *args, **kwargs)

        Ranks.call = call  # type: ignore[assignment,method-assign]

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.rounds.append([])


class Raising(PersonalizedModule):
    """A module with a bug that only one process meets."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        if self.trainer.current_epoch == 1 and self.trainer.global_rank == int(sys.argv[2]):
            raise ZeroDivisionError("a bug in one process")
        return super().training_step(batch, batch_idx)


LATE: list[int] = []


class Late(PersonalizedModule):
    """Process 1 is late in round 1, or one of the processes stops there."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        what, rank = sys.argv[2], self.trainer.global_rank
        if self.trainer.current_epoch == 1 and not LATE:
            LATE.append(rank)
            if what == "slow" and rank == 1:
                time.sleep(4 * SILENCE.total_seconds())
            if what == f"stops{rank}":
                os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch, batch_idx)


def main() -> None:
    """Run the cases, the methods, or the run that ends badly."""
    folder, what = Path(sys.argv[1]), sys.argv[2]
    if what == "methods":
        write({name: ends(name, 2) for name in METHODS}, folder, "methods")
        messages = Messages()
        unseeded = fit(FedAvg(), network(), clients()[0], 2, seed=None, callbacks=(messages,))
        seed, sent = unseeded.federation.seed, messages.rounds[0]
        write({"seed": seed, "server": unseeded.server, "sent": sent}, folder, "unseeded")
    elif what == "cases":
        for name in CASES:
            write(run(name, folder / name, 2), folder, name)
        for name in RESUMED:
            start = folder.parent / "one" / name / "epoch=0.ckpt"
            write(run(name, folder / f"{name}-resumed", 2, start), folder, f"{name}-resumed")
    elif what in ("slow", "stops0", "stops1"):
        known = fit(FedAvg(), network(Late), clients()[0], 2, silence=SILENCE)
        write({"server": known.server}, folder, what)
    else:
        fit(FedAvg(), network(Raising), clients()[0], 2)


def write(known: dict[str, Any], folder: Path, name: str) -> None:
    """Leave what this process knows for the test."""
    torch.save(known, folder / f"{name}-{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
