"""Steps that draw from Python's and NumPy's global generators: seeded per client, and noticed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_pfl.contract.records import Evaluation
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.base import EngineSettings, EvaluationWork
from lightning_pfl.engine.safety.global_rng import watch_global_rng
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing import local_round
from lightning_pfl.testing.rounds import LocalRound

DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "random.gauss": lambda: random.gauss(0.0, 1.0),
    "numpy": lambda: float(np.random.beta(1.0, 1.0)),
    "numpy normal": lambda: float(np.random.randn()),
    "numpy state": lambda: float(np.random.permutation(700)[0]),
    "python state": lambda: [random.getrandbits(32) for _ in range(624)][-1] / 2**32,
}


class Drawing(L.LightningModule):
    """Its gradient, and what it logs, is what it draws."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.draw = draw

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.w * self.draw()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("drawn", torch.tensor(self.draw(), dtype=torch.float64))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.tensor([self.draw()])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def data() -> FederatedTensorDataset:
    return FederatedTensorDataset((torch.zeros(12),), [range(4), range(4, 12)], batch_size=2)


def disturb() -> None:
    """Whatever ran before."""
    random.random()
    np.random.rand(3)
    torch.rand(2)


def train(draw: Callable[[], float], seed: int = 0, round: int = 0) -> LocalRound:
    disturb()
    settings = EngineSettings(seed=seed)
    return local_round(
        FedAvg(), Drawing(draw), data(), "sequential", settings=settings, round=round
    )


def draws_elsewhere(outcome: LocalRound) -> bool:
    assert isinstance(outcome.engine, SequentialEngine)
    return outcome.engine.draws_elsewhere


def evaluate(draw: Callable[[], float], clients: list[int], step: str, seed: int = 0) -> Evaluation:
    disturb()
    module = Drawing(draw)
    settings = EngineSettings(seed=seed)
    engine = SequentialEngine(module, ParameterSplit(module), settings)
    models = {"w": torch.zeros(len(clients), dtype=torch.float64)}
    found = engine.evaluate(EvaluationWork(models, torch.tensor(clients), data(), step))
    assert engine.draws_elsewhere
    return found


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
class TestDraws:
    def test_training_depends_on_the_seed_the_round_and_the_client(self, draw: Any) -> None:
        first = train(draw)
        assert draws_elsewhere(first)
        w = first.models["w"]
        assert torch.equal(train(draw).models["w"], w)
        assert w[0] != w[1]
        assert not torch.equal(train(draw, seed=1).models["w"], w)
        assert not torch.equal(train(draw, round=1).models["w"], w)

    def test_evaluation_depends_on_the_seed_and_the_client(self, draw: Any) -> None:
        values = evaluate(draw, [0, 1], "validation_step").values["drawn"]
        assert values[0] != values[1]
        swapped = evaluate(draw, [1, 0], "validation_step").values["drawn"]
        assert torch.equal(swapped, values.flip(0))
        assert not torch.equal(
            evaluate(draw, [0, 1], "validation_step", seed=1).values["drawn"], values
        )

    def test_later_evaluations_draw_the_same(self, draw: Any) -> None:
        module = Drawing(draw)
        engine = SequentialEngine(module, ParameterSplit(module), EngineSettings())
        models = {"w": torch.zeros(2, dtype=torch.float64)}
        found = []
        for _ in range(3):
            disturb()
            work = EvaluationWork(models, torch.tensor([0, 1]), data(), "validation_step")
            found.append(engine.evaluate(work).values["drawn"])
            assert engine.draws_elsewhere
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])

    def test_prediction_depends_on_the_client_alone(self, draw: Any) -> None:
        both = evaluate(draw, [0, 1], "predict_step").predictions
        assert [len(outputs) for outputs in both] == [2, 4]
        assert evaluate(draw, [1], "predict_step").predictions == both[1:]
        assert len({float(output) for outputs in both for output in outputs}) == 6

    def test_the_global_generators_are_left_alone(self, draw: Any) -> None:
        def states() -> tuple[Any, ...]:
            return random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]

        disturb()
        expected = random.getstate()
        with watch_global_rng(5) as elsewhere:
            draw()
        assert elsewhere.moved
        assert random.getstate() == expected
        before = states()
        local_round(FedAvg(), Drawing(draw), data(), "sequential")
        assert states() == before


@pytest.mark.parametrize("torch_alone", [False, True])
@pytest.mark.parametrize(
    ("draw", "others", "torchs"),
    [
        (lambda: None, False, False),
        (lambda: torch.rand(3), False, True),
        (lambda: random.gauss(0.0, 1.0), True, False),
        (lambda: np.random.randn(3), True, False),
    ],
    ids=["nothing", "torch", "Python", "NumPy"],
)
def test_draws_that_are_only_noticed_are_undone(
    draw: Callable[[], Any], others: bool, torchs: bool, torch_alone: bool
) -> None:
    def next_numbers() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    disturb()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = next_numbers()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with watch_global_rng(None, torch_alone) as found:
        draw()
    assert (found.moved, found.moved_torch) == (others and not torch_alone, torchs)
    if not (others and torch_alone):
        assert next_numbers() == expected


def test_an_error_inside_undoes_draws_too() -> None:
    def fail() -> None:
        torch.rand(3)
        raise RuntimeError("stop")

    expected = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="stop"), watch_global_rng(None):
        fail()
    assert torch.equal(torch.get_rng_state(), expected)


def test_other_draws_are_not_elsewhere() -> None:
    for draw in (lambda: 1.0, lambda: float(torch.rand(())), lambda: random.Random(1).random()):
        assert not draws_elsewhere(train(draw))


def test_the_last_step_counts() -> None:
    """The first of 2 + 4 minibatches draws, the last doesn't; with accumulation both are one."""
    for accumulate, expected in ((1, False), (4, True)):
        module = Drawing(lambda: 1.0)
        module.calls = 0  # type: ignore[assignment]

        def draw(module: Any = module) -> float:
            module.calls += 1
            return random.random() if module.calls == 3 else 1.0

        module.draw = draw
        settings = EngineSettings(accumulate=accumulate)
        outcome = local_round(FedAvg(), module, data(), "sequential", settings=settings)
        assert draws_elsewhere(outcome) is expected
