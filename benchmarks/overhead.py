"""Costs of a round besides local training, aggregation and evaluation, and of the beginning.

python -m benchmarks.overhead --rounds 30
"""

import argparse
import logging
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import SimpleProfiler

from lightning_pfl import FederatedDataModule, FederatedStrategy
from lightning_pfl.data import ClassesPerClient, Digits, FederatedTensorDataset
from lightning_pfl.methods import FedAvg, FedRep
from lightning_pfl.models import MLP, DigitsCNN
from lightning_pfl.testing.fitting import quiet_trainer
from lightning_pfl.trainer.progress import profiled

CLIENTS, COHORT, SAMPLES = 100, 10, 20
LOGGERS = ("none", "csv", "tensorboard")
INSIDE = (profiled("training_step"), "aggregation", profiled("validation_step"))


class RoundClock(L.Callback):
    """Seconds of each round, evaluation included.

    Args:
        now: Returns the time: wall-clock seconds, or those of the CPU.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.rounds: list[float] = []
        self.ends: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the start of the round."""
        self.start = self.now()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the end of the round, after the evaluation."""
        self.ends.append(self.now())
        self.rounds.append(self.ends[-1] - self.start)


class QuietProfiler(SimpleProfiler):
    """A callback that measures without printing a table at the end."""

    def describe(self) -> None:
        """Print nothing."""


def overhead(rounds: int, logger: str) -> float:
    """Return the median milliseconds of a round outside the clients' and the server's work.

    Args:
        rounds: Rounds that count, after three that don't.
        logger: ``"none"``, ``"csv"`` or ``"tensorboard"``.
    """
    samples = CLIENTS * SAMPLES
    fields = torch.randn(samples, 16), torch.randint(0, 4, (samples,))
    positions = list(torch.arange(samples).view(CLIENTS, SAMPLES))
    train = FederatedTensorDataset(fields, positions, batch_size=10, shuffle=True)
    clock, profiler = RoundClock(), QuietProfiler()
    with tempfile.TemporaryDirectory() as folder:
        loggers: dict[str, Any] = {
            "none": False,
            "csv": CSVLogger(folder),
            "tensorboard": TensorBoardLogger(folder),
        }
        trainer = quiet_trainer(
            FederatedStrategy(FedAvg(), participation=COHORT, seed=0),
            rounds + 3,
            callbacks=[clock],
            logger=loggers[logger],
            profiler=profiler,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
        )
        trainer.fit(MLP([16, 8, 4]), train_dataloaders=train, val_dataloaders=train)
    inside = [
        sum(times) for times in zip(*(profiler.recorded_durations[n] for n in INSIDE), strict=True)
    ]
    return 1e3 * float(median(a - b for a, b in list(zip(clock.rounds, inside, strict=True))[3:]))


def import_seconds(statement: str) -> float:
    """Return the median CPU seconds of an import in fresh processes."""
    times = []
    for _ in range(5):
        start = _of_children()
        subprocess.run([sys.executable, "-c", statement], check=True)
        times.append(_of_children() - start)
    return median(times)


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def first_round(rounds: int = 8) -> tuple[float, float, float]:
    """Time the demo's FedRep on the digits.

    Returns:
        CPU seconds from the call of ``fit`` to the end of the first round, those of the first
        round, and the median of the later ones.
    """
    clock = RoundClock(time.process_time)
    L.seed_everything(0, verbose=False)
    data = FederatedDataModule(Digits(), ClassesPerClient(5), num_clients=40, val_fraction=0.2)
    strategy = FederatedStrategy(FedRep(head_epochs=10, body_epochs=1), participation=0.5)
    trainer = quiet_trainer(strategy, rounds, callbacks=[clock])
    begin = time.process_time()
    trainer.fit(DigitsCNN(lr=0.05), data)
    return clock.ends[0] - begin, clock.rounds[0], median(clock.rounds[2:])


def measure_start() -> dict[str, float]:
    """Measure the CPU seconds of imports, and of the demo's first rounds."""
    found = dict(zip(("to_first", "first", "later"), first_round(), strict=True))
    for name in ("lightning", "lightning_pfl"):
        found[f"import {name}"] = import_seconds(f"import {name}")
    return found


def describe_start(found: dict[str, float]) -> str:
    """Write it in two lines."""
    return (
        f"CPU seconds: import lightning {found['import lightning']:.2f} s, import lightning_pfl "
        f"{found['import lightning_pfl']:.2f} s\n"
        f"FedRep on the digits: {found['to_first']:.2f} s from fit to the end of the first round, "
        f"which takes {found['first']:.2f} s; a later one takes {found['later']:.2f} s"
    )


def main(arguments: Iterable[str] | None = None) -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description="Time what isn't training.")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args(None if arguments is None else list(arguments))
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    print(f"outside training, aggregation and evaluation; {CLIENTS} clients, {COHORT} a round")
    for logger in LOGGERS:
        print(f"  logger {logger:12} {overhead(options.rounds, logger):6.1f} ms a round")
    print(describe_start(measure_start()))


if __name__ == "__main__":
    main()
