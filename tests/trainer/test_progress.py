"""What the hooks of callbacks get, which are called once per client."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from lightning_pfl.trainer.progress import ClientBatch, ClientOutputs
from tests.trainer.setting import Quadratic, points, trainer


class Watching(L.Callback):
    def __init__(self) -> None:
        self.found: list[tuple[Any, Any, int]] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.found.append((outputs, batch, batch_idx))


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_outputs_have_the_mean_loss_of_the_client(engine: str) -> None:
    """One minibatch at w = 0: the loss of client k is |c_k|^2 / 2."""
    callback = Watching()
    run = trainer(engine=engine, max_epochs=1, callbacks=[callback])
    run.fit(Quadratic(), points((1, 2, 1, 2)), points())
    losses = {batch: float(outputs["loss"]) for outputs, batch, _ in callback.found}
    assert losses == pytest.approx({0: 0.5, 1: 2.0, 2: 5.0, 3: 16.0})
    assert [number for *_, number in callback.found] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "use", [lambda b: b[0], len, list, lambda b: b.shape, lambda b: b.to("cpu")]
)
def test_a_batch_without_samples_says_so(use: Any) -> None:
    with pytest.raises((TypeError, AttributeError), match="`batch` is the client"):
        use(ClientBatch(3))


def test_a_batch_is_the_clients_id() -> None:
    assert ClientBatch(3) == 3
    assert f"{ClientBatch(3)}" == "3"
    assert {3: "d"}[ClientBatch(3)] == "d"


def test_other_outputs_are_named() -> None:
    with pytest.raises(KeyError, match="Expected the key 'loss', but got 'preds'"):
        ClientOutputs(loss=torch.zeros(()))["preds"]
