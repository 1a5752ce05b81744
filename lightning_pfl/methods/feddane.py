"""FedDANE: local training along the mean gradient of all clients, in two trips."""

from __future__ import annotations

from typing import Any

import torch

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_number
from lightning_pfl.core.tree import Model, Tree, select, tmap, weighted_mean
from lightning_pfl.methods.base import (
    About,
    LocalStep,
    Method,
    PerClient,
    Phase,
    Weighting,
    recordable,
)
from lightning_pfl.methods.support.mean_gradient import collect, mean_gradient, no_gradients
from lightning_pfl.solvers.proximal import pull

GRADIENT = "gradient"


class FedDANE(Method):
    r"""Rounds take turns: clients send gradients, then train along their mean.

    In even rounds the clients of the cohort send :math:`\nabla F_k(x)`, and the server keeps
    :math:`\hat g = \sum_k p_k \nabla F_k(x)`. In odd rounds those of the next cohort minimise
    :math:`F_k(y) + \langle \hat g - \nabla F_k(x), y \rangle + \frac\mu2 \lVert y - x \rVert^2` by

    .. math::
        y \leftarrow y - \eta\, (\nabla F_k(y) - \nabla F_k(x) + \hat g + \mu\, (y - x))

    and the server averages. So where :math:`\nabla F_k` differs between clients, all start along
    the same direction. With :math:`\mu = 0` this is FedLin.

    Args:
        prox_weight: :math:`\mu \ge 0`. Plain SGD needs ``lr * (L + prox_weight) < 2``.
        local_epochs: Passes over a client's data in an odd round, after the one for the gradient.
        local_steps: Optimizer steps instead. Exactly one of the two.
        weighting: ``"samples"`` or ``"uniform"``.

    State:
        server: ``model``, and ``gradient``, :math:`\hat g` of the trainable parameters. Clients
        have no state.

    Deviation from the paper: clients are sampled uniformly and weighted when averaging, not sampled
    with probability :math:`p_k`; the local problem is solved by the given number of SGD epochs.
    A round of the paper is two rounds here.

    Example:
        >>> [phase.name for phase in FedDANE().phases(1)]
        ['gradient', 'local']

    References:
        Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. FedDANE: a federated Newton-type method.
        Asilomar 2019. arXiv:2001.01920, Algorithm 2. Mitra, Jaafar, Pappas, Hassani. Linear
        convergence in federated learning: tackling client heterogeneity and sparse gradients.
        NeurIPS 2021. arXiv:2102.07053, Algorithm 1 (FedLin).
    """

    about = About(
        family="one model for all",
        personal="nothing; clients train along the mean gradient (without `prox_weight` FedLin)",
        assumes="one model suits all; clients drift, and come back seldom",
        down="$4d$, in odd rounds $8d$",
        up="$4d$",
        keeps="nothing",
        gradients="1; in odd rounds 1 more, once",
        personal_model="the global model",
        global_model="the server's",
        paper="Li et al. 2019; Mitra et al. 2021",
    )

    def __init__(
        self,
        prox_weight: float = 0.1,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "samples",
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        check_number("prox_weight", prox_weight, "Use 0 for FedLin, or 0.001 to 1.")
        self.prox_weight = prox_weight

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Compute the gradient at the received model; in odd rounds train after it."""
        gradient = Phase("all", epochs=1, name=GRADIENT)
        return (gradient, *super().phases(round)) if round % 2 else (gradient,)

    def init_server(self, model: Model) -> Tree:
        """Return the global model, and a gradient of zeros."""
        trained = select(model, self.parameter_split.trainable)
        return {"model": model, "gradient": tmap(torch.zeros_like, trained)}

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send the model, and in odd rounds the mean gradient."""
        return dict(server) if info.round % 2 else {"model": server["model"]}

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Start at the received model."""
        model = received["model"]
        return {
            "model": dict(model),
            "start": model,
            "mean": received.get("gradient", {}),
            **no_gradients(select(model, self.parameter_split.trainable), info),
        }

    @recordable("prox_weight")
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Add to the gradient at the received model, or take a corrected step."""
        if client.phase == GRADIENT:
            # A copy of the dict, as the pass must not write to the received buffers.
            grads = client.grad(dict(state["start"]), minibatches)
            _, real = client.samples(minibatches)
            return collect(state, grads, real.sum(1).to(state["count"]))
        own, model = mean_gradient(state), state["model"]
        grads = client.grad(model, minibatches)
        grads = tmap(lambda g, ours, all: g - ours + all, grads, own, state["mean"])
        if self.prox_weight:
            grads = pull(grads, model, state["start"], self.prox_weight)
        return {**state, "model": client.update(model, grads)}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the gradient, or the trained model."""
        if info.round % 2:
            return {"model": state["model"]}, client_state
        return {"gradient": mean_gradient(state)}, client_state

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Average what was sent."""
        return {**server, **weighted_mean(uploads, info.weights)}
