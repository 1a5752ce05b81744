"""Checkpoints that hold code: nothing of it runs unless the user says so."""

from __future__ import annotations

import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pfl.methods import FedAvg
from tests.trainer.setting import Quadratic, points, trainer


class Touch:
    """Makes a file when it is unpickled, by Python or, of a module that torch blocks, by a shell.

    torch words the two refusals differently.
    """

    def __init__(self, path: Path, shell: bool) -> None:
        self.path, self.shell = path, shell

    def __reduce__(self) -> Any:
        if self.shell:
            return os.system, (f"echo > '{self.path}'",)
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, and two that would make the file ``ran``."""
    first = trainer(FedAvg(), max_epochs=1)
    first.fit(Quadratic(), points(), points())
    first.save_checkpoint(tmp_path / "good.ckpt")
    saved = torch.load(tmp_path / "good.ckpt", weights_only=True)
    for name, shell in (("code", False), ("shell", True)):
        torch.save({**saved, "more": Touch(tmp_path / "ran", shell)}, tmp_path / f"{name}.ckpt")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))
    return tmp_path


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def resume(path: str, **kwargs: Any) -> Any:
    second = trainer(FedAvg(), max_epochs=2)
    second.fit(Quadratic(), points(), points(), ckpt_path=path, **kwargs)
    return second.strategy.federation


@pytest.mark.parametrize("name", ["code", "shell"])
def test_a_file_is_read_without_running_its_code(folder: Path, name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{name}\.ckpt'.* reading it would run code"):
        resume(str(folder / f"{name}.ckpt"))
    assert not (folder / "ran").exists()


def test_so_is_a_url(folder: Path, url: str) -> None:
    assert resume(f"{url}/good.ckpt").rounds == 2
    with pytest.raises(RuntimeError, match=r"code\.ckpt'.* reading it would run code"):
        resume(f"{url}/code.ckpt")
    assert not (folder / "ran").exists()


def test_who_trusts_a_file_can_say_so(folder: Path) -> None:
    assert resume(str(folder / "code.ckpt"), weights_only=False).rounds == 2
    assert (folder / "ran").exists()
