"""PFNM on finished networks: copies of one are recovered, others are kept side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_pfl.merging import matched
from lightning_pfl.models import MLP

INPUTS, CLASSES = 4, 3


def network(units: int, seed: int) -> Any:
    torch.manual_seed(seed)
    return MLP([INPUTS, units, CLASSES], num_classes=CLASSES).double()


def permuted(net: Any, seed: int) -> Any:
    """The same network with its units in another order."""
    weight, bias = net.backbone[1].weight, net.backbone[1].bias
    order = torch.randperm(len(bias), generator=torch.Generator().manual_seed(seed))
    other = network(len(bias), 0)
    other.load_state_dict(
        {
            "backbone.1.weight": weight[order],
            "backbone.1.bias": bias[order],
            "head.weight": net.head.weight[:, order],
            "head.bias": net.head.bias,
        }
    )
    return other


def draw(samples: int) -> Tensor:
    return torch.randn(samples, INPUTS, generator=torch.Generator().manual_seed(1)).double()


def test_copies_in_other_orders_are_one_network() -> None:
    """Without a prior; the plain average of the parameters computes something else."""
    net, x = network(5, 3), draw(20)
    copies = [permuted(net, seed) for seed in range(3)]
    found: Any = matched(copies, prior_variance=1e9, variance=0.01)
    assert found.backbone[1].weight.shape == (5, INPUTS)
    torch.testing.assert_close(found(x), net(x), rtol=1e-6, atol=1e-6)
    plain = network(5, 0)
    states = [copy.state_dict() for copy in copies]
    plain.load_state_dict({n: torch.stack([s[n] for s in states]).mean(0) for n in states[0]})
    assert float((plain(x) - net(x)).detach().abs().max()) > 0.05


def test_a_matched_average_is_more_accurate_than_a_plain_one() -> None:
    torch.manual_seed(0)
    x = draw(200)
    y = x[:, :CLASSES].argmax(1)
    net = network(8, 1)
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    def accuracy(of: Any) -> float:
        return float((of(x).argmax(1) == y).double().mean())

    copies = [permuted(net, seed) for seed in range(4)]
    states = [copy.state_dict() for copy in copies]
    plain = network(8, 0)
    plain.load_state_dict({n: torch.stack([s[n] for s in states]).mean(0) for n in states[0]})
    merged = matched(copies, prior_variance=1e9, variance=0.01)
    assert accuracy(merged) == accuracy(net) > 0.9
    assert accuracy(plain) < accuracy(merged) - 0.1


def test_one_network_is_shrunk_towards_the_prior() -> None:
    """A number v becomes (v / 0.5 + mu / 2) / (1 / 0.5 + 1 / 2); mu is 0, for biases 0.3."""
    net = network(3, 0)
    found = matched([net], variance=0.5, prior_variance=2.0, prior_bias=0.3).state_dict()
    order = [  # the units are numbered by themselves
        int((found["head.weight"] - net.head.weight[:, [unit]] * 0.8).abs().sum(0).argmin())
        for unit in range(3)
    ]
    assert sorted(order) == [0, 1, 2]
    expected = {
        "backbone.1.weight": 0.8 * net.backbone[1].weight,
        "backbone.1.bias": 0.8 * net.backbone[1].bias + 0.2 * 0.3,
    }
    for name, leaf in expected.items():
        torch.testing.assert_close(found[name][order], leaf.detach())
    torch.testing.assert_close(found["head.bias"], net.head.bias.detach())


def test_networks_without_a_unit_in_common_stand_side_by_side() -> None:
    """Widths may differ. A unit that only one network has is halved by the prior of its variance,
    and the merged network is the sum of halves, which NumPy computes here."""
    nets = [network(2, 0), network(3, 1)]
    found: Any = matched(nets, concentration=1e9, prior_bias=0.0)
    assert (found.backbone[1].out_features, found.head.in_features) == (5, 5)
    x = draw(6).numpy()
    total: Any = np.mean([net.head.bias.detach().numpy() for net in nets], 0)
    for net in nets:
        state = {n: leaf.numpy() for n, leaf in net.state_dict().items()}
        hidden = x @ (state["backbone.1.weight"] / 2).T + state["backbone.1.bias"] / 2
        total = total + np.maximum(hidden, 0) @ (state["head.weight"] / 2).T
    np.testing.assert_allclose(found(torch.from_numpy(x)).detach(), total, rtol=1e-10)


def test_units_may_be_channels() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)).double()
    x = torch.randn(4, 1, 3, 3).double()
    found = matched([net, net], prior_variance=1e9, variance=0.01)
    torch.testing.assert_close(found(x), net(x), rtol=1e-6, atol=1e-6)


def test_the_networks_stay_as_they_are() -> None:
    nets = [network(2, 0), network(2, 1)]
    before = [{n: leaf.clone() for n, leaf in net.state_dict().items()} for net in nets]
    merged = matched(nets)
    assert not merged.training
    for net, state in zip(nets, before, strict=True):
        assert net.training
        assert all(torch.equal(leaf, state[n]) for n, leaf in net.state_dict().items())


@pytest.mark.parametrize(
    ("modules", "match"),
    [
        ([], "at least one network, but got"),
        ([MLP([4, 3, 2, 2], num_classes=2)], "but network 0 has 2 hidden layers"),
        (
            [nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))],
            "network 0 has 0.weight, 0.bias, 1.weight",
        ),
        ([network(2, 0), MLP([5, 2, 3], num_classes=3)], "alike but for the width .* network 1"),
    ],
)
def test_what_cannot_be_merged_is_refused(modules: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        matched(modules)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"variance": 0}, "`variance` to be a finite number > 0, but got variance=0"),
        ({"prior_variance": -1}, "`prior_variance` to be a finite number > 0, but got"),
        ({"concentration": 0}, "`concentration` to be a finite number > 0, but got"),
        ({"count_weight": -1}, "`count_weight` to be a finite number >= 0, but got"),
        ({"sweeps": 0}, "`sweeps` to be a whole number >= 1, but got sweeps=0"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        matched([network(2, 0)], **settings)
