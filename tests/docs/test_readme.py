"""The README's code runs as it is printed, for one round."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl.models import MLP

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def loader(samples: int) -> DataLoader[Any]:
    inputs = torch.randn(samples, 4)
    return DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=4)


def test_the_snippets_run_and_give_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"module": MLP([4, 3, 2])}
    names |= {f"{split}_{client}": loader(8) for split in ("loader", "val") for client in "ab"}
    trainers: list[Any] = []
    for snippet in SNIPPETS:
        code, count = re.subn(r"max_epochs=\d+", "max_epochs=1, accelerator='cpu'", snippet)
        assert count == snippet.count("L.Trainer(")
        exec(code, names)
        trainers += [names["trainer"]] * count
    assert names["clients"].num_clients == 2
    assert [trainer.current_epoch for trainer in trainers] == [1, 1, 1, 1]
    assert [trainer.strategy.federation.num_clients for trainer in trainers] == [40, 2, 40, 40]


def test_the_files_and_targets_that_the_readme_names_exist() -> None:
    named = re.findall(r"(?:recipes|configs|docs)/[\w/]+\.(?:yaml|md)", README)
    assert len(named) > 0
    assert [path for path in named if not (ROOT / path).is_file()] == []
    targets = re.findall(r"^make (\w+)", README, re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.slow
def test_the_example_with_two_architectures_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (quickstart,) = (snippet for snippet in SNIPPETS if "ClassesPerClient(5)" in snippet)
    (example,) = (snippet for snippet in SNIPPETS if "ClientModules(" in snippet)
    names: dict[str, Any] = {}
    exec(quickstart.replace("max_epochs=50", "max_epochs=1, accelerator='cpu'"), names)
    seed_everything(0)
    exec(example.replace("max_epochs=20", "max_epochs=20, accelerator='cpu'"), names)
    # A client has 5 of the 10 digits: 0.2 is what guessing one of them gives.
    assert float(names["trainer"].callback_metrics["val_acc"]) > 3 * 0.2
