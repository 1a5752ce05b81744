"""From the Trainer's flags to the engines' settings."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, Precision

from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.trainer.checks import refuse


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """Dtype of mixed precision, None for full precision.

    Raises:
        MisconfigurationException: For a precision other than 32, 64 and bf16-mixed.
    """
    if isinstance(precision, MixedPrecision):
        if precision.precision == "bf16-mixed":
            return torch.bfloat16
        raise refuse(
            "precision",
            precision.precision,
            "Loss scaling is not per client; use precision='bf16-mixed'.",
        )
    if type(precision) in (Precision, DoublePrecision):
        return None
    raise refuse("precision", precision.precision, "Use '32-true', '64-true' or 'bf16-mixed'.")


def engine_settings(
    trainer: Any, seed: int, chunk_size: int | None, feature_cache: bool
) -> EngineSettings:
    """What the Trainer's flags say about local training."""
    algorithm = trainer.gradient_clip_algorithm
    return EngineSettings(
        seed=seed,
        device=trainer.strategy.root_device,
        clip_value=trainer.gradient_clip_val,
        clip_algorithm="norm" if algorithm is None else str(algorithm.value),
        accumulate=trainer.accumulate_grad_batches,
        limit_train_batches=trainer.limit_train_batches,
        limit_eval_batches=trainer.limit_val_batches,
        overfit_batches=trainer.overfit_batches,
        chunk_size=chunk_size,
        autocast=autocast_dtype(trainer.precision_plugin),
        feature_cache=feature_cache,
    )
