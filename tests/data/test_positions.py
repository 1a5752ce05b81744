"""Positions of clients' samples: a sequence of views, and what users may give."""

from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.data.positions import Positions, as_positions

ROWS = [[1, 4, 6], [], [0], [7, 2]]
FLAT = torch.tensor([position for row in ROWS for position in row])


def positions(held: list[bool] | None = None) -> Positions:
    sizes = torch.tensor([len(row) for row in ROWS])
    return Positions(FLAT, sizes, list("abcd"), None if held is None else torch.tensor(held))


def test_positions_are_a_sequence_of_views() -> None:
    indices = positions()
    assert len(indices) == 4
    assert [row.tolist() for row in indices] == ROWS
    assert [row.tolist() for row in indices[1:3]] == ROWS[1:3]
    assert indices[-1].tolist() == ROWS[-1]
    with pytest.raises(IndexError):
        indices[4]
    starts = [indices[client].data_ptr() for client in (0, 2, 3)]
    assert starts == [FLAT[at:].data_ptr() for at in (0, 3, 4)]


def test_positions_of_another_process_are_refused() -> None:
    indices = positions([True, True, True, False])
    assert indices[2].tolist() == ROWS[2]
    with pytest.raises(RuntimeError, match="'d', whose samples another process has"):
        indices[3]


@pytest.mark.parametrize(
    "row", [[4, 1], (4, 1), np.array([4, 1]), torch.tensor([4, 1], dtype=torch.int32)]
)
def test_whole_numbers_are_positions(row: Any) -> None:
    found = as_positions(row, 0)
    assert found.dtype == torch.int64
    assert found.tolist() == [4, 1]


@pytest.mark.parametrize("row", [[], np.zeros(0), torch.zeros(0, 3)])
def test_nothing_is_no_position(row: Any) -> None:
    found = as_positions(row, 0)
    assert (found.dtype, found.shape) == (torch.int64, (0,))


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("ab", "client 5 got 'ab'"),
        ([1.0], "client 5 has dtype torch.float32"),
        ([True], "client 5 has dtype torch.bool"),
        (3, "client 5 has dtype torch.int64 and shape ()"),
        ([[1, 2]], "client 5 has dtype torch.int64 and shape (1, 2)"),
    ],
)
def test_other_things_are_refused(row: Any, found: str) -> None:
    with pytest.raises(TypeError) as error:
        as_positions(row, 5)
    assert str(error.value).startswith(
        f"Expected `indices` to be one 1-d integer tensor per client, but {found}"
    )
