"""A call of a function as the list of the operators of torch that ran in it, below autograd.

A replay runs the same operators, with the same bits, without the rest of Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_pfl.core.randomness import seed_torch
from lightning_pfl.engine.operators import OperatorMode, fastest_call, one_hot, own_function

BY_VALUE = (bool, int, float, str, type(None))
"""Types of what recordings compare by its value: it holds no tensor, and never changes."""


def by_value(value: Any) -> Any:
    """Return a key for such a value, as ``1 == 1.0 == True`` and ``0.0 == -0.0``."""
    return type(value), repr(value) if isinstance(value, float) else value


def flatten(tree: Any, leaves: list[Tensor]) -> Any:
    """Append the tensors of a tree of dicts, lists and tuples to a list; return its structure.

    Trees of one structure differ in their tensors alone.

    Raises:
        TypeError: If it contains something else.
    """
    kind = type(tree)
    if kind is Tensor or isinstance(tree, Tensor):
        leaves.append(tree)
        return Tensor
    if kind is tuple or isinstance(tree, (list, tuple)):
        return kind, tuple([flatten(value, leaves) for value in tree])
    if isinstance(tree, dict):
        return kind, tuple([(key, flatten(value, leaves)) for key, value in tree.items()])
    if not isinstance(tree, BY_VALUE):
        raise TypeError(f"a {type(tree).__name__} may hold tensors")
    return by_value(tree)


def rebuild(tree: Any, leaves: Iterator[Tensor]) -> Any:
    """Replace the tensors of a tree, in the order of :func:`flatten`."""
    if isinstance(tree, Tensor):
        return next(leaves)
    if isinstance(tree, dict):
        return {key: rebuild(value, leaves) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(rebuild(value, leaves) for value in tree)
    return tree


def source_of(tree: Any, names: Iterator[str], space: dict[str, Any]) -> str:
    """Write a tree as Python's source, with names for its tensors in the order of :func:`flatten`.

    Args:
        tree: The tree.
        names: Names of the tensors.
        space: Gets what else the source names.
    """
    if isinstance(tree, Tensor):
        return next(names)
    if isinstance(tree, dict):
        each = [(_constant(key, space), source_of(one, names, space)) for key, one in tree.items()]
        return f"{{{', '.join(f'{key}: {value}' for key, value in each)}}}"
    if isinstance(tree, (list, tuple)):
        inner = "".join(f"{source_of(one, names, space)}, " for one in tree)
        return f"[{inner}]" if isinstance(tree, list) else f"({inner})"
    return _constant(tree, space)


def _constant(value: Any, space: dict[str, Any]) -> str:
    if value is None or type(value) in (bool, int, str):
        return repr(value)
    name = f"k{len(space)}"
    space[name] = value
    return name


def called(operator: Any, text: str, space: Mapping[str, Any]) -> Any:
    """Return the function by which a line of a program calls an operator.

    Args:
        operator: The operator.
        text: Its arguments, as Python's source.
        space: What their names stand for, or something like it.
    """
    args, kwargs = evaluated(lambda *a, **k: (a, k), text, space)
    return fastest_call(operator, args, kwargs)


def evaluated(function: Any, text: str, space: Mapping[str, Any]) -> Any:
    """Return what a function makes of arguments that are given as Python's source."""
    return eval(_code(f"function({text})", "eval"), {"function": function}, space)


def compiled(source: str, space: dict[str, Any]) -> Callable[..., Any]:
    """Return the function ``replay`` of a source that a recording has written."""
    exec(_code(source, "exec"), space)
    made: Callable[..., Any] = space["replay"]
    return made


@lru_cache(2**12)
def _code(source: str, mode: str) -> CodeType:
    """Compile Python's source; recordings of other sizes have much of it in common."""
    return compile(source, "<recording>", mode)


class NotRecordableError(Exception):
    """An operator that a replay can't repeat, with what it does.

    No TypeError: after one in ``x += y`` Python goes on with ``x = x + y``.
    """


class Call(NamedTuple):
    """An operator's call.

    Attributes:
        operator: The operator.
        text: Its arguments, as Python's source.
        reads: Names of the tensors among them.
        makes: Names of its results; ``"_"`` for none, or for what it has changed in place.
        several: Whether it returns a tuple or a list.
        writes: Names of the tensors that it changes.
    """

    operator: Any
    text: str
    reads: frozenset[str]
    makes: tuple[str, ...]
    several: bool
    writes: frozenset[str]


class _NoNumbers(TorchFunctionMode):
    """A mode that refuses functions by which numbers in a tensor reach Python past operators."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func, given = own_function(func), [*args, *(kwargs or {}).values()]
        if (
            func in _READ_NUMBERS
            or (func in _READ_LISTS and _holds_tensor(given))
            or (func in _READ_INDICES and _holds_tensor(_lists_of_index(args[1])))
            or (func in _READ_POSITIONS and sum(isinstance(one, Tensor) for one in given) > 1)
        ):
            raise NotRecordableError(f"it reads numbers out of a tensor by {func.__name__}")
        if func is F.one_hot:
            found = one_hot(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {})) if found is NotImplemented else found
        return func(*args, **(kwargs or {}))


_READ_NUMBERS = frozenset(
    {
        *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.apply_),
        # By these torch.Tensor([...]) reads tensors in a list, and no function is called for it.
        *(Tensor.__bool__, Tensor.__int__, Tensor.__index__, Tensor.__float__, Tensor.__complex__),
        *(Tensor.map_, Tensor.map2_),
    }
)
_READ_LISTS = frozenset(
    {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor, Tensor.new}
)
"""Functions that read the numbers of tensors in a list that they are given."""
_READ_INDICES = frozenset({Tensor.__getitem__, Tensor.__setitem__})
"""Functions that read those in a list that is an index."""
_READ_POSITIONS = frozenset({torch.tensor_split, Tensor.tensor_split})
"""Functions that read a second tensor past operators."""


def _lists_of_index(index: Any) -> list[Any]:
    """Return the lists in an index, a tuple of which has one for each dimension."""
    parts = index if isinstance(index, tuple) else (index,)
    return [part for part in parts if isinstance(part, list)]


def _holds_tensor(args: Any) -> bool:
    """Whether one of some arguments is a list with a tensor in it."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    return any(isinstance(one, Tensor) for arg in lists for one in arg) or any(
        map(_holds_tensor, lists)
    )


class Recorder(OperatorMode):
    """Notes every operator that runs inside of it.

    Make_fx of torch does the same and more, and takes a hundred times as long.

    Args:
        leaves: The tensors that a replay gets as arguments ``a0``, ``a1``, ...

    Attributes:
        arguments: Their names.
        constants: By name (``c0``, ...) what else operators have read.
        tensors: All tensors by name; results are ``v0``, ...
        roots: By name the first name of the memory that a tensor is in.
    """

    def __init__(self, leaves: list[Tensor]) -> None:
        super().__init__()
        self.constants: dict[str, Any] = {}
        self.calls: list[Call] = []
        self.arguments = [f"a{number}" for number in range(len(leaves))]
        # Names are by id, which mustn't be taken by another tensor: all stay alive.
        self.tensors: dict[str, Tensor] = {}
        self.roots: dict[str, str] = {}
        # Arguments in one memory may be in several when they are replayed.
        self._shared: set[str] = set()
        self._names: dict[int, str] = {}
        self._memory: dict[int, str] = {}
        self._same: list[Tensor] = []
        self._seeding: Call | None = None
        for name, leaf in zip(self.arguments, leaves, strict=True):
            self._keep(leaf, name)
            if self.roots[name] != name:
                self._shared.add(self.roots[name])

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note operators inside a ``with`` block, and refuse what makes numbers of tensors."""
        with _NoNumbers(), self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, kind = kwargs or {}, _kind_of(func)
        if kind.counts and not _has_plain_indices(func, args):
            raise NotRecordableError(
                f"the shape of what {func} returns depends on numbers in a tensor"
            )
        if kind.reshapes:
            return self._reshaped(func, args, kwargs)
        writes = self._changed(kind, args, kwargs) if kind.writes else _NONE
        if any(self.roots[name] in self.constants for name in writes):
            raise NotRecordableError(f"{func} writes to a tensor that stays from step to step")
        if self._seeding is not None and is_random(func):
            self.calls.append(self._seeding)
            self._seeding = None
        result = func(*args, **kwargs)
        if kind.is_silent:
            return result
        if kind.may_alias and _is_same(result, args[0]):
            self._also(result, self.name(args[0]))
            return result
        reads: set[str] = set()
        texts = [self._text(value, reads) for value in args]
        if kwargs:
            texts += [f"{name}={self._text(value, reads)}" for name, value in kwargs.items()]
        text = ", ".join(texts)
        several = isinstance(result, (tuple, list))
        makes = tuple(map(self._new, result if several else [result]))
        self.calls.append(Call(func, text, frozenset(reads), makes, several, writes))
        return result

    def seeds(self, key: Tensor) -> None:
        """Let replays seed torch's generators by a key before what draws from them from now on."""
        name = frozenset({self.name(key)})
        self._seeding = Call(seed_by, self.name(key), name, ("_",), False, name)

    def _reshaped(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Note what turns a tensor into another view of its memory: as a view, by a new name.

        A replay that turned its tensors would find them turned by the replay before.
        """
        tensor = args[0]
        name, before = self.name(tensor), tensor.detach()
        result = func(*args, **kwargs)
        place = [(one.data_ptr(), one.dtype, one.numel()) for one in (before, tensor)]
        if not name.startswith("v") or place[0] != place[1]:
            raise NotRecordableError(
                f"{func} changes more than the shape of a tensor of the step's own"
            )
        self.tensors[name] = before
        shape, strides = list(tensor.shape), list(tensor.stride())
        text, view = f"{name}, {shape}, {strides}", torch.ops.aten.as_strided.default
        made = self._keep(tensor, f"v{len(self.tensors)}")
        self.calls.append(Call(view, text, frozenset({name}), (made,), False, frozenset()))
        return result

    def _changed(self, kind: _Kind, args: Any, kwargs: dict[str, Any]) -> frozenset[str]:
        """Return the names of the tensors that an operator changes."""
        changed: set[str] = set()
        for number, name in kind.writes:
            self._text(args[number] if number < len(args) else kwargs.get(name), changed)
        return frozenset(changed)

    def _new(self, result: Any) -> str:
        """Name a result; what an operator has changed in place has a name."""
        if result is None or id(result) in self._names:
            return "_"
        if not isinstance(result, Tensor):
            raise NotRecordableError(f"it reads a {type(result).__name__} out of a tensor")
        return self._keep(result, f"v{len(self.tensors)}")

    def _keep(self, value: Tensor, name: str) -> str:
        self.tensors[name] = value
        self._names[id(value)] = name
        memory = value.untyped_storage().data_ptr()
        self.roots[name] = self._memory.setdefault(memory, name) if memory else name
        return name

    def _also(self, value: Tensor, name: str) -> None:
        """Let a tensor that is another one's alias have its name."""
        self._names[id(value)] = name
        self._same.append(value)

    def name(self, value: Tensor) -> str:
        """Return a tensor's name; an unknown one is a constant."""
        return self._names[id(value)] if id(value) in self._names else self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value.detach() if isinstance(value, Tensor) else value
        return self._keep(value, name) if isinstance(value, Tensor) else name

    def _text(self, value: Any, reads: set[str]) -> str:
        """Write an argument as Python's source."""
        if isinstance(value, Tensor):
            name = self.name(value)
            reads.add(name)
            return name
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._text(one, reads) for one in value)}]"
        return repr(value) if value is None or type(value) in (bool, int) else self._constant(value)

    def written(self) -> set[str]:
        """Return the first names of the memory that operators have changed."""
        return {self.roots[name] for call in self.calls for name in call.writes}

    def at_once(self, call: Call) -> Call:
        """Take a view out of its memory at once, whatever views are in between."""
        name = call.makes[0]
        root = self.roots.get(name, name)
        if call.several or name == root or root in self._shared:
            return call
        view, whole = self.tensors[name], self.tensors[root]
        if view.dtype != whole.dtype or view.is_conj() or view.is_neg():
            return call
        text = f"{root}, {list(view.shape)}, {list(view.stride())}"
        if view.storage_offset() != whole.storage_offset():
            if not root.startswith("v"):  # another argument may have another offset
                return call
            text += f", {view.storage_offset()}"
        operator = same if layout(view) == layout(whole) else torch.ops.aten.as_strided.default
        return call._replace(operator=operator, text=text, reads=frozenset({root}))


class _Kind(NamedTuple):
    """An operator's kind, found once, as to find it at each call takes as long as a small one.

    Attributes:
        counts: Whether the shape of what it returns may depend on numbers in a tensor.
        reshapes: Whether it turns a tensor into another view of its memory.
        is_silent: Whether it computes nothing.
        may_alias: Whether it may return its first argument as it is.
        writes: Positions and names of the arguments that it changes.
    """

    counts: bool
    reshapes: bool
    is_silent: bool
    may_alias: bool
    writes: tuple[tuple[int, str], ...]


@cache
def _kind_of(operator: Any) -> _Kind:
    """Return what a recorder asks of an operator."""
    tags = operator.tags
    return _Kind(
        torch.Tag.dynamic_output_shape in tags,
        torch.Tag.inplace_view in tags,
        operator.namespace == "profiler",
        operator in _VIEWS,
        tuple(
            (number, argument.name)
            for number, argument in enumerate(operator._schema.arguments)
            # BatchNorm's operators don't say that they write to their running statistics.
            if argument.name in ("running_mean", "running_var")
            or (argument.alias_info is not None and argument.alias_info.is_write)
        ),
    )


_NONE: frozenset[str] = frozenset()


def _has_plain_indices(operator: Any, args: Any) -> bool:
    """Whether an operator selects entries by their positions, and not by a mask."""
    masks = (torch.bool, torch.uint8)
    return operator is torch.ops.aten.index.Tensor and all(
        index is None or index.dtype not in masks for index in args[1]
    )


def is_random(operator: Any) -> bool:
    """Whether an operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def seed_by(key: Tensor) -> None:
    """Seed torch's global generators by a key of random numbers, or the first of some numbers."""
    seed_torch(int(key.flatten()[0]) & (2**63 - 1))


def is_constant(call: Call, tensors: Mapping[str, Tensor]) -> bool:
    """Whether an operator makes small tensors whose numbers are always the same."""
    return call.operator in MAKES and tensors[call.makes[0]].numel() <= KEPT


def same(tensor: Tensor, *view: Any) -> Tensor:
    """Return the tensor, in the place of a view that has its shape."""
    return tensor


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return the type and the geometry of a tensor."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def needed(calls: Iterable[Call], names: Iterable[str]) -> list[Call]:
    """Return the calls that some tensors need, and those that change any."""
    wanted, found = set(names), []
    for call in reversed(list(calls)):
        if call.writes or not wanted.isdisjoint(call.makes):
            wanted |= call.reads
            found.append(call)
    return found[::-1]


def written(arguments: Iterable[str], lines: Iterable[str], result: str) -> str:
    """Write a function ``replay`` as Python's source."""
    body = [*lines, f"return {result}"]
    return f"def replay({', '.join(arguments)}):\n    " + "\n    ".join(body)


MAKES = frozenset(
    {
        *(
            getattr(torch.ops.aten, name).default
            for name in (
                *("ones", "ones_like", "new_ones", "zeros", "zeros_like", "new_zeros"),
                *("full", "full_like", "new_full", "scalar_tensor", "arange"),
            )
        ),
        *(torch.ops.aten.arange.start, torch.ops.aten.arange.start_step),
    }
)
"""Operators whose results depend on no number in a tensor."""
KEPT = 2**14
"""Largest number of entries of a constant that a recording keeps."""
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
