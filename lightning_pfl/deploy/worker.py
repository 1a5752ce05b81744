"""The process of a node that has the data; it stays from one message to the next."""

from __future__ import annotations

import os
import secrets
from multiprocessing.connection import Listener
from pathlib import Path

from lightning_pfl.deploy.node import Node
from lightning_pfl.deploy.packet import Packet, PacketError

LARGEST = 2**34
"""Bytes of a message at most."""


def work(node: Node, socket: Path, finished: Path) -> None:
    """Answer messages at a socket, for ever.

    Args:
        node: What answers.
        socket: Where; a key beside it says who may ask.
        finished: Is made once the server has said that it has finished.
    """
    key = socket.with_name(f"{socket.name}.key")
    for old in (socket, key):
        old.unlink(missing_ok=True)
    secret = secrets.token_bytes(32)
    with os.fdopen(os.open(key, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    with Listener(str(socket), "AF_UNIX", authkey=secret) as listener:
        while True:
            try:
                with listener.accept() as line:
                    question = line.recv_bytes(LARGEST)
                    line.send_bytes(node.handle(question))
                if _kind(question) == "finish":
                    finished.touch()
            except (EOFError, OSError) as error:  # who asked is gone: it will ask again
                print(f"A question was dropped: {error}.", flush=True)


def _kind(question: bytes) -> str:
    try:
        return Packet.from_bytes(question).kind
    except PacketError:
        return ""
