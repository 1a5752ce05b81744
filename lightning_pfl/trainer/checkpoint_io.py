"""Atomic writing of checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file and renames it, so that files are never incomplete.

    Lightning's plugin uses the system's temporary folder, whose move to another disk is a copy and
    can be interrupted. Remote paths are left to Lightning.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write ``checkpoint`` durably: the data first, then the name, then the folder's entry."""
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Without the suffix .ckpt, so that remains of a killed run aren't taken for a checkpoint;
        # the next write replaces them.
        temporary = target.with_name(f".{target.name}.tmp")
        with temporary.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(target)
        _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # Windows can't open folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
