"""Flower's SuperLink, which takes orders from the process alone that has started it.

Flower serves nodes, the command line and the server's own programs at one address, without asking
the latter two who they are: whoever reaches it could register a key of his own, or start a program
on the server and on every node. Here orders need a secret, and messages the key of a node. Flower
also reads a request before it asks who sent it, up to 2 GiB; here that is :data:`LARGEST`.

This file is run by its path, so that the package isn't imported: ``python superlink.py SECRET
ARGUMENTS``, with a file that holds the secret and the arguments of ``flower-superlink``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from hmac import compare_digest
from importlib import import_module
from pathlib import Path
from typing import Any

LARGEST = 2**25
"""Bytes of a request at most; what is larger travels in parts of 5 MiB."""


class Bounded:
    """Refuses requests that are too large, or that don't say how large they are, unread.

    Args:
        app: The ASGI application that gets the others.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        from starlette.responses import PlainTextResponse

        app = self.app
        if scope["type"] == "http" and scope["method"] == "POST":
            length = dict(scope["headers"]).get(b"content-length", b"")
            if not length.isdigit() or int(length) > LARGEST:
                app = PlainTextResponse(f"more than {LARGEST} bytes", 413)
        await app(scope, receive, send)


def main(secret: Path, arguments: Sequence[str]) -> None:
    """Run a SuperLink.

    Args:
        secret: The file of the secret.
        arguments: Arguments of ``flower-superlink``.
    """
    from flwr.common.constant import ACCESS_TOKEN_KEY
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
    from starlette.middleware import Middleware

    known = secret.read_bytes()

    class Starter(NoOpControlAuthnPlugin):
        """Takes orders from who has the secret."""

        def validate_tokens_in_metadata(self, metadata: Sequence[tuple[str, Any]]) -> Any:
            """Compare the token with the secret."""
            token = str(dict(metadata).get(ACCESS_TOKEN_KEY, ""))
            if not compare_digest(token.encode(), known):
                return False, None
            return super().validate_tokens_in_metadata(metadata)

    flower: Any = import_module("flwr.superlink.cli.flower_superlink")
    flower.load_control_authn_plugin = Starter
    link: Any = import_module("flwr.superlink.main")
    link.extensions.get_middleware = lambda: [Middleware(Bounded)]
    # The same secret for tasks, which are no orders in Flower's words.
    sys.argv = ["flower-superlink", "--superexec-auth-secret-file", str(secret), *arguments]
    flower.flower_superlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
