"""A SuperLink and three SuperNodes on 127.0.0.1, with TLS and keys, killed and started again."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_pfl.deploy import processes
from lightning_pfl.deploy.flower import Orders, Tasks
from lightning_pfl.deploy.processes import (
    LOOK,
    SENDING,
    STARTS,
    STAY,
    _wait,
    alone,
    database,
    join_over_flower,
    why_it_ended,
)
from lightning_pfl.deploy.settings import ClientSettings
from tests.deploy.processes import ROOT, Processes, fork, killed_while_sending, running_in
from tests.deploy.setting import METHODS, LeftOut, leaves_of, recipe_of, simulate

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Flower needs Python 3.11")
NAMES = ("0", "1", "2")


@pytest.mark.xdist_group("flower")
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # of Flower's
def test_a_round_equals_the_simulation_and_orders_need_the_secret(tmp_path: Path) -> None:
    from httpx import HTTPStatusError

    recipe = recipe_of("FedMAP", rounds=1, participation=1.0, clients=2, limit_val_batches=0)
    simulated, names = simulate(recipe, tmp_path), NAMES[:2]
    with Processes(tmp_path, recipe, names, warm=True) as deployed:
        deployed.start("server")
        deployed.until(lambda: "Waiting for" in deployed.log)
        deployed.start(*names)
        plain = HTTPConnection("127.0.0.1", deployed.port, timeout=60)
        plain.request("GET", "/")
        with pytest.raises((HTTPException, ConnectionError)):  # TLS ends what is plain text
            plain.getresponse()
        address, keys = f"127.0.0.1:{deployed.port}", deployed.folder / "server" / "keys"
        trusted = ssl.create_default_context(cafile=str(keys / "ca.crt"))
        sealed = HTTPSConnection("127.0.0.1", deployed.port, timeout=60, context=trusted)
        sealed.putrequest("POST", "/v1/fleet/push-object")
        sealed.putheader("Content-Length", str(2**31 - 1))  # Flower would read it
        sealed.endheaders()
        assert sealed.getresponse().status == 413
        sealed.close()
        guess = b"0" * 64  # a secret of another process
        with closing(Orders(address, guess, keys / "ca.crt")) as orders:
            for order in (lambda: orders.register("0", keys / "1.pub"), orders.start_run):
                with pytest.raises(HTTPStatusError, match="401"):
                    order()
        with (
            closing(Tasks(address, "flwr-serverapp", guess, keys / "ca.crt")) as tasks,
            pytest.raises(HTTPStatusError, match="401"),
        ):
            tasks.acquire()
        deployed.finish()
        assert deployed.differences(simulated.strategy.federation) == []


def test_a_folder_has_one_server_or_node(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with alone(folder):
        with pytest.raises(RuntimeError, match=f"no other server.*process {os.getpid()}"):
            alone(folder).__enter__()
        for path in (folder, folder / "flower"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
    with alone(folder):
        pass


@pytest.mark.parametrize(
    ("status", "log", "reason"),
    [
        (0, "SuperNode terminated gracefully.", "The clock here may be 5 s ahead"),
        (1, "{}[code: 2004] Failed to activate SuperNode.\n", "doesn't know this node's key"),
        (1, "{}x\n{}CERTIFICATE_VERIFY_FAILED] Hostname mismatch\n", "^CERT.*`deploy init`"),
        (1, "{}[Errno 111] Connection refused\n", "^.Errno 111. Connection refused$"),
        (-9, "", "^$"),
    ],
)
def test_a_node_says_why_the_server_keeps_it_out(status: int, log: str, reason: str) -> None:
    start = "Failed to initialize the connection to the SuperLink.\n"
    assert re.search(reason, why_it_ended(status, log.format(start, start)))


class Link:
    """A SuperLink that ends some times, and then takes a number of looks until it listens."""

    def __init__(self, ends: int, looks: int = 0) -> None:
        self.ends, self.looks, self.seconds = ends, looks, 0.0

    def look(self) -> list[str]:
        if self.ends:
            self.ends -= 1
            return ["superlink"]
        self.looks -= 1
        return []

    def create_connection(self, *_: object) -> Any:
        if self.ends or self.looks > 0:
            raise ConnectionRefusedError
        return SimpleNamespace(close=lambda: None)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.mark.parametrize(("ends", "looks"), [(0, 10**4), (4, 10), (5, 10)])
def test_a_server_waits_for_a_slow_superlink_but_not_for_one_that_ends_each_time(
    ends: int, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link(ends, looks)
    monkeypatch.setattr("socket.create_connection", link.create_connection)
    monkeypatch.setattr("time.sleep", link.sleep)
    monkeypatch.setattr("time.monotonic", lambda: link.seconds)
    if ends < STARTS:
        _wait(link, 1)  # type: ignore[arg-type]
        assert link.looks == 0
    else:
        with pytest.raises(RuntimeError, match="Expected the SuperLink to listen on port 1"):
            _wait(link, 1)  # type: ignore[arg-type]


class Post:
    """A SuperNode and its tasks: messages that come, and answers that are sent, at given times."""

    def __init__(self, folder: Path, asked: dict[float, bytes], sent: list[float]) -> None:
        self.folder, self.asked, self.sent, self.seconds = folder, asked, sent, 0.0
        self.log = folder / "supernode.log"
        folder.mkdir()
        self.log.touch()

    def __enter__(self) -> Post:
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self, *_: object, **__: object) -> None: ...

    def close(self) -> None: ...

    def look(self) -> None:
        for when in [one for one in self.sent if one <= self.seconds]:
            self.sent.remove(when)
            with self.log.open("a") as log:
                log.write("INFO:      Sent successfully\n")

    def answer(self, handle: Callable[[bytes], bytes]) -> bool:
        for when in [one for one in self.asked if one <= self.seconds]:
            handle(self.asked.pop(when))
            return True
        return False

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class Answering:
    """A node that answers nothing."""

    finished = False

    def handle(self, data: bytes) -> bytes:
        self.finished = data == b"finish"
        return b""


@pytest.mark.parametrize(
    ("asked", "sent", "left"),
    [
        # The last answer takes its time, or can't be sent.
        ({0.0: b"train", 5.0: b"finish"}, [4.0, 100.0], 100.0 + STAY),
        ({0.0: b"train", 5.0: b"finish"}, [4.0], 5.0 + SENDING),
        # The SuperNode was started again, and has lost the last answer.
        ({5.0: b"finish", 50.0: b"hello", 900.0: b"finish"}, [60.0, 950.0], 950.0 + STAY),
    ],
)
def test_a_node_stays_until_its_last_answer_is_sent(
    asked: dict[float, bytes],
    sent: list[float],
    left: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    post = Post(tmp_path / "logs", dict(asked), list(sent))
    for name in ("Children", "Tasks"):
        monkeypatch.setattr(processes, name, lambda *_: post)
    monkeypatch.setattr(processes, "answer_with", lambda handle: handle)
    monkeypatch.setattr(logging.getLogger("lightning_pfl"), "handlers", [])
    monkeypatch.setattr("logging.FileHandler", lambda *_, **__: logging.NullHandler())
    monkeypatch.setattr("time.sleep", post.sleep)
    monkeypatch.setattr("time.monotonic", lambda: post.seconds)
    said: list[str] = []
    settings = ClientSettings("0", tmp_path / "recipe.yaml", folder=tmp_path, keys=None)
    node: Any = Answering()
    join_over_flower(settings, node, said.append)
    assert post.seconds == pytest.approx(left, abs=2 * LOOK)
    assert said[-1] == "The server has finished."


def test_a_key_that_was_replaced_is_not_let_in_by_an_old_database(tmp_path: Path) -> None:
    keys = {name: tmp_path / f"{name}.pub" for name in ("a", "b")}
    for name, path in keys.items():
        path.write_text(f"key of {name}")
    known = database(keys)
    assert database(keys) == known
    names = {known, database({"b": keys["a"], "a": keys["b"]}), database({"a": keys["a"]})}
    keys["a"].write_text("another key")
    assert len({*names, database(keys)}) == 4


STARTED = """
import sys, time
from pathlib import Path
from tests.deploy.processes import Processes, running_in
from tests.deploy.setting import recipe_of

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    deployed = Processes(folder, recipe_of("FedAvg", clients=2), ("0", "1"))
    deployed.start("0")
    deployed.warm = True
    deployed.start("1")
    deployed.until(lambda: len(running_in(deployed.folder)) == 4)  # each with a SuperNode
    print("running", flush=True)
    time.sleep(600)
"""
"""Tests that start a node as a person does, and fork another."""


@pytest.mark.slow
@pytest.mark.kill
def test_tests_that_are_killed_leave_no_processes(tmp_path: Path) -> None:
    script = tmp_path / "started.py"
    script.write_text(STARTED)
    folder = tmp_path / "run"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(folder)]
    try:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as tests:
            assert tests.stdout is not None
            while tests.stdout.readline() != b"running\n":
                assert tests.poll() is None
            assert len(running_in(folder / "deployment")) == 4
            tests.terminate()
        end = time.monotonic() + 60
        while running_in(folder / "deployment") and time.monotonic() < end:
            time.sleep(0.2)
        assert not running_in(folder / "deployment")
    finally:
        for process in running_in(folder):
            os.kill(process, signal.SIGKILL)


@pytest.mark.slow
def test_another_key_and_a_key_that_is_in_use_are_kept_out(tmp_path: Path) -> None:
    recipe = recipe_of("SCAFFOLD", rounds=3, participation=1.0, clients=3, limit_val_batches=0)
    simulated = simulate(recipe, tmp_path)
    with Processes(tmp_path, recipe, NAMES, warm=True) as deployed:
        deployed.add_stranger()
        shutil.copytree(deployed.folder / "0", deployed.folder / "twin")  # a second machine
        deployed.start("server", "0")
        deployed.until(lambda: "Waiting for 1, 2." in deployed.log)
        deployed.start("stranger", "twin")  # the run can't begin, nor end, before 1 and 2 are here
        for name in ("stranger", "twin"):
            said = deployed.folder / name / "out.txt"
            deployed.until(lambda said=said: "doesn't know this node's key" in said.read_text())  # type: ignore[misc]
        # Flower would let the twin in when 0 is too busy to be heard for a minute.
        deployed.kill("stranger", "twin")
        deployed.start("1", "2")
        deployed.finish()
        link = (deployed.folder / "server/run/flower/superlink.log").read_text()
        assert "No SuperNode found with the given public key" in link
        for name in ("stranger", "twin"):
            assert not list((deployed.folder / name / "state").glob("*/join.bin"))
        assert deployed.differences(simulated.strategy.federation) == []


@pytest.mark.slow
def test_secure_aggregation_follows_the_simulation(tmp_path: Path) -> None:
    recipe = recipe_of("FedAvg", rounds=2, participation=1.0, clients=3, limit_val_batches=0)
    simulated = simulate(recipe, tmp_path)
    with Processes(tmp_path, recipe, NAMES, warm=True, secure_aggregation=8.0) as deployed:
        deployed.start("server", *NAMES)
        deployed.finish()
        saved = torch.load(deployed.folder / "server" / "run" / "last.ckpt", weights_only=True)
    found = leaves_of(saved["federated"]["server"])
    for path, leaf in leaves_of(simulated.strategy.federation.server).items():
        assert not torch.equal(found[path], leaf)  # it is rounded
        assert torch.allclose(found[path], leaf, rtol=0, atol=2e-5), path


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_five_rounds_equal_the_simulation(method: str, tmp_path: Path) -> None:
    recipe = recipe_of(method, participation=0.7, clients=3, check_val_every_n_epoch=5)
    simulated = simulate(recipe, tmp_path)
    with Processes(tmp_path, recipe, NAMES, warm=True) as deployed:
        deployed.start("server", *NAMES)
        deployed.finish()
        assert deployed.differences(simulated.strategy.federation) == []


@pytest.mark.slow
@pytest.mark.kill
def test_kills_change_no_bit(tmp_path: Path) -> None:
    recipe = recipe_of("SCAFFOLD", participation=1.0, clients=3, limit_val_batches=0)
    simulated = simulate(recipe, tmp_path)
    with Processes(tmp_path, recipe, NAMES) as deployed:
        deployed.start("server", "0")
        deployed.warm = True  # one of each kind has started as a person starts it
        deployed.start("1", "2")
        deployed.until(lambda: "Round 1 of" in deployed.log)
        deployed.kill("1")  # in the middle of the next round
        deployed.start("1")
        deployed.until(lambda: "Round 2 of" in deployed.log)
        deployed.kill("server")
        deployed.start("server")
        deployed.until(lambda: "Round 3 of" in deployed.log)
        deployed.kill(*NAMES)
        deployed.start(*NAMES)
        deployed.finish()
        assert "Resuming from the last checkpoint." in deployed.log
        assert deployed.differences(simulated.strategy.federation) == []


@pytest.mark.slow
@pytest.mark.kill
def test_a_message_that_was_announced_and_never_sent_keeps_no_node_waiting(tmp_path: Path) -> None:
    recipe = recipe_of("FedAvg", rounds=2, participation=1.0, clients=3, limit_val_batches=0)
    simulated = simulate(recipe, tmp_path)
    with Processes(tmp_path, recipe, NAMES, warm=True) as deployed:
        server = fork("server", deployed.folder / "server", killed_while_sending)
        deployed.running["server"] = server
        deployed.start(*NAMES)
        server.wait()
        deployed.start("server")
        deployed.finish()
        logs = [path.read_text() for path in deployed.folder.rglob("*.log")]
        # Flower would let a SuperNode wait for it for three minutes, and a node for two hours.
        assert any("is not in `RUNNING` status. Ignoring message" in log for log in logs)
        assert any("message has lost its content" in log for log in logs)
        assert deployed.differences(simulated.strategy.federation) == []


@pytest.mark.slow
@pytest.mark.kill
@pytest.mark.filterwarnings("ignore:Round .* left out . of 3 clients")
def test_a_node_that_was_away_for_two_rounds_goes_on_from_its_state(tmp_path: Path) -> None:
    recipe = recipe_of("SCAFFOLD", MANY, 1.0, clients=3, limit_val_batches=0)
    with Processes(tmp_path, recipe, NAMES, warm=True, timeout=60) as deployed:
        deployed.start("server", *NAMES)
        deployed.until(lambda: "Round 1 of" in deployed.log)
        deployed.kill("1")
        deployed.until(lambda: rounds_without("1", deployed.log) >= 2)
        deployed.start("1")
        deployed.finish()
        away = left_out(deployed.log)
        assert "1" not in away[-1]  # it took part again
        assert deployed.differences(simulated(recipe, tmp_path, away)) == []


@pytest.mark.slow
@pytest.mark.kill
@pytest.mark.filterwarnings("ignore:Round .* left out . of 3 clients")
def test_a_node_slower_than_the_timeout_is_left_out_and_its_late_answer_unread(
    tmp_path: Path,
) -> None:
    recipe = recipe_of("SCAFFOLD", MANY, 1.0, clients=3, limit_val_batches=0)
    with Processes(tmp_path, recipe, NAMES, warm=True, timeout=60) as deployed:
        deployed.start("server", *NAMES)
        deployed.until(lambda: "Round 1 of" in deployed.log)
        os.kill(deployed.running["1"].pid, signal.SIGSTOP)  # its SuperNode stays
        deployed.until(lambda: rounds_without("1", deployed.log) >= 1)
        os.kill(deployed.running["1"].pid, signal.SIGCONT)
        deployed.finish()
        away = left_out(deployed.log)
        assert "1" not in away[-1]  # it took part again
        assert deployed.differences(simulated(recipe, tmp_path, away)) == []


MANY = 10
"""Rounds; those that leave out a node are long, and end once it is back, however long it took."""


def left_out(log: str) -> list[list[str]]:
    """List the clients that each round has left out.

    On a busy machine that may be one that was only slow.
    """
    rounds = [text for text in log.splitlines() if "] Round " in text]
    return [re.findall(r"without (\S+) \(no answer", text) for text in rounds]


def rounds_without(client: str, log: str) -> int:
    """Count the rounds that have left out a client."""
    return sum(client in names for names in left_out(log))


def simulated(recipe: dict[str, Any], folder: Path, away: list[list[str]]) -> Any:
    """Simulate a run whose rounds leave out the same clients."""
    callbacks = [LeftOut([number], names) for number, names in enumerate(away) if names]
    return simulate(recipe, folder, tuple(callbacks)).strategy.federation


@pytest.mark.slow
@pytest.mark.kill
@pytest.mark.skipif(sys.platform != "linux", reason="other kernels can't do this")
def test_what_a_killed_program_has_started_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\n"
        "from lightning_pfl.deploy.processes import Children\n"
        "with Children(pathlib.Path(sys.argv[1]), print) as children:\n"
        "    children.start('child', ['sleep', '1000'])\n"
        "    print(next(iter(children._running.values())).pid, flush=True)\n"
        "    time.sleep(1000)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        child = Path("/proc") / program.stdout.readline().strip()
        assert child.is_dir()
        program.kill()
    end = time.monotonic() + 60
    with contextlib.suppress(FileNotFoundError):  # it is gone
        while "\nState:\tZ" not in (child / "status").read_text():
            assert time.monotonic() < end
            time.sleep(0.1)
