"""The per-client tables of a run as a data frame."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_pfl.trainer.client_table import FIXED_COLUMNS

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMNS = ("split", "round", "client", "samples", "model", "metric", "value")
MODELS = {"global": "global", "ft": "fine-tuned"}
"""Names of the models by the prefix of their values; values without one are of personal models."""


def read_clients(run: str | Path) -> DataFrame:
    """Read what was evaluated for every client of a run.

    Needs pandas (``lightning-pfl[tables]``).

    Args:
        run: The run's folder, ``trainer.log_dir``, with ``clients_val.csv`` or
            ``clients_test.csv``.

    Returns:
        A row for each value: ``split`` (``"val"`` or ``"test"``), ``round`` (from 0), ``client``
        (its name), ``samples`` (evaluated ones), ``model`` (``"personal"``, ``"global"`` or
        ``"fine-tuned"``), ``metric`` (such as ``"val_acc"``) and ``value``. A value that wasn't
        evaluated in a round has no row.

    Raises:
        ValueError: If the folder has no table of clients.
    """
    import pandas as pd

    folder = Path(run)
    found = {split: folder / f"clients_{split}.csv" for split in ("val", "test")}
    paths = {split: path for split, path in found.items() if path.is_file()}
    if not paths:
        below = sorted({str(path.parent) for path in folder.glob("**/clients_*.csv")})
        raise ValueError(
            "Expected `run` to be a folder with clients_val.csv or clients_test.csv, but got "
            f"run={str(run)!r}. "
            + (f"Choose one of {', '.join(below[:5])}." if below else "Pass `trainer.log_dir`.")
        )
    rows = [row for split, path in paths.items() for row in _values(split, path)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _values(split: str, path: Path) -> list[tuple[Any, ...]]:
    """Return a row for each value of a table, in the order of :data:`COLUMNS`."""
    rows: list[tuple[Any, ...]] = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if None in row.values():  # a run that was killed may leave half a line
                continue
            fixed = split, int(row["round"]), row["client"], int(row["num_samples"])
            for name, text in row.items():
                if name not in FIXED_COLUMNS and text:
                    prefix, _, rest = name.partition("/")
                    known = prefix in MODELS and rest
                    model, metric = (MODELS[prefix], rest) if known else ("personal", name)
                    rows.append((*fixed, model, metric, float(text)))
    return rows
