"""Rounds of another framework, run by that framework's interpreter for :mod:`benchmarks.peers`.

    /path/to/python benchmarks/peer_side.py fluke problem.pt

It imports nothing of this repository. For each line on its input it runs a round, and prints what
the round took as JSON. The frameworks' own classes train, sample, send and aggregate, as their
documentation shows; only the network and the data are given, those of LeNet at batch 10.
"""

import json
import os
import sys
import time
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ANSWERS = sys.stdout
"""Where answers go; what the frameworks print goes to the error output."""


def encoder() -> nn.Module:
    """Make LeNet up to its 100 features."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 100), nn.ReLU(),
    )  # fmt: skip


def head() -> nn.Module:
    """Make LeNet's head."""
    return nn.Linear(100, 10)


def fluke_network() -> nn.Module:
    """Make the whole network as fluke's methods with personal parts want it."""
    from fluke.nets import EncoderHeadNet

    made: nn.Module = EncoderHeadNet(encoder(), head())
    return made


class Clock:
    """Waits for a request before each round, and answers with what the round took.

    Args:
        weights: The parameters that the server holds.
    """

    def __init__(self, weights: list[Tensor]) -> None:
        self.before = [leaf.detach().clone() for leaf in weights]

    def wait(self) -> bool:
        """Wait for a request; return False where there will be none."""
        wanted = sys.stdin.readline() != ""
        self.start = time.perf_counter(), time.process_time()
        return wanted

    def answer(self, weights: list[Tensor]) -> None:
        """Print the seconds of the round, and how far the server's parameters went from the first.

        Args:
            weights: The parameters that the server holds now.
        """
        wall, cpu = time.perf_counter() - self.start[0], time.process_time() - self.start[1]
        pairs = zip(weights, self.before, strict=True)
        way = sum(float((now.detach() - then).square().sum()) for now, then in pairs) ** 0.5
        print(json.dumps({"wall": wall, "cpu": cpu, "way": way}), file=ANSWERS, flush=True)


# --- fluke ----------------------------------------------------------------------------------------


def fluke(problem: dict[str, Any]) -> None:
    """Run FedAvg or FedRep of fluke, clients one after another.

    FedAvg evaluates the global model on all test samples in each round, FedRep the models of the
    cohort after they were trained; fluke doesn't evaluate the other clients.
    """
    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.algorithms.fedrep import FedRep
    from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
    from fluke.evaluation import ClassificationEval
    from fluke.nets import EncoderHeadNet
    from fluke.utils import FederationObserver
    from torchmetrics import Accuracy

    class Requested(FederationObserver):  # type: ignore[misc]
        """Waits before and answers after each round."""

        def start_round(self, round: int, global_model: Any) -> None:
            if not clock.wait():
                sys.exit()

        def end_round(self, round: int) -> None:
            clock.answer(list(algorithm.server.model.parameters()))

    personal = problem["method"] == "FedRep"
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_eval_cfg(pre_fit=False, post_fit=personal, locals=False, server=not personal)
    accuracy = Accuracy(task="multiclass", num_classes=10)
    environment.set_evaluator(ClassificationEval(1, 10, accuracy=accuracy))

    def loader(inputs: Tensor, labels: Tensor, batch: int, shuffle: bool) -> Any:
        return FastDataLoader(inputs, labels, num_labels=10, batch_size=batch, shuffle=shuffle)

    trains = [loader(*data, problem["batch_size"], True) for data in problem["train"]]
    tests = [loader(*data, len(data[1]), False) for data in problem["test"]]
    together = [torch.cat(fields) for fields in zip(*problem["test"], strict=True)]
    everything = loader(*together, len(problem["test"][0][1]), False)
    body, top = encoder(), head()
    _load([body, top], problem["weights"])
    client = {
        "batch_size": problem["batch_size"],
        "local_epochs": problem["head_epochs"] if personal else 1,
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "lr": problem["lr"]},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
    }
    if personal:
        # Each client makes a network of its own by this name.
        client |= {"tau": 1, "model": f"{__name__}.fluke_network"}
    algorithm = (FedRep if personal else FedAVG)(
        len(trains),
        DataSplitter(DummyDataContainer(trains, tests, everything, 10)),
        DDict(
            client=client,
            server={"weighted": True},
            model=body if personal else EncoderHeadNet(body, top),
        ),
    )
    clock = Clock(list(algorithm.server.model.parameters()))
    algorithm.set_callbacks(Requested())
    algorithm.run(10**6, problem["cohort"] / len(trains))


# --- BlazeFL --------------------------------------------------------------------------------------


class Part(StrEnum):
    """The splits, by BlazeFL's names."""

    TRAIN = "train"
    TEST = "test"


class Clients:
    """BlazeFL's ``PartitionedDataset``: the samples of each client.

    Args:
        problem: What :func:`benchmarks.peers.write_problem` wrote.
    """

    def __init__(self, problem: dict[str, Any]) -> None:
        together = [torch.cat(fields) for fields in zip(*problem["test"], strict=True)]
        self.everything = TensorDataset(*together)
        self.train = [TensorDataset(*data) for data in problem["train"]]

    def get_dataset(self, type_: Part, cid: int | None) -> TensorDataset:
        """Return a client's training samples, or all test samples."""
        return self.everything if cid is None else self.train[cid]

    def set_dataset(self, type_: Part, cid: int | None, dataset: Any) -> None:
        """Keep nothing: no samples change."""

    def get_dataloader(
        self, type_: Part, cid: int | None, batch_size: int | None, generator: Any
    ) -> DataLoader[Any]:
        """Return a DataLoader, as BlazeFL's examples do."""
        data = self.get_dataset(type_, cid)
        return DataLoader(data, batch_size, shuffle=cid is not None, generator=generator)


class Models:
    """BlazeFL's ``ModelSelector``.

    Args:
        weights: The first parameters of a model.
    """

    def __init__(self, weights: list[Tensor]) -> None:
        self.weights = weights

    def select_model(self, model_name: str) -> nn.Module:
        """Return a new LeNet."""
        body, top = encoder(), head()
        _load([body, top], self.weights)
        return nn.Sequential(body, top)


def blazefl(problem: dict[str, Any]) -> None:
    """Run FedAvg of BlazeFL in its single-threaded or its multi-threaded mode.

    It evaluates the global model on all test samples in each round.
    """
    from blazefl.contrib import fedavg

    models, data = Models(problem["weights"]), Clients(problem)
    clients = len(problem["train"])
    handler: Any = fedavg.FedAvgBaseServerHandler(
        models, "lenet", data, 10**6, clients, problem["cohort"] / clients, "cpu",
        len(problem["test"][0][1]), 0,
    )  # fmt: skip
    same = {
        "model_selector": models, "model_name": "lenet", "dataset": data, "device": "cpu",
        "num_clients": clients, "epochs": 1, "batch_size": problem["batch_size"],
        "lr": problem["lr"], "seed": 0,
    }  # fmt: skip
    trainer: Any
    if problem["threads"] > 1:
        trainer = fedavg.FedAvgThreadPoolClientTrainer(**same, num_parallels=problem["threads"])
    else:
        trainer = fedavg.FedAvgBaseClientTrainer(**same)
    clock = Clock(list(handler.model.parameters()))
    while clock.wait():
        cohort = handler.sample_clients()
        trainer.local_process(handler.downlink_package(), cohort)
        for upload in trainer.uplink_package():
            handler.load(upload)
        handler.get_summary()
        clock.answer(list(handler.model.parameters()))


def _load(parts: list[nn.Module], weights: list[Tensor]) -> None:
    """Set the parameters of modules, in order."""
    leaves = [leaf for part in parts for leaf in part.parameters()]
    with torch.no_grad():
        for leaf, value in zip(leaves, weights, strict=True):
            leaf.copy_(value)


def main() -> None:
    """Run rounds on request."""
    global ANSWERS
    # What a framework prints, also from its processes, mustn't be taken for an answer.
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    framework, file = sys.argv[1:]
    problem = torch.load(file, weights_only=True)
    # BlazeFL's threads train a client each.
    torch.set_num_threads(1 if framework == "blazefl" else problem["threads"])
    {"fluke": fluke, "blazefl": blazefl}[framework](problem)


if __name__ == "__main__":
    main()
