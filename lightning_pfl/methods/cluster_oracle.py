"""ClusterOracle: a method inside known clusters, by default federated averaging."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_pfl.contract.records import ClientInfo, FitPlan
from lightning_pfl.core.parameters import ParameterSpec, ParameterSplit
from lightning_pfl.core.tree import Model, Tree, expand, merge, rows
from lightning_pfl.methods.base import (
    PER_CLUSTER,
    SHARED,
    About,
    Known,
    LocalStep,
    Method,
    PerClient,
    Phase,
    Weighting,
)
from lightning_pfl.solvers.clusters import as_integers, number_labels


class ClusterOracle(Method):
    r"""A federation of its own for each known cluster, by default of federated averaging.

    With FedAvg's local training of clients :math:`k \in S_t`, for each cluster :math:`C`

    .. math::
        \theta_C \leftarrow \frac{\sum_{k \in S_t \cap C} n_k\, \theta_k}
        {\sum_{k \in S_t \cap C} n_k}

    A cluster without clients in the cohort keeps its model. It is a baseline for methods that find
    clusters; with one cluster it is FedAvg. With another ``method`` every cluster has a server of
    that method, which knows the cluster's clients and no others; with one cluster it is that
    method.

    Args:
        clusters: Each client's cluster, in the order of the client ids: whole numbers >= 0. Or a
            function of the client's id; those of new clients follow the others'. Without a function
            new clients begin with the model of the largest cluster.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.
        weighting: ``"samples"``: :math:`n_k` are the training samples; ``"uniform"``: 1.
        method: The method inside the clusters, with its own budget and weighting; None for
            federated averaging. Not one over a graph, or whose server keeps something for each
            client. New clients adapt by the user's optimizer, also where it has a step of its own
            for them (FedMAP).

    State:
        server: ``clusters``, the method's server tree of each cluster by its number. client_state:
        that of the method.

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
        personal="the model of each known cluster; inside one any other method",
        assumes="groups are known",
        down="$4d$, or that of its `method`",
        up="$4d$, or that of its `method`",
        keeps="nothing, or that of its `method`",
        gradients="1, or that of its `method`",
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
        method: Method | None = None,
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        if not callable(clusters) and (
            isinstance(clusters, str)
            or not getattr(clusters, "ndim", 1)
            or not hasattr(clusters, "__len__")
        ):
            raise ValueError(
                "Expected `clusters` to be a list with the cluster of each client, or a function "
                f"of the client's id, but got {clusters=}. Use [0, 0, 1, 1], for example."
            )
        self.given_clusters = clusters if callable(clusters) else as_integers("clusters", clusters)
        self.method = method
        self.inner = Method(local_epochs, local_steps, weighting) if method is None else method
        self._servers: list[Method] = []
        if method is not None:
            self._check_method(method, (local_epochs, local_steps, weighting))
            self._be(method)

    def _check_method(self, method: Method, plan: tuple[Any, ...]) -> None:
        """Raise ValueError for a method that has no server of its own for some clients."""
        if not isinstance(method, Method):
            raise ValueError(
                f"Expected `method` to be a method or None, but got {method=}. Use FedProx(0.1), "
                "for example."
            )
        if plan != (1, None, "samples"):
            raise ValueError(
                "Expected the budget and the weighting to be those of `method`, but got "
                "`local_epochs`, `local_steps` or `weighting` too. Give them to "
                f"{type(method).__name__}."
            )
        over_a_graph = type(method).exchanges is not Method.exchanges
        if over_a_graph or method.client_axes or method.fixed_clients or method.needs_public_data:
            kind = "exchanges messages over a graph" if over_a_graph else "knows its clients by id"
            kind = "needs public samples" if method.needs_public_data else kind
            raise ValueError(
                f"Expected `method` to be one with a server for any clients, but got "
                f"{type(method).__name__}, which {kind}. Use FedProx or Ditto, for example."
            )

    def _be(self, method: Method) -> None:
        """Take over what the loop reads of a method."""
        for name in (
            "include_clients_without_data",
            "needs_sample_counts",
            "needs_label_counts",
            "measures_travel",
            "weighting",
        ):
            setattr(self, name, getattr(method, name))
        if method.model_scope != SHARED:
            self.model_scope = method.model_scope  # type: ignore[misc]
        if type(method).admit is not Method.admit:
            self.fixed_clients = (  # type: ignore[misc]
                f"the servers of {type(method).__name__} count their clients"
            )
        self.state_settings = tuple(  # type: ignore[misc]
            f"method.{name}" for name in method.state_settings
        )

    @property
    def known(self) -> Known:
        """Facts about the federation; the servers of the clusters know those of their clients."""
        return self._known

    @known.setter
    def known(self, known: Known) -> None:
        self._known = self.inner.known = known
        for number, server in enumerate(self._servers):
            server.known = self._of_cluster(known, number)

    def bind(self, known: Known) -> None:
        """Number the clusters from 0, and make a method for the server of each."""
        # A method may be bound several times, by copies for each architecture.
        self.inner, self._servers = copy(self.inner), []
        super().bind(known)
        given = self.given_clusters
        labels = [given(k) for k in range(self.num_clients)] if callable(given) else given
        self._cluster = number_labels("clusters", labels, self.num_clients)
        self._numbers = dict(zip(map(int, labels), self._cluster.tolist(), strict=True))
        self.inner.bind(known)
        for number in range(int(self._cluster.max()) + 1):
            server = copy(self.inner)
            server.bind(self._of_cluster(known, number))
            self._servers.append(server)

    def _of_cluster(self, known: Known, number: int) -> Known:
        """Leave out the data of other clusters' clients; ids stay."""
        member, counts = self._cluster == number, known.label_counts
        return replace(
            known,
            num_samples=known.num_samples * member,
            has_training_data=known.has_training_data & member,
            label_counts=None if counts is None else counts * member.unsqueeze(1),
        )

    def _parts(self, info: ClientInfo) -> Iterator[tuple[Method, str, Tensor, ClientInfo]]:
        """Split a cohort: each cluster's method, name, positions in the cohort, and clients."""
        cluster = self._clusters_of(info.index)
        for number in cluster.unique().tolist():
            mine = info.keep(cluster == number)
            mine = replace(mine, num_clients=int((self._cluster == number).sum()))
            at = (cluster == number).nonzero().flatten()
            yield self._servers[number], str(number), at, mine

    def _clusters_of(self, index: Tensor) -> Tensor:
        """Find the clusters of clients: of new ones by the function, or the largest."""
        found = self._cluster[index.clamp_max(self.num_clients - 1)]
        new = index >= self.num_clients
        if not new.any():
            return found
        if not callable(self.given_clusters):
            return found.masked_fill(new, int(self._cluster.bincount().argmax()))
        for at in new.nonzero().flatten().tolist():
            label = self.given_clusters(int(index[at]))
            if label not in self._numbers:
                raise ValueError(
                    f"Expected `clusters` to put the new client {int(index[at])} into one of the "
                    f"clusters {sorted(self._numbers)}, but got {label!r}. Nobody has trained a "
                    "model of it."
                )
            found[at] = self._numbers[label]
        return found

    # --- the servers ---

    def init_server(self, model: Model) -> Tree:
        """Make equal servers."""
        trees = {str(j): server.init_server(model) for j, server in enumerate(self._servers)}
        return {"clusters": trees}

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send no common part: every client gets what its cluster's server sends."""
        return {}

    def download_rows(self, server: Tree, info: ClientInfo) -> Tree:
        """Send each client what its cluster's server sends."""
        found = []
        for method, name, at, mine in self._parts(info):
            tree = server["clusters"][name]
            same = expand(method.download(tree, mine), len(mine))
            found.append((at, {**same, **method.download_rows(tree, mine)}))
        return merge(found, len(info))

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Update the servers whose clients have sent something."""
        trees = dict(server["clusters"])
        for method, name, at, mine in self._parts(info):
            trees[name] = method.server_update(trees[name], rows(uploads, at), mine)
        return {"clusters": trees}

    def download_nbytes(self, server: Tree, info: ClientInfo) -> Tensor | None:
        """Count the bytes that each cluster's server sends."""
        sizes = torch.zeros(len(info), dtype=torch.int64)
        for method, name, at, mine in self._parts(info):
            found = method.download_nbytes(server["clusters"][name], mine)
            if found is None:
                return None
            sizes[at] = found.cpu()
        return sizes

    def clusters(self, server: Tree) -> Tensor:
        """Return each client's cluster, int64 ``(num_clients,)``."""
        found: Tensor = self._cluster
        return found

    def structure(self) -> dict[str, Tensor]:
        """Return each client's cluster."""
        return {"clusters": self._cluster}

    def settings(self) -> dict[str, str]:
        """Return the settings, and those of the method inside the clusters."""
        if self.method is None:
            return super().settings()
        inner = {f"method.{name}": value for name, value in self.method.settings().items()}
        return {"method": type(self.method).__name__, **inner}

    # --- the clients, which are those of the method ---

    def resolve_personal(self, parameter_split: ParameterSplit) -> ParameterSpec:
        """Return the method's personal parameters."""
        return self.inner.resolve_personal(parameter_split)

    def ownership(self, parameter_split: ParameterSplit) -> dict[str, frozenset[str]]:
        """Return the method's entries by ownership; what it shares, clusters share."""
        owners = self.inner.ownership(parameter_split)
        return {PER_CLUSTER if who == SHARED else who: names for who, names in owners.items()}

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return the method's log lines."""
        return self.inner.notes(parameter_split)

    def check_fit(self, plan: FitPlan) -> str:
        """Check the fit as the method does."""
        return self.inner.check_fit(plan)

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Return the method's phases."""
        return self.inner.phases(round)

    def full_participation(self, round: int) -> bool:
        """Whether the method's clients all take part."""
        return self.inner.full_participation(round)

    def init_client_state(self, model: Model) -> Tree:
        """Make the method's client state."""
        return self.inner.init_client_state(model)

    def init_client_state_rows(self, client_state: Tree, model: Model, info: ClientInfo) -> Tree:
        """Make the method's initial client states differ."""
        return self.inner.init_client_state_rows(client_state, model, info)

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Begin as the method does."""
        return self.inner.client_init(received, client_state, info)

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Step as the method does."""
        return self.inner.client_step(state, minibatches, client)

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send and keep what the method does."""
        return self.inner.client_final(received, client_state, state, info)

    def upload_nbytes(self, uploads: Tree, info: ClientInfo) -> Tensor | None:
        """Count the bytes as the method does."""
        return self.inner.upload_nbytes(uploads, info)

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        """Return the method's personal models."""
        return self.inner.personal_model(received, client_state, info)

    def predict(self, outputs: Any, features: Any, own: Model) -> Any:
        """Predict as the method does."""
        return self.inner.predict(outputs, features, own)

    def evaluation_phases(self) -> tuple[Phase, ...]:
        """Return the method's phases."""
        return self.inner.evaluation_phases()

    def evaluation_step(
        self, received: Tree, model: Model, minibatches: Any, client: LocalStep
    ) -> Model:
        """Step as the method does."""
        return self.inner.evaluation_step(received, model, minibatches, client)
