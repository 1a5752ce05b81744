"""New clients from a checkpoint alone: one command with one recipe."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pfl.cli.command_line import PFLCLI
from lightning_pfl.cli.results import summary_rows

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "fedrep_new_clients_fashion_mnist.yaml"
# The tiny data leave 5 training samples for a client.
SAMPLES = [1, 2, 5]


def run(command: str, data_dir: Path, root: Path, *more: str) -> PFLCLI:
    """The recipe with its data's place, its rounds, its numbers of samples and device replaced."""
    recipe = root / "recipe.yaml"
    root.mkdir(exist_ok=True)
    text = RECIPE.read_text()
    assert "samples: [1, 5, 20, 100, 500]" in text
    recipe.write_text(text.replace("samples: [1, 5, 20, 100, 500]", f"samples: {SAMPLES}"))
    return PFLCLI(
        [
            *(command, "--config", str(recipe), "--trainer.accelerator", "cpu"),
            *("--trainer.max_epochs", "2", "--trainer.enable_progress_bar", "false"),
            *("--trainer.default_root_dir", str(root), *more),
            *("--data.init_args.source.init_args.data_dir", str(data_dir)),
        ]
    )


def reported(cli: PFLCLI) -> dict[str, dict[str, float]]:
    """What is printed of new clients, by its name."""
    rows = summary_rows(cli.trainer.callback_metrics)
    return {name: row for name, row in rows.items() if name.startswith("new_clients/")}


def log_dir(cli: PFLCLI) -> Path:
    assert cli.trainer.log_dir is not None
    return Path(cli.trainer.log_dir)


# The test command has logs of its own.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_one_command_adapts_new_clients_from_a_checkpoint(
    fashion_mnist_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted = run("fit", fashion_mnist_dir, tmp_path / "fit")
    (path,) = (tmp_path / "fit").rglob("last.ckpt")
    state: Any = torch.load(path, weights_only=True)
    capsys.readouterr()
    tested = run("test", fashion_mnist_dir, tmp_path / "test", "--ckpt_path", str(path))

    # Accuracy against m is printed, in the order of m, and is what the fit found at its end.
    names = [f"new_clients/{value}@{m}" for value in ("acc", "loss") for m in SAMPLES]
    assert list(reported(tested)) == names
    assert reported(tested) == reported(fitted)
    printed = capsys.readouterr().out
    assert "After the test" in printed
    for m in SAMPLES:
        assert f"new_clients/acc@{m}" in printed

    # The table has a row for each m and each of the ten clients.
    with (log_dir(tested) / "new_clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    for m in SAMPLES:
        accuracies = [float(row["acc"]) for row in rows if row["samples"] == str(m)]
        assert len(accuracies) == 10
        mean = sum(accuracies) / 10
        assert reported(tested)[f"new_clients/acc@{m}"]["mean"] == pytest.approx(mean, rel=1e-6)

    # The shared tensors of every adapted model are those of the checkpoint, bit for bit.
    shared = {k: v for k, v in state["state_dict"].items() if k.startswith("backbone.")}
    assert len(shared) > 0
    heads = []
    for m in SAMPLES:
        models = torch.load(log_dir(tested) / f"new_clients@{m}.pt", weights_only=True)
        assert list(models) == [str(client) for client in range(100, 110)]
        for model in models.values():
            assert all(torch.equal(model[name], leaf) for name, leaf in shared.items())
            heads.append(model["head.weight"])
    assert not any(torch.equal(heads[0], head) for head in heads[1:])
