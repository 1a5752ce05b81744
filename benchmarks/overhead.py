"""Costs of a round besides local training, aggregation and evaluation, and of an import.

python -m benchmarks.overhead --rounds 30
"""

import argparse
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from statistics import median

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import SimpleProfiler

from benchmarks.w1 import RoundClock
from lightning_pfl import FederatedStrategy
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.methods import FedAvg
from lightning_pfl.models import MLP
from lightning_pfl.trainer.progress import profiled

CLIENTS, COHORT, SAMPLES = 100, 10, 20
INSIDE = (profiled("training_step"), "aggregation", profiled("validation_step"))


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
        loggers = {
            "none": False,
            "csv": CSVLogger(folder),
            "tensorboard": TensorBoardLogger(folder),
        }
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=rounds + 3,
            strategy=FederatedStrategy(FedAvg(), participation=COHORT, seed=0),
            callbacks=[clock],
            logger=loggers[logger],
            profiler=profiler,
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(MLP([16, 8, 4]), train_dataloaders=train, val_dataloaders=train)
    inside = [
        sum(times) for times in zip(*(profiler.recorded_durations[n] for n in INSIDE), strict=True)
    ]
    return 1e3 * median(a - b for a, b in list(zip(clock.rounds, inside, strict=True))[3:])


def import_seconds(statement: str) -> float:
    """Return the median seconds of an import in fresh processes."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        times.append(time.perf_counter() - start)
    return median(times)


def main(arguments: Iterable[str] | None = None) -> None:
    """Print both costs."""
    parser = argparse.ArgumentParser(description="Time what isn't training.")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args(None if arguments is None else list(arguments))
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    print(
        f"outside training, aggregation and evaluation; {CLIENTS} clients, {COHORT} a round, 1 "
        "thread"
    )
    for logger in ("none", "csv", "tensorboard"):
        print(f"  logger {logger:12} {overhead(options.rounds, logger):6.1f} ms a round")
    base, ours = import_seconds("import lightning"), import_seconds("import lightning_pfl")
    print(f"import lightning {base:.2f} s, import lightning_pfl {ours:.2f} s")


if __name__ == "__main__":
    main()
