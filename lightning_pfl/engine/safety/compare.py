"""Whether two engines gave the same, and why one of them couldn't."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_pfl.contract.records import Evaluation, LocalResult
from lightning_pfl.core.errors import ClientError
from lightning_pfl.core.tree import Model, Tree, items, leaf_at, leaves
from lightning_pfl.data.datasets import FederatedDataset, FederatedTensorDataset

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Largest difference between the engines after one step, relative to a tensor's largest entry."""
MIXED_TOLERANCE = 0.1
SMALL = 1e-3
"""What a tensor's largest entry is taken to be at least, of that of all that clients send."""
MOVED = 0.05
"""The same, relative to how far the step moves a tensor: far above what TensorFloat-32 rounds."""
LEAST = 0.1
"""What a tensor is taken to move at least, of the one that moves farthest.

A gradient that is zero but for rounding, as that of a bias before BatchNorm, differs by all of it.
"""


def together(data: FederatedDataset, clients: Tensor, some: Tensor) -> Tensor:
    """Positions to probe, such that clients share a program: a client alone shows less.

    Those given where their first minibatches have one size, else each of them twice.

    Args:
        data: The split.
        clients: Client ids, int64 ``(clients,)``.
        some: Positions in ``clients``.
    """
    sizes = []
    for client in clients[some].tolist():
        if isinstance(data, FederatedTensorDataset):
            size: int | None = data.batch_size
        else:
            size = data.loaders[client].batch_size
        sizes.append(min(int(data.num_samples[client]), size or 1))
    alike = len(set(sizes)) == 1 < len(sizes)
    return some if alike else some.repeat_interleave(2)  # still the longest first


def training_trees(result: LocalResult) -> Tree:
    """What a round of local training gives."""
    return {
        "uploads": result.uploads,
        "own": result.client_state,
        "logs": result.logs,
        "loss": result.loss,
    }


def evaluation_trees(evaluation: Evaluation, models: Model) -> Tree:
    """The values, with the models for the precision that they can have."""
    return {"values": evaluation.values, "counts": evaluation.counts, "models": models}


def reason_of(error: Exception) -> str:
    """What stood in the way, in a sentence."""
    cause = error.__cause__ if isinstance(error, ClientError) else error
    return _summary(cause if isinstance(cause, Exception) else error)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, which says nothing of the module."""
    found = isinstance(error, torch.OutOfMemoryError)
    return found or (error is not None and is_out_of_memory(error.__cause__))


def _summary(error: Exception) -> str:
    """The first sentence of an error; torch's advice to file an issue helps nobody here."""
    rule = re.search(
        r"batching rule (?:for|not implemented for) (\S+?)[.;]? ", f"{error} ", re.IGNORECASE
    )
    if rule:
        return f"{rule.group(1)} has no batching rule"
    lines = str(error).strip().splitlines()
    return lines[0].split(". ")[0].rstrip(".") if lines else type(error).__name__


@contextmanager
def hidden_loops_are_errors() -> Iterator[None]:
    """An operator without batching rule runs in a slow loop inside ``vmap``; torch warns of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*batching rule.*")
        yield


def difference(expected: Tree, found: Tree, before: Tree, mixed: bool) -> str | None:
    """Say where two results differ by more than rounding; None if they agree.

    Args:
        expected: The sequential engine's.
        found: The vectorized engine's.
        before: What the step began with, as far as there is a counterpart.
        mixed: Whether it ran in mixed precision.
    """
    names, others = list(leaves(expected)), list(leaves(found))
    if len(names) != len(others):
        return "it logs other values than the sequential engine"
    # Logged values are float64 averages of values that are as coarse as the model.
    coarsest = max(
        (TOLERANCE.get(leaf.dtype, 1e-2) for leaf in names if leaf.is_floating_point()), default=0
    )
    tolerance = MIXED_TOLERANCE if mixed else coarsest
    for want, got, least in zip(names, others, _least(expected), strict=True):
        if want.shape != got.shape:
            return "it gives other shapes than the sequential engine"
        if not want.is_floating_point() or not want.numel():
            continue
        scale = want.nan_to_num().abs().max().clamp_min(least)
        if ((want - got).abs() > tolerance * scale).any() or (want.isnan() != got.isnan()).any():
            return "its result differs from the sequential engine's by more than rounding"
    if not mixed and _moves_otherwise(expected, found, before):
        return "its step differs from the sequential engine's by more than rounding"
    return None


def _least(expected: Tree) -> list[float]:
    """What each tensor's largest entry is taken to be at least.

    What clients send or remember may be a gradient (SCAFFOLD's control variates), and then be zero
    but for the rounding of numbers as large as those of its other tensors.
    """
    found = []
    for part, tree in expected.items():
        held = list(leaves({part: tree}))
        if part in ("uploads", "own"):
            floats = [leaf for leaf in held if leaf.is_floating_point() and leaf.numel()]
            sizes = [float(leaf.nan_to_num(0, 0, 0).abs().max()) for leaf in floats]
            found += [max(1e-6, SMALL * max(sizes, default=0.0))] * len(held)
        else:
            found += [1e-6] * len(held)
    return found


def _moves_otherwise(expected: Tree, found: Tree, before: Tree) -> bool:
    """Whether a step is another one: it may be small beside the weights that it is taken from."""
    pairs = [
        ((want - start).nan_to_num(), (got - start).nan_to_num(), want)
        for want, got, start in _together(expected, found, before)
        if want.is_floating_point() and want.numel()
    ]
    farthest = max((step.abs().max() for step, _, _ in pairs), default=torch.zeros(()))
    for want, got, end in pairs:
        size = torch.maximum(want.abs().max(), LEAST * farthest.to(want.dtype))
        rounding = 16 * torch.finfo(end.dtype).eps * end.nan_to_num().abs().max()
        if ((want - got).abs() > MOVED * size + rounding).any():
            return True
    return False


def _together(expected: Tree, found: Tree, before: Tree) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Leaves of both results with the one that they were before."""
    for path, start in items(before):
        want, got = leaf_at(expected, path), leaf_at(found, path)
        if want is not None and got is not None and want.shape == start.shape:
            yield want, got, start
