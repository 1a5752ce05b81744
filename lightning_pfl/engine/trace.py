"""Recording of a step as a list of torch's operators, and replay without the rest of Python.

In a small step most time goes to the module's code, to autograd and, for many clients, to ``vmap``.
A replay runs the same operators, with the same bits. To record takes about as long as three steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pfl.core.tree import is_expanded
from lightning_pfl.engine.operators import OperatorMode
from lightning_pfl.engine.safety.snapshot import attributes

WARM_UP = 2
"""Calls without recording."""
LIMIT = 256
"""Largest number of recordings; many different batch sizes would fill the memory."""
Function = Callable[..., Any]
log = logging.getLogger(__name__)


class Same:
    """A key that compares by identity, and keeps its object alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """Collect every setting of a module and its submodules, which recordings treat as constants.

    Plain values are compared by value, collections by ``repr``, other objects, such as a loss
    function or a tensor that is no parameter, by identity.
    """
    found: list[Any] = [(name, type(part)) for name, part in module.named_modules()]
    found += [(name, key, _setting(value)) for name, key, value in attributes(module)]
    found += [(name, part.training) for name, part in module.named_modules()]
    persistent = set(module.state_dict())
    for name, buffer in module.named_buffers():
        if name not in persistent:
            found.append((name, Same(buffer)))
    found += [(name, Same(p)) for name, p in module.named_parameters() if not p.requires_grad]
    return tuple(found)


def _setting(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return repr(value)
    return Same(value)


def flatten(tree: Any, leaves: list[Tensor]) -> Any:
    """Append the tensors of a tree of dicts, lists and tuples to a list; return its structure.

    Raises:
        TypeError: If it contains something else.
    """
    if isinstance(tree, Tensor):
        leaves.append(tree)
        return None
    if isinstance(tree, dict):
        return tuple((key, flatten(value, leaves)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return tuple(flatten(value, leaves) for value in tree)
    if not isinstance(tree, (bool, int, float, str, type(None))):
        raise TypeError(f"a {type(tree).__name__} may hold tensors")
    return tree


def rebuild(tree: Any, leaves: Iterator[Tensor]) -> Any:
    """Replace the tensors of a tree, in the order of :func:`flatten`."""
    if isinstance(tree, Tensor):
        return next(leaves)
    if isinstance(tree, dict):
        return {key: rebuild(value, leaves) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(rebuild(value, leaves) for value in tree)
    return tree


def describe(tree: Any, leaves: list[Tensor]) -> Any:
    """Append a tree's tensors to a list; return all of it that recordings depend on.

    That is its structure, and shapes, memory layouts and types, also which leaves are expanded.

    Raises:
        TypeError: As in :func:`flatten`.
    """
    start = len(leaves)
    structure = flatten(tree, leaves)
    return structure, tuple(map(_layout, leaves[start:]))


def _layout(leaf: Tensor) -> tuple[Any, ...]:
    return leaf.shape, leaf.stride(), leaf.dtype


class Given:
    """A tree of tensors that several calls have in common, so that it is described once."""

    def __init__(self, tree: Any) -> None:
        self.tree, self.leaves = tree, list[Tensor]()
        self._description = describe(tree, self.leaves)
        self._number: int | None = None

    def number(self, known: dict[Any, int]) -> int:
        """Return a number for what recordings depend on, from the numbers that are known."""
        if self._number is None:
            self._number = known.setdefault(self._description, len(known))
        return self._number


def _tree(arg: Any) -> Any:
    return arg.tree if isinstance(arg, Given) else arg


class Traces:
    """Recordings by their dependencies.

    Attributes:
        enabled: Whether steps may be recorded; False if the module's step may read anything but its
            arguments and settings.
        used: Number of replays.
        recording: Whether a function is being recorded.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled, self.used, self.recording = enabled, 0, False
        self._calls: dict[Any, int] = {}
        self._recorded: dict[Any, Recording] = {}
        self._contexts: dict[Any, int] = {}
        self._givens: dict[Any, int] = {}
        self._context: int | None = None
        self._unchecked: set[Any] = set()
        self._checked: set[Any] = set()

    def begin(self) -> None:
        """Begin a round."""
        self._checked.clear()

    def enter(self, context: Any) -> None:
        """Begin a phase.

        Args:
            context: Dependencies of its steps besides their arguments; None to record nothing.
        """
        # A number, as to hash and compare the settings in each step takes as long as a step.
        known = self._contexts
        self._context = None if context is None else known.setdefault(context, len(known))

    def run(self, function: Function, *args: Any) -> Any:
        """Return ``function(*args)``, replayed if it was recorded before.

        Args:
            function: Returns a tree of tensors; must only read ``args`` and constants.
            args: Trees of tensors, or :class:`Given` ones.
        """
        if not self.enabled or self._context is None:
            return function(*map(_tree, args))
        leaves: list[Tensor] = []
        signature: list[Any] = [self._context]
        try:
            for arg in args:
                if isinstance(arg, Given):
                    leaves += arg.leaves
                    signature.append(arg.number(self._givens))
                else:
                    signature.append(describe(arg, leaves))
        except TypeError:  # a minibatch with an object of the user's
            return function(*map(_tree, args))
        key = tuple(signature)
        recorded = self._recorded.get(key)
        if recorded is None:
            return self._first_calls(key, function, tuple(map(_tree, args)), leaves)
        self.used += 1
        if key in self._unchecked or self._context not in self._checked:
            return self._check(key, recorded, function, tuple(map(_tree, args)), leaves)
        return recorded(leaves)

    def _first_calls(self, key: Any, function: Function, args: Any, leaves: list[Tensor]) -> Any:
        """Run the function, and record it if it was called often enough."""
        if len(self._recorded) >= LIMIT:
            return function(*args)
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        if calls <= WARM_UP:
            return function(*args)
        del self._calls[key]
        before = [_copy(leaf) for leaf in leaves]
        self.recording = True
        try:
            result, self._recorded[key] = record(function, args, leaves)
        # Whatever a user's layers raise under a dispatch mode; a true error recurs.
        except Exception as error:
            self._stop(f"a step can't be recorded ({type(error).__name__}: {error})")
            with torch.no_grad():
                for leaf, old in zip(leaves, before, strict=True):
                    if not is_expanded(leaf):
                        leaf.copy_(old)
            self.recording = False
            return function(*args)
        self.recording = False
        # To be checked with other arguments, which a constant in their place doesn't fit.
        self._unchecked.add(key)
        return result

    def _check(
        self, key: Any, recorded: Recording, function: Function, args: Any, leaves: list[Tensor]
    ) -> Any:
        """Compare a recording with the step, and return the step's result.

        Each recording is checked when it is used first, and one of each phase in every round.
        """
        replayed: list[Tensor] = []
        real: list[Tensor] = []
        flatten(recorded([_copy(leaf) for leaf in leaves]), replayed)
        result = function(*args)
        flatten(result, real)
        self._unchecked.discard(key)
        self._checked.add(self._context)
        if not _agree(replayed, real):
            self._stop(
                "a step differs from its recording, so it reads something besides its batch, its "
                "parameters and its settings"
            )
        return result

    def _stop(self, why: str) -> None:
        self.enabled = False
        log.info("Steps are no longer recorded: %s.", why)


def _copy(leaf: Tensor) -> Tensor:
    # Expanded leaves are shared by all clients, and no step writes to them.
    return leaf if is_expanded(leaf) else leaf.clone(memory_format=torch.preserve_format)


def _agree(replayed: list[Tensor], real: list[Tensor]) -> bool:
    """Whether two results agree up to rounding."""
    return len(replayed) == len(real) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
        for a, b in zip(replayed, real, strict=True)
    )


# --- one recording --------------------------------------------------------------------------------


class Recording:
    """The operators of one call.

    Args:
        source: A function ``replay`` of the arguments' tensors in Python, which returns those of
            the result.
        space: The operators and constants in it.
        result: A tree like the result.
    """

    def __init__(self, source: str, space: dict[str, Any], result: Any) -> None:
        self.source, self._result = source, result
        self._differentiates = torch.is_grad_enabled()
        exec(compile(source, "<recording>", "exec"), space)
        self.replay: Callable[..., tuple[Tensor, ...]] = space["replay"]

    def __call__(self, leaves: list[Tensor]) -> Any:
        """Run the operators on other tensors of the same shapes."""
        # As when they were recorded: some operators keep more for a backward pass.
        with torch.set_grad_enabled(self._differentiates):
            return rebuild(self._result, iter(self.replay(*leaves)))


def record(function: Function, args: Any, leaves: list[Tensor]) -> tuple[Any, Recording]:
    """Run a function and record its operators.

    Args:
        function: Returns a tree of tensors.
        args: Trees of tensors.
        leaves: Their tensors, in order.

    Returns:
        The function's result, and the recording.

    Raises:
        TypeError: If an operator makes a number of a tensor, on which the rest may depend.
    """
    recorder = _Recorder(leaves)
    with recorder:
        result = function(*args)
    results: list[Tensor] = []
    flatten(result, results)
    return result, Recording(*recorder.program(results), rebuild(result, repeat(torch.empty(0))))


@dataclass(frozen=True)
class _Call:
    """An operator's call.

    Attributes:
        operator: The operator.
        text: Its arguments, as Python's source.
        reads: Names of the tensors among them.
        makes: Names of its results.
        several: Whether it returns a tuple or a list.
    """

    operator: Any
    text: str
    reads: frozenset[str]
    makes: tuple[str, ...]
    several: bool


class _Recorder(OperatorMode):
    """Notes every operator that runs, below autograd and ``vmap``.

    Make_fx of torch does the same and more, and takes a hundred times as long.
    """

    def __init__(self, leaves: list[Tensor]) -> None:
        super().__init__()
        self.constants: dict[str, Any] = {}
        self._calls: list[_Call] = []
        self._arguments = [f"a{number}" for number in range(len(leaves))]
        self._names = {id(leaf): name for leaf, name in zip(leaves, self._arguments, strict=True)}
        # Names are by id, which mustn't be taken by another tensor.
        self._alive: list[Any] = [*leaves]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "profiler":
            return result
        if func in _VIEWS and _is_same(result, args[0]):
            self._keep(result, self._name(args[0]))
            return result
        reads: set[str] = set()
        text = ", ".join(
            [
                *(self._text(value, reads) for value in args),
                *(f"{name}={self._text(value, reads)}" for name, value in kwargs.items()),
            ]
        )
        several = isinstance(result, (tuple, list))
        makes = tuple(map(self._new, result if several else [result]))
        self._calls.append(_Call(func, text, frozenset(reads), makes, several))
        return result

    def _new(self, result: Any) -> str:
        """Name a result; what an operator has changed in place has a name."""
        if result is None or id(result) in self._names:
            return "_"
        if not isinstance(result, Tensor):
            raise TypeError(f"it reads a {type(result).__name__} out of a tensor")
        return self._keep(result, f"v{len(self._alive)}")

    def _keep(self, value: Tensor, name: str) -> str:
        self._alive.append(value)
        self._names[id(value)] = name
        return name

    def _name(self, value: Tensor) -> str:
        return self._names[id(value)] if id(value) in self._names else self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value.detach() if isinstance(value, Tensor) else value
        return self._keep(value, name) if isinstance(value, Tensor) else name

    def _text(self, value: Any, reads: set[str]) -> str:
        """Write an argument as Python's source."""
        if isinstance(value, Tensor):
            name = self._name(value)
            reads.add(name)
            return name
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._text(one, reads) for one in value)}]"
        return repr(value) if value is None or type(value) in (bool, int) else self._constant(value)

    def program(self, results: list[Tensor]) -> tuple[str, dict[str, Any]]:
        """Write what is needed for some tensors and what writes to any, with its constants."""
        names = [self._name(result) for result in results]
        lines: list[str] = []
        operators: dict[str, Any] = {}
        # Backwards: what reads a tensor last is met first, and sets it free.
        needed = set(names)
        for number, call in reversed(list(enumerate(self._calls))):
            if needed.isdisjoint(call.makes) and not call.operator._schema.is_mutable:
                continue
            free = sorted(name for name in call.reads - needed if name.startswith("v"))
            needed |= call.reads
            made = [name if name in needed else "_" for name in call.makes]
            target = "".join(f"{name}, " for name in made) if call.several else made[0]
            operators[f"f{number}"] = call.operator
            line = f"{target or '_'} = f{number}({call.text})"
            lines.append(f"{line}; del {', '.join(free)}" if free else line)
        body = [*reversed(lines), f"return ({''.join(f'{name}, ' for name in names)})"]
        source = f"def replay({', '.join(self._arguments)}):\n    " + "\n    ".join(body)
        return source, {**operators, **self.constants}


_VIEWS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("alias", "detach", "expand", "permute", "view")
)


def _is_same(view: Tensor, base: Tensor) -> bool:
    """Whether a view has the geometry of its base."""
    return (view.shape, view.stride(), view.storage_offset(), view.dtype) == (
        base.shape,
        base.stride(),
        base.storage_offset(),
        base.dtype,
    )
