"""What is published is what is tested: every recipe runs, on tiny data of the true layout."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_pfl.cli import PFLCLI

ROOT = Path(__file__).resolve().parents[1] / "recipes"
RECIPES = sorted(ROOT.rglob("*.yaml"))
ROUNDS = 2


def arguments(recipe: Path, data_dir: Path, root: Path) -> list[str]:
    """The recipe with only its data's place, its rounds and its device replaced."""
    settings: dict[str, Any] = yaml.safe_load(recipe.read_text())
    changed = [
        *("--trainer.max_epochs", str(ROUNDS), "--trainer.accelerator", "cpu"),
        *("--trainer.default_root_dir", str(root), "--trainer.enable_progress_bar", "false"),
    ]
    if settings["data"]["init_args"]["source"]["class_path"] == "FashionMNIST":
        changed += ["--data.init_args.source.init_args.data_dir", str(data_dir)]
    return ["fit", "--config", str(recipe), *changed]


def test_the_table_of_results_lists_exactly_the_recipes() -> None:
    listed = re.findall(r"^\| \[[^]]+\]\(([^)]+\.yaml)\)", (ROOT / "README.md").read_text(), re.M)
    assert len(RECIPES) > 0
    assert sorted(listed) == [str(path.relative_to(ROOT)) for path in RECIPES]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_says_how_it_is_run_and_is_short(recipe: Path) -> None:
    text = recipe.read_text()
    assert f"lightning-pfl fit --config recipes/{recipe.relative_to(ROOT)}" in text
    assert len(text.splitlines()) <= 50


@pytest.mark.recipe
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_runs(recipe: Path, fashion_mnist_dir: Path, tmp_path: Path) -> None:
    cli = PFLCLI(arguments(recipe, fashion_mnist_dir, tmp_path))
    trainer = cli.trainer
    assert trainer.current_epoch == ROUNDS
    if "HeadFineTuning" in recipe.read_text():
        assert 0 <= float(trainer.callback_metrics["ft/val_acc/worst_decile"]) <= 1
    for key in ("val_acc", "val_acc/weighted", "val_acc/worst_decile", "val_acc/worst"):
        assert 0 <= float(trainer.callback_metrics[key]) <= 1
    assert math.isfinite(float(trainer.callback_metrics["val_loss"]))
    assert trainer.log_dir is not None
    assert (Path(trainer.log_dir) / "config.yaml").is_file()
    assert list(tmp_path.rglob("last.ckpt"))
