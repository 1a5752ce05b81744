"""FedMTL: multi-task learning of networks with a coupling penalty."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_choice, check_number
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import (
    Model,
    Tree,
    add,
    per_client,
    put_rows,
    repeat,
    rows,
    select,
    tmap,
)
from lightning_pfl.methods.base import PER_CLIENT, About, LocalStep, Method, PerClient, recordable
from lightning_pfl.methods.support import memory

Relationship = Literal["spread", "asrun", "none"]


def penalty_gradient(
    model: Model, others: Model, share: Tensor, relationship: Relationship
) -> Model:
    r"""Halve the gradient of :math:`\lVert W\rVert_F^2 + \operatorname{tr}(W \Omega W^\top)`.

    With respect to each client's own column; the other columns are constants.

    Args:
        model: The own columns, ``(clients, ...)``.
        others: The sum of the cohort's other columns, ``(clients, ...)``; unused for ``"none"``.
        share: :math:`1/m`, one over the size of the cohort, ``(clients,)``.
        relationship: See :class:`FedMTL`.
    """
    if relationship == "none":
        return model

    def spread(model: Tensor, rest: Tensor) -> Tensor:
        return 2 * model - per_client(share, model) * (model + rest)

    def as_run(model: Tensor, rest: Tensor) -> Tensor:
        return model + per_client((1 - share) ** 2, model) * (model + rest)

    return tmap(spread if relationship == "spread" else as_run, model, others)


class FedMTL(Method):
    r"""Every client trains a model, regularised by those of the cohort.

    With the sampled clients' parameters as the columns of :math:`W`, client :math:`k` minimises
    over its column, with the others as at the start of the round,

    .. math::
        F_k(w_k) + r \bigl(\lVert W \rVert_F^2 + \operatorname{tr}(W \Omega W^\top)\bigr), \qquad
        \operatorname{tr}(W \Omega W^\top) = \sum_k \lVert w_k - \bar w \rVert^2 \;\text{for}\;
        \Omega = I - \tfrac1m 11^\top

    Models are not averaged. A client only needs the sum of the others, of the size of one model.
    Buffers never leave the client.

    Args:
        regularization: :math:`r \ge 0`. 0 makes the clients independent.
        relationship: ``"spread"``: :math:`\Omega` as above; ``"asrun"``: the :math:`\Omega = (1 -
            1/m)^2\, 11^\top` that a widely used script computes by mistake, which pulls the sum of
            the models to zero; ``"none"``: :math:`\Omega = 0`.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.

    State:
        server: ``models``, every client's last upload, each leaf ``(num_clients, *shape)``.
        client_state: ``model``, the complete model; each leaf ``(clients, *shape)``.

    Deviation from the paper: MOCHA is for convex losses; this is its adaptation to networks in the
    comparisons of LG-FedAvg and FedRep. Their weight of about :math:`10^{-7}` has almost no effect;
    the default is larger. ``"asrun"`` uses all parameters; the script skips those beyond the last
    multiple of 4000.

    Example:
        >>> FedMTL(regularization=0.01).relationship
        'spread'

    References:
        Smith, Chiang, Sanjabi, Talwalkar. Federated multi-task learning. NeurIPS 2017.
        arXiv:1705.10467, equation 1. Liang et al. Think locally, act globally: federated learning
        with local and global representations. 2020. arXiv:2001.01523, the baseline MTL.
    """

    about = About(
        family="a personal model",
        personal="everything; the spread of the models is penalised",
        assumes="models lie near their mean",
        down="$4d$ (the sum of the others)",
        up="$4d$",
        keeps="model with buffers; the server one for each",
        gradients="1",
        personal_model="the client's own model",
        global_model=None,
        paper="Smith et al. 2017; Liang et al. 2020",
    )
    client_axes: ClassVar[Mapping[str, int]] = MappingProxyType({"models": 1})
    model_scope: ClassVar[str] = PER_CLIENT

    def __init__(
        self,
        regularization: float = 1e-3,
        relationship: Relationship = "spread",
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
    ) -> None:
        # Uniform weights are one over the size of the cohort.
        super().__init__(local_epochs, local_steps, weighting="uniform")
        check_number("regularization", regularization, "Use 0 to train every client alone.")
        check_choice("relationship", relationship, get_args(Relationship), "Use 'spread'.")
        self.regularization = regularization
        self.relationship: Relationship = relationship

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line if the penalty is zero."""
        return [] if self.regularization else ["regularization=0 makes FedMTL LocalOnly."]

    def init_server(self, model: Model) -> Tree:
        """Make every client's parameters, which start equal."""
        row = select(model, self.parameter_split.trainable)
        memory.require_rows(type(self).__name__, self.num_clients, row)
        return {"models": repeat(row, self.num_clients)}

    def init_client_state(self, model: Model) -> Tree:
        """Return the complete model."""
        return {"model": model}

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send no common part: every client gets its own sum."""
        return {}

    def download_rows(self, server: Tree, info: ClientInfo) -> Tree:
        """Send each client the sum of the cohort's other models."""
        if self.relationship == "none":
            return {}
        cohort = rows(server["models"], self._known(info, server["models"]))
        return {
            "others": tmap(
                lambda leaf: (leaf.sum(0, dtype=torch.float64) - leaf).to(leaf.dtype), cohort
            )
        }

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Continue with the client's model."""
        device = next(iter(client_state["model"].values())).device
        return {"model": client_state["model"], "share": send(info.weights, device), **received}

    @recordable("regularization", "relationship")
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Step on the gradients of loss and penalty."""
        model = state["model"]
        grads = client.grad(model, minibatches)
        if self.regularization:
            trained = select(model, grads)
            pull = penalty_gradient(
                trained, state.get("others", {}), state["share"], self.relationship
            )
            grads = add(grads, tmap(lambda leaf: 2 * self.regularization * leaf, pull))
        return {**state, "model": client.update(model, grads)}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the parameters and store the model."""
        model = state["model"]
        return {"model": select(model, self.parameter_split.trainable)}, {"model": model}

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Store the uploads without averaging."""
        return {"models": put_rows(server["models"], info.index, uploads["model"])}

    def _known(self, info: ClientInfo, models: Model) -> Tensor:
        """Rows of the clients; a new client maps to the last row."""
        device = next(iter(models.values())).device
        return send(info.index.clamp_max(self.num_clients - 1), device)
