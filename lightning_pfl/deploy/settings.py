"""The two files of a deployment: ``server.yaml`` and, on every node, ``client.yaml``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_pfl.deploy import recipe
from lightning_pfl.deploy.node import Node
from lightning_pfl.deploy.secure import FEWEST


@dataclass(frozen=True)
class ServerSettings:
    """The settings of ``server.yaml``. Paths are relative to the file.

    Args:
        recipe: The recipe; its ``data`` aren't read.
        nodes: The nodes, and the clients of each; a list where every node is one client.
        address: Where the server listens, as ``HOST:PORT``.
        folder: Where checkpoints, logs and the status go.
        keys: The folder of certificates and keys; null for a deployment without TLS, which listens
            on 127.0.0.1 alone.
        timeout: Seconds that a round waits for an answer, before it goes on without the client;
            null for ever.
        max_samples: Largest number of samples that a client may report.
        secure_aggregation: Largest absolute value of a model's entry, with which the server learns
            the mean of the nodes' models and no model; null to send models as they are.
    """

    recipe: Path
    nodes: dict[str, list[str]]
    address: str = "127.0.0.1:8000"
    folder: Path = Path("run")
    keys: Path | None = Path("keys")
    timeout: float | None = 3600.0
    max_samples: int = 10**7
    secure_aggregation: float | None = None

    @property
    def owners(self) -> dict[str, str]:
        """The node that may speak for each client."""
        return {client: node for node, clients in self.nodes.items() for client in clients}


@dataclass(frozen=True)
class ClientSettings:
    """The settings of ``client.yaml``. Paths are relative to the file.

    Args:
        name: The node's name, as the server knows it.
        recipe: The recipe, the same as the server's.
        server: Where the server listens, as ``HOST:PORT``.
        data: The node's data module, in the place of the recipe's: ``class_path`` and
            ``init_args``.
        clients: The clients of this node; the node itself where there is one.
        folder: Where the clients' states go.
        keys: The folder of the certificate and this node's key; null for a deployment without TLS.
        share: Names of the logged values that may leave this node; null for all of them.
        privacy: Noise for uploads: ``clipping_norm``, ``sensitivity``, ``epsilon`` and ``delta`` of
            Flower's ``LocalDpMod``; null for no noise.
        secure_aggregation: Whether the node trains for a server with ``secure_aggregation`` alone.
    """

    name: str
    recipe: Path
    server: str = "127.0.0.1:8000"
    data: dict[str, Any] | None = None
    clients: list[str] = field(default_factory=list)
    folder: Path = Path("state")
    keys: Path | None = Path("keys")
    share: list[str] | None = None
    privacy: dict[str, float] | None = None
    secure_aggregation: bool = False


def read_server(path: str | Path) -> ServerSettings:
    """Read ``server.yaml``.

    Raises:
        ValueError: If a setting is unknown, missing or of another form.
    """
    found = _read(path, ServerSettings)
    nodes = found.get("nodes")
    if isinstance(nodes, list):
        nodes = {name: [name] for name in nodes}
    if not isinstance(nodes, dict) or not nodes or not all(map(_is_names, nodes.values())):
        raise ValueError(
            f"Expected `nodes` to be a list of names, or the clients of each node by its name, but "
            f"got nodes={nodes!r}. Write `nodes: [hospital-a, hospital-b]`."
        )
    clients = [client for each in nodes.values() for client in each]
    if len(set(clients)) != len(clients):
        raise ValueError(
            f"Expected every client on one node, but got nodes={nodes!r}. Give clients other names."
        )
    settings = ServerSettings(**{**found, "nodes": nodes})
    _check_number("timeout", settings.timeout, (int, float), "seconds above 0, or null", 3600)
    _check_number("max_samples", settings.max_samples, int, "a number of samples above 0", 10**7)
    secure = settings.secure_aggregation
    _check_number("secure_aggregation", secure, (int, float), "a number above 0, or null", 8)
    if secure is not None and settings.keys is None:
        raise ValueError(
            "Expected `keys` for `secure_aggregation`, as the server must know the nodes, but got "
            "keys=None. Run `lightning-pfl deploy init`, or remove `secure_aggregation`."
        )
    if secure is not None and len(nodes) < FEWEST:
        raise ValueError(
            f"Expected at least {FEWEST} nodes for `secure_aggregation`, but got {len(nodes)}: of "
            "two, each would know the other's model from the mean. Add nodes, or remove it."
        )
    host, _ = split_address(settings.address)
    if settings.keys is None and host not in ("127.0.0.1", "localhost"):
        raise ValueError(
            f"Expected `keys` for a server that others can reach, but got keys=None and "
            f"address={settings.address!r}. Run `lightning-pfl deploy init`, or listen on "
            "127.0.0.1."
        )
    return settings


def read_client(path: str | Path) -> ClientSettings:
    """Read ``client.yaml``.

    Raises:
        ValueError: If a setting is unknown, missing or of another form.
    """
    found = _read(path, ClientSettings)
    settings = ClientSettings(**{"clients": [found.get("name", "")], **found})
    for name, value in (("clients", settings.clients), ("share", settings.share)):
        nothing = name == "share" and value in (None, [])
        if not nothing and not _is_names(value):
            raise ValueError(
                f"Expected `{name}` to be a list of names, but got {name}={value!r}. Write "
                f"`{name}: [a, b]`."
            )
    if len(set(settings.clients)) != len(settings.clients):
        raise ValueError(
            f"Expected `clients` to be different names, but got clients={settings.clients!r}. Name "
            "each client once."
        )
    split_address(settings.server)
    return settings


def split_address(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT``.

    Raises:
        ValueError: If it is of another form.
    """
    host, _, port = str(address).rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"Expected an address to be HOST:PORT, but got {address!r}. Write "
            "`server.example.org:8000`, say."
        )
    return host, int(port)


def _check_number(name: str, value: Any, kind: Any, what: str, example: int) -> None:
    if value is None and name in ("timeout", "secure_aggregation"):
        return
    if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
        raise ValueError(
            f"Expected `{name}` to be {what}, but got {name}={value!r}. Write `{name}: {example}`."
        )


def _is_names(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(n, str) for n in value)


def _read(path: str | Path, kind: type[Any]) -> dict[str, Any]:
    path = Path(path).resolve()
    found, known = recipe.load(path), {each.name: each for each in fields(kind)}
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"Expected {path.name} to have the settings {', '.join(known)}, but got {name!r}. "
                + (f"Did you mean {near[0]!r}?" if near else "Remove it.")
            )
    for name in ("recipe", "nodes") if kind is ServerSettings else ("recipe", "name"):
        if name not in found:
            raise ValueError(
                f"Expected {path.name} to have the setting `{name}`, but it isn't there. Add it."
            )
    for name in ("recipe", "folder", "keys"):
        value = found.get(name, known[name].default)
        found[name] = None if value is None else path.parent / str(value)
    return found


def recipe_of(settings: ClientSettings) -> Mapping[str, Any]:
    """Read a node's recipe, with its own data."""
    found = recipe.load(settings.recipe)
    return found if settings.data is None else {**found, "data": settings.data}


def make_node(settings: ClientSettings) -> Node:
    """Make the node of ``client.yaml``."""
    found = recipe_of(settings)
    return Node(
        found,
        settings.folder,
        settings.clients,
        settings.share,
        settings.privacy,
        settings.secure_aggregation,
    )
