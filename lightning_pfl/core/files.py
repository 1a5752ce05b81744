"""Files that are complete or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FULL_DISK = 2**20
"""Bytes; with less space left, torch's error without a cause is one of a full disk."""


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


@contextmanager
def explaining_writes(path: Path) -> Iterator[None]:
    """Say which file of a run couldn't be written, how much space there is, and how to go on."""
    try:
        yield
    except (OSError, RuntimeError) as cause:
        free = _free(path)
        # torch's writer of archives says that it failed, but not why.
        if isinstance(cause, RuntimeError) and free > FULL_DISK:
            raise
        raise OSError(
            f"Expected to write {str(path)!r}, but got {type(cause).__name__}: {cause}. "
            f"{free / 2**20:.0f} MiB are free there. Files that were complete stay as they are: "
            "make the folder writable or free some space, and go on from the last checkpoint with "
            "`ckpt_path`."
        ) from cause


def _free(path: Path) -> int:
    """Count the free bytes on the disk of the nearest folder that exists."""
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    return shutil.disk_usage(folder).free
