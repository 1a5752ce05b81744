"""The sequential engine intercepts random functions and seeds generators only for steps that use
some."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import dropout as imported_dropout

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.keyed.mode import KeyedRandomness
from lightning_pfl.engine.keyed.names import NamedRandomness
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.engine.sequential_local import SequentialLocalStep
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing import local_round
from lightning_pfl.testing.fitting import Fit, fit
from lightning_pfl.testing.rounds import LocalRound, assert_trees_equal
from tests.engine.nets import CLASSES, image_clients

CLIENTS, STEPS = 3, 4
ONES = torch.ones(50, dtype=torch.float64)
DRAWS: dict[str, Callable[[Any], Tensor | float]] = {
    "dropout": lambda module: F.dropout(ONES, 0.5).mean(),
    "imported dropout": lambda module: imported_dropout(ONES, 0.5).mean(),
    "randn": lambda module: torch.randn(()),
    "multinomial": lambda module: torch.multinomial(ONES, 1)[0] / 50,
    "own generator": lambda module: torch.rand((), generator=module.generator),
    "python": lambda module: random.random(),
    "numpy": lambda module: float(np.random.rand()),
}


class Late(L.LightningModule):
    """Its gradient is something else for some steps, counted over all clients, and then a draw."""

    def __init__(
        self,
        draw: Callable[[Any], Tensor | float],
        quiet: int,
        before: Callable[[Any], Tensor | float] = lambda module: 1.0,
    ) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.draw, self.quiet, self.before, self.seen = draw, quiet, before, 0
        if draw is DRAWS["own generator"]:
            self.generator = torch.Generator()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1
        return self.w * (self.draw if self.seen > self.quiet else self.before)(self)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def run(module: Late) -> LocalRound:
    samples = torch.arange(2 * STEPS * CLIENTS).split(2 * STEPS)
    fields = (torch.zeros(2 * STEPS * CLIENTS),)
    data = FederatedTensorDataset(fields, samples, batch_size=2)
    return local_round(FedAvg(local_epochs=1), module, data, "sequential")


@pytest.mark.sweep(35)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("quiet", [0, 1, STEPS, STEPS + 2, CLIENTS * STEPS])
@pytest.mark.parametrize("before", [lambda module: 1.0, DRAWS["dropout"]], ids=["1", "dropout"])
def test_a_client_that_draws_later_gets_the_numbers_of_its_key(
    draw: str, quiet: int, before: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_deterministic(engine: SequentialEngine, _: SequentialLocalStep) -> None:
        engine.deterministic = False

    module = Late(DRAWS[draw], quiet, before)
    states = random.getstate(), torch.get_rng_state()
    found = run(module)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert module.seen == CLIENTS * STEPS  # a client's first try leaves no trace
    monkeypatch.setattr(SequentialEngine, "_note_draws", never_deterministic)
    assert_trees_equal(found.models, run(Late(DRAWS[draw], quiet, before)).models)


@pytest.mark.parametrize(
    ("draw", "quiet", "by_name", "intercepted"),
    [
        ("randn", CLIENTS * STEPS, 0, 1),
        ("randn", 0, CLIENTS - 1, 1),
        # The second client draws past its keys, and is trained once more.
        ("imported dropout", 0, 1, CLIENTS),
        ("multinomial", 0, 0, CLIENTS),
    ],
)
def test_the_first_client_settles_it(
    draw: str, quiet: int, by_name: int, intercepted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[Any] = []
    for kind in (KeyedRandomness, NamedRandomness):
        enter: Any = kind.__enter__

        def counted(mode: Any, enter: Any = enter) -> Any:
            entered.append(type(mode))
            return enter(mode)

        monkeypatch.setattr(kind, "__enter__", counted)
    run(Late(DRAWS[draw], quiet))
    assert entered.count(NamedRandomness) == by_name * STEPS
    assert entered.count(KeyedRandomness) == intercepted * STEPS


class Drops(L.LightningModule):
    """Its code isn't known, and it draws by a function that has a key."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(25, 8), nn.Dropout(0.5))
        self.head = nn.Linear(8, CLASSES)
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.head(self.net(batch[0])), batch[1])
        self.log("loss", loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_a_resumed_run_draws_the_same(tmp_path: Path) -> None:
    """Its first client gets everything, and that of the whole run keys by name alone."""

    def train(rounds: int, engine: str = "sequential", **options: Any) -> Fit:
        return fit(FedAvg(), image_clients(), Drops(), rounds, engine, **options)

    whole, file = train(3), train(1).save(tmp_path / "a.ckpt")
    assert_trees_equal(train(3, ckpt_path=file).server, whole.server)
    assert_trees_equal(train(3, "reference").server, whole.server)
    assert whole.metrics["loss"] > 0
