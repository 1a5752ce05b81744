"""FedPop: personal parameters drawn from a population, sampled by Langevin dynamics."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_integer, check_number
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model, Tree, add, per_client, select, tmap, weighted_mean, where
from lightning_pfl.methods.base import (
    PER_CLIENT,
    SHARED,
    About,
    Known,
    LocalStep,
    Method,
    Phase,
    Weighting,
)
from lightning_pfl.methods.support.prior_tree import packed, unpacked
from lightning_pfl.priors import GaussianPrior, Prior
from lightning_pfl.priors.base import gradient
from lightning_pfl.priors.probe import check_prior


class FedPop(Method):
    r"""Clients sample personal parameters; the server fits the rest and the population's prior.

    The model of client :math:`k` has shared parameters :math:`\varphi` and personal ones
    :math:`\theta_k`, drawn from a prior :math:`p_\gamma \propto e^{-R(\cdot, \gamma)}`. The server
    maximises the likelihood of all data, integrated over the :math:`\theta_k`, by stochastic
    approximation. In a round each client continues its chain,

    .. math::
        \theta \leftarrow \theta - \eta\, \Bigl(\nabla_\theta \ell_k(\theta, \varphi) +
        \frac{1}{N_k} \nabla_\theta R(\theta, \gamma)\Bigr) + \sqrt{2 \eta / N_k}\; \xi,
        \qquad \xi \sim N(0, I)

    for ``chain_steps`` minibatches, and sends :math:`g_k = \overline{\nabla_\varphi \ell_k}` and
    :math:`h_k = \overline{\nabla_\gamma R(\theta, \gamma)}`, means over the draws at which the
    steps after the first ``burn_in`` begin. For small steps the chain's distribution is that of
    :math:`e^{-N_k \ell_k - R}`.

    .. math::
        \varphi \leftarrow \varphi - \lambda_\varphi \sum_k p_k\, g_k, \qquad
        \gamma \leftarrow \gamma - \lambda_\gamma \frac1m \sum_k h_k

    A client is evaluated with the mean of the draws at which these steps end.

    Args:
        prior: The population's prior, and what is under it; None for ``GaussianPrior(1.0,
            parameters="head")``. FedMAP's priors leave out the density's normaliser: a learned
            variance isn't that of maximum likelihood.
        step_size: :math:`\eta > 0`.
        chain_steps: Steps of the chain per round, at least 1.
        burn_in: First steps, which aren't averaged, from 0 to ``chain_steps - 1``.
        noise: Whether :math:`\xi` is added. False descends to the mode.
        server_lr: :math:`\lambda_\varphi > 0`.
        prior_lr: :math:`\lambda_\gamma \ge 0`; 0 keeps the prior as it is. None: the smallest
            variance, which puts a Gaussian prior's mean at the mean of the draws; only for priors
            with a ``curvature``. Twice that or more converges only where the chains follow the
            prior within a round.
        weighting: ``"samples"``: :math:`p_k` by samples, the gradient of the mean loss of all data;
            ``"uniform"``.

    State:
        server: ``model``, the shared part and the prior's mean; ``prior``, the rest of
        :math:`\gamma`. client_state: ``chain``, the last draw; ``mean``, of the kept draws, each
        leaf ``(clients, *shape)``; ``begun``, bool ``(clients,)``.

    Deviation from the paper: minibatches instead of all samples; one step of the server for the
    cohort, not one after each client; plain steps. The released code adds no noise in its CIFAR
    experiments, and keeps the model that is best on test data. A client that takes part for the
    first time starts at the prior's mean.

    Example:
        >>> FedPop(GaussianPrior(0.5, parameters="head"), noise=False).chain_steps
        10

    References:
        Kotelevskii, Vono, Durmus, Moulines. FedPop: A Bayesian approach for personalised federated
        learning. NeurIPS 2022. arXiv:2206.03611, Algorithm 1.
    """

    about = About(
        family="a personal model",
        personal="the head, sampled under a prior that the server learns",
        assumes="the backbone suits all; heads come from one distribution; little data each",
        down="$4d$, with learned variances more",
        up="$4d$, gradients; with learned variances more",
        keeps="2 heads",
        gradients="1",
        personal_model=(
            "the server's part as it is now, and the mean of the client's last draws; before its "
            "first round, the prior's mean"
        ),
        global_model="the server's part with the prior's mean",
        paper="Kotelevskii et al. 2022",
    )

    fresh_optimizer: ClassVar[str] = "its steps are draws, not those of an optimizer"

    begun_state: ClassVar[str] = "begun"

    def __init__(
        self,
        prior: Prior | None = None,
        step_size: float = 0.05,
        chain_steps: int = 10,
        burn_in: int = 5,
        noise: bool = True,
        server_lr: float = 0.1,
        prior_lr: float | None = None,
        weighting: Weighting = "samples",
    ) -> None:
        check_integer("chain_steps", chain_steps, 1, "Use 10, for example.")
        super().__init__(local_epochs=None, local_steps=chain_steps, weighting=weighting)
        check_types(FedPop.__init__, {"noise": noise})
        if prior is not None and not isinstance(prior, Prior):
            raise TypeError(
                f"Expected `prior` to be a Prior, but got {prior=}. Use GaussianPrior(1.0, "
                "parameters='head')."
            )
        self.prior = GaussianPrior(1.0, parameters="head") if prior is None else prior
        check_number("step_size", step_size, "Use 0.05, for example.", positive=True)
        check_integer("burn_in", burn_in, 0, "Use half of `chain_steps`.")
        if burn_in >= chain_steps:
            raise ValueError(
                f"Expected `burn_in` to be below `chain_steps`, but got {burn_in=} and "
                f"{chain_steps=}. Use half of `chain_steps`, so that some draws are kept."
            )
        check_number("server_lr", server_lr, "Use 0.1, for example.", positive=True)
        if prior_lr is not None:
            check_number("prior_lr", prior_lr, "Use the prior's variance, or 0 to fix it.")
        self.step_size, self.chain_steps, self.burn_in = step_size, chain_steps, burn_in
        self.noise, self.server_lr, self.prior_lr = noise, server_lr, prior_lr

    # --- who holds what ---

    def _under(self, parameter_split: ParameterSplit) -> frozenset[str]:
        return frozenset(parameter_split.trainable) & parameter_split.match(
            self.prior.parameters, "parameters"
        )

    def ownership(self, parameter_split: ParameterSplit) -> dict[str, frozenset[str]]:
        """Return entries by ownership, separately those under the prior."""
        under = self._under(parameter_split)
        return {
            f"{PER_CLIENT}, under the prior": under,
            SHARED: parameter_split.shared - under,
        }

    def bind(self, known: Known) -> None:
        """Find the entries under the prior, and check the prior on two clients.

        Raises:
            ValueError: If ``prior_lr`` is None and the prior has no curvature, or the prior's
                functions are invalid.
        """
        super().bind(known)
        self.under = self._under(self.parameter_split)
        self.body = frozenset(self.parameter_split.trainable) - self.under
        model = select(self.parameter_split.model(), self.under)
        check_prior(self.prior, model)
        if self.prior_lr is None and self.prior.curvature(self.prior.init(model)) is None:
            raise ValueError(
                f"Expected `prior_lr` to be a number for {type(self.prior).__name__}, which has no "
                "curvature that tells a step, but got prior_lr=None. Use 0.1, for example."
            )

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Run the chain."""
        return (Phase("all", steps=self.chain_steps),)

    # --- state ---

    def init_server(self, model: Model) -> Tree:
        """Make the shared part, and the prior's initial parameters."""
        gamma = self.prior.init(select(model, self.under))
        shared = select(model, self.parameter_split.shared - self.under)
        return packed(shared, gamma)

    def gamma(self, tree: Tree) -> Tree:
        """Return the prior's parameters, from the server's or a received tree."""
        return unpacked(tree, self.under)

    def init_client_state(self, model: Model) -> Tree:
        """Make a chain that has not begun."""
        device = next(iter(model.values())).device
        under = select(model, self.under)
        begun = torch.zeros((), dtype=torch.bool, device=device)
        return {"chain": under, "mean": dict(under), "begun": begun}

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send the prior and the shared part."""
        return dict(server)

    # --- a client's round ---

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Continue the chain, or begin it at the prior's mean."""
        chain = self._begun("chain", received, client_state)
        gamma = self.gamma(received)
        shared = select(received["model"], self.parameter_split.shared - self.under)
        device = client_state["begun"].device
        return {
            "model": {**shared, **chain},
            "gamma": gamma,
            "samples": send(info.num_samples, device).clamp_min(1).double(),
            "taken": torch.zeros(len(info), dtype=torch.int64, device=device),
            "mean": tmap(torch.zeros_like, chain),
            "body": tmap(torch.zeros_like, select(shared, self.body)),
            "prior": tmap(torch.zeros_like, gamma),
        }

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Add up the gradients at the draw if it is kept, and take a step of the chain."""
        model, gamma, samples = state["model"], state["gamma"], state["samples"]
        grads = client.grad(model, minibatches)
        if not grads:  # a minibatch that `training_step` skips
            return state
        theta = select(model, self.under)
        pull = self.prior.theta_gradient(theta, gamma)
        drawn = tmap(
            lambda t, g, r: t - self.step_size * (g + r / per_client(samples, r)),
            theta,
            grads,
            pull,
        )
        if self.noise:
            scale = (2 * self.step_size / samples).sqrt()
            drawn = tmap(lambda t, e: t + per_client(scale, e) * e, drawn, client.noise(drawn))
        kept = (state["taken"] >= self.burn_in).double()
        new = {
            "mean": drawn,
            "body": select(grads, self.body),
            "prior": gradient(lambda each: self.prior.regularizer(theta, each).sum(), gamma),
        }
        total = {name: state[name] for name in new}
        total = tmap(lambda old, one: old + per_client(kept, one) * one, total, new)
        return {**state, **total, "model": {**model, **drawn}, "taken": state["taken"] + 1}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the mean gradients and the buffers, and store the chain."""
        count = (state["taken"] - self.burn_in).clamp_min(1).double()
        mean = tmap(
            lambda leaf: leaf / per_client(count, leaf),
            {name: state[name] for name in ("mean", "body", "prior")},
        )
        buffers = select(state["model"], self.parameter_split.buffers)
        upload: Tree = {"gradient": mean["body"], "prior": mean["prior"], "buffers": buffers}
        some = state["taken"] > self.burn_in
        kept = where(some, mean["mean"], self._begun("mean", received, client_state))
        chain = select(state["model"], self.under)
        begun = torch.ones_like(client_state["begun"])
        return (
            {name: entry for name, entry in upload.items() if entry},
            {"chain": chain, "mean": kept, "begun": begun},
        )

    # --- the server's round ---

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Step the shared part and the prior along the clients' gradients."""
        shared = select(server["model"], self.parameter_split.shared - self.under)
        slope = weighted_mean(uploads.get("gradient", {}), info.weights)
        body = tmap(lambda g, x: x - self.server_lr * g, slope, shared)
        buffers = weighted_mean(uploads.get("buffers", {}), info.weights)
        equal = torch.full_like(info.weights, 1 / len(info))
        gamma = self.gamma(server)
        slope = add(weighted_mean(uploads["prior"], equal), gradient(self.prior.hyperprior, gamma))
        curvature = self.prior.curvature(gamma)
        step = (1 / curvature if curvature else 0.0) if self.prior_lr is None else self.prior_lr
        moved = tmap(lambda x, g: x - step * g, gamma, slope)
        return packed({**shared, **body, **buffers}, self.prior.project(moved))

    # --- what is evaluated and handed out ---

    def _begun(self, entry: str, received: Tree, client_state: Tree) -> Model:
        """Return an entry of the client's state, or the prior's mean before its first round."""
        found: Model = client_state[entry]
        centers = self.gamma(received).get("mean", found)
        begun = client_state["begun"]
        kept: Model = tmap(
            lambda own, center: own.where(per_client(begun, own) > 0, center), found, centers
        )
        return kept

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        """Return the shared part with the mean of the client's draws."""
        return {**received["model"], **self._begun("mean", received, client_state)}

    def global_model(self, server: Tree) -> Model | None:
        """Return the shared part with the prior's mean; None for a prior without one."""
        model: Model = server.get("model", {})
        return dict(model) if model.keys() == set(self.parameter_split.names) else None

    # --- settings ---

    def settings(self) -> dict[str, str]:
        """Return all settings, with the prior's."""
        return {**super().settings(), "prior": repr(self.prior)}
