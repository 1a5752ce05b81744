"""The hooks of a module that are called inside a step, or on its minibatch."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L

from lightning_pfl._lightning import is_overridden

STEP_HOOKS = (
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_start",
    "on_train_batch_end",
)
"""Called in every step of every client."""
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Called on every minibatch, in this order; a data module has them as well."""


def overridden(module: L.LightningModule, hooks: Sequence[str]) -> list[str]:
    """Name the hooks that a module overrides."""
    return [hook for hook in hooks if is_overridden(hook, module)]
