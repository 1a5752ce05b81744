"""Messages over Flower: the server's run on a SuperLink, and a node's answers to a SuperNode.

Flower would start a program for every message, with code that comes from the server. Here a node's
own process takes the messages, so a node runs nothing that it is sent, and no message waits for a
program to start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_pfl.deploy.nodes import Presence, Reply
from lightning_pfl.deploy.packet import PacketError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flwr.app import Message

APP = Path(__file__).parent / "app"
"""The app that a run of Flower needs: a name without code."""
OBJECTS = 16
"""Number of Flower's objects around the arrays of an answer, at most."""
TRIES = 5
"""Number of times that a SuperLink is asked that runs and doesn't answer, a second apart."""

Found = TypeVar("Found")

log = logging.getLogger(__name__)


class Tasks:
    """The tasks that a SuperLink or a SuperNode has for this process.

    Args:
        address: Where it listens, as ``HOST:PORT``.
        kind: ``"flwr-serverapp"`` or ``"flwr-clientapp"``.
        secret: What it knows this process by.
        certificate: The authority's certificate; None without TLS.
    """

    def __init__(
        self, address: str, kind: str, secret: bytes, certificate: Path | None = None
    ) -> None:
        from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

        self.address, self.kind = address, kind
        self.certificate = None if certificate is None else certificate.read_bytes()
        self._lock = Lock()
        self._next: tuple[int, str] | None = None  # the task after the one that is answered
        protected = {"/flwr.proto.Runtime/AcquireTask"}
        self._signed = self._client(
            SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=protected)
        )

    def _client(self, who: Any) -> Any:
        """Make a client that proves who it is; it tries each request once."""
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient

        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=self.certificate is None,
            root_certificates=self.certificate,
            interceptors=[RuntimeVersionHttpInterceptor(component_name=self.kind), who],
        )

    def acquire(self) -> tuple[int, str] | None:
        """Take a task: the number of its run, and its token; None if there is none.

        Raises:
            httpx.HTTPError: If who has the tasks can't be reached.
        """
        from flwr.proto.runtime_pb2 import AcquireTaskRequest

        found = self._signed.AcquireTask(AcquireTaskRequest(supported_task_types=[self.kind]))
        return (found.task.run_id, found.token) if found.token else None

    def close(self) -> None:
        """Close the connection."""
        self._signed.close()

    def answer(self, handle: Callable[[Message], Message]) -> bool:
        """Answer a message of a SuperNode, if there is one.

        Args:
            handle: Makes the answer.

        Returns:
            Whether there was one.

        Raises:
            httpx.HTTPError: If the SuperNode can't be reached.
        """
        from flwr.common.constant import SubStatus
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
        from flwr.supernode.runtime.run_clientapp import (
            pull_task_input,
            push_message,
            push_task_output,
        )

        task, self._next = self._next or self.acquire(), None
        if task is None:
            return False
        with closing(self._client(RuntimeTokenHttpInterceptor(task[1]))) as client, alive(client):
            client.PullObject = unless_lost(client.PullObject, self._has_another)
            message, context, *_ = pull_task_input(client)
            push_message(client, handle(message), context)
            push_task_output(client, context, SubStatus.COMPLETED, "")
        return True

    def _has_another(self) -> bool:
        """Whether there is a task after the one that is answered."""
        with self._lock:
            self._next = self._next or self.acquire()
            return self._next is not None


@contextmanager
def alive(client: Any) -> Iterator[None]:
    """Say that a task is being worked on, until the context ends."""
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest
    from flwr.supercore.heartbeat import HeartbeatSender
    from httpx import HTTPError

    def beat() -> bool:
        with suppress(HTTPError):  # who can't be reached is noticed by the next request
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        return True

    sender = HeartbeatSender(beat)
    sender.start()
    try:
        yield
    finally:
        sender.stop()


def read(message: Message) -> bytes:
    """Take the bytes out of a message; none if it holds others than these."""
    records = message.content.array_records
    if "packet" not in records or "packet" not in records["packet"]:
        return b""  # no format that is read
    data: bytes = records["packet"]["packet"].data
    return data


def content(data: bytes) -> Any:
    """Make the content of a message that carries bytes."""
    from flwr.app import Array, ArrayRecord, RecordDict

    packet = Array("uint8", (len(data),), "lightning_pfl.packet", data)
    return RecordDict({"packet": ArrayRecord({"packet": packet})})


def answer_with(handle: Callable[[bytes], bytes]) -> Callable[[Message], Message]:
    """Make a function from bytes to bytes one from messages to messages."""
    from flwr.app import Message

    return lambda message: Message(content(handle(read(message))), reply_to=message)


def unless_lost(
    pull: Callable[[Any], Any], has_another: Callable[[], bool]
) -> Callable[[Any], Any]:
    """Refuse to wait for a part of a message that can't come any more, as its sender was killed.

    A SuperNode takes a message whole before the next one, so that parts which are missing once it
    has another are lost. Flower would ask for them for two hours.

    Args:
        pull: Pulls a part of a message.
        has_another: Whether the SuperNode has another message.

    Returns:
        A function like ``pull``, which raises PacketError for such a part.
    """

    def pull_unless_lost(request: Any) -> Any:
        def misses(response: Any) -> bool:
            return response.object_found and not response.object_available

        response = pull(request)
        if misses(response) and has_another() and misses(response := pull(request)):
            raise PacketError("message has lost its content")
        return response

    return pull_unless_lost


class Orders:
    """The orders to a SuperLink: whose keys are let in, and what is run.

    Args:
        address: Where it listens, as ``HOST:PORT``.
        secret: What it takes orders with.
        certificate: The authority's certificate; None without TLS.
    """

    def __init__(self, address: str, secret: bytes, certificate: Path | None) -> None:
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        self._client = ControlHttpClient.from_server_address(
            server_address=address,
            insecure=certificate is None,
            root_certificates=None if certificate is None else certificate.read_bytes(),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="flwr CLI"),
                _Bearer(secret),
            ],
        )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def register(self, name: str, public: Path) -> None:
        """Let in who has the private key of a node; a key that is known already is let in."""
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key
        from flwr.proto.control_pb2 import RegisterNodeRequest
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes
        from httpx import HTTPStatusError

        loaded: Any = load_ssh_public_key(public.read_bytes())
        key = public_key_to_bytes(loaded)
        try:
            self._client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
        except HTTPStatusError as error:
            if "already" not in error.response.text:
                raise

    def stop_runs(self) -> None:
        """Stop the runs of earlier starts.

        One that was killed may have announced a message and not sent it. A SuperNode waits for it
        as long as that run lasts, and takes no other.
        """
        from flwr.common.constant import Status
        from flwr.proto.control_pb2 import ListRunsRequest, StopRunRequest

        listed = self._client.ListRuns(ListRunsRequest())
        for number, run in listed.run_dict.items():
            if run.status.status != Status.FINISHED:
                self._client.StopRun(StopRunRequest(run_id=number))

    def start_run(self) -> int:
        """Start a run, in which this process speaks for the server; returns its number."""
        from flwr.cli.build import build_fab_from_disk
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.proto.fab_pb2 import Fab

        fab = Fab(content=build_fab_from_disk(APP))
        return int(self._client.StartRun(StartRunRequest(fab=fab)).run_id)


class _Bearer:
    """Adds a secret to every request."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret.decode()

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        context.request.headers["authorization"] = f"Bearer {self.secret}"
        return call_next(context)


class FlowerLine:
    """Brings bytes to SuperNodes and back.

    Args:
        connect: Makes Flower's network: called first of all, when a SuperLink is back that had
            ended, and again while it fails.
        look: Called at each look at the network; starts a SuperLink again that has ended.
    """

    def __init__(self, connect: Callable[[], Any], look: Callable[[], object]) -> None:
        self.connect, self.look = connect, look
        self.grid: Any = None
        self._ask(lambda grid: grid)

    def _ask(self, what: Callable[[Any], Found]) -> Found:
        """Ask the network, which may have to come back."""
        from httpx import HTTPError

        for last in (*[False] * TRIES, True):
            try:
                if self.look():
                    self.grid = None
                if self.grid is None:
                    self.grid = self.connect()
                return what(self.grid)
            except HTTPError as error:
                if last:
                    raise RuntimeError(
                        f"Expected the SuperLink to answer, but {error}. See flower/superlink.log "
                        "in the server's folder."
                    ) from error
                time.sleep(1)
        raise AssertionError

    def present(self) -> Sequence[Presence]:
        """List the SuperNodes that are online."""
        return [
            Presence(node.node_id, node.name, node.last_activated_at)
            for node in self._ask(lambda grid: grid.get_nodes())
            if node.status == "online"
        ]

    def send(self, node: int, kind: str, data: bytes) -> str:
        """Push a message."""
        from flwr.app import Message

        known = kind if kind in ("train", "evaluate") else "query"  # Flower's kinds of messages

        def push(grid: Any) -> str:
            (question,) = grid.push_messages([Message(content(data), node, known)])
            return str(question)

        return self._ask(push)

    def replies(self, questions: Sequence[str], limit: int) -> Sequence[Reply]:
        """Pull the answers that have come, each for itself: one that can't be read is one."""
        from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as CHUNK

        def pull(grid: Any, question: str) -> list[Reply]:
            from httpx import HTTPError

            grid.most_objects = OBJECTS + limit // CHUNK
            try:
                # An answer says what it answers, too, which isn't believed.
                return [_read_reply(question, found) for found in grid.pull_messages([question])]
            except HTTPError:
                raise
            except Exception as error:  # of whatever a node has sent
                log.warning("An answer can't be read: %r.", error)
                return [Reply(question, b"")]

        return [
            reply for question in questions for reply in self._ask(partial(pull, question=question))
        ]


def _read_reply(question: str, message: Message) -> Reply:
    if message.has_error():
        return Reply(question, error=message.error.reason or f"error {message.error.code}")
    return Reply(question, read(message))


def bounded(pull: Callable[[Any], Any], grid: Any) -> Callable[[Any], Any]:
    """Refuse answers of too many objects before these are pulled; a SuperLink bounds each of them.

    Args:
        pull: Pulls answers without their objects.
        grid: Flower's network; ``most_objects`` is the bound.

    Returns:
        A function like ``pull``, which raises PacketError for such an answer.
    """
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    def pull_bounded(request: Any) -> Any:
        response, most = pull(request), grid.most_objects
        for tree in response.message_object_trees:
            if len([*islice(iterate_object_tree(tree), most + 1)]) > most:
                raise PacketError(f"answer has more than {most} objects")
        return response

    return pull_bounded


def open_grid(stack: ExitStack, tasks: Tasks, run: int) -> Any:
    """Open the network of a run, in which this process speaks for the server.

    Args:
        stack: Says that the server is there, until it ends.
        tasks: The tasks of the SuperLink.
        run: The number of the run.
    """
    from flwr.common.serde import run_from_proto
    from flwr.proto.runtime_pb2 import PullTaskInputRequest
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.grid import HttpGrid

    while (task := tasks.acquire()) is None or task[0] != run:  # one of an earlier start
        time.sleep(0.1)
    grid: Any = HttpGrid(tasks.address, tasks.certificate is None, tasks.certificate, token=task[1])
    grid._retry_invoker = None  # it would wait for a SuperLink that this process must start again
    client: Any = grid._runtime_client
    client.PullMessages = bounded(client.PullMessages, grid)
    stack.callback(grid.close)
    found = client.PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id, TaskIdentity.run_id = found.task_id, found.run.run_id
    TaskIdentity.node_id = found.context.node_id
    grid.set_run(run_from_proto(found.run))
    stack.enter_context(alive(client))
    return grid
