"""A server with its SuperLink, and a node with its SuperNode."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from lightning_pfl.core.files import FolderLock
from lightning_pfl.deploy import recipe
from lightning_pfl.deploy.flower import FlowerLine, Orders, Tasks, answer_with, open_grid
from lightning_pfl.deploy.node import Node
from lightning_pfl.deploy.server import serve
from lightning_pfl.deploy.settings import ClientSettings, ServerSettings, split_address

SUPERLINK = Path(__file__).parent / "superlink.py"
"""The program that runs Flower's SuperLink."""
LOOK = 0.2
"""Seconds between two looks for messages."""
AGAIN = 5.0
"""Seconds before a process that ended is started again. Flower lets a node that was killed back in
after two missed heartbeats, up to a minute."""
STARTS = 5
"""Starts of a SuperLink at most that end before it listens."""
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",  # no telemetry of a deployment
    "FLWR_DISABLE_UPDATE_CHECK": "1",
}
WRONG_SETTINGS = 2
"""The status with which programs end that can't work with their arguments."""
SENT = b"Sent successfully"
"""What a SuperNode writes once the SuperLink has all of an answer."""
SENDING = 600.0
"""Seconds that a node stays after the end at most, until its SuperNode has sent its last answer."""
STAY = 10.0
"""Seconds that it stays then, until the server looks: a SuperLink drops answers of who has left."""

log = logging.getLogger(__name__)


def require_flower() -> None:
    """Require that Flower is installed.

    Raises:
        ModuleNotFoundError: If it isn't.
    """
    if find_spec("flwr") is None:
        raise ModuleNotFoundError(
            "Expected Flower, on which deployments run, but it isn't installed. Run "
            "`pip install 'lightning-pfl[deploy]'` with Python 3.11 or later."
        )


def program(name: str) -> str:
    """Find a program of this Python's environment."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.is_file() else shutil.which(name) or name


def search_path() -> str:
    """Return PATH with this Python's environment first: Flower's programs start each other."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def free_port() -> int:
    """Find a port on which nothing listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def end_with_parent(how: signal.Signals = signal.SIGTERM) -> None:
    """Let this process end when its parent is killed: an orphan would keep ports and locks.

    Args:
        how: The signal by which it ends.
    """
    ctypes.CDLL(None).prctl(1, how)  # 1 is PR_SET_PDEATHSIG


class Children:
    """Processes that are started again when they end, and stopped when the context ends.

    Args:
        folder: Where their output goes, a file for each.
        say: Called with each progress message, a sentence.
        why: Says why a process has ended, from its status and its output; empty if it can't.
    """

    def __init__(
        self,
        folder: Path,
        say: Callable[[str], None],
        why: Callable[[int, str], str] = lambda *_: "",
    ) -> None:
        self.folder, self.say, self.why = folder, say, why
        self._commands: dict[str, tuple[Sequence[str], dict[str, str]]] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._due: dict[str, float] = {}
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def __enter__(self) -> Self:
        # `kill PID` must end the children, too.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()

    def start(self, name: str, command: Sequence[str], **environment: str) -> None:
        """Start a process."""
        self._commands[name] = (command, environment)
        self._start(name)

    def _start(self, name: str) -> None:
        command, environment = self._commands[name]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **QUIET, "PATH": search_path(), **environment},
                preexec_fn=end_with_parent if sys.platform == "linux" else None,
            )

    def look(self) -> list[str]:
        """Start processes again that ended; returns their names.

        Raises:
            RuntimeError: If one says that its settings are wrong, which another start won't change.
        """
        started = []
        for name, process in self._running.items():
            if process.poll() is None:
                continue
            log = self.folder / f"{name}.log"
            if process.returncode == WRONG_SETTINGS:
                said = log.read_text(errors="replace").rpartition("error: ")[2]
                raise RuntimeError(f"{name} can't start: {said.strip()}")
            if name not in self._due:
                why = self.why(process.returncode, log.read_text(errors="replace"))
                self.say(
                    f"{name} ended with {process.returncode} and starts again"
                    f"{why and f': {why}'}; see {log}."
                )
                self._due[name] = time.monotonic() + AGAIN
        for name, due in list(self._due.items()):
            if time.monotonic() >= due:
                del self._due[name]
                self._start(name)
                started.append(name)
        return started


# --- the server -----------------------------------------------------------------------------------


def serve_over_flower(settings: ServerSettings, say: Callable[[str], None]) -> None:
    """Run a SuperLink, and the server on it until it has finished.

    Args:
        settings: Settings of ``server.yaml``.
        say: Called with each progress message, a sentence.

    Raises:
        RuntimeError: If the SuperLink can't be started, or if it doesn't answer.
    """
    require_flower()
    host, port = split_address(settings.address)
    _require_files(settings.keys, "ca.crt", "server.crt", "server.key")
    _require_files(settings.keys, *(f"{node}.pub" for node in settings.nodes))
    found, secure = recipe.load(settings.recipe), settings.keys is not None
    with alone(settings.folder), ExitStack() as stack:
        _require_free(host, port)
        children = stack.enter_context(Children(settings.folder / "flower", say))
        line = connect(stack, children, settings, say)
        owners = settings.owners if secure else list(settings.owners)
        limits = (settings.timeout, settings.max_samples)
        try:
            serve(
                found,
                line,
                settings.folder,
                owners,
                *limits,
                pause=LOOK,
                secure=settings.secure_aggregation,
            )
        except Exception:
            (settings.folder / "failed.txt").write_text(traceback.format_exc(), encoding="utf-8")
            raise


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other servers and nodes out of a folder.

    Raises:
        RuntimeError: If there is one.
    """
    home, lock = folder / "flower", FolderLock()  # the Trainer takes the folder itself
    for path in (folder, home):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if owner := lock.take(home):
        raise RuntimeError(
            f"Expected no other server or node in the folder {str(folder)!r}, but {owner} runs "
            "there. End it, or take another folder."
        )
    try:
        yield
    finally:
        lock.release()


def _require_files(folder: Path | None, *names: str) -> None:
    """Require the files of keys, before Flower does."""
    for name in names:
        if folder is not None and not (folder / name).is_file():
            raise FileNotFoundError(
                f"Expected {name!r} in the folder `keys`, but {str(folder)!r} has none. Take the "
                "folder that `lightning-pfl deploy init` wrote."
            )


def _require_free(host: str, port: int) -> None:
    """Require that nothing listens at an address yet."""
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, port))
        except OSError as error:
            raise OSError(
                f"Expected to listen on `address`, but got address={host}:{port}: "
                f"{error.strerror}. End what listens there, or take another port."
            ) from error


def connect(
    stack: ExitStack, children: Children, settings: ServerSettings, say: Callable[[str], None]
) -> FlowerLine:
    """Start a SuperLink that takes orders from this process alone, and open its network.

    Args:
        stack: What ends with the network.
        children: What starts the SuperLink; its folder holds the database and the log.
        settings: Settings of ``server.yaml``.
        say: Called with each progress message, a sentence.
    """
    host, port = split_address(settings.address)
    home, keys = children.folder, settings.keys
    public = {} if keys is None else {node: keys / f"{node}.pub" for node in settings.nodes}
    secret = make_secret(home / "secret")
    secure, certificate = ["--insecure"], None
    if keys is not None:
        certificate = keys / "ca.crt"
        files = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}
        secure = [part for k, file in files.items() for part in (f"--ssl-{k}", str(keys / file))]
        secure.append("--enable-supernode-auth")
    command = [sys.executable, str(SUPERLINK), str(home / "secret")]
    command += ["--host", host, "--port", str(port), *secure, "--isolation", "process"]
    command += ["--database", str(home / database(public))]
    command += ["--disable-runtime-dependency-installation"]
    children.start("superlink", command, FLWR_HOME=str(home))
    here = f"127.0.0.1:{port}"
    opened = stack.enter_context(ExitStack())

    def open_again() -> Any:
        opened.close()
        _wait(children, port)
        with closing(Orders(here, secret, certificate)) as orders:
            for node, path in public.items():
                orders.register(node, path)
            orders.stop_runs()
            run = orders.start_run()
        with closing(Tasks(here, "flwr-serverapp", secret, certificate)) as tasks:
            grid = open_grid(opened, tasks, run)
        say(f"The server listens on {settings.address}.")
        return grid

    return FlowerLine(open_again, children.look)


def database(public: Mapping[str, Path]) -> str:
    """Name the database of a SuperLink: another one for other keys.

    It lets in all keys that it ever had, also one that was stolen and has been replaced.

    Args:
        public: The public key of each node.
    """
    listed = [[node, path.read_text()] for node, path in public.items()]
    return f"superlink-{hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]}.db"


def _wait(children: Children, port: int) -> None:
    """Wait until a SuperLink listens: as long as it takes, but not for one that ends each time."""
    starts = 1
    while True:
        starts += len(children.look())
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError as error:
            if starts > STARTS:
                raise RuntimeError(
                    f"Expected the SuperLink to listen on port {port}, but it has ended {STARTS} "
                    "times before. See flower/superlink.log in the server's folder."
                ) from error
            time.sleep(0.1)


def make_secret(path: Path) -> bytes:
    """Draw a secret, and write it to a file that its owner alone can read."""
    path.unlink(missing_ok=True)
    secret = secrets.token_hex(32).encode()
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    return secret


# --- a node ---------------------------------------------------------------------------------------


def join_over_flower(settings: ClientSettings, node: Node, say: Callable[[str], None]) -> None:
    """Answer the server's messages, which a SuperNode brings, until it has finished.

    Args:
        settings: Settings of ``client.yaml``.
        node: What answers.
        say: Called with each progress message, a sentence.
    """
    require_flower()
    _require_files(settings.keys, "ca.crt", "node.key")
    logs = settings.folder / "logs"
    with alone(settings.folder), Children(logs, say, why_it_ended) as children:
        logging.getLogger("lightning_pfl").addHandler(
            logging.FileHandler(children.folder / "node.log", encoding="utf-8")
        )
        home, port = settings.folder / "flower", free_port()
        secret = make_secret(home / "secret")
        secure = ["--insecure"]
        if settings.keys is not None:
            secure = ["--root-certificates", str(settings.keys / "ca.crt")]
            secure += ["--auth-supernode-private-key", str(settings.keys / "node.key")]
        command = [program("flower-supernode"), *secure, "--superlink", settings.server]
        command += ["--port", str(port), "--isolation", "process"]
        command += ["--superexec-auth-secret-file", str(home / "secret")]
        children.start("supernode", command, FLWR_HOME=str(home))
        say(f"{settings.name} looks for the server at {settings.server}.")
        tasks = Tasks(f"127.0.0.1:{port}", "flwr-clientapp", secret)
        link, written, end, sent = logs / "supernode.log", 0, math.inf, False

        def handle(data: bytes) -> bytes:
            nonlocal written
            # A SuperNode has sent the answer before: what it writes from now on is of this one.
            written = link.stat().st_size
            return node.handle(data)

        answering = answer_with(handle)
        while time.monotonic() < end:
            children.look()
            if not _answer(tasks, answering):
                time.sleep(LOOK)
            if not node.finished:
                end, sent = math.inf, False
            elif end == math.inf:
                say("The server has finished.")
                end = time.monotonic() + SENDING
            elif not sent and _has_sent(link, written):
                end, sent = time.monotonic() + STAY, True
        tasks.close()


def _has_sent(log: Path, since: int) -> bool:
    """Whether a SuperNode has sent an answer, by its log after a number of bytes."""
    with log.open("rb") as file:
        file.seek(since)
        return SENT in file.read()


def why_it_ended(status: int, log: str) -> str:
    """Say why a SuperNode has ended, as far as its output shows.

    Args:
        status: The status with which it has ended.
        log: Its output, also of earlier starts.
    """
    if status == 0:  # it says nothing when its signature isn't taken
        return (
            "the server doesn't take this node's signature. The clock here may be 5 s ahead of the "
            "server's and 5 minutes behind it; or the key was replaced"
        )
    *_, reason = re.findall(r"connection to the SuperLink\.\n(.+)", log) or [""]
    if "[code: 2004]" in reason:
        return "the server doesn't know this node's key, or another process uses it now"
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        reason += (
            ". `server` must be the address that `deploy init` was given, and keys/ca.crt the "
            "server's"
        )
    return str(reason)


def _answer(tasks: Tasks, handle: Callable[[Any], Any]) -> bool:
    """Answer a message, if there is one and the SuperNode can be reached."""
    from httpx import ConnectError

    try:
        return tasks.answer(handle)
    except ConnectError:  # it is about to start
        return False
    except Exception:
        # The server asks again when it learns that there is no answer.
        log.exception("A message was dropped.")
        return False
