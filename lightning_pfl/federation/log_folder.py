"""The folder of a run's files."""

from __future__ import annotations

from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_pfl._lightning import connected


def log_folder(trainer: L.Trainer) -> Path | None:
    """Return the loggers' folder; None without a logger, and in all processes but one.

    ``trainer.log_dir`` is the same, but waits for the other processes.
    """
    if not trainer.loggers or connected(trainer).fast_dev_run or not trainer.is_global_zero:
        return None
    logger = trainer.loggers[0]
    if isinstance(logger, (TensorBoardLogger, CSVLogger)):
        return None if logger.log_dir is None else Path(logger.log_dir)
    if logger.save_dir is None or logger.name is None or logger.version is None:
        return None if logger.save_dir is None else Path(logger.save_dir)
    # Where ModelCheckpoint puts the run's files; `save_dir` is one folder for all runs.
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(logger.save_dir, str(logger.name), version)
