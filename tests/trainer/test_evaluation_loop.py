"""What is evaluated, with which model, and where the numbers go; against an evaluation written out
in the test."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, Callback, EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset
from torchmetrics import HammingDistance

from lightning_pfl import PersonalizedModule
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.methods import (
    FedAvg,
    FedRep,
    LGFedAvg,
    LocalOnly,
)
from lightning_pfl.methods.base import Phase
from tests.trainer.setting import (
    CENTRES,
    SIZES,
    Quadratic,
    classes,
    mean,
    network,
    points,
    steps_of,
    trained,
    trainer,
)

ZERO = torch.zeros(2, dtype=torch.float64)


def loss_at(w: Tensor, client: int) -> float:
    return float(((w - CENTRES[client]) ** 2).sum() / 2)


def accuracy(module: Any, data: FederatedTensorDataset, client: int) -> float:
    x, y = data.gather(data.indices[client])
    with torch.no_grad():
        return float((module(x).argmax(1) == y).float().mean())


def test_personal_models_are_evaluated_on_each_clients_own_split() -> None:
    run = trainer(LocalOnly(), max_epochs=1)
    sizes = (1, 4, 2, 3)
    run.fit(Quadratic(), points(), points(sizes))
    losses = torch.tensor([loss_at(trained(ZERO, k), k) for k in range(4)])
    metrics = run.callback_metrics
    assert float(metrics["val_loss"]) == pytest.approx(float(losses.mean()), rel=1e-6)
    weighted = float((losses * torch.tensor(sizes)).sum() / sum(sizes))
    assert float(metrics["val_loss/weighted"]) == pytest.approx(weighted, rel=1e-6)
    assert float(metrics["val_loss/std"]) == pytest.approx(
        float(losses.std(correction=0)), rel=1e-6
    )
    # A loss: the worst is the largest. One of four clients is the worst decile.
    assert float(metrics["val_loss/worst"]) == pytest.approx(float(losses.max()), rel=1e-6)
    assert float(metrics["val_loss/worst_decile"]) == pytest.approx(float(losses.max()), rel=1e-6)
    assert "global/val_loss" not in metrics
    assert run.progress_bar_metrics["val_loss"] == pytest.approx(float(losses.mean()), rel=1e-6)


def test_never_sampled_clients_are_evaluated_too_with_the_shared_state_of_now() -> None:
    module, (train, val) = network(), classes()
    run = trainer(FedRep(), max_epochs=2, participation=1)
    run.fit(module, train, val)
    want = [accuracy(run.strategy.client_module(k), val, k) for k in range(5)]
    assert float(run.callback_metrics["val_acc"]) == pytest.approx(sum(want) / 5, rel=1e-6)
    assert float(run.callback_metrics["val_acc/worst"]) == pytest.approx(min(want), abs=1e-6)


def test_the_global_model_is_evaluated_beside_the_personal_ones() -> None:
    run = trainer(max_epochs=1)
    run.fit(Quadratic(), points(), points())
    w = mean([trained(ZERO, k) for k in range(4)], list(SIZES))
    want = sum(loss_at(w, k) for k in range(4)) / 4
    for key in ("val_loss", "global/val_loss"):
        assert float(run.callback_metrics[key]) == pytest.approx(want, rel=1e-6)


class Personalized(FedAvg):
    """FedAvg whose personal model is the origin, so that it differs from the global one."""

    def personal_model(self, received: Any, client_state: Any, info: Any) -> Any:
        return {"w": torch.zeros_like(received["model"]["w"])}


def test_a_global_model_that_differs_is_evaluated_on_its_own() -> None:
    run = trainer(Personalized(), max_epochs=1)
    run.fit(Quadratic(), points(), points())
    w = mean([trained(ZERO, k) for k in range(4)], list(SIZES))
    at_origin = sum(loss_at(ZERO, k) for k in range(4)) / 4
    assert float(run.callback_metrics["val_loss"]) == pytest.approx(at_origin, rel=1e-6)
    at_mean = sum(loss_at(w, k) for k in range(4)) / 4
    assert float(run.callback_metrics["global/val_loss"]) == pytest.approx(at_mean, rel=1e-6)


class TunedFedAvg(FedAvg):
    """FedAvg with two local steps before evaluation."""

    def evaluation_phases(self) -> tuple[Phase, ...]:
        return (Phase("all", steps=2, lr=0.5),)


@pytest.mark.parametrize("inference_mode", [True, False])
def test_evaluation_phases_train_from_the_personal_model_and_leave_no_trace(
    inference_mode: bool,
) -> None:
    run = trainer(TunedFedAvg(), max_epochs=1, inference_mode=inference_mode)
    module = Quadratic()
    run.fit(module, points(), points())
    w = mean([trained(ZERO, k) for k in range(4)], list(SIZES))
    tuned = [trained(w, k, 2, lr=0.5) for k in range(4)]
    want = sum(loss_at(tuned[k], k) for k in range(4)) / 4
    assert float(run.callback_metrics["val_loss"]) == pytest.approx(want, rel=1e-6)
    assert float(run.callback_metrics["global/val_loss"]) > want
    torch.testing.assert_close(module.w.data, w, rtol=0, atol=1e-12)
    torch.testing.assert_close(run.strategy.client_state_dict(3)["w"], tuned[3], rtol=0, atol=1e-12)
    assert run.validate(module, datamodule=Splits(), verbose=False)[0]["val_loss"] == pytest.approx(
        want, rel=1e-6
    )


class Splits(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return points()

    def val_dataloader(self) -> Any:
        return points()

    def test_dataloader(self) -> Any:
        return points((1, 1, 1, 1))

    def predict_dataloader(self) -> Any:
        return points((1, 2, 3, 4))


def test_evaluation_phases_without_training_data_are_an_error() -> None:
    with pytest.raises(
        Exception, match="Expected training data, which the method also needs for evaluation"
    ):
        trainer(TunedFedAvg()).validate(Quadratic(), points(), verbose=False)


def test_validate_test_and_predict_after_a_fit() -> None:
    run = trainer(LocalOnly(), max_epochs=1)
    module = Quadratic()
    run.fit(module, datamodule=Splits())
    history = run.strategy.federation.history.state_dict()
    want = sum(loss_at(trained(ZERO, k), k) for k in range(4)) / 4
    assert run.validate(module, datamodule=Splits(), verbose=False)[0]["val_loss"] == pytest.approx(
        want, rel=1e-6
    )
    assert run.test(module, datamodule=Splits(), verbose=False)[0]["test_loss"] == pytest.approx(
        want, rel=1e-6
    )
    predictions = run.predict(module, datamodule=Splits())
    assert predictions is not None
    for client, batches in enumerate(predictions):
        rows = torch.cat(list(batches))
        assert rows.shape == (client + 1, 2)
        torch.testing.assert_close(
            rows[0], trained(ZERO, client) - CENTRES[client], rtol=0, atol=1e-12
        )
    # The last ten rounds and the best one are those of the fit, whatever was tested since.
    assert run.strategy.federation.history.state_dict() == history


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("epoch")
        self.written: Any = None

    def write_on_epoch_end(
        self, trainer: Any, module: Any, predictions: Any, batch_indices: Any
    ) -> None:
        self.written = predictions


def test_prediction_writers_and_return_predictions() -> None:
    writer = Writer()
    run = trainer(callbacks=[writer])
    assert run.predict(Quadratic(), points((1, 2, 3, 4)), return_predictions=False) is None
    assert [len(torch.cat(client)) for client in writer.written] == [1, 2, 3, 4]


def test_clients_are_matched_by_name() -> None:
    run = trainer(LocalOnly(), max_epochs=1)
    val = {
        "d": DataLoader(TensorDataset(CENTRES[3:4])),
        "b": DataLoader(TensorDataset(CENTRES[1:2])),
    }
    run.fit(Quadratic(), points(names=list("abcd")), val)
    want = (loss_at(trained(ZERO, 3), 3) + loss_at(trained(ZERO, 1), 1)) / 2
    assert float(run.callback_metrics["val_loss"]) == pytest.approx(want, rel=1e-6)
    with pytest.raises(
        ValueError,
        match=r"Expected `val_dataloaders` to hold clients of the training data, but got \['e'\]",
    ):
        run.validate(run.lightning_module, {"e": val["d"]}, verbose=False)
    with pytest.raises(ValueError, match="one DataLoader for each of the 4 clients, but got 2"):
        run.validate(run.lightning_module, [val["d"], val["b"]], verbose=False)


def test_clients_without_samples_in_the_split_are_left_out() -> None:
    run = trainer(LocalOnly(), max_epochs=1)
    run.fit(Quadratic(), points(), points((0, 1, 0, 1)))
    want = (loss_at(trained(ZERO, 3), 3) + loss_at(trained(ZERO, 1), 1)) / 2
    assert float(run.callback_metrics["val_loss"]) == pytest.approx(want, rel=1e-6)


def test_a_split_without_samples_is_said() -> None:
    with pytest.warns(UserWarning, match="No client has samples in the val split"):
        trainer(max_epochs=1).fit(Quadratic(), points(), points((0, 0, 0, 0)))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_table_has_a_row_for_each_round_and_client(tmp_path: Path) -> None:
    run = trainer(LocalOnly(), logger=CSVLogger(tmp_path), max_epochs=2, check_val_every_n_epoch=1)
    run.fit(Quadratic(), points(names=list("abcd")), points((1, 2, 0, 3), names=list("abcd")))
    rows = rows_of(Path(str(run.log_dir)) / "clients_val.csv")
    assert [(row["round"], row["client"], row["num_samples"]) for row in rows] == [
        (str(round), name, size)
        for round in range(2)
        for name, size in (("a", "1"), ("b", "2"), ("d", "3"))
    ]
    for row in rows:
        client, steps = "abcd".index(row["client"]), (int(row["round"]) + 1)
        w = trained(ZERO, client, steps * steps_of(SIZES[client]))
        assert float(row["val_loss"]) == pytest.approx(loss_at(w, client), rel=1e-6)
    logged = [row for row in rows_of(Path(str(run.log_dir)) / "metrics.csv") if row["val_loss"]]
    assert [row["epoch"] for row in logged] == ["0", "1"]


def test_the_end_of_a_fit_reports_the_last_rounds_and_the_best_one() -> None:
    run = trainer(LocalOnly(), max_epochs=12)
    run.fit(Quadratic(), points(), points())
    per_round = [
        sum(loss_at(trained(ZERO, k, round * steps_of(SIZES[k])), k) for k in range(4)) / 4
        for round in range(1, 13)
    ]
    assert float(run.callback_metrics["last10/val_loss"]) == pytest.approx(
        sum(per_round[2:]) / 10, rel=1e-5
    )
    assert float(run.callback_metrics["best/val_loss"]) == pytest.approx(per_round[11], rel=1e-5)
    assert run.callback_metrics["best/round"] == 11


class Watcher(Callback):
    """Notes which rounds are validated, and the module's mode and the global generator around
    it."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.clients: list[int] = []

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.state = torch.get_rng_state()
        if not trainer.sanity_checking:
            self.rounds.append(trainer.current_epoch)

    def on_validation_batch_end(
        self,
        trainer: Any,
        module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.clients.append(batch)
        assert not module.training

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        assert torch.equal(self.state, torch.get_rng_state())


class NoisyValidation(Quadratic):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) + torch.rand(()))


def test_validation_disturbs_neither_mode_nor_generator_and_fires_hooks_per_client() -> None:
    watcher = Watcher()
    module = NoisyValidation()
    run = trainer(
        callbacks=[watcher], max_epochs=4, check_val_every_n_epoch=2, num_sanity_val_steps=2
    )
    run.fit(module, points(), points())
    assert watcher.rounds == [1, 3]
    assert watcher.clients == [0, 1, *range(4), *range(4)]  # the sanity check, then two validations
    assert module.training


def test_early_stopping_and_max_rounds_without_validation() -> None:
    stopping = EarlyStopping(
        "val_loss", mode="max", patience=1
    )  # the loss falls, so this stops after two rounds
    run = trainer(LocalOnly(), callbacks=[stopping], max_epochs=10)
    run.fit(Quadratic(), points(), points())
    assert run.current_epoch == 2


def test_lg_fedavg_evaluates_personal_models_only() -> None:
    run = trainer(LGFedAvg(), max_epochs=1)
    run.fit(network(), *classes())
    assert "val_acc/worst_decile" in run.callback_metrics
    assert not [key for key in run.callback_metrics if key.startswith("global/")]


class Unnamed(PersonalizedModule):
    """Logs a metric of which less is better under a name that doesn't say so."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(6, 3), lr=0.1, num_classes=3)
        self.score = HammingDistance(task="multiclass", num_classes=3)

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        self.score(self(batch[0]).argmax(1), batch[1])
        self.log("val_score", self.score)


def test_a_torchmetrics_object_says_which_direction_is_better() -> None:
    run = trainer(LocalOnly(), max_epochs=3)
    run.fit(Unnamed(), *classes())
    logged = run.callback_metrics
    assert logged["val_score/worst"] > logged["val_score"]  # the largest distance is the worst
    rounds = [values["val_score"] for values in run.strategy.federation.history.rounds.values()]
    assert len(set(rounds)) > 1
    assert float(logged["best/val_score"]) == pytest.approx(min(rounds))
    assert run.strategy.federation.history.state_dict()["best"]["mode"] == "min"


def test_a_value_that_is_nan_names_its_clients_once() -> None:
    val = points(names=["ann", "bob", "cem", "dag"])
    val.fields[0][val.indices[2][0]] = torch.nan
    run = trainer(FedAvg(), max_epochs=3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run.fit(Quadratic(), points(names=["ann", "bob", "cem", "dag"]), val)
    texts = [str(one.message) for one in found if "is NaN, or not" in str(one.message)]
    assert len(texts) == 1
    assert "'val_loss' is NaN, or not logged, for cem; its statistics leave" in texts[0]
    evaluated = run.strategy.federation.client_results["val"].evaluations[""]
    values = evaluated.values["val_loss"]
    assert values.isnan().tolist() == [False, False, True, False]
    assert float(run.callback_metrics["val_loss"]) == pytest.approx(float(values.nanmean()))
    assert run.callback_metrics["val_loss/left_out"] == 1


def rows(client: int) -> Any:
    """Samples that are no TensorDataset, in minibatches of two of a shuffled order."""
    return [(torch.full((2,), 10.0 * client + k, dtype=torch.float64),) for k in range(5)]


@pytest.mark.parametrize(
    "load",
    [
        lambda data: DataLoader(data, batch_size=2, shuffle=True),
        lambda data: DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(range(5))),
        lambda data: DataLoader(data, batch_size=None, shuffle=True),
    ],
    ids=["shuffle", "subset", "ready batches"],
)
def test_predictions_are_in_the_order_of_the_samples(load: Any) -> None:
    data = [load(rows(client)) for client in range(2)]
    found = trainer().predict(Quadratic(), data)
    assert found is not None
    for client, batches in enumerate(found):
        # The weights are zero: a prediction is minus its sample.
        predicted = torch.cat([-batch.reshape(-1, 2) for batch in batches])
        assert predicted[:, 0].tolist() == [10.0 * client + k for k in range(5)]
