"""FedAvg: federated averaging, with an optional server optimizer (FedAvgM)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.tree import Model, Tree, select, weighted_mean, weighted_sum
from lightning_pfl.methods.base import About, Method, PerClient, Weighting
from lightning_pfl.solvers.optim import functional_step


class FedAvg(Method):
    r"""Federated averaging: clients train the global model, and the server averages their models.

    .. math::
        x^{t+1} = \sum_{k \in S_t} p_k\, y_k, \qquad y_k = \text{local SGD on } F_k \text{ from }
        x^t

    where :math:`p_k` are the weights of ``weighting``. With a server optimizer, the server treats
    :math:`\Delta = x^t - \sum_k p_k y_k` as a gradient and takes one step of that optimizer
    instead; SGD with learning rate 1 is plain averaging, SGD with momentum is FedAvgM. Adam
    on the server isn't the published FedAdam: torch's corrects the moments' bias, starts the second
    moment at 0 and has a small epsilon, where FedAdam starts it at :math:`\tau^2` and adds
    :math:`\tau`. Float buffers (BatchNorm statistics) are always averaged, integer buffers take
    the maximum.

    Args:
        local_epochs: Passes over a client's data per round (:math:`E`).
        local_steps: Optimizer steps per round instead (:math:`K`). Exactly one of the two.
        weighting: ``"samples"``: :math:`p_k = N_k / \sum_{S_t} N_j`; ``"uniform"``: :math:`p_k =
            1/|S_t|`.
        server_optimizer: Makes a torch optimizer from an iterable of parameters, e.g.
            ``lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9)``; None averages.

    State:
        server: ``model``, and ``optimizer`` (its tensors per parameter) with a server optimizer.
            Clients have no state.

    Deviation from the paper: clients are weighted within the sampled cohort, as in its released
    code.

    Example:
        >>> import torch
        >>> FedAvg(server_optimizer=lambda p: torch.optim.Adam(p, lr=1e-2)).weighting
        'samples'

    References:
        McMahan, Moore, Ramage, Hampson, Aguera y Arcas. Communication-efficient learning of deep
        networks from decentralized data. AISTATS 2017. arXiv:1602.05629, Algorithm 1. Reddi et al.
        Adaptive federated optimization. ICLR 2021. arXiv:2003.00295 (server
        optimizers; its own, of Algorithm 2, aren't torch's).
    """

    about = About(
        family="one model for all",
        personal="nothing; with any torch optimizer on the server (SGD with momentum: FedAvgM)",
        assumes="one model suits all",
        down="$4d$",
        up="$4d$",
        keeps="nothing",
        gradients="1",
        personal_model="the global model",
        global_model="the server's",
        paper="McMahan et al. 2017; Reddi et al. 2021",
    )
    state_settings: ClassVar[tuple[str, ...]] = ("server_optimizer",)
    averages_models: ClassVar[bool] = True

    def __init__(
        self,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "samples",
        server_optimizer: Callable[[Iterable[Tensor]], Optimizer] | None = None,
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        if server_optimizer is not None and not callable(server_optimizer):
            raise TypeError(
                "Expected `server_optimizer` to be a callable that makes a torch optimizer from "
                f"parameters, but got server_optimizer={server_optimizer!r}. Use "
                "`lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9)`."
            )
        if server_optimizer is not None:
            _check_optimizer(server_optimizer([torch.zeros(1, requires_grad=True)]))
        self.server_optimizer = server_optimizer

    @property
    def needs_each_upload(self) -> bool:
        """Whether there is a server optimizer, for which a rounded mean isn't enough."""
        return self.server_optimizer is not None

    def settings(self) -> dict[str, str]:
        """Return all settings, with the server optimizer's class and plain defaults."""
        if self.server_optimizer is None:
            return {**super().settings(), "server_optimizer": "None"}
        optimizer = self.server_optimizer([torch.zeros(1, requires_grad=True)])
        defaults = {f"server_optimizer.{name}": repr(v) for name, v in optimizer.defaults.items()}
        return {
            **super().settings(),
            "server_optimizer": type(optimizer).__name__,
            **defaults,
        }

    def init_server(self, model: Model) -> Tree:
        """Return the global model, and the server optimizer's empty state."""
        return {"model": model, "optimizer": {}} if self.server_optimizer else {"model": model}

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Average, or step the server optimizer along the old model minus the average."""
        mean: dict[str, Any] = weighted_mean(uploads["model"], info.weights)
        if self.server_optimizer is None:
            return {**server, "model": mean}
        old = select(server["model"], self.parameter_split.trainable)
        # Not from the rounded mean: Adam makes whole steps of its rounding.
        pseudo_gradient = weighted_sum(select(uploads["model"], old), -info.weights, old)
        new, state = functional_step(
            self.server_optimizer, old, pseudo_gradient, server["optimizer"]
        )
        return {"model": {**mean, **new}, "optimizer": state}


def _check_optimizer(made: object) -> None:
    """Require a torch optimizer that steps once along a gradient."""
    if not isinstance(made, Optimizer) or isinstance(made, torch.optim.LBFGS):
        raise TypeError(
            "Expected `server_optimizer` to make a torch optimizer that takes one step along a "
            f"gradient, but it made {made!r}. Use `lambda p: torch.optim.SGD(p, lr=1.0, "
            "momentum=0.9)`."
        )
    rates = [group["lr"] for group in made.param_groups if "lr" in group]
    if not all(math.isfinite(rate) for rate in rates):
        raise ValueError(
            f"Expected `server_optimizer` to have a finite learning rate, but got lr={rates[0]}. "
            "Use lr=1.0 for plain averaging."
        )
