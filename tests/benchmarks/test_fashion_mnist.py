"""The images of a workload: each dealt once, to the right clients."""

import gzip
from pathlib import Path

import pytest
import torch

from benchmarks.fashion_mnist import DATA_DIR, load_clients, partition, read_idx


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
