"""A budget of 0 is no local work; it doesn't say that clients have no data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_pfl import methods
from lightning_pfl.methods.base import Method
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_equal,
    fit,
    quadratic_clients,
)
from lightning_pfl.testing.fitting import Fit

MAKE: dict[str, Callable[[dict[str, Any]], Method]] = {
    "ConvexClustering": lambda budget: methods.ConvexClustering(0.1, **budget),
    "GTVMin": lambda budget: methods.GTVMin("ring", 0.1, **budget),
    "HomologicalConstraints": lambda budget: methods.HomologicalConstraints("ring", **budget),
    "SheafFMTL": lambda budget: methods.SheafFMTL("ring", 0.5, edge_dim_ratio=1.0, **budget),
    "SquaredPenalty": lambda budget: methods.SquaredPenalty(0.1, **budget),
}


@pytest.mark.filterwarnings("ignore:The run continues with other settings")
@pytest.mark.parametrize("nothing", ["local_epochs", "local_steps"])
@pytest.mark.parametrize("name", MAKE)
def test_models_stay_where_nobody_steps(
    name: str, nothing: str, engine: str, tmp_path: Path
) -> None:
    """Two rounds pull the clients apart; a third without steps leaves them where they are."""

    def run(rounds: int, path: Path | None = None, **budget: Any) -> Fit:
        data = quadratic_clients([1.0] * 4, [0.0, 1.0, 2.0, 3.0])
        method = MAKE[name]({"local_epochs": None, "local_steps": None, **budget})
        return fit(method, data, QuadraticModule(lr=0.1), rounds, engine, ckpt_path=path)

    before = run(2, local_steps=1)
    assert len(before.models["w"].unique()) == 4
    path = before.save(tmp_path / "two.ckpt")
    assert_trees_equal(dict(run(3, path, **{nothing: 0}).models), dict(before.models))
