"""The per-client table, the history of a fit, and where data are placed."""

from __future__ import annotations

import csv
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger, Logger
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl.callbacks import HeadFineTuning
from lightning_pfl.core.files import FolderLock
from lightning_pfl.data import (
    Digits,
    FederatedDataModule,
    FederatedLoaders,
    FederatedTensorDataset,
)
from lightning_pfl.methods import FedAvg
from lightning_pfl.metrics.history import History
from lightning_pfl.models import MLP
from lightning_pfl.trainer.client_table import ClientTable, unguard_formula
from lightning_pfl.trainer.data import align_clients, move_to_device
from tests.trainer.setting import Quadratic, classes, network, points, trainer


def rows(path: Path) -> list[tuple[str, ...]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [tuple(row.values()) for row in csv.DictReader(file)]


def test_rounds_are_appended(tmp_path: Path) -> None:
    table = ClientTable(tmp_path / "new" / "clients_val.csv")
    table.append(0, ["a", "b"], [3, 4], {"acc": [0.5, 1.0]})
    table.append(1, ["a"], [3], {"acc": [0.25]})
    assert rows(table.path) == [
        ("0", "a", "3", "0.5"),
        ("0", "b", "4", "1.0"),
        ("1", "a", "3", "0.25"),
    ]


def test_a_resumed_run_replaces_the_rounds_that_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "clients_val.csv"
    first = ClientTable(path)
    for round in range(4):
        first.append(round, ["a"], [3], {"acc": [round / 10]})
    with path.open("a") as file:
        file.write("4,a")  # torn by a kill
    resumed = ClientTable(path)
    resumed.append(2, ["a"], [3], {"acc": [0.9]})
    assert rows(path) == [("0", "a", "3", "0.0"), ("1", "a", "3", "0.1"), ("2", "a", "3", "0.9")]
    assert [name.name for name in tmp_path.iterdir()] == ["clients_val.csv"]


def test_a_run_from_the_start_says_that_it_overwrites_another(tmp_path: Path) -> None:
    old = ClientTable(tmp_path / "clients_val.csv")
    for round in range(3):
        old.append(round, ["a"], [3], {"acc": [0.5]})
    new = ClientTable(old.path)
    match = (
        r"rounds 0 to 2 of another run in .* are overwritten\. Give this run its own folder\. "
        r"To go on .* 'last' if there is a last\.ckpt"
    )
    with pytest.warns(UserWarning, match=match):
        new.append(0, ["a"], [3], {"acc": [0.25]})
    new.append(1, ["a"], [3], {"acc": [1.0]})
    assert rows(old.path) == [("0", "a", "3", "0.25"), ("1", "a", "3", "1.0")]


def test_a_row_torn_inside_the_number_of_its_round_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "clients_val.csv"
    first = ClientTable(path)
    for round in range(10):
        first.append(round, ["a"], [3], {"acc": [0.5]})
    with path.open("a") as file:
        file.write("1")  # of round 10
    ClientTable(path).append(10, ["a"], [3], {"acc": [0.5]})
    assert rows(path) == [(str(round), "a", "3", "0.5") for round in range(11)]


def test_names_are_no_formulas_and_read_as_they_are(tmp_path: Path) -> None:
    names = ["=1+1", "+1", "-2", "@SUM(A1)", "'quoted", "ann", "Zoë"]
    table = ClientTable(tmp_path / "clients_val.csv")
    table.append(0, names, [1] * 7, {"val_acc": [0.5] * 7})
    table.extend(0, names, [1] * 7, {"ft/val_acc": [1.0] * 7})
    cells = [row[1] for row in rows(table.path)]
    assert cells == ["'=1+1", "+1", "-2", "'@SUM(A1)", "''quoted", "ann", "Zoë"]
    assert [unguard_formula(cell) for cell in cells] == names
    assert {row[4] for row in rows(table.path)} == {"1.0"}


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    victim, table = tmp_path / "victim", ClientTable(tmp_path / "clients_val.csv")
    victim.write_text("precious")
    (tmp_path / ".clients_val.csv.tmp").symlink_to(victim)
    table.append(0, ["a"], [3], {"acc": [0.5]})
    assert victim.read_text() == "precious"
    assert rows(table.path) == [("0", "a", "3", "0.5")]


def test_a_full_disk_leaves_whole_rows_and_says_how_to_go_on(tmp_path: Path) -> None:
    table = ClientTable(tmp_path / "clients_val.csv")
    table.append(0, ["a"], [3], {"acc": [0.5]})
    before = table.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.raises(OSError, match=r"clients_val\.csv'.* MiB are free .*`ckpt_path`"):
            table.append(1, ["b" * 99] * 9, [3] * 9, {"acc": [0.5] * 9})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert table.path.read_bytes() == before
    table.append(1, ["b"], [3], {"acc": [0.25]})
    assert rows(table.path) == [("0", "a", "3", "0.5"), ("1", "b", "3", "0.25")]


def test_a_value_that_comes_later_gets_a_column(tmp_path: Path) -> None:
    table = ClientTable(tmp_path / "clients_val.csv")
    table.append(0, ["a"], [3], {"acc": [0.5]})
    table.append(1, ["a"], [3], {"acc": [0.6], "tuned/acc": [0.7]})
    table.append(2, ["a"], [3], {"acc": [0.8]})
    assert rows(table.path) == [
        ("0", "a", "3", "0.5", ""),
        ("1", "a", "3", "0.6", "0.7"),
        ("2", "a", "3", "0.8", ""),
    ]


def test_a_round_that_is_evaluated_again_is_there_once(tmp_path: Path) -> None:
    table = ClientTable(tmp_path / "clients_val.csv")
    for acc in (0.5, 0.6):
        table.append(0, ["a", "b"], [3, 4], {"acc": [acc, 1.0]})
    table.append(1, ["a"], [3], {"acc": [0.7]})
    assert rows(table.path) == [
        ("0", "a", "3", "0.6"),
        ("0", "b", "4", "1.0"),
        ("1", "a", "3", "0.7"),
    ]


def test_two_tables_of_one_file_keep_its_columns(tmp_path: Path) -> None:
    """A fit, a validation with one value more, and the fit goes on."""
    fit, validate = (ClientTable(tmp_path / "clients_val.csv") for _ in range(2))
    fit.append(0, ["a"], [3], {"acc": [0.5]})
    validate.append(0, ["a"], [3], {"ft/acc": [0.6], "acc": [0.5]})
    fit.append(1, ["a"], [3], {"acc": [0.7]})
    with fit.path.open(newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"round": "0", "client": "a", "num_samples": "3", "acc": "0.5", "ft/acc": "0.6"},
            {"round": "1", "client": "a", "num_samples": "3", "acc": "0.7", "ft/acc": ""},
        ]


def test_a_table_that_was_deleted_begins_anew(tmp_path: Path) -> None:
    table = ClientTable(tmp_path / "clients_val.csv")
    table.append(0, ["a"], [3], {"acc": [0.5]})
    table.path.unlink()
    table.append(1, ["a"], [3], {"acc": [0.7]})
    with table.path.open(newline="") as file:
        assert [row["acc"] for row in csv.DictReader(file)] == ["0.7"]


def test_the_best_round_is_chosen_by_the_first_value_that_is_no_loss() -> None:
    history = History()
    for round, (loss, acc) in enumerate([(3.0, 0.2), (1.0, 0.6), (2.0, 0.7), (4.0, 0.1)]):
        history.update(round, {"val_loss": loss, "val_acc": acc})
    summary = history.summary()
    assert (summary["best/round"], summary["best/val_acc"], summary["best/val_loss"]) == (
        2,
        0.7,
        2.0,
    )
    assert summary["last10/val_loss"] == 2.5


@pytest.mark.parametrize("split", ["train", "test"])
def test_test_data_choose_no_best_round(split: Any, tmp_path: Path) -> None:
    fraction = 0.25 if split == "train" else 0.0
    data = FederatedDataModule(
        Digits(), num_clients=3, val_split=split, val_fraction=fraction, batch_size=500
    )
    run = trainer(logger=CSVLogger(tmp_path), max_epochs=2)
    run.fit(MLP([64, 10], num_classes=10), data)
    logged = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    for reported in (run.callback_metrics, logged):
        assert "last10/val_acc" in reported
        assert ("best/val_acc" in reported) is (split == "train")
    assert ("best/round" in run.callback_metrics) is (split == "train")


class Both(MLP):
    """Logs a value for the loggers, and one for callbacks alone."""

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        self.log("val_acc", torch.tensor(0.5))
        self.log("val_mine", torch.tensor(0.25), logger=False)


STATISTICS = ("/weighted", "/std", "/worst_decile", "/worst")


@pytest.mark.parametrize("resumed", [False, True])
def test_loggers_get_the_headlines_of_a_run_and_callbacks_all(
    resumed: bool, tmp_path: Path
) -> None:
    """A dot for each statistic of the end would come before the curves in TensorBoard."""
    data = FederatedDataModule(Digits(), num_clients=3, val_fraction=0.25, batch_size=500)

    def fit(rounds: int, path: Path | None = None) -> Any:
        tuning = HeadFineTuning(epochs=1, when="evaluation")
        settings: Any = {"max_epochs": rounds, "check_val_every_n_epoch": 2}
        run = trainer(logger=CSVLogger(tmp_path), callbacks=[tuning], **settings)
        run.fit(Both([64, 10], num_classes=10), data, ckpt_path=path, weights_only=True)
        return run

    run = fit(2 if resumed else 3)
    if resumed:  # goes on with a round that isn't validated
        run.save_checkpoint(tmp_path / "run.ckpt")
        run = fit(3, tmp_path / "run.ckpt")
    with (Path(str(run.log_dir)) / "metrics.csv").open(newline="") as file:
        columns = next(csv.reader(file))
    models = ("", "global/", "ft/")
    headlines = {f"{end}{model}val_acc" for end in ("best/", "last10/") for model in models}
    logged = {name for name in columns if name.startswith(("best/", "last10/"))}
    assert logged == {*headlines, "best/round"}
    further = {name + statistic for name in headlines for statistic in STATISTICS}
    hidden = {name.replace("val_acc", "val_mine") for name in headlines | further}
    assert run.callback_metrics.keys() >= headlines | further | hidden


def test_with_losses_alone_the_smallest_is_the_best() -> None:
    history = History()
    for round, loss in enumerate([3.0, 1.0, 2.0]):
        history.update(round, {"val_loss": loss})
    assert history.summary()["best/round"] == 1


def test_a_history_survives_a_checkpoint_and_forgets_repeated_rounds() -> None:
    history = History()
    for round in range(3):
        history.update(round, {"val_acc": round / 10})
    restored = History()
    restored.load_state_dict(history.state_dict())
    assert restored.summary() == history.summary()
    empty = History()
    restored.load_state_dict(empty.state_dict())
    assert restored.summary() == {}


def test_double_precision_reaches_the_batches_of_both_kinds_of_data() -> None:
    run = trainer(precision="64-true")
    x = torch.ones(4, 2)
    resident = FederatedTensorDataset((x, torch.arange(4)), [[0, 1], [2, 3]], transform=halve)
    loaders = FederatedLoaders([DataLoader(TensorDataset(x, torch.arange(4)))])
    in_memory: Any = move_to_device(resident, run)
    loaded: Any = move_to_device(loaders, run)
    for inputs, labels in (in_memory.gather(torch.tensor([0, 1])), next(iter(loaded.loaders[0]))):
        assert (inputs.dtype, labels.dtype) == (torch.float64, torch.int64)
    assert float(in_memory.gather(torch.tensor([0]))[0][0, 0]) == 0.5
    # The user's own objects stay as they are.
    assert next(iter(loaders.loaders[0]))[0].dtype == torch.float32
    assert resident.transform is halve


def halve(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch[0] / 2, batch[1]


def test_clients_are_aligned_by_position_or_by_name() -> None:
    found, clients = align_clients(points((1, 0, 2, 3)), list("abcd"), "val_dataloaders")
    assert (found.tolist(), clients.tolist()) == ([0, 2, 3], [0, 2, 3])
    named = points((1, 0, 2, 3), names=["d", "c", "b", "a"])
    found, clients = align_clients(named, list("abcd"), "val_dataloaders")
    assert (found.tolist(), clients.tolist()) == ([0, 2, 3], [3, 1, 0])
    with pytest.raises(ValueError, match="one DataLoader for each of the 5 clients, but got 4"):
        align_clients(points(), list("abcde"), "val_dataloaders")


class Tracker(Logger):
    """A logger with one folder for all runs, as W&B's and MLflow's have."""

    def __init__(self, folder: Path, run: str | int) -> None:
        super().__init__()
        self._folder, self._run = str(folder), run

    @property
    def save_dir(self) -> str:
        return self._folder

    @property
    def name(self) -> str:
        return "project"

    @property
    def version(self) -> str | int:
        return self._run

    def log_metrics(self, *_: Any, **__: Any) -> None:
        pass

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("runs", "folders"), [(("a1", "b2"), ("a1", "b2")), ((0,), ("version_0",))]
)
def test_every_run_of_a_tracker_has_its_own_table(
    runs: tuple[str | int, ...], folders: tuple[str, ...], tmp_path: Path
) -> None:
    for number, run in enumerate(runs, start=1):
        one = trainer(FedAvg(), logger=Tracker(tmp_path, run), max_epochs=number)
        one.fit(Quadratic(), points(), points())
    tables = {path.parent: path for path in tmp_path.rglob("clients_val.csv")}
    assert sorted(tables) == sorted(tmp_path / "project" / folder for folder in folders)
    for number, folder in enumerate(folders, start=1):
        found = rows(tables[tmp_path / "project" / folder])
        assert {row[0] for row in found} == {str(round) for round in range(number)}


@pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty")
@pytest.mark.skipif(os.name != "posix", reason="folders aren't locked here")
def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    def fit() -> None:
        logger = CSVLogger(tmp_path, name="", version="run")
        trainer(FedAvg(), max_epochs=1, logger=logger).fit(network(), *classes())

    other = FolderLock()
    other.take(tmp_path / "run")
    match = rf"run alone, but got .*run', into which process {os.getpid()} on .* another name or v"
    with pytest.raises(MisconfigurationException, match=match):
        fit()
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == [FolderLock.NAME]
    other.release()
    fit()
    assert (tmp_path / "run" / "clients_val.csv").exists()
    assert not (tmp_path / "run" / FolderLock.NAME).exists()
