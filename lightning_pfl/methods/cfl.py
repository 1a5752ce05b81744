"""CFL: federated averaging in clusters that are split where clients' updates conflict."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from lightning_pfl.contract.callback import FederationView
from lightning_pfl.contract.records import ClientInfo, Round
from lightning_pfl.core.checks import check_integer, check_number, is_number
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model, Tree, flat, repeat, select, tmap
from lightning_pfl.methods.base import PER_CLUSTER, About, Method, PerClient
from lightning_pfl.methods.support import memory
from lightning_pfl.solvers.clusters import bipartition, cluster_means, gap


class CFL(Method):
    r"""Clustered federated learning: federated averaging that splits its clusters.

    Every client trains from its cluster's model and sends :math:`\Delta_k`. With the last
    :math:`\Delta_k` of each client, a cluster :math:`C` of more than two clients is split where

    .. math::
        \Bigl\lVert \frac1{|C|} \sum_{k \in C} \Delta_k \Bigr\rVert < \varepsilon_1, \qquad
        \max_{k \in C} \lVert \Delta_k \rVert > \varepsilon_2

    after ``start_round`` rounds: the cluster is near a stationary point, but some of its clients
    are not. Complete linkage on :math:`1 - \cos(\Delta_i, \Delta_j)` makes two parts. Then
    :math:`W_C \leftarrow W_C + \operatorname{mean}_{k \in C} \Delta_k` in each resulting cluster,
    over its clients of the round.

    Each round logs two norms of the largest cluster, over its clients that have sent an update
    since the last split: ``cfl/mean_norm``, which is compared to :math:`\varepsilon_1`, and
    ``cfl/max_norm``, to :math:`\varepsilon_2`. To choose the thresholds, run once with
    ``eps_mean=0``, which never splits. With clusters of clients ``cfl/mean_norm`` falls to a level
    well below ``cfl/max_norm``. Take ``eps_mean`` somewhat above that level, ``eps_max`` between
    the two, and as ``start_round`` the round in which the first settles. If both fall together,
    there are no clusters.

    Args:
        eps_mean: :math:`\varepsilon_1 \ge 0`. 0 never splits, which is FedAvg with uniform weights.
        eps_max: :math:`\varepsilon_2 \ge 0`. Both are norms of one round's update of the trainable
            parameters, so they depend on the model, the learning rate and the local steps.
        start_round: Rounds before the first split.
        min_gap: A split counts only if the smallest similarity inside the parts exceeds the largest
            one between them by more than this; None: every split counts. 0 is the paper's optional
            check.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.

    State:
        server: ``models``, that of each client's cluster, each leaf ``(num_clients, *shape)``;
        ``together``, whether two clients share a cluster, bool ``(num_clients, num_clients)``;
        ``change``, the last :math:`\Delta_k`, ``(num_clients, d)`` over the trainable parameters;
        ``fresh``, whether it is newer than the cluster's last split, bool ``(num_clients,)``.

    Deviation from the paper: all clients take part there. Here a cluster is split only when every
    member with a minibatch to train on has trained since its last split, so that all updates start
    from the same model; the other clients stay with the larger part. New clients are evaluated with
    the model of the largest cluster.

    Example:
        >>> CFL(start_round=5).eps_mean
        0.4

    References:
        Sattler, Müller, Samek. Clustered federated learning: model-agnostic distributed multi-task
        optimization under privacy constraints. IEEE TNNLS 2021. arXiv:1910.01991, Algorithms 1
        and 2.
    """

    about = About(
        family="clusters",
        personal="nothing; clusters are split where clients disagree",
        assumes="clients form groups, whose number needn't be known",
        down="$4d$",
        up="$4d$",
        keeps="nothing; the server a model and the last update of each",
        gradients="1",
        personal_model="the model of its cluster now",
        global_model="the server's while there is one cluster, then none",
        paper="Sattler et al. 2021",
    )
    client_axes: ClassVar[Mapping[str, int]] = MappingProxyType(
        {"models": 1, "together": 2, "change": 1, "fresh": 1}
    )
    model_scope: ClassVar[str] = PER_CLUSTER

    def __init__(
        self,
        eps_mean: float = 0.4,
        eps_max: float = 1.6,
        start_round: int = 20,
        min_gap: float | None = None,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting="uniform")
        for name, value in (("eps_mean", eps_mean), ("eps_max", eps_max)):
            check_number(name, value, "Use a norm of a round's change of the model.")
        check_integer("start_round", start_round, 0, "Use 20.")
        if min_gap is not None and not (is_number(min_gap) and -2 <= min_gap <= 2):
            raise ValueError(
                "Expected `min_gap` to be None or a difference of two cosines, in [-2, 2], but got "
                f"{min_gap=}. Use 0."
            )
        self.eps_mean, self.eps_max, self.start_round = eps_mean, eps_max, start_round
        self.min_gap = min_gap

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line if nothing is ever split."""
        return [] if self.eps_mean else ["eps_mean=0 makes CFL FedAvg with uniform weights."]

    # --- state ---

    def init_server(self, model: Model) -> Tree:
        """Start with one cluster of all clients."""
        shared = select(model, self.parameter_split.shared)
        size = sum(model[name].numel() for name in self.parameter_split.trainable)
        like = next(iter(model.values()))
        n, device = self.num_clients, like.device
        memory.require_rows(type(self).__name__, n, shared, memory.MODELS + 3)  # and the changes
        return {
            "models": repeat(shared, n),
            "together": torch.ones(n, n, dtype=torch.bool, device=device),
            "change": torch.zeros(n, size, dtype=like.dtype, device=device),
            "fresh": torch.zeros(n, dtype=torch.bool, device=device),
        }

    def admit(self, server: Tree, begun: Tree, client_state: Tree) -> tuple[Tree, Tree]:
        """Put clients that join into the largest cluster, with its model."""
        grown, client_state = super().admit(server, begun, client_state)
        largest = server["together"].sum(1).argmax()
        label = first_member(server["together"])
        joined = label.new_full((self.num_clients - len(label),), int(label[largest]))
        label = torch.cat([label, joined])
        models = tmap(lambda leaf: leaf[label], grown["models"])
        return {
            **grown,
            "models": models,
            "together": label.unsqueeze(0) == label.unsqueeze(1),
        }, client_state

    # --- a client's round ---

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send no common part: every client gets its cluster's model."""
        return {}

    def download_rows(self, server: Tree, info: ClientInfo) -> Tree:
        """Send each client the model of its cluster."""
        index = send(info.index, server["together"].device)
        largest = server["together"].sum(1).argmax()
        at = torch.where(index < self.num_clients, index, largest)
        return {"model": tmap(lambda leaf: leaf[at], server["models"])}

    # --- the server's round ---

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Split clusters where the criterion holds, then average in each."""
        label = first_member(server["together"])
        at = send(info.index, label.device)
        change, fresh = server["change"].clone(), server["fresh"].clone()
        names = self.parameter_split.trainable
        models, sent = server["models"], uploads["model"]
        change[at] = flat({name: sent[name] - models[name][at] for name in names}, names)
        fresh[at] = True
        late = info.round + 1 > self.start_round
        for cluster in label.unique() if late else ():
            members = (label == cluster).nonzero().flatten()
            second = self._split(members, change, fresh)
            if second is not None:
                fresh[members] = False
                label[members[second]] = members[second].min()
                label[members[~second]] = members[~second].min()
        return {
            "models": self._averaged(server["models"], uploads["model"], label, at, info.weights),
            "together": label.unsqueeze(0) == label.unsqueeze(1),
            "change": change,
            "fresh": fresh,
        }

    def measure(self, federation: FederationView, round: Round) -> Mapping[str, float]:
        """Measure the norms that were compared to the thresholds."""
        before = round.server or {}  # a split has changed the clusters
        label, fresh = first_member(before["together"]), before["fresh"].clone()
        fresh[send(round.info.index[round.accepted], fresh.device)] = True
        clusters, sizes = label.unique(return_counts=True)
        some = fresh & (label == clusters[sizes.argmax()])
        if not round.accepted.any() or not some.any():
            return {}
        mean, largest = norms(federation.server["change"][some].double())
        return {"cfl/mean_norm": mean, "cfl/max_norm": largest}

    def _split(self, members: Tensor, change: Tensor, fresh: Tensor) -> Tensor | None:
        """Find the part that leaves a cluster, bool ``(members,)``; None if it isn't split."""
        has_training_data = send(self.has_training_data, members.device)[members]
        some = change[members[has_training_data]].double()
        if len(some) <= 2 or not fresh[members[has_training_data]].all():
            return None
        mean, largest = norms(some)
        if mean >= self.eps_mean or largest <= self.eps_max:
            return None
        unit = torch.nn.functional.normalize(some, dim=1)
        similarity = (unit @ unit.T).clamp(-1, 1)
        part = bipartition(similarity)
        if self.min_gap is not None and gap(similarity, part) <= self.min_gap:
            return None
        second = torch.zeros_like(has_training_data)
        second[has_training_data] = _smaller(part, some)
        return second

    def _averaged(
        self, models: Model, uploads: Model, label: Tensor, at: Tensor, weights: Tensor
    ) -> Model:
        """Add its cluster's mean over the cohort to each client's model."""
        clusters, inside = label[at].unique(return_inverse=True)
        member = torch.nn.functional.one_hot(inside, len(clusters)).T.double()
        before = tmap(lambda leaf: leaf[clusters], models)
        means = cluster_means(before, uploads, member, weights)
        some = torch.isin(label, clusters)
        row = torch.searchsorted(clusters, label[some])

        def store(old: Tensor, new: Tensor) -> Tensor:
            stored = old.clone()
            stored[some] = new[row]
            return stored

        kept: Model = tmap(store, models, means)
        return kept

    def global_model(self, server: Tree) -> Model | None:
        """Return the model of the only cluster, or None if there are several."""
        if not server["together"].all():
            return None
        model: Model = tmap(lambda leaf: leaf[0], server["models"])
        return model

    def clusters(self, server: Tree) -> Tensor:
        """Return each client's cluster, int64 ``(num_clients,)``, by first appearance."""
        numbered: Tensor = first_member(server["together"]).unique(return_inverse=True)[1]
        return numbered


def norms(change: Tensor) -> tuple[float, float]:
    """Compute the norm of the mean update, and the largest norm of an update.

    Args:
        change: ``(clients, d)``.

    Example:
        >>> norms(torch.tensor([[3.0, 4.0], [-3.0, 4.0]]))
        (4.0, 5.0)
    """
    return float(change.mean(0).norm()), float(change.norm(dim=1).max())


def first_member(together: Tensor) -> Tensor:
    """Find the smallest id in each client's cluster, int64 ``(clients,)``.

    Args:
        together: Which clients are in one cluster, bool ``(clients, clients)``.
    """
    first: Tensor = together.int().argmax(1)
    return first


def _smaller(part: Tensor, change: Tensor) -> Tensor:
    """Return the smaller part, or of equal ones that with the larger mean update.

    Args:
        part: One of the parts, bool ``(clients,)``.
        change: ``(clients, d)``.
    """
    rank = [(int(side.sum()), -float(change[side].mean(0).norm())) for side in (part, ~part)]
    return part if rank[0] <= rank[1] else ~part
