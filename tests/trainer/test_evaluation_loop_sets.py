"""Several validation sets of the clients, and central samples for the global model.

The loss of a client with the model w on samples at c is |w - c|^2 / 2, here written out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl.methods import FedAvg, LocalOnly
from tests.trainer.setting import CENTRES, SIZES, Quadratic, mean, points, trained, trainer

NAMES = [str(k) for k in range(4)]
SHIFT = torch.tensor([3.0, -1.0], dtype=torch.float64)


class Numbered(Quadratic):
    """Logs the number of the set too."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = -1) -> None:
        super().validation_step(batch, batch_idx)
        self.log("set", float(dataloader_idx))


def loss(w: Tensor, c: Tensor) -> float:
    return float((w - c).square().sum() / 2)


def at(centre: Tensor, samples: int = 3) -> DataLoader[Any]:
    return DataLoader(TensorDataset(centre.expand(samples, 2)), batch_size=2)


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_each_set_has_its_values_under_its_name(engine: Any, tmp_path: Any) -> None:
    """In the second set clients 2 and 0 have samples, in this order."""
    start = torch.zeros(2, dtype=torch.float64)
    w = mean([trained(start, k) for k in range(4)], [float(n) for n in SIZES])
    sets = {
        "own": points(),
        "shifted": {"2": at(CENTRES[2] + SHIFT), "0": at(CENTRES[0] + SHIFT, 1)},
        "central": at(SHIFT, 5),
    }
    logger = CSVLogger(tmp_path)
    run = trainer(FedAvg(), max_epochs=1, engine=engine, logger=logger)
    run.fit(Numbered(), dict(zip(NAMES, [at(c, n) for c, n in zip(CENTRES, SIZES)])), sets)  # noqa: B905
    values = run.callback_metrics
    own = [loss(w, c) for c in CENTRES]
    shifted = {k: loss(w, CENTRES[k] + SHIFT) for k in (0, 2)}
    assert float(values["val_loss"]) == pytest.approx(sum(own) / 4, rel=1e-6)
    assert float(values["shifted/val_loss"]) == pytest.approx(sum(shifted.values()) / 2, rel=1e-6)
    weighted = (shifted[0] + 3 * shifted[2]) / 4
    assert float(values["shifted/val_loss/weighted"]) == pytest.approx(weighted, rel=1e-6)
    assert float(values["shifted/global/val_loss/worst"]) == pytest.approx(
        max(shifted.values()), rel=1e-6
    )
    assert float(values["central/val_loss"]) == pytest.approx(loss(w, SHIFT), rel=1e-6)
    assert "central/val_loss/std" not in values
    assert [int(values[key]) for key in ("set", "shifted/set", "central/set")] == [0, 1, 2]
    found = run.strategy.client_metrics()["shifted/val_loss"]
    assert {k: v for k, v in found.items() if v == v} == pytest.approx(
        {"0": shifted[0], "2": shifted[2]}, rel=1e-6
    )
    table = (tmp_path / "lightning_logs" / "version_0" / "clients_val.csv").read_text()
    assert "shifted/val_loss" in table.splitlines()[0]


def test_personal_models_are_those_of_each_client_in_further_sets() -> None:
    start = torch.zeros(2, dtype=torch.float64)
    sets = [at(c + SHIFT) for c in CENTRES]
    run = trainer(LocalOnly(), max_epochs=2)
    run.fit(Quadratic(), points(), {"own": points(), "shifted": sets})
    for k, c in enumerate(CENTRES):
        w = trained(trained(start, k), k)
        found = run.strategy.client_metrics()["shifted/val_loss"][str(k)]
        assert found == pytest.approx(loss(w, c + SHIFT), rel=1e-6)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")
@pytest.mark.parametrize("stage", ["fit", "test"])
def test_one_loader_of_central_samples_is_for_the_global_model(stage: str) -> None:
    start = torch.zeros(2, dtype=torch.float64)
    w = mean([trained(start, k) for k in range(4)], [float(n) for n in SIZES])
    run = trainer(FedAvg(), max_epochs=1)
    module = Quadratic()
    run.fit(module, points(), at(SHIFT, 5) if stage == "fit" else None)
    if stage == "test":
        run.test(module, at(SHIFT, 5), verbose=False)
    values = run.callback_metrics
    key = "val_loss" if stage == "fit" else "test_loss"
    assert float(values[key]) == pytest.approx(loss(w, SHIFT), rel=1e-6)
    assert not [name for name in values if name.startswith(f"{key}/")]


def test_a_set_named_like_a_client_is_said() -> None:
    data = {name: at(c) for name, c in zip(NAMES, CENTRES, strict=True)}
    with pytest.warns(UserWarning, match=r"`val_dataloaders` is read as several .* '2' is also"):
        trainer(FedAvg(), max_epochs=1).fit(Quadratic(), data, {"own": points(), "2": points()})


def test_sets_that_do_not_fit_are_refused() -> None:
    run = trainer(LocalOnly(), max_epochs=1)
    with pytest.raises(MisconfigurationException, match=r"but LocalOnly has none\. Give one"):
        run.fit(Quadratic(), points(), at(SHIFT))
    sets: Any = {"central": at(SHIFT), "own": points()}
    with pytest.raises(MisconfigurationException, match=r"central samples\. Name 'own' first"):
        trainer(FedAvg(), max_epochs=1).fit(Quadratic(), points(), sets)
    some = {"own": {"1": at(SHIFT)}, "other": {"1": at(SHIFT), "3": at(SHIFT)}}
    data = {name: at(SHIFT) for name in NAMES}
    with pytest.raises(MisconfigurationException, match=r"the first set, but got \['3'\]"):
        trainer(FedAvg(), max_epochs=1).fit(Quadratic(), data, some)
