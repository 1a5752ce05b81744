"""`lightning-pfl adapt`: a new client's model from a checkpoint and a file of its samples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import yaml
from datasets import disable_progress_bars

from lightning_pfl.cli.command_line import main
from lightning_pfl.data import FederatedDataModule, HuggingFaceTable
from lightning_pfl.methods import FedRep
from lightning_pfl.models import MLP
from lightning_pfl.testing import fit

LR, ROWS = 0.1, 8
MODEL: dict[str, Any] = {"sizes": [2, 3, 2], "lr": LR, "momentum": 0.0, "weight_decay": 0.0}


def visits(rows: int, outcome: Any) -> pd.DataFrame:
    generator = torch.Generator().manual_seed(rows)
    age, dose = torch.randn(2, rows, generator=generator).tolist()
    ward = ["north", "south"] * (rows // 2)
    return pd.DataFrame({"ward": ward, "age": age, "dose": dose, "outcome": outcome(rows)})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder with its recipe, checkpoint, and the data of its two clients; a third's."""
    disable_progress_bars()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    old, new = tmp_path / "old.csv", tmp_path / "new.csv"
    visits(20, lambda n: ["better", "worse"] * (n // 2)).to_csv(old, index=False)
    # Only the second class: its number is 1, as in the run.
    visits(ROWS, lambda n: ["worse"] * n).drop(columns="ward").to_csv(new, index=False)
    table: dict[str, Any] = {
        "path": str(old),
        "features": ["age", "dose"],
        "label": "outcome",
        "client": "ward",
    }
    data = FederatedDataModule(HuggingFaceTable(**table), val_fraction=0.2, batch_size=ROWS)
    ran = fit(FedRep(head_epochs=2), data, MLP(**MODEL), rounds=2)
    (tmp_path / "checkpoints").mkdir()
    ran.trainer.save_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    recipe = {
        "method": {"class_path": "FedRep", "init_args": {"head_epochs": 2}},
        "model": {"class_path": "MLP", "init_args": MODEL},
        "data": {
            "class_path": "FederatedDataModule",
            "init_args": {
                "source": {"class_path": "HuggingFaceTable", "init_args": table},
                "batch_size": ROWS,
            },
        },
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def adapt(*words: str) -> None:
    main(["adapt", "--ckpt", "checkpoints/last.ckpt", *words])


def head_after(epochs: int, start: Any) -> Any:
    """Train the head by plain steps of SGD on all samples."""
    frame = pd.read_csv("new.csv")
    x = torch.tensor(frame[["age", "dose"]].to_numpy(), dtype=torch.float32)
    y = torch.ones(ROWS, dtype=torch.long)
    model = MLP(**MODEL)
    model.load_state_dict(start)
    for _ in range(epochs):
        loss = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, list(model.head.parameters()))
        with torch.no_grad():
            for weight, grad in zip(model.head.parameters(), grads, strict=True):
                weight.sub_(LR * grad)
    return model.state_dict()


def test_a_table_gives_the_model_that_plain_steps_give(run: Path) -> None:
    adapt("--data", "new.csv", "--classes", "better,worse", "--test_fraction", "0", "--epochs", "3")
    saved = torch.load("checkpoints/last.ckpt", weights_only=True)["state_dict"]
    expected = head_after(3, saved)
    found = torch.load("adapted.pt", weights_only=True)
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        torch.testing.assert_close(found[name], leaf, rtol=1e-5, atol=1e-6, msg=name)
    assert not torch.equal(found["head.weight"], saved["head.weight"])


def test_the_values_are_those_of_the_held_out_samples(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # All samples are equal, so that any held-out share has the same loss.
    x, y = torch.tensor([[0.5, -1.0]]).repeat(8, 1), torch.ones(8, dtype=torch.long)
    torch.save((x, y), "new.pt")
    adapt("--data", "new.pt", "--test_fraction", "0.25", "--steps", "2", "--out", "mine/new.pt")
    model = MLP(**MODEL)
    model.load_state_dict(torch.load("mine/new.pt", weights_only=True))
    out = capsys.readouterr().out
    assert "On 2 samples that were held out" in out
    loss = float(F.cross_entropy(model(x), y).detach())
    row = re.search(r"adapted(.*)", out)
    assert row is not None
    assert f"{loss:.4f}" in row[1].split()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "none.csv"], "Expected --data to be a file, but got 'none.csv'"),
        (["--data", "new.csv"], "Give it: --classes better,worse"),
        (["--data", "new.csv", "--classes", "a,b"], r"among `classes`, but got \['worse'\]"),
        (["--data", "new.csv", "--test_fraction", "1"], "--test_fraction to be in"),
        (["--data", "new.csv", "--config", "old.csv"], "section `model`"),
        (["--data", "wrong.pt"], "hold a tuple of tensors .* but got a dict"),
        (["--data", "wide.pt"], "that the run's module takes, but got 'wide.pt'.* 'new client'"),
        (["--data", "nan.pt"], "data` on which the model stays finite, but got NaN"),
    ],
)
def test_what_does_not_fit_is_one_line(
    run: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = torch.ones(ROWS, dtype=torch.long)
    torch.save({"x": 1}, "wrong.pt")
    torch.save((torch.zeros(ROWS, 5), labels), "wide.pt")
    torch.save((torch.full((ROWS, 2), float("nan")), labels), "nan.pt")
    Path("old.csv").write_text("{}\n")
    with pytest.raises(SystemExit):
        adapt(*words)
    assert re.search(said, capsys.readouterr().err)
    assert not Path("adapted.pt").exists()


def test_a_checkpoint_without_its_recipe(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.yaml").unlink()
    with pytest.raises(SystemExit):
        adapt("--data", "new.csv")
    assert "Give the recipe of the run: --config FILE" in capsys.readouterr().err


def test_a_missing_checkpoint_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["adapt", "--ckpt", "nope.ckpt", "--data", "new.csv"])
    assert "Expected --ckpt to be a checkpoint, but got 'nope.ckpt'" in capsys.readouterr().err
