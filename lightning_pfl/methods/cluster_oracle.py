"""ClusterOracle: federated averaging inside known clusters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.tree import Model, Tree, repeat, select, tmap
from lightning_pfl.methods.base import PER_CLUSTER, About, Known, Method, PerClient, Weighting
from lightning_pfl.solvers.clusters import as_integers, cluster_means, number_labels


class ClusterOracle(Method):
    r"""One model per known cluster, averaged over its clients in the cohort.

    With FedAvg's local training of clients :math:`k \in S_t`, for each cluster :math:`C`

    .. math::
        \theta_C \leftarrow \frac{\sum_{k \in S_t \cap C} n_k\, \theta_k}
        {\sum_{k \in S_t \cap C} n_k}

    A cluster without clients in the cohort keeps its model. It is a baseline for methods that find
    clusters; with one cluster it is FedAvg.

    Args:
        clusters: Each client's cluster, in the order of the client ids: whole numbers >= 0. Or a
            function of the client's id.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.
        weighting: ``"samples"``: :math:`n_k` are the training samples; ``"uniform"``: 1.

    State:
        server: ``models``, one for each cluster, each leaf ``(clusters, *shape)``.

    Deviation from the paper: it minimises the unweighted sum of a cluster's losses centrally
    (``weighting="uniform"``, with one local step).

    Example:
        >>> ClusterOracle([0, 0, 1, 1]).given_clusters
        [0, 0, 1, 1]

    References:
        Armacki, Bajovic, Jakovetic, Kar. Personalized federated learning via convex clustering.
        2022. arXiv:2202.00718, section V, the oracle.
    """

    about = About(
        family="clusters",
        personal="the model of each known cluster",
        assumes="groups are known",
        down="$4d$",
        up="$4d$",
        keeps="nothing",
        gradients="1",
        personal_model="the model of its cluster now",
        global_model=None,
        paper="Armacki et al. 2022",
    )
    model_scope: ClassVar[str] = PER_CLUSTER

    def __init__(
        self,
        clusters: Sequence[int] | Callable[[int], int],
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "samples",
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        if not callable(clusters) and (
            isinstance(clusters, str) or not hasattr(clusters, "__len__")
        ):
            raise ValueError(
                "Expected `clusters` to be a list with the cluster of each client, or a function "
                f"of the client's id, but got {clusters=}. Use [0, 0, 1, 1], for example."
            )
        self.given_clusters = clusters if callable(clusters) else as_integers("clusters", clusters)

    def bind(self, known: Known) -> None:
        """Number the clusters from 0."""
        super().bind(known)
        given = self.given_clusters
        labels = [given(k) for k in range(self.num_clients)] if callable(given) else given
        self._cluster = number_labels("clusters", labels, self.num_clients)
        self._count = int(self._cluster.max()) + 1

    def init_server(self, model: Model) -> Tree:
        """Make equal models."""
        return {"models": repeat(select(model, self.parameter_split.shared), self._count)}

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send no common part: every client gets its cluster's model."""
        return {}

    def download_rows(self, server: Tree, info: ClientInfo) -> Tree:
        """Send each client the model of its cluster."""
        at = self._cluster[info.index.clamp_max(self.num_clients - 1)]
        return {"model": tmap(lambda leaf: leaf[at.to(leaf.device)], server["models"])}

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Average in each cluster with weights."""
        at = self._cluster[info.index].to(next(iter(uploads["model"].values())).device)
        member = torch.nn.functional.one_hot(at, self._count).T.double()
        return {"models": cluster_means(server["models"], uploads["model"], member, info.weights)}

    def clusters(self, server: Tree) -> Tensor:
        """Return each client's cluster, int64 ``(num_clients,)``."""
        found: Tensor = self._cluster
        return found

    def structure(self) -> dict[str, Tensor]:
        """Return each client's cluster."""
        return {"clusters": self._cluster}
