"""SubspaceDistance: the sine of the largest angle to the truth, in every round."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pfl.data import FederatedDataModule, LinearRepresentation, QuadraticClients
from lightning_pfl.inspect import SubspaceDistance
from lightning_pfl.methods import FedAvg, LinearFedRep, LocalOnly
from lightning_pfl.models import LinearRepresentation as Model
from lightning_pfl.testing import Fit, fit


def run(monitor: SubspaceDistance, method: Any = None, **settings: Any) -> Fit:
    given = {"rounds": 2, "limit_val_batches": 0, **settings}
    source = given.pop("source", LinearRepresentation(4, 3, 1, 5, test_samples=1))
    torch.manual_seed(0)
    model = given.pop("model", None) or Model(3, 1)
    method = FedAvg() if method is None else method
    return fit(method, FederatedDataModule(source), model, callbacks=[monitor], **given)


def test_a_direction_that_stays_has_its_sine() -> None:
    """The truth is the first axis; B points 30 degrees away from it, in any length and sign."""
    model = Model(3, 1, lr=0.0)
    angle = math.pi / 6
    direction = -2.0 * torch.tensor([[math.cos(angle), math.sin(angle), 0.0]])
    with torch.no_grad():
        model.backbone.get_parameter("weight").copy_(direction)
    monitor = SubspaceDistance([[1.0], [0.0], [0.0]])
    done = run(monitor, model=model)
    assert monitor.distances == pytest.approx({0: 0.5, 1: 0.5}, rel=1e-6)
    assert done.metrics["subspace/distance"] == pytest.approx(0.5, rel=1e-6)


def test_the_source_says_the_truth() -> None:
    source = LinearRepresentation(4, 3, 1, 5, test_samples=1)
    monitor = SubspaceDistance()
    done = run(monitor, source=source)
    weight = done.server["model"]["backbone.weight"][0].double()
    cosine = float(weight @ torch.from_numpy(source.truth()[0][:, 0]) / weight.norm())
    assert monitor.distances[1] == pytest.approx(math.sqrt(1 - cosine**2), rel=1e-6)


def test_a_resumed_run_has_all_distances(tmp_path: Path) -> None:
    whole, first, second = (SubspaceDistance() for _ in range(3))
    run(whole, LinearFedRep(body_lr=0.01), rounds=4)
    path = run(first, LinearFedRep(body_lr=0.01)).save(tmp_path / "half.ckpt")
    run(second, LinearFedRep(body_lr=0.01), rounds=4, ckpt_path=path)
    assert list(second.distances) == [0, 1, 2, 3]
    assert second.distances == whole.distances


def test_a_method_that_shares_nothing_is_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"shared matrix .* LocalOnly share nothing"
    ):
        run(SubspaceDistance(), LocalOnly())


def test_data_without_a_truth_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="known representation, but got truth=None"):
        run(SubspaceDistance(), source=QuadraticClients())


def test_another_dimension_is_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"shape of the representation, \(3, 1\), b"
    ):
        run(SubspaceDistance([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
