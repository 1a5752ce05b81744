"""The clients' side of a round: train, be judged, exchange messages, remember."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_pfl.contract.records import ClientInfo, LocalResult, OnClients, told
from lightning_pfl.core.tree import Tree, merge, rows, split_rows, values
from lightning_pfl.data.datasets import FederatedDataset
from lightning_pfl.federation.architectures import Group, named
from lightning_pfl.federation.gate import judge, judge_cohort
from lightning_pfl.federation.ranks import whole_work
from lightning_pfl.federation.state import FederationState
from lightning_pfl.graphs.messages import Exchange, Postman
from lightning_pfl.methods.base import Phase


@dataclass
class Share:
    """One architecture's part of this process's clients.

    Attributes:
        group: The clients' group.
        at: Their positions among this process's clients of the cohort.
        own: What they remember, ``(clients, ...)``.
        work: What their local training gave.
    """

    group: Group
    at: slice | Tensor
    own: Tree
    work: LocalResult | None = None


class Cohort:
    """The clients of a round, by process and by architecture.

    Args:
        strategy: The federated strategy.
        info: The whole cohort.
        received: What the server sends, ``(clients, ...)``.

    Attributes:
        info: The clients that count; after the gate the accepted ones.
        exchanged: Bytes of all messages between clients so far.
    """

    def __init__(self, strategy: FederationState, info: ClientInfo, received: Tree) -> None:
        self.strategy, self.received = strategy, received
        self.info, self.exchanged = info, 0
        self.part = strategy.part(info.index)
        self.device = strategy.settings.device
        self.mine = info.rows(self.part.index)
        self.shares = [
            Share(group, at, group.gather(self.mine.index[at], self.device))
            for group, at in strategy.by_group(self.mine.index)
        ]

    def train(
        self, data: FederatedDataset, phases: tuple[Phase, ...], on_clients: OnClients
    ) -> LocalResult:
        """Local training; the uploads and logged values of the whole cohort."""
        received = self.part.rows(self.received)
        for share in self.shares:
            edges = {k: v for k, v in share.own.items() if k in share.group.method.edge_state}
            own = {k: v for k, v in share.own.items() if k not in edges}
            share.work = self._train(
                share, own, split_rows(received, share.at), data, phases, on_clients
            )
            share.own = {**share.work.own, **edges}
        return whole_work(self.part, self._joined())

    def _train(
        self,
        share: Share,
        own: Tree,
        received: Tree,
        data: FederatedDataset,
        phases: tuple[Phase, ...],
        on_clients: OnClients,
    ) -> LocalResult:
        """One architecture's clients; nothing where there are none."""
        info, listener = self.mine.rows(share.at), told(on_clients, share.at)
        if not len(info):
            nothing = torch.empty(0, dtype=torch.float64, device=self.device)
            return LocalResult({}, own, loss=nothing)
        engine, method = share.group.engine, share.group.method
        with named(share.group, data.names, info.index, "client_step", info.round):
            return engine.train(method, received, own, info, data, phases, listener)

    def _joined(self) -> LocalResult:
        """The work of this process's clients, in their order."""
        done = [(share.at, share.work) for share in self.shares if share.work is not None]
        if len(done) == 1:
            return done[0][1]
        count = len(self.mine)
        return LocalResult(
            merge([(at, work.uploads) for at, work in done], count),
            {},
            values([(at, work.logs) for at, work in done], count),
            {name: option for _, work in done for name, option in work.options.items()},
            values([(at, {"": work.loss}) for at, work in done], count)[""],
        )

    def judge(self, work: LocalResult, max_norm: float | None) -> tuple[Tensor, dict[int, str]]:
        """Whose work counts, and why that of the others doesn't; see ``gate.py``.

        From here on the cohort is the accepted clients.
        """
        if len(self.shares) == 1:
            accepted, rejected = judge_cohort(self.part, work, self.received, self.info, max_norm)
        else:
            accepted, rejected = self._judge_groups(max_norm)
        if rejected:
            self._keep(accepted)
        return accepted, rejected

    def _judge_groups(self, max_norm: float | None) -> tuple[Tensor, dict[int, str]]:
        accepted = torch.ones(len(self.info), dtype=torch.bool)
        reasons: dict[int, str] = {}
        for share in self.shares:
            assert share.work is not None
            received = split_rows(self.received, share.at)
            found, why = judge(share.work, received, self.mine.rows(share.at), max_norm)
            accepted[share.at] = found
            reasons |= why
        return accepted, {k: reasons[k] for k in self.info.index.tolist() if k in reasons}

    def _keep(self, accepted: Tensor) -> None:
        mine = accepted[self.part.index]
        position = mine.cumsum(0) - 1
        for share in self.shares:
            kept = mine[share.at]
            share.own = rows(share.own, kept.nonzero().flatten().to(self.device))
            if isinstance(share.at, Tensor):
                share.at = position[share.at[kept]]
        self.info = self.info.keep(accepted)
        self.part = self.strategy.part(self.info.index)
        self.mine = self.info.rows(self.part.index)

    def exchange(self, when: str) -> None:
        """The method's messages between neighbours, before or after local training."""
        method = self.strategy.method
        for exchange in method.exchanges(self.info.round):
            if exchange.when == when and len(self.info):
                self._exchange(exchange)

    def _exchange(self, exchange: Exchange) -> None:
        method, count = self.strategy.method, len(self.mine)
        postman = Postman(method.graph, self.info.index, self.device)
        sent = [
            (share.at, share.group.method.send(exchange.name, share.own, self.mine.rows(share.at)))
            for share in self.shares
        ]
        letters = self.part.whole(merge(sent, count))
        sizes = method.message_nbytes(exchange.name, letters, self.info)
        self.exchanged += postman.nbytes(exchange, letters, sizes)
        inbox = postman.deliver(exchange, letters).rows(self._index())
        for share in self.shares:
            share.own = share.group.method.receive(
                exchange.name,
                share.own,
                inbox if isinstance(share.at, slice) else inbox.rows(share.at.to(self.device)),
                self.mine.rows(share.at),
            )

    def _index(self) -> slice | Tensor:
        index = self.part.index
        return index if isinstance(index, slice) else index.to(self.device)

    def remember(self) -> None:
        """Store what the clients of the cohort remember now."""
        for share in self.shares:
            clients = self.mine.index[share.at]
            if len(clients):
                share.group.scatter(clients, share.own)
