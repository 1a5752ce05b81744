"""The nodes as the server sees them: who is where, and questions that many are asked at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_pfl import __version__
from lightning_pfl.deploy.data import SPLITS, Counts, read_labels
from lightning_pfl.deploy.packet import HEADER, UNREADABLE, Packet, PacketError, printable

log = logging.getLogger(__name__)

PAUSES = 5
"""Number of looks for answers after which the network is asked for the nodes again."""
LONGEST = 10
"""Number of pauses between two looks at most; who has waited long looks less often."""


@dataclass(frozen=True)
class Presence:
    """A node that is there now.

    Args:
        node: Its number in the network.
        name: The name under which its key is registered; empty in a network without keys.
        since: When it came, as text: a node that went away and came back has another.
    """

    node: int
    name: str = ""
    since: str = ""


@dataclass(frozen=True)
class Reply:
    """An answer from the network.

    Args:
        question: Number of the question.
        data: The answer; None without one.
        error: Error text of the network.
    """

    question: str
    data: bytes | None = None
    error: str = ""


class Line(Protocol):
    """A network: it brings bytes to nodes and back."""

    def present(self) -> Sequence[Presence]:
        """List the nodes that are there."""

    def send(self, node: int, kind: str, data: bytes) -> str:
        """Send a question, a packet of some kind; returns its number."""

    def replies(self, questions: Sequence[str], limit: int) -> Sequence[Reply]:
        """Take the answers that have come to some questions, each once.

        Args:
            questions: Their numbers.
            limit: Bytes of an answer at most; of a larger one the network may bring nothing.
        """


@dataclass(frozen=True)
class Answer:
    """The result of a question to the clients of a node.

    Args:
        at: Who was asked: positions in the list of clients, int64.
        clients: Their names.
        packet: The answer; None if there is none that can be read.
        reason: Why not.
    """

    at: Tensor
    clients: list[str]
    packet: Packet | None = None
    reason: str = ""


@dataclass
class _Asked:
    at: list[int]
    node: int
    since: str


@dataclass
class Nodes:
    """The nodes of a deployment.

    Args:
        line: The network.
        names: The federation's clients, in the order of their ids.
        owners: By client, the name of the node that may speak for it; empty in a network without
            keys, where the first node that claims a client keeps it.
        digest: What the nodes' recipes must be like.
        timeout: Seconds that a question waits for its answer; None for ever.
        max_samples: Samples that a client may have at most.
        needs_labels: Whether nodes send the number of samples of each class per client.
        pause: Seconds between two looks at the network at first, see :data:`LONGEST`.
        say: Called with each progress message, a sentence.

    Attributes:
        join: Makes the message by which a node joins; None until the server knows all numbers.
        counts: By client, the numbers of its splits.
        labels: By client, its training samples of each class, if they are needed.
        home: By client, its node, if that is there and has joined.
    """

    line: Line
    names: Sequence[str]
    owners: Mapping[str, str]
    digest: Mapping[str, str]
    timeout: float | None = 600.0
    max_samples: int = 10**7
    needs_labels: bool = False
    pause: float = 0.1
    say: Callable[[str], None] = log.info
    join: Callable[[], Packet] | None = None
    counts: dict[str, dict[str, Counts]] = field(default_factory=dict)
    labels: dict[str, list[int]] = field(default_factory=dict)
    home: dict[str, int] = field(default_factory=dict)
    _since: dict[int, str] = field(default_factory=dict)
    _joining: dict[str, tuple[Presence, list[str]]] = field(default_factory=dict)
    _greeted: dict[int, tuple[Presence, list[str]]] = field(default_factory=dict)
    _looked: float = 0.0

    # --- who is there -----------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until the numbers of all clients are known."""
        missing, began = list[str](), time.monotonic()
        while left := [name for name in self.names if name not in self.counts]:
            if left != missing:
                self.say(f"Waiting for {', '.join(left)}.")
                missing = left
            self.look()
            self._rest(began)

    def _rest(self, began: float) -> None:
        """Pause between two looks: a tenth of the time waited, within bounds."""
        waited = time.monotonic() - began
        time.sleep(min(max(self.pause, waited / 10), LONGEST * self.pause))

    def look(self) -> None:
        """Greet nodes that came or came back, and take their answers."""
        if (now := time.monotonic()) - self._looked < PAUSES * self.pause:
            return
        self._looked = now
        here = {presence.node: presence for presence in self.line.present()}
        for name, node in list(self.home.items()):
            if node not in here or here[node].since != self._since.get(node):
                del self.home[name]
        for node, presence in here.items():
            if self._since.get(node) != presence.since:
                self._since[node] = presence.since
                question = self.line.send(node, "hello", Packet("hello").to_bytes())
                self._joining[question] = (presence, [])
        for node, (presence, clients) in list(self._greeted.items()) if self.join else ():
            assert self.join is not None
            del self._greeted[node]
            question = self.line.send(node, "join", self.join().to_bytes())
            self._joining[question] = (presence, clients)
        for reply in self.line.replies([*self._joining], HEADER) if self._joining else ():
            presence, clients = self._joining.pop(reply.question)
            if self._since.get(presence.node) == presence.since:
                self._greet(presence, clients, reply)

    def _greet(self, presence: Presence, clients: list[str], reply: Reply) -> None:
        """Take the answer of a node that was greeted, or asked to join."""
        who = presence.name or f"node {presence.node}"
        try:
            packet = read_answer(reply, HEADER)
            if packet.kind == "hello":
                clients = self._read_hello(packet, presence)
            elif packet.kind != "joined" or not clients:
                raise PacketError(f"answer is {packet.kind!r}")
        except UNREADABLE as error:
            self.say(f"{who} isn't let in: {error}.")
            return
        if packet.kind == "hello":
            self._greeted[presence.node] = (presence, clients)
            return
        self.home |= dict.fromkeys(clients, presence.node)
        self.say(f"{who} is here with {', '.join(clients)}.")

    def _read_hello(self, packet: Packet, presence: Presence) -> list[str]:
        packet.require({"protocol": int, "digest": dict, "counts": dict})
        if packet.meta["protocol"] != 1:
            raise PacketError(f"it speaks version {packet.meta['protocol']} of the protocol, not 1")
        if wrong := [k for k, v in self.digest.items() if packet.meta["digest"].get(k) != v]:
            raise PacketError(f"its recipe is another one: {', '.join(wrong)} differs")
        if (version := packet.meta.get("version")) != __version__:
            who = presence.name or f"node {presence.node}"
            self.say(f"{who} runs lightning_pfl {printable(version)}, not {__version__}.")
        found: dict[str, dict[str, Counts]] = {}
        for name, splits in packet.meta["counts"].items():
            if name not in self.names:
                raise PacketError(f"it says that it is {name!r}, which isn't a client")
            if self.owners and self.owners.get(name) != presence.name:
                raise PacketError(f"it says that it is {name!r}, whose key it doesn't have")
            if not self.owners and self.home.get(name, presence.node) != presence.node:
                raise PacketError(f"it says that it is {name!r}, which another node is")
            if not isinstance(splits, dict) or splits.keys() != set(SPLITS):
                raise PacketError(f"numbers of {name!r} aren't those of {', '.join(SPLITS)}")
            found[name] = {
                split: Counts.read(numbers, f"{split} of {name!r}", self.max_samples)
                for split, numbers in splits.items()
            }
            if self.counts.get(name, found[name]) != found[name]:
                raise PacketError(f"the data of {name!r} are other ones than when it joined")
        if not found:
            raise PacketError("it has no clients")
        if self.needs_labels:
            packet.require({"labels": dict})
            self.labels |= {
                name: read_labels(packet.meta["labels"][name], splits["train"].samples, repr(name))
                for name, splits in found.items()
            }
        self.counts |= found
        return list(found)

    # --- questions --------------------------------------------------------------------------------

    def ask(
        self,
        kind: str,
        clients: Sequence[str],
        question: Callable[[Tensor], Packet],
        limit: Callable[[int], int],
    ) -> Iterator[Answer]:
        """Ask the nodes of some clients, and take each answer as it comes.

        A node that went away and came back is asked again.

        Args:
            kind: What is asked.
            clients: Who is asked.
            question: Makes the message for the clients of one node, by their positions.
            limit: Largest number of bytes of an answer, by number of clients.
        """
        began = time.monotonic()
        end = None if self.timeout is None else began + self.timeout
        waiting = dict.fromkeys(range(len(clients)))
        asked: dict[str, _Asked] = {}

        def answer(at: list[int], **found: Any) -> Answer:
            return Answer(torch.tensor(at), [clients[k] for k in at], **found)

        while waiting and (end is None or time.monotonic() < end):
            self.look()
            busy = {k for each in asked.values() for k in each.at}
            free = [k for k in waiting if k not in busy and clients[k] in self.home]
            for node in dict.fromkeys(self.home[clients[k]] for k in free):
                at = [k for k in free if self.home[clients[k]] == node]
                data = question(torch.tensor(at)).to_bytes()
                asked[self.line.send(node, kind, data)] = _Asked(at, node, self._since[node])
            most = max((limit(len(each.at)) for each in asked.values()), default=0)
            for reply in self.line.replies([*asked], most) if asked else ():
                done = asked.pop(reply.question)
                if reply.data is None:  # the node is gone: ask again when it is back
                    names = ", ".join(clients[k] for k in done.at)
                    self.say(f"No answer of {names} yet: {printable(reply.error)}.")
                    self._lose(done.node)
                    continue
                for k in done.at:
                    del waiting[k]
                try:
                    packet = read_answer(reply, limit(len(done.at)))
                except UNREADABLE as error:
                    yield answer(done.at, reason=str(error))
                else:
                    yield answer(done.at, packet=packet)
            for number, each in list(asked.items()):
                if self._since.get(each.node) != each.since:
                    del asked[number]
            if waiting:
                self._rest(began)
        if waiting:
            yield answer([*waiting], reason=f"no answer within {self.timeout} s")

    def _lose(self, node: int) -> None:
        """Forget a node until it is back."""
        self.home = {name: where for name, where in self.home.items() if where != node}
        self._since.pop(node, None)


def read_answer(reply: Reply, limit: int) -> Packet:
    """Read an answer.

    Raises:
        PacketError: If there is none, or none that can be read, or if the node refuses.
    """
    if reply.data is None:
        raise PacketError(reply.error or "no answer")
    packet = Packet.from_bytes(reply.data, limit)
    if packet.kind == "refused":
        raise PacketError(f"the node refuses: {packet.meta.get('reason')}")
    return packet
