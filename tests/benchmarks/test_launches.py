"""How many operators a step launches on a device, counted on the pretended one.

On a GPU, launching takes the time of small steps. An operator that is added to a step shows here:
the expected numbers are sums over the layers of the network, the loss, the optimizer and the
method's arithmetic. `docs/profiles.md` has them as a table.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch import nn

from benchmarks.cells import make_method
from benchmarks.workloads import WORKLOADS
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.contract.records import Round
from lightning_pfl.engine.cuda_graphs import CAPTURES
from lightning_pfl.testing.fitting import fit
from tests.engine.pretended_device import (
    NAME,
    PretendedCapture,
    PretendedDevice,
    pretended_accelerator,
)

FORWARD: dict[type[nn.Module], int] = {
    nn.Conv2d: 4,  # the convolution, its bias, and copies to the layout of a group for each client
    nn.Linear: 1,  # a batched product with the bias
    nn.ReLU: 1,
    nn.MaxPool2d: 1,
}
BACKWARD: dict[type[nn.Module], int] = {
    nn.Conv2d: 3,  # its gradients, the sum for the bias, and a copy
    nn.Linear: 3,  # the gradients of samples, weights and bias
    nn.ReLU: 1,
    nn.MaxPool2d: 1,
}
LOSS = 6
"""Two operators of cross-entropy, two of its gradient, the clients' means, and their sum."""
ACCURACY = 4
OPTIMIZER = 2
"""A fused kernel for the parameters with weight decay and one for those without."""
GATHER = 2
"""Of images and labels."""
COPIES = 2
"""Of images and labels to a graph."""
LOGS = 1
"""A copy of what a graph logs, which is one tensor."""


def layers(module: nn.Module, costs: dict[type[nn.Module], int]) -> int:
    """Sum over a module's layers."""
    return sum(costs.get(type(part), 0) for part in module.modules())


def expected(module: L.LightningModule, method: str) -> int:
    """The launches for a minibatch that each client trains on."""
    forward = layers(module, FORWARD)
    # The first layer needs no gradient of the samples.
    gradient = forward + layers(module, BACKWARD) + LOSS + ACCURACY - 1
    leaves = len(list(module.parameters()))
    trained = GATHER + gradient + OPTIMIZER
    return {
        "FedAvg": trained,
        # A second model, and the difference and the product of the proximal term. Replays leave out
        # what nobody reads: the accuracy of the second.
        "Ditto": trained + gradient - ACCURACY + OPTIMIZER + 2 * leaves,
        # The variates' difference, which is added.
        "SCAFFOLD": trained + 2 * leaves + 1,
        # Five gradients, each with a proximal term and a step; the step of the local model.
        "PFedMe": trained + 4 * (gradient - ACCURACY) + 17 * leaves,
        # The prior's gradient; before it, the mean loss of each client for the prior's weight.
        "FedMAP": trained + 2 * leaves + GATHER + forward + 4 + 7,
    }[method]


class Launches(FederatedCallback):
    """Takes note of the launches until each round begins."""

    def __init__(self, device: PretendedDevice) -> None:
        self.device, self.seen = device, list[Counter[str]]()

    def on_round_start(self, trainer: L.Trainer, module: L.LightningModule, round: Round) -> None:
        """Take note."""
        self.seen.append(self.device.launches.copy())


def launches(name: str, method: str, steps: int, graphs: bool) -> Counter[str]:
    """Count the launches of a round in which two clients take some steps each."""
    accelerator = pretended_accelerator()
    small = replace(
        WORKLOADS[name], clients=2, samples=2 * steps, batch_size=2, cohort=2, test_samples=1,
        head_epochs=2,
    )  # fmt: skip
    train, _ = small.data()
    with PretendedDevice() as device, patch.dict(CAPTURES, {NAME: PretendedCapture}):
        counter = Launches(device)
        torch.manual_seed(0)
        fit(
            make_method(method, small),
            train,
            small.module(),
            rounds=4,
            accelerator=accelerator,
            inference_mode=False,
            options={"cuda_graphs": graphs},
            callbacks=[counter],
        )
    return counter.seen[3] - counter.seen[2]


def of_a_step(name: str, method: str, graphs: bool) -> Counter[str]:
    """Count the launches for one more minibatch of each client."""
    return launches(name, method, 6, graphs) - launches(name, method, 5, graphs)


def cells(*all_of: str) -> Callable[..., Any]:
    """Mark all cells as slow but one."""
    found = [
        pytest.param(name, method, marks=() if (name, method) == ("w2", "FedAvg") else slow)
        for name in ("w1", "w2", "w4")
        for method in all_of
    ]
    return pytest.mark.parametrize(("name", "method"), found)


slow = pytest.mark.slow


@cells("FedAvg", "Ditto", "SCAFFOLD", "PFedMe", "FedMAP")
def test_a_replayed_step_launches_its_layers_and_no_more(name: str, method: str) -> None:
    found = of_a_step(name, method, graphs=False)
    assert found.total() <= expected(WORKLOADS[name].module(), method), found


@slow
@pytest.mark.parametrize("name", ["w1", "w2", "w4"])
def test_steps_of_a_head_launch_no_layer_of_the_backbone(name: str) -> None:
    """FedRep trains a head for two epochs on cached features, and then the body for one."""
    found = of_a_step(name, "FedRep", graphs=False)
    module = WORKLOADS[name].module()
    head = layers(module.head, FORWARD) + layers(module.head, BACKWARD) - 1  # type: ignore[arg-type]
    step = GATHER + LOSS + ACCURACY + OPTIMIZER
    assert found.total() <= 2 * (head + step) + expected(module, "FedAvg"), found


@cells("FedAvg", "FedRep", "Ditto", "SCAFFOLD", "PFedMe", "FedMAP")
def test_a_graph_is_one_launch(name: str, method: str) -> None:
    """Besides it minibatches are gathered and copied to the graph, and logs out of it."""
    found = of_a_step(name, method, graphs=True)
    phases = {"FedRep": 3, "FedMAP": 2}.get(method, 1)
    assert found["graph"] == phases
    # The features, beside the samples that a head's step would otherwise be given.
    more = 2 if method == "FedRep" else 0
    assert found.total() <= phases * (GATHER + COPIES + 1 + LOGS) + more, found
