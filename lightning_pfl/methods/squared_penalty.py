"""SquaredPenalty: models coupled by squared distances of all pairs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from lightning_pfl.contract.local import without_data
from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_number
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model, Tree, put_rows, repeat, select, weighted_mean
from lightning_pfl.methods.base import (
    PER_CLIENT,
    About,
    LocalStep,
    Method,
    PerClient,
    Phase,
    recordable,
)
from lightning_pfl.methods.support import memory
from lightning_pfl.methods.support.proximal import (
    LocalSolver,
    check_local_solver,
    proximal_phases,
    proximal_result,
    proximal_state,
    proximal_step,
)
from lightning_pfl.methods.support.stability import Pull, WatchedPull


class SquaredPenalty(WatchedPull, Method):
    r"""Every client has a model, penalised by squared distances of all pairs.

    Minimises :math:`\sum_i f_i(x_i) + \Gamma \sum_{i<j} \lVert x_i - x_j \rVert^2`. As the sum is
    :math:`N \sum_i \lVert x_i - \bar x \rVert^2 = \min_m N \sum_i \lVert x_i - m \rVert^2`, clients
    and server take turns at minimising jointly in :math:`x` and :math:`m`:

    .. math::
        x_i \leftarrow \arg\min_x f_i(x) + \Gamma N \lVert x - m \rVert^2, \qquad
        m \leftarrow \frac1N \sum_i x_i

    Larger weights need more rounds: with strong convexity :math:`\mu` the error shrinks by
    :math:`2\Gamma N / (2\Gamma N + \mu)` per round.

    Args:
        penalty_weight: :math:`\Gamma \ge 0`, over unordered pairs. 0 makes the clients independent.
        local_solver: ``"optimizer"``: local epochs or steps of the user's optimizer on the gradient
            of both terms, which needs ``lr * (L + 2 * penalty_weight * num_clients) < 2``;
            ``"exact"``: the minimiser over all samples of a client, for convex losses of few
            parameters.
        local_epochs: Passes over a client's data per round, for ``"optimizer"``.
        local_steps: Optimizer steps instead. Exactly one of the two.

    State:
        server: ``models``, every client's last model, each leaf ``(num_clients, *shape)``.
        client_state: ``model``, the complete model; buffers never leave the client.

    Deviation from the paper: it solves the problem centrally; its :math:`\gamma` over ordered
    pairs, with :math:`\frac1N \sum_i f_i`, is :math:`\Gamma = 2 N \gamma`. A client without
    training samples or minibatches has :math:`f_i = 0` and takes the mean.

    Example:
        >>> SquaredPenalty(0.01, local_solver="exact").penalty_weight
        0.01

    References:
        Hanzely, Hanzely, Horváth, Richtárik. Lower bounds and optimal algorithms for personalized
        federated learning. NeurIPS 2020. arXiv:2010.02372. Armacki, Bajovic, Jakovetic, Kar.
        Personalized federated learning via convex clustering. 2022. arXiv:2202.00718, equation 4.
    """

    about = About(
        family="a personal model",
        personal="everything; squared differences are penalised, models never become equal",
        assumes="models lie near their mean",
        down="$4d$",
        up="$4d$",
        keeps="model with buffers; the server one for each",
        gradients="1",
        personal_model="the client's own model",
        global_model=None,
        paper="Hanzely et al. 2020",
    )
    include_clients_without_data: ClassVar[bool] = True
    client_axes: ClassVar[Mapping[str, int]] = MappingProxyType({"models": 1})
    model_scope: ClassVar[str] = PER_CLIENT

    def __init__(
        self,
        penalty_weight: float = 0.01,
        local_solver: LocalSolver = "optimizer",
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting="uniform")
        check_local_solver(SquaredPenalty.__init__, local_solver, local_epochs, local_steps)
        check_number("penalty_weight", penalty_weight, "Use 0 to train every client alone.")
        self.penalty_weight = penalty_weight
        self.local_solver: LocalSolver = local_solver

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line if the penalty is zero."""
        return [] if self.penalty_weight else ["penalty_weight=0 makes SquaredPenalty LocalOnly."]

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Take steps of the optimizer, or one step on all samples."""
        return proximal_phases(self.local_solver, super().phases(round))

    def pull(self, server: Tree, info: ClientInfo) -> Pull:
        """Return the penalty's pull on one client's model."""
        formula = "2 * penalty_weight * clients"
        return Pull(self._strength(), formula, "a smaller `penalty_weight`")

    def _strength(self) -> float:
        """Compute the penalty's curvature in one client's model."""
        return 2 * self.penalty_weight * self.num_clients

    def init_server(self, model: Model) -> Tree:
        """Make every client's parameters, which start equal."""
        row = select(model, self.parameter_split.trainable)
        memory.require_rows(type(self).__name__, self.num_clients, row)
        return {"models": repeat(row, self.num_clients)}

    def init_client_state(self, model: Model) -> Tree:
        """Return the complete model."""
        return {"model": model}

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send the mean of all models."""
        even = torch.full((self.num_clients,), 1 / self.num_clients, dtype=torch.float64)
        return {"mean": weighted_mean(server["models"], even)}

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Continue with the client's model, with the mean as anchor."""
        like = next(iter(received["mean"].values()))
        strength = like.new_full((len(info),), self._strength())
        return proximal_state(client_state["model"], received["mean"], strength)

    @recordable("local_solver")
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Take a step on both terms, or solve for their minimiser."""
        return proximal_step(state, minibatches, client, self.local_solver)

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the parameters and store the model."""
        idle = without_data(self.phases(info.round), info.steps)
        model = proximal_result(state, idle)
        return {"model": select(model, self.parameter_split.trainable)}, {"model": model}

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Store the uploads."""
        return {"models": put_rows(server["models"], info.index, uploads["model"])}
