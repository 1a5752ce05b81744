"""Flower's server app: a fit with the nodes as clients."""

from __future__ import annotations

import os
from collections.abc import Sequence

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from lightning_pfl.deploy.nodes import Presence, Reply
from lightning_pfl.deploy.settings import run_server


class FlowerLine:
    """Brings bytes to SuperNodes and back.

    Args:
        grid: Flower's network.
        starter: The process that has started the SuperLink.
    """

    def __init__(self, grid: Grid, starter: int) -> None:
        self.grid, self.starter = grid, starter

    def present(self) -> Sequence[Presence]:
        """List the SuperNodes that are online."""
        # Flower runs this in a session of its own, which a killed server would leave behind.
        os.kill(self.starter, 0)
        return [
            Presence(node.node_id, node.name, node.last_activated_at)
            for node in self.grid.get_nodes()
            if node.status == "online"
        ]

    def send(self, node: int, kind: str, data: bytes) -> str:
        """Push a message."""
        packet = Array("uint8", (len(data),), "lightning_pfl.packet", data)
        content = RecordDict({"packet": ArrayRecord({"packet": packet})})
        known = kind if kind in ("train", "evaluate") else "query"  # Flower's kinds of messages
        (question,) = self.grid.push_messages([Message(content, node, known)])
        return str(question)

    def replies(self, questions: Sequence[str]) -> Sequence[Reply]:
        """Pull the answers that have come."""
        return [self._read(message) for message in self.grid.pull_messages(questions)]

    @staticmethod
    def _read(message: Message) -> Reply:
        question = message.metadata.reply_to_message_id
        if message.has_error():
            return Reply(question, error=message.error.reason or f"error {message.error.code}")
        records = message.content.array_records
        if "packet" not in records or "packet" not in records["packet"]:
            return Reply(question, b"")  # no format that is read
        return Reply(question, records["packet"]["packet"].data)


def main(grid: Grid, context: Context) -> None:
    """Run the server."""
    config = context.run_config
    run_server(str(config["config"]), FlowerLine(grid, int(config["starter"])))


app = ServerApp()
app.main()(main)
