"""Workload W1's data in plain tensors: Fashion-MNIST, 100 clients with two classes each."""

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

#: Where Debian's package dataset-fashion-mnist puts the files.
DATA_DIR = Path("/usr/share/datasets/fashion-mnist")
#: Mean and standard deviation of the training pixels, scaled to [0, 1].
MEAN, STD = 0.2860, 0.3530
NUM_CLASSES = 10


@dataclass(frozen=True)
class Split:
    """All clients' samples of one split; those of client i are row i.

    Attributes:
        images: Normalised, ``(clients, samples, 1, 28, 28)``.
        labels: ``(clients, samples)``.
    """

    images: Tensor
    labels: Tensor


def read_idx(path: Path) -> Tensor:
    """Read a gzipped IDX file of bytes: images ``(n, 28, 28)`` or labels ``(n,)``, as uint8.

    Raises:
        ValueError: If the file has other contents than bytes, or another number of them.
    """
    raw = gzip.decompress(path.read_bytes())
    kind, ndim = raw[2], raw[3]
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(ndim)]
    start = 4 + 4 * ndim
    if raw[:2] != b"\0\0" or kind != 0x08 or len(raw) - start != int(np.prod(shape)):
        raise ValueError(
            f"Expected `path` to be an IDX file of bytes, but got path={str(path)!r} with header "
            f"{raw[:4]!r} and {len(raw)} bytes. Install the files again."
        )
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy())


def partition(
    labels: Tensor, client_classes: list[tuple[int, int]], generator: torch.Generator
) -> Tensor:
    """Deal the samples of each class to the clients that have it, in equal shares.

    Args:
        labels: ``(n,)``, as many of each class.
        client_classes: The classes of each client.
        generator: Shuffles the samples of a class.

    Returns:
        Sample positions, ``(clients, samples)``; no sample is dealt twice.
    """
    shares: dict[int, list[Tensor]] = {}
    for label in range(NUM_CLASSES):
        positions = (labels == label).nonzero().flatten()
        positions = positions[torch.randperm(len(positions), generator=generator)]
        ownership = sum(label in classes for classes in client_classes)
        shares[label] = list(positions.chunk(ownership))
    return torch.stack(
        [torch.cat([shares[label].pop() for label in classes]) for classes in client_classes]
    )


def load_clients(
    data_dir: Path = DATA_DIR, num_clients: int = 100, seed: int = 0
) -> tuple[Split, Split]:
    """Return the training and the test split: 600 and 100 samples for each of 100 clients.

    Client 10 q + a has the classes a and a + 1 + (q modulo 9), modulo 10, so each class has equally
    many holders for any multiple of 10 clients.

    Raises:
        FileNotFoundError: If the files aren't there.
    """
    if not data_dir.is_dir():
        raise FileNotFoundError(
            f"Expected the files of Fashion-MNIST in {str(data_dir)!r}, but there is no such "
            "folder. Install Debian's package dataset-fashion-mnist, or leave this workload out."
        )
    client_classes = [
        (i % NUM_CLASSES, (i % NUM_CLASSES + 1 + i // NUM_CLASSES % 9) % NUM_CLASSES)
        for i in range(num_clients)
    ]
    splits = []
    for prefix in ("train", "t10k"):
        generator = torch.Generator().manual_seed(seed)
        images = read_idx(data_dir / f"{prefix}-images-idx3-ubyte.gz")
        labels = read_idx(data_dir / f"{prefix}-labels-idx1-ubyte.gz").long()
        positions = partition(labels, client_classes, generator)
        pixels = (images[positions].float() / 255 - MEAN) / STD
        splits.append(Split(pixels.unsqueeze(2), labels[positions]))
    return splits[0], splits[1]
