"""A deployment in processes on 127.0.0.1: a SuperLink and SuperNodes, started and killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml

from lightning_pfl.core.tree import Tree, rows
from lightning_pfl.deploy import commands
from lightning_pfl.deploy.keys import make_keys
from lightning_pfl.deploy.node import Node
from lightning_pfl.deploy.processes import end_with_parent, free_port
from tests.deploy.setting import leaves_of

ROOT = Path(__file__).parents[2]
PRELOADED = [
    "tests.deploy.processes",
    "sklearn.datasets",
    "torch.utils.tensorboard",
    "flwr.cli.build",
    "flwr.supercore.control",
    "flwr.superlink.grid",
    "flwr.supernode.runtime.run_clientapp",
]
"""Modules that servers and nodes need."""


class Running(Protocol):
    """A process that was started."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self) -> object: ...


class Forked:
    """A process that was forked, with what `subprocess` calls the parts that are used here."""

    def __init__(self, process: Any) -> None:
        self.pid, self.wait = process.pid, process.join
        self._process = process

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code


def start(what: str, folder: Path) -> Running:
    """Start `lightning-pfl deploy` as a person does."""
    with (folder / "out.txt").open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "lightning_pfl", "deploy", what],
            cwd=folder,
            stdout=out,
            stderr=out,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=(
                partial(end_with_parent, signal.SIGKILL) if sys.platform == "linux" else None
            ),
        )


def fork(what: str, folder: Path, run: Callable[[str, Path], None] | None = None) -> Running:
    """Start the same, or ``run``, from a process that has imported what it needs, once for all."""
    (folder / "out.txt").touch()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=run or run_in, args=(what, folder))
    process.start()
    return Forked(process)


def run_in(what: str, folder: Path) -> None:
    """Be `lightning-pfl deploy` in a folder."""
    os.setsid()
    threading.Thread(target=_end_with_tests, daemon=True).start()
    os.chdir(folder)
    out = os.open("out.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    commands.main([what])


def _end_with_tests() -> None:
    """Kill this process and its own when that of the tests ends.

    Its parent is the process that forks, which stays as long as what it has forked.
    """
    tests = multiprocessing.parent_process()
    assert tests is not None
    tests.join()
    os.killpg(os.getpid(), signal.SIGKILL)


def killed_while_sending(what: str, folder: Path) -> None:
    """Be a server that is killed, with its SuperLink, once it has announced a second message."""
    grid: Any = import_module("flwr.superlink.grid.http_grid")
    push, pushed = grid.push_objects, []

    def push_or_die(*args: Any, **kwargs: Any) -> None:
        pushed.append(1)
        if len(pushed) > 1:
            time.sleep(3)  # the SuperNode has heard of it
            os.killpg(os.getpid(), signal.SIGKILL)
        push(*args, **kwargs)

    grid.push_objects = push_or_die
    run_in(what, folder)


def running_in(folder: Path) -> list[int]:
    """Find the processes in a folder, or that have it in their arguments or their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            names = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            if str(folder).encode() in names or folder in (process / "cwd").readlink().parents:
                found.append(int(process.name))
    return found


class Processes:
    """The server and three nodes of a deployment, each in a process group of its own.

    Args:
        folder: A new folder.
        recipe: The recipe.
        names: The nodes; each is one client of the recipe's data.
        warm: Whether to start from a process that has imported what the commands need.
        **server: Settings of ``server.yaml``.
    """

    def __init__(
        self,
        folder: Path,
        recipe: dict[str, Any],
        names: tuple[str, ...],
        warm: bool = False,
        **server: Any,
    ) -> None:
        self.folder, self.recipe, self.names = folder / "deployment", recipe, names
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        self.port = free_port()
        address = f"127.0.0.1:{self.port}"
        commands.main(
            [
                "init",
                str(self.folder),
                "--recipe",
                str(path),
                "--address",
                address,
                "--nodes",
                *names,
            ]
        )
        settings = self.folder / "server" / "server.yaml"
        changed = {**yaml.safe_load(settings.read_text()), "address": address, **server}
        settings.write_text(yaml.safe_dump(changed))
        self.warm = warm
        self.running: dict[str, Running] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.running):
            self.kill(name)
        # Flower starts some of its processes in sessions of their own.
        for process in running_in(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def add_stranger(self) -> None:
        """Add the node ``"stranger"``: it says that it is node 0, but has another key."""
        shutil.copytree(self.folder / "0", self.folder / "stranger")
        make_keys(self.folder / "unused", {"stranger": self.folder / "other"}, ["localhost"])
        key = (self.folder / "other" / "node.key").read_bytes()
        (self.folder / "stranger" / "keys" / "node.key").write_bytes(key)

    def start(self, *names: str) -> None:
        """Start the server (``"server"``) and nodes by their names."""
        for name in names:
            what = "server" if name == "server" else "client"
            self.running[name] = (fork if self.warm else start)(what, self.folder / name)

    def kill(self, *names: str) -> None:
        """Kill processes with all that they have started."""
        for name in names:
            process = self.running.pop(name)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def log(self) -> str:
        """What the server has said."""
        path = self.folder / "server" / "run" / "progress.log"
        return path.read_text() if path.is_file() else ""

    def until(self, there: Callable[[], bool], limit: float = 900.0) -> None:
        """Wait for something; the outputs of all processes are the error if it doesn't come."""
        end = time.monotonic() + limit
        while not there():
            server = self.running.get("server")
            ended = server is not None and server.poll() is not None
            if (ended and not there()) or time.monotonic() > end:
                told = [f"{p}:\n{p.read_text()[-2000:]}" for p in self.folder.glob("*/out.txt")]
                logs = [f"{p}:\n{p.read_text()[-2000:]}" for p in self.folder.rglob("*.log")]
                raise AssertionError("\n".join([*told, *logs]))
            time.sleep(0.2)

    def finish(self) -> None:
        """Wait for the end of the server."""
        self.until(lambda: self.running["server"].poll() == 0)

    def differences(self, simulated: Any) -> list[str]:
        """Name the entries of server and client states that aren't those of a simulation."""
        saved = torch.load(self.folder / "server" / "run" / "last.ckpt", weights_only=True)
        held = saved["federated"]
        states = {}
        for client, name in enumerate(held["clients"]):
            version = int(held["client_states"]["version"][client])
            states[name] = self.state(name, client, version)
        ours = {
            name: rows(simulated.client_states.tree, slice(k, k + 1))
            for k, name in enumerate(simulated.client_names)
        }
        expected = leaves_of({"server": simulated.server, **ours})
        found = leaves_of({"server": held["server"], **states})
        return [
            path
            for path in {**expected, **found}
            if path not in expected
            or path not in found
            or not torch.equal(expected[path], found[path])
        ]

    def state(self, name: str, client: int, version: int) -> Tree:
        """Read a client's state from its node's disk."""
        folder = self.folder / name / "state"
        if version >= 0:
            (path,) = folder.glob(f"*/states/{client}/version-{version:08d}.pt")
            state: Tree = torch.load(path, weights_only=True)["state"]
            return state
        node = Node(self.recipe, folder, [name])
        (joined,) = folder.glob("*/join.bin")
        node.resume(joined.parent.name)
        assert node.federation is not None
        return node.federation.states.gather(torch.tensor([client]))
