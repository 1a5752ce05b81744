"""Tiny files of the true layout of each data set that recipes read, by the source's name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision

from tests.data.sources.image_layout import write_domains
from tests.data.sources.leaf_layout import write_femnist, write_sent140


def _cifar(root: Path, name: str, label: str, classes: int, train: int, test: int) -> None:
    """What torchvision reads: batches of noise whose brightness tells the class."""
    reader: Any = getattr(torchvision.datasets, name)
    rng = np.random.default_rng(0)
    folder = root / reader.base_folder
    folder.mkdir(parents=True)
    for entries, per_class in ((reader.train_list, train), (reader.test_list, test)):
        labels = rng.permutation(np.repeat(np.arange(classes), per_class))
        noise = rng.integers(0, 50, (len(labels), 3 * 32 * 32))
        pixels = (noise + (200 * labels // classes)[:, None]).astype(np.uint8)
        for (file, _), rows in zip(
            entries, np.array_split(np.arange(len(labels)), len(entries)), strict=True
        ):
            content = {"data": pixels[rows], label: labels[rows].tolist()}
            (folder / file).write_bytes(pickle.dumps(content))
    meta = {reader.meta["key"]: [str(k) for k in range(classes)]}
    (folder / reader.meta["filename"]).write_bytes(pickle.dumps(meta))


def cifar10(folder: Path, shards: int) -> None:
    """One training image for each shard of a class."""
    _cifar(folder, "CIFAR10", "labels", classes=10, train=shards, test=max(shards // 5, 1))


def cifar100(folder: Path, shards: int) -> None:
    """One training image for each shard of a class."""
    _cifar(folder, "CIFAR100", "fine_labels", classes=100, train=shards, test=max(shards // 5, 1))


def femnist(folder: Path, shards: int) -> None:
    """Ten letters by six writers: two images of a letter for each of 45 clients."""
    write_femnist(folder, files=2, writers=3, characters="abcdefghij", repeats=15)


def sent140(folder: Path, shards: int) -> None:
    """Twenty authors."""
    write_sent140(folder, users=20, train=8, test=3, dimensions=300)


def image_domains(folder: Path, shards: int) -> None:
    """Three domains of ten images."""
    write_domains(folder)


def without_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torchvision read files of CIFAR that aren't the true ones."""
    for reader in (torchvision.datasets.CIFAR10, torchvision.datasets.CIFAR100):
        for entries in ("train_list", "test_list"):
            names = [[name, None] for name, _ in getattr(reader, entries)]
            monkeypatch.setattr(reader, entries, names)
        monkeypatch.setattr(reader, "meta", {**reader.meta, "md5": None})


#: Called with an empty folder, and the number of shards of a class for sources that are split so.
WRITERS = {
    "CIFAR10": cifar10,
    "CIFAR100": cifar100,
    "FEMNIST": femnist,
    "Sent140": sent140,
    "ImageDomains": image_domains,
}
