"""A mode that gives random functions the numbers of a client's key, however they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

from lightning_pfl.core.draws import Draws
from lightning_pfl.engine.keyed.functions import HANDLERS
from lightning_pfl.engine.keyed.names import drawing_from, replaced_names
from lightning_pfl.engine.operators import own_function

_LOOKING_UP = frozenset(
    {
        F.multi_head_attention_forward,
        *(F.fractional_max_pool2d, F.fractional_max_pool2d_with_indices),
        *(F.fractional_max_pool3d, F.fractional_max_pool3d_with_indices),
        *(init.uniform_, init.normal_, init.kaiming_uniform_),
    }
)
"""Functions that look random ones up by their names, out of reach of a mode, which is left inside
of them."""


class KeyedRandomness(Draws, TorchFunctionMode):
    """A mode in which torch's random functions draw from a hash of ``key``.

    The hash is :func:`~lightning_pfl.core.draws.uniform`.

    Args:
        key: int64 scalar; under ``vmap`` one per client.

    Attributes:
        calls: Number of random calls; 0 after a forward pass shows that it is deterministic.
        closed: Whether the forward pass is over, after which draws are refused.
    """

    def __init__(self, key: Tensor) -> None:
        Draws.__init__(self, key)
        TorchFunctionMode.__init__(self)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Refuse random functions during a backward pass.

        No mode is active inside of one, so they are replaced by their names.
        """
        self.closed = True
        with replaced_names(), drawing_from(self):
            yield

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        func = own_function(func)
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(self, *args, **(kwargs or {}))
        if func in _LOOKING_UP:
            with replaced_names(), drawing_from(self):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
