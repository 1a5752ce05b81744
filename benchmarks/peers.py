"""Rounds of other frameworks on LeNet at batch 10, in turns with ours.

    python -m benchmarks.table --parts peers --peer fluke=PYTHON --peer blazefl=PYTHON

Each framework runs in a process of its own interpreter (:mod:`benchmarks.peer_side`), on the same
samples, network, first parameters, cohort size, batch size and step size, without momentum, which
BlazeFL's trainers don't have. Cohorts and orders of samples are each framework's own, so models
can't be compared; that both went about as far is checked.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch

from benchmarks import cells
from benchmarks.workloads import WORKLOADS, Workload
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.models import LeNet

SIDE = Path(__file__).with_name("peer_side.py")
LR = 0.01
WORKLOAD = replace(WORKLOADS["w1"], make=lambda: LeNet(lr=LR, momentum=0.0))
METHODS = {"fluke": ("FedAvg", "FedRep"), "blazefl": ("FedAvg",)}
"""What each framework has of FedAvg and FedRep."""
QUIET = {**os.environ, "TQDM_DISABLE": "1"}
"""The environment of a framework's process: without bars of progress."""
LIKE = 2.0
"""Largest quotient of the ways that both sides' models go in the first round. Other cohorts and
orders of samples make some percent; an epoch more, or a mean that isn't one, makes more than 2."""


def write_problem(path: Path, method: str, threads: int, workload: Workload) -> None:
    """Write what both sides train, for a process that can't import this repository."""
    train, test = workload.data()
    L.seed_everything(0, verbose=False)
    weights = [leaf.detach().clone() for leaf in workload.module().parameters()]
    problem = {
        "method": method,
        "threads": threads,
        "weights": weights,
        "lr": LR,
        "batch_size": workload.batch_size,
        "cohort": workload.cohort,
        "head_epochs": workload.head_epochs,
        "train": _clients(train),
        "test": _clients(test),
    }
    torch.save(problem, path)


def _clients(data: FederatedTensorDataset) -> list[list[torch.Tensor]]:
    """Return the samples of each client."""
    return [[field[positions] for field in data.fields] for positions in data.indices]


class Side:
    """A process that runs a round of another framework on request.

    Args:
        process: Reads a line for each round on its input, and writes what it took.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self.requests, self.answers = process, process.stdin, process.stdout
        self.rounds: list[dict[str, float]] = []

    def run_round(self) -> None:
        """Run a round.

        Raises:
            RuntimeError: If the process ends instead.
        """
        try:
            self.requests.write(b"round\n")
            line = self.answers.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise RuntimeError(
                f"Expected `{self.process.args!r}` to run a round, but it ended with status "
                f"{self.process.wait()}. What it wrote is above."
            )
        self.rounds.append(json.loads(line))


@contextmanager
def started(framework: str, python: str, problem: Path) -> Iterator[Side]:
    """Start a framework's process, which ends with the ``with`` block."""
    command = [python, "-W", "ignore", str(SIDE), framework, str(problem)]
    pipe = subprocess.PIPE
    # Without buffers, so that nothing is left to write when the process has ended.
    with subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, env=QUIET) as process:
        yield Side(process)


def version_of(framework: str, python: str) -> str:
    """Return a framework's name and version, and those of Python and torch beside it.

    Raises:
        ValueError: If ``python`` has no such framework.
    """
    package = {"fluke": "fluke-fl", "blazefl": "blazefl"}[framework]
    parts = {"blazefl": "[contrib,reproducibility]"}.get(framework, "")
    program = (
        "import platform, importlib.metadata as m; "
        f"print('{framework}', m.version('{package}'), 'on Python', platform.python_version(), "
        "'with torch', m.version('torch'))"
    )
    try:
        ended = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"Expected `--peer {framework}=PYTHON` to name an interpreter with {package}, but got "
            f"{python}. Install it there: {python} -m pip install '{package}{parts}'."
        ) from error
    return ended.stdout.strip()


def measure(
    framework: str, python: str, method: str, threads: int, least: float = 3.0
) -> dict[str, Any]:
    """Run rounds of both sides in turns.

    Args:
        framework: A key of :data:`METHODS`.
        python: An interpreter that has it.
        method: One of the framework's methods.
        threads: Threads of each side.
        least: Seconds that the rounds which count take at least.

    Raises:
        RuntimeError: If the framework's process ends, or trains something else.

    Returns:
        ``peer``, the framework with its versions; ``cpu`` and ``wall``, its seconds per round over
        ours; ``seconds`` and ``peer_seconds`` per round by the clock; ``rounds``, those that the
        medians are of.
    """
    with tempfile.TemporaryDirectory() as folder:
        problem = Path(folder) / "problem.pt"
        write_problem(problem, method, threads, WORKLOAD)
        with started(framework, python, problem) as side, cells.use_threads(threads):
            clock, _ = cells.run(
                WORKLOAD,
                method,
                "auto",
                cells.WARM_UP + cells.MOST,
                least=least,
                other=side.run_round,
            )
    theirs = side.rounds[cells.WARM_UP :]
    ours = clock.ours[cells.WARM_UP :]
    own = [median(one[which] for one in ours) for which in (0, 1)]
    its = [median(one[which] for one in theirs) for which in ("cpu", "wall")]
    _check_way(f"{framework}, {method}", clock.first_way, side.rounds[0]["way"])
    return {
        "peer": version_of(framework, python),
        "method": method,
        "threads": threads,
        "cpu": its[0] / own[0],
        "wall": its[1] / own[1],
        "seconds": own[1],
        "peer_seconds": its[1],
        "rounds": len(ours),
    }


def _check_way(name: str, ours: float, theirs: float) -> None:
    """Refuse a comparison of two sides that train something else.

    Raises:
        RuntimeError: If the ways differ by :data:`LIKE`.
    """
    if not 1 / LIKE < theirs / ours < LIKE:
        raise RuntimeError(
            f"Expected both sides' server to go about as far in the first round, but {name} went "
            f"{theirs:.3g} and ours {ours:.3g}. One of them trains something else; see "
            "benchmarks/peer_side.py."
        )


def describe(row: dict[str, Any]) -> str:
    """Write a row of the table."""
    return (
        f"{row['peer']}, {row['method']}, {row['threads']} threads: {row['wall']:.2f} by the "
        f"clock, {row['cpu']:.2f} by CPU time; {row['peer_seconds']:.3f} s a round, ours "
        f"{row['seconds']:.3f} s; medians of {row['rounds']}"
    )
