"""The per-client table: a CSV file per split, with a row for each evaluated round and client."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pfl.core.files import atomic_file, explaining_writes

FIXED_COLUMNS = ("round", "client", "num_samples")
FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")
"""Beginnings of cells that spreadsheets may execute, and the mark that keeps them from it."""


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
        cells = map(guard_formula, clients)
        lines = zip([round] * len(clients), cells, num_samples, *metrics, strict=True)
        text = io.StringIO()
        csv.writer(text).writerows(lines)
        data = text.getvalue().encode()
        with explaining_writes(self.path), self.path.open("ab", buffering=0) as file:
            try:
                while data:  # an unbuffered file may take a part
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(self._size)  # rows are whole
                raise
        self._note_size(round)

    def extend(
        self,
        round: int,
        clients: Sequence[str],
        num_samples: Sequence[int],
        values: Mapping[str, Sequence[float]],
    ) -> None:
        """Add columns to the rows of a round, or the rows if the round has none; see `append`."""
        cells = [*map(guard_formula, clients)]
        added = {
            client: dict(zip(values, map(repr, row), strict=True))
            for client, *row in zip(cells, *values.values(), strict=True)
        }
        fixed = {
            client: [str(round), client, str(count)]
            for client, count in zip(cells, num_samples, strict=True)
        }

        self.columns = [*dict.fromkeys([*self._names(), *values])]

        def rows() -> Iterator[list[str]]:
            for row in self._rows():
                if int(row[0]) == round and row[1] in fixed:
                    del fixed[row[1]]
                    row = self._with(row, added[row[1]])
                yield row
            for client, row in fixed.items():
                yield self._with(row, added[client])

        self._write(rows())
        self._note_size(round)

    def _with(self, row: Sequence[str], values: Mapping[str, str]) -> list[str]:
        known = {**dict(zip(self.columns, row[len(FIXED_COLUMNS) :], strict=False)), **values}
        metrics = [known.get(name, "") for name in self.columns]
        return [*row[: len(FIXED_COLUMNS)], *metrics]

    def _note_size(self, round: int) -> None:
        self._round, self._size = round, self.path.stat().st_size

    def _changed(self) -> bool:
        """Whether another table has written to the file, as `fit` and `validate` have one each."""
        return not self.path.exists() or self.path.stat().st_size != self._size

    def _begin(self, round: int, names: list[str]) -> None:
        """Write the header and the rows to keep; an incomplete row has no last column."""
        self.columns = [*dict.fromkeys([*self._names(), *names])]
        last = -1

        def kept() -> Iterator[list[str]]:
            nonlocal last
            for row in self._rows():
                number = int(row[0])
                last = max(last, number)
                if number < round:
                    yield row

        self._write(kept())
        if round == 0 and self._round < 0 and last > 0:
            rank_zero_warn(
                f"The rounds 0 to {last} of another run in {str(self.path)!r} are overwritten. "
                "Give this run its own folder. To go on with the other, pass the path of one of "
                "its checkpoints as `ckpt_path`, or 'last' if there is a last.ckpt among them."
            )
        self._size = self.path.stat().st_size

    def _names(self) -> list[str]:
        """Read the names of the metrics."""
        if not self.path.exists():
            return self.columns
        with self.path.open(newline="", encoding="utf-8") as file:
            header = next(csv.reader(file), [])
        return [name for name in header if name not in FIXED_COLUMNS]

    def _rows(self) -> Iterator[list[str]]:
        """Read the complete rows one at a time, as a long run's table is large."""
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                reader = csv.reader(file)
                width = len(next(reader, ()))
                yield from (row for row in reader if len(row) == width)

    def _write(self, rows: Iterable[list[str]]) -> None:
        """Replace the file by rows, to which columns may be new."""
        names = [*FIXED_COLUMNS, *self.columns]
        gap = [""] * len(names)
        options = {"newline": "", "encoding": "utf-8"}
        with explaining_writes(self.path), atomic_file(self.path, "t", **options) as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows(row + gap[len(row) :] for row in rows)


def guard_formula(name: str) -> str:
    """Return a client's name as the table has it: a spreadsheet must not take it for a formula.

    Example:
        >>> guard_formula("ann"), guard_formula("-3"), guard_formula("=1+2")
        ('ann', '-3', "'=1+2")
    """
    return f"'{name}" if name.startswith(FORMULA) and not _is_number(name) else name


def unguard_formula(cell: str) -> str:
    """Undo :func:`guard_formula`."""
    return cell.removeprefix("'")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
