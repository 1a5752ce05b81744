"""Comparison of two engines' results."""

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
"""Largest relative difference between the engines after one step, by a tensor's largest entry."""
MIXED_TOLERANCE = 0.1
SMALL = 1e-3
"""Lower bound of a tensor's scale, relative to the largest entry of all uploads."""
MOVED = 0.05
"""Largest difference relative to a tensor's change, far above the rounding of TensorFloat-32."""
LEAST = 0.1
"""Lower bound of a tensor's change, relative to the largest change.

A gradient of pure rounding, as of a bias before BatchNorm, differs completely.
"""


def together(data: FederatedDataset, clients: Tensor, some: Tensor) -> Tensor:
    """Choose positions to probe such that clients share a program.

    These are the given ones if their first minibatches have one size, else each of them twice.

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
    """Collect the results of local training in one tree."""
    return {
        "uploads": result.uploads,
        "own": result.client_state,
        "logs": result.logs,
        "loss": result.loss,
    }


def evaluation_trees(evaluation: Evaluation, models: Model) -> Tree:
    """Collect the values, and the models, whose precision bounds that of the values."""
    return {"values": evaluation.values, "counts": evaluation.counts, "models": models}


def reason_of(error: Exception) -> str:
    """Describe the cause of an error in a sentence."""
    cause = error.__cause__ if isinstance(error, ClientError) else error
    return _summary(cause if isinstance(cause, Exception) else error)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, which isn't the module's fault."""
    found = isinstance(error, torch.OutOfMemoryError)
    return found or (error is not None and is_out_of_memory(error.__cause__))


def _summary(error: Exception) -> str:
    """Return the first sentence of an error, without torch's request to file an issue."""
    rule = re.search(
        r"batching rule (?:for|not implemented for) (\S+?)[.;]? ", f"{error} ", re.IGNORECASE
    )
    if rule:
        return f"{rule.group(1)} has no batching rule"
    held = re.search(
        r"Got in_dim=\S+ for an input but the input is of type <class '(.+?)'>", str(error)
    )
    if held:  # torch's text begins with the names of the whole model
        return f"a minibatch holds {held.group(1)}, where many clients need tensors"
    if isinstance(error, KeyError):  # its text is the key alone
        return f"KeyError: {error}"
    lines = str(error).strip().splitlines()
    return lines[0].split(". ")[0].rstrip(".") if lines else type(error).__name__


@contextmanager
def hidden_loops_are_errors() -> Iterator[None]:
    """Turn torch's warning of an operator without batching rule, a slow loop, into an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*batching rule.*")
        yield


OTHER_NUMBERS = "differs from the sequential engine's by more than rounding"


def difference(expected: Tree, found: Tree, before: Tree, mixed: bool) -> str | None:
    """Describe a difference of two results beyond rounding, or return None.

    Args:
        expected: The sequential engine's result.
        found: The vectorized engine's result.
        before: The tensors before the step, where they exist.
        mixed: Whether the step ran in mixed precision.
    """
    names, others = list(leaves(expected)), list(leaves(found))
    if len(names) != len(others):
        return "it logs other values than the sequential engine"
    # Logged values are float64 averages of values with the model's precision.
    coarsest = max(
        (TOLERANCE.get(leaf.dtype, 1e-2) for leaf in names if leaf.is_floating_point()), default=0
    )
    tolerance = MIXED_TOLERANCE if mixed else coarsest
    for want, got, least in zip(names, others, _least(expected), strict=True):
        if want.shape != got.shape:
            return "its results have other shapes than the sequential engine's"
        if not want.is_floating_point() or not want.numel():
            continue
        scale = want.nan_to_num().abs().max().clamp_min(least)
        if ((want - got).abs() > tolerance * scale).any() or (want.isnan() != got.isnan()).any():
            return f"its result {OTHER_NUMBERS}"
    if not mixed and _moves_otherwise(expected, found, before):
        return f"its step {OTHER_NUMBERS}"
    return None


def _least(expected: Tree) -> list[float]:
    """Return the lower bound of each tensor's scale.

    Uploads or client states may be gradients (SCAFFOLD's control variates), and then be zero up to
    the rounding of other tensors.
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
    """Whether the steps differ, relative to their own lengths, which may be small."""
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


def is_alike(expected: Tree, found: Tree, before: Tree) -> bool:
    """Whether two steps are alike as wholes, though entries may differ.

    Rounding switches a few units of a deep network, such as a ReLU or the largest of a pooling, and
    so gives single entries of a gradient other values.

    Args:
        expected: As in :func:`difference`.
        found: As in :func:`difference`.
        before: As in :func:`difference`.
    """
    pairs = [
        ((want - start).norm(), (want - got).norm())
        for want, got, start in _together(expected, found, before)
        if want.is_floating_point() and want.numel()
    ]
    farthest = max((step for step, _ in pairs), default=torch.zeros(()))
    return all(
        bool(apart <= MOVED * step.clamp_min(LEAST * farthest.to(step.dtype)))
        for step, apart in pairs
    )


def _together(expected: Tree, found: Tree, before: Tree) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Leaves of both results with the one that they were before."""
    for path, start in items(before):
        want, got = leaf_at(expected, path), leaf_at(found, path)
        if want is not None and got is not None and want.shape == start.shape:
            yield want, got, start
