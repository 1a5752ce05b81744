"""ShiftedLines against its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.data import FederatedDataModule, ShiftedLines


def test_samples_follow_the_definition() -> None:
    """50,000 samples: means are known to 0.01, variances to 1 %."""
    source = ShiftedLines((50_000, 50_000), slope=-2.0, intercept_step=3.0, dtype="float64")
    found = source.load()
    x, y = (field[:, 0].numpy() for field in found.fields)
    for client in (0, 1):
        mine = found.columns["client"] == client
        assert mine.sum() == 50_000
        assert x[mine].mean() == pytest.approx(client, abs=0.02)
        assert x[mine].var() == pytest.approx(1.0, rel=0.03)
        noise = y[mine] + 2.0 * x[mine] - 3.0 * client
        assert noise.mean() == pytest.approx(0.0, abs=0.02)
        assert noise.var() == pytest.approx(0.8, rel=0.03)
        assert abs(np.corrcoef(noise, x[mine])[0, 1]) < 0.02
    np.testing.assert_array_equal(found.labels, y)


def test_training_and_test_samples_differ_and_the_seed_decides() -> None:
    first, again, other = (ShiftedLines((5, 5), test_samples=5, seed=s).load() for s in (0, 0, 1))
    assert torch.equal(first.fields[0], again.fields[0])
    assert not torch.equal(first.fields[0], other.fields[0])
    assert first.test_fields is not None
    assert not torch.equal(first.fields[0], first.test_fields[0])
    # More test samples leave the training samples as they are.
    assert torch.equal(ShiftedLines((5, 5)).load().fields[1], first.fields[1])


def test_the_data_module_splits_by_client() -> None:
    data = FederatedDataModule(ShiftedLines(test_samples=7), batch_size=10)
    data.setup("fit")
    data.setup("test")
    assert data.train_dataloader().num_samples.tolist() == [60, 1, 2, 3, 50]
    assert data.test_dataloader().num_samples.tolist() == [7] * 5


@pytest.mark.parametrize("bad", [{"samples": (3, 0)}, {"samples": ()}, {"test_samples": 0}])
def test_every_client_has_samples(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Expected `samples` and `test_samples` to be at least 1"):
        ShiftedLines(**bad)


@pytest.mark.parametrize("bad", [-0.1, float("nan")])
def test_the_variance_is_not_negative(bad: float) -> None:
    with pytest.raises(ValueError, match=f"Expected `noise_variance` to be .*noise_variance={bad}"):
        ShiftedLines(noise_variance=bad)
