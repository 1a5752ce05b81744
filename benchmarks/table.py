"""All that the pages on speed show, from one command: ``make bench``.

    python -m benchmarks.table --json build/bench.json           all but `processes` and `peers`
    python -m benchmarks.table --json build/bench.json --resume  what isn't in the file yet
    python -m benchmarks.table --parts rounds --workloads w2 --methods FedAvg --threads 2
    python -m benchmarks.table --parts rounds --workloads w1-fashion --methods FedAvg FedRep
    python -m benchmarks.table --parts processes peers --peer fluke=/path/to/python
    python -m benchmarks.page build/bench.json                   write it into the pages
    bash benchmarks/gpu.sh                                       on a GPU, with its tests

Each measurement is printed and written as it ends. One that fails is printed with its error, the
rest goes on, and the command ends with status 1.
"""

import argparse
import gc
import json
import logging
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks import breakdown, cells, habits, limits, memory, overhead, peers, processes, users
from benchmarks.cells import NAMES, NOT_HERE, SINGLE, Cell
from benchmarks.plain import METHODS as LOOPS
from benchmarks.workloads import FROM_FILES, WORKLOADS

PARTS = (
    *("rounds", "users", "habits", "profile", "limits", "memory", "start", "overhead"),
    *("processes", "peers"),
)


class Results:
    """What was measured, printed and written as it comes.

    Args:
        path: The file, JSON, whose measurements are kept until they are made again; None for none.
        resume: Whether what the file has isn't measured again.

    Attributes:
        found: For each part what it measured, by a key of its own.
        failed: The measurements that failed.
    """

    def __init__(self, path: Path | None = None, resume: bool = False) -> None:
        self.path, self.resume, self.failed = path, resume, list[str]()
        self.found: dict[str, dict[str, Any]] = {}
        if path is not None and path.is_file():
            self.found = json.loads(path.read_text())

    def keep(self, part: str, key: str, value: Any) -> None:
        """Store a measurement."""
        self.found.setdefault(part, {})[key] = value
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_name(self.path.name + ".new")
            beside.write_text(json.dumps(self.found, indent=1) + "\n")
            beside.replace(self.path)  # so that an interrupted run leaves a whole file

    def measure(
        self, part: str, key: str, function: Callable[..., Any], *arguments: Any, **settings: Any
    ) -> Iterator[Any]:
        """Call a function that measures; iterate over what it returns, or over nothing.

        There is nothing where the file has it already, or where the function fails.
        """
        if self.resume and key in self.found.get(part, {}):
            return
        try:
            value = function(*arguments, **settings)
        except Exception as error:  # one failure must not take what comes after it
            if not isinstance(error, FileNotFoundError):  # whose words say it all
                traceback.print_exc()
            print(f"{part}, {key}: failed: {error}", flush=True)
            self.failed.append(f"{part}, {key}")
            self.found.get(part, {}).pop(key, None)
        else:
            self.keep(part, key, value)
            yield value


def describe_machine(accelerator: str = "cpu") -> dict[str, str]:
    """Return the versions, the processor and how busy it is."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    return {
        "torch": torch.__version__,
        "lightning": L.__version__,
        "python": platform.python_version(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": processor if accelerator == "cpu" else torch.cuda.get_device_name(),
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


# --- rounds ---------------------------------------------------------------------------------------


def wanted_cells(options: argparse.Namespace) -> Iterator[tuple[int, str, str, str]]:
    """Iterate over threads, workload, method and engine of the cells to measure.

    Methods without a loop, whose seconds are compared with nothing, run with the first number of
    threads alone.
    """
    for threads in options.threads:
        for name in options.workloads:
            for method in options.methods or WORKLOADS[name].methods or NAMES:
                if method in LOOPS or threads == options.threads[0]:
                    for engine in options.engines:
                        yield threads, name, method, engine


def run_rounds(options: argparse.Namespace, results: Results) -> None:
    """Measure the cells."""
    print(
        f"{'workload':12}{'method':24}{'engine':12}{'threads':>7}{'CPU':>7}{'wall':>7}"
        f"{'CPU s':>8}{'s/round':>9}{'first':>7}{'MiB':>6}{'rounds':>7}  engine that ran"
    )
    settings: dict[str, Any] = {
        "accelerator": options.accelerator,
        "onednn": not options.without_onednn,
        "chunk_size": options.chunk_size,
        "cuda_graphs": options.cuda_graphs,
        "overlap_evaluation": options.overlap_evaluation,
        "precision": options.precision,
    }
    different = ["CUDA graphs"] if options.cuda_graphs else []
    different += ["overlap"] if options.overlap_evaluation else []
    different += [options.precision] if options.precision != SINGLE else []
    for threads, *cell in wanted_cells(options):
        check = options.check and threads == options.threads[0]
        key = ", ".join([*cell, str(threads), *different])
        for found in results.measure(
            "cells", key, measure_cell, *cell, threads, options.seconds, check, **settings
        ):
            print_cell(Cell(**found))
    if not options.methods and any(not WORKLOADS[name].methods for name in options.workloads):
        print("without a cell:", "; ".join(f"{name}: {why}" for name, why in NOT_HERE.items()))


def measure_cell(
    name: str, method: str, engine: str, threads: int, least: float, check: bool, **settings: Any
) -> dict[str, Any]:
    """Compare the models of both sides, if ``check`` says so, and measure a cell."""
    gc.collect()  # so that a cell doesn't pay for the one before it
    if check and method in LOOPS and settings["precision"] == SINGLE:
        cells.check(name, method, engine, **settings)
    return asdict(cells.measure(name, method, engine, threads, least, **settings))


def print_cell(cell: Cell) -> None:
    """Print a row of the table."""
    ratios = [f"{'-':>7}" if r is None else f"{r:7.2f}" for r in (cell.cpu, cell.wall)]
    print(
        f"{cell.workload:12}{cell.method:24}{cell.engine:12}{cell.threads:7}{ratios[0]}{ratios[1]}"
        f"{cell.cpu_seconds:8.3f}{cell.seconds:9.3f}{cell.first:7.2f}{cell.memory:6}"
        f"{cell.rounds:7}  {cell.choice[:60]}",
        flush=True,
    )


# --- the other parts ------------------------------------------------------------------------------


def run_users(options: argparse.Namespace, results: Results) -> None:
    """Measure small networks in modules of users."""
    print(users.HEAD)
    for asked in users.combinations():
        if asked[1] in (options.methods or asked):
            key = ", ".join(map(str, asked))
            for row in results.measure("users", key, users.measure, *asked, options.check):
                print(users.Row(**row).describe(key), flush=True)


def run_habits(options: argparse.Namespace, results: Results) -> None:
    """Measure what people write in their modules."""
    print(users.HEAD)
    for asked in habits.combinations():
        key = ", ".join(map(str, asked))
        for row in results.measure("habits", key, habits.measure, *asked, options.check):
            print(users.Row(**row).describe(key), flush=True)


def run_profile(options: argparse.Namespace, results: Results) -> None:
    """Divide a round's time into its parts."""
    print("a round's CPU time by its parts, milliseconds; the limit is the time of its products")
    with cells.use_threads(1):
        for name in options.workloads:
            for row in results.measure("profile", name, breakdown.measure, name):
                print(breakdown.describe(name, row), flush=True)


def run_limits(options: argparse.Namespace, results: Results) -> None:
    """Measure the products and passes of steps alone."""
    print(limits.HEAD)
    with cells.use_threads(1):
        for name, method in product(options.workloads, limits.METHODS):
            offered = WORKLOADS[name].methods or limits.METHODS
            if method in offered and method in (options.methods or offered):
                key = limits.key(name, method)
                for row in results.measure("limits", key, measure_limit, name, method):
                    print(limits.Limit(**row).describe(key), flush=True)


def measure_limit(name: str, method: str) -> dict[str, Any]:
    """Measure the products and passes of a workload's steps alone."""
    return asdict(limits.measure(WORKLOADS[name], method))


def run_memory(options: argparse.Namespace, results: Results) -> None:
    """Measure the memory of fits, each in a process of its own."""
    print(f"{'workload':12}{'method':12}{'peak MiB':>10}{'tensors':>9}{'ratio':>7}")
    for case in memory.CASES:
        key = ", ".join(map(str, case))
        for row in results.measure("memory", key, memory.measure_apart, *case):
            print(memory.describe(row), flush=True)


def run_start(options: argparse.Namespace, results: Results) -> None:
    """Measure imports, and the demo's first rounds."""
    for found in results.measure("start", "start", overhead.measure_start):
        print(overhead.describe_start(found), flush=True)


def run_overhead(options: argparse.Namespace, results: Results) -> None:
    """Measure what a round takes besides the clients' and the server's work."""
    with cells.use_threads(1):
        for logger in overhead.LOGGERS:
            for found in results.measure("overhead", logger, overhead.overhead, 30, logger):
                print(f"outside training and evaluation, logger {logger}: {found:.1f} ms a round")


def run_processes(options: argparse.Namespace, results: Results) -> None:
    """Measure rounds of one process against those of two."""
    print("two processes: ratio by the clock, by the processor; seconds of one and of two")
    for name in processes.DEFAULT:
        key = f"{name}, FedAvg, 2"
        for row in results.measure("processes", key, processes.compare, name, "FedAvg", 2, 6, 2):
            print(f"{key}: {processes.describe(row)}", flush=True)


def run_peers(options: argparse.Namespace, results: Results) -> None:
    """Measure other frameworks."""
    for framework, python in options.peer:
        for asked in product(peers.METHODS[framework], options.threads):
            key = ", ".join([framework, *map(str, asked)])
            for row in results.measure(
                "peers", key, peers.measure, framework, python, *asked, options.seconds
            ):
                print(peers.describe(row), flush=True)


RUN = dict(
    zip(
        PARTS,
        (
            run_rounds,
            run_users,
            run_habits,
            run_profile,
            run_limits,
            run_memory,
            run_start,
            run_overhead,
            run_processes,
            run_peers,
        ),
        strict=True,
    )
)


def peer(text: str) -> tuple[str, str]:
    """Read ``NAME=PYTHON``."""
    name, _, python = text.partition("=")
    if name not in peers.METHODS or not python:
        raise argparse.ArgumentTypeError(
            f"Expected `--peer` to be NAME=PYTHON with a NAME of {', '.join(peers.METHODS)}, but "
            f"got {text!r}. Give the interpreter of an environment that has the framework."
        )
    return name, python


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description="Measure rounds, memory and the time to begin.")
    parser.add_argument(
        "--parts", nargs="+", default=PARTS[:-2], choices=PARTS, help="peers need --peer"
    )
    offered = [name for name in WORKLOADS if name != FROM_FILES]
    parser.add_argument("--workloads", nargs="+", default=offered, choices=WORKLOADS)
    parser.add_argument("--methods", nargs="+", default=None, choices=NAMES)
    parser.add_argument("--engines", nargs="+", default=["auto"])
    parser.add_argument("--chunk-size", type=int, default=None)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--seconds",
        type=float,
        default=3.0,
        help=f"what the rounds of a cell take, if they are at least {cells.LEAST} and at most "
        f"{cells.MOST}",
    )
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    for flag in ("--cuda-graphs", "--overlap-evaluation"):
        parser.add_argument(flag, action="store_true", help="as of FederatedStrategy")
    parser.add_argument(
        "--precision", choices=(SINGLE, "bf16-mixed"), default=SINGLE, help="the package's alone"
    )
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument(
        "--without-onednn", action="store_true", help="the plain loop, which may be faster so"
    )
    parser.add_argument(
        "--no-check",
        dest="check",
        action="store_false",
        help="don't compare the models at the end, in double precision",
    )
    parser.add_argument("--json", type=Path, default=None, help="a file for what is measured")
    parser.add_argument(
        "--resume", action="store_true", help="keep what --json has, and measure the rest"
    )
    options = parser.parse_args(None if arguments is None else list(arguments))
    if ("peers" in options.parts) != bool(options.peer):
        parser.error("--parts peers needs --peer, and --peer needs --parts peers.")
    if options.resume and options.json is None:
        parser.error("--resume needs --json, the file that has what was measured.")
    for quiet in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(quiet).setLevel(logging.ERROR)
    results = Results(options.json, options.resume)
    machine = describe_machine(options.accelerator)
    results.keep("machine", "machine", machine)
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"medians of {cells.LEAST} to {cells.MOST} rounds after {cells.WARM_UP}")
    print("the loop's time over ours; with several threads compare the times by the clock")
    for part in options.parts:
        RUN[part](options, results)
    if results.failed:
        sys.exit("failed: " + "; ".join(results.failed))


if __name__ == "__main__":
    main()
