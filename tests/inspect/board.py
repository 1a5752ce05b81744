"""What a run has written to TensorBoard."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np


def count_colours(picture: np.ndarray) -> int:
    """Count the colours of a picture of floats up to 1, ``(height, width, channels)``."""
    pixels = np.rint(picture * 255).astype(np.int64)
    return len(np.unique(pixels @ 256 ** np.arange(picture.shape[2])))


class Board:
    """Reads an event file back.

    Args:
        run: A Trainer with a TensorBoardLogger.
    """

    def __init__(self, run: Any) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        run.logger.finalize("success")
        everything = {"images": 0, "histograms": 0, "scalars": 0, "tensors": 0}
        self.events: Any = EventAccumulator(str(Path(run.log_dir)), everything).Reload()

    def steps(self, name: str) -> list[int]:
        """Steps of the pictures."""
        return [event.step for event in self.events.Images(name)]

    def picture(self, name: str) -> np.ndarray:
        """The last picture, ``(height, width, channels)``."""
        encoded = self.events.Images(name)[-1].encoded_image_string
        return np.asarray(matplotlib.image.imread(io.BytesIO(encoded), format="png"))

    def histograms(self, name: str) -> dict[int, Any]:
        """Step to what TensorBoard knows of the values: their number, minimum, maximum and sum."""
        return {event.step: event.histogram_value for event in self.events.Histograms(name)}

    def scalars(self) -> dict[str, list[int]]:
        """Steps of every curve."""
        names = self.events.Tags()["scalars"]
        return {name: [event.step for event in self.events.Scalars(name)] for name in names}

    def text(self, name: str) -> str:
        """The last text of a name."""
        tensor = self.events.Tensors(f"{name}/text_summary")[-1].tensor_proto
        return str(tensor.string_val[0].decode())

    def values_beside_settings(self) -> list[str]:
        """Names of the values in the table of settings, in its order."""
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        plugin = self.events.SummaryMetadata("_hparams_/experiment").plugin_data.content
        experiment = HParamsPluginData.FromString(plugin).experiment
        return [info.name.tag for info in experiment.metric_infos]
