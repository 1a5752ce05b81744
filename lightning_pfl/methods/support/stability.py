"""Steps along the pull of other clients that are too long to be stable, told before they are taken.

The losses' own curvature isn't known, so these conditions are necessary only.
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
    """The largest momentum of the clients' plain SGD; None where some optimizer is another one.

    An adaptive step has no such bound.
    """
    optimizers = [architecture.optimizer for architecture in federation.architectures]
    plain = [one for one in optimizers if isinstance(one, torch.optim.SGD)]
    if len(plain) < len(optimizers):
        return None
    return float(
        max(architecture["momentum"] for one in plain for architecture in one.param_groups)
    )


def displacement(steps: int, momentum: float) -> float:
    r"""How far gradient descent with momentum goes in some steps along a constant gradient.

    In units of the learning rate: :math:`\sum_{k = 1}^K \frac{1 - \beta^k}{1 - \beta}`, which is
    :math:`K` without momentum.
    """
    # Step k adds the sum of beta^j over j < k; written so that it holds for beta = 1.
    return float(sum((steps - j) * momentum**j for j in range(steps)))


def rate_along_pull(federation: FederationView, round: Round) -> float | None:
    """How far a round goes along a pull that stays the same in all local steps; None if unknown."""
    beta = momentum(federation)
    if beta is None:
        return None
    return max(round.info.rates) * displacement(int(round.info.steps.max()), beta)


class Pull(NamedTuple):
    r"""A quadratic :math:`\frac c2 \lVert x - b \rVert^2` in a client's local problem.

    Attributes:
        strength: The largest :math:`c` of a client.
        formula: How it is computed, for a message.
        remedy: What may be changed beside the learning rate, for a message.
    """

    strength: float
    formula: str
    remedy: str


class WatchedPull:
    r"""Part of a method: warns, once, of local steps that overshoot its quadratic.

    Gradient descent with momentum :math:`\beta` on it needs :math:`\eta c < 2 (1 + \beta)`; a
    single step, where there is no momentum yet, :math:`\eta c < 2`. An exact solver takes no steps.
    """

    local_solver: LocalSolver = "optimizer"

    def pull(self, server: Tree, info: ClientInfo) -> Pull | None:
        """The quadratic in the round that begins; None where the pull is no quadratic.

        Args:
            server: The server's tree.
            info: The cohort, of one client or more.
        """
        raise NotImplementedError

    def warnings_before(self, federation: FederationView, round: Round) -> Mapping[str, str]:
        """Find local steps that are too long, before they are taken."""
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
            f"before round {round.number}: local steps overshoot the pull of other clients, and "
            f"the run is likely to diverge. Use a learning rate below {bound / pull.strength:.2g}, "
            f"or {pull.remedy}."
        }
