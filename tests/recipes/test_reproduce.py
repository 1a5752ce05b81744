"""The runner of recipes and its table, on recipes that aren't run."""

import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest

from recipes import results_table
from recipes.reproduce import NO_DATA, RECIPES, ProcessTimer, Run, main, parse, work

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
    logs = recipe.parent / recipe.stem / run.version
    logs.mkdir(parents=True)
    run.forget()
    assert not logs.exists()
    assert not run.is_done()


def test_what_is_done_is_not_run_again(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(recipe)
    stored = {**outcome(0, 0.9, 0.5), "fingerprint": run.fingerprint}
    run.outcome.write_text(json.dumps(stored))
    folder = str(recipe.parent)
    main([str(recipe), "--logs", folder, "--results", folder])
    assert "90.00" in capsys.readouterr().out


def test_a_run_resumes_from_the_last_checkpoint_of_the_same_settings(recipe: Path) -> None:
    run = make_run(recipe, "--trainer.max_epochs=3")
    assert "--ckpt_path" not in run.arguments()
    checkpoints = recipe.parent / recipe.stem / run.version / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "last.ckpt").touch()
    assert run.arguments()[-2:] == ["--ckpt_path", "last"]
    assert "--trainer.max_epochs=3" in run.arguments()
    other = make_run(recipe, "--trainer.max_epochs=4")
    assert other.version != run.version
    assert "--ckpt_path" not in other.arguments()


def test_a_run_that_fails_is_named_at_the_end_and_stops_no_other(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that can't be downloaded here are no reason to leave out the other recipes."""
    other = recipe.with_name("missing.yaml")
    other.write_text(RECIPE)

    def start(run: Run) -> None:
        if run.recipe == other:
            raise subprocess.CalledProcessError(1, "recipes.reproduce")
        stored = {**outcome(run.seed, 0.9, 0.5), "fingerprint": run.fingerprint}
        run.outcome.write_text(json.dumps(stored))

    monkeypatch.setattr(Run, "start", start)
    folder = str(recipe.parent)
    arguments = [*map(str, (other, recipe)), "--seeds", "0", "1"]
    with pytest.raises(SystemExit, match=r"missing.yaml with seed 0, missing.yaml with seed 1\.$"):
        main([*arguments, "--logs", folder, "--results", folder])
    assert "90.00" in capsys.readouterr().out


def test_recipes_without_their_data_are_skipped_and_said_so(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def start(run: Run) -> None:
        started.append(run.seed)
        raise subprocess.CalledProcessError(NO_DATA, "recipes.reproduce")

    monkeypatch.setattr(Run, "start", start)
    folder = str(recipe.parent)
    main([str(recipe), *("--seeds", "0", "1"), *("--logs", folder), *("--results", folder)])
    assert started == [0]  # another seed needs the same data
    assert "Skipped, as their data are not here: fedper.yaml." in capsys.readouterr().out


def test_a_source_without_data_ends_the_run_with_a_status_of_its_own(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(run: Run) -> None:
        raise FileNotFoundError("Expected the images in one of these places")

    monkeypatch.setattr(Run, "work", nowhere)
    with pytest.raises(SystemExit) as stopped:
        work(make_run(recipe))
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
    run.work()
    assert run.was_begun()
    expected = json.loads(run.outcome.read_text())
    run.outcome.unlink()
    run.work()
    for part in ("last10", "test", "rounds"):
        assert json.loads(run.outcome.read_text())[part] == expected[part]
    assert expected["last10"]["val_acc"]["mean"] > 0


def test_outcomes_of_settings_that_have_changed_are_not_shown(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "start", lambda run: None)
    run = make_run(recipe)
    run.outcome.write_text(json.dumps({**outcome(0, 0.9, 0.5), "fingerprint": run.fingerprint}))
    folder = str(recipe.parent)
    for text, shown in ((RECIPE, True), (RECIPE.replace("7", "8"), False)):
        recipe.write_text(text)
        main([str(recipe), "--logs", folder, "--results", folder])
        assert ("90.00" in capsys.readouterr().out) == shown
