"""Per-FedAvg: a global model that one gradient step personalizes."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_choice, check_integer, check_number, check_used
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model, Tree, scale, select, tmap, weighted_mean
from lightning_pfl.methods.base import (
    About,
    LocalStep,
    Method,
    PerClient,
    Phase,
    Weighting,
    recordable,
)

Order = Literal["first", "hessian-free"]


class PerFedAvg(Method):
    r"""Clients minimise their loss after one gradient step, as in MAML.

    Minimises :math:`\frac1n \sum_k F_k(x - \alpha \nabla F_k(x))`. With independent minibatches
    :math:`D, D', D''` in each step, and :math:`\eta` the learning rate of the user's optimizer:

    .. math::
        \tilde x &= x - \alpha\, g(x; D), \qquad u = g(\tilde x; D') \\
        x &\leftarrow x - \eta\, u \quad \text{(first order), or} \\
        x &\leftarrow x - \eta \Bigl(u - \alpha\,
        \frac{g(x + \delta u; D'') - g(x - \delta u; D'')}{2\delta}\Bigr)
        \quad \text{(Hessian-free)}

    The server averages. A client is evaluated with :math:`x - \alpha\, g(x; D)` on a minibatch of
    its training data.

    With ``learn_inner_lr`` this is Meta-SGD: :math:`\alpha` is a vector with a rate for each
    parameter, all products with it are by entries, and it is learned and averaged like :math:`x`:

    .. math::
        \alpha \leftarrow \alpha + \eta\, g(x; D) \odot u

    Args:
        inner_lr: :math:`\alpha \ge 0`. 0 is FedAvg, unless it is learned.
        learn_inner_lr: Whether each parameter learns its rate, from ``inner_lr`` on.
        order: ``"first"`` without the second derivative, ``"hessian-free"`` with a difference of
            gradients.
        difference: :math:`\delta > 0`.
        evaluation_steps: Gradient steps that personalize, at least 1.
        local_epochs: Passes over a client's data per round, of which each step takes two or three
            minibatches.
        local_steps: Steps per round instead (:math:`\tau`). Exactly one of the two.
        weighting: ``"uniform"`` as in the paper, or ``"samples"``.

    State:
        server: ``model``; with ``learn_inner_lr`` also ``rates``, of the trainable parameters.
        Clients have no state.

    Deviation from the paper: none in the update; the outer step, also of the rates, is the user's
    optimizer, the inner one is plain SGD.

    Example:
        >>> per_fedavg = PerFedAvg(order="hessian-free", local_steps=10)
        >>> per_fedavg.phases(0)[0].batches_per_step
        3

    References:
        Fallah, Mokhtari, Ozdaglar. Personalized federated learning with theoretical guarantees: a
        model-agnostic meta-learning approach. NeurIPS 2020. arXiv:2002.07948, Algorithm 1,
        approximations (i) and (ii) of section 5. Li, Zhou, Chen, Li. Meta-SGD: learning to learn
        quickly for few-shot learning. 2017. arXiv:1707.09835, Algorithm 1. Chen, Luo, Dong, Li, He.
        Federated meta-learning with fast convergence and efficient communication. 2018.
        arXiv:1802.07876, Algorithm 1.
    """

    about = About(
        family="a personal model",
        personal="one gradient step at evaluation; with `learn_inner_lr` Meta-SGD",
        assumes="one step away from a common model is a good one",
        down="$4d$, with `learn_inner_lr` $8d$",
        up="$4d$, with `learn_inner_lr` $8d$",
        keeps="nothing",
        gradients="1 (2 minibatches a step), 1 at evaluation",
        personal_model="the server's model now, after a step on the client's training data",
        global_model="the server's",
        paper="Fallah et al. 2020",
    )

    def __init__(
        self,
        inner_lr: float = 0.01,
        order: Order = "first",
        difference: float = 1e-3,
        evaluation_steps: int = 1,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "uniform",
        learn_inner_lr: bool = False,
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        check_types(PerFedAvg.__init__, {"learn_inner_lr": learn_inner_lr})
        check_number("inner_lr", inner_lr, "Use 0 for FedAvg, or 0.01 as in the paper.")
        check_choice("order", order, get_args(Order), "Use one of the two.")
        check_number("difference", difference, "Use 0.001.", positive=True)
        check_integer("evaluation_steps", evaluation_steps, 1, "Use 1 as in the paper.")
        used = order == "hessian-free"
        check_used(PerFedAvg.__init__, {"difference": difference}, used, "order='hessian-free'")
        self.inner_lr, self.order, self.difference = inner_lr, order, difference
        self.evaluation_steps, self.learn_inner_lr = evaluation_steps, learn_inner_lr
        self.averages_models = not learn_inner_lr  # type: ignore[misc]  # rates are averaged too

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line if the inner step is zero."""
        still = not self.inner_lr and not self.learn_inner_lr
        return ["inner_lr=0 makes PerFedAvg FedAvg."] if still else []

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Step on two or three independent minibatches."""
        draws = 2 if self.order == "first" else 3
        return (
            Phase("all", epochs=self.local_epochs, steps=self.local_steps, batches_per_step=draws),
        )

    def evaluation_phases(self) -> tuple[Phase, ...]:
        """Return the steps that personalize."""
        return (Phase("all", steps=self.evaluation_steps, lr=self.inner_lr, name="adaptation"),)

    def evaluation_step(
        self, received: Tree, model: Model, minibatches: Any, client: LocalStep
    ) -> Model:
        """Take the inner step by plain SGD."""
        return moved(model, self._scaled(client.grad(model, minibatches), received), -1)

    def init_server(self, model: Model) -> Tree:
        """Return the model, and its equal rates if they are learned."""
        server = super().init_server(model)
        if self.learn_inner_lr:
            trained = select(model, self.parameter_split.trainable)
            server["rates"] = tmap(lambda leaf: torch.full_like(leaf, self.inner_lr), trained)
        return server

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send all of it."""
        return dict(server)

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Start at the received model, and rates."""
        return {name: dict(entries) for name, entries in received.items()}

    @recordable("order", "difference", "inner_lr", "learn_inner_lr")
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Step the user's optimizer on the gradients of the loss after the inner step."""
        model, (support, query, *curvature) = state["model"], minibatches
        inner = client.grad(model, support)
        grads = by_model = client.grad(moved(model, self._scaled(inner, state), -1), query)
        if self.order == "hessian-free":
            # H (alpha u), from gradients on both sides of x; one alpha for all may stay outside.
            along = self._scaled(grads, state) if self.learn_inner_lr else grads
            share = (1 if self.learn_inner_lr else self.inner_lr) / (2 * self.difference)
            after = client.grad(moved(model, along, self.difference), *curvature)
            before = client.grad(moved(model, along, -self.difference), *curvature)
            by_model = {n: u - share * (after[n] - before[n]) for n, u in grads.items()}
        new = {"model": client.update(model, by_model)}
        if self.learn_inner_lr:
            # A minibatch that `training_step` skips has no gradient.
            by_rates = {n: -inner[n] * u for n, u in grads.items() if n in inner}
            new["rates"] = client.update(state["rates"], by_rates, slot="rates")
        return new

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send what was trained."""
        return state, client_state

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Average."""
        return weighted_mean(uploads, info.weights)

    def _scaled(self, direction: Model, tree: Tree) -> Model:
        """Multiply a direction by the inner rate or rates."""
        if self.learn_inner_lr:
            return tmap(torch.mul, direction, tree["rates"])
        return scale(direction, self.inner_lr)


def moved(model: Model, direction: Model, length: float) -> Model:
    """Move a model's parameters along a direction, with the same buffers."""
    return {**model, **{n: model[n].add(d, alpha=length) for n, d in direction.items()}}
