"""Steps of many clients as CUDA graphs.

On a GPU, the kernels of a small step run faster than a CPU can launch them one by one. A CUDA graph
launches all kernels of a step at once, with the addresses and the numbers that they had when it was
captured. So everything that a step reads and writes stays in place:

- The state of the clients and of their optimizers is in *registers*: copied there when a phase
  begins, and out when it ends.
- Minibatches, with the keys of their random numbers and their numbers of samples, are gathered on
  the device and copied to buffers.
- What a step logs is copied out of the graph's memory, and summed on the device.

There is a graph for each shape: the number of clients that still train, rounded up, and the samples
of their minibatches. Where a step can't be captured it runs as usual, and the log says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.core.tree import Path, Tree, is_expanded
from lightning_pfl.engine.agreement import copy
from lightning_pfl.engine.recording import flatten, rebuild
from lightning_pfl.engine.registers import Layout, Step, StepsInPlace, fill, tensors_of

Result = TypeVar("Result")


class Capture(Protocol):
    """A device's way to capture what a function launches."""

    def __init__(self, device: torch.device) -> None: ...

    def warm_up(self, function: Callable[[], Result]) -> Result:
        """Run a function as it will be captured, so that libraries have what they need."""

    def capture(self, function: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Capture a function, without running what it launches.

        Returns:
            A function that runs it, and the function's result, which holds numbers after that.
        """


class CudaCapture:
    """Captures CUDA graphs, whose intermediate results share memory.

    They may, as one graph runs at a time and what it returns is read before the next.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], Result]) -> Result:
        """Run a function on the stream of the captures."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        return result

    def capture(self, function: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Capture a function; see :class:`Capture`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream):
            result = function()
        return graph.replay, result


CAPTURES: dict[str, type[Capture]] = {"cuda": CudaCapture}
"""By type of device how steps are captured there."""


def require_graphs(device: torch.device) -> None:
    """Raise MisconfigurationException for a device without graphs."""
    if device.type not in CAPTURES:
        raise MisconfigurationException(
            "Expected a GPU of CUDA with FederatedStrategy(cuda_graphs=True), but the Trainer runs "
            f"on {device.type!r}. Use Trainer(accelerator='gpu'), or leave out `cuda_graphs`."
        )


@dataclass(frozen=True)
class Graph:
    """A captured step.

    Attributes:
        replay: Runs it.
        buffers: The tensors of its minibatches.
        after: The layout of the state after it.
        logged: The structure of what it logs.
        values: Its tensors, those of one shape and type as rows of one, in memory that the next
            replay overwrites.
    """

    replay: Callable[[], None]
    buffers: list[Tensor]
    after: Layout
    logged: Any
    values: list[Tensor]


class StepGraphs(StepsInPlace[Graph]):
    """Takes the steps of one chunk of clients after another, and replays those that are captured.

    Args:
        device: The device of all tensors.

    Attributes:
        said: Why some steps aren't captured.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(expanded=True)
        self.said = set[str]()
        self._capture = CAPTURES[device.type](device)

    def __len__(self) -> int:
        """Number of graphs."""
        return len(self._recorded)

    def leave_out(self, why: str) -> None:
        """Say once why steps aren't captured."""
        if why not in self.said:
            self.said.add(why)
            rank_zero_info(f"Steps run without CUDA graphs: {why}.")

    # --- a phase ---

    def load(self, context: int, state: Tree) -> None:
        """Begin a phase: copy the state to the registers."""
        self._context, self._given = context, dict(tensors_of(state))
        self._layout = self._registers.layout_of(state)
        _fill(self._layout, state)

    def unload(self) -> Tree:
        """End a phase: return the state in new memory, but for what clients share as before."""

        def end(path: Path, register: Tensor) -> Tensor:
            old = self._given.get(path)
            # No step writes to a row of many clients.
            shared = old is not None and is_expanded(old) and is_expanded(register)
            return old if shared and old is not None else register.clone()

        leaves = map(end, self._layout.paths, self._layout.registers)
        new: Tree = rebuild(self._layout.tree, leaves)
        self._given = {}
        return new

    # --- how a step is taken ---

    def _replayed(self, recorded: Graph, leaves: list[Tensor]) -> Any:
        for buffer, tensor in zip(recorded.buffers, leaves, strict=True):
            buffer.copy_(tensor)
        recorded.replay()
        self._layout = recorded.after
        rows = [row for value in recorded.values for row in value.clone()]
        return rebuild(recorded.logged, iter(rows))

    def _record(self, function: Step, given: Any, leaves: list[Tensor]) -> tuple[Graph, Any]:
        """Capture a step on the registers, of which nothing runs but on copies, and replay it."""
        if any(register.device.type == "cpu" for register in self._layout.registers):
            raise TypeError("its optimizer counts steps on the host")
        buffers = [tensor.clone() for tensor in leaves]
        inputs = rebuild(given, iter(buffers))
        copies = self.state(copy)
        new, _ = self._capture.warm_up(lambda: function(copies, inputs))
        # With registers for what the step adds, outside of the graph's memory.
        after = self._registers.layout_of(new)

        def step() -> Any:
            new, logged = function(self.state(), inputs)
            if self._registers.layout_of(new) is not after:
                raise TypeError("the entries of its state change")
            # Before registers change on which it may depend.
            values = _in_rows(logged)
            _fill(after, new)
            return logged, values

        replay, (logged, values) = self._capture.capture(step)
        graph = Graph(replay, buffers, after, logged, values)
        return graph, self._replayed(graph, leaves)


def _fill(layout: Layout, state: Tree) -> None:
    """Copy a state to the registers of its layout."""
    fill(zip(layout.registers, (leaf for _, leaf in tensors_of(state)), strict=True), layout)


def _in_rows(logged: Any) -> list[Tensor]:
    """Copy the tensors of a tree to new memory, neighbours of one shape and type as rows of one."""
    values: list[Tensor] = []
    flatten(logged, values)
    kinds = groupby(values, lambda value: (value.shape, value.dtype))
    return [torch.stack(list(alike)) for _, alike in kinds]
