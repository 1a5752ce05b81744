"""Checkpoints in a folder: a file of what all processes have in common, and one of each process.

``meta.ckpt`` is a Lightning checkpoint without the clients' part, which is in the files that it
names: one for each process that wrote it, with the states of its own clients. No process gathers or
writes those of others, and any number of processes reads them.

The files of a checkpoint have a name of their own, so that one that is written over another is
complete, or isn't there: ``meta.ckpt`` is replaced when all other files are on the disk.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_pfl.core.files import atomic_file, explaining_writes
from lightning_pfl.federation.checkpoint import check_file, explain_read_errors, federated_part
from lightning_pfl.federation.ranks import Ranks

META = "meta.ckpt"
"""The file of what all processes have in common."""


def is_sharded(path: Any) -> bool:
    """Whether a path is the folder of a sharded checkpoint."""
    return Path(path, META).is_file()


def require_checkpoint(path: Any) -> None:
    """Refuse a path of this machine that has neither a checkpoint nor the rest of a folder of one.

    Raises:
        FileNotFoundError: If there is nothing, or another folder; says what a path can be.
    """
    here = Path(path)
    if here.is_file() or is_sharded(here) or any(here.glob("clients-*.ckpt")):
        return
    found = "a folder" if here.is_dir() else "no file"
    raise FileNotFoundError(
        f"Expected `path` to be a checkpoint on this machine, but {str(path)!r} is {found}. "
        "Give the .ckpt file or folder that `trainer.save_checkpoint` or ModelCheckpoint wrote."
    )


def write_shards(
    path: Path, checkpoint: Mapping[str, Any], own: Mapping[str, Any], ranks: Ranks
) -> None:
    """Write a checkpoint as a folder; a collective call of all processes.

    Args:
        path: The folder, on a disk that all processes share; a checkpoint there is replaced.
        checkpoint: The Lightning checkpoint; that of process 0 is written.
        own: This process's part, with the ids of its clients.
        ranks: The processes.

    Raises:
        OSError: If a process can't write, or the disk isn't shared; in all processes.
    """
    token = ranks.all_gather_objects(secrets.token_hex(4))[0]
    names = [f"clients-{token}-{rank}-of-{ranks.size}.ckpt" for rank in range(ranks.size)]
    # A new folder gets its name when it is complete.
    folder = path if path.is_dir() else path.with_name(f".{path.name}.{token}.tmp")
    ranks.all_gather_objects(None)  # all have looked
    problem = ""
    try:
        with explaining_writes(folder / names[ranks.rank]):
            _write(folder / names[ranks.rank], {**own, "token": token})
    except OSError as error:
        problem = str(error)
    if problems := [found for found in ranks.all_gather_objects(problem) if found]:
        raise OSError(problems[0])
    if ranks.rank:
        return
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise OSError(
            f"Expected {str(path)!r} to be on a disk that all {ranks.size} processes share, but "
            f"{missing[0]!r} of another process isn't there. Save to a shared disk, or use "
            "state_dict_type='full'."
        )
    shared = {**checkpoint["federated"], "shards": {"files": names, "token": token}}
    with explaining_writes(folder / META):
        _write(folder / META, {**checkpoint, "federated": shared})
        if folder != path:
            path.unlink(missing_ok=True)  # the file of an unsharded one
            folder.rename(path)
    for old in path.glob("clients-*.ckpt"):
        if old.name not in names:
            old.unlink()


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_file(path) as file:
        torch.save(dict(content), file)


def read_shards(path: Any, safely: bool = True) -> dict[str, Any]:
    """Read a sharded checkpoint.

    Args:
        path: The folder.
        safely: Whether ``meta.ckpt`` may hold tensors and plain values alone; the other files have
            nothing else.

    Returns:
        The Lightning checkpoint, with the processes' parts in ``["federated"]["shards"]``. Their
        tensors are read from the disk when they are used: what is kept has to be copied, as others
        may write over the files or delete them.

    Raises:
        RuntimeError: If a file is missing, truncated, damaged or of another checkpoint; names it.
        CheckpointMismatchError: If the run wasn't federated, or its format is another one.
    """
    checkpoint: dict[str, Any] = _read(Path(path, META), safely, mmap=False)
    saved = dict(federated_part(checkpoint))
    listed, parts = saved["shards"], []
    for name in listed["files"]:
        part = _read(Path(path, name))
        if part.get("token") != listed["token"]:
            raise RuntimeError(
                f"Expected {str(Path(path, name))!r} to be of the checkpoint in its folder, but it "
                "is of another one. Copy the whole folder again, or use another checkpoint."
            )
        parts.append(part)
    saved["shards"] = parts
    return {**checkpoint, "federated": saved}


def _read(path: Path, safely: bool = True, mmap: bool = True) -> Any:
    if not path.is_file():
        raise RuntimeError(
            f"Expected all files of the checkpoint in {str(path.parent)!r}, but {path.name!r} is "
            "missing. Copy the whole folder again, or use another checkpoint."
        )
    check_file(path)
    with explain_read_errors(path):
        return torch.load(path, map_location="cpu", weights_only=safely, mmap=mmap)


def make_room(path: Path) -> None:
    """Remove the folder of a sharded checkpoint, in whose place a file is to be written."""
    if is_sharded(path):
        # First the name: a killed run leaves no folder that looks complete.
        hidden = path.with_name(f".{path.name}.{os.getpid()}.old")
        path.rename(hidden)
        shutil.rmtree(hidden)
