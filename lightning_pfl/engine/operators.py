"""Operators of torch, for modes that see each, oneDNN's product, and hooks of all layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as layers
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):
    """A mode whose ``__torch_dispatch__`` gets every operator, below autograd and ``vmap``.

    torch documents it for users, in a module of a private name.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


def has_onednn() -> bool:
    """Whether torch has oneDNN on this processor, and it is switched on."""
    backend: Any = torch.backends.mkldnn
    return bool(backend.is_available() and backend.enabled)


def onednn_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply two matrices of single precision by oneDNN, and add a bias to each row.

    It is the operator to which torch's own compiler turns linear layers on a CPU.

    Args:
        a: ``(rows, inner)``.
        b: ``(inner, columns)``.
        bias: ``(columns,)``; None for none.
    """
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(a, b.t(), bias, "none", [], "")
    return out


def inner_call(operator: Any) -> Any:
    """Return the function that an operator calls, without a layer of Python."""
    return operator._op


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
