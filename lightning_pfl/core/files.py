"""Files that are complete or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_file(path: Path, mode: str = "b", **options: Any) -> Iterator[Any]:
    """Open a file for writing that replaces ``path`` when it is complete.

    The file is durable: first its data is on the disk, then its name. If writing fails,
    ``path`` stays as it was.

    Args:
        path: Where the file will be; its folder is made when needed.
        mode: ``"b"`` for bytes, ``"t"`` for text.
        **options: Passed to ``open``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not with the suffix of `path`, so that no one takes the remains of a killed run for it.
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        # "x" refuses what is there again: a link that somebody else put there isn't followed.
        with temporary.open(f"x{mode}", **options) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # Windows can't open folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
