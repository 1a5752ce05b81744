"""LpProj: personal models whose random projections are held together."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_choice, check_number, is_number
from lightning_pfl.core.parameters import ParameterSpec, ParameterSplit
from lightning_pfl.core.randomness import derive, generator
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model, Tree, expand, flat, unflat, weighted_mean
from lightning_pfl.methods.base import PER_CLIENT, About, Known, LocalStep, Method, PerClient

Norm = Literal["l1", "l2"]


class LpProj(Method):
    r"""Every client has a model; only projections of models to few dimensions travel.

    Minimises :math:`\frac1n \sum_k F_k(\theta_k) + \frac{\lambda}{p} \lVert P \theta_k - w
    \rVert_p^p` over the models :math:`\theta_k` and the center :math:`w \in \mathbb R^{d'}`, with a
    random :math:`P` whose rows are orthonormal. Each minibatch is a step of the user's optimizer
    with learning rate :math:`\eta` and the proximal map of the penalty:

    .. math::
        \theta &\leftarrow \theta - \eta\, \nabla F_k(\theta), \qquad r = P \theta - w \\
        s &= \frac{r}{1 + \eta\lambda} \;(p = 2) \quad\text{or}\quad
        \operatorname{clip}_{[-1, 1]}\frac{r}{\eta\lambda} \;(p = 1), \qquad
        \theta \leftarrow \theta - \eta\lambda\, P^\top s \\
        w &\leftarrow w + \eta_g \frac{1}{|S_t|} \sum_{k \in S_t} s_k

    :math:`-\lambda s_k`, of the client's last step, is the gradient by :math:`w`. For :math:`p = 1`
    it is at most :math:`\lambda` for each client, however far away its model is, and models can
    agree exactly.

    :math:`P` is drawn from the seed and never sent: each number of the model goes, with a random
    sign, to one of :math:`d'` groups of equal size.

    Args:
        penalty_weight: :math:`\lambda \ge 0`. 0 trains every client alone.
        norm: ``"l2"`` or ``"l1"``, :math:`p`.
        dim_ratio: :math:`d' / d` in (0, 1], rounded to at least one dimension. 1 compares whole
            models.
        server_lr: :math:`\eta_g > 0`. With ``"l2"`` 1 is the mean of the projections; with
            ``"l1"`` it is the most that a number of :math:`w` moves in a round.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.

    State:
        server: ``center``, :math:`w`, ``(dim,)``. client_state: ``model``, :math:`\theta_k` with
        its buffers; each leaf ``(clients, *shape)``.

    Deviation from the paper: the projection's rows are orthonormal, so that the proximal map is
    exact, where the paper steps along a subgradient; :math:`w` moves on the server, not in copies
    at the clients.

    Example:
        >>> LpProj(norm="l1", dim_ratio=0.01).norm
        'l1'

    References:
        Lin, Han, Li, Zhang. Personalized federated learning towards communication efficiency,
        robustness and fairness. NeurIPS 2022, Algorithm 1.
    """

    about = About(
        family="a personal model",
        personal="everything; projections of the models are near each other",
        assumes="good models lie near a common one; sending is dear",
        down="$4d'$, `dim_ratio` of $4d$",
        up="$4d'$",
        keeps="model",
        gradients="1",
        personal_model="the client's own model",
        global_model=None,
        paper="Lin et al. 2022",
    )
    personal: ParameterSpec = "all"
    model_scope: ClassVar[str] = PER_CLIENT
    state_settings: ClassVar[tuple[str, ...]] = ("dim_ratio",)

    def __init__(
        self,
        penalty_weight: float = 1.0,
        norm: Norm = "l2",
        dim_ratio: float = 0.1,
        server_lr: float = 1.0,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting="uniform")
        check_number("penalty_weight", penalty_weight, "Use 0 to train every client alone.")
        check_choice("norm", norm, get_args(Norm), "Use 'l2', or 'l1' for clients that differ.")
        check_number("server_lr", server_lr, "Use 1 with 'l2'.", positive=True)
        if not is_number(dim_ratio) or not 0 < dim_ratio <= 1:
            raise ValueError(
                f"Expected `dim_ratio` to be in (0, 1], but got dim_ratio={dim_ratio!r}. Use 0.1 "
                "to send a tenth of the model's size."
            )
        self.penalty_weight, self.norm, self.dim_ratio = penalty_weight, norm, dim_ratio
        self.server_lr = server_lr

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line if the penalty is zero."""
        alone = "penalty_weight=0 makes LpProj LocalOnly of the clients in the cohort."
        return [] if self.penalty_weight else [alone]

    def bind(self, known: Known) -> None:
        """Draw the projection."""
        super().bind(known)
        scalars = self.parameter_split.num_trainable()
        dim = max(1, round(self.dim_ratio * scalars))
        draw = generator(derive(self.seed, "projection"))
        order = torch.randperm(scalars, generator=draw)
        signs = torch.randint(2, (scalars,), generator=draw).double() * 2 - 1
        group = torch.empty_like(order)
        group[order] = torch.arange(scalars) % dim
        size = math.ceil(scalars / dim)
        # The last group's places stay empty where it is smaller: number 0 with the factor 0.
        members = torch.zeros(size * dim, dtype=torch.int64)
        members[:scalars] = order
        factors = signs / torch.bincount(group, minlength=dim).double().sqrt()[group]
        of_members = torch.zeros(size * dim, dtype=torch.float64)
        of_members[:scalars] = factors[order]
        self._projection = {
            "group": group,
            "factors": factors,
            "members": members.view(size, dim),
            "of_members": of_members.view(size, dim),
        }

    # --- state ---

    def init_server(self, model: Model) -> Tree:
        """Return the projection of the initial model."""
        theta = flat(expand(model, 1), self.parameter_split.trainable)
        return {"center": project(theta, self._constants(theta, 1))[0]}

    # --- a client's round ---

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send the center."""
        return {"center": server["center"]}

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Continue with the client's model."""
        center = received["center"]
        return {
            "model": client_state["model"],
            "center": center,
            "pull": torch.zeros_like(center),
            "projection": self._constants(center, len(info)),
        }

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Step on the loss, then go towards the center."""
        model = client.update(state["model"], client.grad(state["model"], minibatches))
        strength = client.lr * self.penalty_weight
        if not strength:
            return {**state, "model": model}
        names, projection = self.parameter_split.trainable, state["projection"]
        theta = flat(model, names)
        residual = project(theta, projection) - state["center"]
        if self.norm == "l2":
            pull = residual / (1 + strength)
        else:
            pull = (residual / strength).clamp(-1, 1)
        theta = theta - strength * lift(pull, projection)
        return {**state, "model": {**model, **unflat(theta, model, names)}, "pull": pull}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the pull at the center, and keep the model."""
        return {"pull": state["pull"]}, {"model": state["model"]}

    # --- the server's round ---

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Step along the mean pull."""
        mean = weighted_mean(uploads, info.weights)["pull"]
        return {"center": server["center"] + self.server_lr * mean}

    def _constants(self, like: Tensor, clients: int) -> Tree:
        """Return the projection for some clients, on a tensor's device."""
        found: Tree = {name: send(leaf, like.device) for name, leaf in self._projection.items()}
        return expand(found, clients)


def project(theta: Tensor, projection: Tree) -> Tensor:
    r"""Compute :math:`P \theta` of ``(clients, scalars)`` vectors, ``(clients, dim)``."""
    members, factors = projection["members"][0], projection["of_members"][0]
    total = torch.zeros_like(theta[:, members[0]])
    for some, by in zip(members, factors, strict=True):
        total = total + theta[:, some] * by.to(theta)
    return total


def lift(vectors: Tensor, projection: Tree) -> Tensor:
    r"""Compute :math:`P^\top v` of ``(clients, dim)`` vectors, ``(clients, scalars)``."""
    group, factors = projection["group"][0], projection["factors"][0]
    lifted: Tensor = vectors[:, group] * factors.to(vectors)
    return lifted
