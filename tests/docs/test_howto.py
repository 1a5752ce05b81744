"""The programs of docs/howto.md run as they are printed, and give what the text says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "howto.md").read_text()


class TinyMNIST:
    """What torchvision's class looks like, without a download: noise, some of each class."""

    def __init__(self, root: str, train: bool = True, download: bool = False) -> None:
        samples = 400 if train else 100
        self.targets = torch.arange(samples) % 10
        self.data = torch.randint(0, 256, (samples, 28, 28), dtype=torch.uint8)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the programs leave, one after the other."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("howto"))
        patch.setattr(torchvision.datasets, "MNIST", TinyMNIST)
        for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
            exec(block, found)
        found["mnist"].prepare_data()
        found["mnist"].setup("fit")
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
class TestHowTo:
    def test_learns_where_the_text_says_so(self, names: dict[str, Any]) -> None:
        # The outcome is a linear function of both columns, and half of the patients have each.
        assert names["scaled_accuracy"] > 0.9
        # Four random labels, which the inputs determine.
        assert names["tag_accuracy"] > 0.9
        # Without weights hardly any of the rare class is found; the metric is about a recall.
        assert 0.7 < names["recall"] < 1.1
        assert abs(names["below"] - 0.9) < 0.05

    def test_a_clients_own_scaling_has_mean_0_and_deviation_1(self, names: dict[str, Any]) -> None:
        rows = names["scaled_by_client"](names["train"])
        for _, part in rows.groupby("hospital"):
            values = part[names["columns"]].to_numpy()
            np.testing.assert_allclose(values.mean(0), 0, atol=1e-12)
            np.testing.assert_allclose(values.std(0, ddof=1), 1, rtol=1e-12)

    def test_the_weights_of_both_classes_sum_to_the_same(self, names: dict[str, Any]) -> None:
        _, labels, weights = names["weighted"](1, 0.1).tensors
        assert 0 < int(labels.sum()) < 40
        assert float(weights.mean()) == pytest.approx(1.0)
        assert float(weights[labels == 1].sum()) == pytest.approx(len(labels) / 2)

    def test_the_callback_sees_every_round_and_client(self, names: dict[str, Any]) -> None:
        found = names["lengths"]
        assert len(found.lengths) == len(found.accuracies) == 5
        assert min(found.lengths) > 0
        assert sorted(found.accuracies[0]) == ["east", "north", "south"]

    def test_a_client_of_one_class_has_no_auroc(self, names: dict[str, Any]) -> None:
        assert np.isnan(names["aurocs"]["healthy"])
        known = [names["aurocs"][name] for name in ("north", "east")]
        assert names["mean_auroc"] == pytest.approx(sum(known) / 2)
        # Labels are the sign of the first of two columns, which a linear model finds.
        assert min(known) > 0.9

    def test_a_value_of_one_client_is_monitored(self, names: dict[str, Any]) -> None:
        run, stopping = names["trainer"], names["stopping"]
        value = float(run.callback_metrics["east/val_acc"])
        assert value == pytest.approx(run.strategy.client_metrics()["val_acc"]["east"])
        assert value <= float(stopping.best_score) <= 1
        assert run.current_epoch < 20

    def test_mnist_and_the_network_fit_each_other(self, names: dict[str, Any]) -> None:
        data = names["mnist"].train_dataloader()
        images, labels = data.gather(data.indices[0])
        assert images.shape[1:] == (1, 28, 28)
        # Normalised by the published mean and deviation of MNIST.
        expected = (data.fields[0][data.indices[0]].double() / 255 - 0.1307) / 0.3081
        torch.testing.assert_close(images.double(), expected, rtol=1e-5, atol=1e-5)
        names["vision"].eval()
        values = names["vision"].per_sample((images, labels))
        assert values["loss"].shape == labels.shape
