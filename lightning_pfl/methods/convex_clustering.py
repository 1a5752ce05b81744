"""ConvexClustering: a penalty on norms of differences that makes similar clients' models equal."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_pfl.contract.local import without_data
from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_choice, check_number
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model, Tree, flat, select, unflat, where
from lightning_pfl.graphs import GraphLike, resolve_graph
from lightning_pfl.methods.base import PER_CLIENT, About, Known, LocalStep, Method, PerClient, Phase
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
from lightning_pfl.metrics.clusters import clusters_of_pairs
from lightning_pfl.solvers.blocks import BlockDraws, check_block_share, damping
from lightning_pfl.solvers.pairs import Pairs
from lightning_pfl.solvers.pdmm import (
    Step,
    View,
    proximal_term,
    thresholds,
    update_dual,
    update_split,
)

Scale = Literal["canonical", "equation-3", "equation-3-unordered", "equation-14", "theorems"]
COPIES = 12
"""Largest number of tensors of the size of all pairs in a round.

Most are needed when uploads are checked: the server's three, the uploads, their differences, and
twice that in double precision. Runs in single precision take up to 11 in total.
"""
ROWS = 32
"""Number of clients whose dual variables are stepped at once."""


def canonical_weight(weight: float, scale: Scale, clients: int) -> float:
    r"""Convert a paper's :math:`\lambda` to the weight :math:`\Lambda` over unordered pairs.

    Args:
        weight: :math:`\lambda`.
        scale: See :class:`ConvexClustering`.
        clients: :math:`N`.

    Example:
        >>> canonical_weight(0.01, "equation-3", 60)
        1.2
    """
    factors = {"equation-3": 2.0 * clients, "equation-3-unordered": clients, "equation-14": 2.0}
    return weight * factors.get(scale, 1.0)


class ConvexClustering(WatchedPull, Method):
    r"""Every client has a model, with a penalty that makes models of similar clients equal.

    Minimises :math:`\sum_i f_i(x_i) + \Lambda \sum_{i<j} \lVert x_i - x_j \rVert_2` by PDMM, with a
    copy :math:`z_{ij}` of each difference. In a round some random blocks are updated at the old
    values:

    .. math::
        x_i &\leftarrow \arg\min_x f_i(x) + \langle \textstyle\sum_j (\hat\mu_{ij} - \hat\mu_{ji}),
        x \rangle + \frac\rho2 \textstyle\sum_j (\lVert x - x_j - z_{ij} \rVert^2 + \lVert x_j - x -
        z_{ji} \rVert^2) + \frac{\eta}{2} \lVert x - x_i \rVert^2 \\
        z_{ij} &\leftarrow S\bigl(x_i - x_j + \hat\mu_{ij} / \rho,\; \Lambda / (2\rho)\bigr)

    with the block soft threshold :math:`S`. The server then steps the dual variables, :math:`\mu_
    {ij} \leftarrow \mu_{ij} + \tau\rho\, r_{ij}` and :math:`\hat\mu_{ij} = \mu_{ij} - \nu\rho\,
    r_{ij}` with :math:`r_{ij} = x_i - x_j - z_{ij}`. From some weight on all models equal that of
    the unweighted sum of the losses. Clusters follow from the :math:`z_{ij}`: :meth:`clusters`.

    Args:
        fusion_weight: :math:`\Lambda \ge 0`, or :math:`\lambda` in another ``scale``. 0 makes the
            clients independent.
        scale: ``"canonical"`` and ``"theorems"``: the weight is :math:`\Lambda`, as in the paper's
            theorems; ``"equation-3"``: :math:`\Lambda = 2N\lambda`; ``"equation-3-unordered"``, for
            its sum over unordered pairs: :math:`\Lambda = N\lambda`; ``"equation-14"``:
            :math:`\Lambda = 2\lambda`.
        step: ``"full"``: as above; ``"printed"``: without the terms of the pairs :math:`(j, i)`,
            as in the paper, which may stop at a wrong point with random blocks.
        penalty: :math:`\rho > 0`. Local steps need ``lr * (L + 2 * penalty * neighbours) < 2``.
        blocks: Primal blocks per round, of the clients that take part: a share, or a number
            :math:`K` of the :math:`J = N^2`. Few blocks need about :math:`J / K` times as many
            rounds.
        dual_blocks: Dual variables per round, in the same way.
        graph: The pairs that are penalised, with a factor :math:`a_{ij}` each; see
            ``lightning_pfl.graphs``. None: all pairs.
        local_solver: ``"optimizer"``: local epochs or steps of the user's optimizer on the gradient
            of the loss and the quadratic; ``"exact"``: the minimiser over all samples of a client,
            for convex losses of few parameters.
        proximal_weight: :math:`\eta \ge 0`.
        local_epochs: Passes over a client's data per round, for ``"optimizer"``.
        local_steps: Optimizer steps instead. Exactly one of the two.

    State:
        server, for :math:`S` neighbours and :math:`d` parameters: ``models``, ``(num_clients, d)``;
        ``split``, ``dual`` and ``damped``, the :math:`z`, :math:`\mu` and :math:`\hat\mu`,
        ``(num_clients, S, d)``; variables that clients don't have yet, bool ``(num_clients, S)``.
        client_state: ``model``, the complete model; buffers never leave the client.

    Deviation from the paper: the corrected x-update, which needs one more vector to the client;
    clients that aren't sampled are no blocks of the round. The server's rows of :math:`z` and
    :math:`\hat\mu` also represent the client's copies; bytes are those of the paper's messages: the
    updated blocks up, updated models of neighbours and updated :math:`\mu_{ij}` down. A client
    without training samples or minibatches has :math:`f_i = 0` and takes part in its pairs.

    Example:
        >>> ConvexClustering(0.1, blocks=36).local_solver
        'optimizer'

    References:
        Armacki, Bajovic, Jakovetic, Kar. Personalized federated learning via convex clustering.
        2022. arXiv:2202.00718, Algorithm 1. Wang, Banerjee, Luo. Parallel direction method of
        multipliers. NeurIPS 2014. arXiv:1406.4064, for :math:`\tau` and :math:`\nu`.
    """

    about = About(
        family="clusters",
        personal=(
            "everything; a penalty on the norms of differences makes like clients' models equal"
        ),
        assumes="clients form groups with equal models",
        down="$4d$ for each new variable",
        up="$4d$ for each block drawn",
        keeps="model with buffers; the server all pairs",
        gradients="1",
        personal_model="the client's own model",
        global_model=None,
        paper="Armacki et al. 2022",
    )
    include_clients_without_data: ClassVar[bool] = True
    client_axes: ClassVar[Mapping[str, int]] = MappingProxyType(
        {"models": 1, "split": 2, "dual": 2, "damped": 2, "new_models": 2, "new_duals": 2}
    )
    fixed_clients: ClassVar[str] = "each pair of clients has variables of its own"
    model_scope: ClassVar[str] = PER_CLIENT

    def __init__(
        self,
        fusion_weight: float = 0.1,
        scale: Scale = "canonical",
        step: Step = "full",
        penalty: float = 0.1,
        # The command line takes the first type that fits, and 36 is no float.
        blocks: int | float = 1.0,
        dual_blocks: int | float = 1.0,
        graph: GraphLike | None = None,
        local_solver: LocalSolver = "optimizer",
        proximal_weight: float = 0.0,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting="uniform")
        check_local_solver(ConvexClustering.__init__, local_solver, local_epochs, local_steps)
        check_choice("scale", scale, get_args(Scale), "Use 'canonical'.")
        check_choice("step", step, get_args(Step), "Use 'full'.")
        check_number("fusion_weight", fusion_weight, "Use 0 to train every client alone.")
        check_number("proximal_weight", proximal_weight, "Use 0 for no such term.")
        check_number("penalty", penalty, "Use 0.1, for example.", positive=True)
        check_block_share("blocks", blocks)
        check_block_share("dual_blocks", dual_blocks)
        self.fusion_weight, self.scale, self.step = fusion_weight, scale, step
        self.penalty, self.proximal_weight = penalty, proximal_weight
        self.blocks, self.dual_blocks = blocks, dual_blocks
        self.given_graph = graph
        self.local_solver: LocalSolver = local_solver

    def bind(self, known: Known) -> None:
        """Build the pairs, and the penalty of each."""
        super().bind(known)
        if self.given_graph is not None:
            self.graph = resolve_graph(self.given_graph, self.num_clients, self.seed)
        self._pairs = self._find_pairs(self.num_clients)
        weight = canonical_weight(self.fusion_weight, self.scale, self.num_clients)
        self._threshold = thresholds(self._pairs, weight, self.step)
        everyone = torch.ones(self.num_clients, dtype=torch.bool)
        self._draws = BlockDraws(self._pairs, everyone, self.blocks, self.dual_blocks, self.seed)

    def _find_pairs(self, num_clients: int) -> Pairs:
        if self.given_graph is None:
            return Pairs.complete(num_clients)
        return Pairs.of_graph(self.graph)

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line if the penalty is zero."""
        return [] if self.fusion_weight else ["fusion_weight=0 makes ConvexClustering LocalOnly."]

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Take steps of the optimizer, or one step on all samples."""
        return proximal_phases(self.local_solver, super().phases(round))

    def pull(self, server: Tree, info: ClientInfo) -> Pull:
        """Return the quadratics of the augmented Lagrangian and the proximal term."""
        sides = 2 if self.step == "full" else 1
        pairs = self.penalty * sides * int(self._pairs.degree.max())
        formula = f"({sides} * penalty * neighbours + proximal_weight)"
        return Pull(pairs + self.proximal_weight, formula, "a smaller `penalty`")

    def init_server(self, model: Model) -> Tree:
        """Make equal models, and zeros for the pairs."""
        first = flat(
            {n: leaf.unsqueeze(0) for n, leaf in model.items()}, self.parameter_split.trainable
        )[0]
        clients, slots = self._pairs.mask.shape
        memory.require(
            COPIES * clients * slots * first.numel() * first.element_size(),
            first.device,
            f"ConvexClustering with {clients} clients, {self._pairs.degree.max()} pairs each and "
            f"{first.numel()} parameters",
            "Use a sparse `graph` of the pairs, such as the nearest neighbours, or a smaller "
            "model.",
        )
        zeros = first.new_zeros(clients, slots, len(first))
        nothing = torch.zeros(clients, slots, dtype=torch.bool, device=first.device)
        return {
            "models": first.repeat(clients, 1),
            **{name: zeros.clone() for name in ("split", "dual", "damped")},
            **{name: nothing.clone() for name in ("new_models", "new_duals")},
        }

    def init_client_state(self, model: Model) -> Tree:
        """Return the complete model."""
        return {"model": model}

    # --- a client's round ---

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send all clients' models."""
        return {"models": server["models"]}

    def download_rows(self, server: Tree, info: ClientInfo) -> Tree:
        """Send each client its pairs, and the summed terms of the pairs (j, i)."""
        at = self._rows(info)
        found = {name: _take(server[name], at) for name in ("split", "damped")}
        if self.step == "full":
            pairs = self._pairs.to(server["models"].device)
            pull = pairs.incoming(server["damped"]) - self.penalty * pairs.incoming(server["split"])
            found["incoming"] = _take(pull, at)
        return found

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Set up the quadratic of the x-update."""
        incoming = received.get("incoming")
        anchor, strength = proximal_term(
            self._view(received, info), incoming, self.penalty, self.proximal_weight
        )
        named = unflat(anchor, client_state["model"], self.parameter_split.trainable)
        return proximal_state(client_state["model"], named, strength)

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Take a step of the x-update, or solve it."""
        return proximal_step(state, minibatches, client, self.local_solver)

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Update the drawn blocks of z."""
        view, at, drawn = self._view(received, info), self._rows(info), self._draws.of(info.round)
        split = update_split(view, send(self._threshold[at], view.mask.device), self.penalty)
        chosen = send(drawn.pairs[at], view.mask.device)
        split = torch.where(chosen.unsqueeze(2), split, received["split"])
        some = drawn.models[at]
        idle = without_data(self.phases(info.round), info.steps)
        model = where(some, proximal_result(state, idle), client_state["model"])
        return {"model": select(model, self.parameter_split.trainable), "split": split}, {
            "model": model
        }

    # --- the server's round ---

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Store the blocks, and step the drawn dual variables."""
        device, at = server["models"].device, send(info.index, server["models"].device)
        vectors = flat(uploads["model"], self.parameter_split.trainable).to(server["models"])
        new = {
            "models": server["models"].index_copy(0, at, vectors),
            "split": server["split"].index_copy(0, at, uploads["split"]),
        }
        drawn, here = self._draws.of(info.round), torch.zeros(self.num_clients, dtype=torch.bool)
        here[info.index] = True
        updated = (drawn.models & here).sum() + (drawn.pairs & here.unsqueeze(1)).sum()
        steps = damping(max(int(updated), 1), max(self._draws.total, 1))
        new |= self._step_duals({**server, **new}, send(drawn.duals, device), steps)
        pairs, heard = self._pairs.to(device), send(here, device).unsqueeze(1)
        changed = send(drawn.models & here, device)[pairs.neighbours] & pairs.mask
        new["new_models"] = (server["new_models"] & ~heard) | changed
        new["new_duals"] = (server["new_duals"] & ~heard) | send(drawn.duals, device)
        return new

    def _step_duals(self, server: Tree, duals: Tensor, steps: tuple[float, float]) -> Tree:
        """Step some clients at a time, which limits temporary memory."""
        models, pairs = server["models"], self._pairs.to(duals.device)
        dual, damped = torch.empty_like(server["dual"]), torch.empty_like(server["damped"])
        for some in torch.arange(len(models), device=duals.device).split(ROWS):
            others = models[pairs.neighbours[some]]
            split, old = server["split"][some], server["damped"][some]
            view = View(models[some], others, split, old, pairs.mask[some])
            dual[some], damped[some] = update_dual(
                view, server["dual"][some], duals[some], self.penalty, steps
            )
        return {"dual": dual, "damped": damped}

    # --- what travels ---

    def download_nbytes(self, server: Tree, info: ClientInfo) -> Tensor:
        """Count neighbours' models and dual variables that are new to the client, and the pull."""
        at = send(self._rows(info), server["new_models"].device)
        vectors: Tensor = server["new_models"][at].sum(1) + server["new_duals"][at].sum(1)
        if self.step == "full":
            drawn = self._draws.of(info.round)
            vectors = vectors + send(drawn.models[self._rows(info)], vectors.device)
        return vectors.cpu() * self._vector_nbytes(server)

    def upload_nbytes(self, uploads: Tree, info: ClientInfo) -> Tensor:
        """Count the drawn blocks."""
        drawn, at = self._draws.of(info.round), self._rows(info)
        vectors: Tensor = drawn.models[at].long() + drawn.pairs[at].sum(1)
        return vectors * self._vector_nbytes(uploads)

    # --- results ---

    def clusters(self, server: Tree) -> Tensor:
        """Return each client's cluster, int64 ``(num_clients,)``, by pairs with z exactly zero."""
        return clusters_of_pairs(server["split"], self._pairs)

    # --- helpers ---

    def _view(self, received: Tree, info: ClientInfo) -> View:
        """Collect the clients' variables: models, z and damped dual variables."""
        models, at = received["models"], send(self._rows(info), received["models"].device)
        neighbours = send(self._pairs.neighbours, models.device)[at]
        each = torch.arange(len(at), device=models.device)
        others = models[each.unsqueeze(1), neighbours]
        mask = send(self._pairs.mask, models.device)[at]
        return View(models[each, at], others, received["split"], received["damped"], mask)

    def _rows(self, info: ClientInfo) -> Tensor:
        """Rows of the clients; a new client maps to the last row."""
        return info.index.clamp_max(self.num_clients - 1)

    def _vector_nbytes(self, tree: Tree) -> int:
        """Count the bytes of one variable."""
        leaf: Tensor = tree["split"]
        return leaf.shape[2] * leaf.element_size()


def _take(leaf: Tensor, at: Tensor) -> Tensor:
    """Select rows of a tensor; a view if they are consecutive."""
    first, count = int(at[0]) if len(at) else 0, len(at)
    if torch.equal(at, torch.arange(first, first + count)):
        return leaf[first : first + count]
    return leaf.index_select(0, send(at, leaf.device))
