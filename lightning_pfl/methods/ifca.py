"""IFCA: several models, of which every client trains the one that fits its data best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_pfl.contract.records import ClientInfo, FitPlan
from lightning_pfl.core.checks import check_choice, check_integer, check_used
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.sums import double_sum
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model, Tree, select, tmap, total_nbytes
from lightning_pfl.methods.base import (
    PER_CLUSTER,
    About,
    LocalStep,
    Method,
    PerClient,
    Phase,
    Weighting,
    recordable,
)
from lightning_pfl.methods.support.starts import check_starts, different_models
from lightning_pfl.solvers.clusters import cluster_means

Averaging = Literal["models", "gradients"]
CHOICE = "choose"


class IFCA(Method):
    r"""Iterative federated clustering: a model for each of a given number of clusters.

    The server sends all models; in a round every client :math:`k`

    .. math::
        \hat\jmath_k = \arg\min_j F_k(\theta_j), \qquad
        \tilde\theta_k = \operatorname{LocalUpdate}(\theta_{\hat\jmath_k})

    and sends :math:`\tilde\theta_k` and :math:`\hat\jmath_k`. Each model becomes the mean of its
    clients' uploads; a model without clients stays. With ``averaging="gradients"`` a client sends
    :math:`\nabla F_k(\theta_{\hat\jmath_k})`, and :math:`\theta_j \leftarrow \theta_j - \eta
    \sum_{k: \hat\jmath_k = j} p_k \nabla F_k`, with the learning rate :math:`\eta` and :math:`p_k`
    one over the size of the cohort, or by ``weighting`` the client's share of its samples.
    :math:`F_k` is the client's training loss, measured in eval mode in a pass over its data with
    each model.

    With an unlucky start, one model may serve two clusters. With ``restarts`` the first rounds try
    several sets of models in turn, each for ``trial_rounds``; the set with the lowest training
    loss, measured in its last trial round, continues where its trial ended. Clients receive only
    the current set, so restarts cost rounds, but no round costs more. In small cohorts the sets are
    compared on different clients, which adds noise.

    Args:
        num_clusters: Number of models, at least 1. 1 is FedAvg.
        averaging: ``"models"`` or ``"gradients"``. The latter is one step on all samples of a
            client, without ``local_epochs`` and ``local_steps``.
        initial: The models at the start, as ``state_dict``\ s of the module. None: the module, and
            copies with newly initialised layers; parameters that no layer can initialise get normal
            noise of their root mean square, since equal models would stay equal. With restarts,
            the models of all sets in turn.
        restarts: Further sets of models that are tried, at least 0.
        trial_rounds: Rounds that each set is tried for, at least 1; only with restarts.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.
        weighting: ``"uniform"`` as in the paper, or ``"samples"``: of models inside each cluster,
            of gradients in the cohort.

    State:
        server, for :math:`S` = ``restarts + 1`` sets: ``models``, each leaf ``(S * num_clusters,
        *shape)``; ``cluster``, every client's last choice among all of them, int64
        ``(num_clients,)``, -1 before the first; with restarts ``trial_loss``, float64 ``(S,)``.
        client_state: ``cluster``, int64 ``(clients,)``.

    Deviation from the paper: none in a round. A client without a choice in the current set is
    evaluated with the model chosen most often. The paper restarts on its synthetic data and keeps
    the best of complete runs; here a trial is short.

    Example:
        >>> IFCA(num_clusters=4).averaging
        'models'

    References:
        Ghosh, Chung, Yin, Ramchandran. An efficient framework for clustered federated learning.
        NeurIPS 2020. arXiv:2006.04088, Algorithm 1.
    """

    about = About(
        family="clusters",
        personal="nothing; every client picks the model of its cluster",
        assumes="clients form a known number of groups",
        down="$4kd$, all $k$ models",
        up="$4d + 8$, with `restarts` $4d + 16$",
        keeps="nothing",
        gradients="1, and $k$ forward passes over its data",
        personal_model=(
            "the model, as it is now, of the client's last choice; before its first, the one "
            "chosen most often"
        ),
        global_model="none; with one cluster, the server's",
        paper="Ghosh et al. 2020",
    )
    client_axes: ClassVar[Mapping[str, int]] = MappingProxyType({"cluster": 1})
    state_settings: ClassVar[tuple[str, ...]] = ("num_clusters", "restarts", "trial_rounds")
    fresh_optimizer: ClassVar[str] = (
        "a client may train the model of another cluster in its next round"
    )
    model_scope: ClassVar[str] = PER_CLUSTER

    def __init__(
        self,
        num_clusters: int = 2,
        averaging: Averaging = "models",
        initial: Sequence[Mapping[str, Any]] | None = None,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "uniform",
        restarts: int = 0,
        trial_rounds: int = 5,
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        advice = "Use the number of clusters that you expect, or a few more."
        check_integer("num_clusters", num_clusters, 1, advice)
        check_integer("restarts", restarts, 0, "Use 0 for one start, or 4 for five.")
        check_integer("trial_rounds", trial_rounds, 1, "Use 5, for example.")
        check_used(
            IFCA.__init__, {"trial_rounds": trial_rounds}, restarts > 0, "restarts=1 or more"
        )
        check_choice("averaging", averaging, get_args(Averaging), "Use 'models'.")
        if averaging == "gradients" and (local_epochs != 1 or local_steps is not None):
            raise ValueError(
                "Expected neither `local_epochs` nor `local_steps` with averaging='gradients', "
                f"which is one step on all samples, but got {local_epochs=}, {local_steps=}. Leave "
                "them out, or use averaging='models'."
            )
        self.restarts, self.trial_rounds = restarts, trial_rounds
        self._sets = restarts + 1
        self._count = self._sets * num_clusters
        each = "one for each cluster" + (" of each set" if restarts else "")
        check_starts(initial, self._count, each)
        self.num_clusters, self.initial = num_clusters, initial
        self.averaging: Averaging = averaging

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return log lines for one cluster, or for trial rounds."""
        if self.restarts:
            last = self._sets * self.trial_rounds - 1
            return [f"IFCA tries {self._sets} sets of models in rounds 0 to {last}."]
        return ["num_clusters=1 makes IFCA FedAvg."] if self.num_clusters == 1 else []

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Measure the models if there are several; then train locally, or compute one gradient."""
        choose = (Phase(epochs=1, name=CHOICE, evaluate_only=True),) if self._count > 1 else ()
        if self.averaging == "gradients":
            return (*choose, Phase("all", steps=1, full_batch=True, name="gradient"))
        return (*choose, Phase("all", epochs=self.local_epochs, steps=self.local_steps))

    def check_fit(self, plan: FitPlan) -> str:
        """Warn if the run ends before the best set is chosen."""
        trials, rounds = self._sets * self.trial_rounds, plan.max_rounds
        if not self.restarts or rounds is None or rounds > trials:
            return ""
        return (
            f"Expected more rounds than the {trials} in which IFCA tries {self._sets} sets of "
            f"models, but got max_epochs={rounds}, which ends with the last set, not the best. Use "
            "a larger `max_epochs`, or fewer `restarts` or `trial_rounds`."
        )

    # --- state ---

    def init_server(self, model: Model) -> Tree:
        """Make different models, without choices."""
        device = next(iter(model.values())).device
        starts = different_models(model, self._count, self.initial, self.parameter_split, self.seed)
        shared = [select(each, self.parameter_split.shared) for each in starts]
        names = list(shared[0])
        server: Tree = {
            "models": {name: torch.stack([each[name] for each in shared]) for name in names},
            "cluster": torch.full((self.num_clients,), -1, dtype=torch.int64, device=device),
        }
        if self.restarts:
            unknown = torch.full((self._sets,), torch.inf, dtype=torch.float64, device=device)
            server["trial_loss"] = unknown
        return server

    def init_client_state(self, model: Model) -> Tree:
        """Return the initial client state: no cluster chosen."""
        device = next(iter(model.values())).device
        return {"cluster": torch.full((), -1, dtype=torch.int64, device=device)}

    def _first(self, server: Tree, round: int) -> Tensor:
        """Return the number of the first model of a round's set, int64 ``()``."""
        trial, device = round // self.trial_rounds, server["cluster"].device
        if not self.restarts:
            return torch.zeros((), dtype=torch.int64, device=device)
        if trial < self._sets:
            return torch.tensor(trial * self.num_clusters, device=device)
        best: Tensor = server["trial_loss"].argmin() * self.num_clusters
        return best

    # --- a client's round ---

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send the current models, and the one chosen most often for clients without a choice."""
        first, models, cluster = (
            self._first(server, info.round),
            server["models"],
            server["cluster"],
        )
        # One more bin at the end, for choices among other sets and for none.
        at = cluster - first
        at = torch.where((at >= 0) & (at < self.num_clusters), at, self.num_clusters)
        counts = torch.bincount(at, minlength=self.num_clusters + 1)[: self.num_clusters]
        if self.restarts:
            some = first + torch.arange(self.num_clusters, device=first.device)
            models = tmap(lambda leaf: leaf.index_select(0, some), models)
        return {"models": models, "popular": counts.argmax(), "first": first}

    def download_nbytes(self, server: Tree, info: ClientInfo) -> Tensor:
        """Count the bytes of the current models."""
        size = total_nbytes(server["models"]) // self._sets
        return torch.full((len(info),), size, dtype=torch.int64)

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Start with the first model, before any is measured."""
        first = torch.zeros_like(client_state["cluster"])
        losses = torch.zeros(len(first), self.num_clusters, dtype=torch.float64)
        model = pick(received["models"], first)
        state = {
            "models": received["models"],
            "losses": send(losses, first.device),
            "cluster": first,
            "model": model,
        }
        if self.restarts:
            state["measured"] = torch.zeros_like(state["losses"][:, 0])
        if self.averaging == "gradients":
            state["gradient"] = tmap(
                torch.zeros_like, select(model, self.parameter_split.trainable)
            )
        return state

    @recordable("num_clusters", "restarts")
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Measure all models on a minibatch and choose the best so far, or train the chosen one."""
        if client.phase == CHOICE:
            losses = []
            for number in range(self.num_clusters):
                model = tmap(lambda leaf, j=number: leaf[:, j], state["models"])
                loss, count = client.loss(model, minibatches)
                losses.append(loss * count)
            total = state["losses"] + torch.stack(losses, 1)
            # argmin takes NaN for the smallest, so a model that overflows must not win.
            cluster = total.nan_to_num(nan=torch.inf, posinf=torch.inf).argmin(1)
            chosen = {"cluster": cluster, "model": pick(state["models"], cluster)}
            if self.restarts:
                chosen["measured"] = state["measured"] + count
            return {**state, "losses": total, **chosen}
        if client.phase == "gradient":
            return {
                **state,
                "gradient": {**state["gradient"], **client.grad(state["model"], minibatches)},
            }
        return {**state, "model": client.train(state["model"], minibatches)}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the trained model or the gradient, and the choice."""
        sent = state["gradient"] if self.averaging == "gradients" else state["model"]
        cluster = state["cluster"] + received["first"]
        upload = {"model": dict(sent), "cluster": cluster}
        if self.restarts:
            lowest = state["losses"].nan_to_num(nan=torch.inf, posinf=torch.inf).amin(1)
            upload["loss"] = lowest / state["measured"].clamp_min(1)
        return upload, {"cluster": cluster}

    # --- the server's round ---

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Average in each cluster, or take a gradient step; store the choices."""
        choice = uploads["cluster"]
        member = torch.nn.functional.one_hot(choice, self._count).T.double()
        if self.averaging == "gradients":
            moved = self._descend(server["models"], uploads["model"], member, info)
        else:
            moved = cluster_means(server["models"], uploads["model"], member, info.weights)
        cluster = server["cluster"].clone()
        cluster[send(info.index, cluster.device)] = choice
        return {"models": moved, "cluster": cluster, **self._judged(server, uploads, info)}

    def _judged(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Store the loss of the current trial set; that of its last trial round remains."""
        if not self.restarts:
            return {}
        losses, trial = server["trial_loss"].clone(), info.round // self.trial_rounds
        if trial < self._sets:
            losses[trial] = (
                send(info.weights, losses.device, losses.dtype) * uploads["loss"]
            ).sum()
        return {"trial_loss": losses}

    def _descend(self, models: Model, grads: Model, member: Tensor, info: ClientInfo) -> Model:
        def step(leaf: Tensor, grad: Tensor) -> Tensor:
            mean = double_sum(grad, member * send(info.weights, member.device, member.dtype))
            return leaf - (info.lr * mean).to(leaf.dtype)

        return {n: step(leaf, grads[n]) if n in grads else leaf for n, leaf in models.items()}

    # --- what is evaluated and handed out ---

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        """Return the model of the client's last choice."""
        chosen = client_state["cluster"] - received["first"]
        known = (client_state["cluster"] >= 0) & (chosen >= 0) & (chosen < self.num_clusters)
        return pick(received["models"], torch.where(known, chosen, received["popular"]))

    def global_model(self, server: Tree) -> Model | None:
        """Return the only model, or None if there are several."""
        if self._count > 1:
            return None
        model: Model = tmap(lambda leaf: leaf[0], server["models"])
        return model

    def clusters(self, server: Tree) -> Tensor:
        """Return each client's model among all sets, int64 ``(num_clients,)``; -1 for none."""
        found: Tensor = server["cluster"]
        return found


def pick(models: Model, cluster: Tensor) -> Model:
    """Select each client's model from ``(clients, clusters, ...)``.

    Args:
        models: All clients' choices.
        cluster: Which one, int64 ``(clients,)``.
    """
    row = torch.arange(len(cluster), device=cluster.device)
    return {name: leaf[row, cluster] for name, leaf in models.items()}
