"""Values against annotations: each plain kind, and what isn't looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_integer, check_number


def draw(
    count: int = 3,
    share: float | None = None,
    flag: bool = True,
    file: str = "a.csv",
    rule: Literal["first", "last"] = "first",
    sizes: int | Sequence[int] = (1, 2),
    rows: Sequence[Sequence[float]] = ((1.0,),),
    loss: Callable[[Any], Any] | str = "mse",
) -> None: ...


RIGHT: dict[str, list[Any]] = {
    "count": [1, -1, np.int64(2)],
    "share": [None, 1, 0.5, np.float32(0.5), float("nan")],
    "flag": [True, False],
    "file": ["b.csv", Path("b.csv")],
    "rule": ["first", "last"],
    "sizes": [4, [], [1], (1, 2), range(3), np.arange(3), torch.arange(3)],
    "rows": [[[1, 2.5]], np.eye(2), torch.eye(2)],
    "loss": ["mse", abs, 3],  # 3 is for the function to refuse: the annotation has more
}
WRONG: dict[str, list[Any]] = {
    "count": ["1", 1.0, True, None, torch.tensor(1), [1]],
    "share": ["0.5", False, 1j, [0.5]],
    "flag": [0, 1, "false", None],
    "file": [3, None, b"a.csv"],
    "rule": ["middle", None, 0],
    "sizes": ["12", [1.5], [True], {1: 2}, None, torch.tensor(1.5)],
    "rows": [[1.0], [["a"]], 3],
}
EXPECTED = {
    "count": "a whole number",
    "share": "a number or None",
    "flag": "True or False",
    "file": "a text",
    "rule": "'first' or 'last'",
    "sizes": "a whole number or a list of a whole number each",
    "rows": "a list of a list of a number each each",
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_fits_passes(name: str) -> None:
    for value in RIGHT[name]:
        check_types(draw, {name: value, "other": 1})


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(ValueError, match="Expected") as error:
            check_types(draw, {name: value})
        assert f"`{name}` to be {EXPECTED[name]}, but got {name}={value!r}. " in str(error.value)


def test_whole_numbers_have_a_bound_where_one_is_given() -> None:
    check_types(draw, {"count": 1, "share": -1.0}, least=1)
    with pytest.raises(ValueError, match="a whole number of at least 1, but got count=0"):
        check_types(draw, {"count": 0}, least=1)


def test_numbers_of_numpy_are_to_be_converted() -> None:
    """Methods' settings are kept in checkpoints as text, in which np.int64(2) isn't 2."""
    with pytest.raises(ValueError, match=r"got steps=np.int64\(2\). Convert it by int"):
        check_integer("steps", np.int64(2), 1, "Use 1.")
    with pytest.raises(ValueError, match=r"got lr=np.float32\(0.5\). Convert it by float"):
        check_number("lr", np.float32(0.5), "Use 1.")
    with pytest.raises(ValueError, match=r"got steps=0. Use 1\."):
        check_integer("steps", 0, 1, "Use 1.")
