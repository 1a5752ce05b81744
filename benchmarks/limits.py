"""The distance to the arithmetic: a step's products alone, against the plain loop's step.

    python -m benchmarks.limits w1 w2 lstm transformer w4

The operators of one step of the plain loop are written down as they run. Each product of matrices,
convolution, attention or recurrent layer among them is then timed alone, on the same tensors, by
the fastest of torch's operators; so is the optimizer's pass. Tensors are in the caches then, so
that no step of these operators is faster, whoever calls them. The last column is a whole round of
the loop over the same round with such steps: the best ratio that is left to reach, if all
beside the steps took what it takes in the loop.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cells import use_threads
from benchmarks.plain import PlainLoop
from benchmarks.workloads import FROM_FILES, WORKLOADS, Workload
from lightning_pfl.engine.operators import OperatorMode, has_onednn, onednn_product

aten = torch.ops.aten
PRODUCTS = {
    getattr(aten, name).default
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"),
        *("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),
        *(
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        ),
    )
}
"""Operators that compute more than they read."""
OPTIMIZERS = {getattr(aten, name).default for name in ("_fused_sgd_",)}
"""Operators that step all parameters at once."""
SECONDS = 0.05
"""Time in which an operator is repeated."""
HEAD = "                loop's step  products  optimizer  step at best  round at best"
STEPS = 30
"""Steps of the loop that are timed."""


@dataclass(frozen=True)
class Limit:
    """A workload's step and its parts, in seconds of CPU time.

    Attributes:
        step: The loop's step.
        products: Its products alone.
        optimizer: The optimizer's pass over parameters, gradients and momentum alone.
        round: The loop's round by FedAvg, with the evaluation of all clients.
        steps: Steps of such a round, for clients of average size.
    """

    step: float
    products: float
    optimizer: float
    round: float
    steps: int

    def describe(self, name: str) -> str:
        """Write a row of the table."""
        return (
            f"{name:12}{self.step * 1e3:12.3f} ms{self.products * 1e3:7.3f} ms"
            f"{self.optimizer * 1e3:8.3f} ms{self.of_step:14.2f}{self.of_round:15.2f}"
        )

    @property
    def of_step(self) -> float:
        """The loop's step over its products and the optimizer's pass."""
        return self.step / (self.products + self.optimizer)

    @property
    def of_round(self) -> float:
        """The loop's round over one of steps that are products and optimizer alone."""
        rest = self.round - self.steps * self.step
        return self.round / (rest + self.steps * (self.products + self.optimizer))


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class WrittenDown(OperatorMode):
    """Writes down the products and the optimizer's pass that run inside, with their arguments.

    Attributes:
        calls: Operator, arguments and named arguments of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and write it down if it counts."""
        if func in PRODUCTS | OPTIMIZERS:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def measure(workload: Workload, rounds: int = 5) -> Limit:
    """Measure a workload.

    Args:
        workload: The workload.
        rounds: Rounds of the loop that are timed.
    """
    train, test = workload.data()
    torch.manual_seed(0)
    initial = {name: leaf.clone() for name, leaf in workload.module().state_dict().items()}
    loop = PlainLoop(workload, train, test, initial, "FedAvg")
    loop.run_round()
    whole = _quartile(_seconds(loop.run_round) for _ in range(rounds))
    inputs, labels = next(loop._epoch(0, 0))
    optimizer = loop._optimizer(loop.module)
    loop.module.train()

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(loop.module(inputs), labels).backward()
        optimizer.step()

    step()
    alone = _quartile(_seconds(step) for _ in range(STEPS))
    with WrittenDown() as written:
        step()
    steps = [-(-size // workload.batch_size) for size in workload.sizes()]
    return Limit(
        alone,
        sum(fastest(*call) for call in written.calls if call[0] not in OPTIMIZERS),
        sum(fastest(*call) for call in written.calls if call[0] in OPTIMIZERS),
        whole,
        round(workload.cohort * sum(steps) / len(steps)),
    )


def fastest(operator: Any, args: tuple[Any, ...], named: dict[str, Any]) -> float:
    """Return the seconds of the fastest of torch's operators for a product."""
    return min(_repeated(call) for call in ways(operator, args, named))


@torch.no_grad()
def ways(operator: Any, args: tuple[Any, ...], named: dict[str, Any]) -> list[Callable[[], Any]]:
    """List calls that compute a product: the operator's own, and others of torch."""
    args = tuple(arg.detach() if isinstance(arg, Tensor) else arg for arg in args)
    calls: list[Callable[[], Any]] = [lambda: operator(*args, **named)]
    single = all(arg.dtype == torch.float32 for arg in args if isinstance(arg, Tensor))
    if operator is aten.mm.default and single and has_onednn():
        calls.append(lambda: onednn_product(args[0], args[1], None))
    if operator is aten.addmm.default and single and has_onednn() and args[0].ndim == 1:
        calls.append(lambda: onednn_product(args[1], args[2], args[0]))
    if operator in (aten.convolution.default, aten.convolution_backward.default):
        last = tuple(
            arg.contiguous(memory_format=torch.channels_last)
            if isinstance(arg, Tensor) and arg.ndim == 4
            else arg
            for arg in args
        )
        calls.append(lambda: operator(*last, **named))
    return calls


def _seconds(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


@torch.no_grad()
def _repeated(function: Callable[[], Any]) -> float:
    """Time a function over and over."""
    function()
    found: list[float] = []
    while sum(found) < SECONDS or len(found) < 5:
        found.append(_seconds(function))
    return _quartile(found)


def _quartile(seconds: Iterable[float]) -> float:
    """Return the lower quartile, as other programs only add to seconds."""
    found = sorted(seconds)
    return found[len(found) // 4]


def main(arguments: Iterable[str] | None = None) -> None:
    """Print the limits of some workloads."""
    parser = argparse.ArgumentParser(description="Measure the products of a step alone.")
    offered = [name for name in WORKLOADS if name != FROM_FILES]
    parser.add_argument("workloads", nargs="*", default=offered, choices=[*WORKLOADS, []])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(None if arguments is None else list(arguments))
    print(HEAD)
    for name in options.workloads:
        with use_threads(options.threads):
            print(measure(WORKLOADS[name]).describe(name), flush=True)


if __name__ == "__main__":
    main()
