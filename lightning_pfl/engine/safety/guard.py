"""Checks of batched programs in every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_pfl.core.tree import Model, Tree, is_expanded, named_leaves
from lightning_pfl.engine.program import NotVectorizableError
from lightning_pfl.engine.safety.global_rng import Elsewhere, watch_global_rng
from lightning_pfl.engine.safety.snapshot import changed, is_same, restore, snapshot

DRAWS_ELSEWHERE = "the step draws from Python's or NumPy's random generator"


@contextmanager
def guarded(
    module: nn.Module, key: int, known: Sequence[tuple[str, Tensor]] | None = None
) -> Iterator[Elsewhere]:
    """Run steps of many clients as one program, and check that they leave no trace.

    Python runs once for all clients: an attribute that a step sets would be shared by them, or
    invalid, and a number of Python's generator would be the same for all. After an error the module
    is restored, so that the other engine can run the clients.

    Args:
        module: The user's module.
        key: Seed of the global generators inside the block.
        known: What steps may write to whose code is known: tensors, with their names. Such code
            leaves no other trace but draws from torch's generators, so that only these are seeded.
            None where it isn't known.

    Yields:
        Whether the global generators were used, valid after the block.

    Raises:
        NotVectorizableError: If a step has changed an attribute of the module, or has used Python's
            or NumPy's generator.
    """
    if known is not None:
        with _tensors_unwritten(known), watch_global_rng(key, torch_alone=True) as elsewhere:
            yield elsewhere
        return
    with unwritten(module):
        with watch_global_rng(key) as elsewhere:
            yield elsewhere
        if elsewhere.moved:
            raise NotVectorizableError(DRAWS_ELSEWHERE)


@contextmanager
def unwritten(module: nn.Module) -> Iterator[None]:
    """Check that steps of many clients leave a module as it was, and restore it after an error.

    Raises:
        NotVectorizableError: If a step has changed an attribute of the module.
    """
    before = snapshot(module)
    try:
        yield
        _require(changed(module, before))
    except Exception:
        restore(module, before)
        raise


@contextmanager
def _tensors_unwritten(held: Sequence[tuple[str, Tensor]]) -> Iterator[None]:
    """Check that steps of many clients don't write to tensors; see `unwritten`."""
    before = [(name, value, value.detach().clone()) for name, value in held]
    try:
        yield
        _require(next((name for name, value, old in before if not is_same(value, old)), None))
    except Exception:
        for _, value, old in before:
            value.data.copy_(old)
        raise


def _require(stored: str | None) -> None:
    if stored is not None:
        raise NotVectorizableError(f"the step changes `{stored}`, which all clients share")


@contextmanager
def weights_unwritten(module: nn.Module, tree: Tree, step: str) -> Iterator[None]:
    """Check that steps don't write to weights that clients share.

    Args:
        module: The user's module; clients share its weights with ``requires_grad=False``.
        tree: The clients' initial trees.
        step: Name of the step.

    Raises:
        ValueError: If a step has; the weights are restored.
    """
    shared: Model = {n: p.detach() for n, p in module.named_parameters() if not p.requires_grad}
    named = named_leaves(tree).items()
    shared |= {name.removeprefix("model/"): leaf for name, leaf in named if is_expanded(leaf)}
    before = {name: leaf.clone() for name, leaf in shared.items()}
    yield
    written = [
        name
        for name, leaf in shared.items()
        if not torch.allclose(leaf, before[name], rtol=0, atol=0, equal_nan=True)
    ]
    for name in written:
        shared[name].copy_(before[name])
    if written:
        raise ValueError(
            f"Expected weights to be changed by the optimizer alone, but `{step}` of "
            f"{type(module).__name__} writes to {written[0]!r}. Use a buffer (`register_buffer`), "
            "or for constraints `torch.nn.utils.parametrize` instead of `max_norm`."
        )
