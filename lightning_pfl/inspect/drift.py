"""DriftMonitor: lengths and directions of the clients' updates."""

from __future__ import annotations

import lightning as L
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_pfl.contract.callback import RoundValues, require_federation
from lightning_pfl.contract.records import Round
from lightning_pfl.core.sums import as_rows
from lightning_pfl.core.tree import Tree, rows
from lightning_pfl.federation.gate import changes
from lightning_pfl.inspect.board import boards


class DriftMonitor(RoundValues):
    r"""Measures each client's update :math:`\Delta_k = y_k - x^t` and its angle to the mean update.

    .. math::
        \bar\Delta = \sum_k p_k \Delta_k, \qquad
        \cos_k = \frac{\langle \Delta_k, \bar\Delta \rangle}
                      {\lVert \Delta_k \rVert \lVert \bar\Delta \rVert}

    over the shared trainable parameters, the clients that the gate accepted, and the aggregation
    weights :math:`p_k`. With equal data all cosines are near 1; with conflicting clients they are
    small or negative, and the mean update is much shorter than the updates. Entries that are sent
    but not received count as they are, except scalars per client such as a log weight.

    Logs in every round: ``drift/norm`` and ``drift/cosine`` (means over the cohort),
    ``drift/norm/max``, ``drift/cosine/min`` and ``drift/mean_update_norm``. TensorBoard also gets
    both as histograms over the cohort. A round without updates logs nothing; for a method that
    sends nothing there is a warning at the start.

    Example:
        >>> norm, cosine, mean = drift(
        ...     {"w": torch.tensor([[3.0, 0.0], [0.0, 4.0]])}, {"w": torch.zeros(2, 2)},
        ...     torch.tensor([0.5, 0.5]))
        >>> norm.tolist(), mean
        ([3.0, 4.0], 2.5)

    References:
        Karimireddy et al. SCAFFOLD: stochastic controlled averaging for federated learning. ICML
        2020. arXiv:1910.06378, section 3 (client drift).
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Warn if the method sends nothing."""
        federation = require_federation(trainer, self)
        if not federation.parameter_split.shared:
            rank_zero_warn(
                f"DriftMonitor logs nothing, since {type(federation.method).__name__} shares no "
                "parameters."
            )

    def on_aggregation_start(
        self, trainer: L.Trainer, module: L.LightningModule, round: Round
    ) -> None:
        """Measure the accepted updates."""
        self._values = {}
        accepted = round.accepted
        info = round.info.keep(accepted)
        buffers = frozenset(require_federation(trainer, self).parameter_split.buffers)
        uploads = _without(round.uploads or {}, buffers)
        at = accepted.nonzero().flatten()
        device = next((leaf.device for _, leaf, _ in changes(uploads, {})), None)
        if not len(info) or device is None:
            return
        received = rows(round.received or {}, at.to(device))
        norm, cosine, mean = drift(uploads, received, info.weights)
        values = {
            "drift/norm": float(norm.mean()),
            "drift/norm/max": float(norm.max()),
            "drift/mean_update_norm": mean,
        }
        # A client that didn't move has no direction.
        cosine = cosine[cosine.isfinite()]
        if len(cosine):
            values["drift/cosine"] = float(cosine.mean())
            values["drift/cosine/min"] = float(cosine.min())
        self._values = values
        for board in boards(trainer):
            board.add_histogram("drift/norm", norm, global_step=round.number)
            if len(cosine):
                board.add_histogram("drift/cosine", cosine, global_step=round.number)


def drift(uploads: Tree, received: Tree, weights: Tensor) -> tuple[Tensor, Tensor, float]:
    """Compute the updates' norms, their cosines to the mean update, and its norm.

    Args:
        uploads: Trees that clients send, ``(clients, ...)``.
        received: Trees that they received, ``(clients, ...)``.
        weights: Aggregation weights, ``(clients,)``, summing to 1.

    Returns:
        Two float64 tensors ``(clients,)`` on the CPU, and a number. The cosine is NaN for a client
        that didn't move, and for all if the mean is zero.
    """
    squares = torch.zeros(len(weights), dtype=torch.float64)
    products, mean_square = torch.zeros_like(squares), 0.0
    # Leaf by leaf: one matrix of all updates would double the memory of a round.
    for _, leaf, before in changes(uploads, received):
        change = leaf if before is None else leaf - before
        flat = as_rows(change).double()
        mean = flat.T @ weights.to(flat)
        squares += flat.square().sum(1).cpu()
        products += (flat @ mean).cpu()
        mean_square += float(mean.square().sum())
    norm = squares.sqrt()
    return norm, products / (norm * mean_square**0.5), mean_square**0.5


def _without(tree: Tree, names: frozenset[str]) -> Tree:
    return {
        name: _without(leaf, names) if isinstance(leaf, dict) else leaf
        for name, leaf in tree.items()
        if name not in names
    }
