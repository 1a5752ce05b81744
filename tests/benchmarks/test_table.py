"""The plain loop of the table and the package train the same models."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch

from benchmarks import cells, fashion_mnist, memory, plain, table
from benchmarks.plain import METHODS, PlainLoop
from benchmarks.workloads import FROM_FILES, WORKLOADS, Workload
from lightning_pfl import methods
from lightning_pfl.models import MLP
from tests.engine.pretended_device import NAME, PretendedDevice, pretended_accelerator

TINY = Workload(
    "tiny", lambda: MLP([6, 5, 10]), (6,), clients=4, samples=9, batch_size=4, cohort=3,
    test_samples=2, head_epochs=2, sigma=0.5,
)  # fmt: skip


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """Give the loggers their levels back, which the command raises."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


PRETENDED_PYTHON = f"""#!/usr/bin/env bash
last=${{@: -1}}
case "$1 $2" in
"-m pytest")
    counts='tests="2" failures="1" errors="0" skipped="0" time="1.5"'
    echo "<testsuites><testsuite $counts/></testsuites>" > "$last"
    exit 1 ;;
"-m benchmarks.table")
    echo "$@" >> "$(dirname "$0")/measured"
    echo '{{"cells": {{"one": {{"workload": "w1"}}}}}}' > "$last" ;;
"- "*)
    name='import torch; torch.cuda.get_device_name = lambda: "pretended"'
    (echo "$name"; cat) | {sys.executable} "$@" ;;
esac
"""


@pytest.mark.parametrize("method", METHODS)
def test_both_sides_end_with_the_same_models(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    assert cells.check("tiny", method, "sequential") < cells.SAME


@pytest.mark.parametrize(("name", "method"), [("DITTO", "Ditto"), ("PFEDME", "PFedMe")])
def test_a_loop_that_trains_otherwise_is_refused(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    monkeypatch.setattr(f"benchmarks.plain.{name}", 0.999 * getattr(plain, name))
    with pytest.raises(AssertionError, match=f"tiny, {method}, sequential: after 3 rounds in doub"):
        cells.check("tiny", method, "sequential")


def test_a_cell_has_both_sides_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    cell = cells.measure("tiny", "LocalOnly", "sequential", threads=1, least=0)
    assert cell.apart < 1e-4
    assert cell.cpu is not None
    assert cell.wall is not None
    assert cell.cpu > 0 < cell.wall
    assert cell.rounds == cells.LEAST
    assert cell.choice.startswith("sequential")


def test_a_method_without_a_loop_has_the_packages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    cell = cells.measure("tiny", "ClusterOracle", "sequential", threads=1, least=0)
    assert cell.cpu is None
    assert cell.wall is None
    assert cell.cpu_seconds > 0


def test_every_method_has_a_cell_or_a_reason() -> None:
    assert {*cells.NAMES, *cells.NOT_HERE} == {*methods.__all__, "FedRep, cached"}


def test_workloads_from_files_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = replace(
        WORKLOADS[FROM_FILES], read=partial(fashion_mnist.load_clients, tmp_path / "nowhere")
    )
    monkeypatch.setitem(WORKLOADS, FROM_FILES, nowhere)
    with pytest.raises(SystemExit) as ended:
        table.main(["--parts", "rounds", "--workloads", FROM_FILES, "--methods", "FedAvg"])
    assert str(ended.value.code).startswith("failed: cells, w1-fashion, FedAvg, auto, 1")
    assert "Install Debian's package dataset-fashion-mnist" in capsys.readouterr().out


def test_memory_is_compared_with_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of 5 + 1 numbers and positions; models of 6 * 5 + 5 * 10 + 15 numbers."""
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    found = memory.measure("tiny", "Ditto", rounds=2)
    samples = int(TINY.data()[0].num_samples.sum()) + 2 * TINY.clients
    model = 4 * (6 * 5 + 5 + 5 * 10 + 10)
    data = samples * (6 * 4 + 8 + 8)
    expected = data + 2 * TINY.clients * model / 2 + (1 + TINY.cohort + memory.STATES) * model
    assert found["needed"] == pytest.approx(expected / 2**20)
    assert found["ratio"] == found["peak"] / found["needed"]


@pytest.mark.parametrize("method", METHODS)
def test_the_loop_stays_on_its_device(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = TINY.data()
    L.seed_everything(0, verbose=False)
    initial = TINY.make().state_dict()
    expected = PlainLoop(TINY, train, test, initial, method)
    expected.run_round()
    pretended_accelerator()
    with PretendedDevice():
        loop = PlainLoop(TINY, train, test, initial, method, device=NAME)
        # Inference mode isn't for the pretended device.
        monkeypatch.setattr(loop, "evaluate", lambda: 0.0)
        loop.run_round()
        assert {leaf.device.type for leaf in loop.server} == {NAME}
        found = [leaf.cpu() for leaf in loop.server]
    for leaf, name in zip(found, loop.names, strict=True):
        torch.testing.assert_close(leaf, expected.server[loop.names.index(name)])


def test_without_a_gpu_its_script_says_so() -> None:
    script = Path(table.__file__).parent / "gpu.sh"
    ended = subprocess.run(
        ["bash", script], env={**os.environ, "PYTHON": "false"}, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "Expected a GPU" in ended.stderr


@pytest.mark.slow
def test_the_script_of_the_gpu_runs_on_a_cpu(tmp_path: Path) -> None:
    """All of it but the GPU: the tests are skipped, and one cell is measured."""
    script, file = Path(table.__file__).parent / "gpu.sh", tmp_path / "cpu.json"
    ended = subprocess.run(
        ["bash", script, "--accelerator", "cpu", file],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    written = json.loads(file.read_text())
    assert written["device"] == "cpu"
    assert written["tests"]["failures"] == written["tests"]["errors"] == "0"
    measured = [(cell["workload"], cell["precision"]) for cell in written["cells"]["measured"]]
    assert measured == [("logistic", "32-true"), ("logistic", "bf16-mixed")]


def test_the_script_of_the_gpu_refuses_other_accelerators() -> None:
    script = Path(table.__file__).parent / "gpu.sh"
    command = ["bash", str(script), "--accelerator", "tpu"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "Expected --accelerator to be gpu or cpu, but got 'tpu'" in ended.stderr


@pytest.mark.slow
def test_the_script_of_the_gpu_writes_what_it_measured(tmp_path: Path) -> None:
    """With an interpreter that answers for the GPU."""
    python = tmp_path / "python"
    python.write_text(PRETENDED_PYTHON)
    python.chmod(0o755)
    script, file = Path(table.__file__).parent / "gpu.sh", tmp_path / "gpu.json"
    ended = subprocess.run(
        ["bash", script, file],
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1  # of the tests
    written = json.loads(file.read_text())
    assert written["tests"] == {
        "status": 1, "tests": "2", "failures": "1", "errors": "0", "skipped": "0", "time": "1.5",
    }  # fmt: skip
    assert written["cells"] == {"status": 0, "measured": [{"workload": "w1"}]}
    asked = (tmp_path / "measured").read_text().splitlines()
    usual, graphs, overlap, mixed = (line.partition("--methods")[2].split()[2:-2] for line in asked)
    assert (usual, graphs) == ([], ["--cuda-graphs"])
    assert overlap == ["--cuda-graphs", "--overlap-evaluation"]
    assert mixed == ["--precision", "bf16-mixed"]
    for line in asked:
        assert "--workloads w1 w3 w4 --methods FedAvg FedRep" in line


def test_what_fails_is_named_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    path = tmp_path / "new" / "found.json"
    asked = ["--parts", "rounds", "--workloads", "tiny", "--threads", "1", "--json", str(path)]
    asked += ["--seconds", "0", "--no-check"]
    with pytest.raises(SystemExit) as ended:
        table.main([*asked, "--methods", "FedAvg", "--engines", "nonsense", "sequential"])
    assert ended.value.code == "failed: cells, tiny, FedAvg, nonsense, 1"
    written = json.loads(path.read_text())
    assert list(written["cells"]) == ["tiny, FedAvg, sequential, 1"]
    assert written["machine"]["machine"]["torch"] == torch.__version__

    def refuse(*arguments: object, **settings: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(table, "measure_cell", refuse)
    table.main([*asked, "--methods", "FedAvg", "--engines", "sequential", "--resume"])
    assert json.loads(path.read_text())["cells"] == written["cells"]


def test_resuming_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        table.main(["--resume"])
    assert "--resume needs --json" in capsys.readouterr().err


def test_a_peer_is_a_name_and_an_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        table.main(["--peer", "flower=python"])
    assert "NAME of fluke, blazefl, but got 'flower=python'" in capsys.readouterr().err
