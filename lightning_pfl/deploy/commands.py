"""``lightning-pfl deploy init|server|client|status|export``."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.deploy import recipe
from lightning_pfl.deploy.keys import make_keys
from lightning_pfl.deploy.loop import LoopLine
from lightning_pfl.deploy.node import Node, RefusedError
from lightning_pfl.deploy.packet import Packet
from lightning_pfl.deploy.processes import join_over_flower, require_flower, serve_over_flower
from lightning_pfl.deploy.server import serve
from lightning_pfl.deploy.settings import (
    ClientSettings,
    make_node,
    read_client,
    read_server,
    recipe_of,
    split_address,
)

FAILURES = (ValueError, OSError, RuntimeError, ModuleNotFoundError, MisconfigurationException)
"""What ends a command with a sentence."""


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def main(arguments: Sequence[str]) -> None:
    """Run a command; what can't work ends with a sentence and status 2.

    Args:
        arguments: The words after ``lightning-pfl deploy``.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name in ("httpx", "alembic"):  # they tell of each look for messages, and of a database
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        given.run(given)
    except FAILURES as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-pfl deploy", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, text: str, run: object) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    init = add("init", "Write the files of a deployment: a folder for each machine.", init_command)
    init.add_argument("folder", type=Path)
    init.add_argument("--recipe", type=Path, required=True, help="the recipe that simulates")
    init.add_argument("--nodes", nargs="+", required=True, help="names of the nodes")
    init.add_argument(
        "--address", required=True, help="HOST:PORT under which nodes reach the server"
    )
    init.add_argument("--insecure", action="store_true", help="without TLS, on 127.0.0.1 alone")
    server = add("server", "Run the server; a run that was interrupted goes on.", server_command)
    client = add("client", "Run a node.", client_command)
    client.add_argument(
        "--what-is-sent",
        action="store_true",
        help="print every field that would leave this node, and its bytes, and end",
    )
    status = add("status", "Show who is here, and how far the run is.", status_command)
    export = add("export", "Write a client's personal model, on its node.", export_command)
    export.add_argument("--client", help="which; may be left out for a node with one client")
    export.add_argument("--output", type=Path, required=True, help="the file, a state_dict")
    for command, default in (
        (server, "server.yaml"),
        (client, "client.yaml"),
        (status, "server.yaml"),
        (export, "client.yaml"),
    ):
        command.add_argument("--config", type=Path, default=Path(default))
    return parser


def init_command(given: argparse.Namespace) -> None:
    """Write a folder for the server and one for each node."""
    host, port = split_address(given.address)
    folder: Path = given.folder
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"Expected a new folder, but got folder={str(folder)!r}, which has files. Take another "
            "one: keys that are in use aren't overwritten."
        )
    recipe.load(given.recipe)
    nodes = {name: folder / name for name in given.nodes}
    if len(nodes) != len(given.nodes) or not all(name.replace("-", "").isalnum() for name in nodes):
        raise ValueError(
            f"Expected `nodes` to be different names of letters, digits and hyphens, but got "
            f"nodes={given.nodes!r}. Name them hospital-a, hospital-b, say."
        )
    if "server" in nodes:
        raise ValueError(
            f"Expected `nodes` to be other names than that of the server's folder, but got "
            f"nodes={given.nodes!r}. Name that node differently."
        )
    keys = "keys: null" if given.insecure else "keys: keys"
    if not given.insecure:
        require_flower()
    for path in (folder / "server", *nodes.values()):
        path.mkdir(parents=True, mode=0o700)
    if not given.insecure:
        keyed = {name: path / "keys" for name, path in nodes.items()}
        make_keys(folder / "server" / "keys", keyed, list(dict.fromkeys([host, "127.0.0.1"])))
    for path in (folder / "server", *nodes.values()):
        shutil.copyfile(given.recipe, path / "recipe.yaml")
    listens = f"127.0.0.1:{port}" if given.insecure else f"0.0.0.0:{port}"
    (folder / "server" / "server.yaml").write_text(
        f"recipe: recipe.yaml\nnodes: {json.dumps(list(nodes))}\naddress: {listens}\n"
        f"folder: run\n{keys}\ntimeout: 3600        # seconds that a round waits for an answer\n"
    )
    data = recipe.load(given.recipe).get("data", {})
    for name, path in nodes.items():
        (path / "client.yaml").write_text(
            f"name: {json.dumps(name)}\nrecipe: recipe.yaml\nserver: {given.address}\n"
            f"folder: state\n{keys}\n"
            f"data: {json.dumps(data)}     # put this node's data here\n"
        )
    say(f"The server: {folder / 'server'}. Start it there with `lightning-pfl deploy server`.")
    for name, path in nodes.items():
        say(
            f"{name}: {path}. Bring the folder there, over a channel that you trust, put the data "
            "into client.yaml, and start `lightning-pfl deploy client`."
        )


def server_command(given: argparse.Namespace) -> None:
    """Run the server."""
    serve_over_flower(read_server(given.config), say)


def client_command(given: argparse.Namespace) -> None:
    """Run a node, or print what it would send."""
    settings = read_client(given.config)
    if given.what_is_sent:
        print_what_is_sent(settings)
    else:
        join_over_flower(settings, make_node(settings), say)


def print_what_is_sent(settings: ClientSettings) -> None:
    """Rehearse a round with this node alone, and print what it has sent, field by field."""
    found = recipe_of(settings)
    flags = {
        **found.get("trainer", {}),
        "max_epochs": 1,
        "limit_train_batches": 1,
        "limit_val_batches": 1,
        "logger": False,
        "callbacks": [],
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        node = Node(
            {**found, "trainer": flags},
            folder,
            settings.clients,
            settings.share,
            settings.privacy,
        )
        line = LoopLine({1: node})
        serve(
            {**found, "trainer": flags}, line, Path(folder) / "server", settings.clients, 1, pause=0
        )
    answers: dict[str, tuple[int, Packet]] = {}
    for _, _, data in line.sent:
        packet = Packet.from_bytes(data)
        answers[packet.kind] = (len(data), packet)
    say(f"\nWhat {settings.name} sends for {len(settings.clients)} of its clients:")
    often = defaultdict(lambda: "once", trained="a round", evaluated="an evaluation")
    for kind, (size, packet) in answers.items():
        say(f"{kind} ({often[kind]}, {size} bytes)")
        for name, value in _fields(packet.meta):
            text = json.dumps(value)
            say(f"  {name:<40} {len(text):>10} bytes  {text}")
        for path, array in packet.arrays.items():
            say(f"  {path:<40} {array.nbytes:>10} bytes  {packet.dtype(path)} {array.shape}")


def _fields(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Walk over plain values, also those in others, with their paths."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{prefix}{name.strip('/') or 'personal'}/")
        else:
            yield f"{prefix}{name}", value


def status_command(given: argparse.Namespace) -> None:
    """Print the status of a server."""
    path = read_server(given.config).folder / "status.json"
    if not path.is_file():
        say("No round is finished yet.")
        return
    status = json.loads(path.read_text())
    say(f"{status['state']}: {status['rounds']} of {status['of']} rounds")
    for name, client in status["clients"].items():
        here = "here" if client["here"] else "away"
        left = f", left out: {client['left_out']}" if client["left_out"] else ""
        last = client["last_round"]  # counted from 0; -1 before the first
        took = f"took part in round {last + 1}" if last >= 0 else "took no part yet"
        say(f"  {name:<20} {here}, {client['samples']} samples, {took}{left}")


def export_command(given: argparse.Namespace) -> None:
    """Write a personal model."""
    settings = read_client(given.config)
    client = given.client or settings.clients[0]
    if client not in settings.clients:
        raise ValueError(
            f"Expected `client` to be one of {settings.clients}, but got client={client!r}. Use "
            "one of these."
        )
    found = sorted(settings.folder.glob("*/latest.bin"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise RefusedError("Expected a run that has finished or evaluated, but there is none yet.")
    state = make_node(settings).personal_model(client, found[-1].parent.name)
    torch.save(state, given.output)
    say(f"The personal model of {client}: {given.output}.")
