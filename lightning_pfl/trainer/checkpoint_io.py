"""Checkpoints that survive a kill at any moment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it: a file is complete, or it is not there.

    Lightning's own plugin goes through the system's temporary folder, whose move to another disk is
    a copy and can be torn. Remote paths are left to Lightning.
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
        # No suffix .ckpt: what a kill leaves behind is not taken for a checkpoint, and the next
        # write replaces it.
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
