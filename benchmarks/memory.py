"""Memory of a fit against what its tensors need, each in a process of its own.

python -m benchmarks.memory                         rows of the table
python -m benchmarks.memory w2 FedAvg --rounds 2000 whether 2,000 rounds are flat
"""

import argparse
import gc
import json
import logging
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks.workloads import WORKLOADS, Workload
from lightning_pfl import FederatedStrategy, methods
from lightning_pfl.testing.fitting import quiet_trainer

MANY = 100_000
CASES = (
    ("w3", "FedAvg", 4),
    ("w4", "FedAvg", 4),
    ("w4", "FedRep", 4),
    ("w4", "Ditto", 4),
    ("w4-1000", "FedAvg", 4),
    ("many", "FedAvg", 4),
    ("many", "Ditto", 4),
    ("logistic", "FedAvg", 2000),
)
"""Workloads, methods and rounds of the table."""
STATES = 3
"""Copies of a model that a client trains with: parameters, gradients and momentum."""


def workload_of(name: str) -> Workload:
    """Return a workload of the table, W4 with 1,000 clients and a cohort of 50, or many clients."""
    if name == "w4-1000":
        return replace(WORKLOADS["w4"], clients=1000, cohort=50)
    if name == "many":
        small = WORKLOADS["logistic"]
        return replace(small, clients=MANY, samples=10, cohort=10, test_samples=2)
    return WORKLOADS[name]


def _status(key: str) -> float:
    """Read a size in MiB from Linux's ``/proc/self/status``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


class Resident(L.Callback):
    """Stores the resident memory after each round, MiB."""

    def __init__(self) -> None:
        self.after: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store it."""
        self.after.append(_status("VmRSS"))


def fit(
    workload: Workload, method: str, rounds: int, callbacks: Iterable[L.Callback] = ()
) -> tuple[FederatedStrategy, float]:
    """Train; return the strategy, and MiB of the samples."""
    train, test = workload.data()
    strategy = FederatedStrategy(getattr(methods, method)(), workload.cohort, seed=0)
    trainer = quiet_trainer(strategy, rounds, callbacks=list(callbacks), num_sanity_val_steps=0)
    trainer.fit(workload.module(), train, test)
    leaves = [leaf for data in (train, test) for leaf in (*data.fields, torch.cat([*data.indices]))]
    return strategy, sum(leaf.nbytes for leaf in leaves) / 2**20


def measure(name: str, method: str, rounds: int) -> dict[str, Any]:
    """Measure this process, in MiB.

    What the tensors need are samples, the server's and all clients' states, the cohort's uploads,
    and for one client what it trains with. Activations aren't among them, nor are torch and
    Lightning, which a small fit has loaded before.
    """
    workload = workload_of(name)
    fit(replace(workload, clients=2, cohort=2, samples=10, test_samples=2), method, 1)
    gc.collect()
    base, resident = _status("VmRSS"), Resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of now on
    strategy, samples = fit(workload, method, rounds, [resident])
    peak = _status("VmHWM") - base
    federation = strategy.federation
    model = sum(leaf.nbytes for leaf in workload.module().state_dict().values()) / 2**20
    states = federation.client_states.nbytes() / 2**20
    needed = samples + states + model * (1 + workload.cohort + STATES)
    quarter = max(1, rounds // 4)
    return {
        "workload": name,
        "method": method,
        "rounds": rounds,
        "peak": peak,
        "needed": needed,
        "ratio": peak / needed,
        "first_quarter": resident.after[quarter - 1] - base,
        "end": resident.after[-1] - base,
    }


def measure_apart(name: str, method: str, rounds: int) -> dict[str, Any]:
    """Measure a case in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory", name, method, "--json"]
    ended = subprocess.run(
        [*command, "--rounds", str(rounds)], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def describe(row: dict[str, Any]) -> str:
    """Write a row of the table."""
    return (
        f"{row['workload']:12}{row['method']:12}{row['peak']:10.0f}{row['needed']:9.0f}"
        f"{row['ratio']:7.2f}  {row['first_quarter']:.0f} MiB after a quarter of "
        f"{row['rounds']} rounds, {row['end']:.0f} after the last"
    )


def main(arguments: Iterable[str] | None = None) -> None:
    """Print all rows, or measure one case in this process."""
    parser = argparse.ArgumentParser(description="Measure the memory of a fit.")
    parser.add_argument("workload", nargs="?", choices=[*WORKLOADS, "w4-1000", "many"])
    parser.add_argument("method", nargs="?", default="FedAvg", choices=methods.__all__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(None if arguments is None else list(arguments))
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if options.workload is None:
        for case in CASES:
            print(describe(measure_apart(*case)), flush=True)
        return
    found = measure(options.workload, options.method, options.rounds)
    if options.json:
        print(json.dumps(found))
        return
    print(describe(found))


if __name__ == "__main__":
    main()
