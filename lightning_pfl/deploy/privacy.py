"""Noise for uploads, by Flower's modifier for local differential privacy."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lightning_pfl.core.tree import Tree
from lightning_pfl.methods.base import Method


def check_privacy(settings: Mapping[str, float], method: Method) -> None:
    """Refuse noise that the method can't use.

    Args:
        settings: ``clipping_norm``, ``sensitivity``, ``epsilon`` and ``delta``.
        method: The method.

    Raises:
        ValueError: If a setting is missing or unknown, or if the method needs more than a mean.
    """
    names = {"clipping_norm", "sensitivity", "epsilon", "delta"}
    if settings.keys() != names:
        raise ValueError(
            f"Expected `privacy` to have the settings {', '.join(sorted(names))}, but got "
            f"privacy={dict(settings)!r}. Give all four."
        )
    if not method.averages_models:
        raise ValueError(
            f"Expected a method whose server uses the mean of the uploaded models alone, but got "
            f"{type(method).__name__} with `privacy`. Use FedAvg, FedRep or Ditto, say, or remove "
            "`privacy`."
        )
    _make_mod(settings)


def _make_mod(settings: Mapping[str, float]) -> Any:
    from flwr.clientapp.mod import LocalDpMod

    try:
        return LocalDpMod(**settings)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"Expected `privacy` to be what Flower's LocalDpMod takes, but got "
            f"privacy={dict(settings)!r}: {error} Change that number."
        ) from error


def add_noise(uploads: Tree, received: Tree, settings: Mapping[str, float]) -> Tree:
    """Clip the change of every client's model, and add noise to it.

    Args:
        uploads: What the clients would send, ``{"model": (clients, ...)}``.
        received: What they have received, ``(clients, ...)``.
        settings: As for :func:`check_privacy`.

    Returns:
        What they send instead. Integer entries, such as BatchNorm's counters, stay.
    """
    from flwr.app import Array, ArrayRecord, RecordDict

    model = uploads["model"]
    names = [name for name, leaf in model.items() if leaf.is_floating_point()]
    protect = _make_mod(settings)  # called with messages of no run, so without a context

    def record(tree: Tree, client: int) -> Any:
        return RecordDict(
            {"model": ArrayRecord({n: Array(tree[n][client].cpu().numpy().copy()) for n in names})}
        )

    def message(content: Any) -> Any:
        return SimpleNamespace(content=content, has_error=lambda: False)

    before = np.random.get_state()
    # Not the run's seed, which the server knows.
    np.random.seed([secrets.randbits(32) for _ in range(64)])
    try:
        noisy = {n: model[n].clone() for n in names}
        for client in range(len(model[names[0]]) if names else 0):
            shared = received["model"]
            moved = any((model[n][client] != shared[n][client]).any() for n in names)
            # Flower divides by the norm of the change: one that is zero begins 1e-6 away.
            asked = message(record(shared if moved else _nudge(shared, names[0]), client))
            sent = message(record(model, client))
            answer = protect(asked, None, lambda *_, sent=sent: sent)
            for name, array in answer.content["model"].items():
                noisy[name][client] = torch.from_numpy(array.numpy())
    finally:
        np.random.set_state(before)
    return {"model": {**model, **noisy}}


def _nudge(model: Tree, name: str) -> Tree:
    return {**model, name: model[name] + 1e-6}
