"""L2GD: steps on local losses or towards the mean model, by a random coin."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_budget, check_number, is_number
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.randomness import derive
from lightning_pfl.core.tree import Model, Tree, floats, weighted_mean
from lightning_pfl.methods.base import PER_CLIENT, About, Method, PerClient, Phase
from lightning_pfl.solvers.proximal import towards


class L2GD(Method):
    r"""Every client has a model, penalised by its distance to their mean.

    Minimises :math:`\frac1n \sum_i F_i(x_i) + \frac{\lambda}{2n} \sum_i \lVert x_i - \bar x
    \rVert^2`. In each round a coin :math:`\xi`, the same for all clients, is 1 with probability
    :math:`p`:

    .. math::
        \xi = 0: &\quad x_i \leftarrow x_i - \eta\, \nabla F_i(x_i) \\
        \xi = 1: &\quad x_i \leftarrow x_i - \theta\,(x_i - \bar x), \qquad
        \theta = \frac{\eta \lambda (1 - p)}{p}

    With the paper's step size :math:`\alpha` this is :math:`\eta = \alpha / (n (1 - p))` and
    :math:`\theta = \alpha \lambda / (n p)`; :math:`\eta` is the learning rate of the user's
    optimizer. Clients communicate only where the coin changes from 0 to 1: they send :math:`x_i` at
    the end of the last local round and receive :math:`\bar x` at the beginning of the next. Steps
    towards the mean don't change it, so further ones need no message. The coin is a function of
    seed and round.

    Args:
        mixing_weight: :math:`\lambda \ge 0`. 0 trains every client alone.
        aggregation_probability: :math:`p` in (0, 1). The best is :math:`\lambda / (L + \lambda)`.
        local_epochs: Passes over a client's data in a round with :math:`\xi = 0`.
        local_steps: Optimizer steps instead. Exactly one of the two; 1 is the paper's. :math:`K`
            steps instead of one act like a mixing weight :math:`K` times smaller.

    State:
        server: ``model``, the mean of the last upload, and the mask of clients that have received
        it, ``informed``, bool ``(num_clients,)``. client_state: ``model``, the :math:`x_i`, and
        ``mean``, the last received :math:`\bar x`; each leaf ``(clients, *shape)``.

    Deviation from the paper: with partial participation the mean is that of the last cohort, and is
    sent to other clients when they next take part.

    Example:
        >>> L2GD(mixing_weight=1.0, aggregation_probability=0.3).local_steps
        1

    References:
        Hanzely, Richtárik. Federated learning of a mixture of global and local models. 2020.
        arXiv:2002.05516, Algorithm 1 and equation 2.
    """

    about = About(
        family="a personal model",
        personal="everything; a step towards the mean where a coin says so",
        assumes="models lie near their mean",
        down="$4d$ where the coin turns",
        up="$4d$ where it turns",
        keeps="2 models",
        gradients="1 where it is tails",
        personal_model="the client's own model",
        global_model="the server's: the mean of its last aggregation",
        paper="Hanzely and Richtárik 2020",
    )
    client_axes: ClassVar[Mapping[str, int]] = MappingProxyType({"informed": 1})
    model_scope: ClassVar[str] = PER_CLIENT

    def __init__(
        self,
        mixing_weight: float = 0.5,
        aggregation_probability: float = 0.5,
        local_epochs: PerClient | None = None,
        local_steps: PerClient | None = 1,
    ) -> None:
        # `local_epochs=1` alone means epochs instead of the default step, not both.
        local_steps = None if local_epochs is not None and local_steps == 1 else local_steps
        check_budget(local_epochs, local_steps)
        super().__init__(local_epochs, local_steps, weighting="uniform")
        check_number("mixing_weight", mixing_weight, "Use 0 to train every client alone.")
        if not is_number(aggregation_probability) or not 0 < aggregation_probability < 1:
            raise ValueError(
                "Expected `aggregation_probability` to be in (0, 1), both ends excluded, but got "
                f"aggregation_probability={aggregation_probability!r}. Use 0.5."
            )
        self.mixing_weight = mixing_weight
        self.aggregation_probability = aggregation_probability

    def aggregates(self, round: int) -> bool:
        r"""Whether :math:`\xi = 1` in a round."""
        uniform = derive(self.seed, "coin", round) / 2**63
        return uniform >= 1 - self.aggregation_probability

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line if the penalty is zero."""
        return [] if self.mixing_weight else ["mixing_weight=0 makes L2GD LocalOnly."]

    def phases(self, round: int) -> tuple[Phase, ...]:
        r"""Train locally if :math:`\xi = 0`."""
        return () if self.aggregates(round) else super().phases(round)

    def init_server(self, model: Model) -> Tree:
        """Return the mean of equal initial models, which all clients have."""
        return {"model": model, "informed": torch.ones(self.num_clients, dtype=torch.bool)}

    def init_client_state(self, model: Model) -> Tree:
        """Return the model and the mean."""
        return {"model": model, "mean": model}

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send the mean in the first round that needs it."""
        known = server["informed"][info.index.clamp_max(self.num_clients - 1)]
        silent = not self.aggregates(info.round) or bool(known.all())
        return {} if silent else {"mean": server["model"]}

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Continue with the client's model."""
        return {"model": client_state["model"]}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Move towards the mean, or send the model before the coin changes."""
        model: Model = state["model"]
        mean: Model = received["mean"] if "mean" in received else client_state["mean"]
        if self.aggregates(info.round):
            # Integer counters stay.
            model = {**model, **towards(floats(model), mean, self._share(info.lr))}
            return {}, {"model": model, "mean": mean}
        upload = {"model": model} if self.aggregates(info.round + 1) else {}
        return upload, {"model": model, "mean": mean}

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Average uploads to a new mean, or record which clients have received it."""
        if uploads:
            mean = weighted_mean(uploads["model"], info.weights)
            return {"model": mean, "informed": torch.zeros_like(server["informed"])}
        informed = server["informed"].clone()
        if self.aggregates(info.round):
            informed[info.index] = True
        return {**server, "informed": informed}

    def _share(self, lr: float) -> float:
        p = self.aggregation_probability
        share = lr * self.mixing_weight * (1 - p) / p
        if share > 1:
            raise ValueError(
                "Expected lr * mixing_weight * (1 - p) / p to be at most 1, but got "
                f"{share:.4g} with lr={lr!r}, mixing_weight={self.mixing_weight!r} and "
                f"aggregation_probability={p!r}. Lower one of the first two, or raise the "
                "probability to 1/2."
            )
        return share
