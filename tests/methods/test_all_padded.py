"""Every method with minibatches of different sizes in one padded batch, against one by one.

Batches are padded only where no step draws random numbers or couples samples, so the conformance
suite's own network, with BatchNorm, never gets there.
"""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_pfl.core.tree import Tree, tmap
from lightning_pfl.engine.vectorized.local import VectorizedLocalStep
from lightning_pfl.engine.vectorized.ticks import Tick
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.conformance import small_clients
from lightning_pfl.testing.rounds import LocalRound, assert_trees_close, local_round
from tests.methods.cases import CASES, PROBLEMS


def network(dtype: torch.dtype) -> PersonalizedModule:
    """A convolution and a linear head."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten())
        return PersonalizedModule(backbone, nn.Linear(18, 3), lr=0.05, momentum=0.5).to(dtype)


def two_rounds(name: str, engine: Any) -> list[LocalRound]:
    """Two rounds of all clients of one method."""
    problem = PROBLEMS.get(name, {})
    data = problem.get("make_data", small_clients)(torch.float64)
    server: Tree | None = None
    client_state: Tree | None = None
    rounds: list[LocalRound] = []
    for number in range(2):
        module = problem.get("make_module", network)(torch.float64)
        options: dict[str, Any] = {"round": number, "server": server, "client_state": client_state}
        done = local_round(CASES[name](), module, data, engine, **options)
        server, client_state = tmap(_copy, done.server), tmap(_copy, done.result.client_state)
        rounds.append(done)
    return rounds


def _copy(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.clone()


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", CASES)
def test_padded_batches_give_what_each_client_gives_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks: list[torch.Tensor] = []
    begin = VectorizedLocalStep.begin

    def watch_begin(self: VectorizedLocalStep, tick: Tick, step: int) -> None:
        masks.extend(m.mask for m in tick.minibatches if m.mask is not None)
        begin(self, tick, step)

    monkeypatch.setattr(VectorizedLocalStep, "begin", watch_begin)
    for got, want in zip(
        two_rounds(name, "vectorized"), two_rounds(name, "sequential"), strict=True
    ):
        assert_trees_close(got.result.uploads, want.result.uploads)
        assert_trees_close(got.result.client_state, want.result.client_state)
        assert_trees_close(got.result.logs, want.result.logs)
        assert_trees_close(got.server, want.server)
    assert masks
