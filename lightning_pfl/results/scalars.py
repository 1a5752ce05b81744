"""The values that a run has logged, from TensorBoard's event files or from Lightning's csv."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lightning_pfl.metrics.history import AT_END
from lightning_pfl.trainer.board_layout import SUMMARY

EVENTS = "events.out.tfevents.*"
CSV = "metrics.csv"
SKIPPED = ("epoch", "hp_metric", "step")


@dataclass
class Scalars:
    """Logged values of a run.

    Attributes:
        values: Name to round to value. A resumed run's later value of a round counts.
        seconds: Round to seconds since the start, without the time between a stop and its
            resuming; from the events' clock unless the run has logged ``round/seconds``.
        ended: Whether there is the summary that a fit ends with.
    """

    values: dict[str, dict[int, float]] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    ended: bool = False


def read_scalars(folder: Path) -> Scalars:
    """Read a run's logged values: event files first, else ``metrics.csv``, else nothing."""
    found = Scalars()
    if events := sorted(folder.glob(EVENTS), key=lambda path: path.name.split(".")[3:4]):
        before = 0.0
        for path in events:
            before = _read_events(path, found, before)
    elif (folder / CSV).is_file():
        _read_csv(folder / CSV, found)
    # TensorBoard has them as a text, a csv in columns.
    found.ended = found.ended or any(name.startswith(AT_END) for name in found.values)
    if "round/seconds" in found.values:
        total = 0.0
        for round, seconds in sorted(found.values["round/seconds"].items()):
            total += seconds
            found.seconds[round] = total
    return found


def _read_events(path: Path, found: Scalars, before: float) -> float:
    """Add the values of one file, and return the seconds until its last round.

    Args:
        path: The file.
        found: The values so far.
        before: Seconds until the file's first event.
    """
    begin, last = math.nan, before
    for time, step, name, value in _events(path):
        begin = time if math.isnan(begin) else begin
        found.ended = found.ended or name.startswith(f"{SUMMARY}/")
        if value is not None and name not in SKIPPED:
            found.values.setdefault(name, {})[step] = value
        if name == "round/clients":
            last = before + time - begin
            found.seconds[step] = last
    return last


def _events(path: Path) -> Iterator[tuple[float, int, str, float | None]]:
    """Yield time, step, name and value, which is None for all that isn't a number."""
    # Imported here: tensorboard and its protocol buffers take a second.
    from tensorboard.compat.proto.event_pb2 import Event

    for record in _records(path.read_bytes()):
        event = Event.FromString(record)
        if not event.summary.value:
            yield event.wall_time, event.step, "", None
        for value in event.summary.value:
            is_number = value.WhichOneof("value") == "simple_value"
            yield event.wall_time, event.step, value.tag, value.simple_value if is_number else None


def _records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a TFRecord file: length, its checksum, data, their checksum.

    TensorBoard's own reader computes the checksums in Python, which takes most of its time. A
    record that a killed run has left incomplete ends the file.
    """
    position = 0
    while position + 12 <= len(content):
        begin = position + 12
        end = begin + int.from_bytes(content[position : position + 8], "little")
        if end + 4 > len(content):
            return
        yield content[begin:end]
        position = end + 4


def _read_csv(path: Path, found: Scalars) -> None:
    import pandas as pd

    # As text, since a value that is missing differs from nan.
    table = pd.read_csv(path, dtype=str, keep_default_na=False, on_bad_lines="skip")
    if "step" not in table.columns:
        return
    for name in table.columns.drop(list(SKIPPED), errors="ignore"):
        there = table[table[name].fillna("") != ""]
        values = dict(zip(there["step"].astype(int), there[name].astype(float), strict=True))
        if values:
            found.values[str(name)] = values
