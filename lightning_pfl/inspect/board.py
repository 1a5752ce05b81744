"""Access to the Trainer's TensorBoard loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pfl._lightning import connected
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.core.checks import check_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


def boards(trainer: L.Trainer) -> list[Any]:
    """Return the ``SummaryWriter`` of each TensorBoard logger."""
    # Imported here, as it would make importing the package slower than importing Lightning.
    from lightning.pytorch.loggers import TensorBoardLogger

    return [log.experiment for log in trainer.loggers if isinstance(log, TensorBoardLogger)]


def require_board(trainer: L.Trainer, callback: object) -> None:
    """Raise an error before training if there is no TensorBoard logger or no matplotlib.

    With ``fast_dev_run`` and ``barebones``, which remove the loggers, nothing is required.

    Raises:
        MisconfigurationException: If there is no TensorBoard logger.
        ModuleNotFoundError: If matplotlib is not installed.
    """
    from lightning.pytorch.loggers import TensorBoardLogger

    if connected(trainer).fast_dev_run or trainer.barebones:
        return
    name = type(callback).__name__
    if not any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
        got = ", ".join(type(logger).__name__ for logger in trainer.loggers) or "no logger"
        raise MisconfigurationException(
            f"Expected a TensorBoardLogger for the pictures of {name}, but got {got}. Use "
            f"Trainer(logger=TensorBoardLogger(...)), or remove {name}."
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as cause:
        raise ModuleNotFoundError(
            f"Expected matplotlib for {name}, but it isn't installed. Install "
            "'lightning-pfl[plots]'."
        ) from cause


class PictureCallback(FederatedCallback):
    """A callback that only makes figures and therefore requires a TensorBoard logger."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Require a federated run and, for a fit, a TensorBoard logger."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            require_board(trainer, self)


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
    """Send a figure to every TensorBoard logger."""
    for board in boards(trainer):
        board.add_figure(name, figure, global_step=round)


def check_every(every_n_rounds: int) -> None:
    """Raise ValueError unless ``every_n_rounds`` is an integer >= 1."""
    check_whole("every_n_rounds", every_n_rounds, 1, "Use 1 for a picture in every round.")


def check_max_clients(max_clients: int, usual: int) -> None:
    """Raise ValueError unless ``max_clients`` is an integer >= 2; the error advises ``usual``."""
    check_whole("max_clients", max_clients, 2, f"Use {usual}, for example.")
