"""Files that are complete or not there, and folders of one run at a time."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import fcntl

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


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is either complete or not there."""
    with atomic_file(path) as file:
        file.write(data)


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


class FolderLock:
    """Keeps a folder for one run at a time.

    The system frees it when the process ends, however it ends. Windows and file systems without
    locks have none.
    """

    NAME = ".running"

    def __init__(self) -> None:
        self._held: tuple[Path, int] | None = None

    def take(self, folder: Path) -> str:
        """Take a folder, and free the one before; return who has it, empty if this lock has."""
        self.release()
        if sys.platform == "win32":
            return ""
        path = folder / self.NAME
        with explaining_writes(path):
            folder.mkdir(parents=True, exist_ok=True)
            # A link that somebody else put there isn't followed.
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(file, 1000).decode()
            os.close(file)
            return owner or "another process"
        except OSError:  # no locks here
            os.close(file)
            return ""
        if not path.exists() or os.fstat(file).st_ino != path.stat().st_ino:
            os.close(file)
            return self.take(folder)  # its last owner has just removed the file
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._held = path, file
        return ""

    def release(self) -> None:
        """Free the folder, if any is taken."""
        if self._held is not None:
            path, file = self._held
            path.unlink(missing_ok=True)
            os.close(file)
        self._held = None


def _free(path: Path) -> int:
    """Count the free bytes on the disk of the nearest folder that exists."""
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    return shutil.disk_usage(folder).free
