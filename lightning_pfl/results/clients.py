"""The per-client tables of a run as a data frame."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_pfl.trainer.client_table import FIXED_COLUMNS, unguard_formula

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMNS = ("split", "round", "client", "samples", "model", "metric", "value")
MODELS = {"global": "global", "ft": "fine-tuned", "knn": "with neighbours"}
"""Names of the models by the prefix of their values; values without one are of personal models."""


def read_clients(run: str | Path) -> DataFrame:
    """Read what was evaluated for every client of a run.

    Needs pandas (``lightning-pfl[tables]``).

    Args:
        run: The run's folder, ``trainer.log_dir``, with ``clients_val.csv`` or
            ``clients_test.csv``.

    Returns:
        A row for each value: ``split`` (``"val"`` or ``"test"``), ``round`` (from 0), ``client``
        (its name), ``samples`` (evaluated ones), ``model`` (``"personal"``, ``"global"``,
        ``"fine-tuned"`` or ``"with neighbours"``), ``metric`` (such as ``"val_acc"``) and
        ``value``. A value that wasn't evaluated in a round has no row.

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
    parts = [_long(read_table(path)).assign(split=split) for split, path in paths.items()]
    return pd.concat(parts, ignore_index=True)[list(COLUMNS)]


def read_table(path: Path, only: str | None = None) -> DataFrame:
    """Read one file: a row for each round and client, all of them text but round and samples.

    A line without an end is left out: a killed run may have written half of its last number.

    Args:
        path: The file.
        only: The one column of values to read, if the file has it; None: all.
    """
    import pandas as pd

    whole = path.read_bytes()
    lines = io.BytesIO(whole[: whole.rfind(b"\n") + 1])
    # A client may be called 007 or NA, and a value that is missing differs from nan.
    wanted = None if only is None else {*FIXED_COLUMNS, only}.__contains__
    table = pd.read_csv(lines, dtype=str, keep_default_na=False, usecols=wanted)
    names = {name: unguard_formula(name) for name in table["client"].unique()}
    table["client"] = table["client"].map(names)
    return table.astype({"round": int, "num_samples": int})


def _long(table: DataFrame) -> DataFrame:
    """Turn the columns of values into rows, in the order of rounds, clients and columns."""
    import pandas as pd

    names = [name for name in table.columns if name not in FIXED_COLUMNS]
    fixed = table[list(FIXED_COLUMNS)].rename(columns={"num_samples": "samples"})
    parts = []
    for name in names:
        prefix, _, rest = name.partition("/")
        known = prefix in MODELS and rest
        model, metric = (MODELS[prefix], rest) if known else ("personal", name)
        there = table[name] != ""
        values = table.loc[there, name].astype(float)
        parts.append(fixed[there].assign(model=model, metric=metric, value=values))
    if not parts:
        return fixed.iloc[:0].assign(model="", metric="", value=0.0)
    return pd.concat(parts).sort_index(kind="stable")
