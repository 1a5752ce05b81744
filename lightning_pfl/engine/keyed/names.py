"""Random functions of torch that are found by their names.

In a step that looks them up where torch keeps them, as torch's layers do, only they cost anything.
Functions that were imported by themselves, as by ``from torch.nn.functional import dropout``, and
those of torch's own operators draw from a generator as always, which shows in its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import local
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pfl.core.draws import Draws
from lightning_pfl.engine.keyed.functions import HANDLERS


class _Current(local):
    """The numbers from which random functions of this thread draw; None for torch's generators."""

    draws: Draws | None = None


_current = _Current()


@contextmanager
def drawing_from(draws: Draws) -> Iterator[None]:
    """Let random functions draw from these numbers, where their names are replaced."""
    before, _current.draws = _current.draws, draws
    try:
        yield
    finally:
        _current.draws = before


@contextmanager
def replaced_names() -> Iterator[None]:
    """Replace random functions inside a ``with`` block, but for those that a user has replaced."""
    mine = [one for one in _FUNCTIONS if getattr(one[0], one[1]) is one[2]]
    for owner, name, _, drawn in mine:
        setattr(owner, name, drawn)
    try:
        yield
    finally:
        for owner, name, function, _ in mine:
            if owner is Tensor:  # which has its methods of its base
                delattr(owner, name)
            else:
                setattr(owner, name, function)


class NamedRandomness(Draws):
    """Lets random functions draw from a hash of ``key``, where their names are replaced.

    Args:
        key: int64 scalar.
    """

    def __enter__(self) -> NamedRandomness:
        """Begin a step."""
        self._drawing = drawing_from(self)
        self._drawing.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """End a step."""
        self._drawing.__exit__(None, None, None)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Refuse random functions during a backward pass."""
        self.closed = True
        yield


def _by_name(function: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        draws = _current.draws
        return function(*args, **kwargs) if draws is None else handler(draws, *args, **kwargs)

    return drawn


_FUNCTIONS = [
    (owner, function.__name__, function, _by_name(function, handler))
    for function, handler in HANDLERS.items()
    for owner in (F, torch, Tensor)
    if getattr(owner, function.__name__, None) is function
]
"""Where torch keeps its random functions, their names, they themselves, and what replaces them."""
