"""Flower's client app, which carries bytes between the server and a node's worker.

Flower starts a process for every message, with code that comes from the server. So nothing is done
here: the worker, which the node's owner has started, has the data.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Client, Connection
from pathlib import Path

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

PATIENCE = 120.0
"""Seconds in which a worker that ended is started again."""


def connect(socket: str) -> Connection:
    """Connect with the worker, which may be about to start."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return Client(socket, "AF_UNIX", authkey=Path(f"{socket}.key").read_bytes())
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def answer(message: Message, context: Context) -> Message:
    """Bring a question to the worker, and its answer back."""
    question = message.content.array_records["packet"]["packet"].data
    with connect(str(context.node_config["socket"])) as line:
        line.send_bytes(question)
        data = line.recv_bytes()
    packet = Array("uint8", (len(data),), "lightning_pfl.packet", data)
    return Message(RecordDict({"packet": ArrayRecord({"packet": packet})}), reply_to=message)


app = ClientApp()
for register in (app.train(), app.evaluate(), app.query()):
    register(answer)
