"""Validations of some of the clients, in turns; against an evaluation of all of them."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_pfl import FederatedStrategy
from lightning_pfl.callbacks import BestRound, HeadFineTuning
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.methods import Ditto, FedAvg, FedRep
from lightning_pfl.methods.base import Method
from tests.trainer.setting import classes, network, trainer

CLIENTS = 5


def run(
    folder: Path, method: Method, share: float | int = 2, ckpt: Path | None = None, **flags: Any
) -> Any:
    strategy = FederatedStrategy(method, engine="sequential", seed=3, evaluated_clients=share)
    settings: dict[str, Any] = {"strategy": strategy, "max_epochs": 4, **flags}
    made = trainer(logger=CSVLogger(folder, name="", version=""), **settings)
    made.fit(network(), *classes(CLIENTS), ckpt_path=ckpt)
    return made


def table(folder: Path, split: str = "val") -> dict[int, dict[str, dict[str, float]]]:
    """Round and client to the values of ``clients_val.csv``."""
    found: dict[int, dict[str, dict[str, float]]] = {}
    with (folder / f"clients_{split}.csv").open() as file:
        for row in csv.DictReader(file):
            values = {k: float(v or "nan") for k, v in row.items() if k not in ("round", "client")}
            found.setdefault(int(row["round"]), {})[row["client"]] = values
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """A run with the validation of two clients a round, and one with that of all."""
    some, everyone = (tmp_path_factory.mktemp(name) for name in ("some", "everyone"))
    run(everyone, Ditto(), 1.0)
    return run(some, Ditto()), some, everyone


def test_values_are_those_of_evaluating_everybody(both: tuple[Any, Path, Path]) -> None:
    """Two clients in each of four rounds: all five in the first three."""
    found, expected = table(both[1]), table(both[2])
    assert [len(clients) for clients in found.values()] == [2] * 4
    assert set().union(*(found[round] for round in range(3))) == set(expected[0])
    for round, clients in found.items():
        for client, values in clients.items():
            assert values == expected[round][client]


@pytest.mark.parametrize("prefix", ["", "global/"])
def test_logged_values_are_estimates_with_a_standard_error(
    prefix: str, both: tuple[Any, Path, Path]
) -> None:
    """Of two of five clients: sqrt((1 - 2/5) s^2 / 2)."""
    name, metrics = f"{prefix}val_loss", both[0].callback_metrics
    values = np.array([each[name] for each in table(both[1])[3].values()])
    assert float(metrics[name]) == pytest.approx(values.mean(), rel=1e-6)
    expected = math.sqrt((1 - 2 / 5) * values.var(ddof=1) / 2)
    assert float(metrics[f"{name}/standard_error"]) == pytest.approx(expected, rel=1e-6)


def test_all_are_evaluated_outside_of_a_fit(tmp_path: Path) -> None:
    made = run(tmp_path, FedRep(), max_epochs=1)
    assert len(table(tmp_path)[0]) == 2
    for command, split in ((made.validate, "val"), (made.test, "test")):
        command(made.lightning_module, classes(CLIENTS)[1], verbose=False)
        assert len(table(tmp_path, split)[0]) == CLIENTS
        assert f"{split}_loss/standard_error" not in made.callback_metrics
        assert len(made.strategy.client_metrics()[f"{split}_loss"]) == CLIENTS


class Saving(FederatedCallback):
    """Saves in the third round, before its validation or after it."""

    def __init__(self, path: Path, when: str) -> None:
        self.path, self.when = path, when

    def save(self, trainer: Any, hook: str) -> None:
        if hook == self.when and trainer.current_epoch == 2 and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)

    def on_round_end(self, trainer: Any, module: Any, round: Any) -> None:
        self.save(trainer, "before")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, "after")


@pytest.mark.parametrize(("when", "rounds"), [("before", [2, 3]), ("after", [3])])
def test_a_resumed_run_goes_on_with_the_next_clients(
    when: str, rounds: list[int], tmp_path: Path, both: tuple[Any, Path, Path]
) -> None:
    path = tmp_path / "run.ckpt"
    run(tmp_path / "first", Ditto(), max_epochs=3, callbacks=[Saving(path, when)])
    run(tmp_path / "second", Ditto(), ckpt=path)
    expected = table(both[1])
    found = table(tmp_path / "second")
    assert {round: found[round] for round in rounds} == {k: expected[k] for k in rounds}
    assert list(found) == rounds


@pytest.mark.parametrize(
    "every",
    [{"check_val_every_n_epoch": 2}, {"check_val_every_n_epoch": None, "val_check_interval": 2}],
)
def test_rounds_without_a_validation_are_no_turns(every: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path, FedAvg(), 3, **every)
    first, second = table(tmp_path).values()
    assert {*first, *second} == {str(client) for client in range(CLIENTS)}


def test_a_sanity_check_runs_as_many_clients_as_the_trainer_says(tmp_path: Path) -> None:
    seen: list[int] = []

    class Noting(FedAvg):
        def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
            seen.append(trainer.sanity_checking)

    run(tmp_path, Noting(), 2, max_epochs=1, num_sanity_val_steps=-1)
    assert (seen.count(True), seen.count(False)) == (CLIENTS, 2)


def test_a_further_set_of_few_clients_has_a_value_of_each_validation(tmp_path: Path) -> None:
    """A callback may monitor it. The first set's turns and statistics don't notice."""
    names = [f"c{k}" for k in range(CLIENTS)]
    train, val = classes(CLIENTS, names=names)
    found: list[Any] = []
    shown: list[dict[str, float]] = []

    class Showing(FederatedCallback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            shown.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    for share in (1, 1.0):  # one client, all clients
        folder = tmp_path / str(share)
        strategy = FederatedStrategy(Ditto(), engine="sequential", seed=3, evaluated_clients=share)
        saving = ModelCheckpoint(folder, monitor="few/val_loss")
        callbacks = [] if found else [saving, Showing()]
        made = trainer(
            strategy=strategy,
            max_epochs=4,
            logger=CSVLogger(folder, name="", version=""),
            callbacks=callbacks,
            enable_checkpointing=bool(callbacks),
            num_sanity_val_steps=0,
        )
        made.fit(network(), train, {"own": val, "few": train.subset([4, 1])})
        found.append(table(folder))
    for round, metrics in enumerate(shown):
        some, everyone = found[0][round], found[1][round]
        own = [name for name, values in some.items() if not math.isnan(values["val_loss"])]
        few = [name for name, values in some.items() if not math.isnan(values["few/val_loss"])]
        assert len(own) == len(few) == 1
        assert set(few) <= {"c1", "c4"}
        assert set(some) == {*own, *few}
        for name, key in ((own[0], "val_loss"), (few[0], "few/val_loss")):
            assert some[name][key] == everyone[name][key]
            assert metrics[key] == pytest.approx(everyone[name][key], rel=1e-6)
    assert len(shown) == 4


def test_other_callbacks_keep_what_they_know_of_others(tmp_path: Path) -> None:
    """The fine-tuned models of all at the end beside the last round's two; best rounds of those
    that were seen so far."""
    best = BestRound("val_loss")
    made = run(tmp_path, FedAvg(), max_epochs=2, callbacks=[HeadFineTuning(), best])
    rounds = table(tmp_path)
    assert [len(rounds[0]), len(rounds[1])] == [2, CLIENTS]
    seen = [client for client, values in rounds[1].items() if not math.isnan(values["val_loss"])]
    tuned = [values["ft/val_loss"] for values in rounds[1].values()]
    assert len(seen) == 2
    assert not any(map(math.isnan, tuned))
    assert float(made.callback_metrics["ft/val_loss"]) == pytest.approx(np.mean(tuned), rel=1e-6)
    assert set(best.rounds) == {*rounds[0], *seen}
    latest = made.strategy.client_metrics("val")["val_loss"]
    assert {client for client, value in latest.items() if value == value} == set(seen)


@pytest.mark.parametrize("bad", [0, 0.0, -1, 1.5, True, "0.1", None, float("nan")])
def test_what_is_neither_share_nor_count_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"Expected `evaluated_clients` to be a fraction in"):
        FederatedStrategy(evaluated_clients=bad)


def test_more_clients_than_can_be_evaluated_are_refused_before_a_round(tmp_path: Path) -> None:
    module = network()
    before = {name: leaf.clone() for name, leaf in module.state_dict().items()}
    made = trainer(FedAvg(), num_sanity_val_steps=0)
    made.strategy.evaluated_clients = CLIENTS + 1
    with pytest.raises(ValueError, match="`evaluated_clients` to be at most the 5 clients"):
        made.fit(module, *classes(CLIENTS))
    assert all(torch.equal(leaf, before[name]) for name, leaf in module.state_dict().items())
