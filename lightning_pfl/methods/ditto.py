"""Ditto: personal models pulled towards the global model of federated averaging."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_budget, check_number
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model, Tree
from lightning_pfl.methods.base import (
    BESIDE_SHARED,
    About,
    LocalStep,
    Method,
    PerClient,
    Phase,
    Weighting,
    recordable,
)
from lightning_pfl.solvers.proximal import pull


class Ditto(Method):
    r"""Clients train the global model as in FedAvg and also a personal model near it.

    .. math::
        y_k \leftarrow \text{local SGD on } F_k \text{ from } x^t, \qquad
        v_k \leftarrow v_k - \eta\,(\nabla F_k(v_k) + \lambda\,(v_k - x^t)), \qquad
        x^{t+1} = \sum_{k \in S_t} p_k\, y_k

    The anchor :math:`x^t` is the model received in this round. :math:`v_k` starts as the initial
    global model, never leaves the client, and persists while the client is not sampled. The global
    model doesn't depend on :math:`\lambda`. The proximal gradient passes through momentum and
    clipping like that of the loss; each model has its own optimizer state.

    Args:
        prox_weight: :math:`\lambda \ge 0`. 0 makes the personal models independent. Plain SGD needs
            ``lr * (L + prox_weight) < 2``.
        personal_epochs: Passes over the data for :math:`v_k`, after those for :math:`y_k`. With
            neither this nor ``personal_steps``, each step of :math:`y_k` is followed by one of
            :math:`v_k` on the same minibatch, as in the released code.
        personal_steps: Optimizer steps for :math:`v_k` instead. At most one of the two.
        local_epochs: Passes over the data for :math:`y_k` per round.
        local_steps: Optimizer steps instead. Exactly one of the two.
        weighting: ``"uniform"`` as in the released code, or ``"samples"``.

    State:
        server: ``model``. client_state: ``personal``, the complete model :math:`v_k` with its
        buffers; each leaf ``(clients, *shape)``.

    Deviation from the paper: both models use the learning rate of ``configure_optimizers``.

    Example:
        >>> Ditto(prox_weight=0.1, personal_epochs=2).personal_epochs
        2

    References:
        Li, Hu, Beirami, Smith. Ditto: fair and robust federated learning through personalization.
        ICML 2021. arXiv:2012.04221, Algorithms 1 and 2.
    """

    about = About(
        family="a personal model",
        personal="a second model, pulled to the global one",
        assumes="good models lie near a common one, which is FedAvg's",
        down="$4d$",
        up="$4d$",
        keeps="model",
        gradients="2",
        personal_model="the client's second model",
        global_model="the server's",
        paper="Li et al. 2021",
    )
    model_scope: ClassVar[str] = BESIDE_SHARED
    averages_models: ClassVar[bool] = True

    def __init__(
        self,
        prox_weight: float = 1.0,
        personal_epochs: PerClient | None = None,
        personal_steps: PerClient | None = None,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        advice = "Use 0 to train the personal models alone, or 0.1 to 2 as in the paper."
        check_number("prox_weight", prox_weight, advice)
        self.interleaved = personal_epochs is None and personal_steps is None
        if not self.interleaved:
            check_budget(personal_epochs, personal_steps, "personal")
        self.prox_weight = prox_weight
        self.personal_epochs, self.personal_steps = personal_epochs, personal_steps

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Return one phase for both models, or one for each."""
        both = Phase("all", epochs=self.local_epochs, steps=self.local_steps)
        if self.interleaved:
            return (both,)
        personal = Phase(
            "all", epochs=self.personal_epochs, steps=self.personal_steps, name="personal"
        )
        return both, personal

    def init_client_state(self, model: Model) -> Tree:
        """Make a personal model that starts as the global one."""
        return {"personal": model}

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Start both models, with the received one as anchor."""
        return {
            "model": dict(received["model"]),
            "personal": client_state["personal"],
            "anchor": received["model"],
        }

    @recordable("prox_weight", "interleaved")
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Step the global model, the personal model, or both."""
        if client.phase != "personal":
            model = client.update(state["model"], client.grad(state["model"], minibatches))
            state = {**state, "model": model}
        if self.interleaved or client.phase == "personal":
            personal = state["personal"]
            grads = client.grad(personal, minibatches)
            if self.prox_weight:
                grads = pull(grads, personal, state["anchor"], self.prox_weight)
            state = {**state, "personal": client.update(personal, grads, slot="personal")}
        return state

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the global model and store the personal one."""
        return {"model": state["model"]}, {"personal": state["personal"]}

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        """Return the stored personal model."""
        personal: Model = client_state["personal"]
        return personal

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line if the penalty is zero."""
        return [] if self.prox_weight else ["prox_weight=0 makes Ditto LocalOnly besides FedAvg."]
