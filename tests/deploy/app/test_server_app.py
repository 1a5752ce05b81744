"""Flower's messages and app, without its network: both apps, and workers at sockets."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pfl.deploy.node import Node
from lightning_pfl.deploy.worker import work
from tests.deploy.setting import deploy, differences, make_nodes, recipe_of, simulate

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Flower needs Python 3.11")
APP = "lightning_pfl.deploy.app"


class Grid:
    """Flower's network in one process: a message that is pushed is answered at once.

    Args:
        sockets: Where the worker of each node listens.
    """

    def __init__(self, sockets: Mapping[int, Path]) -> None:
        self.sockets = sockets
        self.replies: dict[str, Any] = {}

    def get_nodes(self) -> list[Any]:
        """List the nodes, and one that is away."""
        nodes = [*((node, "online") for node in self.sockets), (1, "offline")]
        return [
            SimpleNamespace(node_id=node, name="", last_activated_at="", status=status)
            for node, status in nodes
        ]

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        """Let the client app answer."""
        from flwr.app import Context, RecordDict

        numbers = []
        for message in messages:
            node, number = message.metadata.dst_node_id, str(len(self.replies))
            message.metadata.__dict__["_message_id"] = number
            config: Any = {"socket": str(self.sockets[node])}
            context = Context(1, node, config, RecordDict(), {})
            self.replies[number] = import_module(f"{APP}.client_app").app(message, context)
            numbers.append(number)
        return numbers

    def pull_messages(self, numbers: Iterable[str]) -> list[Any]:
        """Take answers."""
        return [self.replies.pop(number) for number in numbers if number in self.replies]


@pytest.fixture
def a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process one of Flower's tasks, in which messages can be made."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.mark.usefixtures("a_task")
def test_two_rounds_over_flowers_app_equal_the_simulation(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    recipe = recipe_of("FedRep", rounds=2, participation=1.0, check_val_every_n_epoch=2)
    simulated = simulate(recipe, tmp_path)
    nodes: dict[int, Node] = make_nodes(recipe, tmp_path)
    # A path of a socket may have a hundred characters.
    short = tmp_path_factory.mktemp("s")
    sockets = {number: short / str(number) for number in nodes}
    for number, node in nodes.items():
        given = (node, sockets[number], tmp_path / f"finished-{number}")
        threading.Thread(target=work, args=given, daemon=True).start()
    line = import_module(f"{APP}.server_app").FlowerLine(Grid(sockets), starter=0)
    line.nodes = nodes
    trainer, _ = deploy(recipe, tmp_path, line)
    ours, theirs = simulated.strategy.federation, trainer.strategy.federation
    assert differences(ours, theirs, nodes) == []
    assert sorted(path.name for path in tmp_path.glob("finished-*")) == [
        f"finished-{number}" for number in nodes
    ]
