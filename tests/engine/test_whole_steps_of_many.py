"""Whole recorded steps of many clients: the same bits as the steps themselves."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_pfl.core.tree import Tree, scale, tmap
from lightning_pfl.engine import trace, whole_steps
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.recording import Recorder
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.methods import SCAFFOLD, Ditto, FedAvg, FedMAP, FedRep, PFedMe
from lightning_pfl.methods.base import LocalStep, Method, Phase, recordable
from lightning_pfl.testing.rounds import (
    LocalRound,
    assert_rounds_equal,
    assert_trees_equal,
    local_round,
)
from tests.engine.nets import cnn, image_clients

SIZES = (8, 0, 13, 12)


pytestmark = pytest.mark.usefixtures("at_once")


def rounds(
    method: Method,
    limit: int = 99,
    chunk_size: int | None = None,
    sizes: tuple[int, ...] = SIZES,
    **options: Any,
) -> list[LocalRound]:
    """Run two rounds with one engine."""
    options = {"norm": False, **options}
    settings = options.pop("settings", EngineSettings(chunk_size=chunk_size))
    module, data = cnn(**options), image_clients(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "LIMIT", limit)
        first = local_round(method, module, data, settings=settings)
        patch.setattr("lightning_pfl.testing.rounds.VectorizedEngine", lambda *_: first.engine)
        state = first.result.client_state
        return [
            first,
            local_round(method, module, data, round=1, server=first.server, client_state=state),
        ]


def replays(outcome: list[LocalRound]) -> int:
    engine = outcome[0].engine
    assert isinstance(engine, VectorizedEngine)
    return engine.whole.used


def assert_same(recorded: list[LocalRound], plain: list[LocalRound]) -> None:
    assert replays(plain) == 0
    for found, expected in zip(recorded, plain, strict=True):
        assert_rounds_equal(found, expected)
        assert_trees_equal(found.before, expected.before)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("method", "chunk_size"),
    [
        (FedAvg(local_epochs=2), None),
        (FedRep(head_epochs=3), 2),
        (Ditto(0.5, local_epochs=2), 2),
        (SCAFFOLD("I", local_epochs=2), 2),
        (SCAFFOLD("II", local_epochs=2), None),
        (FedMAP(local_epochs=2), None),
        (PFedMe(local_epochs=1, inner_steps=2), 2),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else str(value),
)
def test_replayed_steps_are_the_steps(method: Method, chunk_size: int | None) -> None:
    """Clients of several sizes, whose last minibatches are padded; the second chunk of two has the
    registers of the first, and heads train on cached features of a backbone in a register."""
    recorded, plain = (rounds(method, limit, chunk_size) for limit in (99, 0))
    assert replays(recorded) > 1
    assert_same(recorded, plain)


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        (EngineSettings(clip_value=0.1), None),
        (EngineSettings(chunk_size=3), torch.optim.Adam),
        (EngineSettings(accumulate=2), torch.optim.RMSprop),
    ],
    ids=["SGD, clipped", "Adam", "RMSprop, accumulated"],
)
def test_optimizers_and_flags(settings: EngineSettings, optimizer: Any) -> None:
    """An optimizer's counters of clients that are done stop."""
    options: dict[str, Any] = {}
    if optimizer is not None:
        options = {"optimizer": partial(optimizer, lr=0.01)}
    sizes = (12, 12, 12, 12) if settings.accumulate > 1 else SIZES
    recorded, plain = (
        rounds(Ditto(0.5, local_epochs=2), limit, settings=settings, sizes=sizes, **options)
        for limit in (99, 0)
    )
    assert replays(recorded) > 1
    assert_same(recorded, plain)


def test_normalisation_of_equal_clients() -> None:
    recorded, plain = (
        rounds(FedAvg(local_epochs=2), limit, norm=True, sizes=(8, 8, 8)) for limit in (99, 0)
    )
    assert replays(recorded) > 3
    assert_same(recorded, plain)


def test_unequal_clients_have_few_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 9, 8, ..., 1 clients that step, where 7 and 5 step as 8 and 6; and of the first step."""
    made: list[int] = []

    class Counted(Recorder):
        def __init__(self, leaves: list[torch.Tensor]) -> None:
            super().__init__(leaves)
            made.append(1)

    monkeypatch.setattr(whole_steps, "Recorder", Counted)
    sizes = tuple(4 * steps - 1 for steps in (3, 9, 1, 7, 5, 2, 8, 4, 6))
    recorded, plain = (rounds(FedAvg(local_epochs=2), limit, sizes=sizes) for limit in (99, 0))
    assert len(made) == len({9, 8, 6, 4, 3, 2, 1}) + 1
    # Every other step is replayed, in both rounds and epochs: no step is taken before.
    assert replays(recorded) == 2 * 2 * 9 - len(made)
    assert_same(recorded, plain)


class Counting(Method):
    """Counts steps in a leaf that clients share as long as all of a tick step."""

    def client_init(self, received: Tree, client_state: Tree, info: Any) -> Tree:
        state = super().client_init(received, client_state, info)
        return {
            **state,
            "count": info.num_samples.new_zeros((), dtype=torch.float64).expand(len(info)),
        }

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        count = state["count"]
        shared = (count[:1] + 1).expand(len(count)) if count.stride(0) == 0 else count + 1
        return {"model": client.train(state["model"], minibatches), "count": shared}

    client_step = recordable()(client_step)

    def client_final(self, received: Tree, client_state: Tree, state: Tree, info: Any) -> Any:
        upload, kept = super().client_final(received, client_state, state, info)
        return {**upload, "count": state["count"]}, kept


def test_a_shared_leaf_of_clients_that_go_along() -> None:
    """Five have a third minibatch; the sixth, which has none, goes along."""
    module, data = cnn(norm=False), image_clients((12, 10, 9, 11, 12, 8))
    outcome = local_round(Counting(local_epochs=1), module, data)
    assert outcome.result.uploads["count"].tolist() == [3, 3, 3, 3, 3, 2]


class Stepping(Method):
    """Trains, and does one thing more, by which its steps can't be recorded."""

    def __init__(self, more: str) -> None:
        super().__init__(local_epochs=2)
        self.personal, self.more = "head", more

    def phases(self, round: int) -> Any:
        return (Phase("head", epochs=3),)

    def client_init(self, received: Tree, client_state: Tree, info: Any) -> Tree:
        state = super().client_init(received, client_state, info)
        return {**state, "extra": state["model"]["head.bias"].new_zeros(len(info))}

    @recordable("more")
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        model = state["model"]
        if self.more == "noise":
            drawn = client.noise({"head.bias": model["head.bias"]})
            moved = model["head.bias"] + 0.01 * drawn["head.bias"]
            model = {**model, "head.bias": moved}
        extra = state["extra"]
        if self.more == "samples":
            other = tmap(lambda leaf: leaf + 0.1, model)
            grads = client.grad(other, minibatches)
            model = {**model, "head.bias": model["head.bias"] - 0.1 * grads["head.bias"]}
        if self.more == "a shared leaf":
            extra = extra.new_full((), 2.0).expand(len(extra))
        return {"model": client.train(model, minibatches), "extra": extra}

    def client_final(self, received: Tree, client_state: Tree, state: Tree, info: Any) -> Any:
        rest = {"model": scale(state["model"], state["extra"] + 1)}
        return super().client_final(received, client_state, rest, info)


@pytest.mark.parametrize("more", ["noise", "samples", "a shared leaf", "nothing"])
def test_what_is_not_recorded(more: str, caplog: pytest.LogCaptureFixture) -> None:
    """Noise, samples whose features are cached, and a leaf that clients share after the step."""
    caplog.set_level("INFO")
    recorded, plain = (rounds(Stepping(more), limit, sizes=(8, 8)) for limit in (99, 0))
    assert (replays(recorded) > 0) == (more == "nothing")
    assert ("no longer recorded" in caplog.text) == (more != "nothing")
    assert_same(recorded, plain)
