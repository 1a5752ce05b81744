"""Atomic writing of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_pfl.core.files import atomic_file, explaining_writes
from lightning_pfl.federation.shards import make_room


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file and renames it, so that files are never incomplete.

    Lightning's plugin uses the system's temporary folder, whose move to another disk is a copy and
    can be interrupted. Remote paths are left to Lightning.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write ``checkpoint`` durably."""
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with explaining_writes(Path(path)), atomic_file(Path(path)) as file:
            torch.save(checkpoint, file)
            make_room(Path(path))
