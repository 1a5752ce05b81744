"""How many samples a batch has, whatever it is made of."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.data.batch import batch_length
from lightning_pfl.data.datasets import FederatedLoaders
from lightning_pfl.engine.base import EngineSettings, EvaluationWork
from lightning_pfl.engine.sequential import SequentialEngine

X = torch.zeros(3, 5)
Pair = namedtuple("Pair", "x y")


@dataclass
class Sentence:
    words: list[str]
    x: Tensor


BATCHES: list[tuple[Any, int]] = [
    (X, 3),
    ((X, torch.zeros(3)), 3),
    ({"name": ["a", "b", "c"], "x": X}, 3),
    ([("a", "b", "c"), X], 3),
    ({"note": "one text", "x": X}, 3),
    ({"name": [["a", "b", "c"], ["d", "e", "f"]], "x": {"deep": (X,)}}, 3),
    ([[], {}, X], 3),
    ((None, 7, X), 3),
    ({"temperature": torch.tensor(0.5), "x": X}, 3),
    (OrderedDict(name=["a"] * 3, x=X), 3),
    (UserDict(name=["a"] * 3, x=X), 3),
    (Pair(["a"] * 3, X), 3),
    (Sentence(["a"] * 3, X), 3),
    (torch.tensor(1.0), 1),
    ((), 1),
    ("text", 1),
    ({"text": ["a", "b"], "label": 3}, 2),
    (["a", "b", "c", "d"], 4),
    ((["a", "b"], torch.tensor(0.0)), 2),
]


@pytest.mark.parametrize(("batch", "length"), BATCHES, ids=[str(k) for k in range(len(BATCHES))])
def test_length(batch: Any, length: int) -> None:
    assert batch_length(batch) == length


class Named(Dataset[Any]):
    """Samples 0, 1, ..., each with a name before its value."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: int) -> dict[str, Any]:
        if at >= self.size:
            raise IndexError(at)
        return {"name": f"id{at}", "x": torch.tensor([float(at)], dtype=torch.float64)}


class Mean(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x: Tensor = batch["x"]
        return ((self.w - x) ** 2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_x", batch["x"].mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_strings_before_tensors_do_not_change_the_weights_of_batches() -> None:
    """Batches of 4 and 1, and one of 3: means over 0..4 and 0..2, whatever comes first."""
    data = FederatedLoaders([DataLoader(Named(size), batch_size=4) for size in (5, 3)])
    module = Mean()
    engine = SequentialEngine(module, ParameterSplit(module), EngineSettings())
    models = {"w": torch.zeros(2, 1, dtype=torch.float64)}
    found = engine.evaluate(EvaluationWork(models, torch.arange(2), data, "validation_step"))
    assert found.counts.tolist() == [5, 3]
    assert found.values["val_x"].tolist() == [2.0, 1.0]
