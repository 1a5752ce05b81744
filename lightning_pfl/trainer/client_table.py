"""The per-client table: a CSV file per split, with a row for each evaluated round and client."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pfl.core.files import atomic_file

FIXED_COLUMNS = ("round", "client", "num_samples")


class ClientTable:
    """Appends to ``clients_val.csv`` or ``clients_test.csv``.

    Rows of the same and later rounds are dropped before a round is appended, as a resumed run
    repeats rounds, and a finished run can be validated again.

    Args:
        path: The file; its folder is made when needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        self._round = -1
        self._size: int | None = None

    def append(
        self,
        round: int,
        clients: Sequence[str],
        num_samples: Sequence[int],
        values: Mapping[str, Sequence[float]],
    ) -> None:
        """Append the rows of a round.

        Args:
            round: The round, from 0.
            clients: Names.
            num_samples: Samples evaluated, one per client.
            values: Metric name to one value per client.
        """
        new_column = not set(values) <= set(self.columns)
        if new_column or round <= self._round or self._changed():
            self._begin(round, [*values])
        missing = [""] * len(clients)
        metrics = (
            [repr(v) for v in values[name]] if name in values else missing for name in self.columns
        )
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerows(
                zip([round] * len(clients), clients, num_samples, *metrics, strict=True)
            )
        self._remember(round)

    def extend(
        self,
        round: int,
        clients: Sequence[str],
        num_samples: Sequence[int],
        values: Mapping[str, Sequence[float]],
    ) -> None:
        """Add columns to the rows of a round, or the rows if the round has none; see `append`."""
        kept, known = self._read()
        rows = {row["client"]: row for row in kept if int(row["round"]) == round}
        for client, count in zip(clients, num_samples, strict=True):
            if client not in rows:
                row = {"round": str(round), "client": client, "num_samples": str(count)}
                kept.append(row)
                rows[client] = row
        for name, column in values.items():
            for client, value in zip(clients, column, strict=True):
                rows[client][name] = repr(value)
        self.columns = [*dict.fromkeys([*known, *values])]
        self._write(kept)
        self._remember(round)

    def _remember(self, round: int) -> None:
        self._round, self._size = round, self.path.stat().st_size

    def _changed(self) -> bool:
        """Whether another table has written to the file, as `fit` and `validate` have one each."""
        return not self.path.exists() or self.path.stat().st_size != self._size

    def _begin(self, round: int, names: list[str]) -> None:
        """Write the header and the rows to keep; an incomplete row has no last column."""
        kept, known = self._read()
        self.columns = [*dict.fromkeys([*known, *names])]
        last = max((int(row["round"]) for row in kept), default=-1)
        if round == 0 and self._round < 0 and last > 0:
            rank_zero_warn(
                f"The rounds 0 to {last} of another run in {str(self.path)!r} are overwritten. "
                "Pass ckpt_path='last' to go on with that run, or give this one its own folder."
            )
        self._write([row for row in kept if int(row["round"]) < round])

    def _read(self) -> tuple[list[dict[str, str]], list[str]]:
        """Read complete rows, and the names of the metrics."""
        if not self.path.exists():
            return [], self.columns
        with self.path.open(newline="") as file:
            reader = csv.DictReader(file)
            names = [name for name in reader.fieldnames or () if name not in FIXED_COLUMNS]
            return [row for row in reader if None not in row.values()], names

    def _write(self, table: Iterable[dict[str, str]]) -> None:
        with atomic_file(self.path, "t", newline="") as file:
            writer = csv.DictWriter(file, [*FIXED_COLUMNS, *self.columns], restval="")
            writer.writeheader()
            writer.writerows(table)
