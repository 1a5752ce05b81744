"""PerAda: personal adapters pulled to common ones, into which the server distils the clients'."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Adam, Optimizer

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_integer, check_number, check_used
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
from lightning_pfl.methods.support import distillation
from lightning_pfl.solvers.proximal import pull


class PerAda(Method):
    r"""Train a common and a personal model of few numbers, and distil the common ones on a server.

    .. math::
        v_k &\leftarrow v_k - \eta\,(\nabla F_k(v_k) + 2\lambda\,(v_k - w)), \qquad
        \theta_k \leftarrow \text{local SGD on } F_k \text{ from } w \\
        w &\leftarrow \frac1{|S_t|} \sum_{k \in S_t} \theta_k, \qquad
        w \leftarrow \text{Adam on } T^2 \operatorname{KL}\!\Big(\operatorname{softmax}
        \Big(\tfrac1{|S_t|} \sum_k f_{\theta_k}(X) / T\Big) \,\Big\|\,
        \operatorname{softmax}(f_w(X) / T)\Big)

    on public samples :math:`X`, whose labels aren't used. What doesn't train (``requires_grad``
    False: a pretrained backbone) is neither sent nor kept by clients: put an
    :class:`~lightning_pfl.models.Adapter` or :class:`~lightning_pfl.models.LowRank` beside it.
    Each step of :math:`\theta_k` is followed by one of :math:`v_k` on the same minibatch.

    Args:
        prox_weight: :math:`\lambda \ge 0`, of the penalty :math:`\lambda \lVert v_k - w \rVert^2`
            without a factor one half. Plain SGD needs ``lr * (L + 2 * prox_weight) < 2``.
        server_steps: Adam's steps in a round, >= 0. 0 is Ditto with twice the ``prox_weight``.
        server_lr: Adam's learning rate, > 0.
        server_weight_decay: Adam's weight decay, >= 0.
        temperature: :math:`T > 0`.
        distil_rounds: Rounds in which the server trains, the first ones; None for all.
        local_epochs: Passes over a client's data per round, for both models.
        local_steps: Optimizer steps instead. Exactly one of the two.
        weighting: ``"uniform"``; ``"samples"`` weights the mean by the clients' samples.

    Raises:
        ValueError: If an argument is out of its range.
        MisconfigurationException: In the first round, without public samples, or for clients of
            several architectures.

    State:
        server: ``model``. client_state: ``personal``, the model :math:`v_k` with its buffers; each
        leaf ``(clients, *shape)``.

    Deviation from the paper: the distilled model is kept without a test on validation data. The
    optimizer of the server is our choice. BatchNorm takes public samples' statistics while the
    server trains.

    Example:
        >>> PerAda(distil_rounds=2).server_phases(1)[0].steps
        500

    References:
        Xie, Huang, Chen, Liu, Zhao, Li, Anandkumar, Xiao. PerAda: Parameter-efficient federated
        learning personalization with generalization guarantees. CVPR 2024. arXiv:2302.06637,
        Algorithm 1.
    """

    about = About(
        family="a personal model",
        personal="a second model (of adapters), pulled to the common one",
        assumes="a pretrained backbone suits all; the server has public samples",
        down="$4d$, of what trains",
        up="$4d$",
        keeps="model",
        gradients="2; the server's on public samples, and a forward pass of each client's model",
        personal_model="the client's second model",
        global_model="the server's",
        paper="Xie et al. 2024",
    )
    model_scope: ClassVar[str] = BESIDE_SHARED
    needs_public_data: ClassVar[bool] = True

    def __init__(
        self,
        prox_weight: float = 1.0,
        server_steps: int = 500,
        server_lr: float = 1e-3,
        server_weight_decay: float = 1e-4,
        temperature: float = 1.0,
        distil_rounds: int | None = 30,
        local_epochs: PerClient | None = 10,
        local_steps: PerClient | None = None,
        weighting: Weighting = "uniform",
    ) -> None:
        local_epochs = None if local_steps is not None and local_epochs == 10 else local_epochs
        super().__init__(local_epochs, local_steps, weighting)
        check_number("prox_weight", prox_weight, "Use 1 as in the paper.")
        check_integer("server_steps", server_steps, 0, "Use 0 for no distillation.")
        check_number("server_lr", server_lr, "Use 1e-3, for example.", positive=True)
        check_number("server_weight_decay", server_weight_decay, "Use 0 for none.")
        check_number("temperature", temperature, "Use 1, for example.", positive=True)
        if distil_rounds is not None:
            check_integer("distil_rounds", distil_rounds, 0, "Use None for all rounds.")
        given: dict[str, object] = {"distil_rounds": distil_rounds} if server_steps == 0 else {}
        given |= {"server_steps": server_steps} if distil_rounds == 0 else {}
        given |= {
            "server_lr": server_lr,
            "server_weight_decay": server_weight_decay,
            "temperature": temperature,
        }
        distils = server_steps > 0 and distil_rounds != 0
        condition = "server_steps=1 or more, and distil_rounds=1 or more"
        check_used(PerAda.__init__, given, distils, condition)
        self.prox_weight, self.temperature = prox_weight, temperature
        self.server_steps, self.server_lr = server_steps, server_lr
        self.server_weight_decay, self.distil_rounds = server_weight_decay, distil_rounds

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line without distillation."""
        if self.server_steps and self.distil_rounds != 0:
            return []
        return [f"Nothing is distilled: that is Ditto(prox_weight={2 * self.prox_weight})."]

    # --- a client's round ---

    def init_client_state(self, model: Model) -> Tree:
        """Make a personal model that starts as the common one."""
        return {"personal": model}

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Start both models, with the received one as anchor."""
        return {
            "model": dict(received["model"]),
            "personal": client_state["personal"],
            "anchor": received["model"],
        }

    @recordable("prox_weight")
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Step the common and the personal model."""
        model, personal = state["model"], state["personal"]
        model = client.update(model, client.grad(model, minibatches))
        grads = client.grad(personal, minibatches)
        if self.prox_weight:
            grads = pull(grads, personal, state["anchor"], 2 * self.prox_weight)
        personal = client.update(personal, grads, slot="personal")
        return {**state, "model": model, "personal": personal}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the common model and store the personal one."""
        return {"model": state["model"]}, {"personal": state["personal"]}

    # --- the server's training ---

    def server_phases(self, round: int) -> tuple[Phase, ...]:
        """Train on public samples in the first rounds."""
        late = self.distil_rounds is not None and round >= self.distil_rounds
        if late or not self.server_steps:
            return ()
        return (Phase("all", steps=self.server_steps, name="distil", data="public"),)

    def server_optimizers(self, parameters: Iterable[Tensor]) -> Optimizer:
        """Make Adam."""
        return Adam(parameters, self.server_lr, weight_decay=self.server_weight_decay)

    def server_init(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Begin at the mean, with the clients' models as teachers."""
        return distillation.begin(server["model"], uploads["model"])

    def server_step(self, state: Tree, minibatches: Any, server: LocalStep) -> Tree:
        """Step towards the teachers' mean outputs."""
        return distillation.step(state, minibatches, server, self.temperature)

    def server_final(self, server: Tree, state: Tree) -> Tree:
        """Return the trained model."""
        return {**server, "model": state["model"]}

    # --- what is evaluated ---

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        """Return the stored personal model."""
        personal: Model = client_state["personal"]
        return personal
