"""Loggers of the Trainer's, which a step may call by itself, while pieces of work are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import lightning as L
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from torch import nn

from lightning_pfl.engine.program import NotVectorizableError

PLACES = ("name", "version", "save_dir", "log_dir", "root_dir")
"""What a step may read of a logger, such as to write a file."""


class Silent(DummyLogger):
    """Takes the place of a logger, and gets nothing.

    Args:
        logger: The logger, for whose class it is taken.
    """

    # For `isinstance`.
    __class__: Any = property(lambda self: type(self._logger))

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self._logger = logger

    def __getattribute__(self, name: str) -> Any:
        if name in PLACES:
            return getattr(super().__getattribute__("_logger"), name)
        return super().__getattribute__(name)


class Refusing(Silent):
    """Refuses a step that calls a logger: for many clients at once it would do so once."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotVectorizableError("the step calls a logger by itself")

    log_metrics = log_hyperparams = __getitem__ = __getattr__ = _refuse
    experiment = property(_refuse)


@contextmanager
def loggers_replaced(module: nn.Module, make: Callable[[Logger], Logger]) -> Iterator[None]:
    """Let the Trainer of a module have other loggers inside a ``with`` block.

    Args:
        module: The module.
        make: Makes what takes the place of a logger.
    """
    parts = [part for part in module.modules() if isinstance(part, L.LightningModule)]
    trainers = {id(part._trainer): part._trainer for part in parts}.values()
    before = [(one, one.loggers) for one in trainers if isinstance(one, L.Trainer)]
    for one, loggers in before:
        one.loggers = [make(logger) for logger in loggers]
    try:
        yield
    finally:
        for one, loggers in before:
            one.loggers = loggers
