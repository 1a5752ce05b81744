"""Batches that the dataset makes (``batch_size=None``): clients weigh their samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pfl.core.errors import ClientError
from lightning_pfl.methods import FedAvg
from tests.trainer.setting import CENTRES, Quadratic, mean, trained, trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")


def ready(client: int, *sizes: int) -> DataLoader[Any]:
    batches: Any = [[CENTRES[client].expand(size, 2)] for size in sizes]
    return DataLoader(batches, batch_size=None)


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_clients_weigh_their_samples(engine: Any, precision: Any) -> None:
    """Two steps on 5 samples and one on 2, in each of two rounds."""
    data = {"b": ready(1, 2), "a": ready(0, 3, 2)}
    run = trainer(FedAvg(), max_epochs=2, engine=engine, precision=precision)
    run.fit(Quadratic(), data, data)
    w: Tensor = torch.zeros(2, dtype=torch.float64)
    for _ in range(2):
        w = mean([trained(w, 1, 1), trained(w, 0, 2)], [2.0, 5.0])
    torch.testing.assert_close(run.strategy.global_state_dict()["w"], w, rtol=1e-12, atol=1e-12)
    found = run.strategy.client_metrics()["num_samples"]
    assert found == {"b": 2, "a": 5}


def test_a_batch_that_cannot_be_read_names_its_client() -> None:
    class Broken:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, item: int) -> Any:
            raise OSError("scan.png is truncated")

    data = {"a": ready(0, 3), "b": DataLoader(Broken(), batch_size=None)}  # type: ignore[arg-type]
    with pytest.raises(ClientError, match=r"reading a batch failed for client 'b': OSError: scan"):
        trainer(FedAvg(), max_epochs=1).fit(Quadratic(), data)
