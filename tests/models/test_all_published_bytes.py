"""Bytes that a client sends and receives with the papers' networks, by the methods' own trees."""

from __future__ import annotations

import pytest
import torch

from lightning_pfl import methods, models
from lightning_pfl.contract.known import Known
from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import expand, nbytes
from lightning_pfl.methods.base import Method

ONE = torch.ones(1, dtype=torch.int64)


def bytes_of(method: Method, network: str) -> tuple[int, int]:
    """Down and up for one client in one round; tensors of the meta device have sizes alone."""
    with torch.device("meta"):
        module = getattr(models, network)()
    parameter_split = ParameterSplit(module, method.resolve_personal(ParameterSplit(module)))
    method.bind(Known.of(parameter_split, 1, 0, ONE))
    model = parameter_split.model()
    info = ClientInfo(ONE - 1, ONE, ONE, ONE.double(), 0, 1, (0.1,))
    received = method.download(method.init_server(model), info)
    client_state = expand(method.init_client_state(model), 1)
    state = method.client_init(expand(received, 1), client_state, info)
    upload, _ = method.client_final(expand(received, 1), client_state, state, info)
    return nbytes(expand(received, 1)), nbytes(upload)


# By the definitions: floats of 4 bytes, of all layers or of what is below the head. FedBN's count
# leaves out the 18,688 factors and shifts of AlexNet's BatchNorm, and has no running statistics.
@pytest.mark.parametrize(
    ("method", "network", "floats"),
    [
        (methods.FedAvg(), "CIFAR10CNN", 307_842),
        (methods.FedRep(), "CIFAR10CNN", 307_842 - 650),
        (methods.FedRep(), "CIFAR100CNN", 1_075_044 - 12_900),
        (methods.FedRep(), "FEMNISTMLP", 550_346 - 650),
        (methods.FedPer(), "FEMNISTMLP", 550_346 - 650),
        (methods.LGFedAvg(), "CIFAR10CNN", 650),
        (methods.FedBN(), "AlexNetBN", 57_149_535 - 18_688),
        (methods.Ditto(), "CIFAR10CNN", 307_842),
        (methods.SCAFFOLD(), "CIFAR10CNN", 2 * 307_842),
    ],
    ids=lambda value: getattr(type(value), "__name__", None) if isinstance(value, Method) else None,
)
def test_bytes_are_four_per_shared_float(method: Method, network: str, floats: int) -> None:
    assert bytes_of(method, network) == (4 * floats, 4 * floats)


def test_the_published_numbers() -> None:
    """FedRep sends 1,228,768 bytes each way in the place of FedAvg's 1,231,368."""
    assert bytes_of(methods.FedAvg(), "CIFAR10CNN") == (1_231_368, 1_231_368)
    assert bytes_of(methods.FedRep(), "CIFAR10CNN") == (1_228_768, 1_228_768)
    bodies = {"CIFAR100CNN": 1_062_144, "FEMNISTMLP": 549_696}
    for network, floats in bodies.items():
        assert bytes_of(methods.FedRep(), network)[1] == 4 * floats
    assert bytes_of(methods.FedBN(), "AlexNetBN")[1] == 4 * 57_130_847
