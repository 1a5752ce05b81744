"""The plain loop of the table and the package train the same models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch

from benchmarks import table
from benchmarks.plain import METHODS, PlainLoop
from benchmarks.workloads import WORKLOADS, Workload
from lightning_pfl.models import MLP
from tests.engine.pretended_device import NAME, PretendedDevice, pretended_accelerator

TINY = Workload(
    "tiny", lambda: MLP([6, 5, 10]), (6,), clients=4, samples=9, batch_size=4, cohort=3,
    test_samples=2, head_epochs=2, sigma=0.5,
)  # fmt: skip

PRETENDED_PYTHON = f"""#!/usr/bin/env bash
last=${{@: -1}}
case "$1 $2" in
"-m pytest")
    counts='tests="2" failures="1" errors="0" skipped="0" time="1.5"'
    echo "<testsuites><testsuite $counts/></testsuites>" > "$last"
    exit 1 ;;
"-m benchmarks.table") echo '[{{"workload": "w1"}}]' > "$last" ;;
"- "*)
    name='import torch; torch.cuda.get_device_name = lambda: "pretended"'
    (echo "$name"; cat) | {sys.executable} "$@" ;;
esac
"""


@pytest.mark.parametrize("method", METHODS)
def test_both_sides_end_with_the_same_model(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    monkeypatch.setattr(table, "APART", 1e-4)
    cell = table.measure("tiny", method, "sequential", rounds=1, threads=1)
    assert cell.apart < 1e-4


def test_a_loop_that_trains_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    monkeypatch.setattr("benchmarks.plain.PFEDME", 3.0)
    with pytest.raises(AssertionError, match="tiny, PFedMe, sequential: the models differ"):
        table.measure("tiny", "PFedMe", "sequential", rounds=1, threads=1)


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
