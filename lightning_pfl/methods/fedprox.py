"""FedProx: federated averaging with a proximal term that keeps clients near the global model."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_number
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Tree
from lightning_pfl.methods.base import (
    About,
    LocalStep,
    Method,
    PerClient,
    Weighting,
    recordable,
)
from lightning_pfl.solvers.proximal import pull


class FedProx(Method):
    r"""Federated averaging with a proximal term towards the received model.

    Client :math:`k` minimises :math:`F_k(y) + \frac{\mu}{2}\lVert y - x^t\rVert^2` by

    .. math::
        y \leftarrow y - \eta\,(\nabla F_k(y) + \mu\,(y - x^t))

    where :math:`x^t` is the model received in this round. The term's gradient passes through
    momentum and clipping like that of the loss.

    Args:
        prox_weight: :math:`\mu \ge 0`. 0 is FedAvg. Plain SGD needs ``lr * (L + prox_weight) < 2``.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.
        weighting: ``"samples"`` or ``"uniform"``.

    State:
        server: ``model``. Clients have no state.

    Deviation from the paper: clients are sampled uniformly and weighted when averaging (as in its
    released code), not sampled with probability :math:`p_k`; the local problem is solved by the
    given number of SGD epochs. With ``accumulate_grad_batches`` an incomplete last step of an epoch
    has too little of the loss: its gradient is divided as if the step were whole, the term isn't.

    Example:
        >>> FedProx(prox_weight=0.01).prox_weight
        0.01

    References:
        Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated optimization in heterogeneous
        networks. MLSys 2020. arXiv:1812.06127, Algorithm 2.
    """

    about = About(
        family="one model for all",
        personal="nothing; a proximal term holds clients together",
        assumes="one model suits all; clients drift",
        down="$4d$",
        up="$4d$",
        keeps="nothing",
        gradients="1",
        personal_model="the global model",
        global_model="the server's",
        paper="Li et al. 2020",
    )
    averages_models: ClassVar[bool] = True

    def __init__(
        self,
        prox_weight: float = 0.1,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "samples",
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        advice = "Use 0 for FedAvg, or 0.001 to 1 as in the paper."
        check_number("prox_weight", prox_weight, advice)
        self.prox_weight = prox_weight

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Start at the received model, which is the anchor."""
        return {"model": dict(received["model"]), "anchor": received["model"]}

    @recordable("prox_weight")
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Step on the gradient of loss and proximal term."""
        grads = client.grad(state["model"], minibatches)
        if self.prox_weight:
            grads = pull(grads, state["model"], state["anchor"], self.prox_weight)
        return {**state, "model": client.update(state["model"], grads)}

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line if the term is zero."""
        return [] if self.prox_weight else ["prox_weight=0 makes FedProx FedAvg."]
