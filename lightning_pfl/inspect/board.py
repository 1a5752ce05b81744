"""Places for pictures: TensorBoard, other loggers that take images, and files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pfl._lightning import connected
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.core.checks import check_integer
from lightning_pfl.federation.log_folder import log_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


def boards(trainer: L.Trainer) -> list[Any]:
    """Return the ``SummaryWriter`` of each TensorBoard logger."""
    # Imported here, as it would make importing the package slower than importing Lightning.
    from lightning.pytorch.loggers import TensorBoardLogger

    return [log.experiment for log in trainer.loggers if isinstance(log, TensorBoardLogger)]


def takes_pictures(trainer: L.Trainer) -> bool:
    """Whether pictures have a place: a logger that takes images, or the folder of the run's logs.

    Not with ``fast_dev_run`` and ``barebones``.
    """
    if connected(trainer).fast_dev_run or trainer.barebones:
        return False
    return bool(boards(trainer)) or bool(_with_images(trainer)) or log_folder(trainer) is not None


def _with_images(trainer: L.Trainer) -> list[Any]:
    """Return the loggers with ``log_image``, such as W&B's."""
    return [logger for logger in trainer.loggers if callable(getattr(logger, "log_image", None))]


def require_place(trainer: L.Trainer, callback: object) -> None:
    """Raise an error before training if pictures have no place, or if matplotlib is missing.

    With ``fast_dev_run`` and ``barebones``, which remove the loggers, nothing is required.

    Raises:
        MisconfigurationException: If there is no logger.
        ModuleNotFoundError: If matplotlib is not installed.
    """
    if connected(trainer).fast_dev_run or trainer.barebones:
        return
    name = type(callback).__name__
    if not trainer.loggers:
        raise MisconfigurationException(
            f"Expected a logger for the pictures of {name}, but got none. Use "
            f"Trainer(logger=TensorBoardLogger(...)) or another logger, or remove {name}."
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as cause:
        raise ModuleNotFoundError(
            f"Expected matplotlib for {name}, but it isn't installed. Install "
            "'lightning-pfl[plots]'."
        ) from cause


class PictureCallback(FederatedCallback):
    """A callback that only makes figures and therefore requires a logger."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Require a federated run and, for a fit, a logger."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            require_place(trainer, self)


def new_figure(width: float = 8.0, height: float = 4.0) -> tuple[Figure, Axes]:
    """Make a figure with one pair of axes, sized in inches, that pyplot doesn't keep open."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    return figure, figure.add_subplot()


def whole_numbers(axis: Axis) -> None:
    """Put the ticks of an axis at integers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def show(trainer: L.Trainer, name: str, figure: Figure, round: int) -> None:
    """Send a figure to every logger that takes images, and write it to the folder of the logs.

    Args:
        trainer: The running Trainer.
        name: Its name in loggers; the file is ``pictures/<name>-<round>.png``, with ``-`` for
            ``/``.
        figure: The figure.
        round: The round, from 0.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for board in boards(trainer):
        board.add_figure(name, figure, global_step=round)
    folder, loggers = log_folder(trainer), _with_images(trainer)
    if folder is None and not loggers:
        return
    canvas: Any = FigureCanvasAgg(figure)
    if folder is not None:
        path = folder / "pictures" / f"{name.replace('/', '-')}-{round:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.print_png(path)
    for logger in loggers:
        canvas.draw()
        logger.log_image(name, [np.asarray(canvas.buffer_rgba())], step=round)


def first_of(drawn: int, clients: int | None) -> str:
    """Return the end of a title where only the first clients are drawn; else nothing.

    Example:
        >>> first_of(256, 300), first_of(40, 40)
        (' (the first 256 of 300 clients)', '')
    """
    return f" (the first {drawn} of {clients} clients)" if (clients or 0) > drawn else ""


def check_every(every_n_rounds: int) -> None:
    """Raise ValueError unless ``every_n_rounds`` is an integer >= 1."""
    check_integer("every_n_rounds", every_n_rounds, 1, "Use 1 for a picture in every round.")


def check_max_clients(max_clients: int, usual: int) -> None:
    """Raise ValueError unless ``max_clients`` is an integer >= 2; the error advises ``usual``."""
    check_integer("max_clients", max_clients, 2, f"Use {usual}, for example.")
