"""W1: rounds of FedAvg and FedRep inside ``Trainer.fit`` against the plain-PyTorch loop R0.

The workload is that of `benchmarks.r0`: Fashion-MNIST, 100 clients with two classes each, 10 a
round, batches of 10, LeNet, and an evaluation of all clients after every round. Both sides run in
one process, in turns, each at the thread settings given; what counts is the ratio of the medians,
with R0 at its better setting.

    python -m benchmarks.w1 --rounds 5 --threads 1 2
"""

import argparse
import logging
import time
from collections.abc import Iterable
from statistics import median
from typing import Any

import lightning as L
import torch

from benchmarks.fashion_mnist import Split, load_clients
from benchmarks.r0 import KINDS, measure
from lightning_pfl import FederatedStrategy
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.contract.records import Round
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.methods import FedAvg, FedRep
from lightning_pfl.methods.base import Method
from lightning_pfl.models import LeNet

METHODS = {
    "FedAvg": lambda: FedAvg(local_epochs=1),
    "FedRep": lambda: FedRep(head_epochs=10, body_epochs=1),
}
WARM_UP = 2
"""Rounds before the clock counts: the engine's probe and its recordings."""


class RoundClock(FederatedCallback):
    """Seconds of each round, evaluation included, and of the local training inside it."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.training: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the start of the round."""
        self.start = time.perf_counter()

    def on_local_training_start(self, trainer: L.Trainer, module: Any, round: Round) -> None:
        """Store the start of local training."""
        self.begun = time.perf_counter()

    def on_local_training_end(self, trainer: L.Trainer, module: Any, round: Round) -> None:
        """Store the end of local training."""
        self.training.append(time.perf_counter() - self.begun)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the end of the round, after the evaluation."""
        self.rounds.append(time.perf_counter() - self.start)


def federated(split: Split, batch_size: int, shuffle: bool) -> FederatedTensorDataset:
    """Put all clients' samples in one pool; client k has a contiguous part."""
    clients, samples = split.labels.shape
    positions = torch.arange(clients * samples).view(clients, samples)
    fields = split.images.flatten(0, 1), split.labels.flatten()
    return FederatedTensorDataset(fields, list(positions), batch_size=batch_size, shuffle=shuffle)


def run(
    method: Method, data: tuple[Split, Split], rounds: int, threads: int, **settings: Any
) -> tuple[RoundClock, float]:
    """Train some rounds; return the times after the warm-up, and the final mean accuracy."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    clock = RoundClock()
    L.seed_everything(0, verbose=False)
    try:
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=WARM_UP + rounds,
            strategy=FederatedStrategy(method, participation=10, **settings),
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        train, test = federated(data[0], 10, True), federated(data[1], 100, False)
        trainer.fit(LeNet(), train_dataloaders=train, val_dataloaders=test)
    finally:
        torch.set_num_threads(before)
    clock.rounds, clock.training = clock.rounds[WARM_UP:], clock.training[WARM_UP:]
    return clock, float(trainer.callback_metrics["val_acc"])


def main(arguments: Iterable[str] | None = None) -> None:
    """Print both sides' seconds per round and the ratio."""
    parser = argparse.ArgumentParser(description="Time whole rounds against the baseline R0.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    options = parser.parse_args(None if arguments is None else list(arguments))
    data = load_clients()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    print(f"torch {torch.__version__}, {options.rounds} rounds after {WARM_UP}, medians in seconds")
    print(f"{'':10}{'threads':>8}{'train':>8}{'round':>8}{'accuracy':>10}")
    for name in options.methods:
        best: dict[str, float] = {}
        for threads in options.threads:
            for onednn in (True, False):
                times = measure(name, data, options.rounds + 1, threads, onednn=onednn)[1:]
                seconds = median(t.total for t in times)
                side = "R0" if onednn else "R0 without oneDNN"
                best[side] = min(best.get(side, seconds), seconds)
                row = f"{threads:8d}{median(t.train for t in times):8.3f}{seconds:8.3f}"
                print(f"{side:18} {name:8}{row}{times[-1].accuracy:10.3f}")
            clock, accuracy = run(METHODS[name](), data, options.rounds, threads)
            seconds = median(clock.rounds)
            best["ours"] = min(best.get("ours", seconds), seconds)
            row = f"{threads:8d}{median(clock.training):8.3f}{seconds:8.3f}"
            print(f"{'lightning_pfl':18} {name:8}{row}{accuracy:10.3f}")
        for side in ("R0", "R0 without oneDNN"):
            print(
                f"{name}: {best[side] / best['ours']:.2f} times faster than {side} at its better "
                "setting"
            )


assert set(METHODS) <= set(KINDS)

if __name__ == "__main__":
    main()
