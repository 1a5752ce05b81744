"""Orders of samples are drawn on the device, all at once."""

from collections import Counter

import pytest
import torch

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.orders import round_key
from lightning_pfl.engine.steps import Budget, Limits
from lightning_pfl.engine.vectorized.resident import ResidentBatches
from tests.engine.pretended_device import NAME, PretendedDevice, pretended_accelerator
from tests.orders_by_hand import order_by_hand

SIZES = (5, 3, 8, 8, 2, 7)


def pool(device: str) -> FederatedTensorDataset:
    """Clients whose samples lie anywhere in the pool."""
    total = sum(SIZES)
    rows = torch.randperm(total, generator=torch.Generator().manual_seed(0)).split(SIZES)
    fields = (torch.arange(total).to(device),)
    return FederatedTensorDataset(
        fields, [row.to(device) for row in rows], batch_size=3, shuffle=True
    )


def batches(data: FederatedTensorDataset, clients: int, epochs: int) -> ResidentBatches:
    """The minibatches of the first clients."""
    key = round_key(7, "local", 1)
    return ResidentBatches(data, range(clients), Budget(epochs, None), Limits(), key, pad=True)


@pytest.mark.parametrize("device", ["cpu", NAME])
def test_an_epoch_is_a_permutation_by_its_own_key_on_any_device(device: str) -> None:
    """The order of a client alone, from its positions in the pool."""
    pretended_accelerator()
    with PretendedDevice():
        positions = batches(pool(device), len(SIZES), 2).positions.cpu()
    rows = torch.randperm(sum(SIZES), generator=torch.Generator().manual_seed(0)).split(SIZES)
    for client, (samples, mine) in enumerate(zip(SIZES, rows, strict=True)):
        minibatches = -(-samples // 3)
        for epoch in range(2):
            here = slice(epoch * minibatches, (epoch + 1) * minibatches)
            found = positions[client, here].flatten()[:samples]
            assert torch.equal(found, mine[order_by_hand(samples, client, epoch, seed=7, round=1)])


def test_no_client_and_no_epoch_has_a_transfer_of_its_own() -> None:
    pretended_accelerator()

    with PretendedDevice() as device:
        data = pool(NAME)

        def launched(clients: int, epochs: int) -> Counter[str]:
            waits, before = device.waits.copy(), device.launches.copy()
            batches(data, clients, epochs)
            assert device.waits == waits
            return device.launches - before

        few = launched(2, 1)
        assert few.total() > 0
        assert launched(6, 1) == few
        assert launched(2, 4) == few
