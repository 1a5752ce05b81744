"""``lightning-pfl completion``: the script is sourced by a shell, which is then asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_pfl import methods
from lightning_pfl.cli.command_line import main

shtab = pytest.importorskip("shtab", reason="the completion of a shell needs shtab")

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"
$(complete -p lightning-pfl | sed 's/.*-F //; s/ .*//')
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "script.sh"
    with path.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        with pytest.raises(SystemExit) as ended:
            main(["completion", "bash"])
    assert ended.value.code in (None, 0)
    return path


def suggested(script: Path, *words: str) -> list[str]:
    ended = subprocess.run(
        ["bash", "-c", ASK, "bash", script, "lightning-pfl", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not ended.stderr
    return ended.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["comp"], {"compare", "completion"}),
        (["fit", "--meth"], {"--method"}),
        (["fit", "--method", "FedR"], {"FedRep"}),
        (["test", "--ckpt"], {"--ckpt_path"}),
        (["methods", "show", ""], set(methods.__all__)),
        (["recipes", "copy", "fedrep_digits"], {"fedrep_digits"}),
        (["sweep", "--work"], {"--workers"}),
        (["completion", "z"], {"zsh"}),
    ],
)
def test_a_shell_suggests(script: Path, words: list[str], expected: set[str]) -> None:
    assert set(suggested(script, *words)) == expected


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "ksh"])
    assert "invalid choice: 'ksh'" in capsys.readouterr().err


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit):
        main(["completion", "bash"])
    assert "pip install 'lightning-pfl[completion]'" in capsys.readouterr().err
