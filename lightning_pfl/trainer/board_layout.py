"""The first page of TensorBoard, the table of settings, and the values of the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
SUMMARY = "summary"
"""Where TensorBoard has the values of a fit's end."""
Layout = dict[str, dict[str, list[Any]]]


def add_layout(trainer: L.Trainer, results: ClientResults) -> None:
    """Write "Custom Scalars" and "HParams" to every TensorBoard logger, at the first evaluation."""
    names = dict.fromkeys(key for found in results.evaluations.values() for key in found.values)
    pairs = [
        (prefix, name) for prefix, found in results.evaluations.items() for name in found.values
    ]
    values = [
        f"{prefix}{name}{statistic}"
        # A window shows the first columns alone.
        for prefix, name in sorted(pairs, key=lambda pair: not higher_is_better(pair[1]))
        for statistic in ("", "/worst_decile")
    ]
    for logger in _boards(trainer):
        logger.experiment.add_custom_scalars(layout(names))
        _add_settings(logger, values)


def add_summary(trainer: L.Trainer, values: Mapping[str, float]) -> None:
    """Write the values of a fit's end to every TensorBoard logger, as a table under "Text"."""
    rows = "".join(f"| {name} | {value:.4g} |\n" for name, value in values.items())
    for logger in _boards(trainer):
        table = f"| value | at the end |\n|---|---|\n{rows}"
        logger.experiment.add_text(SUMMARY, table, trainer.current_epoch)


def _add_settings(logger: TensorBoardLogger, values: Sequence[str]) -> None:
    """Write the table of settings, the method's first, with the newest values of some curves.

    Lightning's own has values of its own, which are charts with a dot, and settings by name.
    """
    # Imported here: tensorboard and its protocol buffers take a second.
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from torch.utils.tensorboard.summary import hparams

    settings = {
        name: value if isinstance(value, int | float) else str(value)
        for name, value in logger.hparams.items()
        if value is not None
    }
    columns, *session = hparams(settings, dict.fromkeys(values, 0))
    plugin = columns.value[0].metadata.plugin_data
    content = HParamsPluginData.FromString(plugin.content)
    for info in content.experiment.hparam_infos:
        # TensorBoard sorts by this mark and then by name, and shows five columns.
        info.differs = info.name.startswith("method")
    plugin.content = content.SerializeToString()
    for part in (columns, *session):
        logger.experiment.file_writer.add_summary(part)


def _boards(trainer: L.Trainer) -> list[TensorBoardLogger]:
    """List the loggers to write to; in other processes they have no writer."""
    loggers = trainer.loggers if trainer.is_global_zero else []
    return [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]


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
