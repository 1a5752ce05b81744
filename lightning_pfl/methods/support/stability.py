"""Warnings for learning rates that make the penalty's gradient steps diverge.

The conditions are only necessary, as the losses' curvature is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from lightning_pfl.contract.callback import FederationView
from lightning_pfl.contract.records import ClientInfo, Round
from lightning_pfl.core.tree import Tree
from lightning_pfl.methods.support.proximal import LocalSolver


def momentum(federation: FederationView) -> float | None:
    """Return the largest momentum of the clients' plain SGD, or None for other optimizers.

    Adaptive steps have no such bound.
    """
    optimizers = [architecture.optimizer for architecture in federation.architectures]
    plain = [one for one in optimizers if isinstance(one, torch.optim.SGD)]
    if len(plain) < len(optimizers):
        return None
    return float(max(group["momentum"] for one in plain for group in one.param_groups))


def displacement(steps: int, momentum: float) -> float:
    r"""Compute the length of some steps of SGD with momentum along a constant gradient.

    In units of the learning rate: :math:`\sum_{k = 1}^K \frac{1 - \beta^k}{1 - \beta}`, which is
    :math:`K` without momentum.
    """
    # Step k adds the sum of beta^j over j < k; written so that it holds for beta = 1.
    return float(sum((steps - j) * momentum**j for j in range(steps)))


def rate_along_pull(federation: FederationView, round: Round) -> float | None:
    """Compute the length of a round's steps along a constant pull; None if unknown."""
    beta = momentum(federation)
    if beta is None:
        return None
    return max(round.info.rates) * displacement(int(round.info.steps.max()), beta)


class Pull(NamedTuple):
    r"""A quadratic :math:`\frac c2 \lVert x - b \rVert^2` in a client's local problem.

    Attributes:
        strength: The largest :math:`c` of a client.
        formula: How it is computed, for a message.
        remedy: A remedy besides a smaller learning rate, for the warning.
    """

    strength: float
    formula: str
    remedy: str


class WatchedPull:
    r"""The part of a method that warns once of local steps that overshoot its quadratic.

    Gradient descent with momentum :math:`\beta` on it needs :math:`\eta c < 2 (1 + \beta)`; a
    single step, which has no momentum yet, :math:`\eta c < 2`. An exact solver takes no steps.
    """

    local_solver: LocalSolver = "optimizer"

    def pull(self, server: Tree, info: ClientInfo) -> Pull | None:
        """Return the quadratic of a round, or None for other penalties.

        Args:
            server: The server's tree.
            info: The cohort, of one client or more.
        """
        raise NotImplementedError

    def warnings_before(self, federation: FederationView, round: Round) -> Mapping[str, str]:
        """Warn of local steps that are too long, before they are taken."""
        if self.local_solver == "exact" or not len(round.info):
            return {}
        beta = momentum(federation)
        pull = None if beta is None else self.pull(federation.server, round.info)
        if beta is None or pull is None:
            return {}
        bound = 2 * (1 + beta) if int(round.info.steps.max()) > 1 else 2.0
        step = max(round.info.rates) * pull.strength
        if step < bound:
            return {}
        return {
            "pull": f"Expected lr * {pull.formula} to be below {bound:g}, but got {step:.3g} "
            f"before round {round.number}. The run is likely to diverge: use a learning rate below "
            f"{bound / pull.strength:.2g}, or {pull.remedy}."
        }
