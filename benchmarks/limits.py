"""The distance to the arithmetic: the products and passes of steps alone, against the plain loop's.

    python -m benchmarks.limits w1 w2 lstm transformer w4 --methods FedAvg FedMAP SCAFFOLD
    python -m benchmarks.limits w2 lstm w3 --threads 2

The operators of one round of the plain loop's steps are written down as they run. Each product of
matrices, convolution, attention or recurrent layer among them is then timed alone, on the same
tensors, by the fastest of torch's operators; so are passes over all of a model: the optimizer's,
and those of the method's arithmetic. Losses that a method measures are one forward pass over all of
a client's samples. Tensors are in the caches then, so that no step of these operators is faster,
whoever calls them. The last column is a whole round of the loop over the same round with such
steps: the best ratio that is left to reach, if all beside the steps took what it takes in the loop.
Seconds are the processor's with one thread, and the clock's with several.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.cells import use_threads
from benchmarks.plain import PlainLoop
from benchmarks.workloads import FROM_FILES, WORKLOADS, Workload
from lightning_pfl.engine.operators import OperatorMode, has_onednn, onednn_product
from lightning_pfl.engine.timing import clock

aten = torch.ops.aten
now = partial(clock, torch.device("cpu"))
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
PASSES = "_fused_", "_foreach_"
"""How operators on all tensors of a model begin: the optimizer's, and those of methods."""
METHODS = ("FedAvg", "Ditto", "FedMAP", "PFedMe", "SCAFFOLD")
"""The methods whose loop takes all steps on minibatches of an epoch."""
SECONDS = 0.05
"""Time in which an operator is repeated."""
HEAD = f"{'':24}loop's step   products     passes  step at best  round at best"


@dataclass(frozen=True)
class Limit:
    """A workload's step and its parts, in seconds.

    Attributes:
        step: The loop's step, with its share of losses that are measured.
        products: Its products alone.
        optimizer: The passes over parameters, gradients and momentum alone, of the optimizer and of
            the method.
        round: The loop's round, with the evaluation of all clients.
        steps: Steps of such a round.
    """

    step: float
    products: float
    optimizer: float
    round: float
    steps: int

    def describe(self, name: str) -> str:
        """Write a row of the table."""
        return (
            f"{name:24}{self.step * 1e3:8.3f} ms{self.products * 1e3:8.3f} ms"
            f"{self.optimizer * 1e3:8.3f} ms{self.of_step:14.2f}{self.of_round:15.2f}"
        )

    @property
    def of_step(self) -> float:
        """The loop's step over its products and passes."""
        return self.step / (self.products + self.optimizer)

    @property
    def of_round(self) -> float:
        """The loop's round over one of steps that are products and passes alone."""
        rest = self.round - self.steps * self.step
        return self.round / (rest + self.steps * (self.products + self.optimizer))


def key(workload: str, method: str) -> str:
    """Name a measurement; that of FedAvg by the workload alone."""
    return workload if method == "FedAvg" else f"{workload}, {method}"


Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclass
class Counted:
    """An operator with its first arguments, and how often it ran with such.

    Attributes:
        call: Operator, arguments and named arguments.
        count: The number.
    """

    call: Call
    count: int = 0

    @property
    def is_pass(self) -> bool:
        """Whether it is a pass over a model."""
        return str(self.call[0].overloadpacket.__name__).startswith(PASSES)


class WrittenDown(OperatorMode):
    """Writes down the products and the passes that run inside.

    Attributes:
        calls: Each, by the operator and what its arguments are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, Counted] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and write it down if it counts."""
        one = Counted((func, args, kwargs or {}))
        if func in PRODUCTS or one.is_pass:
            self.calls.setdefault((func, _kind(args), _kind(kwargs or {})), one).count += 1
        return func(*args, **(kwargs or {}))

    def seconds(self, passes: bool) -> float:
        """Sum the seconds of the products or of the passes, each alone."""
        some = [one for one in self.calls.values() if one.is_pass == passes]
        return sum(one.count * fastest(*one.call) for one in some)


def _kind(value: Any) -> Any:
    """Describe arguments by what the time of an operator depends on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    return tuple((name, _kind(v)) for name, v in value.items()) if type(value) is dict else value


class TimedLoop(PlainLoop):
    """The plain loop, which times its steps, and may write down what they call.

    Attributes:
        inside: Seconds of all steps so far, losses that are measured included.
        steps: Their number.
        written: What they call; None to write nothing down.
    """

    inside, steps = 0.0, 0
    written: WrittenDown | None = None
    _measures = False

    def _epoch(self, client: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        written = None if self._measures else self.written
        for minibatch in super()._epoch(client, epoch):
            start = now()
            with written or nullcontext():
                yield minibatch
            self.inside += now() - start
            self.steps += not self._measures

    def _measured(self, client: int) -> Tensor:
        self._measures = True
        found = super()._measured(client)
        self._measures = False
        if self.written is not None:
            self.module.eval()
            with torch.no_grad(), self.written:
                self.module(self._all(client)[0])
            self.module.train()
        return found


def measure(workload: Workload, method: str = "FedAvg", rounds: int = 5) -> Limit:
    """Measure a workload.

    Args:
        workload: The workload.
        method: One of :data:`METHODS`.
        rounds: Rounds of the loop that are timed.
    """
    train, test = workload.data()
    torch.manual_seed(0)
    initial = {name: leaf.clone() for name, leaf in workload.module().state_dict().items()}
    loop = TimedLoop(workload, train, test, initial, method)
    loop.run_round()

    def steps() -> float:
        before, number = loop.inside, loop.steps
        loop.run_round()
        return (loop.inside - before) / (loop.steps - number)

    inside: list[float] = []
    whole = _quartile(_seconds(lambda: inside.append(steps())) for _ in range(rounds))
    loop.steps, loop.written = 0, WrittenDown()
    loop.run_round()
    return Limit(
        _quartile(inside),
        loop.written.seconds(passes=False) / loop.steps,
        loop.written.seconds(passes=True) / loop.steps,
        whole,
        loop.steps,
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
    start = now()
    function()
    return now() - start


@torch.no_grad()
def _repeated(function: Callable[[], Any]) -> float:
    """Time a function over and over."""
    function()
    found, total = list[float](), 0.0
    while total < SECONDS or len(found) < 5:
        found.append(_seconds(function))
        total += found[-1]
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
    parser.add_argument("--methods", nargs="+", default=["FedAvg"], choices=METHODS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(None if arguments is None else list(arguments))
    print(HEAD)
    for name, method in product(options.workloads, options.methods):
        with use_threads(options.threads):
            print(measure(WORKLOADS[name], method).describe(key(name, method)), flush=True)


if __name__ == "__main__":
    main()
