"""Whole rounds of one process against those of several, each with one thread.

    python -m benchmarks.processes                          W1, W2 and W4 with FedAvg
    python -m benchmarks.processes --workloads w1 --methods FedRep --processes 2 --turns 3

Every measurement is a run of its own, and runs of one process and of several alternate. A ratio
above 1 means that several processes are faster: by the clock, which needs a machine without other
jobs, and by the processor's time of the busiest process, which doesn't count that it waits.

As many runs of one process at the same time, each with its share of the clients and without the
others, show what the ratio is at best: nothing is said to another process, and none waits.
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


def workload_of(name: str, parts: int = 1) -> Workload:
    """Return a workload of the table with the clients of a whole experiment, or a part of them."""
    whole = replace(WORKLOADS[name], **SIZES.get(name, {}))
    return replace(whole, clients=whole.clients // parts, cohort=whole.cohort // parts)


class Clock(L.Callback):
    """Times rounds with their evaluation.

    Args:
        folder: Where a run says that it begins.
        runs: Runs that begin together.

    Attributes:
        rounds: Seconds by the clock, of this process's processor, and in collective calls.
    """

    def __init__(self, folder: Path, runs: int = 1) -> None:
        self.folder, self.runs = folder, runs
        self.rounds: list[tuple[float, float, float]] = []
        self.waited = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Wait for the other runs."""
        if self.runs > 1:
            (self.folder / f"{os.getpid()}.begins").touch()
            while len([*self.folder.glob("*.begins")]) < self.runs:
                time.sleep(0.001)

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


def fit(name: str, method: str, processes: int, rounds: int, folder: Path, runs: int) -> None:
    """Run a fit in some processes; each writes its seconds to a file ``folder/*.json``.

    Args:
        name: The workload.
        method: The method.
        processes: The fit's processes.
        rounds: Rounds that are measured.
        folder: An empty folder, which the runs that begin together share.
        runs: How many these are; each has its share of the clients.
    """
    workload, clock = workload_of(name, runs), Clock(folder, runs)
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
    (folder / f"{os.getpid()}.json").write_text(json.dumps(clock.rounds[WARM_UP:]))


def measure(name: str, method: str, processes: int, rounds: int, runs: int = 1) -> dict[str, float]:
    """Run a fit in new processes, or several at the same time; return its seconds a round.

    Returns:
        ``wall``: by the clock; ``cpu``: of the busiest process's processor; ``waits``: the fraction
        of the time that the process which waits least spends in collective calls.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with TemporaryDirectory() as folder:
        words = [name, method, str(processes), str(rounds), folder, str(runs)]
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.processes", "--fit", *words]
        begun = [
            subprocess.Popen(command, env={**os.environ, **threads}, stdout=2) for _ in range(runs)
        ]
        if failed := [code for code in [run.wait() for run in begun] if code]:
            raise subprocess.CalledProcessError(failed[0], command)
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if len(found) != processes * runs:
        raise RuntimeError(f"Expected {processes * runs} files of seconds, but got {len(found)}.")
    each = [[median(column) for column in zip(*rounds_of, strict=True)] for rounds_of in found]
    return {
        "wall": max(wall for wall, _, _ in each),
        "cpu": max(cpu for _, cpu, _ in each),
        "waits": min(waited / wall for wall, _, waited in each),
    }


def compare(name: str, method: str, processes: int, rounds: int, turns: int) -> dict[str, float]:
    """Run fits of one process and of several in turns, and as many fits of a part each.

    Returns:
        The ratios ``wall`` and ``cpu`` of the least seconds of each, these seconds by the clock,
        ``one`` and ``several``, ``waits`` of :func:`measure`, and ``best``, the ratio by the clock
        of processes that never wait for each other.
    """
    kinds = [(1, 1), (processes, 1), (1, processes)]
    found: list[list[dict[str, float]]] = [[] for _ in kinds]
    for _ in range(turns):
        for (count, runs), mine in zip(kinds, found, strict=True):
            mine.append(measure(name, method, count, rounds, runs))
    one, several, apart = ({k: min(run[k] for run in mine) for k in mine[0]} for mine in found)
    return {
        **{key: one[key] / several[key] for key in ("wall", "cpu")},
        "one": one["wall"],
        "several": several["wall"],
        "waits": several["waits"],
        "best": one["wall"] / apart["wall"],
    }


def describe(row: dict[str, float]) -> str:
    """Write what :func:`compare` found."""
    return (
        f"{row['wall']:.2f} by the clock, {row['cpu']:.2f} by the processor; {row['one']:.3f} s "
        f"and {row['several']:.3f} s; {row['waits']:.0%} in collective calls; at best "
        f"{row['best']:.2f}"
    )


def main() -> None:
    """Measure, and print a line for each workload and method."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--workloads", nargs="+", default=DEFAULT, choices=WORKLOADS)
    parser.add_argument("--methods", nargs="+", default=["FedAvg"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--fit", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.fit:
        name, method, processes, rounds, folder, runs = given.fit
        fit(name, method, int(processes), int(rounds), Path(folder), int(runs))
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
