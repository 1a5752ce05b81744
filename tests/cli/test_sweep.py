"""`lightning-pfl sweep`: its grid, what is skipped and resumed, and the choice."""

from __future__ import annotations

import json
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pfl.cli.command_line import main
from lightning_pfl.cli.sweep import check_validation, make_trials, read_options, read_seeds
from lightning_pfl.cli.trial import RECORD
from tests.results.logs import write_run

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
DIGITS = RECIPES / "fedrep_digits.yaml"


class Runs:
    """Stands in for processes: writes logs whose accuracy is the head's epochs over ten."""

    def __init__(self, fails: int = -1) -> None:
        self.commands: list[list[str]] = []
        self.fails, self.says = fails, ["nothing"]

    def __call__(self, command: list[str], **options: Any) -> Any:
        self.commands.append(command)
        given = dict(pairwise(command))
        folder = Path(
            given["--trainer.logger.save_dir"],
            given["--trainer.logger.name"],
            given["--trainer.logger.version"],
        )
        epochs = int(given["--method.head_epochs"])
        if epochs == self.fails:
            print(*self.says, sep="\n", file=options["stdout"])
            return subprocess.CompletedProcess(command, 1)
        made = folder / "made"
        write_run(made, "FedRep", [[epochs / 10] * 3] * 2, seed=0, head_epochs=epochs)
        for file in made.iterdir():
            file.rename(folder / file.name)
        made.rmdir()
        return subprocess.CompletedProcess(command, 0)


def sweep(folder: Path, *words: str) -> None:
    main(["sweep", "--config", str(DIGITS), "--folder", str(folder), *words])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs()
    # Packages that a first reading of options imports may start programs, too.
    monkeypatch.setattr(
        "lightning_pfl.cli.trial.subprocess", SimpleNamespace(run=made, STDOUT=subprocess.STDOUT)
    )
    return made


def test_every_combination_runs_once_with_every_seed(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--method.head_epochs", "1,5", "--model.lr=0.1", "--seeds", "0..2", "--workers", "2")
    sweep(tmp_path, *words)
    assert len(runs.commands) == 2 * 3
    assert "Best on validation data (val_acc): FedRep (head_epochs 5)" in capsys.readouterr().out
    for command in runs.commands:
        assert command[command.index("--model.lr") + 1] == "0.1"
    sweep(tmp_path, *words)
    assert len(runs.commands) == 2 * 3  # nothing is missing
    assert "6 runs in" in capsys.readouterr().out
    sweep(tmp_path, *words[:1], "1,5,9", *words[2:])
    assert len(runs.commands) == 3 * 3


def test_a_stopped_run_goes_on_and_one_of_other_settings_begins_anew(
    tmp_path: Path, runs: Runs
) -> None:
    (trial,) = make_trials([DIGITS], {"method.head_epochs": ["3"]}, [0], False, tmp_path)
    last = trial.folder / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    last.touch()
    assert not trial.is_done
    (trial.folder / RECORD).write_text(json.dumps({"options": list(trial.options), "status": None}))
    assert not trial.is_done
    assert trial.run(1) == 0
    assert runs.commands[-1][-2:] == ["--ckpt_path", "last"]
    assert trial.is_done
    (trial.folder / RECORD).write_text(json.dumps({"options": ["other"], "status": 0}))
    assert not trial.is_done
    assert trial.run(1) == 0
    assert "--ckpt_path" not in runs.commands[-1]
    assert not last.exists()


def test_failures_are_named_and_the_others_run(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.fails = 1
    with pytest.raises(SystemExit, match=r"1 runs failed: .*head_epochs=1.*output.txt"):
        sweep(tmp_path, "--method.head_epochs", "1,5")
    out = capsys.readouterr().out
    assert "Best on validation data" in out
    assert "1/2 head_epochs=1 seed 0: failed, see" in out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--method.head_epoch", "1,5"], r"Did you mean 'head_epochs'\?"),
        (["--method.head_epochs", "1,many"], "many"),
        (["--trainer.max_epoch", "3"], r"Did you mean 'trainer\.max_epochs'\?"),
    ],
)
def test_a_misspelt_option_ends_the_sweep_before_its_first_run(
    words: list[str],
    error: str,
    tmp_path: Path,
    runs: Runs,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        sweep(tmp_path, "--seeds", "0..2", *words)
    assert ended.value.code == 2
    assert re.search(error, capsys.readouterr().err)
    assert not runs.commands


@pytest.mark.parametrize(
    ("says", "shown"),
    [
        (
            ["tip: For details.", "error: Expected an argument of Net, but got 'lrr'.", "Did you?"],
            "(error: Expected an argument of Net, but got 'lrr'. Did you?), see",
        ),
        (
            ["ValueError: 1", "Traceback (most recent call last):", "  x", "my.OwnError: No file."],
            "(my.OwnError: No file.), see",
        ),
    ],
)
def test_a_failure_says_its_error(
    says: list[str],
    shown: str,
    tmp_path: Path,
    runs: Runs,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs.fails, runs.says = 1, says
    with pytest.raises(SystemExit):
        sweep(tmp_path, "--method.head_epochs", "1")
    assert f"1/1 recipe seed 0: failed {shown}" in capsys.readouterr().out


def test_partitions_vary_when_asked(tmp_path: Path) -> None:
    for vary in (False, True):
        first, second = make_trials([DIGITS], {}, [0, 1], vary, tmp_path)
        assert ("--data.seed" in first.options) is vary
        assert first.folder.parent == second.folder.parent


def test_nothing_is_chosen_by_test_data() -> None:
    recipe = RECIPES / "fedrep_fashion_mnist.yaml"
    with pytest.raises(ValueError, match=r"validation data of their own .* --data.val_split train"):
        check_validation([recipe], {})
    check_validation([recipe], {"data.val_split": ["train"]})
    with pytest.raises(ValueError, match="validation data of their own"):
        check_validation([DIGITS], {"data.val_split": ["test"]})


@pytest.mark.parametrize("text", ["", "a", "0..b", "3..1", "-1", "1..2..3"])
def test_other_seeds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--seeds to be like 0..2 or 0,1,2, but got"):
        read_seeds(text)


@pytest.mark.parametrize("words", [["--a"], ["x", "1"], ["--a", "--b"]])
def test_options_without_values_are_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match="Expected options of `fit` with their values"):
        read_options(words)


@pytest.mark.slow
def test_a_sweep_of_real_runs_ends_in_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(tmp_path, "--method.head_epochs", "1,2", "--trainer.max_epochs", "1", "--workers", "2")
    assert "Best on validation data (val_acc): FedRep (head_epochs" in capsys.readouterr().out
