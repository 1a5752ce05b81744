"""The comparison with other frameworks, whose process is a script here that answers at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import cells, peers
from tests.benchmarks.test_table import TINY

ANSWERING = """#!/usr/bin/env bash
if [ "$1" = -c ]; then echo "other 1.0"; exit; fi
while read -r line; do echo '{"wall": 1000, "cpu": 2000, "way": 1e-30}'; done
"""


def executable(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "WORKLOAD", TINY)


def test_the_ratio_is_the_peers_seconds_over_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "LIKE", float("inf"))
    python = executable(tmp_path / "python", ANSWERING)
    found = peers.measure("fluke", python, "FedAvg", 1, least=0)
    assert found["peer"] == "other 1.0"
    assert found["rounds"] == cells.LEAST
    assert found["peer_seconds"] == 1000
    assert found["wall"] == pytest.approx(1000 / found["seconds"])
    assert f"{found['wall']:.2f} by the clock" in peers.describe(found)


def test_a_peer_that_trains_something_else_is_refused(tmp_path: Path) -> None:
    python = executable(tmp_path / "python", ANSWERING)
    with pytest.raises(RuntimeError, match="fluke, FedAvg went 1e-30 and ours"):
        peers.measure("fluke", python, "FedAvg", 1, least=0)


def test_a_peer_that_ends_is_named_with_its_status(tmp_path: Path) -> None:
    python = executable(tmp_path / "python", "#!/usr/bin/env bash\nexit 7\n")
    with pytest.raises(RuntimeError, match="to run a round, but it ended with status 7"):
        peers.measure("fluke", python, "FedAvg", 1, least=0)


def test_an_interpreter_without_the_framework_is_refused() -> None:
    with pytest.raises(ValueError, match="pip install 'blazefl"):
        peers.version_of("blazefl", sys.executable)


def test_no_file_hides_one_of_pythons_own() -> None:
    """A framework's process looks for modules in the folder of its script first."""
    names = {path.stem for path in peers.SIDE.parent.glob("*.py")} - {"__init__"}
    assert "peers" in names
    assert names & set(sys.stdlib_module_names) == set()
