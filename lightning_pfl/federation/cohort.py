"""The clients' side of a round: local training, gate, messages and client states."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_pfl.contract.records import (
    ClientInfo,
    LocalResult,
    OnClients,
    OptimizerState,
    as_positions_of,
)
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import (
    Tree,
    expand,
    merge,
    rows,
    tmap,
)
from lightning_pfl.data.datasets import FederatedDataset
from lightning_pfl.data.public import PublicData
from lightning_pfl.engine.base import LocalWork
from lightning_pfl.engine.optimizer_options import scheduled
from lightning_pfl.federation.architectures import (
    Architecture,
    merge_values,
    naming_architecture,
    split_rows,
)
from lightning_pfl.federation.gate import (
    Decisions,
    MaxNorm,
    Verdict,
    accept_cohort,
    accept_uploads,
    decide,
    find_outliers,
)
from lightning_pfl.federation.means import mean_over_ranks
from lightning_pfl.federation.ranks import form_of, gather_work, known_form
from lightning_pfl.federation.state import FederationState
from lightning_pfl.graphs.messages import Exchange, PeerExchange
from lightning_pfl.methods.base import Phase


@dataclass
class ArchitectureBatch:
    """The clients of one architecture in this process.

    Attributes:
        architecture: The architecture.
        at: Their positions among this process's clients of the cohort.
        client_state: Their states, ``(clients, ...)``.
        work: Results of their local training.
        optimizers: Their optimizer states, where they are kept; else empty.
    """

    architecture: Architecture
    at: slice | Tensor
    client_state: Tree
    work: LocalResult | None = None
    optimizers: list[OptimizerState] = field(default_factory=list)


class Cohort:
    """The clients of a round, by process and by architecture.

    Args:
        federation: The federation.
        info: The cohort.
        received: Trees that the server sends, ``(clients, ...)``.
        phases: The round's local training.

    Attributes:
        info: The cohort; after the gate the accepted clients.
        shard: Those of them that this process trains; ``home``: those whose states it has.
        trained: As ``shard``, of the whole cohort also after the gate.
        gathered: Whether the uploads of all clients are in every process.
        decisions: The gate's in each process, where they are known with the logged values.
        upload_form: The form of an upload, known with these; None if no process has a client.
        exchanged: Bytes of all messages between clients so far.
    """

    def __init__(
        self,
        federation: FederationState,
        info: ClientInfo,
        received: Tree,
        phases: tuple[Phase, ...],
    ) -> None:
        self.federation, self.received, self.phases = federation, received, phases
        self.info, self.exchanged = info, 0
        self.gathered = False
        self.decisions: list[Decisions] | None = None
        self.upload_form: Tree | None = None
        self.home = federation.shard(info.index)
        self.shard = self.trained = federation.deal(info, self.home)
        self.device = federation.settings.device
        self.mine = info.rows(self.shard.index)
        guests = self._visit() if self._visiting.any() else None
        self.batches = [
            ArchitectureBatch(
                architecture,
                at,
                architecture.gather(self.mine.index[at], self.device) if guests is None else guests,
            )
            for architecture, at in federation.by_architecture(self.mine.index)
        ]

    # --- states that visit another process --------------------------------------------------------

    @property
    def _visiting(self) -> Tensor:
        """Clients that train in another process than the one that has their states, bool."""
        if not self.federation.architectures[0].client_states.has_entries():
            return torch.zeros(len(self.info), dtype=torch.bool)
        return self.shard.owners != self.home.owners

    def _visit(self) -> Tree:
        """Return the states of this process's clients, of which some are in other processes."""
        architecture, ids = self.federation.architecture_of(self.info.index), self.info.index
        visiting, rank = self._visiting, self.shard.ranks.rank
        leaving = ids[visiting & (self.home.owners == rank)]
        states = architecture.gather(leaving, self.device)
        guests = self.home.keep(visiting).all_gather(states, form_of(states))
        here, ours = self._parts(visiting)
        arrived = (self.shard.owners[visiting] == rank).nonzero().flatten()
        own = architecture.gather(self.mine.index[ours], self.device)
        return merge([(ours, own), (here, rows(guests, arrived))], len(self.mine))

    def _parts(self, visiting: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of guests and of others among this process's clients."""
        guest = visiting[self.shard.index]
        return guest.nonzero().flatten(), (~guest).nonzero().flatten()

    def _return(self, architecture: Architecture, client_state: Tree) -> None:
        """Store the new states of this process's clients, those of guests in their processes."""
        visiting = self._visiting
        here, ours = self._parts(visiting)
        architecture.client_states.require_entries(client_state)
        form = form_of(architecture.client_states.tree)
        guests = tmap(lambda kind, leaf: leaf[here].to(kind.dtype), form, client_state)
        returned = self.shard.keep(visiting).all_gather(guests, form)
        ids, at_home = self.info.index[visiting], self.home.owners[visiting]
        back = (at_home == self.shard.ranks.rank).nonzero().flatten()
        for clients, states in (
            (self.mine.index[ours], rows(client_state, ours)),
            (ids[back], rows(returned, back)),
        ):
            if len(clients):
                architecture.scatter(clients, states)

    # --- a round ----------------------------------------------------------------------------------

    def train(
        self,
        data: FederatedDataset,
        on_clients: OnClients,
        validation: FederatedDataset | None = None,
        public: PublicData | None = None,
        gate: bool = False,
    ) -> LocalResult:
        """Train locally; return the logged values of the cohort, and this process's uploads.

        Args:
            data: The training split.
            on_clients: Called with the positions of the clients that are done.
            validation: The validation split by client id, for phases that measure on it.
            public: Public samples, for phases on them.
            gate: Whether several processes tell each other what their gates say, too, as nobody
                else looks at the uploads before.
        """
        received = self.shard.slice(self.received)
        for batch in self.batches:
            architecture, info = batch.architecture, self.mine.rows(batch.at)
            # Edges of a graph are for messages alone.
            edges = {
                name: leaf
                for name, leaf in batch.client_state.items()
                if name in architecture.method.edge_state
            }
            trained = {k: leaf for k, leaf in batch.client_state.items() if k not in edges}
            if not len(info):
                nothing = torch.empty(0, dtype=torch.float64, device=self.device)
                batch.work = LocalResult({}, trained, loss=nothing)
                continue
            assert architecture.optimizer is not None  # a fit has made it
            work = LocalWork(
                architecture.method,
                split_rows(received, batch.at),
                trained,
                info,
                data,
                scheduled(self.phases, architecture.optimizer),
                architecture.optimizer,
                validation=validation,
                schedule=architecture.schedule,
                kept=self.federation.kept_optimizers(info.index),
                public=public,
                cohort=len(self.info),
            )
            with naming_architecture(
                architecture, data.names, info.index, "client_step", info.round
            ):
                batch.work = architecture.engine.train(work, as_positions_of(on_clients, batch.at))
            batch.client_state = {**batch.work.client_state, **edges}
            batch.optimizers = batch.work.optimizers
        done = self._joined()
        return done if self.shard.alone else self._share(done, gate)

    def _share(self, done: LocalResult, gate: bool) -> LocalResult:
        """Share logged values, the form of an upload and, if asked, the gate's decisions."""
        decisions, form = None, form_of(done.uploads) if len(self.mine) else None
        if gate:
            decisions = self._decide(done)
        done, said = gather_work(self.shard, done, (decisions, form))
        self.upload_form = known_form([form for _, form in said])
        if gate:
            self.decisions = [decisions for decisions, _ in said]
        return done

    def _decide(self, mine: LocalResult) -> Decisions:
        """Let the gate decide about this process's clients."""
        max_norm = self.federation.max_update_norm
        return decide(self.shard, mine, self.received, self.info, max_norm)

    def _joined(self) -> LocalResult:
        """Join the results of this process's clients, in their order."""
        done = [(batch.at, batch.work) for batch in self.batches if batch.work is not None]
        if len(done) == 1:
            return done[0][1]
        count = len(self.mine)
        return LocalResult(
            merge([(at, work.uploads) for at, work in done], count),
            {},
            merge_values([(at, work.logs) for at, work in done], count),
            {name: option for _, work in done for name, option in work.options.items()},
            merge_values([(at, {"": work.loss}) for at, work in done], count)[""],
        )

    def gather_uploads(self, work: LocalResult) -> None:
        """Gather the uploads of all clients in every process."""
        work.uploads = self.shard.all_gather(work.uploads, self.upload_form)
        self.gathered = True

    def accept_uploads(self, work: LocalResult) -> Verdict:
        """Reduce the cohort to accepted clients by ``gate.py``, and return its decisions."""
        max_norm = self.federation.max_update_norm
        if len(self.batches) == 1:
            decisions = self.decisions
            if decisions is None:
                uploads = self.shard.slice(work.uploads) if self.gathered else work.uploads
                mine = replace(work, uploads=uploads, loss=self.shard.slice({"": work.loss})[""])
                decisions = self.shard.ranks.all_gather_objects(self._decide(mine))
            verdict = accept_cohort(self.shard, decisions, self.received, self.info, max_norm)
        else:
            verdict = self._accept_by_architecture(max_norm)
        if verdict.rejected:
            self._select(verdict.accepted)
        return verdict

    def average_uploads(self, work: LocalResult, accepted: Tensor) -> Tree:
        """Return the mean of the accepted uploads as that of each client, ``(clients, ...)``.

        A collective call after :meth:`accept_uploads`, for a server that needs the mean alone.

        Args:
            work: This process's uploads.
            accepted: The accepted clients of the whole cohort, bool ``(clients,)``.
        """
        if not accepted.any():  # nobody looks at the numbers
            none = self.mine.weights[:0]
            mean = mean_over_ranks(self.trained, work.uploads, none, self.upload_form)
            return expand(mean, len(accepted))
        mine = accepted[self.trained.index]
        uploads = work.uploads if mine.all() else rows(work.uploads, mine.nonzero().flatten())
        mean = mean_over_ranks(self.shard, uploads, self.mine.weights, self.upload_form)
        return expand(mean, len(accepted))

    def _accept_by_architecture(self, max_norm: MaxNorm) -> Verdict:
        """Compare clients of one architecture with each other; one process has all of them."""
        count = len(self.info)
        accepted, norms = torch.ones(count, dtype=torch.bool), torch.zeros(count).double()
        verdict = Verdict(accepted, {}, norms)
        reasons: dict[int, str] = {}
        for batch in self.batches:
            assert batch.work is not None
            received, info = split_rows(self.received, batch.at), self.mine.rows(batch.at)
            found = accept_uploads(batch.work, received, info, max_norm)
            found = find_outliers(found, received, info, max_norm)
            accepted[batch.at], norms[batch.at] = found.accepted, found.norms
            verdict.outliers |= found.outliers
            reasons |= found.rejected
        verdict.rejected = {k: reasons[k] for k in self.info.index.tolist() if k in reasons}
        return verdict

    def _select(self, accepted: Tensor) -> None:
        mine = accepted[self.shard.index]
        position = mine.cumsum(0) - 1
        for batch in self.batches:
            kept = mine[batch.at]
            here = kept.nonzero().flatten()
            batch.client_state = rows(batch.client_state, send(here, self.device))
            if batch.optimizers:
                batch.optimizers = [batch.optimizers[row] for row in here.tolist()]
            if isinstance(batch.at, Tensor):
                batch.at = position[batch.at[kept]]
        self.info = self.info.keep(accepted)
        self.home, self.shard = self.home.keep(accepted), self.shard.keep(accepted)
        self.mine = self.info.rows(self.shard.index)

    def exchange(self, when: str) -> None:
        """Exchange the method's messages between neighbours, before or after local training."""
        method = self.federation.method
        for exchange in method.exchanges(self.info.round):
            if exchange.when == when and len(self.info):
                self._exchange(exchange)

    def _exchange(self, exchange: Exchange) -> None:
        method, count = self.federation.method, len(self.mine)
        peers = PeerExchange(method.graph, self.info.index, self.device)
        sent = [
            (
                batch.at,
                batch.architecture.method.send(
                    exchange.name, batch.client_state, self.mine.rows(batch.at)
                ),
            )
            for batch in self.batches
        ]
        messages = self.shard.all_gather(merge(sent, count))
        sizes = method.message_nbytes(exchange.name, messages, self.info)
        self.exchanged += peers.nbytes(exchange, messages, sizes)
        inbox = peers.deliver(exchange, messages).rows(self._index())
        for batch in self.batches:
            batch.client_state = batch.architecture.method.receive(
                exchange.name,
                batch.client_state,
                inbox if isinstance(batch.at, slice) else inbox.rows(send(batch.at, self.device)),
                self.mine.rows(batch.at),
            )

    def _index(self) -> slice | Tensor:
        index = self.shard.index
        return index if isinstance(index, slice) else send(index, self.device)

    def store(self) -> None:
        """Store the new states of the cohort's clients."""
        if self._visiting.any():
            (batch,) = self.batches
            self._return(batch.architecture, batch.client_state)
            return
        for batch in self.batches:
            clients = self.mine.index[batch.at]
            if len(clients):
                batch.architecture.scatter(clients, batch.client_state)
            for client, state in zip(clients.tolist(), batch.optimizers, strict=False):
                self.federation.optimizer_states[client] = state
