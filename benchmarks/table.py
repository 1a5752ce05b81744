"""Whole rounds of six methods against a careful plain loop, on networks of several kinds.

    python -m benchmarks.table                          every cell of the page
    python -m benchmarks.table --workloads w2 --methods FedAvg --engines auto sequential
    bash benchmarks/gpu.sh                              on a GPU, with the tests that need one

In every cell the rounds of both sides alternate in one process, and a ratio above 1 means that the
package is faster: the quotient of the medians of CPU seconds (and of wall-clock seconds) per round
with the evaluation of all clients, after rounds that warm up. Both sides draw the same cohorts and
minibatches, and a cell fails if they don't have the same model after the first one.
"""

import argparse
import json
import logging
import math
import platform
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch

from benchmarks.plain import METHODS as LOOPS
from benchmarks.plain import PlainLoop
from benchmarks.workloads import WORKLOADS, Workload
from lightning_pfl import FederatedStrategy, methods
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.methods.base import Method

WARM_UP = 3
"""Rounds before the clock counts: the engine's probe and its recordings."""
APART = 0.02
"""Largest distance of the two sides' models after a round, relative to the way from the initial
model. Rounding that switches one ReLU makes 0.7 % on the wide network; later it grows as in any
training, on LeNet to 2 % in six rounds."""


def make_method(name: str, workload: Workload) -> Method:
    """Make a method with the settings of the plain loop."""
    if name.startswith("FedRep"):
        return methods.FedRep(head_epochs=workload.head_epochs, body_epochs=1)
    made: Method = getattr(methods, name)()
    return made


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        cpu, wall: The plain loop's seconds per round over the package's.
        seconds: The package's wall-clock seconds per round.
        first: Wall-clock seconds of its first round.
        choice: The engine that ran, with its reason.
        apart: Distance of the two models after the first round, see :data:`APART`.
        memory: Largest resident memory of the process so far, in MiB; on a GPU, of its memory.
    """

    workload: str
    method: str
    engine: str
    threads: int
    cpu: float
    wall: float
    seconds: float
    first: float
    choice: str
    apart: float
    memory: int


class InTurns(FederatedCallback):
    """Times each round with its evaluation, then a round of the plain loop, ``loop``.

    Attributes:
        compare: Returns the distance of the two models.
        apart: That distance after the first round.
    """

    loop: Callable[[], Any]
    compare: Callable[[], float]
    apart: float

    def __init__(self) -> None:
        self.ours: list[tuple[float, float]] = []
        self.theirs: list[tuple[float, float]] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the start of the round."""
        self.start = _now()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the end of the round, after the evaluation, and run the loop's."""
        self.ours.append(_since(self.start))
        start = _now()
        self.loop()
        self.theirs.append(_since(start))
        if len(self.theirs) == 1:
            self.apart = self.compare()


def _now() -> tuple[float, float]:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # what was launched belongs to the side that launched it
    return time.process_time(), time.perf_counter()


def _since(start: tuple[float, float]) -> tuple[float, float]:
    cpu, wall = _now()
    return cpu - start[0], wall - start[1]


def measure(
    name: str,
    method: str,
    engine: Any,
    rounds: int,
    threads: int,
    accelerator: Any = "cpu",
    **settings: Any,
) -> Cell:
    """Measure one cell.

    Args:
        name: A key of ``WORKLOADS``.
        method: A key of ``plain.METHODS``.
        engine: The strategy's ``engine``.
        rounds: Rounds that count.
        threads: Threads within an operation.
        accelerator: The Trainer's; the plain loop runs on the same device.
        settings: Further settings of the strategy.

    Raises:
        AssertionError: If both sides have different models after a round.
    """
    workload = WORKLOADS[name]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    train, test = workload.data()
    L.seed_everything(0, verbose=False)
    module = workload.make()
    initial = {key: leaf.clone() for key, leaf in module.state_dict().items()}
    strategy = FederatedStrategy(
        make_method(method, workload), workload.cohort, engine=engine, seed=0, **settings
    )
    clock = InTurns()
    try:
        trainer = L.Trainer(
            accelerator=accelerator,
            devices=1,
            max_epochs=WARM_UP + rounds,
            strategy=strategy,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        device = trainer.strategy.root_device
        with torch.enable_grad():
            loop = PlainLoop(workload, train, test, initial, method, device=device)
        clock.loop = torch.enable_grad()(loop.run_round)
        clock.compare = lambda: _apart(loop, initial, strategy.federation.server["model"])
        trainer.fit(module, train_dataloaders=train, val_dataloaders=test)
    finally:
        torch.set_num_threads(before)
    ours, theirs = clock.ours[WARM_UP:], clock.theirs[WARM_UP:]
    federation = strategy.federation
    apart = clock.apart
    assert apart < APART, f"{name}, {method}, {engine}: the models differ by {apart:.1%}"
    return Cell(
        name,
        method,
        engine,
        threads,
        median(cpu for cpu, _ in theirs) / median(cpu for cpu, _ in ours),
        median(wall for _, wall in theirs) / median(wall for _, wall in ours),
        median(wall for _, wall in ours),
        clock.ours[0][1],
        federation.engine.choices["training_step"],
        apart,
        _memory(),
    )


def _memory() -> int:
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() // 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _apart(loop: PlainLoop, initial: dict[str, torch.Tensor], model: dict[str, Any]) -> float:
    """Return the distance of the servers' models, relative to the way that they went."""
    apart = way = 0.0
    for key, theirs in zip(loop.names, loop.server, strict=True):
        if key in model and theirs.is_floating_point():
            apart += float((theirs.cpu() - model[key].cpu()).square().sum())
            way += float((theirs.cpu() - initial[key]).square().sum())
    return math.sqrt(apart / way)


def main(arguments: Iterable[str] | None = None) -> None:
    """Print the table, and write its cells as JSON if a path is given."""
    parser = argparse.ArgumentParser(description="Compare whole rounds with a plain loop.")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--methods", nargs="+", default=list(LOOPS), choices=LOOPS)
    parser.add_argument("--engines", nargs="+", default=["auto"])
    parser.add_argument("--chunk-size", type=int, default=None)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(None if arguments is None else list(arguments))
    for quiet in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(quiet).setLevel(logging.ERROR)
    machine = platform.machine() if options.accelerator == "cpu" else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, lightning {L.__version__}, {machine}, ", end="")
    print(f"{options.rounds} rounds after {WARM_UP}; the loop's time over ours")
    print(
        f"{'workload':12}{'method':16}{'engine':12}{'threads':>7}{'CPU':>7}{'wall':>7}"
        f"{'s/round':>9}{'first':>7}{'MiB':>6}  engine that ran"
    )
    cells = []
    for threads in options.threads:
        for name in options.workloads:
            for method in options.methods:
                for engine in options.engines:
                    cell = measure(
                        name, method, engine, options.rounds, threads,
                        options.accelerator, chunk_size=options.chunk_size,
                    )  # fmt: skip
                    cells.append(cell)
                    if options.json is not None:  # after each: what was measured isn't lost
                        options.json.write_text(json.dumps([asdict(c) for c in cells], indent=1))
                    print(
                        f"{name:12}{method:16}{engine:12}{threads:7}{cell.cpu:7.2f}{cell.wall:7.2f}"
                        f"{cell.seconds:9.3f}{cell.first:7.2f}{cell.memory:6}  {cell.choice[:60]}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
