"""pFedMe: personalization by Moreau envelopes."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_integer, check_number
from lightning_pfl.core.tree import Model, Tree, select, tmap, weighted_mean
from lightning_pfl.methods.base import (
    BESIDE_SHARED,
    About,
    LocalStep,
    Method,
    PerClient,
    Weighting,
    recordable,
)
from lightning_pfl.solvers.proximal import pull, towards


class PFedMe(Method):
    r"""Clients minimise the Moreau envelope of their loss; its minimiser is the personal model.

    Minimises :math:`\frac1n \sum_k \min_{\theta_k} \{F_k(\theta_k) + \frac{\lambda}{2}
    \lVert\theta_k - x\rVert^2\}`. From :math:`w = \theta_k = x^t`, on each minibatch:

    .. math::
        \theta_k &\leftarrow \theta_k - \eta_p\, (\nabla F_k(\theta_k) + \lambda\,(\theta_k - w)),
        \quad K \text{ times on the same minibatch} \\
        w &\leftarrow w - \eta\, \lambda\, (w - \theta_k) \\
        x^{t+1} &= (1 - \beta)\, x^t + \beta \sum_{k \in S_t} p_k\, w_k

    :math:`\lambda (w - \theta_k)` is the envelope's gradient at :math:`w`, for the user's optimizer
    with learning rate :math:`\eta`.

    Args:
        moreau_weight: :math:`\lambda > 0`. Plain SGD needs ``lr * moreau_weight < 2``.
        inner_steps: :math:`K \ge 1`.
        inner_lr: :math:`\eta_p > 0`; needs ``inner_lr * (L + moreau_weight) < 2``.
        server_mixing: :math:`\beta > 0`.
        local_epochs: Passes over a client's data per round.
        local_steps: Steps of :math:`w` per round instead (:math:`R`). Exactly one of the two.
        weighting: ``"uniform"`` as in the paper, or ``"samples"`` as in the released code.

    State:
        server: ``model``. client_state: ``personal``, the last :math:`\theta_k` with its buffers,
        for evaluation; each leaf ``(clients, *shape)``.

    Deviation from the paper: the released code adds a weight decay of 0.001 to the inner step and
    also trains clients that aren't sampled; this doesn't. The inner problem starts at the last
    :math:`\theta_k` of the round, as in that code.

    Example:
        >>> PFedMe(moreau_weight=15.0, local_steps=20).local_steps
        20

    References:
        Dinh, Tran, Nguyen. Personalized federated learning with Moreau envelopes. NeurIPS 2020.
        arXiv:2006.08848, Algorithm 1.
    """

    about = About(
        family="a personal model",
        personal="the minimiser of the loss near the global model",
        assumes="good models lie near a common one",
        down="$4d$",
        up="$4d$",
        keeps="model",
        gradients="`inner_steps`",
        personal_model="the client's last minimiser near the global model",
        global_model="the server's",
        paper="Dinh et al. 2020",
    )
    model_scope: ClassVar[str] = BESIDE_SHARED
    averages_models: ClassVar[bool] = True

    def __init__(
        self,
        moreau_weight: float = 15.0,
        inner_steps: int = 5,
        inner_lr: float = 0.05,
        server_mixing: float = 1.0,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        given = {
            "moreau_weight": (moreau_weight, "Use 15 as in the paper."),
            "inner_lr": (inner_lr, "Use a value below 2 / (L + moreau_weight), such as 0.05."),
            "server_mixing": (server_mixing, "Use 1 to replace the model by the clients' mean."),
        }
        for name, (value, advice) in given.items():
            check_number(name, value, advice, positive=True)
        check_integer("inner_steps", inner_steps, 1, "Use 5 as in the paper.")
        self.moreau_weight, self.inner_steps, self.inner_lr = moreau_weight, inner_steps, inner_lr
        self.server_mixing = server_mixing

    def init_client_state(self, model: Model) -> Tree:
        """Make a personal model that starts as the global one."""
        return {"personal": model}

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Start both models at the received one."""
        return {"model": dict(received["model"]), "personal": dict(received["model"])}

    @recordable("moreau_weight", "inner_steps", "inner_lr")
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Approach the minimiser, then step on the envelope's gradient."""
        model, personal = state["model"], state["personal"]
        for _ in range(self.inner_steps):
            grads = pull(client.grad(personal, minibatches), personal, model, self.moreau_weight)
            step = tmap(lambda g, p: p.sub(g, alpha=self.inner_lr), grads, personal)
            personal = {**personal, **step}
        trained = select(model, self.parameter_split.trainable)
        envelope = tmap(lambda w, p: self.moreau_weight * (w - p), trained, personal)
        return {"model": client.update(model, envelope), "personal": personal}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the envelope's iterate, with the buffers of the personal model."""
        trained = select(state["model"], self.parameter_split.trainable)
        return {"model": {**state["personal"], **trained}}, {"personal": state["personal"]}

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Move towards the mean by the server's mixing weight."""
        mean = weighted_mean(uploads["model"], info.weights)
        old = select(server["model"], self.parameter_split.trainable)
        return {"model": {**mean, **towards(old, mean, self.server_mixing)}}

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        """Return the last minimiser."""
        personal: Model = client_state["personal"]
        return personal
