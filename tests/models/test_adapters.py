"""Adapters: what they compute, and that they alone are trained and sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pfl.methods import Ditto
from lightning_pfl.models import Adapter, LowRank
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing import fit
from lightning_pfl.testing.conformance import small_clients


def test_an_adapter_adds_a_one_by_one_convolution() -> None:
    adapter, x = Adapter(3, std=1.0, dropout=0.0).double(), torch.randn(2, 3, 4, 5).double()
    kernel = adapter.map.weight[:, :, None, None]
    torch.testing.assert_close(adapter(x), x + F.conv2d(x, kernel, adapter.map.bias))
    flat = torch.randn(2, 3).double()
    torch.testing.assert_close(adapter(flat), flat + flat @ adapter.map.weight.T)


def test_an_adapter_begins_as_almost_nothing_and_drops_in_training() -> None:
    adapter, x = Adapter(200), torch.ones(50, 200)
    assert 0.9e-4 < float(adapter.map.weight.detach().std()) < 1.1e-4
    assert float((adapter.eval()(x) - x).detach().abs().max()) < 0.01
    dropped = adapter.train().dropout(x)
    assert float((dropped == 0).double().mean()) == pytest.approx(0.3, abs=0.03)


def test_a_low_rank_layer_begins_as_the_layer_and_is_its_sum_with_a_product() -> None:
    layer = nn.Linear(5, 4).double()
    changed, x = LowRank(layer, 2, scale=0.5), torch.randn(3, 5).double()
    assert torch.equal(changed(x), layer(x))
    nn.init.normal_(changed.up.weight)
    whole = layer.weight + 0.5 * changed.up.weight @ changed.down.weight
    torch.testing.assert_close(changed(x), x @ whole.T + layer.bias)


def test_ditto_trains_and_sends_the_adapters_alone() -> None:
    """PerAda without distillation: the penalty lambda |v - w|^2 is Ditto's prox_weight 2 lambda."""
    frozen: Any = nn.Conv2d(1, 2, 3).requires_grad_(False)
    backbone = nn.Sequential(frozen, Adapter(2, dropout=0.0), nn.Tanh(), nn.Flatten())
    module = PersonalizedModule(backbone, LowRank(nn.Linear(18, 3), 1), lr=0.05).double()
    before = {name: leaf.clone() for name, leaf in module.state_dict().items()}
    run = fit(Ditto(prox_weight=1.0), small_clients(), module, 2)
    sent = (2 * 2 + 2) + (18 + 3)
    assert run.recorder.rounds[0].bytes_up == 8 * sent
    after = run.strategy.client_state_dict(3)
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {"backbone.0.weight", "backbone.0.bias", "head.layer.weight", "head.layer.bias"}


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`dropout` to be in \[0, 1\), but got dropout=1.0"):
        Adapter(3, dropout=1.0)
    for rank in (0, 4):
        with pytest.raises(ValueError, match=rf"`rank` to be in 1\.\.3, .* but got rank={rank}"):
            LowRank(nn.Linear(5, 3), rank)
