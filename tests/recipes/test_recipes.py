"""What is published is what is tested: every recipe runs, on tiny data of the true layout."""

import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_pfl.cli.command_line import PFLCLI
from lightning_pfl.methods.base import Method
from tests.tiny_data import WRITERS, without_checksums

ROOT = Path(__file__).resolve().parents[2] / "recipes"
RECIPES = sorted(ROOT.rglob("*.yaml"))
ROUNDS = 2
#: Its hundred clients a round take half a minute: five, of the same thousand.
FEWER = {"fedrep_cifar10_1000_2": ("--trainer.strategy.init_args.participation", "0.005")}
#: Columns of FedRep's Table 1 whose networks and data are not CIFAR's, and some of its rows.
COLUMNS = {
    "fedrep_sent140": (),
    "fedrep_femnist_letters": ("--data.init_args.num_clients", "20"),
}
ROWS = {"per_fedavg": 1.0, "apfl": 1.0, "ditto": 1.0, "scaffold": 2.0}
"""How many models a client sends."""


def tiny_data(recipe: Path) -> tuple[str, int]:
    """The recipe's source, and into how many shards its partition splits a class."""
    settings = yaml.safe_load(recipe.read_text())["data"].get("init_args", {})
    source = settings.get("source", {}).get("class_path", "").rpartition(".")[2]
    partition = (settings.get("partition") or {}).get("init_args", {})
    places = settings.get("num_clients", 0) * partition.get("classes_per_client", 0)
    return source, places // (100 if source == "CIFAR100" else 10)


@pytest.fixture(scope="session")
def data_dirs(
    tmp_path_factory: pytest.TempPathFactory, fashion_mnist_dir: Path
) -> Callable[[str, int], Path | None]:
    """Where a source's tiny files are; they are written when they are first asked for."""

    @cache
    def folder(source: str, shards: int) -> Path | None:
        if source == "FashionMNIST":
            return fashion_mnist_dir
        if source not in WRITERS:
            return None
        path = tmp_path_factory.mktemp(source)
        WRITERS[source](path, shards)
        return path

    return folder


def arguments(recipe: Path, data_dir: Path | None, root: Path) -> list[str]:
    """The recipe with only its data's place, its rounds and its device replaced.

    And with as few public samples as tiny data have, and with narrow dense layers where it has
    AlexNet, whose 57 million parameters take gigabytes.
    """
    changed = [
        *("--trainer.max_epochs", str(ROUNDS), "--trainer.accelerator", "cpu"),
        *("--trainer.default_root_dir", str(root), "--trainer.enable_progress_bar", "false"),
    ]
    if data_dir is not None:
        changed += ["--data.init_args.source.init_args.data_dir", str(data_dir)]
    changed += FEWER.get(recipe.stem, ())
    for part in ("method", "data"):
        if "public_samples" in (yaml.safe_load(recipe.read_text())[part].get("init_args") or {}):
            changed += [f"--{part}.init_args.public_samples", "100"]
    if "class_path: AlexNetBN" in recipe.read_text():
        changed += ["--model.init_args.num_hidden", "16"]
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


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_builds_what_it_names(recipe: Path, tmp_path: Path) -> None:
    """The module, the data and the Trainer with its method and callbacks, without a round."""
    cli = PFLCLI(arguments(recipe, None, tmp_path)[1:], run=False)
    trainer: Any = cli.trainer
    (method,) = (one for one in trainer.callbacks if isinstance(one, Method))
    assert f"class_path: {type(method).__name__}\n" in recipe.read_text()


@pytest.mark.slow
@pytest.mark.recipe
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_runs(
    recipe: Path,
    data_dirs: Callable[[str, int], Path | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_checksums(monkeypatch)
    cli = PFLCLI(arguments(recipe, data_dirs(*tiny_data(recipe)), tmp_path))
    trainer = cli.trainer
    assert trainer.current_epoch == ROUNDS
    if "HeadFineTuning" in recipe.read_text():
        assert 0 <= float(trainer.callback_metrics["ft/val_acc/worst_decile"]) <= 1
    linear = "class_path: LinearRepresentation" in recipe.read_text()
    regression = linear or "loss: mse" in recipe.read_text()
    name, most = ("val_loss", math.inf) if regression else ("val_acc", 1)
    for statistic in ("", "/weighted", "/worst_decile", "/worst"):
        assert 0 <= float(trainer.callback_metrics[f"{name}{statistic}"]) <= most
    assert math.isfinite(float(trainer.callback_metrics["val_loss"]))
    assert trainer.log_dir is not None
    assert (Path(trainer.log_dir) / "config.yaml").is_file()
    assert list(tmp_path.rglob("last.ckpt"))


@pytest.mark.slow
@pytest.mark.recipe
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", ROWS)
def test_other_rows_of_table_1_run_on_text_and_handwriting(
    row: str, column: str, data_dirs: Callable[[str, int], Path | None], tmp_path: Path
) -> None:
    """As recipes/README.md says: the column's recipe with another method."""
    recipe, part = ROOT / f"{column}.yaml", ROOT.parent / "configs" / "method" / f"{row}.yaml"
    given = arguments(recipe, data_dirs(*tiny_data(recipe)), tmp_path)
    given += ["--config", str(part), "--method.local_epochs", "1", *COLUMNS[column]]
    cli = PFLCLI(given[1:], run=False)
    begin = {name: leaf.clone() for name, leaf in cli.model.state_dict().items()}
    cli.trainer.fit(cli.model, cli.datamodule)
    wanted = yaml.safe_load(part.read_text())["method"]["class_path"]
    metrics = cli.trainer.callback_metrics
    strategy: Any = cli.trainer.strategy
    assert type(strategy.method).__name__ == wanted
    assert cli.trainer.current_epoch == ROUNDS
    assert 0 <= float(metrics["val_acc"]) <= 1
    assert math.isfinite(float(metrics["val_loss"]))
    trained = strategy.server["model"]
    assert all(trained[name].isfinite().all() for name in begin)
    moved = [name for name in begin if not torch.equal(trained[name], begin[name])]
    assert sorted(moved) == sorted(name for name, _ in cli.model.named_parameters())
    clients = max(1, int(0.1 * strategy.federation.num_clients))
    size = 4 * sum(leaf.numel() for leaf in begin.values())
    assert float(metrics["round/bytes_up"]) == ROWS[row] * clients * size
