"""The Trainer's parts: its loops, the method among its callbacks, and its flags on training."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from lightning_pfl._lightning import connected, send_without_clutter, take_over
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.federation.federation import Federation
from lightning_pfl.methods.base import Method
from lightning_pfl.metrics.history import AT_END
from lightning_pfl.trainer import checks
from lightning_pfl.trainer.data import batch_hooks, true_dtype
from lightning_pfl.trainer.evaluation_loop import FederatedEvaluationLoop
from lightning_pfl.trainer.fit_loop import FederatedLoop
from lightning_pfl.trainer.prediction_loop import FederatedPredictionLoop
from lightning_pfl.trainer.round_log import RoundLog


def install_loops(trainer: L.Trainer, federation: Federation) -> None:
    """Replace Lightning's loops by federated ones, with the Trainer's configuration."""
    if not isinstance(trainer.fit_loop, FederatedLoop):
        validation = trainer.fit_loop.epoch_loop.val_loop
        trainer.fit_loop = take_over(FederatedLoop, trainer.fit_loop)
        fit_loop(trainer).log = RoundLog()
        trainer.fit_loop.epoch_loop.val_loop = take_over(FederatedEvaluationLoop, validation)
        trainer.validate_loop = take_over(FederatedEvaluationLoop, trainer.validate_loop)
        trainer.test_loop = take_over(FederatedEvaluationLoop, trainer.test_loop)
        trainer.predict_loop = take_over(FederatedPredictionLoop, trainer.predict_loop)
        send_without_clutter(trainer, AT_END)
    fit = fit_loop(trainer)
    for loop in federated_loops(trainer):
        loop.federation = federation
    fit.epoch_loop.val_loop.on_validated = fit.validated  # type: ignore[attr-defined]
    federation.training_data = fit.require_data


def federated_loops(trainer: L.Trainer) -> list[FederatedLoop]:
    """Return all federated loops; the others have in common with the first what is used here."""
    fit = trainer.fit_loop
    loops = (fit, fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    return cast("list[FederatedLoop]", [*loops, trainer.predict_loop])


def fit_loop(trainer: L.Trainer) -> FederatedLoop:
    """Return the federated fit loop of a Trainer."""
    return cast("FederatedLoop", trainer.fit_loop)


def find_method(
    trainer: L.Trainer, given: Method | None, default: Callable[[], Method] | None
) -> Method:
    """Find the only method of a run, and add it to the Trainer's callbacks.

    Args:
        trainer: The Trainer.
        given: The method that the strategy was given.
        default: Makes the method where there is none.

    Raises:
        MisconfigurationException: If there is none, or if there are several.
    """
    callbacks = connected(trainer).callbacks
    found = [callback for callback in callbacks if isinstance(callback, Method)]
    if not found and given is None and default is not None:
        given = default()
    if given is not None and given not in found:
        callbacks.insert(0, given)
        found.append(given)
    if len(found) != 1:
        names = ", ".join(type(method).__name__ for method in found) or "none"
        raise MisconfigurationException(
            f"Expected exactly one federated method, but found {names} "
            "(FederatedStrategy(method=...) and Trainer(callbacks=...) together). Pass one, for "
            "example FederatedStrategy(FedAvg()), or set `method:` in the recipe."
        )
    return found[0]


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """Return the dtype of mixed precision; None without it.

    Raises:
        MisconfigurationException: For a plugin of another kind.
    """
    if isinstance(precision, MixedPrecision):
        return torch.bfloat16 if precision.precision == "bf16-mixed" else torch.float16
    if type(precision) is Precision or true_dtype(precision) is not None:
        return None
    raise checks.refuse(
        "precision", precision.precision, "Use '32-true' or another '-true', or '-mixed'."
    )


def engine_settings(
    trainer: L.Trainer, seed: int, chunk_size: int | None, feature_cache: bool
) -> EngineSettings:
    """Collect the Trainer's flags on local training."""
    algorithm = trainer.gradient_clip_algorithm
    return EngineSettings(
        seed=seed,
        device=trainer.strategy.root_device,
        clip_value=trainer.gradient_clip_val,
        clip_algorithm="norm" if algorithm is None else str(algorithm.value),
        accumulate=trainer.accumulate_grad_batches,
        limit_train_batches=trainer.limit_train_batches,
        overfit_batches=connected(trainer).overfit_batches,
        chunk_size=chunk_size,
        autocast=autocast_dtype(trainer.precision_plugin),
        default_dtype=true_dtype(trainer.precision_plugin),
        feature_cache=feature_cache,
        batch_hooks=batch_hooks(trainer),
    )
