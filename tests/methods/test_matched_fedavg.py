"""MatchedFedAvg: an average of networks that compute the same is that network."""

from __future__ import annotations

from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model
from lightning_pfl.methods import FedAvg, MatchedFedAvg
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing import assert_trees_close, assert_trees_equal, fit
from lightning_pfl.testing.conformance import SIZES, small_clients, small_module
from tests.methods.case import Bytes, Case, D
from tests.methods.networks import cohorts, plain_module
from tests.methods.quadratics import closed_form

CASE = Case(
    method=lambda: MatchedFedAvg(2),
    bytes={"defaults": Bytes(MatchedFedAvg, 4 * D, 4 * D)},
    twin=None,  # FedAvg, unless clients swap units: tested below.
    above_zero="sweeps",
    published={"weighting": "samples"},
    problem={"make_module": lambda dtype=torch.float64: plain_module().to(dtype)},  # a chain
)
UNITS = 3


def perceptron(*sizes: int, lr: float = 0.05, scale: float = 1.0) -> PersonalizedModule:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise((25, *sizes)):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
        settings: Any = {"lr": lr, "momentum": 0.0, "weight_decay": 0.0}
        head = nn.Linear(sizes[-1], 3)
        module = PersonalizedModule(nn.Sequential(*layers), head, **settings).double()
    for leaf in module.parameters():
        leaf.data *= scale
    return module


def unstable() -> PersonalizedModule:
    """Units that are nearly equal at first, and far apart after the long steps of a client."""
    return perceptron(UNITS, lr=5.0, scale=0.01)


def matched(method: MatchedFedAvg, module: Any, server: Model, models: list[Model]) -> Any:
    """The server's update with uploads of these models, of equal weight."""
    run = fit(method, small_clients().subset([2, 3]), module, 1)
    info = run.recorder.rounds[0].info
    info = type(info)(**{**vars(info), "weights": torch.ones(2).double() / 2})
    uploads = {"model": {n: torch.stack([m[n] for m in models]) for n in server}}
    return method.server_update({"model": server}, uploads, info)["model"]


def reordered(model: Model, layers: list[str], orders: list[Tensor]) -> Model:
    """The same network with the units of its hidden layers in other orders, layer by layer."""
    new = dict(model)
    for (layer, following), order in zip(pairwise(layers), orders, strict=True):
        for name in (f"{layer}.weight", f"{layer}.bias"):
            new[name] = new[name][order]
        new[f"{following}.weight"] = new[f"{following}.weight"][:, order]
    return new


@closed_form
@pytest.mark.parametrize("sizes", [(4,), (4, 5)])
def test_one_network_in_two_orders_has_itself_as_mean(sizes: tuple[int, ...]) -> None:
    module = perceptron(*sizes)
    server: Model = {n: leaf.clone() for n, leaf in module.state_dict().items()}
    layers = [n.removesuffix(".weight") for n in server if n.endswith(".weight")]
    other = reordered(server, layers, [torch.arange(n).roll(1) for n in sizes])
    found = matched(MatchedFedAvg(), module, server, [server, other])
    assert_trees_close(found, server, rtol=1e-12)
    plain = {n: (server[n] + other[n]) / 2 for n in server}
    assert max(float((plain[n] - server[n]).abs().max()) for n in server) > 0.1


def test_matches_the_reference(engine: str) -> None:
    """Every order is tried."""
    swaps = 0
    run = fit(MatchedFedAvg(), small_clients(), unstable(), 3, engine, participation=3)
    for number, cohort in enumerate(cohorts(3, 3)):
        server = {n: leaf.numpy() for n, leaf in run.recorder.servers[number]["model"].items()}
        uploads: Any = run.recorder.rounds[number].uploads
        total: dict[str, Any] = dict.fromkeys(server, 0.0)
        weights = np.array([SIZES[k] for k in cohort.tolist()], dtype=float)
        for row, weight in enumerate(weights / weights.sum()):
            y = {n: leaf[row].numpy() for n, leaf in uploads["model"].items()}

            def swapped(order: tuple[int, ...], y: Any = y) -> dict[str, Any]:
                o = list(order)
                return {
                    "backbone.1.weight": y["backbone.1.weight"][o],
                    "backbone.1.bias": y["backbone.1.bias"][o],
                    "head.weight": y["head.weight"][:, o],
                    "head.bias": y["head.bias"],
                }

            def distance(
                order: tuple[int, ...], server: Any = server, swapped: Any = swapped
            ) -> float:
                new = swapped(order)
                return float(sum(((new[n] - server[n]) ** 2).sum() for n in server))

            best = min(permutations(range(UNITS)), key=distance)
            swaps += best != tuple(range(UNITS))
            total = {n: total[n] + weight * leaf for n, leaf in swapped(best).items()}
        for name, leaf in total.items():
            found = run.recorder.servers[number + 1]["model"][name]
            np.testing.assert_allclose(found, leaf, rtol=1e-10, atol=1e-12)
    assert swaps


def test_several_layers_end_where_no_single_one_can_be_improved() -> None:
    sizes = (3, 4)
    module = perceptron(*sizes)
    server = {n: leaf.clone() for n, leaf in module.state_dict().items()}
    generator = torch.Generator().manual_seed(3)
    noisy = {n: torch.randn(leaf.shape, generator=generator).double() for n, leaf in server.items()}
    method = MatchedFedAvg()
    mean = matched(method, module, server, [server, noisy])
    other = {n: 2 * mean[n] - server[n] for n in server}  # the second network as it was matched
    layers = [n.removesuffix(".weight") for n in server if n.endswith(".weight")]

    def distance(model: Model) -> float:
        return sum(float((model[n] - server[n]).square().sum()) for n in server)

    reached = distance(other)
    assert reached < distance(noisy) - 1e-6
    for place, units in enumerate(sizes):
        for order in permutations(range(units)):
            orders = [torch.arange(n) for n in sizes]
            orders[place] = torch.tensor(order)
            assert distance(reordered(other, layers, orders)) > reached - 1e-9


def test_small_steps_make_it_fedavg(engine: str) -> None:
    """No client then swaps units."""
    run = fit(MatchedFedAvg(), small_clients(), small_module(), 2, engine, participation=3)
    expected = fit(FedAvg(), small_clients(), small_module(), 2, engine, participation=3)
    assert_trees_equal(run.server, expected.server)


def test_without_sweeps_it_is_fedavg() -> None:
    method, module = MatchedFedAvg(0), unstable()
    note = "sweeps=0 makes MatchedFedAvg FedAvg."
    assert method.notes(ParameterSplit(module)) == [note]
    run = fit(method, small_clients(), module, 2)
    expected = fit(FedAvg(), small_clients(), unstable(), 2)
    assert_trees_equal(run.server, expected.server)


def test_a_frozen_layer_keeps_its_order() -> None:
    """Its units are the same everywhere; those of the next layer are matched."""
    module: Any = perceptron(3, 4)
    module.backbone[1].requires_grad_(False)
    method = MatchedFedAvg()
    fit(method, small_clients(), module, 1)
    assert [layer.units for layer in method.layers] == [4]


def test_networks_without_units_to_match_are_refused() -> None:
    linear = PersonalizedModule(nn.Flatten(), nn.Linear(25, 3)).double()
    with pytest.raises(ValueError, match="a network with a hidden layer, but got Personalized"):
        fit(MatchedFedAvg(), small_clients(), linear, 1)
    frozen: Any = plain_module()
    frozen.head.requires_grad_(False)
    with pytest.raises(ValueError, match="a hidden layer that trains, with the layer behind it"):
        fit(MatchedFedAvg(), small_clients(), frozen, 1)
    tied: Any = perceptron(25, 25)
    tied.backbone[3].weight = tied.backbone[1].weight
    with pytest.raises(ValueError, match=r"but got tied ones: backbone\.3\.weight\. Use FedAvg"):
        fit(MatchedFedAvg(), small_clients(), tied, 1)


def test_a_wrong_number_of_sweeps_is_refused() -> None:
    with pytest.raises(ValueError, match="`sweeps` to be a whole number >= 0, but got sweeps=-1"):
        MatchedFedAvg(-1)
