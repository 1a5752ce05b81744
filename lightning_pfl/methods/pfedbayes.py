"""pFedBayes: a distribution over models for each client, near one that all share."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import softplus

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_choice, check_integer, check_number, is_number
from lightning_pfl.core.mixture import ensemble
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model, Tree, leaves, per_client, select, tmap, weighted_mean
from lightning_pfl.methods.base import PER_CLIENT, About, LocalStep, Method, PerClient, Weighting
from lightning_pfl.methods.support.stability import Pull, WatchedPull
from lightning_pfl.solvers.proximal import towards

Combine = Literal["parameters", "moments"]
Normal = dict[str, Model]
"""Independent normal distributions: ``mean`` and ``rho``, with standard deviations
``softplus(rho)``; each leaf ``(clients, *shape)``."""


class PFedBayes(WatchedPull, Method):
    r"""Clients fit a normal distribution of models, whose distance to a common one is penalised.

    Client :math:`k` has :math:`q_k = N(m_k, \sigma_k^2)`, an independent normal distribution of
    each parameter, with :math:`\sigma = \log(1 + e^\rho)`. With the common distribution :math:`w`
    it minimises

    .. math::
        \operatorname{E}_{\theta \sim q_k} \ell_k(\theta) + \frac{\zeta}{N_k}
        \operatorname{KL}(q_k \,\Vert\, w), \qquad
        \operatorname{KL} = \sum \tfrac12 \Bigl[ \log \frac{\sigma_w^2}{\sigma_k^2} +
        \frac{\sigma_k^2 + (m_k - m_w)^2}{\sigma_w^2} - 1 \Bigr]

    by ``inner_steps`` steps on each minibatch with :math:`\theta = m_k + \sigma_k \epsilon`; then
    it moves its copy of :math:`w` by ``copy_steps`` steps towards :math:`q_k`, along the same
    divergence, and sends the copy. The server averages the copies.

    ``combine="parameters"``, as published, averages means and :math:`\rho`. It loses how far the
    clients' means are apart, so that :math:`\sigma_w` shrinks from round to round and all models
    end alike. ``"moments"`` fits :math:`w` to the mixture of the copies, with :math:`\sigma_w^2 =
    \operatorname{mean}(\sigma_k^2 + (m_k - m_w)^2)`, and keeps it.

    Args:
        kl_weight: :math:`\zeta > 0`, against the sum of the losses of the client's samples.
        combine: ``"parameters"`` or ``"moments"``.
        draws: Models drawn per inner step, at least 1.
        inner_steps: Steps of :math:`q_k` per minibatch, at least 1.
        copy_steps: Steps of the copy per minibatch, at least 0. None: none, and the client sends
            :math:`q_k` itself, the divergence's minimiser.
        initial_rho: :math:`\rho` at the start, of all parameters.
        server_mixing: :math:`\beta > 0`: the server moves by :math:`\beta` of the way to the mean.
        evaluation_draws: 0: a client predicts with its mean. Otherwise the number of drawn models
            whose probabilities are averaged.
        local_epochs: Passes over a client's data per round.
        local_steps: Minibatches per round instead. Exactly one of the two.
        weighting: ``"uniform"`` as in the paper, or ``"samples"``.

    State:
        server: ``model``, the mean of :math:`w` with averaged buffers; ``rho``. client_state: the
        same of :math:`q_k`, each leaf ``(clients, *shape)``, and ``begun``, bool ``(clients,)``.

    Deviation from the paper: the user's optimizer takes all steps; its weight decay would also act
    on :math:`\rho`, so set it to 0. A client that takes part for the first time starts at
    :math:`w`. Defaults are those of an unofficial implementation, whose noise was 1000 times
    smaller: there the variances followed from the divergence alone.

    Example:
        >>> PFedBayes(combine="moments", copy_steps=None).kl_weight
        10.0

    References:
        Zhang, Li, Li, Guo, Shao. Personalized federated learning via variational Bayesian
        inference. ICML 2022. arXiv:2206.07977, Algorithm 1.
    """

    about = About(
        family="a personal model",
        personal="a normal distribution over models, near a common one",
        assumes="clients' models come from one distribution; little data each",
        down="$8d$",
        up="$8d$",
        keeps="2 models",
        gradients="`inner_steps * draws`",
        personal_model=(
            "the mean of the client's distribution; before its first round, of the common one"
        ),
        global_model="the mean of the common distribution",
        paper="Zhang et al. 2022",
    )
    model_scope: ClassVar[str] = PER_CLIENT
    state_settings: ClassVar[tuple[str, ...]] = ("initial_rho",)

    begun_state: ClassVar[str] = "begun"

    def __init__(
        self,
        kl_weight: float = 10.0,
        combine: Combine = "parameters",
        draws: int = 1,
        inner_steps: int = 5,
        copy_steps: int | None = 1,
        initial_rho: float = -3.0,
        server_mixing: float = 1.0,
        evaluation_draws: int = 0,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        check_number("kl_weight", kl_weight, "Use 10, for example.", positive=True)
        check_choice("combine", combine, get_args(Combine), "Use 'parameters' as published.")
        check_integer("draws", draws, 1, "Use 1 for one model per step.")
        check_integer("inner_steps", inner_steps, 1, "Use 5, for example.")
        if copy_steps is not None:
            check_integer("copy_steps", copy_steps, 0, "Use 1, or None to send the fit itself.")
        if not is_number(initial_rho) or not math.isfinite(initial_rho):
            raise ValueError(
                "Expected `initial_rho` to be a finite number, but got "
                f"initial_rho={initial_rho!r}. Use -3, a standard deviation of 0.05."
            )
        check_number("server_mixing", server_mixing, "Use 1 for the mean.", positive=True)
        check_integer("evaluation_draws", evaluation_draws, 0, "Use 0 for the mean.")
        self.kl_weight, self.draws, self.initial_rho = kl_weight, draws, initial_rho
        self.inner_steps, self.copy_steps = inner_steps, copy_steps
        self.server_mixing, self.evaluation_draws = server_mixing, evaluation_draws
        self.combine: Combine = combine

    def pull(self, server: Tree, info: ClientInfo) -> Pull:
        """Return the divergence's pull on one client's mean."""
        least = min(float(softplus(leaf).min()) for leaf in leaves(server["rho"]))
        fewest = max(int(info.num_samples.min()), 1)
        strength = self.kl_weight / (fewest * least**2)
        remedy = "a smaller `kl_weight` or a larger `initial_rho`"
        return Pull(strength, "kl_weight / (samples * variance)", remedy)

    # --- state ---

    def init_server(self, model: Model) -> Tree:
        """Make the module's model the mean, with equal standard deviations."""
        trained = select(model, self.parameter_split.trainable)
        rho = tmap(lambda leaf: torch.full_like(leaf, self.initial_rho), trained)
        return {"model": model, "rho": rho}

    def init_client_state(self, model: Model) -> Tree:
        """Make a distribution that has not been fitted yet."""
        device = next(iter(model.values())).device
        begun = torch.zeros((), dtype=torch.bool, device=device)
        return {**self.init_server(model), "begun": begun}

    # --- a client's round ---

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send the common distribution."""
        return dict(server)

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Continue with the client's distribution, and copy the common one."""
        mean = select(received["model"], self.parameter_split.trainable)
        first = next(iter(mean.values()))
        samples = send(info.num_samples, first.device).clamp_min(1).double()
        return {
            **self._fitted(received, client_state),
            "copy": {"mean": mean, "rho": dict(received["rho"])},
            "divergence": self.kl_weight / samples,
        }

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Fit the client's distribution on a minibatch, then move the copy towards it."""
        model, rho = state["model"], state["rho"]
        copy, factor = state["copy"], state["divergence"]
        for number in range(self.inner_steps):
            by_mean, by_rho = self._gradients(model, rho, number, minibatches, client)
            if not by_mean:  # a minibatch that `training_step` skips
                return state
            q, w = self._as_normal(model, rho), copy
            by_mean = tmap(lambda g, k: g + k * per_client(factor, g), by_mean, _kl_mean(q, w))
            by_rho = tmap(lambda g, k: g + k * per_client(factor, g), by_rho, _kl_rho(q, w))
            model = client.update(model, by_mean)
            rho = client.update(rho, by_rho, slot="rho")
        for _ in range(self.copy_steps or 0):
            copy = self._towards(copy, self._as_normal(model, rho), factor, client)
        return {**state, "model": model, "rho": rho, "copy": copy}

    def _as_normal(self, model: Model, rho: Model) -> Normal:
        return {"mean": select(model, rho), "rho": rho}

    def _gradients(
        self, model: Model, rho: Model, number: int, minibatches: Any, client: LocalStep
    ) -> tuple[Model, Model]:
        r"""Estimate the gradients of the expected loss by :math:`m` and :math:`\rho`."""
        sums: list[tuple[Model, Model]] = []
        for draw in range(self.draws):
            noise = client.noise(rho, f"{number}/{draw}")
            drawn = tmap(lambda r, m, e: m + softplus(r) * e, rho, model, noise)
            grads = client.grad({**model, **drawn}, minibatches)
            # d sigma / d rho is the logistic function.
            sums.append((grads, tmap(lambda g, e, r: g * e * r.sigmoid(), grads, noise, rho)))
        means = [
            tmap(lambda *each: torch.stack(each).mean(0), *parts)
            for parts in zip(*sums, strict=True)
        ]
        return means[0], means[1]

    def _towards(self, copy: Normal, q: Normal, factor: Tensor, client: LocalStep) -> Normal:
        r"""Take a step of the copy along the gradient of the divergence by :math:`w`."""
        squares = tmap(
            lambda r, m, c: softplus(r).square() + (m - c).square(),
            q["rho"],
            q["mean"],
            copy["mean"],
        )
        by_mean = tmap(
            lambda c, m, r: per_client(factor, c) * (c - m) / softplus(r).square(),
            copy["mean"],
            q["mean"],
            copy["rho"],
        )
        by_rho = tmap(
            lambda r, s: (
                per_client(factor, r) * (1 / softplus(r) - s / softplus(r) ** 3) * r.sigmoid()
            ),
            copy["rho"],
            squares,
        )
        return {
            "mean": client.update(copy["mean"], by_mean, slot="copy"),
            "rho": client.update(copy["rho"], by_rho, slot="copy's rho"),
        }

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the copy with the client's buffers, and store the client's distribution."""
        model, rho = state["model"], state["rho"]
        sent = self._as_normal(model, rho) if self.copy_steps is None else state["copy"]
        upload = {"model": {**model, **sent["mean"]}, "rho": dict(sent["rho"])}
        begun = torch.ones_like(client_state["begun"])
        return upload, {"model": model, "rho": rho, "begun": begun}

    # --- the server's round ---

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Combine the copies, and move towards the result."""
        new = weighted_mean({"model": uploads["model"], "rho": uploads["rho"]}, info.weights)
        if self.combine == "moments":
            spread = tmap(
                lambda r, m, c: softplus(r).square() + (m - c).square(),
                uploads["rho"],
                uploads["model"],
                new["model"],
            )
            new["rho"] = tmap(
                lambda v: _inverse_softplus(v.sqrt()), weighted_mean(spread, info.weights)
            )
        old = select(server["model"], self.parameter_split.trainable)
        mean = towards(old, new["model"], self.server_mixing)
        rho = towards(server["rho"], new["rho"], self.server_mixing)
        return {"model": {**new["model"], **mean}, "rho": rho}

    # --- what is evaluated and handed out ---

    def _fitted(self, received: Tree, client_state: Tree) -> Tree:
        """Return the client's distribution, or the common one before its first round."""
        begun = client_state["begun"]
        common = {"model": received["model"], "rho": received["rho"]}
        return tmap(
            lambda new, own: own.where(per_client(begun, own) > 0, new), common, client_state
        )

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        """Return the mean of the client's distribution, or models drawn from it."""
        fitted = self._fitted(received, client_state)
        model: Model = fitted["model"]
        if not self.evaluation_draws:
            return model
        drawn = []
        for number in range(self.evaluation_draws):
            noise = self.client_noise(fitted["rho"], info, f"evaluation {number}")
            moved = tmap(lambda r, m, e: m + softplus(r) * e, fitted["rho"], model, noise)
            drawn.append({**model, **moved})
        first = next(iter(model.values()))
        share = torch.full((len(first), len(drawn)), 1 / len(drawn), dtype=torch.float64)
        stacked = {name: torch.stack([each[name] for each in drawn], 1) for name in model}
        return ensemble(stacked, send(share, first.device))


def _kl_mean(q: Normal, w: Normal) -> Model:
    r"""Differentiate :math:`\operatorname{KL}(q \Vert w)` by the mean of :math:`q`."""
    return tmap(lambda m, c, r: (m - c) / softplus(r).square(), q["mean"], w["mean"], w["rho"])


def _kl_rho(q: Normal, w: Normal) -> Model:
    r"""Differentiate :math:`\operatorname{KL}(q \Vert w)` by :math:`\rho` of :math:`q`."""
    return tmap(
        lambda r, s: (softplus(r) / softplus(s).square() - 1 / softplus(r)) * r.sigmoid(),
        q["rho"],
        w["rho"],
    )


def _inverse_softplus(sigma: Tensor) -> Tensor:
    return sigma + torch.log(-torch.expm1(-sigma))
