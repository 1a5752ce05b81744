"""FedEM: every client's data are a mixture of several distributions, each with a model."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_choice, check_integer, check_used, is_number
from lightning_pfl.core.mixture import ensemble
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.randomness import derive, generator
from lightning_pfl.core.tree import Model, Tree, select, weighted_mean
from lightning_pfl.data.batch import batch_leaves
from lightning_pfl.methods.base import About, LocalStep, Method, PerClient, Phase, Weighting
from lightning_pfl.methods.support.starts import Starts, check_starts, different_models
from lightning_pfl.solvers.normals import estimated, log_densities, weighted_sums

Prediction = Literal["probabilities", "outputs"]
WEIGH = "weigh"


class FedEM(Method):
    r"""Clients share several models; each has weights of its own, and predicts by the mixture.

    A round is a step of expectation maximisation. From the received models :math:`\theta_j`,
    client :math:`k` computes the responsibilities of its samples and its weights, and trains every
    model on the samples' losses times their responsibilities:

    .. math::
        q_{ij} &\propto \pi_{kj}\, e^{-\ell(\theta_j; x_i)}, \qquad \sum_j q_{ij} = 1 \\
        \pi_{kj} &\leftarrow (1 - \gamma)\, \pi_{kj} + \gamma\, \frac{1}{N_k} \sum_i q_{ij} \\
        \theta_j^k &= \text{local SGD on } \frac{1}{N_k} \sum_i q_{ij}\, \ell(\theta; x_i)
        \text{ from } \theta_j, \qquad \theta_j \leftarrow \sum_k p_k \theta_j^k

    A client predicts with :math:`p(y \mid x) = \sum_j \pi_{kj}\, p_{\theta_j}(y \mid x)`, its
    weights as they are now and the models as they are now. Weights are uniform until a client takes
    part.

    The minibatch's loss is divided by its number of samples, whatever their responsibilities. These
    are those of the received models and of the weights before the round, in eval mode and without
    augmentation, computed in each step instead of being stored.

    With ``input_size`` the components are also normal distributions of the inputs, as in pFedEM,
    and responsibilities follow from them: :math:`q_{ij} \propto \pi_{kj}\, N(x_i; \mu_j,
    \operatorname{diag} s_j^2)`. Clients send :math:`\sum_i q_{ij}`, :math:`\sum_i q_{ij} x_i`
    and :math:`\sum_i q_{ij} x_i^2`, from which the server has :math:`\mu_j` and :math:`s_j`;
    its mean of models :math:`j` has the weights :math:`\sum_i q_{ij}`.

    Args:
        components: :math:`K \ge 1`, the number of models. 1 is FedAvg.
        initial: The models at the start, as ``state_dict``\ s of the module. None: the module, and
            copies with newly initialised layers; parameters that no layer can initialise get normal
            noise of their root mean square. They must differ.
        weight_step: :math:`\gamma` in (0, 1]. 1 is FedEM; below 1 a client's weights follow a
            trajectory with memory, as in pFedEM.
        input_size: Numbers of a sample's input, which is the first tensor of a minibatch, flattened
            and not augmented. None: responsibilities by the losses.
        prediction: What is averaged: ``"probabilities"`` of classes, or ``"outputs"`` for
            regression.
        local_epochs: Passes over a client's data per round, besides the one for the weights.
        local_steps: Optimizer steps of each model per round instead. Exactly one of the two.
        weighting: ``"samples"``: :math:`p_k = N_k / \sum_{S_t} N_j`; ``"uniform"``, but
            not with ``input_size`` and several components.

    Raises:
        ValueError: In the first step, if inputs have another size than ``input_size``.
        TypeError: In the first step, if the module's loss is no mean over samples
            (``per_sample``).

    State:
        server: ``models``, a model under each of the names ``"0"`` to ``str(components - 1)``; with
        ``input_size`` also ``mean`` and ``variance``, each ``(components, input_size)``.
        client_state: ``weights``, :math:`\pi_k`, float64 ``(clients, components)``.

    Deviation from the paper: weights :math:`p_k` are relative to the cohort, not to all clients.
    The module's logged training values are those of the first model, without responsibilities.
    pFedEM is known to us by its abstract alone, which has latent Gaussians, weights that follow a
    trajectory, and a partition of the data among sub-models. Their form is ours: ``input_size``,
    ``weight_step``, and responsibilities in the place of a hard partition. The normal distributions
    start at means drawn from the seed, with variance 1, so inputs should be normalised.

    Example:
        >>> FedEM(components=2, weight_step=0.5).components
        2

    References:
        Marfoq, Neglia, Bellet, Kameni, Vidal. Federated multi-task learning under a mixture of
        distributions. NeurIPS 2021. arXiv:2108.10252, Algorithm 1.
    """

    about = About(
        family="clusters",
        personal="the weights of a mixture of several common models",
        assumes="every client's data are a mixture of a few distributions",
        down="$4Kd$, all $K$ models; with `input_size` $8K$ per number of an input more",
        up="$4Kd$; with `input_size` the same more, and $4K$",
        keeps="$K$ weights",
        gradients="$K$, and $2K$ forward passes",
        personal_model="the mixture of the models of now, with the client's weights",
        global_model="none; with one component, the server's",
        paper="Marfoq et al. 2021",
    )
    state_settings = ("components", "input_size")

    def __init__(
        self,
        components: int = 3,
        initial: Starts = None,
        weight_step: float = 1.0,
        input_size: int | None = None,
        prediction: Prediction = "probabilities",
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "samples",
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        check_integer("components", components, 1, "Use 3 as in the paper.")
        check_starts(initial, components, "one for each component")
        check_choice("prediction", prediction, get_args(Prediction), "Use 'outputs' for numbers.")
        if not is_number(weight_step) or not 0 < weight_step <= 1:
            raise ValueError(
                f"Expected `weight_step` to be in (0, 1], but got weight_step={weight_step!r}. Use "
                "1 to forget the weights of earlier rounds."
            )
        if input_size is not None:
            check_integer(
                "input_size", input_size, 1, "Use None for responsibilities by the losses."
            )
            check_used(FedEM.__init__, {"weighting": weighting}, components == 1, "components=1")
        self.components, self.initial, self.weight_step = components, initial, weight_step
        self.input_size = input_size if components > 1 else None
        self.prediction: Prediction = prediction

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line for one component."""
        return ["components=1 makes FedEM FedAvg."] if self.components == 1 else []

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Measure the weights if there are several; then train all models."""
        weigh = (Phase(epochs=1, name=WEIGH, evaluate_only=True),) if self.components > 1 else ()
        return (*weigh, Phase("all", epochs=self.local_epochs, steps=self.local_steps))

    # --- state ---

    def init_server(self, model: Model) -> Tree:
        """Make different models.

        Raises:
            ValueError: If two models are equal.
        """
        starts = different_models(
            model, self.components, self.initial, self.parameter_split, self.seed
        )
        _check_different(starts, self.parameter_split.trainable)
        shared = self.parameter_split.shared
        server: Tree = {"models": {str(j): select(start, shared) for j, start in enumerate(starts)}}
        if self.input_size is not None:
            first = next(leaf for leaf in model.values() if leaf.is_floating_point())
            drawn = torch.randn(
                self.components,
                self.input_size,
                generator=generator(derive(self.seed, "components")),
                dtype=torch.float64,
            ).to(first)
            server |= {"mean": drawn, "variance": torch.ones_like(drawn)}
        return server

    def init_client_state(self, model: Model) -> Tree:
        """Make equal weights."""
        first = next(iter(model.values()))
        share = 1 / self.components
        return {"weights": first.new_full((self.components,), share, dtype=torch.float64)}

    # --- a client's round ---

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send all models."""
        return dict(server)

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Start at the received models, and keep them for the responsibilities."""
        weights = client_state["weights"]
        state: Tree = {
            "received": received["models"],
            "models": {j: dict(model) for j, model in received["models"].items()},
            "weights": weights,
            "total": torch.zeros_like(weights),
        }
        if self.input_size is not None:
            normal = {name: received[name] for name in ("mean", "variance")}
            zeros = torch.zeros_like(normal["mean"], dtype=torch.float64)
            state |= {"normal": normal, "first": zeros, "second": zeros.clone()}
        return state

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Add up responsibilities, or step every model on its share of the samples."""
        shares = self._responsibilities(state, minibatches, client)
        if client.phase == WEIGH and shares is not None:
            real = client.samples(minibatches)[1].unsqueeze(2)
            shares = shares.where(real, 0)
            if self.input_size is not None:
                sums = weighted_sums(self._inputs(minibatches, client), shares)
                for name, more in zip(("first", "second"), sums, strict=True):
                    state = {**state, name: state[name] + more}
            return {**state, "total": state["total"] + shares.sum(1)}
        trained = {}
        for j, model in state["models"].items():
            weights = None if shares is None else shares[:, :, int(j)]
            grads = client.grad(model, minibatches, weights=weights)
            trained[j] = client.update(model, grads, slot=f"model {j}")
        return {**state, "models": trained}

    def _responsibilities(self, state: Tree, minibatches: Any, client: LocalStep) -> Tensor | None:
        r"""Compute :math:`q`, ``(clients, samples, components)``; None where all are 1."""
        if self.components == 1:
            return None
        if self.input_size is not None:
            inputs = self._inputs(minibatches, client)
            fit = log_densities(inputs, **state["normal"])
            return torch.softmax(state["weights"].log().unsqueeze(1) + fit, 2)
        received = state["received"].values()
        losses = [client.losses(model, minibatches).double() for model in received]
        return torch.softmax(state["weights"].log().unsqueeze(1) - torch.stack(losses, 2), 2)

    def _inputs(self, minibatches: Any, client: LocalStep) -> Tensor:
        """Return the samples' inputs, flattened, ``(clients, samples, input_size)``."""
        found = next(batch_leaves(client.samples(minibatches)[0])).unsqueeze(2).flatten(2)
        if found.shape[2] != self.input_size:
            raise ValueError(
                f"Expected inputs of `input_size` numbers, but got input_size={self.input_size} "
                f"and inputs of {found.shape[2]}. Use input_size={found.shape[2]}."
            )
        # What fills up a minibatch may be anything.
        real = client.samples(minibatches)[1].unsqueeze(2)
        return found.where(real, 0)

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the trained models, and keep the weights."""
        old, total = client_state["weights"], state["total"]
        count = total.sum(1, keepdim=True)
        mean = torch.where(count > 0, total / count.clamp_min(1e-300), old)
        weights = old + self.weight_step * (mean - old)
        upload: Tree = {"models": state["models"]}
        if self.input_size is not None:
            like = received["mean"]
            upload |= {name: state[name].to(like) for name in ("total", "first", "second")}
        return upload, {"weights": weights}

    # --- the server's round ---

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Average each model over the clients, and estimate the normal distributions."""
        if self.input_size is None:
            return {"models": weighted_mean(uploads["models"], info.weights)}
        total, first, second = (uploads[name].double() for name in ("total", "first", "second"))
        count = total.sum(0)
        models = {}
        for j, model in uploads["models"].items():
            shares = total[:, int(j)] / count[int(j)]
            models[j] = weighted_mean(model, shares) if count[int(j)] > 0 else server["models"][j]
        normal = server["mean"], server["variance"]
        mean, variance = estimated(count, first.sum(0), second.sum(0), *normal)
        return {"models": models, "mean": mean, "variance": variance}

    # --- what is evaluated and handed out ---

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        """Return the mixture of the models with the client's weights."""
        models = list(received["models"].values())
        if len(models) == 1:
            return dict(models[0])
        stacked = {name: torch.stack([each[name] for each in models], 1) for name in models[0]}
        return ensemble(stacked, client_state["weights"], self.prediction)

    def global_model(self, server: Tree) -> Model | None:
        """Return the only model, or None if there are several."""
        return dict(server["models"]["0"]) if self.components == 1 else None


def _check_different(starts: list[Model], names: tuple[str, ...]) -> None:
    """Raise ValueError if two models are equal: they would stay equal."""
    for j, one in enumerate(starts):
        for i in range(j):
            if all(torch.equal(one[name], starts[i][name]) for name in names):
                raise ValueError(
                    f"Expected the first models to differ, but {i} and {j} are equal, and would "
                    "stay equal. Give different models as `initial`."
                )
