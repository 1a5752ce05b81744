"""APFL: mixtures of a personal model with the global one."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_choice, is_number
from lightning_pfl.core.mixture import SHARE, mixture
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model, Tree, dot, scale, select, sub
from lightning_pfl.methods.base import (
    BESIDE_SHARED,
    About,
    LocalStep,
    Method,
    PerClient,
    Weighting,
    recordable,
)
from lightning_pfl.solvers.proximal import towards

Mix = Literal["parameters", "outputs"]


class APFL(Method):
    r"""Clients train the global model and, through a mixture with it, a personal model.

    .. math::
        w &\leftarrow w - \eta\, \nabla F_k(w), \qquad
        \bar v = \alpha_k v_k + (1 - \alpha_k)\, w, \qquad
        v_k \leftarrow v_k - \eta\, \alpha_k \nabla F_k(\bar v) \\
        \alpha_k &\leftarrow \operatorname{clip}_{[0, 1]}
        \bigl(\alpha_k - \eta\, \langle \nabla F_k(\bar v), v_k - w \rangle\bigr)
        \quad \text{(adaptive: in the first step of a round)}

    :math:`w` starts at the received model and is averaged; :math:`v_k` and :math:`\alpha_k` never
    leave the client and persist. A client is evaluated with :math:`\alpha_k v_k + (1 - \alpha_k)
    x`, where :math:`x` is the current global model. The global model doesn't depend on
    :math:`\alpha`.

    With ``mix="outputs"`` the mixture is :math:`\alpha_k f_{v_k} + (1 - \alpha_k) f_w` of outputs,
    as in the released code; for linear models both are equal.

    Args:
        mixing: :math:`\alpha` in [0, 1] of all clients; the initial one if adaptive. 0 is FedAvg, 1
            trains the personal models alone.
        adaptive: Whether each client learns its :math:`\alpha_k`.
        mix: ``"parameters"`` as in the paper, or ``"outputs"`` of the module, whose steps must then
            call ``self(inputs)``.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.
        weighting: ``"uniform"`` as in the paper, or ``"samples"``.

    State:
        server: ``model``. client_state: ``personal``, the model :math:`v_k` with the buffers of the
        mixture, each leaf ``(clients, *shape)``; if adaptive ``mixing``, ``(clients,)``.

    Deviation from the paper: the personal model steps with the user's optimizer on the gradient
    :math:`\alpha_k \nabla F_k(\bar v)`, where :math:`\bar v` has the :math:`w` after its step, as
    in the released code (Algorithm 1: before it); that code also regularises :math:`\alpha_k`.

    Example:
        >>> APFL(mixing=0.25, adaptive=True).mixing
        0.25

    References:
        Deng, Kamani, Mahdavi. Adaptive personalized federated learning. 2020. arXiv:2003.13461,
        Algorithm 1 and equation 10.
    """

    about = About(
        family="a personal model",
        personal="a second model and its weight in a mixture with the global one",
        assumes="a mixture of own and common model is good",
        down="$4d$",
        up="$4d$",
        keeps="model",
        gradients="2",
        personal_model="the client's second model mixed with the server's of now",
        global_model="the server's",
        paper="Deng et al. 2020",
    )
    model_scope: ClassVar[str] = BESIDE_SHARED
    averages_models: ClassVar[bool] = True

    def __init__(
        self,
        mixing: float = 0.5,
        adaptive: bool = False,
        mix: Mix = "parameters",
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        check_types(APFL.__init__, {"adaptive": adaptive})
        if not is_number(mixing) or not 0 <= mixing <= 1:
            raise ValueError(
                f"Expected `mixing` to be in [0, 1], but got mixing={mixing!r}. Use 0.25, 0.5 or "
                "0.75 as in the paper."
            )
        check_choice("mix", mix, get_args(Mix), "Use 'parameters' as in the paper.")
        self.mixing, self.adaptive, self.mix = mixing, adaptive, mix

    def init_client_state(self, model: Model) -> Tree:
        """Make a personal model that starts as the global one, and the weight if it is learned."""
        if not self.adaptive:
            return {"personal": model}
        first = model[self.parameter_split.trainable[0]]
        return {"personal": model, "mixing": torch.full_like(first.flatten()[0], self.mixing)}

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Start both models."""
        state = {"model": dict(received["model"]), **client_state}
        if self.adaptive:
            state["steps"] = torch.zeros_like(client_state["mixing"])
        return state

    @recordable("mixing", "adaptive", "mix")
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Step the global model, then the personal one through the mixture."""
        model = client.update(state["model"], client.grad(state["model"], minibatches))
        personal, mixing = state["personal"], state.get("mixing", self.mixing)
        grads, slope = self._gradients(personal, model, mixing, minibatches, client)
        state = {**state, "model": model}
        if slope is None:  # a minibatch that `training_step` skips
            return state
        if self.adaptive:
            learned = (mixing - client.lr * slope).clamp(0, 1)
            state["mixing"] = learned.where(state["steps"] == 0, mixing)
            state["steps"] = state["steps"] + 1
        state["personal"] = client.update(personal, grads, slot="personal")
        return state

    def _gradients(
        self,
        personal: Model,
        model: Model,
        mixing: float | Tensor,
        minibatches: Any,
        client: LocalStep,
    ) -> tuple[Model, Tensor | None]:
        """Compute gradients of the mixture's loss by the personal model and by the weight.

        The latter is None where `training_step` skips the minibatch.
        """
        if self.mix == "parameters":
            grads = client.grad(self._mixture(personal, model, mixing), minibatches)
            if not grads:
                return grads, None
            slope = dot(grads, sub(select(personal, grads), model))
            return scale(grads, mixing), slope
        grads = client.grad(self._mixture(personal, model, mixing), minibatches, also=(SHARE,))
        return grads, grads.pop(SHARE, None)

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the global model; store the personal one and its weight."""
        return {"model": state["model"]}, {name: state[name] for name in client_state}

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        """Mix the personal model with the current global one."""
        mixing = client_state.get("mixing", self.mixing)
        return self._mixture(client_state["personal"], received["model"], mixing)

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line if the weight is 0 or 1."""
        if self.adaptive or self.mixing not in (0, 1):
            return []
        what = "LocalOnly besides FedAvg" if self.mixing else "FedAvg"
        return [f"mixing={self.mixing} makes APFL {what}."]

    def _mixture(self, personal: Model, model: Model, mixing: float | Tensor) -> Model:
        """Mix two models; mixed parameters have the buffers of the personal model."""
        if self.mix == "outputs":
            first = next(iter(personal.values()))
            share = mixing if isinstance(mixing, Tensor) else _shares(mixing, first)
            return mixture(personal, model, share)
        trainable = self.parameter_split.trainable
        return {**personal, **towards(select(model, trainable), personal, mixing)}


def _shares(mixing: float, like: Tensor) -> Tensor:
    """Make the same weight for every client of a ``(clients, ...)`` leaf."""
    return torch.full((len(like),), mixing, dtype=like.dtype, device=like.device)
