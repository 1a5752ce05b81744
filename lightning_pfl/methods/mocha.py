"""MOCHA: federated multi-task learning of linear classifiers, with a learned relationship."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_pfl.contract.callback import FederationView
from lightning_pfl.contract.records import ClientInfo, FitPlan, Round
from lightning_pfl.core.checks import check_choice, check_integer, check_number, check_used
from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model, Tree
from lightning_pfl.methods.base import PER_CLIENT, About, Known, LocalStep, Method, Phase
from lightning_pfl.methods.support import memory
from lightning_pfl.solvers.dual import coordinate_ascent, hinge, visiting_order

Bound = Literal["common", "own"]
FLOOR = 1e-7
"""Lower bound of the eigenvalues of the weights' Gram matrix, as in the released code."""
COPIES = 3
"""Relationships in double precision while one is learned: the former one, its product, itself."""


def learned_relationship(weights: Tensor) -> Tensor:
    r"""Compute :math:`\Sigma = (W W^\top)^{1/2} / \operatorname{tr}(W W^\top)^{1/2}`, ``(n, n)``.

    Symmetric, positive definite, of trace 1. The clients' weights are the rows of ``weights``.
    """
    flat = weights.flatten(1).double()
    vectors, values, _ = torch.linalg.svd(flat, full_matrices=False)
    roots = values.square().clamp_min(FLOOR).sqrt()
    # Of the n eigenvalues those beyond the smaller side of the weights are 0.
    least, others = FLOOR**0.5, len(flat) - len(values)
    root = vectors * (roots - least) @ vectors.T
    root = (root + root.T) / 2
    root.diagonal().add_(least)
    relationship: Tensor = root / (roots.sum() + others * least)
    return relationship.to(weights)


def aggregation_bound(relationship: Tensor, bound: Bound) -> Tensor:
    r"""Compute a diagonal :math:`c` with :math:`\Sigma \preceq \operatorname{diag}(c)`, ``(n,)``.

    With it the local problems bound the joint one, so that their solutions may be added.

    Args:
        relationship: :math:`\Sigma`, ``(n, n)``.
        bound: ``"own"``: :math:`c_t = \sum_s |\Sigma_{ts}|`, which is enough since
            :math:`2 |b_s^\top b_t| \le \lVert b_s \rVert^2 + \lVert b_t \rVert^2`; ``"common"``:
            :math:`c_t = \rho \Sigma_{tt}`, with the largest :math:`\rho = c_t / \Sigma_{tt}` of all
            clients.
    """
    row_sums = relationship.abs().sum(1)
    diagonal = relationship.diagonal()
    return row_sums if bound == "own" else (row_sums / diagonal).amax() * diagonal


class MOCHA(Method):
    r"""Clients solve their part of the dual; the server couples them and learns the coupling.

    Minimises, over the clients' weights :math:`W = (w_1, \dots, w_n)` and :math:`\Sigma =
    \Omega^{-1}` of trace 1, with the hinge loss,

    .. math::
        \sum_t \frac{1}{N_t} \sum_i \max(0, 1 - y_{ti}\, w_t^\top x_{ti})
        + \frac{\lambda}{2} \operatorname{tr}(W \Omega W^\top)

    In each round the clients make :math:`H` steps of dual coordinate ascent with the curvature
    :math:`\rho \Sigma_{tt} / \lambda`, :math:`\rho = \max_t \sum_s |\Sigma_{ts}| / \Sigma_{tt}`,
    and send the change of :math:`b_t = \frac{1}{N_t} \sum_i \alpha_{ti} x_{ti}`; then

    .. math::
        w_t = \frac1\lambda \sum_s \Sigma_{ts}\, b_s, \qquad \text{periodically} \quad \Sigma
        \leftarrow \frac{(W^\top W)^{1/2}}{\operatorname{tr} (W^\top W)^{1/2}}

    Local work may be incomplete: for a given :math:`\Sigma`, clients that aren't sampled or make
    few steps only slow convergence. But if :math:`\Sigma` is learned before a client with data has
    taken part, its row is nearly 0, its weights stay small until the next time, and with
    ``bound="common"`` all steps become short; this is warned of.

    All clients start at :math:`\alpha = 0`, so :math:`W = 0`, and :math:`\Sigma = I / n`; the
    module's initial weights and its optimizer are not used. A model with several outputs is a set
    of one-versus-rest classifiers with one :math:`\Sigma`.

    The module must be linear in its flattened inputs: one weight matrix, perhaps with a bias, which
    is regularised like the weights. Batches are pairs (inputs, targets): class numbers for several
    outputs; for one output targets above 0 are one class, all others the other.

    Args:
        regularization: :math:`\lambda > 0`.
        outer_iterations: How often :math:`\Sigma` is learned; 0 keeps the clients independent.
        inner_iterations: Rounds before each time.
        local_fraction: :math:`H / N_t > 0`: visits per sample of a client in a round.
        bound: ``"common"``: the curvature as above, as published; ``"own"``: :math:`\sum_s
            |\Sigma_{ts}| / \lambda`, which is never larger and bounds the joint problem as well.
            With ``"common"`` one client of small weights makes all steps short, with ``"own"`` only
            its own.

    State:
        server: ``dual_vectors``, the :math:`b_t`, ``(num_clients, outputs, features)``, and
        ``relationship``, :math:`\Sigma`, ``(num_clients, num_clients)``. client_state: ``dual``,
        the :math:`\alpha`, ``(clients, most samples of any client, outputs)``.

    Deviation from the paper: the number of local steps is the same fraction for all clients, not
    random. A new client gets the mean of all weights.

    Example:
        >>> MOCHA(regularization=0.01, inner_iterations=10).local_fraction
        0.5

    References:
        Smith, Chiang, Sanjabi, Talwalkar. Federated multi-task learning. NeurIPS 2017.
        arXiv:1705.10467, Algorithm 1, equations 3 and 5, and its released code.
    """

    about = About(
        family="a personal model",
        personal="everything; linear models coupled by a learned relationship",
        assumes="linear models, some alike",
        down="$4d + 4$",
        up="$4d$",
        keeps="one number per sample and class",
        gradients="no gradient: dual ascent",
        personal_model="the client's weights by the server's dual vectors and relationship now",
        global_model=None,
        paper="Smith et al. 2017",
    )
    client_axes: ClassVar[Mapping[str, int]] = MappingProxyType(
        {"dual_vectors": 1, "relationship": 2}
    )
    fixed_clients: ClassVar[str] = "the relationship between its clients is one matrix of trace 1"
    fresh_optimizer: ClassVar[str] = "its steps are those of dual ascent, not of an optimizer"
    model_scope: ClassVar[str] = PER_CLIENT
    needs_sample_counts: ClassVar[bool] = True  # all clients' dual variables have one length

    def __init__(
        self,
        regularization: float = 0.01,
        outer_iterations: int = 10,
        inner_iterations: int = 100,
        local_fraction: float = 0.5,
        bound: Bound = "common",
    ) -> None:
        super().__init__(weighting="uniform")
        check_number("regularization", regularization, "Use 0.01, for example.", positive=True)
        check_number("local_fraction", local_fraction, "Use 0.5, for example.", positive=True)
        check_integer("outer_iterations", outer_iterations, 0, "Use 0 to keep the clients apart.")
        check_integer("inner_iterations", inner_iterations, 1, "Use 10, for example.")
        check_choice("bound", bound, get_args(Bound), "Use 'own' where clients differ in size.")
        given = {"inner_iterations": inner_iterations, "bound": bound}
        check_used(MOCHA.__init__, given, outer_iterations > 0, "outer_iterations=1 or more")
        self.bound: Bound = bound
        self.regularization, self.local_fraction = regularization, local_fraction
        self.outer_iterations, self.inner_iterations = outer_iterations, inner_iterations

    def bind(self, known: Known) -> None:
        """Require a linear model."""
        super().bind(known)
        shapes = {name: leaf.shape for name, leaf in self.parameter_split.model().items()}
        weights = [name for name, shape in shapes.items() if len(shape) == 2]
        biases = [name for name, shape in shapes.items() if len(shape) == 1]
        linear = len(weights) == 1 and len(biases) <= 1 and len(shapes) == len(weights + biases)
        if (
            not linear
            or self.parameter_split.static
            or any(shapes[b] != shapes[weights[0]][:1] for b in biases)
        ):
            raise MisconfigurationException(
                "Expected a linear model, one weight matrix and at most one bias, but got "
                f"{', '.join(shapes)} in {type(self.parameter_split.module).__name__}. Use "
                "MLP([inputs, outputs]), or FedMTL for networks."
            )
        self._weight, self._bias = weights[0], biases[0] if biases else None
        self._outputs, self._inputs = shapes[self._weight]

    def check_fit(self, plan: FitPlan) -> str:
        """Require fixed samples, as each has a dual variable.

        Raises:
            MisconfigurationException: If the run reloads its data.
        """
        if plan.reload_every:
            raise MisconfigurationException(
                "Expected the same samples in all rounds for MOCHA, but got "
                f"reload_dataloaders_every_n_epochs={plan.reload_every}. Set it to 0, and use "
                "FederatedDataModule."
            )
        return ""

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Take one step on all samples."""
        return (Phase("all", steps=1, full_batch=True),)

    def init_server(self, model: Model) -> Tree:
        """Start with weights of zero and no relationship."""
        weight = model[self._weight]
        memory.require(
            self.num_clients**2 * COPIES * max(weight.element_size(), 8),
            weight.device,
            f"the relationship of {self.num_clients} clients in {type(self).__name__}",
            "Use fewer clients, or FedMTL or a method over a graph.",
        )
        features = self._inputs + (self._bias is not None)
        identity = torch.eye(self.num_clients, dtype=weight.dtype, device=weight.device)
        return {
            "dual_vectors": weight.new_zeros(self.num_clients, self._outputs, features),
            "relationship": identity / self.num_clients,
        }

    def init_client_state(self, model: Model) -> Tree:
        """Return a dual variable for each sample and output."""
        return {"dual": model[self._weight].new_zeros(self._longest, self._outputs)}

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send no common part: every client gets its own weights."""
        return {}

    def download_rows(self, server: Tree, info: ClientInfo) -> Tree:
        r"""Send each client its weights, and the curvature of its dual problem times the weight."""
        relationship = server["relationship"]
        at = send(info.index, relationship.device).clamp_max(self.num_clients)
        weights, scale = self._all_weights(server), aggregation_bound(relationship, self.bound)
        # The last row is for new clients.
        weights = torch.cat([weights, weights.mean(0, keepdim=True)])
        scale = torch.cat([scale, scale.mean(0, keepdim=True)])
        return {"weights": weights[at], "scale": scale[at]}

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Set up the dual problem at the received weights."""
        weights = received["weights"]
        passes = math.ceil(self.local_fraction)
        order = visiting_order(info.num_samples, self._longest, passes, self.seed, info.round)
        return {
            "weights": weights,
            "curvature": received["scale"] / self.regularization,
            "order": send(order, weights.device),
            "dual": client_state["dual"],
            "change": torch.zeros_like(weights),
        }

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Run dual coordinate ascent, and report the hinge loss at the received weights."""
        data, real = client.samples(minibatches)
        x, y = self._problem(data[0], data[1], state["weights"])
        count = real.sum(1)
        losses = hinge(state["weights"], x, y).sum(2)
        client.report(losses.where(real, 0).sum(1) / count, minibatches)
        # 0.07 * 100 is 7.000000000000001: fractions are decimal.
        steps = (self.local_fraction * count.double() - 1e-9).ceil().long()
        dual, change = coordinate_ascent(
            state["dual"],
            state["weights"],
            x,
            y,
            count,
            state["order"],
            steps,
            state["curvature"],
        )
        return {**state, "dual": dual, "change": change}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the change of the dual vector and store the dual variables."""
        return {"change": state["change"]}, {"dual": state["dual"]}

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Add the changes; after the inner rounds learn the relationship."""
        vectors = server["dual_vectors"]
        vectors = vectors.index_add(0, send(info.index, vectors.device), uploads["change"])
        server = {**server, "dual_vectors": vectors}
        if not self._learns(info.round):
            return server
        return {**server, "relationship": learned_relationship(self._all_weights(server))}

    def _learns(self, round: int) -> bool:
        """Whether the relationship is learned after a round."""
        outer, within = divmod(round + 1, self.inner_iterations)
        return not within and outer <= self.outer_iterations

    def warnings_after(self, federation: FederationView, round: Round) -> Mapping[str, str]:
        """Warn of clients that had not taken part when the relationship was learned."""
        if not self._learns(round.number):
            return {}
        heard = federation.server["dual_vectors"].flatten(1).any(1).cpu()
        silent = self.has_training_data.cpu() & ~heard
        if not silent.any():
            return {}
        return {
            f"relationship after {round.number}": "MOCHA learned its relationship after round "
            f"{round.number}, before {int(silent.sum())} of {self.num_clients} clients had taken "
            "part, so their weights stay small until it is learned again. Use a larger "
            f"`inner_iterations` than {self.inner_iterations}."
        }

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        """Return the client's weights, and its bias if the module has one."""
        weights = received["weights"]
        model = {self._weight: weights[..., : self._inputs]}
        if self._bias is not None:
            model[self._bias] = weights[..., self._inputs]
        return model

    @property
    def _longest(self) -> int:
        return max(1, int(self.num_samples.max()))

    def _all_weights(self, server: Tree) -> Tensor:
        """Compute the primal weights of all clients, ``(num_clients, outputs, features)``."""
        vectors: Tensor = server["dual_vectors"]
        mixed: Tensor = server["relationship"] @ vectors.flatten(1)
        return mixed.view_as(vectors) / self.regularization

    def _problem(self, inputs: Tensor, targets: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return features, with a constant for the bias, and the sign of each class."""
        x = inputs.flatten(2).to(like)
        if x.shape[2] != self._inputs:
            raise ValueError(
                f"Expected inputs of {self._inputs} numbers, but got {x.shape[2]}. Give the linear "
                "layer as many inputs as the data have."
            )
        if self._bias is not None:
            x = torch.cat([x, torch.ones_like(x[..., :1])], 2)
        if self._outputs == 1:
            positive = targets.reshape(*targets.shape[:2], 1) > 0
        else:
            positive = torch.nn.functional.one_hot(targets.long(), self._outputs).bool()
        return x, torch.where(positive, 1.0, -1.0).to(like)
