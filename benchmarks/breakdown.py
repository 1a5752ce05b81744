"""Where a round's time goes: FedAvg on each workload, the package beside the plain loop.

    python -m benchmarks.table --parts profile --workloads w1 w2

A few rounds are timed by phase without a profiler, then one runs under ``torch.profiler``, which
says what the operators took. What is left of a phase is Python and the calls of operators; the
profiler's own time isn't part of it.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.profilers import Profiler
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, record_function
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cells import WARM_UP, Splits, make_method
from benchmarks.plain import PlainLoop, use_onednn
from benchmarks.workloads import WORKLOADS, Workload
from lightning_pfl import FederatedStrategy
from lightning_pfl.testing.fitting import quiet_trainer
from lightning_pfl.trainer.progress import profiled

TIMED = 3
"""Rounds that are timed by phase, after those that warm up; the one after them is profiled."""
PHASES = {profiled("training_step"): "training", "aggregation": "aggregation"}
"""The phases by their names in Lightning's profiler; evaluation has a hook at each of its ends."""
PARTS = (
    "products",
    "optimizer",
    "gathering",
    "other operators",
    "Python",
    "aggregation",
    "evaluation",
    "rest",
)
"""What a round's time is divided into; the first five are its training."""
PRODUCT = re.compile(r"::(addmm|mm|bmm|baddbmm|_?linear|.*conv.*|.*rnn.*|.*lstm.*|.*dot_pro)")
GATHER = re.compile(r"::(index|index_select|gather|randperm|take|_unsafe_index)$")
PASS = re.compile(r"::(add|sub|mul|div|addcmul|addcdiv|lerp|copy|zero|fill|clone)_?$")


class Marks(Profiler):
    """Times the phases of each round, and names them in the trace of ``torch.profiler``.

    Attributes:
        rounds: CPU seconds of each round's phases.
        used: CPU seconds of the last round's training for each second by the clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[dict[str, float]] = []
        self.used = 1.0
        self.open: dict[str, tuple[float, float, record_function]] = {}

    def begin(self) -> None:
        """Begin a round."""
        self.rounds.append({})
        self.start("round")

    def start(self, action_name: str) -> None:
        """Begin a phase; others' names aren't of interest."""
        name = PHASES.get(action_name, action_name)
        if name in ("round", "evaluation", *PHASES.values()) and self.rounds:
            mark = record_function(f"phase {name}")
            mark.__enter__()
            self.open[name] = time.process_time(), time.perf_counter(), mark

    def stop(self, action_name: str) -> None:
        """End a phase."""
        name = PHASES.get(action_name, action_name)
        if name in self.open:
            cpu, wall, mark = self.open.pop(name)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            mark.__exit__(None, None, None)
            took = self.rounds[-1]
            took[name] = took.get(name, 0.0) + cpu
            if name == "training":
                self.used = cpu / wall

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body of a ``with`` block as a phase."""
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)


class RoundProfile(L.Callback):
    """Profiles the last of some rounds.

    Args:
        marks: The Trainer's profiler.

    Attributes:
        events: What ``torch.profiler`` recorded.
    """

    def __init__(self, marks: Marks) -> None:
        self.marks, self.number = marks, 0
        self.events: list[Any] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin a round, the last of them under ``torch.profiler``."""
        self.number += 1
        if self.number == trainer.max_epochs:
            self.profile = torch.profiler.profile(
                activities=[ProfilerActivity.CPU], record_shapes=True
            )
            self.profile.__enter__()
        self.marks.begin()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin the evaluation."""
        self.marks.start("evaluation")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the evaluation."""
        self.marks.stop("evaluation")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the round, after the evaluation."""
        self.marks.stop("round")
        if self.number == trainer.max_epochs:
            self.profile.__exit__(None, None, None)
            self.events = list(self.profile.events() or ())


def ours(workload: Workload) -> tuple[Marks, list[Any]]:
    """Run rounds of FedAvg; return their phases, and the last round's events."""
    train, test = workload.data()
    L.seed_everything(0, verbose=False)
    marks = Marks()
    recorder = RoundProfile(marks)
    strategy = FederatedStrategy(make_method("FedAvg", workload), workload.cohort, seed=0)
    trainer = quiet_trainer(
        strategy,
        WARM_UP + TIMED + 1,
        callbacks=[recorder],
        profiler=marks,
        num_sanity_val_steps=0,
    )
    trainer.fit(workload.module(), datamodule=Splits(train, test))
    return marks, recorder.events


def theirs(workload: Workload) -> tuple[Marks, list[Any]]:
    """Do the same with the plain loop, which has no part of its own for the aggregation."""
    train, test = workload.data()
    L.seed_everything(0, verbose=False)
    loop = PlainLoop(workload, train, test, workload.module().state_dict(), "FedAvg")
    marks, evaluate, run = Marks(), loop.evaluate, loop._round

    def evaluated() -> float:
        with marks.phase("evaluation"):
            return evaluate()

    def trained(loop: PlainLoop, cohort: list[int]) -> None:
        with marks.phase("training"):
            run(loop, cohort)

    loop.evaluate, loop._round = evaluated, trained  # type: ignore[method-assign]

    def run_round() -> None:
        marks.begin()
        loop.run_round()
        marks.stop("round")

    for _ in range(WARM_UP + TIMED):
        run_round()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profile:
        run_round()
    return marks, list(profile.events() or ())


def divide(marks: Marks, events: list[Any], shapes: set[tuple[int, ...]]) -> dict[str, float]:
    """Divide a round's CPU seconds.

    Args:
        marks: The phases of each round; the last was profiled.
        events: The last round's events.
        shapes: Shapes of parameters, by which passes over the model are known from others.

    Returns:
        The seconds of each of :data:`PARTS`.
    """
    timed = marks.rounds[WARM_UP:-1]
    seconds = {
        name: median(one.get(name, 0.0) for one in timed)
        for name in ("round", "training", "aggregation", "evaluation")
    }
    found = dict.fromkeys(PARTS, 0.0)
    for event in events:
        if _phase(event) == "training" and not event.name.startswith("phase "):
            found[_part(event, shapes)] += event.self_cpu_time_total / 1e6
    # What an operator took by the clock has waits of a busy machine in it.
    found = {name: took * marks.used for name, took in found.items()}
    found["Python"] = max(0.0, seconds["training"] - sum(found.values()))
    found["aggregation"], found["evaluation"] = seconds["aggregation"], seconds["evaluation"]
    found["rest"] = max(0.0, seconds["round"] - sum(found.values()))
    return found


def _phase(event: Any) -> str:
    """Return the innermost phase that an event is in."""
    while event is not None and not event.name.startswith("phase "):
        event = event.cpu_parent
    return "" if event is None else str(event.name.removeprefix("phase "))


def _part(event: Any, shapes: set[tuple[int, ...]]) -> str:
    """Return the part to which an operator's own time belongs."""
    name = event.name
    if PRODUCT.search(name):
        return "products"
    if GATHER.search(name):
        return "gathering"
    if "_fused_" in name or "_foreach_" in name or "Optimizer" in name:
        return "optimizer"
    first = next((tuple(shape) for shape in event.input_shapes or () if shape), ())
    return "optimizer" if PASS.search(name) and first in shapes else "other operators"


def shapes_of(workload: Workload) -> set[tuple[int, ...]]:
    """Return the shapes that parameters of one client, and of a chunk of them, have."""
    own = [tuple(leaf.shape) for leaf in workload.module().parameters()]
    total = sum(leaf.numel() for leaf in workload.module().parameters())
    found = {*own, (total,)}
    for clients in range(1, workload.cohort + 1):
        found |= {(clients, *shape) for shape in own} | {(clients, total)}
    return found


def operations(workload: Workload) -> float:
    """Count the floating-point operations of the products in a round's training."""
    train, _ = workload.data()
    module: Any = workload.module()
    batch = [field[: workload.batch_size] for field in train.fields]
    # So that recurrent layers and attention are products that the counter knows.
    with (
        use_onednn(False),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        torch.nn.functional.cross_entropy(module(batch[0]), batch[1]).backward()
    samples = sum(workload.sizes()) * workload.cohort / workload.clients
    found: float = counter.get_total_flops() * samples / workload.batch_size
    return found


def peak() -> float:
    """Measure the operations per second of a large product of matrices and of a convolution.

    Returns:
        The larger: MKL multiplies matrices, and oneDNN convolves, which differ by the processor.
    """
    one, other = torch.randn(2, 1536, 1536)
    images, kernels = torch.randn(8, 256, 32, 32), torch.randn(256, 256, 3, 3)
    products: tuple[tuple[Callable[[], Tensor], float], ...] = (
        (lambda: one @ other, 2 * 1536**3),
        (lambda: torch.conv2d(images, kernels, padding=1), 2 * 8 * 32**2 * 256**2 * 9),
    )
    return max(count / min(_timed(run) for _ in range(8)) for run, count in products)


def _timed(function: Callable[[], Tensor]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def measure(name: str) -> dict[str, Any]:
    """Divide a round of both sides, with one thread.

    Returns:
        ``ours`` and ``theirs``, the seconds of each of :data:`PARTS`; ``operations``, of the
        products in a round's training; ``peak``, operations per second.
    """
    workload = WORKLOADS[name]
    if workload.sigma:  # rounds of other clients of other sizes can't be compared
        workload = replace(workload, clients=workload.cohort)
    shapes = shapes_of(workload)
    return {
        "ours": divide(*ours(workload), shapes),
        "theirs": divide(*theirs(workload), shapes),
        "operations": operations(workload),
        "peak": peak(),
    }


def describe(name: str, row: dict[str, Any]) -> str:
    """Write both sides in two lines."""
    lines = []
    for side in ("ours", "theirs"):
        parts = "  ".join(f"{part} {1e3 * took:.1f}" for part, took in row[side].items())
        lines.append(f"{name:12}{side:8}{1e3 * sum(row[side].values()):8.1f} ms: {parts}")
    limit = 1e3 * row["operations"] / row["peak"]
    return "\n".join([*lines, f"{name:12}{'limit':8}{limit:8.1f} ms"])
