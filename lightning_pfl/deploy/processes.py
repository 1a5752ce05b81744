"""Flower's processes: the SuperLink and its run on the server, the SuperNode on every node."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from lightning_pfl.deploy.settings import ClientSettings, ServerSettings, split_address

APP = Path(__file__).parent / "app"
"""The Flower app: its two parts carry messages."""
AGAIN = 5.0
"""Seconds before a process that ended is started again. Flower lets a node that was killed back in
after two missed heartbeats, up to a minute."""
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",  # no telemetry of a deployment
    "FLWR_DISABLE_UPDATE_CHECK": "1",
}
WRONG_SETTINGS = 2
"""The status with which programs end that can't work with their arguments."""
STAY = 20.0
"""Seconds that a node stays after the end, so that its last answer arrives."""


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


def _end_with_parent() -> None:
    """Let this process end when its parent is killed: an orphan would keep ports and locks."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG


class Children:
    """Processes that are started again when they end, and stopped when the context ends.

    Args:
        folder: Where their output goes, a file for each.
        say: Called with each progress message, a sentence.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say
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
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
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
            if process.returncode == WRONG_SETTINGS:
                log = (self.folder / f"{name}.log").read_text(errors="replace")
                raise RuntimeError(f"{name} can't start: {log.rpartition('error: ')[2].strip()}")
            if name not in self._due:
                self.say(
                    f"{name} ended with {process.returncode} and starts again; see "
                    f"{self.folder / name}.log."
                )
                self._due[name] = time.monotonic() + AGAIN
        for name, due in list(self._due.items()):
            if time.monotonic() >= due:
                del self._due[name]
                self._start(name)
                started.append(name)
        return started


# --- the server -----------------------------------------------------------------------------------


def serve_over_flower(settings: ServerSettings, config: Path, say: Callable[[str], None]) -> None:
    """Run a SuperLink and the deployment's run in it, until the run has finished.

    Args:
        settings: Settings of ``server.yaml``.
        config: The file.
        say: Called with each progress message, a sentence.

    Raises:
        RuntimeError: If the run can't be started, or if it fails.
    """
    require_flower()
    host, port = split_address(settings.address)
    _require_files(settings.keys, "ca.crt", "server.crt", "server.key")
    _require_files(settings.keys, *(f"{node}.pub" for node in settings.nodes))
    _require_free(host, port)
    settings.folder.mkdir(parents=True, exist_ok=True)
    home = settings.folder / "flower"
    (settings.folder / "failed.txt").unlink(missing_ok=True)
    log, status = settings.folder / "progress.log", settings.folder / "status.json"
    read = log.stat().st_size if log.is_file() else 0
    status.unlink(missing_ok=True)
    with Children(home, say) as children:
        start_superlink(children, settings.address, settings.keys)
        _submit(settings, config, home, port)
        say(f"The server listens on {settings.address}.")
        while _state(status) != "finished":
            if "superlink" in children.look():
                _submit(settings, config, home, port)
                say("The server is back.")
            read = _follow(log, read)
            if (failed := settings.folder / "failed.txt").is_file():
                raise RuntimeError(failed.read_text())
            time.sleep(0.3)
        _follow(log, read)


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


def start_superlink(children: Children, address: str, keys: Path | None) -> None:
    """Start a SuperLink; its database and configuration are in the folder of the children."""
    host, port = split_address(address)
    home, secure = children.folder, ["--insecure"]
    connection = "insecure = true"
    if keys is not None:
        files = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}
        secure = [part for k, file in files.items() for part in (f"--ssl-{k}", str(keys / file))]
        secure.append("--enable-supernode-auth")
        connection = f'root-certificates = "{keys / "ca.crt"}"'
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        f"{connection}\n"
    )
    command = [program("flower-superlink"), "--host", host, "--port", str(port), *secure]
    command += ["--database", str(home / "superlink.db")]
    command += ["--disable-runtime-dependency-installation"]
    children.start("superlink", command, FLWR_HOME=str(home))


def start_supernode(
    children: Children, home: Path, server: str, keys: Path | None, **config: str | int
) -> None:
    """Start a SuperNode.

    Args:
        children: What starts it.
        home: Flower's folder, in which it keeps what a server has sent.
        server: Address of the SuperLink.
        keys: The folder of the certificate and the node's key; None without TLS.
        **config: What the client app finds in its ``node_config``.
    """
    secure = ["--insecure"]
    if keys is not None:
        secure = ["--root-certificates", str(keys / "ca.crt")]
        secure += ["--auth-supernode-private-key", str(keys / "node.key")]
    command = [program("flower-supernode"), *secure, "--superlink", server]
    command += ["--port", str(free_port()), "--node-config", _toml(config)]
    children.start("supernode", command, FLWR_HOME=str(home))


def run_app(home: Path, app: Path, port: int, **config: str | int) -> None:
    """Start a Flower app on the SuperLink of a folder, once that listens."""
    _wait(port)
    flower(home, "run", str(app), "--run-config", _toml(config))


def _toml(values: Mapping[str, str | int]) -> str:
    return " ".join(f"{name}={json.dumps(value)}" for name, value in values.items())


def _state(status: Path) -> str:
    return str(json.loads(status.read_text())["state"]) if status.is_file() else ""


def _follow(log: Path, read: int) -> int:
    """Print what was added to a file; returns its new end."""
    if not log.is_file():
        return read
    with log.open("rb") as file:
        file.seek(read)
        added = file.read()
    print(added.decode(), end="", flush=True)
    return read + len(added)


def _submit(settings: ServerSettings, config: Path, home: Path, port: int) -> None:
    """Wait for the SuperLink, register the nodes' keys, and start the run."""
    _wait(port)
    for node in settings.nodes if settings.keys is not None else ():
        assert settings.keys is not None
        public = str(settings.keys / f"{node}.pub")
        flower(home, "supernode", "register", public, "--name", node, known="already")
    run_app(home, APP, port, config=str(config.resolve()), starter=os.getpid())


def _wait(port: int, limit: float = 120.0) -> None:
    end = time.monotonic() + limit
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise RuntimeError(
                    f"Expected the SuperLink to listen on port {port}, but it doesn't. See "
                    "flower/superlink.log in the server's folder."
                ) from error
            time.sleep(0.2)


def flower(home: Path, *command: str, known: str = "") -> dict[str, Any]:
    """Run a command of Flower's own command line.

    Args:
        home: Flower's folder.
        *command: The command.
        known: A word of the error that is none, as what it asks for is done already.

    Raises:
        RuntimeError: If it fails.
    """
    done = subprocess.run(
        [program("flwr"), *command, "--format", "json"],
        env={**os.environ, **QUIET, "PATH": search_path(), "FLWR_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    text = done.stdout[done.stdout.find("{") :]
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        found = {"success": False}
    if not found.get("success") and not (known and known in done.stdout + done.stderr):
        raise RuntimeError(
            f"Expected `flwr {' '.join(command[:2])}` to work, but it says: "
            f"{(done.stdout + done.stderr).strip()[-500:]}"
        )
    return found


# --- a node ---------------------------------------------------------------------------------------


def join_over_flower(settings: ClientSettings, config: Path, say: Callable[[str], None]) -> None:
    """Run a node's worker and its SuperNode until the server has finished.

    Args:
        settings: Settings of ``client.yaml``.
        config: The file.
        say: Called with each progress message, a sentence.
    """
    require_flower()
    _require_files(settings.keys, "ca.crt", "node.key")
    logs = settings.folder / "logs"
    with ExitStack() as stack:
        # A path of a socket may have a hundred characters.
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pfl-")))
        children = stack.enter_context(Children(logs, say))
        path, finished = short / "worker", short / "finished"
        worker = [sys.executable, "-m", "lightning_pfl", "deploy", "worker"]
        worker += ["--config", str(config), "--socket", str(path), "--finished", str(finished)]
        children.start("worker", worker)
        home = settings.folder / "flower"
        start_supernode(children, home, settings.server, settings.keys, socket=str(path))
        say(f"{settings.name} looks for the server at {settings.server}.")
        while not finished.is_file():
            children.look()
            time.sleep(0.3)
        say("The server has finished.")
        time.sleep(STAY)
