"""Clients with quadratic losses, whose local training has a closed form."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_pfl.data.datasets import FederatedTensorDataset

Numbers = Sequence[float] | Sequence[Sequence[float]] | Tensor


class QuadraticModule(L.LightningModule):
    r"""A module with one parameter ``w`` and a quadratic loss.

    .. math::
        f(w) = \frac1{|B|} \sum_{j \in B} \frac{a_j}{2} \lVert w - c_j \rVert^2

    A batch is a pair ``(a, c)`` of shapes ``(batch,)`` and ``(batch, dim)``. If all of a client's
    minibatches have the mean curvature :math:`a` and the minimiser :math:`c`, :math:`K`
    steps of plain SGD map :math:`w` to :math:`c + (1 - \eta a)^K (w - c)` (:func:`descend`).

    Args:
        dim: Length of ``w``.
        lr: :math:`\eta > 0` of plain SGD; :math:`\eta a < 2` converges.
        start: Initial value of every entry of ``w``.
        dtype: Type of ``w``.

    Example:
        >>> QuadraticModule(dim=2, start=3.0).w.tolist()
        [3.0, 3.0]
    """

    def __init__(
        self, dim: int = 1, lr: float = 0.1, start: float = 0.0, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.lr = lr
        self.w = nn.Parameter(torch.full((dim,), start, dtype=dtype))

    def point(self) -> Tensor:
        """Return the point at which the quadratics are evaluated, ``(dim,)``."""
        return self.w

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Tensor:
        """Return the mean loss of a batch ``(a, c)``; logs ``train_loss``."""
        return self._step("train", batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> None:
        """Log ``val_loss``."""
        self._step("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> None:
        """Log ``test_loss``."""
        self._step("test", batch)

    def configure_optimizers(self) -> Optimizer:
        """Return plain SGD."""
        return SGD(self.parameters(), lr=self.lr)

    def _step(self, stage: str, batch: tuple[Tensor, Tensor]) -> Tensor:
        curvature, center = batch
        loss = (curvature / 2 * (self.point() - center).square().sum(1)).mean()
        self.log(f"{stage}_loss", loss, batch_size=len(curvature), on_epoch=True, on_step=False)
        return loss


def descend(w: Tensor, curvature: Tensor, center: Tensor, lr: float, steps: Tensor | int) -> Tensor:
    r"""Compute gradient descent on a quadratic: :math:`c + (1 - \eta a)^K (w - c)`.

    Args:
        w: Where it starts; broadcasts against ``center``.
        curvature: :math:`a`, one per client, ``(clients,)``.
        center: :math:`c`, ``(clients, dim)``.
        lr: :math:`\eta`.
        steps: :math:`K`, one number or one per client, ``(clients,)``.

    Returns:
        ``(clients, dim)``.
    """
    shrink = (1 - lr * curvature) ** steps
    return center + shrink.unsqueeze(-1) * (w - center)


def quadratic_clients(
    curvatures: Sequence[float] | Tensor = (1.0, 3.0),
    centers: Numbers = (0.0, 1.0),
    samples: Sequence[int] | int = 1,
    batch_size: int = 1_000_000,
    shuffle: bool = False,
    dtype: torch.dtype = torch.float64,
) -> FederatedTensorDataset:
    r"""Make clients with equal samples, so that every minibatch has the client's quadratic.

    Args:
        curvatures: :math:`a_k`, ``(clients,)``.
        centers: :math:`c_k`, ``(clients,)`` or ``(clients, dim)``.
        samples: :math:`N_k \ge 0`, one for all or one per client.
        batch_size: Samples per minibatch; the default makes every epoch one step.
        shuffle: Whether the samples are shuffled, which changes only the path through the code.
        dtype: Type of the fields.

    Example:
        >>> quadratic_clients(samples=(2, 3), batch_size=2).num_samples
        tensor([2, 3])
    """
    a = torch.as_tensor(curvatures, dtype=dtype)
    c = torch.as_tensor(centers, dtype=dtype).reshape(len(a), -1)
    counts = torch.tensor([samples] * len(a) if isinstance(samples, int) else list(samples))
    owner = torch.arange(len(a)).repeat_interleave(counts)
    positions = torch.arange(len(owner)).split(counts.tolist())
    return FederatedTensorDataset(
        (a[owner], c[owner]), positions, batch_size=batch_size, shuffle=shuffle
    )


def q2() -> FederatedTensorDataset:
    """Make two clients, curvatures (1, 3) and optima (0, 1); the mean loss has its at 0.75."""
    return quadratic_clients()
