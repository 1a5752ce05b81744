"""Steps of many clients as CUDA graphs.

On a GPU, the kernels of a small step run faster than a CPU can launch them one by one. A CUDA graph
launches all kernels of a step at once, with the addresses and the numbers that they had when it was
captured. So everything that a step reads and writes stays in place:

- The state of the clients and of their optimizers is in *registers*: copied there when a phase
  begins, and out when it ends.
- Minibatches, with the keys of their random numbers and their numbers of samples, are gathered on
  the device and copied to buffers.
- What a step logs is copied out of the graph's memory, and summed on the device.

There is a graph for each shape: the number of clients that still train, and the samples of their
minibatches. Where a step can't be captured it runs as usual, and the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.core.tree import Path, Tree, is_expanded
from lightning_pfl.engine import trace
from lightning_pfl.engine.recording import flatten, rebuild
from lightning_pfl.engine.registers import Layout, Registers, fill, register_for, tensors_of
from lightning_pfl.engine.trace import Numbers, agree, describe

Result = TypeVar("Result")
Step = Callable[[Tree, Any], tuple[Tree, Any]]
"""A step: of a state and minibatches; returns the new state and a tree of tensors to log."""
log = logging.getLogger(__name__)


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


class StepGraphs:
    """Takes the steps of one chunk of clients after another, and replays those that are captured.

    Args:
        device: The device of all tensors.

    Attributes:
        used: Number of replays.
        capturing: Whether a step is being captured.
        said: Why some steps aren't captured.
    """

    def __init__(self, device: torch.device) -> None:
        self.used, self.capturing, self.said = 0, False, set[str]()
        self._device, self._capture_of_device = device, CAPTURES[device.type](device)
        self._registers = Registers(expanded=True)
        self._contexts = Numbers()
        self._calls: dict[Any, int] = {}
        self._graphs: dict[Any, Graph] = {}
        self._refused: set[int] = set()
        self._unchecked: set[Any] = set()
        self._checked: set[int] = set()

    def __len__(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    def begin_round(self) -> None:
        """Check one graph of each phase again in this round."""
        self._checked.clear()

    def context(self, dependencies: Any) -> int | None:
        """Return a number for what steps depend on besides state and minibatches.

        None where a step of this kind couldn't be captured.
        """
        known = self._contexts[dependencies]
        return None if known in self._refused else known

    def leave_out(self, why: str) -> None:
        """Say once why steps aren't captured."""
        if why not in self.said:
            self.said.add(why)
            rank_zero_info(f"Steps run without CUDA graphs: {why}.")

    # --- a phase ---

    def load(self, context: int, state: Tree) -> None:
        """Begin a phase: copy the state to the registers."""
        self._context, self._given = context, dict(tensors_of(state))
        self._end(state)

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

    def step(self, function: Step, minibatches: Any, kind: Any) -> Any:
        """Take a step, and return what it logs.

        Args:
            function: The step; may change leaves of the state in place.
            minibatches: A tree of tensors on the device, and of constants.
            kind: What it depends on besides; None for a step that isn't captured.
        """
        tensors: list[Tensor] = []
        if kind is None or self._context in self._refused:
            return self._really(function, minibatches)
        try:
            key = self._context, kind, self._layout.number, describe(minibatches, tensors)
        except TypeError:  # a minibatch with an object of the user's
            return self._really(function, minibatches)
        graph = self._graphs.get(key)
        if graph is None:
            return self._first_calls(key, function, minibatches, tensors)
        self.used += 1
        if key in self._unchecked or self._context not in self._checked:
            return self._check(key, graph, function, minibatches, tensors)
        return self._replayed(graph, tensors)

    # --- how a step is taken ---

    def _replayed(self, graph: Graph, tensors: list[Tensor]) -> Any:
        for buffer, tensor in zip(graph.buffers, tensors, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        self._layout = graph.after
        rows = [row for value in graph.values for row in value.clone()]
        return rebuild(graph.logged, iter(rows))

    def _really(self, function: Step, minibatches: Any) -> Any:
        """Take the step on the registers."""
        new, logged = function(self._state(), minibatches)
        # Before registers change on which it may depend.
        logged = _copied(logged)
        self._end(new)
        return logged

    def _end(self, new: Tree) -> None:
        """Copy a new state to the registers."""
        self._layout = self._registers.layout_of(new)
        _fill(self._layout, new)

    def _first_calls(
        self, key: Any, function: Step, minibatches: Any, tensors: list[Tensor]
    ) -> Any:
        """Take the step, and capture it if it was taken often enough."""
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        if calls <= trace.WARM_UP or not trace.LIMIT:
            return self._really(function, minibatches)
        del self._calls[key]
        if len(self._graphs) >= trace.LIMIT:  # an optimizer's rate that changes in each round
            self._graphs.pop(next(iter(self._graphs)))
        self.capturing = True
        try:
            graph = self._capture(function, minibatches, tensors)
        # Whatever a method, a user's layers or CUDA raise; a true error recurs.
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            self._refuse(f"a step can't be captured ({type(error).__name__}: {reason})")
            self.capturing = False
            return self._really(function, minibatches)
        self.capturing = False
        self._graphs[key] = graph
        # To be checked with other minibatches, which a constant in their place doesn't fit.
        self._unchecked.add(key)
        return self._replayed(graph, tensors)

    def _capture(self, function: Step, minibatches: Any, tensors: list[Tensor]) -> Graph:
        """Capture a step on the registers; nothing of it runs but on copies."""
        if any(register.device.type == "cpu" for register in self._layout.registers):
            raise TypeError("its optimizer counts steps on the host")
        capture = self._capture_of_device
        buffers = [tensor.clone() for tensor in tensors]
        given = rebuild(minibatches, iter(buffers))
        copies = self._state(_copy)
        new, _ = capture.warm_up(lambda: function(copies, given))
        # With registers for what the step adds, outside of the graph's memory.
        after = self._registers.layout_of(new)

        def step() -> Any:
            new, logged = function(self._state(), given)
            if self._registers.layout_of(new) is not after:
                raise TypeError("the entries of its state change")
            # Before registers change on which it may depend.
            values = _in_rows(logged)
            _fill(after, new)
            return logged, values

        replay, (logged, values) = capture.capture(step)
        return Graph(replay, buffers, after, logged, values)

    def _check(
        self, key: Any, graph: Graph, function: Step, minibatches: Any, tensors: list[Tensor]
    ) -> Any:
        """Compare a replay with the step.

        Each graph is checked when it is used first, and one of each phase in every round.
        """
        given = [*self._layout.registers, *tensors]
        new, logged = function(self._state(_copy), minibatches)
        real: list[Tensor] = []
        flatten(logged, real)
        real += [leaf for _, leaf in tensors_of(new)]
        replayed: list[Tensor] = []
        found = self._replayed(graph, tensors)
        flatten(found, replayed)
        replayed += self._layout.registers
        self._unchecked.discard(key)
        self._checked.add(self._context)
        if self._layout is self._registers.layout_of(new) and agree(replayed, real, given):
            return found
        self._refuse(
            "a step differs from its graph, so it reads something besides its minibatches, its "
            "state and its settings"
        )
        self._end(new)
        return logged

    def _refuse(self, why: str) -> None:
        self._refused.add(self._context)
        self.leave_out(why)

    # --- registers ---

    def _state(self, each: Callable[[Tensor], Tensor] | None = None) -> Tree:
        """Return the registers, or a function of each, in new dicts, which steps change."""
        leaves = self._layout.registers
        state: Tree = rebuild(
            self._layout.tree, iter(leaves) if each is None else map(each, leaves)
        )
        return state


def _fill(layout: Layout, state: Tree) -> None:
    """Copy a state to the registers of its layout."""
    fill(zip(layout.registers, (leaf for _, leaf in tensors_of(state)), strict=True), layout)


def _copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to new memory, with its strides."""
    if is_expanded(tensor):
        register = register_for(tensor, shared=True)
        register[:1].copy_(tensor[:1])
        return register
    new = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return new.copy_(tensor)


def _copied(logged: Any) -> Any:
    """Copy a tree of tensors to new memory."""
    values: list[Tensor] = []
    flatten(logged, values)
    return rebuild(logged, iter([value.clone() for value in values]))


def _in_rows(logged: Any) -> list[Tensor]:
    """Copy the tensors of a tree to new memory, neighbours of one shape and type as rows of one."""
    values: list[Tensor] = []
    flatten(logged, values)
    kinds = groupby(values, lambda value: (value.shape, value.dtype))
    return [torch.stack(list(alike)) for _, alike in kinds]
