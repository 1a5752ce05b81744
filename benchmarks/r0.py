"""R0: a careful plain-PyTorch loop over clients, the baseline of workload W1.

W1 is Fashion-MNIST on 100 clients with two classes each (600 training and 100 test samples), 10
clients a round, batches of 10, SGD with lr 0.01, momentum 0.5 and weight decay 1e-4 on weights,
LeNet, and an evaluation of all 100 clients after each round. R0 does what a good programmer does
without batching over clients: all data in memory as tensors, no DataLoader, one model object that
every client trains in turn, no `.item()` in the training loop. Three kinds of round:

- FedAvg: 1 local epoch of the whole network
- FedRep: 10 epochs of the head with the body frozen, then 1 epoch of the body
- FedRep with cached features: as FedRep, but the frozen body runs once over a client's data

    python -m benchmarks.r0 --rounds 3 --threads 1 2
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.fashion_mnist import Split, load_clients

BATCH_SIZE = 10
COHORT = 10
HEAD_EPOCHS = 10
Weights = list[Tensor]


def lenet_body() -> nn.Sequential:
    """Build LeNet up to its 100 features; ReLU after pooling is equal and cheaper."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU()),
        nn.Flatten(),
        *(nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 100), nn.ReLU()),
    )


@dataclass(frozen=True)
class RoundTime:
    """Wall-clock seconds of one round.

    Attributes:
        train: Local training and aggregation.
        evaluate: Evaluation of all clients.
        accuracy: Mean over clients after the round, to see that it learns.
    """

    train: float
    evaluate: float
    accuracy: float

    @property
    def total(self) -> float:
        """Seconds of the round."""
        return self.train + self.evaluate


class R0:
    """The baseline with its data, its one model and the state of server and clients.

    Args:
        train: Training data of all clients.
        test: Test data of all clients.
        seed: Of the initial model, the cohorts and the order of samples.
    """

    def __init__(self, train: Split, test: Split, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.train, self.test = train, test
        self.generator = torch.Generator().manual_seed(seed)
        self.body, self.head = lenet_body(), nn.Linear(100, 10)
        self.shared_body = copy_of(self.body)
        self.shared_head = copy_of(self.head)
        self.heads = [copy_of(self.head) for _ in range(len(train.labels))]

    def fedavg_round(self) -> RoundTime:
        """Run one round of FedAvg with one local epoch."""
        return self._timed(self._train_fedavg, personal_heads=False)

    def fedrep_round(self) -> RoundTime:
        """Run one round of FedRep; the frozen body runs in every batch of the head's epochs."""
        return self._timed(lambda: self._train_fedrep(cached=False), personal_heads=True)

    def fedrep_cached_round(self) -> RoundTime:
        """Run one round of FedRep; the frozen body runs once over each client's data."""
        return self._timed(lambda: self._train_fedrep(cached=True), personal_heads=True)

    def _timed(self, train: Callable[[], None], personal_heads: bool) -> RoundTime:
        start = time.perf_counter()
        train()
        middle = time.perf_counter()
        accuracy = self.evaluate(personal_heads)
        return RoundTime(middle - start, time.perf_counter() - middle, accuracy)

    def _train_fedavg(self) -> None:
        bodies, heads = [], []
        for client in self._cohort():
            load(self.body, self.shared_body)
            load(self.head, self.shared_head)
            optimizer = sgd(self.body, self.head)
            for rows in self._batches():
                output = self.head(self.body(self.train.images[client, rows]))
                step(optimizer, output, self.train.labels[client, rows])
            bodies.append(copy_of(self.body))
            heads.append(copy_of(self.head))
        # All clients have equally many samples, so the weighted mean is the mean.
        self.shared_body, self.shared_head = mean_of(bodies), mean_of(heads)

    def _train_fedrep(self, cached: bool) -> None:
        bodies = []
        for client in self._cohort():
            load(self.body, self.shared_body)
            load(self.head, self.heads[client])
            self._train_head(client, cached)
            self.heads[client] = copy_of(self.head)
            self._train_body(client)
            bodies.append(copy_of(self.body))
        self.shared_body = mean_of(bodies)

    def _train_head(self, client: int, cached: bool) -> None:
        images, labels = self.train.images[client], self.train.labels[client]
        with torch.no_grad():
            features = self.body(images) if cached else None
        optimizer = sgd(self.head)
        for _ in range(HEAD_EPOCHS):
            for rows in self._batches():
                if features is None:
                    with torch.no_grad():
                        inputs = self.body(images[rows])
                else:
                    inputs = features[rows]
                step(optimizer, self.head(inputs), labels[rows])

    def _train_body(self, client: int) -> None:
        optimizer = sgd(self.body)
        self.head.requires_grad_(False)
        for rows in self._batches():
            output = self.head(self.body(self.train.images[client, rows]))
            step(optimizer, output, self.train.labels[client, rows])
        self.head.requires_grad_(True)

    @torch.inference_mode()
    def evaluate(self, personal_heads: bool) -> float:
        """Return the mean over clients of the accuracy on each client's test data."""
        load(self.body, self.shared_body)
        load(self.head, self.shared_head)
        hits = []
        for client, labels in enumerate(self.test.labels):
            if personal_heads:
                load(self.head, self.heads[client])
            output = self.head(self.body(self.test.images[client]))
            hits.append((output.argmax(1) == labels).float().mean())
        return float(torch.stack(hits).mean())

    def _cohort(self) -> list[int]:
        order = torch.randperm(len(self.train.labels), generator=self.generator)
        return [int(client) for client in order[:COHORT]]

    def _batches(self) -> Iterator[Tensor]:
        order = torch.randperm(self.train.labels.shape[1], generator=self.generator)
        # torch.split: the stubs leave the method untyped.
        yield from torch.split(order, BATCH_SIZE)


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    """Make the workload's SGD, with weight decay for weights only."""
    named = [pair for module in modules for pair in module.named_parameters()]
    weights = [p for name, p in named if not name.endswith("bias")]
    biases = [p for name, p in named if name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 1e-4}, {"params": biases, "weight_decay": 0.0}]
    # The fused kernel is at least as fast as torch's other two on the CPU.
    return torch.optim.SGD(groups, lr=0.01, momentum=0.5, fused=True)


def step(optimizer: torch.optim.Optimizer, output: Tensor, labels: Tensor) -> None:
    """Take one step on the mean cross-entropy."""
    optimizer.zero_grad()
    F.cross_entropy(output, labels).backward()
    optimizer.step()


def copy_of(module: nn.Module) -> Weights:
    """Copy the parameters."""
    return [parameter.detach().clone() for parameter in module.parameters()]


@torch.no_grad()
def load(module: nn.Module, weights: Weights) -> None:
    """Write parameters into a module."""
    for parameter, value in zip(module.parameters(), weights, strict=True):
        parameter.copy_(value)


def mean_of(uploads: list[Weights]) -> Weights:
    """Average each parameter over the clients."""
    return [torch.stack(values).mean(0) for values in zip(*uploads, strict=True)]


KINDS: dict[str, Callable[[R0], RoundTime]] = {
    "FedAvg": R0.fedavg_round,
    "FedRep": R0.fedrep_round,
    "FedRep, cached features": R0.fedrep_cached_round,
}


def measure(
    kind: str, data: tuple[Split, Split], rounds: int, threads: int, onednn: bool = True
) -> list[RoundTime]:
    """Run some rounds of one kind after a warm-up evaluation, with a given number of threads.

    The settings of the process are as before when it returns.

    Args:
        kind: A key of `KINDS`.
        data: What `load_clients` returns.
        rounds: Number of rounds, at least 1.
        threads: Threads within an operation, at least 1.
        onednn: Whether torch may use oneDNN, its default. Small batches can be faster without.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with onednn_enabled(onednn):
            baseline = R0(*data)
            baseline.evaluate(personal_heads=False)
            return [KINDS[kind](baseline) for _ in range(rounds)]
    finally:
        torch.set_num_threads(before)


@contextmanager
def onednn_enabled(enabled: bool) -> Iterator[None]:
    """Switch oneDNN on or off within a block."""
    with warnings.catch_warnings():
        # `flags` sets an option for Intel GPUs too, which warns on other machines.
        warnings.filterwarnings("ignore", message="TF32 acceleration")
        with torch.backends.mkldnn.flags(enabled=enabled):
            yield


def main(arguments: Iterable[str] | None = None) -> None:
    """Print seconds a round, the median over rounds, for each kind and number of threads."""
    parser = argparse.ArgumentParser(description="Time the plain-PyTorch baseline R0 of W1.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--without-onednn", action="store_true")
    options = parser.parse_args(None if arguments is None else list(arguments))
    data = load_clients()
    print(f"{'kind':26}{'threads':>8}{'train s':>9}{'eval s':>8}{'round s':>9}{'accuracy':>10}")
    for kind in KINDS:
        for threads in options.threads:
            times = measure(kind, data, options.rounds, threads, onednn=not options.without_onednn)
            train, evaluate, total = (
                median(getattr(time, name) for time in times)
                for name in ("train", "evaluate", "total")
            )
            print(
                f"{kind:26}{threads:8d}{train:9.2f}{evaluate:8.2f}{total:9.2f}"
                f"{times[-1].accuracy:10.3f}"
            )


if __name__ == "__main__":
    main()
