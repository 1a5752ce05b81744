"""Whole rounds of one process against those of several, each with one thread.

    python -m benchmarks.processes                          W1, W2 and W4 with FedAvg
    python -m benchmarks.processes --workloads w1 --methods FedRep --processes 2 --turns 3

Every measurement is a run of its own, and runs of one process and of several alternate. A ratio
above 1 means that several processes are faster: by the clock, which needs a machine without other
jobs, and by the processor's time of the busiest process, which doesn't count that it waits.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L

from benchmarks.cells import WARM_UP, make_method
from benchmarks.workloads import WORKLOADS, Workload
from lightning_pfl import FederatedStrategy
from lightning_pfl.federation.ranks import Ranks
from lightning_pfl.testing.fitting import quiet_trainer

SIZES: dict[str, dict[str, Any]] = {
    "w1": {"clients": 100, "samples": 600, "test_samples": 100},
    "w2": {"clients": 100},
    "w4": {"clients": 200, "cohort": 50},
}
"""Where a workload is larger than in the table: more clients, as in a whole experiment."""
DEFAULT = ("w1", "w2", "w4")


def workload_of(name: str) -> Workload:
    """Return a workload of the table with the clients of a whole experiment."""
    return replace(WORKLOADS[name], **SIZES.get(name, {}))


class Clock(L.Callback):
    """Times rounds with their evaluation.

    Attributes:
        rounds: Seconds by the clock, of this process's processor, and in collective calls.
    """

    def __init__(self) -> None:
        self.rounds: list[tuple[float, float, float]] = []
        self.waited = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the seconds in collective calls inside a ``with`` block."""
        before = Ranks.call

        def call(ranks: Ranks, function: Any, *args: Any, **kwargs: Any) -> None:
            start = time.perf_counter()
            before(ranks, function, *args, **kwargs)
            self.waited += time.perf_counter() - start

        Ranks.call = call  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            Ranks.call = before  # type: ignore[method-assign]

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the start of the round."""
        self.waited = 0.0
        self.start = time.perf_counter(), time.process_time()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store how long it took."""
        wall, cpu = self.start
        took = time.perf_counter() - wall, time.process_time() - cpu
        self.rounds.append((*took, self.waited))


def fit(name: str, method: str, processes: int, rounds: int, folder: Path) -> None:
    """Run a fit in some processes; each writes its seconds to ``folder/<rank>.json``."""
    workload, clock = workload_of(name), Clock()
    train, test = workload.data()
    L.seed_everything(0, verbose=False)
    strategy = FederatedStrategy(make_method(method, workload), workload.cohort, seed=0)
    trainer = quiet_trainer(
        strategy,
        WARM_UP + rounds,
        devices=processes,
        callbacks=[clock],
        num_sanity_val_steps=0,
    )
    with clock.watching():
        trainer.fit(workload.make(), train_dataloaders=train, val_dataloaders=test)
    path = folder / f"{trainer.global_rank}.json"
    path.write_text(json.dumps(clock.rounds[WARM_UP:]))


def measure(name: str, method: str, processes: int, rounds: int) -> dict[str, float]:
    """Run a fit in new processes; return its seconds a round.

    Returns:
        ``wall``: by the clock; ``cpu``: of the busiest process's processor; ``waits``: the fraction
        of the time that the process which waits least spends in collective calls.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with TemporaryDirectory() as folder:
        words = [name, method, str(processes), str(rounds), folder]
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.processes", "--fit", *words]
        subprocess.run(command, check=True, env={**os.environ, **threads}, stdout=2)
        found = [
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)
        ]
    each = [[median(column) for column in zip(*rounds_of, strict=True)] for rounds_of in found]
    return {
        "wall": max(wall for wall, _, _ in each),
        "cpu": max(cpu for _, cpu, _ in each),
        "waits": min(waited / wall for wall, _, waited in each),
    }


def compare(name: str, method: str, processes: int, rounds: int, turns: int) -> dict[str, float]:
    """Run fits of one process and of several in turns.

    Returns:
        The ratios ``wall`` and ``cpu`` of the least seconds of each, these seconds by the clock,
        ``one`` and ``several``, and ``waits`` of :func:`measure`.
    """
    one, several = [], []
    for _ in range(turns):
        one.append(measure(name, method, 1, rounds))
        several.append(measure(name, method, processes, rounds))
    least = [{key: min(run[key] for run in runs) for key in runs[0]} for runs in (one, several)]
    return {
        **{key: least[0][key] / least[1][key] for key in ("wall", "cpu")},
        "one": least[0]["wall"],
        "several": least[1]["wall"],
        "waits": least[1]["waits"],
    }


def describe(row: dict[str, float]) -> str:
    """Write what :func:`compare` found."""
    return (
        f"{row['wall']:.2f} by the clock, {row['cpu']:.2f} by the processor; {row['one']:.3f} s "
        f"and {row['several']:.3f} s; {row['waits']:.0%} in collective calls"
    )


def main() -> None:
    """Measure, and print a line for each workload and method."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--workloads", nargs="+", default=DEFAULT, choices=WORKLOADS)
    parser.add_argument("--methods", nargs="+", default=["FedAvg"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--fit", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.fit:
        name, method, processes, rounds, folder = given.fit
        fit(name, method, int(processes), int(rounds), Path(folder))
        return
    print("workload, method: ratio by the clock, by the processor; seconds of one and of several")
    for name in given.workloads:
        for method in given.methods:
            row = compare(name, method, given.processes, given.rounds, given.turns)
            print(
                f"{name}, {method}, {given.processes} processes: {describe(row)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
