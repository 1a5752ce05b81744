"""SubspaceDistance: the distance of the shared representation to a known one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pfl.contract.callback import FederatedCallback, require_federation
from lightning_pfl.contract.records import Round
from lightning_pfl.core.argument_types import check_types
from lightning_pfl.federation.federation import Federation
from lightning_pfl.metrics.subspace import principal_angle_distance


class SubspaceDistance(FederatedCallback):
    r"""Logs the principal-angle distance of the shared representation to the true one.

    .. math::
        \operatorname{dist}(B, B_*) = \lVert (I - Q Q^\top)\, Q_* \rVert_2 \in [0, 1]

    with orthonormal bases of both column spaces: the sine of their largest angle. Logged after
    every round to every logger, as ``subspace/distance``; the authors' notebook plots its square.

    Args:
        truth: :math:`B_*`, ``(d, k)``, with independent columns: a tensor, or rows of numbers.
            None: the ``truth()`` of the data module's source.
        parameter: Name of the shared weight ``(k, d)`` whose rows span the representation.

    Attributes:
        distances: The distances so far, by round.

    Raises:
        MisconfigurationException: At the start of a run, without a truth or such a weight.

    Example:
        >>> SubspaceDistance([[1.0], [0.0]]).truth.shape
        torch.Size([2, 1])

    References:
        Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized
        federated learning. ICML 2021. arXiv:2102.07078, definition 1.
    """

    def __init__(
        self,
        truth: Tensor | Sequence[Sequence[float]] | None = None,
        parameter: str = "backbone.weight",
    ) -> None:
        check_types(SubspaceDistance.__init__, locals())
        try:
            self.truth = None if truth is None else torch.as_tensor(truth, dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"Expected `truth` to be a matrix, but got {truth=}. Give a row for each input."
            ) from error
        self.parameter = parameter
        self.distances: dict[int, float] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Clear the rounds of another fit."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self.distances = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Require a shared representation and a truth of its shape."""
        federation = require_federation(trainer, self)
        weight, basis = self._weight(federation), self._basis(trainer)
        if weight.T.shape != basis.shape:
            raise MisconfigurationException(
                f"Expected `truth` to have the shape of the representation, {tuple(weight.T.shape)}"
                f", but got {tuple(basis.shape)}. Give the module one feature per column of truth."
            )

    def on_round_end(self, trainer: L.Trainer, module: L.LightningModule, round: Round) -> None:
        """Measure the server's representation."""
        weight = self._weight(require_federation(trainer, self)).double().cpu()
        distance = principal_angle_distance(weight.T, self._basis(trainer))
        self.distances[round.number] = float(distance)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the round's distance."""
        if trainer.current_epoch in self.distances:
            pl_module.log("subspace/distance", self.distances[trainer.current_epoch], batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """Return the distances so far, for checkpoints."""
        return {"distances": dict(self.distances)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the values of `state_dict`."""
        self.distances = dict(state_dict["distances"])

    def _weight(self, federation: Federation) -> Tensor:
        shared = federation.shared_model()
        if self.parameter not in shared or shared[self.parameter].ndim != 2:
            raise MisconfigurationException(
                f"Expected a shared matrix {self.parameter!r}, but the clients of "
                f"{type(federation.method).__name__} share {', '.join(shared) or 'nothing'}. Name "
                "one of these as `parameter`, or use a method with a shared representation."
            )
        return shared[self.parameter]

    def _basis(self, trainer: L.Trainer) -> Tensor:
        if self.truth is not None:
            return self.truth
        source: Any = getattr(getattr(trainer, "datamodule", None), "source", None)
        if not hasattr(source, "truth"):
            raise MisconfigurationException(
                "Expected a known representation, but got truth=None and data without one. Give "
                "`truth`, or use a source such as LinearRepresentation."
            )
        self.truth = torch.as_tensor(source.truth()[0], dtype=torch.float64)
        return self.truth
