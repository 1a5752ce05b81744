"""SheafFMTL watches its bounds during the run: steps may become too long many rounds after 0."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from lightning_pfl.methods import SheafFMTL
from lightning_pfl.methods.support.sheaf import CHECK_EVERY
from lightning_pfl.testing import QuadraticModule, fit, quadratic_clients
from tests.methods.graphs import PAIR

ONE_STEP: dict[str, Any] = {"local_epochs": None, "local_steps": 1}
ALIKE = {(0, 1): torch.ones(1, 1), (1, 0): torch.ones(1, 1)}
"""With equal clients their residual stays zero, and so the maps and the pull as they are."""


class Warmup(QuadraticModule):
    """The learning rate is 0.01 until ``until`` and 0.5 from then on."""

    until = 3

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda round: 1.0 if round < self.until else 50.0
        )
        return [optimizer], [scheduler]


def said(method: SheafFMTL, module: Any, rounds: int) -> tuple[Any, str]:
    """A run of two equal clients whose optimum is 2, and what it warned of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run = fit(method, quadratic_clients([1.0] * 2, [2.0, 2.0]), module, rounds)
    texts = [str(one.message) for one in found]
    return run, "".join(text for text in texts if text.startswith("Expected"))


def test_models_that_grow_are_told_in_the_round_in_which_the_maps_become_unstable() -> None:
    """theta = 2 (1 - 0.9^k) before round k; eta lambda 2 theta^2 reaches 2 at theta^2 = 5 / 2."""
    map_lr, strength, lr = 0.8, 0.5, 0.1
    first = math.ceil(math.log(1 - math.sqrt(2.5) / 2) / math.log(1 - lr))
    assert first == 15
    for rounds in (first, first + 1):
        method = SheafFMTL(PAIR, strength, map_lr, maps=ALIKE, **ONE_STEP)
        run, text = said(method, QuadraticModule(lr=lr), rounds)
        theta = 2 * (1 - (1 - lr) ** first)
        length = map_lr * strength * 2 * theta**2
        expected = f"but got {length:.3g} before round {first} between clients '0' and '1'"
        assert (expected in text) == (rounds > first)
        assert bool(text) == (rounds > first)
        assert run.models["w"].isfinite().all()
        assert torch.equal(run.client_state["maps"].flatten(), torch.ones(2).double())


def test_a_learning_rate_that_grows_is_told_at_the_next_look_at_the_models() -> None:
    """alpha lambda lambda_max = 0.5 * 2.5 * 2 from round 3 on; the eigenvalue costs something, so
    this is looked at every 25 rounds."""
    method = SheafFMTL(PAIR, 2.5, 0.0, maps=ALIKE, **ONE_STEP)
    run, text = said(method, Warmup(), CHECK_EVERY)
    assert not text
    run, text = said(method, Warmup(), CHECK_EVERY + 1)
    assert (
        f"but got 2.5 before round {CHECK_EVERY} (learning rate and local steps make 0.5)" in text
    )
    assert run.models["w"].isfinite().all()


@pytest.mark.parametrize(("strength", "stable"), [(1.95, True), (2.05, False)])
def test_the_bound_of_the_models_is_that_of_the_rate_at_that_time(
    strength: float, stable: bool
) -> None:
    method = SheafFMTL(PAIR, strength, 0.0, maps=ALIKE, **ONE_STEP)
    _, text = said(method, Warmup(), CHECK_EVERY + 1)
    assert (not text) == stable
