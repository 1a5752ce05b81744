"""The federation of a deployment: clients that train and are evaluated on their nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_pfl.contract.records import ClientInfo, Evaluation, LocalResult, OnClients
from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.core.tree import Model, Tree, rows, tmap
from lightning_pfl.data.datasets import FederatedDataset
from lightning_pfl.data.public import PublicData
from lightning_pfl.deploy.logged import LoggedValues, Values, read_values
from lightning_pfl.deploy.nodes import Answer, Nodes
from lightning_pfl.deploy.packet import HEADER, UNREADABLE, Packet, PacketError
from lightning_pfl.deploy.secure import Aggregation, check_masked, from_bytes, split, to_bytes
from lightning_pfl.deploy.states import NONE
from lightning_pfl.deploy.wire import (
    EMPTY,
    Form,
    Writer,
    form_nbytes,
    form_of,
    is_float,
    read_counts,
    read_form,
    read_numbers,
    unflatten,
)
from lightning_pfl.federation.architectures import Architecture
from lightning_pfl.federation.client_states import ClientStateStore
from lightning_pfl.federation.cohort import Cohort
from lightning_pfl.federation.evaluate import GLOBAL, is_global
from lightning_pfl.federation.federation import Federation
from lightning_pfl.federation.gate import Verdict
from lightning_pfl.methods.base import Method, Phase

MASKED = 16
"""Bytes of a masked entry at most, as a multiple of those of an entry; int64 for a bfloat16."""


class ServerFederation(Federation):
    """The federation of a deployment: its client states are on the nodes.

    In the place of a client's state it holds the version of it that counts, so that leaving out a
    client, saving and resuming work as they do where states are here.

    Attributes:
        nodes: The nodes.
        id: Names the federation on the nodes' disks.
        durable: The versions that the last checkpoint counts on, int64 ``(clients,)``.
        secure: The clipping range of secure aggregation; None for models as they are.
    """

    nodes: Nodes
    id: str
    durable: Tensor
    secure: float | None = None

    def _begin_client_states(
        self,
        architecture: Architecture,
        method: Method,
        row: Tree,
        device: torch.device,
        everyone: ClientInfo,
    ) -> None:
        architecture.method = method
        version = {"version": torch.tensor(NONE)}
        architecture.client_states = ClientStateStore(version, self.num_clients)
        self.durable = self.versions.clone()

    @property
    def versions(self) -> Tensor:
        """The version of every client's state that counts, int64 ``(clients,)``."""
        versions: Tensor = self.client_states.tree["version"]
        return versions

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over a saved state."""
        super().load_state_dict(saved)
        self.durable = self.versions.clone()

    def cohort(self, info: ClientInfo, received: Tree, phases: tuple[Phase, ...]) -> Cohort:
        """Begin the clients' side of a round, on the nodes."""
        return RemoteCohort(self, info, received, phases)

    def ask(
        self,
        kind: str,
        info: ClientInfo,
        received: Tree,
        largest: int,
        shared: Model | None = None,
        record: Callable[[list[str]], NDArray[Any]] | None = None,
        **said: Any,
    ) -> Iterator[Answer]:
        """Ask the nodes of some clients, and take each answer as it comes.

        Args:
            kind: ``"train"``, ``"evaluate"`` or ``"finish"``.
            info: The clients.
            received: What the server sends them, ``(clients, ...)``.
            largest: Bytes of the arrays of one client's answer at most.
            shared: A model that is sent to all of them as well.
            record: Makes a record of secure aggregation for the clients of a node.
            **said: Plain values that are sent as well.
        """

        def question(at: Tensor) -> Packet:
            writer = Writer()
            writer.add_rows(rows(received, at), "received")
            if shared is not None:
                writer.add_tree(shared, "global")
            if record is not None:
                writer.arrays["record"] = record([names[k] for k in at.tolist()])
            return writer.packet(kind, {**self._head(info.rows(at)), **said})

        names = self.names_of(info)
        return self.nodes.ask(kind, names, question, lambda count: HEADER + count * largest)

    def _head(self, info: ClientInfo) -> dict[str, Any]:
        """Make the part that all questions share."""
        names = self.names_of(info)
        versions, durable = self.versions[info.index].tolist(), self.durable[info.index].tolist()
        template = self.architectures[0].optimizer
        if self.architectures[0].counts_steps:
            raise MisconfigurationException(
                "Expected schedulers that count rounds, as only the nodes take the clients' steps, "
                "but `configure_optimizers` returned one that counts steps. Use schedulers with "
                '"interval": "epoch" and automatic optimization.'
            )
        groups = [] if template is None else template.param_groups
        return {
            "federation": self.id,
            "round": info.round,
            "rounds": self.rounds,
            "clients": names,
            "num_samples": info.num_samples.tolist(),
            "steps": info.steps.tolist(),
            "weights": info.weights.tolist(),
            "optimizer": [{k: v for k, v in group.items() if _plain(v)} for group in groups],
            "versions": dict(zip(names, versions, strict=True)),
            "keep": {n: [v, d] for n, v, d in zip(names, versions, durable, strict=True)},
        }

    def names_of(self, info: ClientInfo) -> list[str]:
        """Name clients."""
        return [self.client_names[client] for client in info.index.tolist()]

    def evaluate(
        self,
        clients: Tensor,
        rows_of: Tensor,
        data: FederatedDataset,
        step: str,
        limit: float | int,
        on_clients: OnClients | None = None,
        dataloader_idx: int | None = None,
    ) -> dict[str, Evaluation]:
        """Let the nodes evaluate the personal models, and the global one if there is one.

        A node has one data set of a split, without a number.
        """
        info = self.info(clients, max(self.rounds - 1, 0))
        received, shared = self.download(info), self.global_model()
        arrives = shared is not None and is_global(received.get("model", {}), shared)
        answers = self.ask(
            "evaluate",
            info,
            received,
            0,
            None if arrives else shared,
            split="test" if step == "test_step" else "val",
            step=step,
            limit=limit,
            global_model=("none" if shared is None else "received" if arrives else "sent"),
        )
        found: dict[str, LoggedValues] = {}
        for answer in answers:
            try:
                results = self._read_evaluation(answer, data, shared is not None)
            except UNREADABLE as error:
                self.nodes.say(f"Evaluation without {', '.join(answer.clients)}: {error}.")
                continue
            for prefix, (counts, values) in results.items():
                found.setdefault(prefix, LoggedValues(len(info))).add(answer.at, values, counts)
            if on_clients is not None:
                on_clients(answer.at.tolist())
        merged = {prefix: values.evaluation() for prefix, values in found.items()}
        merged.setdefault("", LoggedValues(len(info)).evaluation())
        if shared is not None:
            merged.setdefault(GLOBAL, merged[""])
        return merged

    def _read_evaluation(
        self, answer: Answer, data: FederatedDataset, has_global: bool
    ) -> dict[str, tuple[list[int], Values]]:
        packet, count = _require(answer, "evaluated"), len(answer.clients)
        packet.require({"federation": str, "rounds": int, "clients": list, "results": dict})
        _compare(packet, federation=self.id, rounds=self.rounds, clients=answer.clients)
        prefixes = packet.meta["results"].keys()
        if "" not in prefixes or prefixes - {"", *([GLOBAL] if has_global else [])}:
            raise PacketError(f"results are of {', '.join(map(repr, prefixes))}")
        held = dict(zip(data.names, data.num_samples.tolist(), strict=True))
        limits = {name: held.get(name, 0) for name in answer.clients}
        return {
            prefix: (
                read_counts(result["counts"], limits, "counts"),
                read_values(result["values"], count),
            )
            for prefix, result in packet.meta["results"].items()
        }

    def finish(self) -> None:
        """Send the nodes what their clients' personal models are made of."""
        info = self.info(torch.arange(self.num_clients), max(self.rounds - 1, 0))
        for answer in self.ask("finish", info, self.download(info), 0):
            if answer.packet is None or answer.packet.kind != "finished":
                reason = answer.reason or f"answer is {getattr(answer.packet, 'kind', None)!r}"
                self.nodes.say(f"{', '.join(answer.clients)} missed the end: {reason}.")

    def _personal_model(self, client: int | str) -> Model:
        raise RuntimeError(
            f"Expected a client whose state is here, but that of {client!r} is on its node. Run "
            "`lightning-pfl deploy export` there."
        )


class RemoteCohort(Cohort):
    """The clients of a round, on their nodes."""

    federation: ServerFederation

    def __init__(
        self,
        federation: ServerFederation,
        info: ClientInfo,
        received: Tree,
        phases: tuple[Phase, ...],
    ) -> None:
        super().__init__(federation, info, received, phases)
        self.failed: dict[int, str] = {}

    def form(self) -> Form:
        """Return names and shapes of an upload: that of a client without steps and data."""
        method, info = self.federation.method, self.info.rows(slice(0, 1))
        model = tmap(
            lambda leaf: leaf.to(self.device),
            self.federation.architectures[0].parameter_split.model(),
        )
        state = tmap(lambda leaf: leaf[None].clone(), method.init_client_state(model))
        state = method.init_client_state_rows(state, model, info)
        kept = {name: leaf for name, leaf in state.items() if name not in method.edge_state}
        received = tmap(torch.clone, rows(self.received, slice(0, 1)))
        if method.measures_travel:
            info = replace(info, travel=torch.ones(1, dtype=torch.float64))
        begun = method.client_init(received, kept, info)
        return form_of(method.client_final(received, kept, begun, info)[0], "upload")

    def train(
        self,
        data: FederatedDataset,
        on_clients: OnClients,
        validation: FederatedDataset | None = None,
        public: PublicData | None = None,
        gate: bool = False,
    ) -> LocalResult:
        """Let the nodes train; a client without a good answer is named in ``failed``."""
        count = len(self.info)
        form = self.form() if count else {}
        uploads = unflatten(
            (
                (path, torch.zeros(count, *shape, dtype=getattr(torch, dtype)) if dtype else None)
                for path, (shape, dtype) in form.items()
            ),
            "upload",
        )
        loss = torch.full((count,), torch.nan, dtype=torch.float64)
        logged, batch = LoggedValues(count), self.batches[0]
        version = batch.client_state["version"].clone()
        answers: Iterable[Answer]
        if self.federation.secure is not None and count:
            answers = self._train_masked(uploads, form)
            form = plain_form(form)
        else:
            largest = form_nbytes(form)
            answers = self.federation.ask("train", self.info, self.received, largest)
        for answer in answers:
            at, ids = answer.at, self.info.index[answer.at].tolist()
            try:
                upload, losses, values, sane = self._read(answer, self.info.rows(at), form)
            except UNREADABLE as error:
                self.failed |= dict.fromkeys(ids, str(error))
                continue
            _write_rows(_part(uploads, upload), at, upload)
            loss[at] = torch.tensor(losses, dtype=torch.float64)
            logged.add(at, values)
            version[at] = self.info.round
            self.failed |= {
                k: "client state is not finite"
                for k, fine in zip(ids, sane, strict=True)
                if not fine
            }
            on_clients(at.tolist(), partial(loss.__getitem__, at))
        gone = [k in self.failed for k in self.info.index.tolist()]
        loss[torch.tensor(gone, dtype=torch.bool)] = torch.inf  # for the gate
        batch.client_state = {"version": version}
        uploads = tmap(lambda leaf: leaf.to(self.device), uploads)
        found = logged.evaluation()
        batch.work = LocalResult(
            uploads, batch.client_state, found.values, found.options, loss.to(self.device)
        )
        return batch.work

    def _train_masked(self, uploads: Tree, form: Form) -> list[Answer]:
        """Let the nodes train with secure aggregation, and write the mean as each client's model.

        Args:
            uploads: Uploads to write to; a method uses the mean of these models alone.
            form: Their form.

        Returns:
            Answers of the nodes whose models are in the mean.
        """
        assert self.federation.secure is not None
        parties = _Parties(self, form, uploads["model"])
        aggregation = Aggregation(parties.weights(), self.federation.secure, parties.ask)
        aggregation.run()
        if aggregation.mean is None:
            reason = "too few nodes stayed for secure aggregation"
            self.failed = dict.fromkeys(self.info.index.tolist(), reason) | self.failed
            return []
        for name, leaf in split(aggregation.mean, uploads["model"]).items():
            uploads["model"][name][:] = leaf
        return [parties.trained[party] for party in sorted(aggregation.included)]

    def _read(
        self, answer: Answer, info: ClientInfo, form: Form
    ) -> tuple[Tree, list[float], Values, list[bool]]:
        packet, count = _require(answer, "trained"), len(info)
        packet.require({"federation": str, "round": int, "clients": list, "steps": list})
        packet.require({"loss": list, "sane": list, "logs": dict})
        _compare(
            packet,
            federation=self.federation.id,
            round=info.round,
            clients=answer.clients,
            steps=info.steps.tolist(),
        )
        sane = packet.meta["sane"]
        if len(sane) != count or not all(type(fine) is bool for fine in sane):
            raise PacketError("'sane' isn't true or false for each client")
        losses = read_numbers(packet.meta["loss"], count, "loss", float("inf"))
        return (
            read_form(packet, "upload", form, count),
            losses,
            read_values(packet.meta["logs"], count),
            sane,
        )

    def accept_uploads(self, work: LocalResult) -> Verdict:
        """Decide whose work counts: of those who answered well, whom the gate accepts."""
        verdict = super().accept_uploads(work)
        verdict.rejected |= self.failed
        return verdict


class _Parties:
    """The nodes of a round with secure aggregation, of which each has one mask for its clients.

    A party is named by the position of its first client.

    Args:
        cohort: The clients of the round.
        form: The form of an upload.
        model: Uploaded models, ``(clients, ...)``.

    Attributes:
        trained: The answers of parties that have trained, whose models are in the mean.
    """

    def __init__(self, cohort: RemoteCohort, form: Form, model: Tree) -> None:
        self.cohort, self.trained = cohort, dict[int, Answer]()
        self._largest = MASKED * form_nbytes(form)
        floats = [leaf[0] for leaf in model.values() if leaf.is_floating_point()]
        self._entries = sum(leaf.numel() for leaf in floats)
        federation = cohort.federation
        self._at = {name: k for k, name in enumerate(federation.names_of(cohort.info))}
        owned: dict[str, list[str]] = {}
        for name in self._at:
            owned.setdefault(federation.nodes.owners[name], []).append(name)
        self._clients = {self._at[clients[0]]: clients for clients in owned.values()}
        self._of = {name: party for party, clients in self._clients.items() for name in clients}

    def weights(self) -> dict[int, float]:
        """Return the weight of each party's clients."""
        weights = self.cohort.info.weights
        return {
            party: float(weights[self._places(clients)].sum())
            for party, clients in self._clients.items()
        }

    def ask(self, records: Mapping[int, Any], training: bool) -> dict[int, Any]:
        """Bring the records of a stage to the parties; see :class:`Aggregation`."""
        cohort = self.cohort
        places = self._places(name for party in records for name in self._clients[party])
        written = {party: to_bytes(record) for party, record in records.items()}
        answers = cohort.federation.ask(
            "train" if training else "mask",
            cohort.info.rows(places),
            rows(cohort.received, places) if training else {},
            self._largest,
            record=lambda clients: written[self._of[clients[0]]],
            parties=self._of,
        )
        replies = {}
        for answer in answers:
            party = self._of[answer.clients[0]]
            try:
                replies[party] = self._read(answer, party, training)
            except UNREADABLE as error:
                if party not in self.trained:  # else its model is in the mean
                    ids = cohort.info.index[self._places(answer.clients)].tolist()
                    cohort.failed |= dict.fromkeys(ids, str(error))
        return replies

    def _read(self, answer: Answer, party: int, training: bool) -> Any:
        packet = _require(answer, "trained" if training else "masked")
        if answer.clients != self._clients[party] or "record" not in packet.arrays:
            raise PacketError("answer isn't the record of a node's clients")
        record = from_bytes(packet.arrays.pop("record"))
        if training:
            check_masked(record, self._entries)
            self.trained[party] = replace(answer, at=self._places(answer.clients))
        return record

    def _places(self, clients: Iterable[str]) -> Tensor:
        return torch.tensor([self._at[name] for name in clients])


def plain_form(form: Form) -> Form:
    """Describe what an upload with secure aggregation holds unmasked: the integers."""
    known = {path: leaf for path, leaf in form.items() if leaf[1] and not is_float(leaf[1])}
    return known or {f"upload/model/{EMPTY}": ((), "")}


def _part(tree: Tree, names: Tree) -> Tree:
    """Take the leaves of a tree that another one has, too."""
    return {
        name: _part(tree[name], leaf) if isinstance(leaf, dict) else tree[name]
        for name, leaf in names.items()
    }


def _write_rows(tree: Tree, at: Tensor, new: Tree) -> None:
    """Write some clients' rows of a ``(clients, ...)`` tree, in place."""
    tmap(lambda all, some: all.index_copy_(0, at, some), tree, new)


def _require(answer: Answer, kind: str) -> Packet:
    if answer.packet is None:
        raise PacketError(answer.reason)
    if answer.packet.kind != kind:
        raise PacketError(f"answer is {answer.packet.kind!r}, not {kind!r}")
    return answer.packet


def _compare(packet: Packet, **expected: Any) -> None:
    for name, value in expected.items():
        if packet.meta[name] != value:
            raise PacketError(f"answer has {name} {str(packet.meta[name])[:100]}, not {value}")


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float))
