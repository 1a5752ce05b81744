"""Checks of the callbacks' common arguments."""

from __future__ import annotations

import math

from lightning_pfl.core.checks import check_whole, is_number
from lightning_pfl.methods.base import Phase


def budget_phase(epochs: int | None, steps: int | None, default_epochs: int | None) -> Phase:
    """Require exactly one of ``epochs`` and ``steps``; ``steps`` alone replaces the default epochs.

    Returns:
        A phase of that length.

    Raises:
        ValueError: If both or neither are given, or one isn't an integer >= 0.
    """
    if steps is not None and epochs == default_epochs:
        epochs = None
    if (epochs is None) == (steps is None):
        raise ValueError(
            f"Expected exactly one of `epochs` and `steps`, but got epochs={epochs!r}, "
            f"steps={steps!r}. Set the other one to None."
        )
    name, value = ("epochs", epochs) if steps is None else ("steps", steps)
    check_whole(name, value, 0, "Use 10, for example.")
    return Phase(epochs=epochs, steps=steps)


def check_lr(lr: float | None) -> None:
    """Raise ValueError unless the learning rate is positive or None."""
    if lr is not None and not (is_number(lr) and 0 < lr < math.inf):
        raise ValueError(
            f"Expected `lr` to be a finite number > 0 or None, but got lr={lr!r}. "
            "Use None for the learning rates of `configure_optimizers`."
        )
