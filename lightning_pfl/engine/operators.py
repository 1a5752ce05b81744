"""Operators of torch, for modes that see each, their fastest calls, and hooks of all layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.nn.modules import module as layers
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):
    """A mode whose ``__torch_dispatch__`` gets every operator, below autograd and ``vmap``.

    torch documents it for users, in a module of a private name.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


class NumbersRead(OperatorMode):
    """Notes whether Python reads numbers in tensors, by which it may choose what it does.

    Attributes:
        read: Whether it has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.read |= torch.Tag.data_dependent_output in func.tags
        return func(*args, **(kwargs or {}))


_FUNCTIONS = dict(vars(F))
"""What ``torch.nn.functional`` holds when this package is imported."""


def replaced_functions() -> dict[str, Any]:
    """Return by name what a user has put in the place of functions of ``torch.nn.functional``."""
    found = vars(F)
    if len(found) == len(_FUNCTIONS) and all(map(is_, found.values(), _FUNCTIONS.values())):
        return {}  # as almost always
    return {name: now for name, own in _FUNCTIONS.items() if (now := found.get(name)) is not own}


def one_hot(tensor: Tensor, num_classes: int = -1) -> Any:
    """Compute ``F.one_hot``, which reads the largest class, and under ``vmap`` lets any class pass.

    Here classes are indices, which are checked.
    """
    if num_classes < 1:
        return NotImplemented
    found = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
    return found.scatter(-1, tensor.unsqueeze(-1), 1)


def own_function(function: Any) -> Any:
    """Return torch's function where a mode gets that of a user's which is in its place.

    A function of torch hands itself to a mode by its name in its module. So a function of a user's
    there that calls torch's would be called again, and what it does would be done twice.

    Args:
        function: What a mode's ``__torch_function__`` gets.
    """
    return _own_function(function) if type(function) is FunctionType else function


@lru_cache(2**10)
def _own_function(function: FunctionType) -> Any:
    if any(function is own for own in _FUNCTIONS.values()):
        return function
    found = [name for name, now in replaced_functions().items() if now is function]
    return _FUNCTIONS[found[0]] if found else function


def beneath_vmap(rule: Callable[..., tuple[Tensor, int]], *args: Any) -> Any:
    """Compute a layer of all rows of ``vmap`` by a rule, without a ``torch.autograd.Function``.

    To find the rule of a ``Function``, torch takes longer than for a small layer.

    Args:
        rule: Called with the number of rows, the batched dimension of each argument, None if it has
            none, and the arguments without ``vmap``; returns the result and its batched dimension.
        args: Arguments of the layer.

    Returns:
        The result; ``NotImplemented`` if nothing is batched, and within further transforms.
    """
    if (level := _functorch.maybe_current_level()) != 1:
        return NotImplemented
    dims = [
        _functorch.maybe_get_bdim(arg)
        if isinstance(arg, Tensor) and _functorch.is_batchedtensor(arg)
        else None
        for arg in args
    ]
    plain = [
        arg if dim is None else _functorch.get_unwrapped(arg)
        for arg, dim in zip(args, dims, strict=True)
    ]
    sizes = [arg.shape[dim] for arg, dim in zip(plain, dims, strict=True) if dim is not None]
    if not sizes:
        return NotImplemented
    layer = _functorch.pop_dynamic_layer_stack()
    try:
        out, dim = rule(sizes[0], dims, *plain)
    finally:
        _functorch.push_dynamic_layer_stack(layer)
    return _functorch._add_batch_dim(out, dim, level)


def within_transforms() -> bool:
    """Whether a transform of ``torch.func`` runs, or gradients are computed with the values.

    A ``torch.autograd.Function`` without rules for them is an error there.
    """
    return _functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def has_onednn() -> bool:
    """Whether torch has oneDNN on this processor, and it is switched on."""
    backend: Any = torch.backends.mkldnn
    return bool(backend.is_available() and backend.enabled)


def prefers_onednn() -> bool:
    """Whether oneDNN multiplies large matrices faster than torch's BLAS, which mostly is MKL.

    It does with AVX-512, which MKL leaves unused on AMD's processors: 50 x 784 and 784 x 200 take
    75 microseconds by oneDNN and 137 by MKL. With AVX2 alone they take 300 and 250, and a product
    of a quarter of the size 103 and 64.
    """
    return has_onednn() and torch.backends.cpu.get_cpu_capability() == "AVX512"


ONEDNN_PRODUCT: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
"""The operator of a linear layer; None in a torch without oneDNN."""


def onednn_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply two matrices of single precision by oneDNN, and add a bias to each row.

    It is the operator to which torch's own compiler turns linear layers on a CPU.

    Args:
        a: ``(rows, inner)``.
        b: ``(inner, columns)``.
        bias: ``(columns,)``; None for none.
    """
    out: Tensor = ONEDNN_PRODUCT.default(a, b.t(), bias, "none", [], "")
    return out


def fastest_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply two large matrices of single precision, and add a bias, by what is faster.

    Args:
        a: ``(rows, inner)``.
        b: ``(inner, columns)``.
        bias: ``(columns,)``; None for none.
    """
    if prefers_onednn():
        return onednn_product(a, b, bias)
    return a.mm(b) if bias is None else torch.addmm(bias, a, b)


def fastest_call(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the function that calls an operator with the least of Python.

    torch's own functions read their arguments in half the time of ``torch.ops``, 0.3 to 1.6
    microseconds of it. One of the operator's name may call another one, as ``torch.add`` does where
    a tensor is a number, so that it is asked which one it calls, once for each kind of arguments.

    Args:
        operator: The operator, or a function that isn't one.
        args: Arguments like those of later calls; nothing is computed with them.
        kwargs: Those by name.
    """
    kind = operator, _kind(args), *((name, _kind(value)) for name, value in kwargs.items())
    if kind not in _FASTEST:
        _FASTEST[kind] = _find_fastest_call(operator, args, kwargs)
    return _FASTEST[kind]


_FASTEST: dict[Any, Any] = {}
"""What :func:`fastest_call` has found: to ask takes as long as ten calls."""


def _kind(value: Any) -> Any:
    """Return all of an argument by which a function of torch chooses an operator: its type."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    if isinstance(value, Tensor):  # one without dimensions may stand for a number
        return type(value), value.dtype, value.device.type, value.ndim > 0, value.requires_grad
    return type(value)


def _find_fastest_call(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if getattr(operator, "namespace", "") != "aten":
        return getattr(operator, "_op", operator)
    for place in (torch,) if "out" in kwargs else (torch.Tensor, torch):
        function = getattr(place, operator.overloadpacket.__name__, None)
        if type(function) in _OWN and _is_called(operator, function, args, kwargs):
            return function
    return operator._op


_OWN = (BuiltinFunctionType, MethodDescriptorType)
"""Types of functions of torch that aren't written in Python."""


def _is_called(operator: Any, function: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function calls an operator, with all arguments as they are."""
    try:
        with _Catching():
            function(*args, **kwargs)
    except _Caught as caught:
        given = _by_name(operator, args, kwargs)
        return caught.operator is operator and given == _by_name(operator, *caught.arguments)
    except (TypeError, RuntimeError):  # it takes other arguments
        pass
    return False


class _Caught(BaseException):
    """Carries an operator that was called."""

    def __init__(self, operator: Any, *arguments: Any) -> None:
        super().__init__()
        self.operator, self.arguments = operator, arguments


class _Catching(OperatorMode):
    """Raises the first operator that is called in the place of running it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise _Caught(func, args, kwargs or {})


def _by_name(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Describe an operator's arguments by name, with those left out; tensors by identity."""
    names, defaults = _schema(operator)
    given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    return {name: _described(value) for name, value in given.items()}


@cache
def _schema(operator: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the names of an operator's arguments, and the defaults of some."""
    arguments = operator._schema.arguments
    defaults = {one.name: one.default_value for one in arguments if one.has_default_value()}
    return [one.name for one in arguments], defaults


def _described(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_described(one) for one in value]
    return id(value) if isinstance(value, torch.Tensor) else (type(value), value)


def global_hooks() -> list[Any]:
    """Return the hooks that ``torch.nn.modules.module`` calls for every layer.

    torch has functions that register them, and none that lists them.
    """
    found = (
        layers._global_forward_pre_hooks,
        layers._global_forward_hooks,
        layers._global_backward_pre_hooks,
        layers._global_backward_hooks,
    )
    return [hook for hooks in found for hook in hooks.values()]


def global_step_hooks() -> list[Any]:
    """Return the hooks that ``torch.optim.optimizer`` calls in every optimizer's step."""
    found = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
    return [hook for hooks in found for hook in hooks.values()]
