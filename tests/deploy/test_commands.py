"""The files that `deploy init` writes, and the walkthrough of docs/deployment.md on them."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_pfl.deploy import commands, recipe
from lightning_pfl.deploy.loop import LoopLine
from lightning_pfl.deploy.server import serve
from lightning_pfl.deploy.settings import make_node, read_client, read_server

PAGE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
HOSPITALS = ["hospital-a", "hospital-b", "hospital-c"]
needs_flower = pytest.mark.skipif(sys.version_info < (3, 11), reason="Flower needs Python 3.11")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the walkthrough, after its Python block and its `deploy init`."""
    folder = tmp_path_factory.mktemp("walkthrough")
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(block, {})
        given = ["--recipe", "recipe.yaml", "--address", "127.0.0.1:8000"]
        commands.main(["init", "deployment", *given, "--nodes", *HOSPITALS])
    for hospital in HOSPITALS:
        shutil.copy(folder / f"{hospital}.csv", folder / "deployment" / hospital / "patients.csv")
    return folder / "deployment"


@pytest.mark.slow
@needs_flower
def test_the_walkthrough_runs(
    deployment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {}
    for number, hospital in enumerate(HOSPITALS):
        monkeypatch.chdir(deployment / hospital)
        nodes[number] = make_node(read_client("client.yaml"))
    settings = read_server(deployment / "server" / "server.yaml")
    found = recipe.load(settings.recipe)
    found["trainer"] |= {"max_epochs": 2, "logger": False, "enable_progress_bar": False}
    found["trainer"] |= {"enable_model_summary": False}
    trainer = serve(found, LoopLine(nodes), tmp_path, list(settings.owners), 1, pause=0)
    assert float(trainer.callback_metrics["val_acc"]) > 0.5  # a coin's
    monkeypatch.chdir(deployment / "hospital-b")
    commands.main(["export", "--output", str(tmp_path / "b.pt")])
    state = torch.load(tmp_path / "b.pt", weights_only=True)
    assert [tuple(leaf.shape) for leaf in state.values()] == [(16, 30), (16,), (2, 16), (2,)]


@needs_flower
@pytest.mark.filterwarnings("ignore:.*clients.*test split")
def test_what_is_sent_is_printed_field_by_field(
    deployment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(deployment / "hospital-a")
    commands.main(["client", "--what-is-sent"])
    said = capsys.readouterr().out.split("What hospital-a sends")[1]
    for kind in ("hello (once", "joined (once", "trained (a round", "evaluated (an evaluation"):
        assert kind in said
    assert re.search(r"upload/model/backbone\S+ +1920 bytes  float32 \(1, 16, 30\)", said)
    assert re.search(r"upload/log_weight +8 bytes  float64 \(1,\)", said)
    assert re.search(r"logs/train_loss/values +\d+ bytes  \[0\.\d+\]", said)
    assert re.search(r"results/personal/counts +4 bytes  \[30\]", said)
    # 190 patients, a fifth for testing, a fifth of the rest for validation
    assert re.search(r"counts/hospital-a/train/samples +3 bytes  122", said)


@needs_flower
def test_keys_are_secret_and_only_where_they_belong(deployment: Path) -> None:
    secrets = {str(p.relative_to(deployment)) for p in deployment.rglob("*.key")}
    assert secrets == {"server/keys/server.key", *(f"{h}/keys/node.key" for h in HOSPITALS)}
    for name in secrets:
        assert stat.S_IMODE((deployment / name).stat().st_mode) == 0o600
    for name in ("server", *HOSPITALS):
        assert stat.S_IMODE((deployment / name).stat().st_mode) == 0o700
    public = {path.name for path in (deployment / "server" / "keys").glob("*.pub")}
    assert public == {f"{hospital}.pub" for hospital in HOSPITALS}


def error_of(read: Any, path: Path, **settings: Any) -> str:
    path.write_text(yaml.safe_dump(settings))
    with pytest.raises(ValueError, match="Expected") as error:
        read(path)
    return str(error.value)


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    known: dict[str, Any] = {"recipe": "r.yaml", "nodes": ["a"]}
    assert "Did you mean 'timeout'?" in error_of(read_server, path, **known, timout=3)
    assert "to have the setting `nodes`" in error_of(read_server, path, recipe="r.yaml")
    assert "nodes=3" in error_of(read_server, path, recipe="r.yaml", nodes=3)
    twice = {"a": ["x"], "b": ["x"]}
    assert "every client on one node" in error_of(read_server, path, recipe="r", nodes=twice)
    assert "HOST:PORT" in error_of(read_server, path, **known, address="here")
    assert "a server that others can reach" in error_of(
        read_server, path, **known, keys=None, address="0.0.0.0:8000"
    )
    for timeout in (0, -1, "1 h", True):
        assert f"timeout={timeout!r}" in error_of(read_server, path, **known, timeout=timeout)
    assert "max_samples=0" in error_of(read_server, path, **known, max_samples=0)
    assert "`share` to be a list" in error_of(read_client, path, name="a", recipe="r", share="x")
    assert "share=''" in error_of(read_client, path, name="a", recipe="r", share="")
    twice_a = {"name": "a", "recipe": "r", "clients": ["x", "x"]}
    assert "Name each client once" in error_of(read_client, path, **twice_a)
    path.write_text("recipe: [")
    with pytest.raises(ValueError, match="to be YAML"):
        read_server(path)


def test_a_node_may_share_nothing_and_a_round_may_wait_for_ever(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("name: a\nrecipe: r.yaml\nshare: []\n")
    assert read_client(tmp_path / "c.yaml").share == []
    (tmp_path / "s.yaml").write_text("nodes: [a]\nrecipe: r.yaml\ntimeout: null\n")
    assert read_server(tmp_path / "s.yaml").timeout is None


def test_a_folder_that_is_in_use_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    given = ["--recipe", "r.yaml", "--nodes", "a", "--address", "127.0.0.1:1"]
    with pytest.raises(SystemExit):
        commands.main(["init", str(tmp_path), *given])
    assert "aren't overwritten" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["a", "a"], "different names"),
        (["../a"], "letters, digits and hyphens"),
        (["server"], "that of the server's folder"),
    ],
)
def test_names_that_cannot_be_folders_are_refused(
    names: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.yaml").write_text("method: FedAvg\n")
    given = ["--recipe", str(tmp_path / "r.yaml"), "--address", "127.0.0.1:1"]
    with pytest.raises(SystemExit):
        commands.main(["init", str(tmp_path / "new"), *given, "--nodes", *names])
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_status_says_who_is_here_and_how_far_the_run_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "server.yaml").write_text("nodes: [a, b]\nrecipe: r.yaml\n")
    status = ["status", "--config", str(tmp_path / "server.yaml")]
    commands.main(status)
    assert capsys.readouterr().out == "No round is finished yet.\n"
    clients = {
        "a": {"here": True, "samples": 3, "last_round": 1, "left_out": ""},
        "b": {"here": False, "samples": 4, "last_round": -1, "left_out": "no answer"},
    }
    said = {"state": "running", "rounds": 2, "of": 5, "clients": clients}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text(json.dumps(said))
    commands.main(status)
    assert capsys.readouterr().out.splitlines() == [
        "running: 2 of 5 rounds",
        "  a                    here, 3 samples, took part in round 2",
        "  b                    away, 4 samples, took no part yet, left out: no answer",
    ]


def test_the_compose_file_has_the_folders_that_its_commands_write() -> None:
    folder = Path(__file__).parents[2] / "recipes" / "deploy"
    text = (folder / "compose.yml").read_text()
    ((names, host, port),) = re.findall(r"--nodes (.*) --address (\S+):(\d+)", text)
    services = yaml.safe_load(text)["services"]
    assert list(services) == [host, *names.split()]
    for name, service in services.items():
        assert service["volumes"] == [f"./deployment/{name}:/work"]
        assert service["command"] == ["server" if name == host else "client"]
        assert service["build"] == "."
        assert service["user"] == "${PFL_USER:-1000:1000}"
    assert services[host]["expose"] == [port]
    (start,) = re.findall(r"#   (.* docker compose up .*)", text)
    shell = ["bash", "-ec", f'docker() {{ echo "$PFL_USER $*"; }}; {start}']
    done = subprocess.run(shell, capture_output=True, text=True, check=True)
    assert done.stdout == f"{os.getuid()}:{os.getgid()} compose up --build\n"
    assert "dist/*.whl" in (folder / "Dockerfile").read_text()
    assert "-w dist" in text


@pytest.mark.slow
def test_the_command_line_needs_no_flower() -> None:
    code = "import sys, lightning_pfl.__main__; print({m.split('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'lightning_pfl'" in done.stdout
    assert "'flwr'" not in done.stdout
    assert "'cryptography'" not in done.stdout
