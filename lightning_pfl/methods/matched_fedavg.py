"""MatchedFedAvg: federated averaging of models whose hidden units are put into one order first."""

from __future__ import annotations

import torch

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_integer
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model, Tree, weighted_mean
from lightning_pfl.methods.base import About, Known, Method, PerClient, Weighting
from lightning_pfl.models.units import HiddenLayer, hidden_layers
from lightning_pfl.solvers.matching import nearest_order


class MatchedFedAvg(Method):
    r"""Average the clients' models after putting their hidden units into the server's order.

    A network computes the same with its hidden units in any order, but means of units that don't
    belong together mean nothing. With the model :math:`\pi(y)` whose units are in the orders
    :math:`\pi`,

    .. math::
        \pi_k = \arg\min_\pi \lVert \pi(y_k) - x^t \rVert^2, \qquad
        x^{t+1} = \sum_{k \in S_t} p_k\, \pi_k(y_k).

    One hidden layer is matched exactly, by an assignment. Of several, one after another is, given
    the orders of the others, until none changes.

    Args:
        sweeps: Passes over the layers at most, >= 0. 0 is FedAvg.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.
        weighting: ``"samples"``: :math:`p_k = N_k / \sum N_j`; ``"uniform"``.

    Raises:
        ValueError: If ``sweeps`` is out of its range; before the first round, if the module is no
            chain of layers (:func:`~lightning_pfl.models.units.hidden_layers`), has tied
            parameters, or no hidden layer of it trains.

    State:
        server: ``model``. Clients have none.

    Deviation from the paper: the width is the server's throughout. In FedMA it grows, and layers
    are matched and frozen in turn; the sweep is that of Git Re-Basin.

    Example:
        >>> MatchedFedAvg(local_epochs=2).sweeps
        10

    References:
        Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni. Federated learning with matched averaging.
        ICLR 2020. arXiv:2002.06440. Ainsworth, Hayase, Srinivasa. Git Re-Basin: merging models
        modulo permutation symmetries. ICLR 2023. arXiv:2209.04836, Algorithm 1.
    """

    about = About(
        family="one model for all",
        personal="nothing; hidden units are matched before they are averaged",
        assumes="one model suits all, and clients find the same units in different orders",
        down="$4d$",
        up="$4d$",
        keeps="nothing",
        gradients="1; an assignment of each client's units on the server",
        personal_model="the global model",
        global_model="the server's",
        paper="Wang et al. 2020; Ainsworth et al. 2023",
    )

    def __init__(
        self,
        sweeps: int = 10,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "samples",
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        check_integer("sweeps", sweeps, 0, "Use 10, for example.")
        self.sweeps = sweeps
        self.layers: list[HiddenLayer] = []

    def bind(self, known: Known) -> None:
        """Find the hidden layers."""
        super().bind(known)
        split = self.parameter_split
        if split.aliases:
            raise ValueError(
                "Expected layers with parameters of their own, as their units get an order each, "
                f"but got tied ones: {', '.join(split.aliases)}. Use FedAvg."
            )
        # A frozen layer has the same units in the same order everywhere.
        self.layers = [
            layer
            for layer in hidden_layers(split.module)
            if {*layer.rows, layer.columns} <= set(split.names)
        ]
        if not self.layers:
            raise ValueError(
                "Expected a hidden layer that trains, with the layer behind it, but found none in "
                f"{type(split.module).__name__}. Use FedAvg."
            )

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line if nothing is matched."""
        return [] if self.sweeps else ["sweeps=0 makes MatchedFedAvg FedAvg."]

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Match, then average."""
        matched = self._matched(uploads["model"], server["model"])
        return {**server, "model": weighted_mean(matched, info.weights)}

    def _matched(self, models: Model, target: Model) -> Model:
        """Put the units of models ``(clients, ...)`` into the order of the target's."""
        names = frozenset(self.parameter_split.trainable)
        wanted = {name: leaf.unsqueeze(0) for name, leaf in target.items()}
        for _ in range(self.sweeps):
            changed = False
            for layer in self.layers:
                goal = layer.vectors(wanted, names)[0]
                units = layer.vectors(models, names)
                order = torch.stack([nearest_order(each, goal) for each in units])
                if not torch.equal(
                    order, torch.arange(layer.units, device=order.device).expand_as(order)
                ):
                    models, changed = layer.permuted(models, order), True
            if not changed or len(self.layers) == 1:
                break
        return models
