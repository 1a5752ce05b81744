"""Per-FedAvg: a global model that one gradient step personalizes."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from lightning_pfl.core.checks import check_choice, check_number, check_whole
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model, Tree
from lightning_pfl.methods.base import About, LocalStep, Method, PerClient, Phase, Weighting

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

    Args:
        inner_lr: :math:`\alpha \ge 0`. 0 is FedAvg.
        order: ``"first"`` without the second derivative, ``"hessian-free"`` with a difference of
            gradients.
        difference: :math:`\delta > 0`.
        evaluation_steps: Gradient steps that personalize, at least 1.
        local_epochs: Passes over a client's data per round, of which each step takes two or three
            minibatches.
        local_steps: Steps per round instead (:math:`\tau`). Exactly one of the two.
        weighting: ``"uniform"`` as in the paper, or ``"samples"``.

    State:
        server: ``model``. Clients have no state.

    Deviation from the paper: none in the update; the outer step is the user's optimizer, the inner
    one is plain SGD.

    Example:
        >>> per_fedavg = PerFedAvg(order="hessian-free", local_steps=10)
        >>> per_fedavg.phases(0)[0].batches_per_step
        3

    References:
        Fallah, Mokhtari, Ozdaglar. Personalized federated learning with theoretical guarantees: a
        model-agnostic meta-learning approach. NeurIPS 2020. arXiv:2002.07948, Algorithm 1,
        approximations (i) and (ii) of section 5.
    """

    about = About(
        family="a personal model",
        personal="one gradient step at evaluation",
        assumes="one step away from a common model is a good one",
        down="$4d$",
        up="$4d$",
        keeps="nothing",
        gradients="1 (2 minibatches a step), 1 at evaluation",
        personal_model="the server's model now, after a step on the client's training data",
        global_model="the server's",
        paper="Fallah et al. 2020",
    )
    averages_models: ClassVar[bool] = True

    def __init__(
        self,
        inner_lr: float = 0.01,
        order: Order = "first",
        difference: float = 1e-3,
        evaluation_steps: int = 1,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        check_number("inner_lr", inner_lr, "Use 0 for FedAvg, or 0.01 as in the paper.")
        check_choice("order", order, get_args(Order), "Use one of the two.")
        check_number("difference", difference, "Use 0.001.", positive=True)
        check_whole("evaluation_steps", evaluation_steps, 1, "Use 1 as in the paper.")
        self.inner_lr, self.order, self.difference = inner_lr, order, difference
        self.evaluation_steps = evaluation_steps

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line if the inner step is zero."""
        return [] if self.inner_lr else ["inner_lr=0 makes PerFedAvg FedAvg."]

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Step on two or three independent minibatches."""
        draws = 2 if self.order == "first" else 3
        return (
            Phase("all", epochs=self.local_epochs, steps=self.local_steps, batches_per_step=draws),
        )

    def evaluation_phases(self) -> tuple[Phase, ...]:
        """Return the steps that personalize."""
        return (Phase("all", steps=self.evaluation_steps, lr=self.inner_lr, name="adaptation"),)

    def evaluation_step(self, model: Model, minibatches: Any, client: LocalStep) -> Model:
        """Take the inner step by plain SGD."""
        return moved(model, client.grad(model, minibatches), -self.inner_lr)

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Step the user's optimizer on the gradient of the loss after the inner step."""
        model, (support, query, *curvature) = state["model"], minibatches
        adapted = moved(model, client.grad(model, support), -self.inner_lr)
        grads = client.grad(adapted, query)
        if self.order == "hessian-free":
            after = client.grad(moved(model, grads, self.difference), *curvature)
            before = client.grad(moved(model, grads, -self.difference), *curvature)
            share = self.inner_lr / (2 * self.difference)
            grads = {n: u - share * (after[n] - before[n]) for n, u in grads.items()}
        return {**state, "model": client.update(model, grads)}


def moved(model: Model, direction: Model, length: float) -> Model:
    """Move a model's parameters along a direction, with the same buffers."""
    return {**model, **{n: model[n].add(d, alpha=length) for n, d in direction.items()}}
