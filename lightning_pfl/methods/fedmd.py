"""FedMD: clients of any architecture agree on the outputs for public samples."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.contract.view import StepView
from lightning_pfl.core.checks import (
    check_budget,
    check_choice,
    check_integer,
    check_number,
    check_used,
)
from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.core.parameters import ParameterSpec, ParameterSplit
from lightning_pfl.core.randomness import derive
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model, Tree, per_client, weighted_mean
from lightning_pfl.graphs.messages import Exchange, ReceivedMessages
from lightning_pfl.graphs.resolve import GraphLike, resolve_graph
from lightning_pfl.methods.base import About, Known, LocalStep, Method, PerClient, Phase
from lightning_pfl.solvers.distances import Distance, distance_to
from lightning_pfl.solvers.groups import group_means

DIGEST, REVISIT, SCORE = "digest", "revisit", "score"
SCORES = Exchange("scores", to="sum")


class FedMD(Method):
    r"""Clients keep models of their own, and fit their outputs on public samples to the mean.

    In each round the public samples :math:`X_t` are some drawn by the seed and the round. The
    server sends the mean of the clients' outputs on them, which a client first digests, then it
    revisits its own data, and sends its outputs on the samples of the next round:

    .. math::
        \theta_k \leftarrow \text{SGD on } D(f_{\theta_k}(X_t), \bar f_t), \qquad
        \theta_k \leftarrow \text{SGD on } F_k, \qquad
        \bar f_{t+1} = \frac1{|S_t|} \sum_{k \in S_t} f_{\theta_k}(X_{t+1})

    Only outputs travel, so clients may have different architectures (``ClientModules``). Round 0
    has nothing to digest.

    With a graph there is no server: a client digests the mean of its neighbours' outputs and its
    own, if it takes part in the next round. With several clusters (COMET) the server groups the
    clients' outputs by k-means, and a client digests the mean of its cluster.

    Args:
        public_samples: Public samples in a round, >= 1.
        digest_epochs: Passes over them. Exactly one of ``digest_epochs`` and ``digest_steps``; 0
            makes it LocalOnly.
        digest_steps: Optimizer steps on them instead.
        digest_lr: Learning rate of these steps; None keeps that of ``configure_optimizers``.
        distance: :math:`D`, a mean over samples: ``"l1"`` and ``"l2"``, the mean absolute or
            squared difference of outputs; ``"kl"``, :math:`T^2` times the divergence of the softmax
            of outputs over :math:`T` from that of the mean.
        temperature: :math:`T > 0`, for ``"kl"``.
        digest_weight: A factor of :math:`D`, >= 0.
        num_outputs: Outputs of a module; None: those of its last layer ``head``.
        clusters: Number of clusters, >= 1; the server then knows who is in which.
        graph: Who is whose neighbour, without a server; None for a server.
        local_epochs: Passes over a client's own data per round.
        local_steps: Optimizer steps on them instead. Exactly one of the two.

    Raises:
        ValueError: If an argument is out of its range.
        MisconfigurationException: Before the first round, if the number of outputs isn't known; in
            it, without public samples.

    State:
        server: ``scores``, the means of clusters, ``(clusters, public_samples, num_outputs)``;
            ``due``, the round for which they are, int64; ``cluster``, int64 ``(num_clients,)``, -1
            if unknown. Nothing with a graph. client_state: ``model``, the complete model; with a
            graph also ``scores`` and ``due``.

    Deviation from the paper: a round's outputs are sent at the end of the round before, so that it
    takes one trip. Clients start from the module instead of training on public and own data, and
    nothing is stopped by test data. Of COMET its clusters are here, its regularised local loss
    isn't: digesting and training alternate as in FedMD.

    Example:
        >>> [phase.name for phase in FedMD(digest_steps=20).phases(1)]
        ['digest', 'revisit', 'score']

    References:
        Li, Wang. FedMD: Heterogenous federated learning via model distillation. 2019.
        arXiv:1910.03581, Algorithm 1. Bistritz, Mann, Bambos. Distributed distillation for
        on-device learning. NeurIPS 2020 (a graph). Cho, Wang, Chirvolu, Joshi.
        Communication-efficient and model-heterogeneous personalized federated learning via
        clustered knowledge transfer. IEEE J-STSP 2023 (COMET).
    """

    about = About(
        family="a personal model",
        personal="everything; outputs on public samples are compared",
        assumes="public samples like the clients' own; any architectures",
        down="$4NC$, outputs for $N$ public samples; $4NC$ per neighbour with a graph",
        up="$4NC$; $4NC$ per neighbour with a graph",
        keeps="model",
        gradients="1, also on public samples; a forward pass over them",
        personal_model="the client's own model, all of it",
        global_model=None,
        paper="Li and Wang 2019; Bistritz et al. 2020",
    )
    personal: ParameterSpec = "all"
    needs_public_data: ClassVar[bool] = True
    client_axes: ClassVar[Mapping[str, int]] = MappingProxyType({"cluster": 1})
    state_settings = ("public_samples", "clusters_wanted")

    def __init__(
        self,
        public_samples: int = 5000,
        digest_epochs: int | None = 1,
        digest_steps: int | None = None,
        digest_lr: float | None = None,
        distance: Distance = "l1",
        temperature: float = 1.0,
        digest_weight: float = 1.0,
        num_outputs: int | None = None,
        clusters: int = 1,
        graph: GraphLike | None = None,
        local_epochs: PerClient | None = 10,
        local_steps: PerClient | None = None,
    ) -> None:
        local_epochs = None if local_steps is not None and local_epochs == 10 else local_epochs
        super().__init__(local_epochs, local_steps, weighting="uniform")
        if digest_steps is not None and digest_epochs == 1:
            digest_epochs = None
        check_budget(digest_epochs, digest_steps, "digest")
        check_integer("public_samples", public_samples, 1, "Use 5000 as in the paper.")
        check_integer("clusters", clusters, 1, "Use 1 for FedMD.")
        check_choice("distance", distance, get_args(Distance), "Use 'l1' as in the authors' code.")
        check_number("temperature", temperature, "Use 1, for example.", positive=True)
        used = distance == "kl"
        check_used(FedMD.__init__, {"temperature": temperature}, used, "distance='kl'")
        check_number("digest_weight", digest_weight, "Use 1, for example.")
        if digest_lr is not None:
            check_number("digest_lr", digest_lr, "Use None for the module's.", positive=True)
        if num_outputs is not None:
            check_integer("num_outputs", num_outputs, 1, "Use the number of classes.")
        if graph is not None and clusters > 1:
            raise ValueError(
                f"Expected a graph or clusters, but got graph={graph!r} and clusters={clusters}. "
                "Use clusters=1 with a graph, as clusters are the server's."
            )
        budget = digest_epochs if digest_steps is None else digest_steps
        given: dict[str, object] = {"digest_weight": digest_weight} if not budget else {}
        given |= {"digest_lr": digest_lr, "distance": distance, "temperature": temperature}
        digests = bool(budget) and digest_weight > 0
        condition = "epochs or steps on public samples, and digest_weight above 0"
        check_used(FedMD.__init__, given, digests, condition)
        self.public_samples: int = public_samples
        self.clusters_wanted = clusters
        self.digest_epochs, self.digest_steps = digest_epochs, digest_steps
        self.digest_lr, self.digest_weight = digest_lr, digest_weight
        self.distance, self.temperature = distance, temperature
        self.num_outputs, self.given_graph = num_outputs, graph

    def bind(self, known: Known) -> None:
        """Find the number of outputs, and build the graph."""
        super().bind(known)
        head = getattr(self.parameter_split.module, "head", None)
        self.width = self.num_outputs or (head.out_features if isinstance(head, nn.Linear) else 0)
        if not self.width:
            raise MisconfigurationException(
                "Expected a module whose last layer is an nn.Linear named `head`, whose outputs "
                f"FedMD compares, but got {type(self.parameter_split.module).__name__}. Set "
                "`num_outputs`."
            )
        if self.given_graph is not None:
            self.graph = resolve_graph(self.given_graph, self.num_clients, self.seed)

    @property
    def decentralized(self) -> bool:
        """Whether clients talk to neighbours instead of a server."""
        return self.given_graph is not None

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line if nothing is digested."""
        budget = self.digest_epochs or self.digest_steps
        return [] if budget and self.digest_weight else ["Nothing is digested: that is LocalOnly."]

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Digest, revisit, and compute the outputs for the next round."""
        digest = Phase(
            "all",
            self.digest_epochs,
            self.digest_steps,
            self.digest_lr,
            DIGEST,
            data="public",
        )
        revisit = Phase("all", self.local_epochs, self.local_steps, name=REVISIT)
        score = Phase(epochs=1, evaluate_only=True, name=SCORE, data="public", ahead=1)
        return (digest, revisit, score) if round else (revisit, score)

    # --- state ---

    def _nothing(self, model: Model, *axes: int) -> Tensor:
        first = next(leaf for leaf in model.values() if leaf.is_floating_point())
        return first.new_zeros(*axes, self.public_samples, self.width)

    def init_server(self, model: Model) -> Tree:
        """Make means that are due in no round."""
        if self.decentralized:
            return {}
        scores = self._nothing(self.parameter_split.model(), self.clusters_wanted)
        due = torch.full((), -1, dtype=torch.int64, device=scores.device)
        return {"scores": scores, "due": due, "cluster": due.repeat(self.num_clients)}

    def init_client_state(self, model: Model) -> Tree:
        """Make the client's model, and with a graph means that are due in no round."""
        if not self.decentralized:
            return super().init_client_state(model)
        scores = self._nothing(model)
        due = torch.full((), -1, dtype=torch.int64, device=scores.device)
        return {**super().init_client_state(model), "scores": scores, "due": due}

    # --- a client's round ---

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send the mean, if it is for this round."""
        fits = not self.decentralized and int(server["due"]) == info.round
        return {"scores": server["scores"][0]} if fits and self.clusters_wanted == 1 else {}

    def download_rows(self, server: Tree, info: ClientInfo) -> Tree:
        """Send each client the mean of its cluster; that of all clusters if it has none yet."""
        if self.clusters_wanted == 1 or int(server["due"]) != info.round:
            return {}
        scores = server["scores"]
        cluster = server["cluster"][send(info.index, scores.device)]
        own = scores[cluster.clamp_min(0)]
        return {"scores": own.where((cluster >= 0).view(-1, 1, 1), scores.mean(0))}

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Begin with the client's model and the mean to digest."""
        model = client_state["model"]
        clients, nothing = len(info), self._nothing(model, len(info), 1)[:, 0]
        due = torch.full((clients,), "scores" in received, device=nothing.device)
        if self.decentralized:
            due = client_state["due"] == info.round
        counter = torch.zeros(clients, dtype=torch.int64, device=nothing.device)
        return {
            "model": model,
            "target": (client_state if self.decentralized else received).get("scores", nothing),
            "weight": self.digest_weight * due.to(nothing),
            # One row more, for samples that fill up a minibatch.
            "scores": torch.cat([nothing, nothing[:, :1]], 1),
            "digested": counter,
            "scored": counter.clone(),
        }

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Step on public or own samples, or compute outputs."""
        model = state["model"]
        if client.phase == REVISIT:
            return {**state, "model": client.train(model, minibatches)}
        real = client.samples(minibatches)[1]
        counted = "digested" if client.phase == DIGEST else "scored"
        place = state[counted].unsqueeze(1) + torch.arange(real.shape[1], device=real.device)
        place = place.remainder(self.public_samples)
        state = {**state, counted: state[counted] + real.sum(1)}
        rows = place.unsqueeze(2).expand(-1, -1, self.width)
        if client.phase == SCORE:
            outputs = self._checked(client.outputs(model, minibatches))
            at = rows.where(real.unsqueeze(2), self.public_samples)
            return {**state, "scores": state["scores"].scatter(1, at, outputs)}
        grads = client.grad(
            model,
            minibatches,
            objective=self._digest,
            given={"weight": state["weight"]},
            sample_data={"target": state["target"].gather(1, rows)},
        )
        return {**state, "model": client.update(model, grads)}

    def _checked(self, outputs: Any) -> Tensor:
        if not isinstance(outputs, Tensor) or outputs.shape[-1] != self.width:
            found = tuple(outputs.shape[1:]) if isinstance(outputs, Tensor) else type(outputs)
            raise MisconfigurationException(
                f"Expected outputs (samples, {self.width}), which FedMD compares, but got {found}. "
                "Set `num_outputs`."
            )
        return outputs

    def _digest(self, view: StepView, given: Tree) -> Tensor:
        """Compute the distance of one client's outputs to the mean."""
        outputs, target = self._checked(view.outputs), view.sample_data["target"]
        found = distance_to(outputs, target, self.distance, self.temperature)
        loss: Tensor = given["weight"] * view.mean(found)
        return loss

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Send the outputs for the next round to the server, or keep them for neighbours."""
        scores, own = state["scores"][:, :-1], {"model": state["model"]}
        if not self.decentralized:
            return {"scores": scores}, own
        due = torch.full_like(client_state["due"], info.round + 1)
        return {}, {**own, "scores": scores, "due": due}

    # --- the means ---

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Average the outputs, of all clients or of each cluster."""
        if self.decentralized:
            return server
        scores, due = uploads["scores"], torch.full_like(server["due"], info.round + 1)
        if self.clusters_wanted == 1:
            mean = weighted_mean({"": scores}, info.weights)[""]
            return {**server, "scores": mean.unsqueeze(0), "due": due}
        key = derive(self.seed, "clusters", info.round)
        groups, means = group_means(scores, self.clusters_wanted, key)
        cluster = server["cluster"].index_copy(0, send(info.index, scores.device), groups)
        return {"scores": means, "due": due, "cluster": cluster}

    def exchanges(self, round: int) -> tuple[Exchange, ...]:
        """Exchange outputs with neighbours, if there is a graph."""
        return (SCORES,) if self.decentralized else ()

    def send(self, exchange: str, client_state: Tree, info: ClientInfo) -> Tree:
        """Send the outputs for the next round."""
        return {"scores": client_state["scores"]}

    def receive(
        self, exchange: str, client_state: Tree, inbox: ReceivedMessages, info: ClientInfo
    ) -> Tree:
        """Average the neighbours' outputs, by the edges' weights, and the own ones."""
        total = client_state["scores"] + inbox.messages["scores"]
        share = 1 / (1 + inbox.weights.sum(1))
        mean = (total * per_client(share, total)).to(client_state["scores"].dtype)
        return {**client_state, "scores": mean}

    def clusters(self, server: Tree) -> Tensor | None:
        """Return each client's cluster, if there are several."""
        return server["cluster"] if self.clusters_wanted > 1 else None
