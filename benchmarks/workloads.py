"""The workloads of the table: a module and synthetic data of the right shapes.

Samples are noise with labels of a fixed random rule, which a network can learn. Clients, samples
and rounds are few enough for seconds a cell; the networks and the batch sizes are the real ones.
One workload, which isn't among the default ones, has real images.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from benchmarks.fashion_mnist import Split, load_clients
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.models import MLP, LeNet
from lightning_pfl.models.base import PersonalizedModule

WORDS = 2000


@dataclass(frozen=True)
class Workload:
    """A module and the data of its clients.

    Attributes:
        about: What it is, for the table.
        make: Makes the module: ``head(backbone(inputs))`` with cross-entropy.
        shape: Shape of a sample; one axis with ``words``.
        clients: Number of clients.
        samples: Training samples per client; the median for unequal clients.
        batch_size: Samples per minibatch.
        cohort: Clients per round.
        test_samples: Test samples per client; 0 for a quarter of its training samples.
        head_epochs: Passes of FedRep's head phase.
        sigma: Of the logarithm of the clients' sizes; 0 for equal sizes.
        words: Whether samples are sequences of words instead of numbers.
        read: Reads the training and the test split from files, for other data than noise.
        dtype: Of the parameters and of samples that are numbers.
        methods: The methods that run on it by default; empty for all.
    """

    about: str
    make: Callable[[], L.LightningModule]
    shape: tuple[int, ...]
    clients: int = 20
    samples: int = 300
    batch_size: int = 10
    cohort: int = 10
    test_samples: int = 50
    head_epochs: int = 10
    sigma: float = 0.0
    words: bool = False
    read: Callable[[], tuple[Split, Split]] | None = None
    dtype: torch.dtype = torch.float32
    methods: tuple[str, ...] = ()

    def module(self) -> L.LightningModule:
        """Make the module."""
        return self.make().to(self.dtype)

    def sizes(self) -> list[int]:
        """Return the training samples of each client."""
        generator = torch.Generator().manual_seed(1)
        spread = torch.randn(self.clients, generator=generator) * self.sigma
        sizes = [max(self.batch_size, round(self.samples * math.exp(float(s)))) for s in spread]
        # BatchNorm can't train on a last minibatch of one sample.
        return [size + (size % self.batch_size == 1) for size in sizes]

    def data(self) -> tuple[FederatedTensorDataset, FederatedTensorDataset]:
        """Return the training and the test split."""
        if self.read is not None:
            train, test = self.read()
            return (
                _pooled(train, self.batch_size, True, self.dtype),
                _pooled(test, self.test_samples, False, self.dtype),
            )
        generator = torch.Generator().manual_seed(0)
        rule = torch.randn(math.prod(self.shape), 10, generator=generator)
        sizes = self.sizes()
        tests = [self.test_samples or size // 4 for size in sizes]
        return (
            self._split(sizes, rule, generator, self.batch_size, shuffle=True),
            self._split(tests, rule, generator, max(tests), shuffle=False),
        )

    def _split(
        self,
        sizes: list[int],
        rule: Tensor,
        generator: torch.Generator,
        batch_size: int,
        shuffle: bool,
    ) -> FederatedTensorDataset:
        total = sum(sizes)
        if self.words:
            inputs = torch.randint(WORDS, (total, *self.shape), generator=generator)
            labels = ((inputs.float() / WORDS - 0.5) @ rule).argmax(1)
        else:
            inputs = torch.randn(total, *self.shape, generator=generator)
            labels = (inputs.flatten(1) @ rule).argmax(1)
            inputs = inputs.to(self.dtype)
        positions = list(torch.arange(total).split(sizes))
        return FederatedTensorDataset(
            (inputs, labels), positions, batch_size=batch_size, shuffle=shuffle
        )


def _pooled(
    split: Split, batch_size: int, shuffle: bool, dtype: torch.dtype
) -> FederatedTensorDataset:
    """Put all clients' samples in one pool; client k has a contiguous part."""
    clients, samples = split.labels.shape
    positions = torch.arange(clients * samples).view(clients, samples)
    fields = split.images.flatten(0, 1).to(dtype), split.labels.flatten()
    return FederatedTensorDataset(fields, list(positions), batch_size=batch_size, shuffle=shuffle)


# --- networks that the package doesn't have -------------------------------------------------------


class LastState(nn.Module):
    """An embedding and an LSTM; returns the state after the last word, ``(batch, hidden)``."""

    def __init__(self, dimensions: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, dimensions)
        self.lstm = nn.LSTM(dimensions, hidden, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        """Read sequences ``(batch, length)``."""
        return self.lstm(self.embedding(words))[0][:, -1]  # type: ignore[no-any-return]


class MeanOfTokens(nn.Module):
    """A transformer of two layers; returns the mean over the tokens, ``(batch, width)``."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, words: Tensor) -> Tensor:
        """Read sequences ``(batch, length)``."""
        return self.encoder(self.embedding(words)).mean(1)  # type: ignore[no-any-return]


class Residual(nn.Module):
    """ResNet's basic block of two 3 x 3 convolutions with BatchNorm."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            *(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)),
            nn.ReLU(),
            *(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)),
        )
        same = stride == 1 and before == after
        self.skip: nn.Module = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        """Add the block's result to the images."""
        return torch.relu(self.block(images) + self.skip(images))


def resnet18() -> PersonalizedModule:
    """Make ResNet-18 for images of 32 x 32 pixels: 11.2 million parameters."""
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [
        Residual(before, after, 2 if after > before else 1) for before, after in pairwise(widths)
    ]
    stem = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()
    backbone = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return PersonalizedModule(backbone, nn.Linear(512, 10))


def wide_cnn() -> PersonalizedModule:
    """Make a network of three convolutions, 32-64-128, and two wide layers: 1.6 million."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    backbone = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 720), nn.ReLU())
    return PersonalizedModule(backbone, nn.Linear(720, 10))


class OwnModule(L.LightningModule):
    """A network in a LightningModule of the user's, whose step the package has to read."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.backbone(images))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the accuracy."""
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.5)


def own_lenet() -> OwnModule:
    """Make LeNet in such a module."""
    lenet = LeNet()
    return OwnModule(lenet.backbone, lenet.head)


SIX = ("FedAvg", "FedRep", "Ditto", "FedMAP", "PFedMe", "SCAFFOLD")
THREE = SIX[:3]
IMAGE = (1, 28, 28)
LARGE = (3, 32, 32)
FROM_FILES = "w1-fashion"
"""The workload that reads files, which not every machine has."""
WORKLOADS: dict[str, Workload] = {
    "w1": Workload("LeNet, batch 10", LeNet, IMAGE),
    "w1-ragged": Workload(
        "the same, of log-normal sizes, sigma 0.8", LeNet, IMAGE, sigma=0.8, methods=THREE
    ),
    "w1-own": Workload(
        "LeNet in a LightningModule of the user's", own_lenet, IMAGE, methods=THREE
    ),
    "w2": Workload(
        "MLP 784-200-200-10, batch 50", lambda: MLP([784, 200, 200, 10]), IMAGE, samples=600,
        batch_size=50,
    ),
    "lstm": Workload(
        "LSTM, batch 10 of 32 words",
        lambda: PersonalizedModule(LastState(), nn.Linear(128, 10)), (32,), samples=100,
        words=True, head_epochs=3, methods=SIX,
    ),
    "transformer": Workload(
        "transformer of two layers, batch 10 of 32 words",
        lambda: PersonalizedModule(MeanOfTokens(), nn.Linear(64, 10)), (32,), samples=100,
        words=True, head_epochs=3, methods=SIX,
    ),
    "w3": Workload(
        "ResNet-18 with BatchNorm, batch 16", resnet18, LARGE, clients=4, samples=48,
        batch_size=16, cohort=2, test_samples=16, head_epochs=2, methods=("FedAvg", "FedRep"),
    ),
    "w4": Workload(
        "CNN 32-64-128 of 1.6 million, batch 10", wide_cnn, LARGE, clients=100, samples=50,
        cohort=20, test_samples=5, head_epochs=2, methods=THREE,
    ),
    "logistic": Workload(
        "logistic regression, 1,000 clients", lambda: MLP([60, 10]), (60,), clients=1000,
        samples=50, cohort=100, test_samples=10, methods=THREE,
    ),
    "tabular": Workload(
        "tabular MLP 60-32-10, 5,000 clients", lambda: MLP([60, 32, 10]), (60,), clients=5000,
        samples=50, cohort=100, test_samples=5, methods=THREE,
    ),
    FROM_FILES: Workload(
        "LeNet, Fashion-MNIST, 100 clients of 2 classes", LeNet, IMAGE, clients=100, samples=600,
        test_samples=100, read=load_clients, methods=THREE,
    ),
}  # fmt: skip


# --- small networks in modules of users -----------------------------------------------------------


def hidden(norm: bool) -> nn.Module:
    """Make two hidden layers of 64 units, with or without BatchNorm."""
    layers: list[nn.Module] = []
    for before in (20, 64):
        layers += [nn.Linear(before, 64), *([nn.BatchNorm1d(64)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers)


def convolutions() -> nn.Module:
    """Make two convolutions of 8 and 16 channels for 16 x 16 pixels, and a hidden layer."""
    layers: list[nn.Module] = []
    for before, after in ((1, 8), (8, 16)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 32), nn.ReLU())


NETWORKS: dict[str, tuple[str, Callable[[], nn.Module], int, tuple[int, ...], bool]] = {
    "logistic": ("logistic regression, 20 inputs", nn.Identity, 20, (20,), False),
    "mlp": ("MLP 20-64-64-10", lambda: hidden(False), 64, (20,), False),
    "norm": ("the same with two BatchNorm layers", lambda: hidden(True), 64, (20,), False),
    "cnn": ("CNN of 8 and 16 channels, 16 x 16", convolutions, 32, (1, 16, 16), False),
    "lstm": ("LSTM of 48 units, 20 words", lambda: LastState(32, 48), 48, (20,), True),
    "transformer": (
        "transformer of two layers, 20 words", lambda: MeanOfTokens(32), 32, (20,), True
    ),
}  # fmt: skip
"""By name: what it is, the layers below the head, their results, a sample, whether it is words."""


def of_users(name: str, sigma: float) -> Workload:
    """Return a workload of a network in a module of a user's, 10 of 30 clients a round.

    Args:
        name: A key of :data:`NETWORKS`.
        sigma: Of the logarithm of the clients' sizes, training and test samples.
    """
    about, backbone, features, shape, words = NETWORKS[name]
    return Workload(
        about,
        lambda: OwnModule(backbone(), nn.Linear(features, 10)),
        shape,
        clients=30,
        samples=40,
        test_samples=0,
        head_epochs=3,
        sigma=sigma,
        words=words,
        methods=THREE,
    )
