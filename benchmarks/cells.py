"""One cell of the table: whole rounds of a method against a careful plain loop, in turns.

In every cell the rounds of both sides alternate in one process, and a ratio above 1 means that the
package is faster: the quotient of the medians of CPU seconds (with several threads of seconds by
the clock) per round with the evaluation of all clients, after rounds that warm up. Both sides draw
the same cohorts and minibatches, and a cell fails if they don't have the same models at the end;
see :func:`check`. Methods without a plain loop have the package's seconds alone.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.plain import METHODS as LOOPS
from benchmarks.plain import PlainLoop
from benchmarks.workloads import WORKLOADS, Workload
from lightning_pfl import FederatedStrategy, methods
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.federation.evaluate import personal_models
from lightning_pfl.methods.base import Method
from lightning_pfl.testing.fitting import quiet_trainer

WARM_UP, MOST = 2, 9
"""Rounds before the clock counts, which have the engine's probe and its recordings, and the most
that count, as many as take the seconds that are asked for. Without another side, whose ratio needs
more, one round warms up, one may do, and a third of the seconds."""
LEAST = 4
APART = 0.02
"""Largest distance of the two sides' models after the first round, relative to the way from the
initial models, in single precision: the median over the server's and the clients' models. Rounding
that switches one unit takes one client's model far off (10 % on LeNet with PFedMe, where those of
the others are 2e-6 off), and the mean by about 1 %; another order of samples takes all of them off,
by 3 to 80 %. Later it grows as in any training, by which nothing is found: LeNet's is 2.6 % after
eight rounds of FedAvg, where the same in double precision is 4e-14."""
SAME = 1e-9
"""The same bound in double precision, at the end of some rounds: far above rounding, and far below
what another order of samples or a wrong factor makes."""
CHECKED_ROUNDS = 3
SINGLE = "32-true"
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
        cpu, wall: The plain loop's seconds per round over the package's; None without a loop.
        seconds, cpu_seconds: The package's wall-clock and CPU seconds per round.
        first: Wall-clock seconds of its first round.
        rounds: Rounds that the medians are of.
        choice: The engine that ran, with its reason.
        apart: Distance of the two sides' models after the first round, see :data:`APART`.
        memory: Largest memory of a GPU, in MiB; 0 on a CPU, see :mod:`benchmarks.memory`.
        cuda_graphs: Whether the package's steps were CUDA graphs.
        overlap: Whether its evaluations overlapped with training.
        precision: The package's; the loop is in single precision.
    """

    workload: str
    method: str
    engine: str
    threads: int
    cpu: float | None
    wall: float | None
    seconds: float
    cpu_seconds: float
    first: float
    rounds: int
    choice: str
    apart: float
    memory: int
    cuda_graphs: bool = False
    precision: str = SINGLE
    overlap: bool = False

    @property
    def ratio(self) -> float | None:
        """By CPU time for one thread; with several, whose waits count as CPU time, by the clock."""
        return self.cpu if self.threads == 1 else self.wall


class InTurns(FederatedCallback):
    """Times each round with its evaluation, then runs a round of the other side, if there is one.

    Args:
        least: The fit ends when the rounds after the warm-up have taken that many seconds.
        compared: Numbers of rounds, from 1, after which models are compared.

    Attributes:
        other: Runs a round of the other side.
        compare: Returns the distance of each of the two sides' models.
        way: Returns how far the server's model is from the first, if that is of interest.
        ours, theirs: CPU and wall-clock seconds of each round.
        apart: The distances of all models after each round that is compared.
        first_way: The way after the first round.
    """

    other: Callable[[], Any] | None = None
    compare: Callable[[], list[float]]
    way: Callable[[], float] | None = None
    first_way = 0.0

    def __init__(self, least: float, compared: Iterable[int]) -> None:
        self.ours: list[tuple[float, float]] = []
        self.theirs: list[tuple[float, float]] = []
        self.least, self.compared, self.apart = least, set(compared), list[list[float]]()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the start of the round."""
        self.start = _now()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the end of the round, after the evaluation, and run the other side's."""
        self.ours.append(_since(self.start))
        if len(self.ours) == 1 and self.way is not None:
            self.first_way = self.way()
        if self.other is not None:
            start = _now()
            self.other()
            self.theirs.append(_since(start))
            if len(self.theirs) in self.compared:
                self.apart.append(self.compare())
        counted = [*self.ours[self.warm_up :], *self.theirs[self.warm_up :]]
        enough = sum(wall for _, wall in counted) >= (self.least if self.other else self.least / 3)
        at_least = self.warm_up + (LEAST if self.other else 1)
        trainer.should_stop = enough and len(self.ours) >= at_least

    @property
    def warm_up(self) -> int:
        """Rounds that don't count."""
        return WARM_UP if self.other else 1


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
    compared: Iterable[int] = (),
    least: float = math.inf,
    accelerator: Any = "cpu",
    onednn: bool = True,
    other: Callable[[], Any] | None = None,
    precision: str = SINGLE,
    **settings: Any,
) -> tuple[InTurns, FederatedStrategy]:
    """Run rounds of both sides in turns.

    Args:
        workload: What trains.
        method: A method's name, or a key of ``plain.METHODS``.
        engine: The strategy's ``engine``.
        rounds: Largest number of rounds.
        compared: Numbers of rounds, from 1, after which models are compared.
        least: The fit ends when the rounds after the warm-up have taken that many seconds.
        accelerator: The Trainer's; the plain loop runs on the same device.
        onednn: Whether the plain loop uses oneDNN.
        other: Runs a round of the other side, in the place of the plain loop.
        precision: The Trainer's.
        settings: Further settings of the strategy.
    """
    train, test = workload.data()
    L.seed_everything(0, verbose=False)
    module = workload.module()
    initial = {key: leaf.clone() for key, leaf in module.state_dict().items()}
    strategy = FederatedStrategy(
        make_method(method, workload), workload.cohort, engine=engine, seed=0, **settings
    )
    clock = InTurns(least, compared)
    trainer = quiet_trainer(
        strategy,
        rounds,
        accelerator=accelerator,
        devices=1,
        precision=precision,
        callbacks=[clock],
        num_sanity_val_steps=0,
    )
    if other is not None:
        clock.other, clock.way = other, lambda: _way(initial, strategy)
    elif method in LOOPS:
        with torch.enable_grad():
            device = trainer.strategy.root_device
            loop = PlainLoop(workload, train, test, initial, method, device=device, onednn=onednn)
        clock.other = torch.enable_grad()(loop.run_round)
        clock.compare = lambda: _apart(loop, initial, strategy)
    trainer.fit(module, datamodule=Splits(train, test))
    return clock, strategy


def measure(
    name: str, method: str, engine: Any, threads: int, least: float = 3.0, **settings: Any
) -> Cell:
    """Measure one cell.

    Args:
        name: A key of ``WORKLOADS``.
        method: A method's name, or a key of ``plain.METHODS``.
        engine: The strategy's ``engine``.
        threads: Threads within an operation.
        least: Seconds that both sides' rounds which count take, if :data:`MOST` take as long.
        settings: Further arguments of :func:`run`.

    Raises:
        AssertionError: If both sides have different models after a round.
    """
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    precision = settings.get("precision", SINGLE)
    # In other precision the loop isn't to be met.
    compared = [1] if precision == SINGLE else []
    with use_threads(threads):
        clock, strategy = run(
            WORKLOADS[name], method, engine, WARM_UP + MOST, compared, least, **settings
        )
    apart = median(clock.apart[0]) if clock.apart else 0.0
    assert apart < APART, f"{name}, {method}, {engine}: the models differ by {apart:.1%}"
    ours, theirs = clock.ours[clock.warm_up :], clock.theirs[clock.warm_up :]
    cpu, wall = (median(one[which] for one in ours) for which in (0, 1))
    return Cell(
        name,
        method,
        engine,
        threads,
        median(one[0] for one in theirs) / cpu if theirs else None,
        median(one[1] for one in theirs) / wall if theirs else None,
        wall,
        cpu,
        clock.ours[0][1],
        len(ours),
        strategy.federation.engine.choices["training_step"],
        apart,
        torch.cuda.max_memory_allocated() // 2**20 if torch.cuda.is_initialized() else 0,
        settings.get("cuda_graphs", False),
        precision,
        settings.get("overlap_evaluation", False),
    )


def small(workload: Workload) -> Workload:
    """Return a workload with fewer clients and steps, in double precision, for :func:`check`."""
    if workload.read is not None:  # whose clients are those of its files
        return replace(workload, dtype=torch.float64)
    return replace(
        workload,
        dtype=torch.float64,
        clients=6,
        cohort=3,
        samples=min(workload.samples, 4 * workload.batch_size),
        test_samples=min(workload.test_samples, 10),
        head_epochs=2,
    )


def check(name: str, method: str, engine: Any, **settings: Any) -> float:
    """Compare the models of both sides after some rounds of few clients in double precision.

    In single precision, rounding grows from round to round as any other change of the initial
    model does, and hides a difference in the arithmetic.

    Args:
        name: A key of ``WORKLOADS``.
        method: A key of ``plain.METHODS``.
        engine: The strategy's ``engine``.
        settings: Further arguments of :func:`run`.

    Returns:
        The largest distance of a model, relative to its way from the initial one.

    Raises:
        AssertionError: If it isn't below :data:`SAME`.
    """
    return check_workload(name, WORKLOADS[name], method, engine, **settings)


def check_workload(
    name: str, workload: Workload, method: str, engine: Any, **settings: Any
) -> float:
    """Do the same for a workload of whichever name."""
    clock, _ = run(small(workload), method, engine, CHECKED_ROUNDS, [CHECKED_ROUNDS], **settings)
    apart = max(clock.apart[0])
    assert apart < SAME, (
        f"{name}, {method}, {engine}: after {CHECKED_ROUNDS} rounds in double precision the models "
        f"differ by {apart:.1e}"
    )
    return apart


@contextmanager
def use_threads(threads: int) -> Iterator[None]:
    """Let operators use some threads inside a ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _way(initial: dict[str, torch.Tensor], strategy: FederatedStrategy) -> float:
    """Return how far the server's parameters are from the initial ones."""
    shared = strategy.federation.shared_model()
    apart = [shared[key].cpu() - leaf for key, leaf in initial.items() if key in shared]
    return math.sqrt(sum(float(part.double().square().sum()) for part in apart))


def _apart(
    loop: PlainLoop, initial: dict[str, torch.Tensor], strategy: FederatedStrategy
) -> list[float]:
    """Return the distances of the server's and the clients' models that moved, over their ways."""
    federation = strategy.federation
    pairs = [(dict(zip(loop.names, loop.server, strict=True)), federation.shared_model())]
    if loop.personal:
        models = personal_models(federation, torch.arange(federation.num_clients))
        for client in range(federation.num_clients):
            ours = {name: leaf[client] for name, leaf in models.items()}
            pairs.append((loop.personal_model(client), ours))
    found = []
    for theirs, ours in pairs:
        apart = way = 0.0
        for key, leaf in theirs.items():
            if key in ours and leaf.is_floating_point():
                apart += float((leaf.cpu() - ours[key].cpu()).double().square().sum())
                way += float((leaf.cpu() - initial[key]).double().square().sum())
        if apart > 0 or way > 0:
            found.append(math.sqrt(apart / way) if way > 0 else math.inf)
    return found
