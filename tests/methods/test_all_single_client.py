"""Nobody to share with: one client's network is that of SGD in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pfl import methods
from lightning_pfl.core.tree import Model
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.methods.base import Method
from lightning_pfl.testing import Fit, assert_trees_close, fit
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.references.fedrep import fedrep
from tests.methods.references.training import State, batches, load, train

ROUNDS = 4
Penalty = Callable[[Any], Tensor]


def alone() -> FederatedTensorDataset:
    """A client with eight pictures, in minibatches of three."""
    return small_clients().subset([3])


def sgd(rounds: range | list[int] = range(ROUNDS), penalty: Penalty | None = None) -> State:
    """Plain PyTorch: an epoch a round, with momentum that begins anew, and BatchNorm."""
    state: State = small_module().state_dict()
    for t in rounds:
        net = train(load(small_module(), state), batches(alone(), 0, t, 1), penalty)
        state = {name: leaf.detach().clone() for name, leaf in net.state_dict().items()}
    return state


def personal(run: Fit) -> Model:
    return {name: leaf[0] for name, leaf in run.models.items()}


def shared(run: Fit) -> Model:
    model: Model = run.server["model"]
    return model


def squares(net: Any) -> Tensor:
    """The squared norm of all parameters."""
    return torch.stack([p.square().sum() for p in net.parameters()]).sum()


#: What is plain SGD, and which of its models; methods that relate clients are in test_one_client.
PLAIN: dict[str, tuple[Callable[[], Method], Callable[[Fit], Model]]] = {
    "APFL": (lambda: methods.APFL(0.3, adaptive=True), shared),
    "APFL, all its own": (lambda: methods.APFL(1.0), personal),
    "Ditto": (methods.Ditto, shared),
    "FedAvg": (methods.FedAvg, shared),
    "FedBN": (methods.FedBN, personal),
    "FedPer": (methods.FedPer, personal),
    "FedPer, all personal": (lambda: methods.FedPer("all"), personal),
    "LGFedAvg": (methods.LGFedAvg, personal),
    "LocalOnly": (methods.LocalOnly, personal),
    "SCAFFOLD": (methods.SCAFFOLD, shared),
    "SCAFFOLD, option I": (lambda: methods.SCAFFOLD("I"), shared),
}


@pytest.mark.parametrize("name", PLAIN)
def test_one_client_is_plain_sgd(name: str, engine: str) -> None:
    make, model = PLAIN[name]
    run = fit(make(), alone(), small_module(), ROUNDS, engine)
    assert_trees_close(model(run), sgd())


class TestOneClient:
    def test_fedrep_is_its_schedule(self, engine: str) -> None:
        method = methods.FedRep(head_epochs=2, body_epochs=1)
        run = fit(method, alone(), small_module(), ROUNDS, engine)
        assert_trees_close(personal(run), fedrep(small_module(), alone(), ROUNDS, 2, 1)[0])

    @pytest.mark.parametrize("mixing_weight", [0.0, 3.0])
    def test_l2gd_is_its_rounds_with_local_steps(self, engine: str, mixing_weight: float) -> None:
        """Towards the mean, which is the model itself, there is no way to go."""
        method = methods.L2GD(mixing_weight, local_epochs=1)
        run = fit(method, alone(), small_module(), ROUNDS, engine)
        local = [t for t in range(ROUNDS) if not method.aggregates(t)]
        assert 0 < len(local) < ROUNDS
        assert_trees_close(personal(run), sgd(local))

    def test_fedmtl_has_the_norm_of_its_penalty_left(self, engine: str) -> None:
        """Nothing differs from the mean, and 0.1 times the squared norm is a weight decay."""
        run = fit(methods.FedMTL(0.1), alone(), small_module(), ROUNDS, engine)
        assert_trees_close(personal(run), sgd(penalty=lambda net: 0.1 * squares(net)))
