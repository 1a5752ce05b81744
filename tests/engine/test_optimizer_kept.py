"""Optimizer states that clients keep: every client alone is one long run of its own optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pfl.core.tree import rows
from lightning_pfl.methods import IFCA, Ditto, FedAvg, FedPer, FedRep, LocalOnly
from lightning_pfl.methods.base import ClientInfo, Method, Tree
from lightning_pfl.testing import assert_trees_close, assert_trees_equal, fit
from lightning_pfl.testing.conformance import small_clients, small_module
from lightning_pfl.testing.fitting import Fit
from tests.trainer.setting import CENTRES, SIZES, Quadratic, points, steps_of

KEEP = {"keep_optimizer_state": True}
ENGINES = ("vectorized", "sequential")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
}


class Point(Quadratic):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


class Hooked(Point):
    """Needs Lightning's own loop."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


def alone(optimizer: str, client: int, steps: int) -> Tensor:
    w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    one = OPTIMIZERS[optimizer]([w])
    for _ in range(steps):
        one.zero_grad()
        (((w - CENTRES[client]) ** 2).sum() / 2).backward()
        one.step()
    return w.detach()


def drawn(ran: Fit, client: int) -> int:
    return sum(int(client in round.info.index) for round in ran.recorder.rounds)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", [*ENGINES, "hooked"])
def test_a_client_goes_on_where_it_was(kind: str, optimizer: str) -> None:
    module = Hooked(optimizer) if kind == "hooked" else Point(optimizer)
    engine = "auto" if kind == "hooked" else kind
    options = {**KEEP, "chunk_size": 3}
    ran = fit(FedPer(personal="w"), points(), module, 5, engine, participation=3, options=options)
    counts = [drawn(ran, k) for k in range(4)]
    assert len(set(counts)) > 1
    for client, size in enumerate(SIZES):
        want = alone(optimizer, client, counts[client] * steps_of(size))
        got = ran.strategy.client_state_dict(client)["w"]
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [FedRep, Ditto, FedAvg])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    make: Any, engine: str, tmp_path: Path
) -> None:
    def run(rounds: int, path: Path | None = None) -> Fit:
        data, module = small_clients(), small_module()
        return fit(make(), data, module, rounds, engine, 2, ckpt_path=path, options=KEEP)

    whole, path = run(3), run(1).save(tmp_path / "one.ckpt")
    resumed = run(3, path)
    assert_trees_equal(whole.server, resumed.server)
    assert_trees_equal(whole.client_state, resumed.client_state)
    fresh = fit(make(), small_clients(), small_module(), 3, engine, 2)
    name = next(iter(whole.server["model"]))
    assert not torch.equal(fresh.server["model"][name], whole.server["model"][name])


@pytest.mark.parametrize("make", [FedRep, Ditto])
def test_engines_agree(make: Any) -> None:
    """Two phases, and two models of a client in one phase."""
    one, other = (
        fit(make(), small_clients(), small_module(), 3, engine, 2, options=KEEP)
        for engine in ENGINES
    )
    assert_trees_close(one.server, other.server)
    assert_trees_close(one.client_state, other.client_state)


class Outlier(LocalOnly):
    """Client 2 sends a NaN in round 1."""

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        upload, kept = super().client_final(received, client_state, state, info)
        sent = torch.where((info.index == 2) & (info.round == 1), torch.nan, 0.0)
        return {**upload, "sent": sent}, kept


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_that_is_left_out_keeps_its_optimizer(engine: str) -> None:
    with pytest.warns(UserWarning, match="Round 1 left out 1 of 4 clients"):
        ran = fit(Outlier(), points(), Point("adam"), 3, engine, options=KEEP)
    for client, size in enumerate(SIZES):
        rounds = 2 if client == 2 else 3  # and nobody gets the optimizer of another
        got = ran.strategy.client_state_dict(client)["w"]
        torch.testing.assert_close(got, alone("adam", client, rounds * steps_of(size)))


def test_clients_that_leave_keep_their_optimizers(tmp_path: Path) -> None:
    def run(clients: list[int], rounds: int, path: Path | None = None) -> Fit:
        data = points().subset(clients)
        return fit(LocalOnly(), data, Point("adam"), rounds, ckpt_path=path, options=KEEP)

    path = run([0, 1], 1).save(tmp_path / "one.ckpt")
    path = run([1], 2, path).save(tmp_path / "two.ckpt")
    ran = run([1, 0], 3, path)
    for client, times in ((0, 2), (1, 3)):
        got = rows(ran.client_state, torch.tensor([client]))["model"]["w"][0]
        want = alone("adam", client, times * steps_of(SIZES[client]))
        torch.testing.assert_close(got, want)


class Measures(FedAvg):
    measures_travel = True


@pytest.mark.parametrize(("method", "why"), [(IFCA(), "another cluster"), (Measures(), "at rest")])
def test_methods_for_which_it_means_nothing_refuse_it(method: Method, why: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"keep_optimizer_state=False .* {why}"):
        fit(method, points(), Point("momentum"), options=KEEP)
