"""The heat map of the clients' values: its rows, its columns, and what it keeps."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_pfl.inspect import ClientHeatMap
from lightning_pfl.inspect.client_heat_map import draw_heat_map
from lightning_pfl.methods import FedAvg
from tests.callbacks.setting import classes, network, trainer
from tests.inspect.board import Board, count_colours

NAN = float("nan")


def run_with(callback: ClientHeatMap, folder: Path, rounds: int) -> Any:
    logger = TensorBoardLogger(folder)
    return trainer(FedAvg(), callback, max_epochs=rounds, logger=logger, log_every_n_steps=1)


def test_values_are_those_of_the_table_of_clients(tmp_path: Path) -> None:
    callback = ClientHeatMap(["val_acc", "global/val_acc"], every_n_rounds=2)
    run = run_with(callback, tmp_path, 3)
    run.fit(network(), *classes())
    with (Path(run.log_dir) / "clients_val.csv").open() as file:
        rows = list(csv.DictReader(file))
    board = Board(run)
    for name in ("val_acc", "global/val_acc"):
        assert list(callback.rounds[name]) == [0, 1, 2]
        for round, values in callback.rounds[name].items():
            table = {r["client"]: float(r[name]) for r in rows if r["round"] == str(round)}
            expected = [table[client] for client in callback.names]
            np.testing.assert_allclose(values, expected, rtol=1e-6)
        assert board.steps(f"clients/{name}/map") == [1, 2]
        assert count_colours(board.picture(f"clients/{name}/map")) > 10


@pytest.mark.slow
def test_a_resumed_run_has_all_rounds(tmp_path: Path) -> None:
    first, second = ClientHeatMap(), ClientHeatMap()
    run = run_with(first, tmp_path, 2)
    run.fit(network(), *classes())
    run.save_checkpoint(tmp_path / "run.ckpt")
    again = run_with(second, tmp_path / "again", 3)
    again.fit(network(), *classes(), ckpt_path=tmp_path / "run.ckpt")
    assert list(second.rounds["val_acc"]) == [0, 1, 2]
    assert torch.equal(second.rounds["val_acc"][1], first.rounds["val_acc"][1])


def test_a_client_that_joins_has_no_value_before() -> None:
    callback = ClientHeatMap()
    callback.rounds = {"val_acc": {0: torch.tensor([0.25, 0.5], dtype=torch.float64)}}
    callback.names = ("a", "b")
    callback._take_names(["a", "b", "c"])
    assert list(callback.names) == ["a", "b", "c"]
    np.testing.assert_array_equal(callback.rounds["val_acc"][0], [0.25, 0.5, NAN])


@pytest.mark.parametrize(
    ("better", "order"), [(True, ["b", "c", "d", "a", "e"]), (False, ["a", "d", "c", "b", "e"])]
)
def test_rows_go_from_the_best_newest_value_to_the_worst(better: bool, order: list[str]) -> None:
    """Who has no value is below, in grey."""
    history = {
        0: torch.tensor([0.9, NAN, 0.3, 0.4, NAN]),
        4: torch.tensor([0.1, 0.8, 0.5, NAN, NAN]),
    }
    figure: Any = draw_heat_map(history, "val_acc", ["a", "b", "c", "d", "e"], better)
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == order
    low, high = axes.get_ylim()
    assert low > high  # the first row is on top
    drawn = axes.collections[0].get_array().reshape(5, 2)
    columns = torch.stack([history[0], history[4]], 1)
    rows = torch.stack([columns["abcde".index(client)] for client in order])
    np.testing.assert_allclose(drawn.filled(NAN), rows)
    assert axes.get_xlim() == (-2, 6)  # columns reach halfway to the next round
    assert figure.axes[1].get_ylabel() == "val_acc"


def test_clients_keep_their_rows_where_each_round_evaluates_others(tmp_path: Path) -> None:
    """Two of five clients a round: a round has numbers for the clients of its rows in the table."""
    callback = ClientHeatMap(every_n_rounds=9)
    run = run_with(callback, tmp_path, 3)
    run.strategy.evaluated_clients = 2
    run.fit(network(), *classes())
    with (Path(run.log_dir) / "clients_val.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted(callback.names) == [str(client) for client in range(5)]
    for round, values in callback.rounds["val_acc"].items():
        table = {r["client"]: float(r["val_acc"]) for r in rows if r["round"] == str(round)}
        assert len(table) == 2
        expected = [table.get(client, NAN) for client in callback.names]
        np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_many_clients_are_counted() -> None:
    values = {0: torch.rand(41, generator=torch.Generator().manual_seed(0))}
    figure: Any = draw_heat_map(values, "val_acc", [str(k) for k in range(41)], True)
    assert figure.axes[0].get_ylabel() == "41 clients, best to worst in the last round"
    assert figure.axes[0].get_yticks().tolist() == []


def test_a_value_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected `metrics` to be a list of names"):
        ClientHeatMap("val_acc")
    run = run_with(ClientHeatMap(["val_f1"]), tmp_path, 1)
    with pytest.raises(ValueError, match="got 'val_f1' and the validation logged"):
        run.fit(network(), *classes())
