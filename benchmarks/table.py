"""Whole rounds of every method against a careful plain loop, memory, and the time to begin.

    python -m benchmarks.table                          every row of the page
    python -m benchmarks.table --parts rounds --workloads w2 --methods FedAvg --threads 1 2
    python -m benchmarks.table --parts rounds --workloads w1-fashion --methods FedAvg FedRep
    bash benchmarks/gpu.sh                              on a GPU, with the tests that need one

In every cell the rounds of both sides alternate in one process, and a ratio above 1 means that the
package is faster: the quotient of the medians of CPU seconds (and of wall-clock seconds) per round
with the evaluation of all clients, after rounds that warm up. Both sides draw the same cohorts and
minibatches, and a cell fails if they don't have the same models at the end; see :func:`check`.
Methods without a plain loop have the package's seconds alone.
"""

import argparse
import json
import logging
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import memory, overhead
from benchmarks.plain import METHODS as LOOPS
from benchmarks.plain import PlainLoop
from benchmarks.workloads import FROM_FILES, WORKLOADS, Workload
from lightning_pfl import FederatedStrategy, methods
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.federation.evaluate import personal_models
from lightning_pfl.methods.base import Method
from lightning_pfl.testing.fitting import quiet_trainer

WARM_UP = 3
"""Rounds before the clock counts: the engine's probe and its recordings."""
APART = 0.02
"""Largest distance of the two sides' models after the first round, relative to the way from the
initial models, in single precision: rounding that switches one ReLU makes 0.7 % on the wide
network. Later it grows as in any training, by which nothing is found: LeNet's is 2.6 % after eight
rounds of FedAvg, where the same in double precision is 4e-14."""
SAME = 1e-9
"""The same bound in double precision, at the end of some rounds: far above rounding, and far below
what another order of samples or a wrong factor makes."""
CHECKED_ROUNDS = 3
EVERY_METHOD = ("w1", "w2")
"""Workloads on which all methods run by default; on the others those with a plain loop."""
NOT_HERE = {
    "HeteroFL": "it needs narrower networks",
    "LinearFedRep": "it is for linear models",
    "MOCHA": "it is for linear models",
    "SheafFMTL": "its restriction maps take more memory than there is",
}
NAMES = [*LOOPS, *(name for name in methods.__all__ if name not in (*LOOPS, *NOT_HERE))]
PUBLIC = 40
"""Public samples of methods that need some."""


def make_method(name: str, workload: Workload) -> Method:
    """Make a method with the settings of the plain loop."""
    if name.startswith("FedRep"):
        return methods.FedRep(head_epochs=workload.head_epochs, body_epochs=1)
    settings: dict[str, Any] = {}
    if name in ("FedU", "GTVMin", "HomologicalConstraints"):
        settings["graph"] = "ring"
    if name == "ClusterOracle":
        settings["clusters"] = [client % 2 for client in range(workload.clients)]
    if name == "FedMD":
        settings["public_samples"] = PUBLIC
    made: Method = getattr(methods, name)(**settings)
    return made


class Splits(L.LightningDataModule):
    """The clients' samples, and the first of them as public ones."""

    def __init__(self, train: FederatedTensorDataset, test: FederatedTensorDataset) -> None:
        super().__init__()
        self.train, self.test = train, test

    def train_dataloader(self) -> Any:
        """Return the training split."""
        return self.train

    def val_dataloader(self) -> Any:
        """Return the test split."""
        return self.test

    def public_dataloader(self) -> Any:
        """Return public samples."""
        fields = [field[:PUBLIC] for field in self.train.fields]
        return DataLoader(TensorDataset(*fields), batch_size=10)


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        cpu, wall: The plain loop's seconds per round over the package's; NaN without a loop.
        seconds, cpu_seconds: The package's wall-clock and CPU seconds per round.
        first: Wall-clock seconds of its first round.
        choice: The engine that ran, with its reason.
        apart: Distance of the two sides' models after the first round, see :data:`APART`.
        memory: Largest memory of a GPU, in MiB; 0 on a CPU, see :mod:`benchmarks.memory`.
    """

    workload: str
    method: str
    engine: str
    threads: int
    cpu: float
    wall: float
    seconds: float
    cpu_seconds: float
    first: float
    choice: str
    apart: float
    memory: int


class InTurns(FederatedCallback):
    """Times each round with its evaluation, then a round of the plain loop, ``loop``, if any.

    Attributes:
        compare: Returns the distance of the two sides' models.
        apart: That distance after each round that is compared.
    """

    loop: Callable[[], Any] | None = None
    compare: Callable[[], float]

    def __init__(self, compared: Iterable[int]) -> None:
        self.ours: list[tuple[float, float]] = []
        self.theirs: list[tuple[float, float]] = []
        self.compared, self.apart = set(compared), list[float]()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the start of the round."""
        self.start = _now()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the end of the round, after the evaluation, and run the loop's."""
        self.ours.append(_since(self.start))
        if self.loop is None:
            return
        start = _now()
        self.loop()
        self.theirs.append(_since(start))
        if len(self.theirs) in self.compared:
            self.apart.append(self.compare())


def _now() -> tuple[float, float]:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # what was launched belongs to the side that launched it
    return time.process_time(), time.perf_counter()


def _since(start: tuple[float, float]) -> tuple[float, float]:
    cpu, wall = _now()
    return cpu - start[0], wall - start[1]


def run(
    workload: Workload,
    method: str,
    engine: Any,
    rounds: int,
    compared: Iterable[int],
    accelerator: Any = "cpu",
    onednn: bool = True,
    **settings: Any,
) -> tuple[InTurns, FederatedStrategy]:
    """Run rounds of both sides in turns.

    Args:
        workload: What trains.
        method: A method's name, or a key of ``plain.METHODS``.
        engine: The strategy's ``engine``.
        rounds: Rounds.
        compared: Numbers of rounds, from 1, after which models are compared.
        accelerator: The Trainer's; the plain loop runs on the same device.
        onednn: Whether the plain loop uses oneDNN.
        settings: Further settings of the strategy.
    """
    train, test = workload.data()
    L.seed_everything(0, verbose=False)
    module = workload.module()
    initial = {key: leaf.clone() for key, leaf in module.state_dict().items()}
    strategy = FederatedStrategy(
        make_method(method, workload), workload.cohort, engine=engine, seed=0, **settings
    )
    clock = InTurns(compared)
    trainer = quiet_trainer(
        strategy,
        rounds,
        accelerator=accelerator,
        devices=1,
        callbacks=[clock],
        num_sanity_val_steps=0,
    )
    if method in LOOPS:
        with torch.enable_grad():
            device = trainer.strategy.root_device
            loop = PlainLoop(workload, train, test, initial, method, device=device, onednn=onednn)
        clock.loop = torch.enable_grad()(loop.run_round)
        clock.compare = lambda: _apart(loop, initial, strategy)
    trainer.fit(module, datamodule=Splits(train, test))
    return clock, strategy


def measure(
    name: str, method: str, engine: Any, rounds: int, threads: int, **settings: Any
) -> Cell:
    """Measure one cell.

    Args:
        name: A key of ``WORKLOADS``.
        method: A method's name, or a key of ``plain.METHODS``.
        engine: The strategy's ``engine``.
        rounds: Rounds that count.
        threads: Threads within an operation.
        settings: Further arguments of :func:`run`.

    Raises:
        AssertionError: If both sides have different models after a round.
    """
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    with _threads(threads):
        clock, strategy = run(WORKLOADS[name], method, engine, WARM_UP + rounds, [1], **settings)
    apart = clock.apart[0] if clock.apart else 0.0
    assert apart < APART, f"{name}, {method}, {engine}: the models differ by {apart:.1%}"
    ours, theirs = clock.ours[WARM_UP:], clock.theirs[WARM_UP:]
    cpu, wall = (median(one[which] for one in ours) for which in (0, 1))
    loop = [median(one[which] for one in theirs) if theirs else math.nan for which in (0, 1)]
    return Cell(
        name,
        method,
        engine,
        threads,
        loop[0] / cpu,
        loop[1] / wall,
        wall,
        cpu,
        clock.ours[0][1],
        strategy.federation.engine.choices["training_step"],
        apart,
        torch.cuda.max_memory_allocated() // 2**20 if torch.cuda.is_initialized() else 0,
    )


def check(name: str, method: str, engine: Any, **settings: Any) -> float:
    """Compare the models of both sides at the end of some rounds in double precision.

    In single precision, rounding grows from round to round as any other change of the initial
    model does, and hides a difference in the arithmetic.

    Args:
        name: A key of ``WORKLOADS``.
        method: A key of ``plain.METHODS``.
        engine: The strategy's ``engine``.
        settings: Further arguments of :func:`run`.

    Returns:
        Their distance, relative to the way from the initial models.

    Raises:
        AssertionError: If it isn't below :data:`SAME`.
    """
    workload = replace(WORKLOADS[name], dtype=torch.float64)
    clock, _ = run(workload, method, engine, CHECKED_ROUNDS, [CHECKED_ROUNDS], **settings)
    apart = clock.apart[0]
    assert apart < SAME, (
        f"{name}, {method}, {engine}: after {CHECKED_ROUNDS} rounds in double precision the models "
        f"differ by {apart:.1e}"
    )
    return apart


class _threads:
    """Sets torch's threads inside a ``with`` block."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.threads)

    def __exit__(self, *error: object) -> None:
        torch.set_num_threads(self.before)


def _apart(loop: PlainLoop, initial: dict[str, torch.Tensor], strategy: FederatedStrategy) -> float:
    """Return the distance of the server's and all clients' models, relative to their way."""
    federation = strategy.federation
    pairs = [(dict(zip(loop.names, loop.server, strict=True)), federation.shared_model())]
    if loop.personal:
        models = personal_models(federation, torch.arange(federation.num_clients))
        for client in range(federation.num_clients):
            ours = {name: leaf[client] for name, leaf in models.items()}
            pairs.append((loop.personal_model(client), ours))
    apart = way = 0.0
    for theirs, ours in pairs:
        for key, leaf in theirs.items():
            if key in ours and leaf.is_floating_point():
                apart += float((leaf.cpu() - ours[key].cpu()).double().square().sum())
                way += float((leaf.cpu() - initial[key]).double().square().sum())
    return math.sqrt(apart / way)


# --- the command ----------------------------------------------------------------------------------

PARTS = ("rounds", "memory", "start", "overhead")


def cells(options: argparse.Namespace) -> Iterator[tuple[int, str, str, str]]:
    """Iterate over threads, workload, method and engine of the cells to measure."""
    for threads in options.threads:
        for name in options.workloads:
            default = NAMES if name in EVERY_METHOD else list(LOOPS)
            for method in options.methods or default:
                for engine in options.engines:
                    yield threads, name, method, engine


def print_rounds(options: argparse.Namespace) -> None:
    """Print the table, and write its cells as JSON if a path is given."""
    print(
        f"{'workload':12}{'method':24}{'engine':12}{'threads':>7}{'CPU':>7}{'wall':>7}"
        f"{'CPU s':>8}{'s/round':>9}{'first':>7}{'MiB':>6}  engine that ran"
    )
    found: list[Cell] = []
    settings: dict[str, Any] = {
        "accelerator": options.accelerator,
        "onednn": not options.without_onednn,
        "chunk_size": options.chunk_size,
    }
    checked: set[tuple[str, str, str]] = set()
    for threads, name, method, engine in cells(options):
        cell = measure(name, method, engine, options.rounds, threads, **settings)
        found.append(cell)
        if options.json is not None:  # after each: what was measured isn't lost
            options.json.write_text(json.dumps([asdict(c) for c in found], indent=1))
        print(
            f"{name:12}{method:24}{engine:12}{threads:7}{cell.cpu:7.2f}{cell.wall:7.2f}"
            f"{cell.cpu_seconds:8.3f}{cell.seconds:9.3f}{cell.first:7.2f}{cell.memory:6}  "
            f"{cell.choice[:60]}",
            flush=True,
        )
        if options.check and method in LOOPS and (name, method, engine) not in checked:
            checked.add((name, method, engine))
            check(name, method, engine, **settings)
    if not options.methods and set(options.workloads) & set(EVERY_METHOD):
        print("without a cell:", "; ".join(f"{name}: {why}" for name, why in NOT_HERE.items()))


def main(arguments: Iterable[str] | None = None) -> None:
    """Print the parts that are asked for."""
    parser = argparse.ArgumentParser(description="Measure rounds, memory and the time to begin.")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    offered = [name for name in WORKLOADS if name != FROM_FILES]
    parser.add_argument("--workloads", nargs="+", default=offered, choices=WORKLOADS)
    parser.add_argument("--methods", nargs="+", default=None, choices=NAMES)
    parser.add_argument("--engines", nargs="+", default=["auto"])
    parser.add_argument("--chunk-size", type=int, default=None)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument(
        "--without-onednn", action="store_true", help="the plain loop, which may be faster so"
    )
    parser.add_argument(
        "--no-check",
        dest="check",
        action="store_false",
        help="don't compare the models at the end, in double precision",
    )
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(None if arguments is None else list(arguments))
    for quiet in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(quiet).setLevel(logging.ERROR)
    machine = platform.machine() if options.accelerator == "cpu" else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, lightning {L.__version__}, {machine}, ", end="")
    print(f"{options.rounds} rounds after {WARM_UP}; the loop's time over ours")
    if "rounds" in options.parts:
        try:
            print_rounds(options)
        except FileNotFoundError as missing:
            parser.exit(1, f"{missing}\n")
    if "memory" in options.parts:
        memory.print_rows()
    if "start" in options.parts:
        overhead.print_start()
    if "overhead" in options.parts:
        overhead.print_overhead()


if __name__ == "__main__":
    main()
