"""Methods whose server has a model of every client refuse to start where these don't fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pfl.methods import (
    CFL,
    FedMTL,
    FedU,
    SquaredPenalty,
)
from lightning_pfl.methods.base import Method
from lightning_pfl.methods.support import memory
from lightning_pfl.testing import fit
from lightning_pfl.testing.conformance import small_clients
from tests.methods.networks import SCALARS, plain_module

MODELS: dict[str, tuple[Callable[[], Method], int]] = {
    "FedU": (lambda: FedU("ring"), 10),
    "FedMTL": (FedMTL, 10),
    "SquaredPenalty": (SquaredPenalty, 10),
    "CFL": (CFL, 13),
}
"""The method, and how often it has all models at once."""


@pytest.mark.parametrize("name", MODELS)
def test_models_that_do_not_fit_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, copies = MODELS[name]
    needed = copies * 5 * SCALARS * 8
    monkeypatch.setattr(memory, "available", lambda device: needed - 1)
    match = rf"Expected {name} with the models of 5 clients, {copies} times, to fit .* Use fewer cl"
    with pytest.raises(MisconfigurationException, match=match):
        fit(make(), small_clients(), plain_module(), 1)
    monkeypatch.setattr(memory, "available", lambda device: needed)
    assert fit(make(), small_clients(), plain_module(), 1).strategy.federation.rounds == 1


def test_without_a_server_there_is_nothing_to_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 0)
    run = fit(FedU("ring", decentralized=True), small_clients(), plain_module(), 1)
    assert run.strategy.federation.rounds == 1
