"""The order of the names that steps log, by which the best round's value is chosen."""

from __future__ import annotations

from typing import Any

import pytest
from torchmetrics import MeanSquaredError

from lightning_pfl.methods import LocalOnly
from tests.trainer.setting import Quadratic, points, trainer


class Conditional(Quadratic):
    """Logs some names in some minibatches alone, and an object before a number."""

    def __init__(self) -> None:
        super().__init__()
        self.distance = MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        self.log("val_error", self.distance(self.w.expand_as(x).float(), x.float()))
        if batch_idx == 1:
            self.log("val_second", self.w.sum())
        if len(x) < 2:
            self.log("val_third", self.w[0])
        self.log("val_last", self.loss(batch))


@pytest.mark.filterwarnings("ignore:.*is NaN, or not logged")
@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("engine", ["reference", "sequential", "vectorized"])
def test_names_are_in_the_order_of_the_code(engine: Any, sanity: int) -> None:
    """The first name is an error, so the second one chooses, which clients 0 and 3 lack."""
    run = trainer(LocalOnly(), max_epochs=4, engine=engine, num_sanity_val_steps=sanity)
    run.fit(Conditional(), points(), points((2, 5, 4, 1)))
    federation = run.strategy.federation
    logged = ["val_error", "val_second", "val_third", "val_last"]
    assert list(federation.client_results["val"].columns()) == logged
    names = [name for name in federation.history.rounds[3] if "/" not in name]
    assert names == logged
    assert federation.history.monitor == "val_second"
    # The sum of w, whose clients move to (0, 2) and (-3, 1).
    values = [values["val_second"] for values in federation.history.rounds.values()]
    assert run.callback_metrics["best/round"] == values.index(max(values))
