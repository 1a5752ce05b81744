"""The first page of TensorBoard's custom scalars: what people look at first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_pfl.contract.records import ClientResults
from lightning_pfl.metrics.history import higher_is_better

MODELS = ("", "global/", "ft/")
STATISTICS = {
    "personal, global, fine-tuned": "",
    "worst decile": "/worst_decile",
    "worst client": "/worst",
}
Layout = dict[str, dict[str, list[Any]]]


def add_layout(trainer: L.Trainer, results: ClientResults) -> None:
    """Write the layout of "Custom Scalars" to every TensorBoard logger."""
    names = [key for found in results.evaluations.values() for key in found.values]
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_custom_scalars(layout(dict.fromkeys(names)))


def layout(names: Iterable[str]) -> Layout:
    """Lay out the charts of some evaluated values, accuracies before losses.

    Args:
        names: Names of values without the prefix of a model, such as ``"val_acc"``.

    Returns:
        Page to title to the kind of a chart and its values, as ``add_custom_scalars`` takes them.
        Values are regular expressions for TensorBoard, so they end in ``$``.
    """
    ordered = sorted(names, key=lambda name: not higher_is_better(name))
    charts: dict[str, list[Any]] = {}
    for name in ordered:
        for title, statistic in STATISTICS.items():
            charts[f"{name}: {title}"] = _chart(f"{model}{name}{statistic}" for model in MODELS)
    costs = {
        "bytes that all clients have received and sent": _chart(["round/bytes_total"]),
        "bytes of a round": _chart(["round/bytes_down", "round/bytes_up"]),
        "seconds of a round": _chart(["round/seconds"]),
        "clients left out": _chart(["round/rejected"]),
    }
    return {"clients": charts, "costs": costs}


def _chart(names: Iterable[str]) -> list[Any]:
    return ["Multiline", [f"{name}$" for name in names]]
