"""Batches: trees of tensors whose leading dimension counts samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


def batch_length(batch: Any) -> int:
    """Count the samples in a batch: the length of the first tensor in it that has an axis.

    Without such a tensor, the length of the first list of strings; 1 without either.
    """
    if type(batch) in (tuple, list) and batch and isinstance(batch[0], Tensor) and batch[0].ndim:
        return len(batch[0])  # the usual batches
    texts = 0
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor):
            return len(leaf)
        texts = texts or len(leaf)
    return texts or 1


def _leaves(batch: Any) -> Iterator[Any]:
    """Iterate over the tensors with an axis and the lists of strings, depth first."""
    if isinstance(batch, Tensor):
        if batch.ndim:
            yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for entry in fields(batch):
            yield from _leaves(getattr(batch, entry.name))
    elif isinstance(batch, (list, tuple)):
        if batch and all(isinstance(part, (str, bytes)) for part in batch):
            yield batch
            return
        for part in batch:
            yield from _leaves(part)


# A pytree of tensors whose leading dimension counts samples.
Batch = Tensor | tuple[Any, ...] | list[Any] | dict[str, Any]


def map_batch(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``function`` to every tensor of a batch, keeping its structure."""
    # The usual batches, for which the general function takes longer than to gather them.
    if isinstance(batch, Tensor):
        return function(batch)
    if type(batch) in (tuple, list):
        return type(batch)(map_batch(part, function) for part in batch)
    return apply_to_collection(batch, Tensor, function)


def batch_leaves(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch in a fixed order (dict keys in insertion order).

    Raises:
        TypeError: If it contains anything but tensors and containers of tensors.
    """
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from batch_leaves(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        for value in batch:
            yield from batch_leaves(value)
    else:
        raise TypeError(
            "Expected `fields` to be a tensor or a tuple, list or dict of tensors, but got a "
            f"{type(batch).__name__} inside. Convert it to a tensor first."
        )


def join_batches(batches: Sequence[Any]) -> Any:
    """Join batches of equal structure, leaves ``(clients, samples, ...)``, along their samples."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(batches), 1)
    if isinstance(first, Mapping):
        return {key: join_batches([batch[key] for batch in batches]) for key in first}
    return tuple(join_batches(parts) for parts in zip(*batches, strict=True))
