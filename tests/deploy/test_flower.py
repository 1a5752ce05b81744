"""Flower's messages without its network."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pfl.deploy.flower import FlowerLine, answer_with, bounded, unless_lost
from lightning_pfl.deploy.node import Node
from lightning_pfl.deploy.nodes import Reply
from lightning_pfl.deploy.packet import Packet, PacketError
from lightning_pfl.deploy.server import serve
from tests.deploy.setting import differences, make_nodes, recipe_of, simulate

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Flower needs Python 3.11")


class Grid:
    """Flower's network in one process: a message that is pushed is answered at once.

    Args:
        nodes: Who answers, by number.
    """

    def __init__(self, nodes: Mapping[int, Node]) -> None:
        self.nodes = nodes
        self.replies: dict[str, Any] = {}

    def get_nodes(self) -> list[Any]:
        """List the nodes, and one that is away."""
        nodes = [*((node, "online") for node in self.nodes), (1, "offline")]
        return [
            SimpleNamespace(node_id=node, name="", last_activated_at="", status=status)
            for node, status in nodes
        ]

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        """Let the nodes answer."""
        numbers = []
        for message in messages:
            node, number = message.metadata.dst_node_id, str(len(self.replies))
            message.metadata.__dict__["_message_id"] = number
            self.replies[number] = answer_with(self.nodes[node].handle)(message)
            numbers.append(number)
        return numbers

    def pull_messages(self, numbers: Iterable[str]) -> list[Any]:
        """Take answers."""
        return [self.replies.pop(number) for number in numbers if number in self.replies]


@pytest.mark.usefixtures("a_task")
def test_two_rounds_in_flowers_messages_equal_the_simulation(tmp_path: Path) -> None:
    recipe = recipe_of("FedRep", rounds=2, participation=1.0, check_val_every_n_epoch=2)
    simulated = simulate(recipe, tmp_path)
    nodes = make_nodes(recipe, tmp_path)
    line = FlowerLine(lambda: Grid(nodes), lambda: [])
    names = sorted(name for node in nodes.values() for name in node.clients)
    trainer: Any = serve(recipe, line, tmp_path / "server", names, timeout=1, pause=0)
    ours, theirs = simulated.strategy.federation, trainer.strategy.federation
    assert differences(ours, theirs, nodes) == []
    assert all(node.finished for node in nodes.values())
    for node in nodes.values():  # a server that greets goes on
        node.handle(Packet("hello").to_bytes())
        assert not node.finished


def test_an_answer_that_cannot_be_read_is_one_and_tells_no_other_number() -> None:
    class Odd(Grid):
        def pull_messages(self, numbers: Iterable[str]) -> list[Any]:
            (number,) = numbers
            if number == "1":
                raise KeyError("Evil")  # Flower's, of an object of another type
            metadata = SimpleNamespace(reply_to_message_id="7")
            error = SimpleNamespace(reason="gone", code=0)
            odd = SimpleNamespace(metadata=metadata, has_error=lambda: True, error=error)
            return [odd] if number == "2" else []

    line = FlowerLine(lambda: Odd({}), lambda: [])
    found = line.replies(["0", "1", "2"], 100)
    assert found == [Reply("1", b""), Reply("2", None, "gone")]


@pytest.mark.parametrize(("parts", "fits"), [(17, True), (18, False)])
def test_an_answer_of_too_many_objects_is_not_pulled(parts: int, fits: bool) -> None:
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.proto.runtime_pb2 import PullAppMessagesResponse

    tree = ObjectTree(object_id="x", children=[ObjectTree(object_id=str(k)) for k in range(parts)])
    response = PullAppMessagesResponse(message_object_trees=[tree])
    pull = bounded(lambda request: response, SimpleNamespace(most_objects=18))
    if fits:
        assert pull(None) is response
    else:
        with pytest.raises(PacketError, match="more than 18 objects"):
            pull(None)


@pytest.mark.parametrize(
    ("there", "others", "asked"),
    [([1], [], 1), ([0], [0], 1), ([0, 1], [1], 2), ([0, 0], [1], None)],
)
def test_a_part_that_is_missing_once_another_message_is_there_is_lost(
    there: list[int], others: list[int], asked: int | None
) -> None:
    """A part may come between the looks for it and for another message."""
    from flwr.proto.message_pb2 import PullObjectResponse

    found, another = iter(there), iter(others)
    pulls: list[Any] = []

    def pull(request: Any) -> Any:
        pulls.append(PullObjectResponse(object_found=True, object_available=bool(next(found))))
        return pulls[-1]

    pull_unless_lost = unless_lost(pull, lambda: bool(next(another)))
    if asked is None:
        with pytest.raises(PacketError, match="message has lost its content"):
            pull_unless_lost(None)
        return
    assert pull_unless_lost(None) is pulls[-1]
    assert len(pulls) == asked


@pytest.mark.usefixtures("a_task")
def test_a_network_that_is_gone_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from httpx import ConnectError

    monkeypatch.setattr("time.sleep", lambda _: None)
    opened: list[Any] = []

    class Gone:
        def get_nodes(self) -> list[Any]:
            raise ConnectError("gone")

    def connect() -> Any:
        opened.append(Gone() if len(opened) < 1 else Grid({}))
        return opened[-1]

    looks = iter([[], [], ["superlink"]])
    line = FlowerLine(connect, lambda: next(looks))
    assert line.present() == []
    assert len(opened) == 2
    line = FlowerLine(Gone, lambda: [])
    with pytest.raises(RuntimeError, match="Expected the SuperLink to answer, but gone"):
        line.present()


@pytest.mark.usefixtures("a_task")
def test_a_network_that_is_slow_to_open_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from httpx import ReadTimeout

    monkeypatch.setattr("time.sleep", lambda _: None)
    first, later = Grid({}), Grid({})
    found = iter([None, first, None, later])

    def connect() -> Any:
        if (grid := next(found)) is None:
            raise ReadTimeout("slow")
        return grid

    looks = iter([[], [], ["superlink"], []])
    line = FlowerLine(connect, lambda: next(looks))
    assert line.grid is first
    assert line.present() == []
    assert line.grid is later
