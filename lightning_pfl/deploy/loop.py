"""A network inside one process: for rehearsals, and for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_pfl.core.randomness import seeded
from lightning_pfl.deploy.node import Node
from lightning_pfl.deploy.nodes import Presence, Reply


class LoopLine:
    """Brings bytes to nodes that are objects, at once.

    Args:
        nodes: The nodes, by their numbers.

    Attributes:
        sent: Every message so far: the node's number, the question and the answer.
    """

    def __init__(self, nodes: Mapping[int, Node]) -> None:
        self.nodes = dict(nodes)
        self.sent: list[tuple[int, bytes, bytes]] = []
        self._replies: dict[str, Reply] = {}

    def present(self) -> Sequence[Presence]:
        """List the nodes."""
        return [Presence(node) for node in self.nodes]

    def send(self, node: int, kind: str, data: bytes) -> str:
        """Let the node answer."""
        # A node of its own process has random generators of its own.
        with seeded(0, everything=True):
            answer = self.nodes[node].handle(data)
        question = str(len(self.sent))
        self.sent.append((node, data, answer))
        self._replies[question] = Reply(question, answer)
        return question

    def replies(self, questions: Sequence[str], limit: int) -> Sequence[Reply]:
        """Take the answers."""
        return [self._replies.pop(q) for q in list(questions) if q in self._replies]
