"""LinearFedRep: a common subspace by moments and gradients, with exact least-squares heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_pfl.contract.callback import FederationView
from lightning_pfl.contract.records import ClientInfo, Round
from lightning_pfl.core.checks import check_choice, check_integer, check_number, check_used
from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model, Tree, weighted_mean
from lightning_pfl.methods.base import About, Known, LocalStep, Method, Phase, Weighting
from lightning_pfl.solvers.least_squares import (
    leading_eigenvectors,
    least_squares,
    mean_product,
    moments,
    residuals,
    symmetric,
    upper_triangle,
)

Initialization = Literal["moments", "module"]
HeadSolver = Literal["exact", "gradient"]
MOMENTS = "moments"


def step_bound(heads: Tensor) -> tuple[float, float]:
    r"""Compute :math:`\sigma_{\max}^2` of :math:`W / \sqrt{|S|}` and Theorem 1's step size.

    Args:
        heads: :math:`W`, a row for each client of the cohort, ``(clients, k)``.

    Returns:
        The square, and Theorem 1's bound on the body's step size; infinite for heads of zero.
    """
    square = float(torch.linalg.matrix_norm(heads.double(), ord=2)) ** 2 / max(len(heads), 1)
    return square, 1 / (4 * square) if square > 0 else math.inf


class LinearFedRep(Method):
    r"""FedRep's linear case: exact heads, and one gradient step of the representation.

    The model is :math:`y = w_i^\top B^\top x`, without biases. Round 0 is the method of moments, in
    which all clients take part, whatever ``participation`` is: each sends :math:`Z_i`, and the
    server's first :math:`B` are the :math:`k` leading eigenvectors of their mean,

    .. math::
        Z_i = \frac1m \sum_j (y_i^j)^2\, x_i^j (x_i^j)^\top, \qquad
        \frac1n \sum_i Z_i \approx U D U^\top, \quad B^0 \leftarrow U

    In every further round the sampled clients, on all their samples at once, with
    :math:`\hat f_i = \frac{1}{2m} \lVert y_i - X_i B w_i \rVert^2`, compute

    .. math::
        w_i &\leftarrow \arg\min_w \hat f_i(w, B) \\
        B_i &\leftarrow B - \eta \nabla_B \hat f_i(w_i, B)
        = B - \tfrac{\eta}{m} X_i^\top (X_i B w_i - y_i)\, w_i^\top

    and the server averages the :math:`B_i`, without orthonormalisation. With
    ``head_solver="gradient"`` the client continues its head by ``head_steps`` steps :math:`w_i
    \leftarrow w_i - \eta_w \nabla_w \hat f_i`: the paper's GD-GD (1) and 10GD-GD (10).

    Algorithm 2 takes fresh samples in every round, as drawn by the data module
    :class:`~lightning_pfl.data.FreshDataModule`. Other data have the same samples in all rounds,
    also for the moments.

    Theorem 1 needs :math:`\eta \le 1 / (4 \bar\sigma_{\max}^2)`, where :math:`\bar\sigma_{\max}` is
    the largest singular value of the cohort's heads :math:`W / \sqrt{|S|}`. Each round logs
    ``fedrep/sigma_max_squared`` of the current heads, and ``fedrep/step_bound``; a step above it is
    warned of once. Somewhat larger steps often converge as well.

    A client is evaluated with its head, which before its first round is the module's. A new client
    (``NewClientAdaptation``) solves for its head on all its samples.

    Args:
        initialization: ``"moments"``, or ``"module"`` for the module's parameters without a round
            of moments.
        head_solver: ``"exact"``: least squares, the solution of least norm where :math:`m < k`; or
            ``"gradient"``.
        head_steps: At least 1; for ``"gradient"``.
        body_lr: :math:`\eta \ge 0`; None keeps the learning rate of ``configure_optimizers``.
            Steps are plain gradient steps with any optimizer.
        head_lr: :math:`\eta_w \ge 0`, for ``"gradient"``, without a schedule; None for the body's.
        ridge: :math:`\rho \ge 0` of the term :math:`\frac\rho2 \lVert w \rVert^2` for exact heads.
        weighting: ``"uniform"`` as in Algorithm 2, or ``"samples"``.

    State:
        server: ``model``, :math:`B^\top`, ``(k, d)``. client_state: ``model``, the head
        :math:`w_i^\top`, ``(clients, 1, k)``. Round 0 uploads ``moments``, the upper triangle of
        the symmetric :math:`Z_i`: :math:`d (d + 1) / 2` numbers; the others :math:`B_i^\top`.

    Deviation from the paper: none with fresh samples. Its experiments (the authors' notebook) use
    the same samples in all rounds, and other initialisations and steps.

    Example:
        >>> LinearFedRep(head_solver="gradient", head_steps=10, body_lr=0.2).head_steps
        10

    References:
        Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized
        federated learning. ICML 2021. arXiv:2102.07078, Algorithm 2, equations 5 to 8, Theorem 1.
    """

    about = About(
        family="a personal part",
        personal=(
            "the head, solved for by least squares; linear models whose subspace begins with "
            "moments"
        ),
        assumes="linear models in one subspace of $k$ of $p$ dimensions",
        down="$4pk$",
        up="$4pk$; once $2p(p + 1)$ for the moments",
        keeps="head",
        gradients="1, and a least squares",
        personal_model=(
            "the server's backbone now, the client's head as it was after its last round"
        ),
        global_model=None,
        paper="Collins et al. 2021, Algorithm 2",
    )
    personal: ParameterSpec = "head"
    measures_client_states: ClassVar[bool] = True

    def __init__(
        self,
        initialization: Initialization = "moments",
        head_solver: HeadSolver = "exact",
        head_steps: int = 1,
        body_lr: float | None = None,
        head_lr: float | None = None,
        ridge: float = 0.0,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(weighting=weighting)
        _check(initialization, head_solver, head_steps)
        for name, rate in (("body_lr", body_lr), ("head_lr", head_lr)):
            if rate is not None:
                check_number(name, rate, "Use 0.1, or None for that of `configure_optimizers`.")
        check_number("ridge", ridge, "Use 0 for plain least squares.")
        for name, value, solver in (("head_lr", head_lr, "gradient"), ("ridge", ridge, "exact")):
            used = head_solver == solver
            check_used(LinearFedRep.__init__, {name: value}, used, f"head_solver={solver!r}")
        self.initialization = initialization
        self.head_solver, self.head_steps = head_solver, head_steps
        self.body_lr, self.head_lr, self.ridge = body_lr, head_lr, ridge

    def bind(self, known: Known) -> None:
        """Find the two matrices of the module.

        Raises:
            MisconfigurationException: If there are other parameters, or the head has several rows.
        """
        super().bind(known)
        shapes = {name: tuple(leaf.shape) for name, leaf in self.parameter_split.model().items()}
        body, head = sorted(self.parameter_split.shared), sorted(self.parameter_split.personal)
        fits = len(body) == len(head) == 1 and not self.parameter_split.static
        if not fits or shapes[head[0]] != (1, *shapes[body[0]][:1]) or len(shapes[body[0]]) != 2:
            found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise MisconfigurationException(
                "Expected a linear model of two matrices without biases, a backbone (k, d) and a "
                f"head (1, k), but got {found}. Use LinearRepresentation, or FedRep for networks."
            )
        self._body, self._head = body[0], head[0]
        self._width = shapes[self._body][1]

    # --- the plan ---

    def finds_moments(self, round: int) -> bool:
        """Whether a round is the method of moments."""
        return round == 0 and self.initialization == "moments"

    def full_participation(self, round: int) -> bool:
        """Require all clients in the round of moments."""
        return self.finds_moments(round)

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Take one step on all samples."""
        name = MOMENTS if self.finds_moments(round) else "local"
        return (Phase("all", steps=1, full_batch=True, lr=self.body_lr, name=name),)

    # --- a client's round ---

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Start with the received body and the client's head, and a placeholder for moments."""
        state = super().client_init(received, client_state, info)
        if not self.finds_moments(info.round):
            return state
        triangle = self._width * (self._width + 1) // 2
        return {**state, MOMENTS: state["model"][self._body].new_zeros(len(info), triangle)}

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Compute the moments, or a head and a step of the body at this head."""
        model = state["model"]
        x, y, real = self._samples(minibatches, client)
        if client.phase == MOMENTS:
            return {**state, MOMENTS: upper_triangle(moments(x, y, real))}
        body, head = model[self._body], model[self._head].squeeze(1)
        features = x @ body.mT
        head = self._fitted(features, y, real, head, client)
        left = residuals(features, y, head, real)
        client.report(mean_product(left.unsqueeze(2), left, real).squeeze(1) / 2, minibatches)
        gradient = head.unsqueeze(2) * mean_product(x, left, real).unsqueeze(1)
        stepped = {self._body: body - client.lr * gradient, self._head: head.unsqueeze(1)}
        return {**state, "model": {**model, **stepped}}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the moments or the body, and store the head."""
        if MOMENTS in state:
            return {MOMENTS: state[MOMENTS]}, client_state
        return super().client_final(received, client_state, state, info)

    def _samples(self, minibatches: Any, client: LocalStep) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs ``(clients, m, d)``, targets ``(clients, m)`` and the sample mask."""
        (inputs, targets, *_), real = client.samples(minibatches)
        like = self.parameter_split.model()[self._body]
        x, y = inputs.flatten(2).to(like.dtype), targets.flatten(1).to(like.dtype)
        if x.shape[2] != self._width or y.shape != real.shape:
            raise ValueError(
                f"Expected samples of {self._width} inputs and one target, but got "
                f"{tuple(inputs.shape[2:])} and {tuple(targets.shape[2:])}. Change the number of "
                "inputs of the backbone."
            )
        return x, y, real

    def _fitted(
        self, features: Tensor, y: Tensor, real: Tensor, head: Tensor, client: LocalStep
    ) -> Tensor:
        """Compute the new heads, ``(clients, k)``."""
        if self.head_solver == "exact":
            return least_squares(features, y, real, self.ridge)
        rate = client.lr if self.head_lr is None else self.head_lr
        for _ in range(self.head_steps):
            left = residuals(features, y, head, real)
            head = head - rate * mean_product(features, left, real)
        return head

    def adaptation_step(
        self, server: Tree, model: Model, minibatches: Any, client: LocalStep, samples: Tensor
    ) -> Model:
        """Solve for a new client's head by least squares.

        Raises:
            ValueError: If the batch isn't all of the client's samples.
        """
        x, y, real = self._samples(minibatches, client)
        if bool((real.sum(1) < send(samples, real.device)).any()):
            raise ValueError(
                "Expected a batch with all samples of a new client, but got "
                f"{int(real.sum(1).min())} samples. Use a larger `batch_size`."
            )
        head = least_squares(x @ model[self._body].mT, y, real, self.ridge)
        return {**model, self._head: head.unsqueeze(1)}

    # --- the server's round ---

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Find the leading eigenvectors of the mean moments, or average the bodies."""
        if MOMENTS not in uploads:
            return super().server_update(server, uploads, info)
        mean = symmetric(weighted_mean(uploads, info.weights)[MOMENTS], self._width)
        body = server["model"][self._body]
        vectors = leading_eigenvectors(mean, len(body)).to(body)
        return {**server, "model": {**server["model"], self._body: vectors.mT.contiguous()}}

    def download_nbytes(self, server: Tree, info: ClientInfo) -> Tensor | None:
        """Count no bytes for the moments, which need no model."""
        return torch.zeros_like(info.index) if self.finds_moments(info.round) else None

    # --- measurements and warnings ---

    def measure(self, federation: FederationView, round: Round) -> Mapping[str, float]:
        """Measure the cohort's heads, and Theorem 1's bound."""
        index = round.info.index.cpu()[round.accepted]
        if self.finds_moments(round.number) or not len(index):
            return {}
        shard = federation.shard(index)
        mine = index[shard.index]
        heads = shard.all_gather(
            federation.client_states.gather(mine)["model"] if len(mine) else {}
        )
        square, bound = step_bound(heads[self._head].flatten(1))
        return {"fedrep/sigma_max_squared": square, "fedrep/step_bound": bound}

    def warnings_after(self, federation: FederationView, round: Round) -> Mapping[str, str]:
        """Warn of a step that Theorem 1 doesn't allow."""
        bound = round.metrics.get("fedrep/step_bound", math.inf)
        rate = round.info.lr if self.body_lr is None else self.body_lr
        if rate <= bound:
            return {}
        return {
            "step": "Expected a step of the body of at most 1/(4 sigma_max^2) = "
            f"{bound:.3g}, as in FedRep's Theorem 1, but got {rate:.3g} in round {round.number} "
            f"with sigma_max^2 = {round.metrics['fedrep/sigma_max_squared']:.3g}. Use "
            f"body_lr={bound:.2g}; larger steps often converge too."
        }


def _check(initialization: str, head_solver: str, head_steps: int) -> None:
    one = "Use one of the two."
    check_choice("initialization", initialization, get_args(Initialization), one)
    check_choice("head_solver", head_solver, get_args(HeadSolver), one)
    check_integer("head_steps", head_steps, 1, "Use 1 for GD-GD, and 10 for 10GD-GD.")
    if head_solver == "exact" and head_steps != 1:
        raise ValueError(
            f"Expected no `head_steps` for exact heads, but got {head_steps=}. Use "
            "head_solver='gradient'."
        )
