"""Every argument of the Trainer: it works as a Lightning user expects, or it is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest

from tests.trainer import flags_around, flags_of_rounds

# Every function that takes a folder checks the argument of the Trainer that it is named after.
TABLE: dict[str, Callable[[Path], None]] = {
    name: function
    for module in (flags_around, flags_of_rounds)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if list(inspect.signature(function).parameters) == ["tmp_path"]
}


def test_the_table_has_every_argument_of_the_trainer() -> None:
    assert set(TABLE) == set(inspect.signature(L.Trainer.__init__).parameters) - {"self"}


@pytest.mark.quick
@pytest.mark.parametrize("flag", TABLE)
def test_flag(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    TABLE[flag](tmp_path)
