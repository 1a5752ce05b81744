"""FedMAP: personal models under a learned prior."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_pfl.contract.callback import FederationView
from lightning_pfl.contract.records import ClientInfo, Round
from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_choice, check_number
from lightning_pfl.core.parameters import ParameterSpec, ParameterSplit
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import (
    Model,
    Tree,
    expand,
    per_client,
    rows,
    select,
    tmap,
    weighted_mean,
)
from lightning_pfl.methods.base import (
    PER_CLIENT,
    SHARED,
    About,
    Known,
    LocalStep,
    Method,
    PerClient,
    Phase,
    recordable,
)
from lightning_pfl.methods.support.prior_tree import packed, unpacked
from lightning_pfl.methods.support.stability import Pull, WatchedPull
from lightning_pfl.priors import GaussianPrior, Prior
from lightning_pfl.priors.probe import check_prior, depends_on_gamma

PosteriorWeighting = Literal["posterior", "exact", "per_sample", "samples", "uniform"]
DataTerm = Literal["mean", "sum"]
MEASURED = ("posterior", "exact", "per_sample")
"""Weightings that need the loss of the trained models."""
MEASURE = "measure"


class FedMAP(WatchedPull, Method):
    r"""Clients find the mode of their posterior; the server fits the prior to these modes.

    .. math::
        \theta_k^{t+1} &\approx \arg\min_\theta\; \ell_k(\theta) + R(\theta, \gamma^t) \\
        \log \omega_k &= -\ell_k(\theta_k^{t+1}) - R(\theta_k^{t+1}, \gamma^t), \qquad
        \bar\omega_k = \omega_k / \textstyle\sum_j \omega_j \\
        \gamma^{t+1} &= \gamma^t - \lambda \sum_k \bar\omega_k\,
        \partial_\gamma R(\theta_k^{t+1}, \gamma^t)
        \quad\text{or}\quad \arg\min_\gamma \sum_k \bar\omega_k R(\theta_k^{t+1}, \gamma)

    :math:`\ell_k` is the client's mean loss, and :math:`\rho_\gamma \propto e^{-R}` the prior.
    :math:`\theta_k` continues from the client's last round, and is the personal model. With a
    Gaussian prior the second form of the last line is the weighted mean of the :math:`\theta_k`.
    The weights are computed from their logarithms, without underflow.

    Entries that aren't under the prior (``parameters`` of the prior) and aren't personal are
    shared: trained from the received values and averaged with the same weights. Buffers (BatchNorm
    statistics) stay on the client.

    Args:
        prior: The family of priors; None for ``GaussianPrior(variance=15.0)``.
        weighting: :math:`\log \omega_k`, with :math:`N_k` samples: ``"posterior"``: as above, as in
            the paper's code; ``"exact"``: :math:`-N_k \ell_k - R` as in equation 8, which
            concentrates the weight on one client, often with the fewest samples;
            ``"per_sample"``: :math:`-\ell_k - R / N_k`; ``"samples"``: :math:`\log N_k`, as in the
            code's server; ``"uniform"``. The first three measure the loss in another pass over the
            client's data, in eval mode, and trust the clients' weights; the last two don't.
        prior_lr: :math:`\lambda > 0`. None: the minimiser, where the prior has a closed form.
        data_term: ``"mean"``: :math:`\ell_k` as above (equation 7); ``"sum"``: :math:`N_k \ell_k`
            (equation 2), with the objective divided by :math:`N_k`, which has the same minimiser
            and suits the same step sizes.
        personal: What is neither sent nor under the prior.
        log_envelope: Whether to log ``prior/envelope``, :math:`M(\gamma^t) = \sum_k \bar\omega_k
            (\ell_k + R)` at the trained models, with :math:`R` complete. The server minimises it if
            clients solve exactly and weights are fixed (theorem 1); costs a pass over the data, and
            a number per upload.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps instead. Exactly one of the two.

    State:
        server: ``model``, the prior's mean and the shared part; ``prior``, the rest of
        :math:`\gamma`. client_state: ``model``, :math:`\theta_k` and the personal part, each leaf
        ``(clients, *shape)``; ``begun``, whether the client has trained, bool ``(clients,)``. The
        upload has ``log_weight``, float64, if the loss is measured.

    Deviation from the paper: a client that takes part for the first time starts at the prior's
    current mean, in round 0 the common initial model. The module's parameters are those of the
    randomly selected client.

    Example:
        >>> FedMAP(GaussianPrior(variance=1.0), weighting="uniform").prior
        GaussianPrior(variance=1.0, parameters='all')

    References:
        Zhang, Esteve-Yagüe, Dittmer, Schönlieb, Roberts. FedMAP: Unlocking potential in
        personalized federated learning through bi-level MAP optimization. arXiv:2405.19000,
        algorithms 1 to 3, equations 2 to 9.
    """

    about = About(
        family="a personal model",
        personal="the most probable model under a prior that the server learns",
        assumes="clients' models come from one distribution, the prior",
        down="$4d$, with learned variances $8d$",
        up=(
            '$4d + 8$, with `weighting` by `"samples"` or `"uniform"` $4d$; 8 more with '
            "`log_envelope=True`"
        ),
        keeps="model with buffers",
        gradients=(
            "1; where it sends a weight or the envelope, a forward pass over its data a round"
        ),
        personal_model="the client's own model; the prior's mean before its first round",
        global_model="the prior's mean; with personal parts, none",
        paper="Zhang et al. 2024",
    )

    begun_state: ClassVar[str] = "begun"

    def __init__(
        self,
        prior: Prior | None = None,
        weighting: PosteriorWeighting = "posterior",
        prior_lr: float | None = None,
        data_term: DataTerm = "mean",
        personal: ParameterSpec = None,
        log_envelope: bool = False,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
    ) -> None:
        plain: Literal["samples", "uniform"] = "samples" if weighting == "samples" else "uniform"
        super().__init__(local_epochs, local_steps, plain)
        check_types(FedMAP.__init__, {"log_envelope": log_envelope})
        self.prior = GaussianPrior(15.0) if prior is None else prior
        _check(self.prior, weighting, prior_lr, data_term)
        self.weighting = weighting  # type: ignore[assignment]
        self.prior_lr, self.data_term = prior_lr, data_term
        self.personal, self.log_envelope = personal, log_envelope

    # --- who holds what ---

    def resolve_personal(self, parameter_split: ParameterSplit) -> ParameterSpec:
        """Return the user's personal part and the buffers."""
        return sorted(
            parameter_split.match(self.personal, "personal") | frozenset(parameter_split.buffers)
        )

    def ownership(self, parameter_split: ParameterSplit) -> dict[str, frozenset[str]]:
        """Return entries by ownership, separately those under the prior."""
        under = self._under(parameter_split)
        return {
            f"{PER_CLIENT}, under the prior": under,
            SHARED: parameter_split.shared - under,
            "personal": parameter_split.personal,
        }

    def _under(self, parameter_split: ParameterSplit) -> frozenset[str]:
        return frozenset(parameter_split.trainable) & parameter_split.match(
            self.prior.parameters, "parameters"
        )

    def bind(self, known: Known) -> None:
        """Find the entries under the prior, and check the prior on two clients.

        Raises:
            TypeError, ValueError: If no entry is under the prior, some of them are personal, or the
                prior's functions are invalid.
        """
        super().bind(known)
        self.under = self._under(self.parameter_split)
        if not self.under:
            raise ValueError(
                "Expected the prior's `parameters` to match trainable parameters, but got "
                f"parameters={self.prior.parameters!r}. Use 'all', or FedAvg without a prior."
            )
        if both := sorted(self.under & self.parameter_split.personal):
            raise ValueError(
                "Expected `personal` and the prior's `parameters` to be disjoint, but both have "
                f"{', '.join(both[:5])}. Remove these from one of them."
            )
        check_prior(self.prior, select(self.parameter_split.model(), self.under))

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Train locally; if the loss is needed, add a pass that measures it."""
        local = Phase("all", epochs=self.local_epochs, steps=self.local_steps)
        if self.weighting not in MEASURED and not self.log_envelope:
            return (local,)
        return local, Phase(epochs=1, name=MEASURE, evaluate_only=True)

    def pull(self, server: Tree, info: ClientInfo) -> Pull | None:
        """Return the prior's pull on one client's model, if it is a Gaussian."""
        curvature = self.prior.curvature(self.gamma(server))
        if curvature is None:
            return None
        remedy = "a prior with a larger variance"
        # With c = 1 / variance, a step leaves 1 - lr c of a parameter's distance to the mean.
        if self.data_term == "mean":
            return Pull(curvature, "the prior's curvature", remedy)
        # Steps are along (N l + R) / N, in which R has the curvature c / N, largest for small N.
        fewest = max(int(info.num_samples.min()), 1)
        return Pull(curvature / fewest, "the prior's curvature / samples", remedy)

    # --- state ---

    def init_server(self, model: Model) -> Tree:
        """Make the prior's initial parameters and the initial shared part."""
        gamma = self.prior.init(select(model, self.under))
        return packed(select(model, self.parameter_split.shared - self.under), gamma)

    def init_client_state(self, model: Model) -> Tree:
        """Make the state of a personal model that has not trained yet."""
        kept = select(model, self.under | self.parameter_split.personal)
        device = next(iter(model.values())).device
        return {"model": kept, "begun": torch.zeros((), dtype=torch.bool, device=device)}

    def gamma(self, tree: Tree) -> Tree:
        """Return the prior's parameters, from the server's or a received tree."""
        return unpacked(tree, self.under)

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send the prior and the shared part."""
        return dict(server)

    # --- a client's round ---

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Continue with the personal model, or start at the prior's mean."""
        model = self.personal_model(received, client_state, info)
        samples = send(info.num_samples, client_state["begun"].device).clamp_min(1).double()
        return {
            "model": model,
            "gamma": self.gamma(received),
            "samples": samples,
            "loss": torch.zeros_like(samples),
            "count": torch.zeros_like(samples),
        }

    @recordable("prior", "under", "data_term")
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Step on loss and prior, or measure a part of the loss."""
        model = state["model"]
        if client.phase == MEASURE:
            loss, count = client.loss(model, minibatches)
            return {**state, "loss": state["loss"] + loss * count, "count": state["count"] + count}
        return {
            **state,
            "model": self._step(model, state["gamma"], minibatches, client, state["samples"]),
        }

    def _step(
        self, model: Model, gamma: Tree, minibatches: Any, client: LocalStep, samples: Tensor
    ) -> Model:
        grads, theta = client.grad(model, minibatches), select(model, self.under)
        if self.data_term == "sum":
            pull = self.prior.theta_gradient(theta, gamma)
            pull = tmap(lambda leaf: leaf / per_client(samples, leaf), pull)
            grads = {name: g + pull[name] if name in pull else g for name, g in grads.items()}
        else:
            grads = self.prior.add_gradient(grads, theta, gamma)
        return client.update(model, grads)

    def adaptation_step(
        self, server: Tree, model: Model, minibatches: Any, client: LocalStep, samples: Tensor
    ) -> Model:
        """Adapt a new client under the current prior."""
        gamma = expand(self.gamma(server), len(samples))
        return self._step(model, gamma, minibatches, client, samples.clamp_min(1))

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the model with its log weight, and store it."""
        model = state["model"]
        upload: Tree = {"model": select(model, self.parameter_split.shared)}
        loss, samples = state["loss"] / state["count"].clamp_min(1), state["samples"]
        penalty = self.prior.regularizer(select(model, self.under), state["gamma"]).double()
        if self.weighting in MEASURED:
            upload["log_weight"] = log_weights(self.weighting, loss, penalty, samples)
        if self.log_envelope:
            data = loss * samples if self.data_term == "sum" else loss
            upload["envelope"] = data + penalty
        kept = select(model, self.under | self.parameter_split.personal)
        return upload, {"model": kept, "begun": torch.ones_like(client_state["begun"])}

    # --- the server's round ---

    def weights(self, uploads: Tree, info: ClientInfo) -> Tensor:
        r"""Normalise the weights :math:`\bar\omega_k` of the uploads, float64 ``(clients,)``."""
        if "log_weight" not in uploads:
            return info.weights
        return torch.softmax(uploads["log_weight"], 0)

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Fit the prior to the personal models, and average the shared part."""
        device = next(iter(uploads["model"].values())).device
        weights = send(self.weights(uploads, info), device)
        theta = select(uploads["model"], self.under)
        gamma = self.prior.update(theta, self.gamma(server), weights, self.prior_lr)
        shared = select(uploads["model"], self.parameter_split.shared - self.under)
        return packed(weighted_mean(shared, weights), gamma)

    # --- what is evaluated and handed out ---

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        """Return the client's model, or the prior's mean before its first round."""
        model: Model = {**received.get("model", {}), **client_state["model"]}
        for name, center in self.gamma(received).get("mean", {}).items():
            # 0 or 1, so that either is taken as it is; `where` takes four times as long.
            begun = per_client(client_state["begun"], center)
            model[name] = torch.lerp(center, client_state["model"][name], begun)
        return model

    def global_model(self, server: Tree) -> Model | None:
        """Return the prior's mean with the shared part; None if some entries are personal."""
        model: Model = server.get("model", {})
        return dict(model) if model.keys() == set(self.parameter_split.names) else None

    # --- notes and measurements ---

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return log lines for an infinite variance or a fixed prior."""
        alone = isinstance(self.prior, GaussianPrior) and self.prior.pulls_nobody
        notes = ["variance=inf makes FedMAP LocalOnly with a mean."] if alone else []
        if not depends_on_gamma(
            self.prior, select(parameter_split.model(), self._under(parameter_split))
        ):
            notes.append(
                f"{type(self.prior).__name__} doesn't depend on gamma: the server leaves it as "
                "`init` made it."
            )
        return notes

    def settings(self) -> dict[str, str]:
        """Return all settings, with the prior's."""
        return {**super().settings(), "prior": repr(self.prior)}

    def measure(self, federation: FederationView, round: Round) -> Mapping[str, float]:
        """Compute the envelope from the accepted uploads."""
        uploads, accepted = round.uploads or {}, round.accepted
        if "envelope" not in uploads or not accepted.any():
            return {}
        value = self.weights(uploads, round.info.keep(accepted)).to(uploads["envelope"])
        gamma = self.gamma(rows(round.received or {}, slice(0, 1)))
        more = self.prior.hyperprior(tmap(lambda leaf: leaf[0], gamma))
        return {"prior/envelope": float(value @ uploads["envelope"]) + float(more)}


def log_weights(weighting: str, loss: Tensor, penalty: Tensor, samples: Tensor) -> Tensor:
    r"""Compute the logarithms of the clients' weights, up to a common constant.

    Args:
        weighting: One of :data:`MEASURED`; the two others are shares of
            :meth:`~lightning_pfl.methods.base.Method.aggregation_weights`.
        loss: :math:`\ell_k`, ``(clients,)``.
        penalty: :math:`R(\theta_k, \gamma)`, ``(clients,)``.
        samples: :math:`N_k \ge 1`, ``(clients,)``.
    """
    if weighting == "exact":
        return -samples * loss - penalty
    if weighting == "per_sample":
        return -loss - penalty / samples
    return -loss - penalty


def _check(prior: Prior, weighting: str, prior_lr: float | None, data_term: str) -> None:
    if not isinstance(prior, Prior):
        raise TypeError(
            f"Expected `prior` to be a Prior, but got {prior=}. Use one of lightning_pfl.priors, "
            "such as GaussianPrior(variance=15.0)."
        )
    check_choice("weighting", weighting, get_args(PosteriorWeighting), "Use one of these.")
    check_choice("data_term", data_term, get_args(DataTerm), "Use one of the two.")
    if prior_lr is None and not prior.has_closed_form:
        raise ValueError(
            f"Expected `prior_lr` to be a number, as {type(prior).__name__} has no closed form, "
            "but got prior_lr=None. Use 0.1, for example."
        )
    if prior_lr is not None:
        advice = "For a Gaussian prior the variance gives the weighted mean."
        check_number("prior_lr", prior_lr, advice, positive=True)
