"""Minibatches of several clients or of an epoch that are gathered at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.engine import minibatches
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.minibatches import evaluation_minibatches, gathered
from lightning_pfl.engine.steps import Limits

SIZES = [4, 4, 1, 0, 4, 3]


def dataset(width: int = 3, **options: Any) -> FederatedTensorDataset:
    x = torch.arange(20.0 * width).view(20, width)
    fields = {"x": x, "both": (torch.arange(20), x.double() + 1)}
    return FederatedTensorDataset(fields, torch.randperm(20).split([7, 0, 13]), **options)


def positions() -> list[Tensor]:
    return list(torch.randperm(20)[: sum(SIZES)].split(SIZES))


def leaves(batch: Any) -> list[Tensor]:
    return [batch["x"], *batch["both"]]


@pytest.mark.parametrize("most", [1, 5, 8, 100])
def test_they_are_those_that_are_gathered_alone(most: int, monkeypatch: Any) -> None:
    data, calls = dataset(width=16), list[int]()  # with no gaps between minibatches
    monkeypatch.setattr(minibatches, "MOST", most)
    given = positions()
    expected = [leaves(data.gather(mine)) for mine in given]
    gather = data.gather

    def counted(at: Tensor) -> Any:
        calls.append(len(at))
        return gather(at)

    monkeypatch.setattr(data, "gather", counted)
    found = list(gathered(data, iter(given)))
    assert all(type(batch["both"]) is tuple for batch in found)
    for batch, want in zip(found, expected, strict=True):
        assert all(map(torch.equal, leaves(batch), want))
    assert sum(calls) == sum(SIZES)
    assert max(calls) <= max(most, 4)
    assert (len(calls) == 1) == (most == 100)


@pytest.mark.parametrize("kind", [tuple, list])
def test_the_usual_batches_keep_their_kind(kind: Any) -> None:
    fields = kind([torch.arange(20.0), torch.arange(40).view(20, 2)])
    data = FederatedTensorDataset(fields, [torch.arange(20)])
    given = positions()
    for batch, mine in zip(gathered(data, given), given, strict=True):
        assert type(batch) is kind
        assert all(map(torch.equal, batch, data.gather(mine)))


def test_a_step_that_writes_to_its_minibatch_changes_no_other() -> None:
    data, given = dataset(), positions()
    expected = [leaves(data.gather(mine)) for mine in given]
    for batch, want in zip(gathered(data, given), expected, strict=True):
        assert all(map(torch.equal, leaves(batch), want))
        for leaf in leaves(batch):
            leaf.fill_(-1)
    assert (data.fields["x"] >= 0).all()


def test_a_transform_gets_minibatches_as_they_are() -> None:
    seen: list[int] = []

    def transform(batch: Any) -> Any:
        seen.append(len(batch["x"]))
        return batch

    data = dataset(transform=transform)
    assert len(list(gathered(data, positions()))) == len(SIZES)
    assert seen == SIZES


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("limit", [1.0, 2, 0.5])
def test_clients_are_evaluated_on_their_own_samples_in_order(drop_last: bool, limit: Any) -> None:
    data = dataset(batch_size=3, drop_last=drop_last)
    settings = EngineSettings()
    clients = [2, 1, 0]
    of_all = evaluation_minibatches(data, clients, Limits(1, limit), settings)
    for client, found in zip(clients, of_all, strict=True):
        mine = data.indices[client]
        parts = [part for part in mine.split(3) if len(part) == 3 or (len(part) and not drop_last)]
        parts = parts[: limit if isinstance(limit, int) else int(limit * len(parts))]
        each = list(found)
        assert [number for number, _ in each] == [*range(len(parts))]
        for (_, batch), part in zip(each, parts, strict=True):
            assert all(map(torch.equal, leaves(batch), leaves(data.gather(part))))


def test_a_gradient_does_not_need_what_a_later_minibatch_changes() -> None:
    weight = torch.ones(3, requires_grad=True)
    first, second = gathered(dataset(), [torch.tensor([0, 1]), torch.tensor([2, 3])])
    total = (first["x"] * weight).sum()
    second["x"].zero_()
    total.backward()
    # The rows 0, 1, 2 and 3, 4, 5.
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 5.0, 7.0]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [3, 5, 13, 16])
def test_they_begin_where_new_memory_may(width: int, kind: torch.dtype) -> None:
    """So that no other minibatch changes how a product of one is rounded."""
    x, y = torch.randn(20, width, dtype=kind), torch.arange(20)
    data = FederatedTensorDataset((x, y), [torch.arange(20)])
    given = positions()
    for (mine, labels), at in zip(gathered(data, given), given, strict=True):
        assert torch.equal(mine, x[at])
        assert torch.equal(labels, y[at])
        assert not len(at) or mine.data_ptr() % 64 == 0
