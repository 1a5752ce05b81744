"""The baseline of workload W1: the same network, the right clients, a frozen body."""

import gzip
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.fashion_mnist import DATA_DIR, Split, load_clients, partition, read_idx
from benchmarks.r0 import R0, copy_of, lenet_body, load, mean_of, measure
from lightning_pfl.models import LeNet


def tiny_baseline(seed: int = 0) -> R0:
    """Twelve clients with 20 training and 10 test samples of noise."""
    generator = torch.Generator().manual_seed(1)

    def split(samples: int) -> Split:
        images = torch.randn(12, samples, 1, 28, 28, generator=generator)
        return Split(images, torch.randint(10, (12, samples), generator=generator))

    return R0(split(20), split(10), seed=seed)


def test_network_equals_the_packages() -> None:
    module, body, head = LeNet(), lenet_body(), nn.Linear(100, 10)
    body.load_state_dict(module.backbone.state_dict())
    head.load_state_dict(module.head.state_dict())
    images = torch.randn(2, 1, 28, 28)
    assert torch.equal(head(body(images)), module(images))


def test_cached_features_change_nothing_but_time() -> None:
    plain, cached = tiny_baseline(), tiny_baseline()
    assert plain.fedrep_round().accuracy == cached.fedrep_cached_round().accuracy
    for got, want in zip(cached.shared_body, plain.shared_body, strict=True):
        torch.testing.assert_close(got, want)
    for got_head, want_head in zip(cached.heads, plain.heads, strict=True):
        torch.testing.assert_close(got_head, want_head)


def test_fedrep_shares_no_head_and_keeps_those_of_absent_clients() -> None:
    baseline = tiny_baseline()
    initial = copy_of(baseline.head)
    shared = [value.clone() for value in baseline.shared_head]
    baseline.fedrep_round()
    changed = [not torch.equal(head[0], initial[0]) for head in baseline.heads]
    assert sum(changed) == 10
    assert all(torch.equal(a, b) for a, b in zip(baseline.shared_head, shared, strict=True))


def test_fedavg_of_one_step_is_the_mean_of_the_clients_steps() -> None:
    """One sample set per client of one batch: a round is w minus lr times the mean gradient."""
    baseline = tiny_baseline()
    baseline.train = Split(baseline.train.images[:10, :10], baseline.train.labels[:10, :10])
    module = nn.Sequential(baseline.body, baseline.head).double()
    baseline.train = Split(baseline.train.images.double(), baseline.train.labels)
    baseline.test = Split(baseline.test.images.double(), baseline.test.labels)
    baseline.shared_body = copy_of(baseline.body)
    baseline.shared_head = copy_of(baseline.head)
    output = module(baseline.train.images.flatten(0, 1))
    loss = nn.functional.cross_entropy(output, baseline.train.labels.flatten())
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    expected = [
        w - 0.01 * (g + (1e-4 * w if w.ndim > 1 else 0))
        for w, g in zip(copy_of(module), gradients, strict=True)
    ]
    baseline.fedavg_round()
    got = baseline.shared_body + baseline.shared_head
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("onednn", [True, False])
def test_measure_restores_the_settings(onednn: bool) -> None:
    before = torch.get_num_threads()
    baseline = tiny_baseline()
    times = measure("FedAvg", (baseline.train, baseline.test), 2, threads=1, onednn=onednn)
    assert len(times) == 2
    assert all(time.total == time.train + time.evaluate for time in times)
    assert torch.get_num_threads() == before


def test_load_and_mean_are_elementwise() -> None:
    layer = nn.Linear(2, 1)
    load(
        layer, mean_of([[torch.ones(1, 2), torch.zeros(1)], [torch.ones(1, 2) * 3, torch.ones(1)]])
    )
    assert copy_of(layer)[0].tolist() == [[2.0, 2.0]]
    assert copy_of(layer)[1].tolist() == [0.5]


def test_partition_deals_each_sample_once() -> None:
    labels = torch.arange(400) % 10
    classes = [(i % 10, (i + 1) % 10) for i in range(20)]
    positions = partition(labels, classes, torch.Generator().manual_seed(0))
    assert positions.shape == (20, 20)
    assert sorted(positions.flatten().tolist()) == list(range(400))
    assert [sorted(set(row.tolist())) for row in labels[positions]] == [sorted(c) for c in classes]


def test_read_idx(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    header = bytes([0, 0, 8, 2]) + (2).to_bytes(4, "big") + (3).to_bytes(4, "big")
    path.write_bytes(gzip.compress(header + bytes(range(6))))
    assert read_idx(path).tolist() == [[0, 1, 2], [3, 4, 5]]
    path.write_bytes(gzip.compress(header + bytes(5)))
    with pytest.raises(ValueError, match=r"Expected `path` to be an IDX file of bytes, but got"):
        read_idx(path)


@pytest.mark.slow
@pytest.mark.skipif(not DATA_DIR.exists(), reason="needs Debian's package dataset-fashion-mnist")
def test_clients_of_the_workload() -> None:
    train, test = load_clients()
    assert train.images.shape == (100, 600, 1, 28, 28)
    assert test.images.shape == (100, 100, 1, 28, 28)
    for seen, unseen in zip(train.labels, test.labels, strict=True):
        assert set(seen.tolist()) == set(unseen.tolist())
        assert torch.bincount(seen).max() == 300
    assert abs(float(train.images.mean())) < 1e-3
    assert float(train.images.std()) == pytest.approx(1, abs=1e-3)
