"""The runner of recipes and its table, on recipes that aren't run."""

import json
import statistics
import subprocess
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from recipes import outcome as worker
from recipes import results_table
from recipes.outcome import NO_DATA, OUTCOME, RECIPES, ProcessTimer
from recipes.reproduce import Run, main, parse

RECIPE = """# A recipe.
method:
  class_path: FedPer
trainer:
  max_epochs: 7   # rounds
"""
TUNED = (
    RECIPE
    + """  callbacks:
    - class_path: HeadFineTuning
"""
)


def outcome(seed: int, mean: float, worst: float) -> dict[str, Any]:
    return {
        "recipe": "fedper.yaml",
        "seed": seed,
        "last10": {"val_acc": {"mean": mean, "worst_decile": worst}},
        "test": {"test_acc": {"mean": mean, "worst_decile": worst}},
        "seconds": 60.0 * (seed + 1),
        "commit": "abc",
        "machine": "two cores",
        "torch": "3",
    }


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "fedper.yaml"
    path.write_text(RECIPE)
    return path


def make_run(recipe: Path, *extra: str) -> Run:
    folder = str(recipe.parent)
    options = parse([str(recipe), "--logs", folder, "--results", folder, *extra])
    return Run(options.recipes[0], 0, options)


def test_a_row_has_mean_and_deviation_over_seeds_in_percent(recipe: Path) -> None:
    cells = results_table.row(recipe, [outcome(0, 0.9, 0.5), outcome(1, 0.8, 0.7)])
    deviation = statistics.stdev([90, 80])
    assert cells[:4] == ["fedper.yaml", "FedPer", "7", "2"]
    assert cells[4] == f"85.00 ± {deviation:.2f}"
    assert cells[5].startswith("60.00 ± ")
    assert cells[6:8] == cells[4:6]
    assert cells[8] == "1.5"


def test_one_seed_has_no_deviation_and_no_outcome_has_dashes(recipe: Path) -> None:
    assert results_table.row(recipe, [outcome(0, 0.9, 0.5)])[4] == "90.00"
    assert set(results_table.row(recipe, [])[4:]) == {"-"}


def test_a_model_without_an_accuracy_shows_its_losses(recipe: Path) -> None:
    outcomes = []
    for seed, mean in ((0, 0.5), (1, 1.5)):
        found = outcome(seed, mean, 4.0)
        found["last10"] = {"val_loss": found["last10"]["val_acc"]}
        found["test"] = {"test_loss": found["test"]["test_acc"]}
        outcomes.append(found)
    # The sample deviation of two values is their distance over the root of two.
    spread = f"loss 1 ± {1 / 2**0.5:.2g}"
    assert results_table.row(recipe, outcomes)[4:8] == [spread, "loss 4 ± 0", spread, "loss 4 ± 0"]
    assert results_table.row(recipe, outcomes[:1])[4] == "loss 0.5"


def test_a_fine_tuning_recipe_shows_tuned_models_and_never_the_untuned_ones(recipe: Path) -> None:
    recipe.write_text(TUNED)
    both = outcome(0, 0.1, 0.1)
    both["test"]["ft/test_acc"] = {"mean": 0.9, "worst_decile": 0.8}
    assert results_table.row(recipe, [both])[1:8] == [
        *("FedPer + FT", "7", "1"),
        *("-", "-", "90.00", "80.00"),
    ]


def test_the_readme_is_replaced_between_the_markers_only(recipe: Path) -> None:
    readme = recipe.parent / "README.md"
    begin, end = results_table.BEGIN, results_table.END
    readme.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    for _ in range(2):
        results_table.write_readme(recipe.parent, [outcome(0, 0.9, 0.5)])
    text = readme.read_text()
    assert text.startswith(f"before\n{begin}\n| recipe |")
    assert text.endswith(f"Machine: two cores, torch 3.\n{end}\nafter\n")
    assert text.count("[fedper.yaml](fedper.yaml)") == 1
    assert "old" not in text


def test_a_run_is_done_as_long_as_its_settings_are_the_same(recipe: Path) -> None:
    run = make_run(recipe)
    assert not run.is_done()
    run.outcome.write_text(json.dumps({"fingerprint": run.fingerprint}))
    assert run.is_done()
    assert not make_run(recipe, "--trainer.max_epochs=3").is_done()
    recipe.write_text(RECIPE.replace("# rounds", "# communication rounds"))
    assert make_run(recipe).is_done()
    recipe.write_text(RECIPE.replace("7", "8"))
    assert not make_run(recipe).is_done()


def test_forget_removes_outcome_and_checkpoints(recipe: Path) -> None:
    run = make_run(recipe)
    run.outcome.write_text(json.dumps({"fingerprint": run.fingerprint}))
    run.trial.folder.mkdir(parents=True)
    run.forget()
    assert not run.trial.folder.exists()
    assert not run.is_done()


def test_what_is_done_is_not_run_again(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(recipe)
    stored = {**outcome(0, 0.9, 0.5), "fingerprint": run.fingerprint}
    run.outcome.write_text(json.dumps(stored))
    folder = str(recipe.parent)
    main([str(recipe), "--logs", folder, "--results", folder])
    assert "90.00" in capsys.readouterr().out


class Started:
    """Stands in for the processes of runs, of which those of some recipes end with a status."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **statuses: int) -> None:
        self.commands: list[list[str]] = []
        self.statuses = statuses
        monkeypatch.setattr("lightning_pfl.cli.trial.subprocess.run", self)

    def __call__(self, command: list[str], **options: Any) -> Any:
        self.commands.append(command)
        assert options["cwd"] == RECIPES.parent
        given = dict(pairwise(command))
        status = self.statuses.get(Path(given["--config"]).stem, 0)
        if status == 0:
            stored = {k: v for k, v in outcome(0, 0.9, 0.5).items() if k not in ("recipe", "seed")}
            names = ("save_dir", "name", "version")
            folder = Path(*(given[f"--trainer.logger.{name}"] for name in names))
            (folder / OUTCOME).write_text(json.dumps(stored))
        return subprocess.CompletedProcess(command, status)


def test_a_run_goes_on_from_the_last_checkpoint_of_the_same_settings(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started(monkeypatch)
    run = make_run(recipe, "--trainer.max_epochs=3")
    assert run.trial.run() == 0
    assert started.commands[-1][1:3] == ["-m", "recipes.outcome"]
    assert "--ckpt_path" not in started.commands[-1]
    assert "--trainer.max_epochs=3" in started.commands[-1]
    checkpoints = run.trial.folder / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "last.ckpt").touch()
    assert run.trial.run() == 0
    assert started.commands[-1][-2:] == ["--ckpt_path", "last"]
    other = make_run(recipe, "--trainer.max_epochs=4")
    assert other.trial.folder != run.trial.folder


def test_an_outcome_in_the_logs_is_stored_without_another_run(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started(monkeypatch)
    run = make_run(recipe)
    for _ in range(2):
        assert run.start() == 0
        assert run.is_done()
        stored = json.loads(run.outcome.read_text())
        assert [*stored][:3] == ["recipe", "fingerprint", "seed"]
        run.outcome.unlink()
    assert len(started.commands) == 1


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_run_that_fails_is_named_at_the_end_and_stops_no_other(
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    workers: str,
) -> None:
    """Data that can't be downloaded here are no reason to leave out the other recipes."""
    other = recipe.with_name("missing.yaml")
    other.write_text(RECIPE)
    Started(monkeypatch, missing=1)
    folder = str(recipe.parent)
    arguments = [*map(str, (other, recipe)), *("--seeds", "0", "1"), *("--workers", workers)]
    with pytest.raises(SystemExit, match=r"missing.yaml with seed 0, missing.yaml with seed 1\.$"):
        main([*arguments, "--logs", folder, "--results", folder])
    assert "90.00" in capsys.readouterr().out


def test_recipes_without_their_data_are_skipped_and_said_so(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started(monkeypatch, fedper=NO_DATA)
    folder = str(recipe.parent)
    main([str(recipe), *("--seeds", "0", "1"), *("--logs", folder), *("--results", folder)])
    assert len(started.commands) == 1  # another seed needs the same data
    assert "Skipped, as their data are not here: fedper.yaml." in capsys.readouterr().out


def test_a_source_without_data_ends_the_run_with_a_status_of_its_own(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(options: list[str]) -> None:
        raise FileNotFoundError("Expected the images in one of these places")

    monkeypatch.setattr(worker, "run", nowhere)
    with pytest.raises(SystemExit) as stopped:
        worker.main(["--config", str(recipe)])
    assert stopped.value.code == NO_DATA
    assert "fedper.yaml is skipped. Expected the images in" in capsys.readouterr().err


def test_processor_time_goes_on_where_a_resumed_run_began(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5, 100.0, 101.0, 103.0])
    monkeypatch.setattr("time.process_time", lambda: next(clock))
    trainer: Any = None
    first, second = ProcessTimer(), ProcessTimer()
    first.on_train_start(trainer, trainer)
    first.on_train_epoch_end(trainer, trainer)
    second.load_state_dict(first.state_dict())
    second.on_train_start(trainer, trainer)
    for expected in (2.5 + 1, 2.5 + 3):
        second.on_train_epoch_end(trainer, trainer)
        assert second.seconds == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_run_that_was_stopped_after_its_last_round_has_the_same_outcome(
    tmp_path: Path, fashion_mnist_dir: Path
) -> None:
    """No round is left that would evaluate anything."""
    options = parse(
        [
            *(str(RECIPES / "fedper_fashion_mnist.yaml"), "--trainer.max_epochs=10"),
            *("--logs", str(tmp_path), "--results", str(tmp_path)),
            f"--data.source.data_dir={fashion_mnist_dir}",
        ]
    )
    run = Run(options.recipes[0], 0, options)
    worker.main([*run.trial.options])
    assert (run.trial.folder / "checkpoints" / "last.ckpt").is_file()
    left = run.trial.folder / OUTCOME
    expected = json.loads(left.read_text())
    left.unlink()
    worker.main([*run.trial.options, "--ckpt_path", "last"])
    for part in ("last10", "test", "rounds"):
        assert json.loads(left.read_text())[part] == expected[part]
    assert expected["last10"]["val_acc"]["mean"] > 0


def test_outcomes_of_settings_that_have_changed_are_not_shown(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Started(monkeypatch, fedper=1)
    run = make_run(recipe)
    run.outcome.write_text(json.dumps({**outcome(0, 0.9, 0.5), "fingerprint": run.fingerprint}))
    folder = str(recipe.parent)
    for text, shown in ((RECIPE, True), (RECIPE.replace("7", "8"), False)):
        recipe.write_text(text)
        with nullcontext() if shown else pytest.raises(SystemExit, match="with seed 0"):
            main([str(recipe), "--logs", folder, "--results", folder])
        assert ("90.00" in capsys.readouterr().out) == shown
