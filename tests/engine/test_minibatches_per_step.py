"""Steps on several minibatches, on all samples, and on the samples themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_pfl.contract.records import ClientInfo, one_rate
from lightning_pfl.core.tree import Tree
from lightning_pfl.data.datasets import FederatedLoaders, FederatedTensorDataset
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.steps import (
    Budget,
    count_steps,
    step_bounds,
)
from lightning_pfl.methods.base import LocalStep, Method, Phase
from lightning_pfl.testing import QuadraticModule, local_round
from tests.orders_by_hand import order_by_hand

ENGINES = ("vectorized", "sequential")
SIZES = (7, 1, 4, 0)
LONGEST = 12


def numbered(**settings: Any) -> FederatedTensorDataset:
    """Clients whose samples are numbers, so that a sum tells which samples a step had."""
    total = sum(SIZES)
    fields = (
        torch.ones(total, dtype=torch.float64),
        torch.arange(1.0, total + 1).double()[:, None],
    )
    owned = torch.arange(total).split(SIZES)
    return FederatedTensorDataset(fields, owned, batch_size=2, **{"shuffle": True, **settings})


class Watching(Method):
    """Remembers the sum of each draw's samples, step by step, and reports a loss of its own."""

    def __init__(self, **phase: Any) -> None:
        super().__init__()
        self.phase = phase

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (Phase("all", **self.phase),)

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        seen = torch.full((len(info), LONGEST), -1.0, dtype=torch.float64)
        return {"model": dict(received["model"]), "seen": seen, "at": torch.zeros(len(info))}

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        draws = minibatches if isinstance(minibatches, tuple) else (minibatches,)
        seen, at = state["seen"].clone(), state["at"].clone()
        for draw in draws:
            (_, x), real = client.samples(draw)
            total = (x[..., 0] * real).sum(1)
            seen[torch.arange(len(at)), at.long()] = total
            at += 1
            client.report(total, draw)
        return {**state, "seen": seen, "at": at}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        return {"seen": state["seen"]}, {}

    def init_client_state(self, model: Any) -> Tree:
        return {}

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        return server


def minibatches(client: int, number: int) -> list[float]:
    """Sums over the first minibatches of a client, through as many epochs as it takes."""
    first = sum(SIZES[:client]) + 1
    sums: list[float] = []
    epoch = 0
    while SIZES[client] and len(sums) < number:
        order = order_by_hand(SIZES[client], client, epoch)
        sums += [float((first + some).sum()) for some in order.split(2)]
        epoch += 1
    return sums[:number]


def seen(engine: Any, accumulate: int = 1, data: Any = None, **phase: Any) -> Any:
    settings = EngineSettings(accumulate=accumulate)
    data = numbered() if data is None else data
    result = local_round(Watching(**phase), QuadraticModule(), data, engine, settings=settings)
    return result.result.uploads["seen"]


def padded(rows: list[list[float]]) -> Tensor:
    return torch.tensor([[*row, *[-1.0] * (LONGEST - len(row))] for row in rows]).double()


@pytest.mark.parametrize("engine", ENGINES)
class TestDraws:
    @pytest.mark.parametrize("draws", [1, 2, 3])
    def test_steps_get_consecutive_minibatches(self, engine: Any, draws: int) -> None:
        expected = padded([minibatches(k, 2 * draws if SIZES[k] else 0) for k in range(4)])
        assert torch.equal(seen(engine, steps=2, batches_per_step=draws), expected)

    def test_epochs_say_how_much_data_is_seen(self, engine: Any) -> None:
        """4, 1 and 2 minibatches an epoch: two epochs are 3, 1 and 2 steps of three."""
        expected = padded([minibatches(k, 3 * steps) for k, steps in enumerate((3, 1, 2, 0))])
        assert torch.equal(seen(engine, epochs=2, batches_per_step=3), expected)

    def test_every_draw_accumulates(self, engine: Any) -> None:
        parts = [minibatches(k, 4 if SIZES[k] else 0) for k in range(4)]
        expected = padded([[sum(p[:2]), sum(p[2:])] if p else [] for p in parts])
        assert torch.equal(seen(engine, 2, steps=1, batches_per_step=2), expected)

    @pytest.mark.parametrize("drop_last", [True, False])
    def test_whole_clients_in_one_step(self, engine: Any, drop_last: bool) -> None:
        """In the stored order, whatever the batch size; clients without samples take no step."""
        data = numbered(drop_last=drop_last)
        expected = padded(
            [
                minibatches(k, 99) and [float(data.fields[1][i].sum())]
                for k, i in enumerate(data.indices)
            ]
        )
        assert torch.equal(seen(engine, data=data, epochs=1, full_batch=True), expected)

    def test_a_reported_loss_is_logged_by_samples(self, engine: Any) -> None:
        outcome = local_round(Watching(epochs=1), QuadraticModule(), numbered(), engine)
        loss = outcome.result.loss
        sums, sizes = minibatches(0, 4), [2, 2, 2, 1]
        want = sum(s * n for s, n in zip(sums, sizes, strict=True)) / 7
        torch.testing.assert_close(float(loss[0]), want, rtol=1e-12, atol=0)
        assert loss[3].isnan()
        assert torch.equal(outcome.result.logs["train_loss"].nan_to_num(), loss.nan_to_num())

    def test_loaders_cannot_give_all_samples_at_once(self, engine: Any) -> None:
        class Samples(Dataset[Any]):
            def __len__(self) -> int:
                return 3

            def __getitem__(self, at: int) -> Any:
                return torch.ones(()).double(), torch.ones(1).double()

        data = FederatedLoaders([DataLoader(Samples(), batch_size=2)])
        with pytest.raises(
            TypeError,
            match=r"Expected data in memory for a full batch, but got the DataLoader of client '0'",
        ):
            seen(engine, data=data, epochs=1, full_batch=True)


def test_complete_draws_have_no_short_steps() -> None:
    budget = Budget(2, None, batches_per_step=2)
    assert step_bounds(3, budget, 2) == [(0, 4), (4, 8)]
    assert count_steps(3, budget, 2) == 2
    assert step_bounds(3, Budget(None, 2, batches_per_step=2), 1) == [(0, 2), (2, 4)]


def test_one_learning_rate() -> None:
    ones = torch.ones(2)
    info = ClientInfo(ones, ones, ones, ones, 0, 2, (0.5,))
    assert info.lr == info.rows(slice(0, 1)).lr == 0.5
    with pytest.raises(
        ValueError, match=r"Expected one learning rate for all .* but got \[0.1, 0.2\]"
    ):
        one_rate((0.2, 0.1))
