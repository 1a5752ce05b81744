"""Iterable datasets with a length, right or wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_pfl.core.errors import ClientError
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.data.datasets import FederatedLoaders
from lightning_pfl.engine.base import EngineSettings, EvaluationWork
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing import local_round
from lightning_pfl.testing.rounds import assert_trees_close
from tests.engine.nets import SIZES, cnn, image_clients

RESIDENT = image_clients(shuffle=False)
ENGINES = {"sequential": SequentialEngine, "vectorized": VectorizedEngine}


class Stream(IterableDataset[Any]):
    """The samples of a client, one after another."""

    def __init__(self, client: int, claims: int | None = None) -> None:
        self.client = client
        self.claims = SIZES[client] if claims is None else claims

    def __len__(self) -> int:
        return self.claims

    def __iter__(self) -> Iterator[Any]:
        return iter(list(zip(*RESIDENT.gather(RESIDENT.indices[self.client]), strict=True)))


def streams(**claims: int) -> FederatedLoaders:
    datasets = [Stream(client, claims.get(f"c{client}")) for client in range(len(SIZES))]
    names = [f"c{client}" for client in range(len(SIZES))]
    return FederatedLoaders([DataLoader(dataset, 4) for dataset in datasets], names)


def evaluate(engine: str, data: Any) -> Any:
    module = cnn().eval()
    parameter_split = ParameterSplit(module)
    kind: Any = ENGINES[engine]
    runner = kind(module, parameter_split, EngineSettings())
    models = {
        n: leaf.expand(len(SIZES), *leaf.shape) for n, leaf in parameter_split.model().items()
    }
    return runner.evaluate(
        EvaluationWork(models, torch.arange(len(SIZES)), data, "validation_step")
    )


@pytest.mark.parametrize("engine", ENGINES)
class TestStreams:
    def test_training_and_evaluation_are_those_of_tensors(self, engine: Any) -> None:
        method = FedAvg(local_epochs=2)
        a = local_round(method, cnn(), streams(), engine)
        b = local_round(FedAvg(local_epochs=2), cnn(), RESIDENT, engine)
        assert a.info.steps.tolist() == b.info.steps.tolist() == [2, 0, 4, 8, 2]
        assert_trees_close(a.models, b.models)
        got, expected = evaluate(engine, streams()), evaluate(engine, RESIDENT)
        assert got.counts.tolist() == list(SIZES)
        assert_trees_close(got.values, expected.values)

    def test_a_stream_shorter_than_its_length_names_the_client(self, engine: Any) -> None:
        short = streams(c3=SIZES[3] + 8)
        match = (
            r"^reading a batch failed for client 'c3': Expected the DataLoader to give 6 batches"
        )
        with pytest.raises(ClientError, match=match):
            local_round(FedAvg(), cnn(), short, engine)
        with pytest.raises(ClientError, match=match):
            evaluate(engine, short)

    @pytest.mark.filterwarnings("ignore:Length of IterableDataset")
    def test_a_stream_longer_than_its_length_is_cut(self, engine: Any) -> None:
        outcome = local_round(FedAvg(), cnn(), streams(c3=8), engine)
        assert outcome.info.steps[3] == 2
        assert evaluate(engine, streams(c3=8)).counts[3] == 8


class Broken(Stream):
    """A file that can't be read, after two samples."""

    def __iter__(self) -> Iterator[Any]:
        yield from list(super().__iter__())[:2]
        raise OSError("scan_0042.png is truncated")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_fails_names_its_client(engine: Any, workers: int) -> None:
    loaders = list(streams().loaders)
    loaders[2] = DataLoader(Broken(2), 4, num_workers=workers)
    data = FederatedLoaders(loaders, [f"c{client}" for client in range(len(SIZES))])
    match = "reading a batch failed for client 'c2': OSError: scan_0042.png is truncated"
    with pytest.raises(ClientError, match=match):
        local_round(FedAvg(), cnn(), data, engine=engine)
    with pytest.raises(ClientError, match=match):
        evaluate(engine, data)
