"""The networks and the clients of the benchmarks."""

import pytest
import torch

from benchmarks.workloads import NETWORKS, WORKLOADS, Workload, of_users
from lightning_pfl.models import LeNet

ALL = WORKLOADS | {f"{name} of users": of_users(name, 1.0) for name in NETWORKS}


@pytest.mark.parametrize("workload", ALL.values(), ids=ALL)
def test_networks_take_the_samples_of_their_clients(workload: Workload) -> None:
    """Two samples, as BatchNorm needs in training, have a logit for each of ten classes."""
    words = torch.randint(10, (2, *workload.shape))
    samples = words if workload.words else words.to(workload.dtype)
    assert workload.module()(samples).shape == (2, 10)


@pytest.mark.parametrize("batch_size", [4, 10])
def test_no_minibatch_has_one_sample(batch_size: int) -> None:
    workload = Workload("", LeNet, (2,), samples=21, batch_size=batch_size, sigma=1.0)
    sizes = workload.sizes()
    assert len(set(sizes)) > 5
    assert all(size % batch_size != 1 for size in sizes)
