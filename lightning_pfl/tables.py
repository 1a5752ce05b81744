"""The per-client table: one CSV file per split, one row for each evaluated round and client."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

FIXED_COLUMNS = ("round", "client", "num_samples")


class ClientTable:
    """Appends to ``clients_val.csv`` or ``clients_test.csv``.

    A resumed run repeats the rounds after its checkpoint: before the first append, rows of the
    round and of later ones are dropped, so that no round is there twice.

    Args:
        path: The file; its folder is made when needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []

    def append(
        self,
        round: int,
        clients: Sequence[str],
        num_samples: Sequence[int],
        values: Mapping[str, Sequence[float]],
    ) -> None:
        """Add the rows of a round.

        Args:
            round: The round, from 0.
            clients: Names.
            num_samples: Samples evaluated, one per client.
            values: Metric name to one value per client.
        """
        if not set(values) <= set(self.columns):
            self._begin(round, [*values])
        missing = [""] * len(clients)
        metrics = (
            [repr(v) for v in values[name]] if name in values else missing for name in self.columns
        )
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerows(
                zip([round] * len(clients), clients, num_samples, *metrics, strict=True)
            )

    def _begin(self, round: int, names: list[str]) -> None:
        """Write the header and what stays of an earlier run; a torn row has no last column."""
        kept: list[dict[str, str]] = []
        known = self.columns
        if self.path.exists():
            with self.path.open(newline="") as file:
                reader = csv.DictReader(file)
                known = [name for name in reader.fieldnames or () if name not in FIXED_COLUMNS]
                kept = [
                    row for row in reader if None not in row.values() and int(row["round"]) < round
                ]
        self.columns = [*dict.fromkeys([*known, *names])]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _replace(self.path, [*FIXED_COLUMNS, *self.columns], kept)


def _replace(path: Path, columns: list[str], table: Iterable[dict[str, str]]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(table)
    Path(temporary).replace(path)
