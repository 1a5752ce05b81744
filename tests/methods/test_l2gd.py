r"""L2GD: with the learning rate eta = alpha / (n (1 - p)) its rounds are the paper's iterations."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pfl.contract.known import Known
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.methods import L2GD, LocalOnly
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    assert_trees_equal,
    descend,
    fit,
    local_round,
    quadratic_clients,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.case import Case, D, bytes_of_rounds
from tests.methods.networks import SCALARS, cohorts, plain_module
from tests.methods.quadratics import LR, SAMPLES, STEPS, A, C, close, closed_form, ragged
from tests.methods.references.apfl import gradient
from tests.methods.references.l2gd import l2gd
from tests.methods.references.training import batches

CASE = Case(
    method=lambda: L2GD(2.0, 0.5, local_epochs=2),
    bytes=None,
    twin=lambda: L2GD(0.0),
    published={"mixing_weight": 0.5, "local_steps": 1},
)

L4 = np.array([0.0, 0.1, 1.0, 1.1])


def coins(rounds: int, p: float = 0.5, seed: int = 0) -> list[bool]:
    method = L2GD(aggregation_probability=p)
    method.bind(Known.of(ParameterSplit(QuadraticModule()), 1, seed))
    return [method.aggregates(number) for number in range(rounds)]


def four(**settings: Any) -> Any:
    return quadratic_clients(np.ones(4).tolist(), L4.tolist(), **settings)


def test_the_reference_finds_the_optimum() -> None:
    """(a_i + lambda mean(a)) / (1 + lambda), as the time average of iterates around it."""
    flips = (np.random.default_rng(0).random(60_000) < 0.5).tolist()
    path = l2gd(np.zeros((4, 1)), lambda x, _: x - L4[:, None], flips, 0.05, 2.0, 0.5)
    average = np.mean([x[:, 0] for x in list(path)[10_000:]], axis=0)
    assert average == pytest.approx((L4 + 2 * L4.mean()) / 3, abs=4e-3)


class TestL2GD:
    @closed_form
    @pytest.mark.parametrize("p", [0.5, 0.65])
    def test_rounds_are_the_papers_iterations(self, engine: str, p: float) -> None:
        alpha, lam = 0.4, 2.0
        module = QuadraticModule(lr=alpha / (4 * (1 - p)), start=0.2)
        run = fit(L2GD(lam, p), four(), module, 25, engine)
        flips = coins(25, p)
        assert any(a and b for a, b in pairwise(flips))
        path = l2gd(np.full((4, 1), 0.2), lambda x, _: x - L4[:, None], flips, alpha, lam, p)
        for x, client_states in zip(path, run.recorder.banks[1:], strict=True):
            close(client_states["model"]["w"], torch.from_numpy(x))

    @pytest.mark.parametrize("lam", [0.1, 1.0, 10.0])
    def test_expected_steps_cancel_at_the_optimum(self, engine: Any, lam: float) -> None:
        """Q2: x_i = (a_i c_i + lambda m) / (a_i + lambda), with m their mean."""
        printed = {0.1: (0.046875, 0.984375), 1.0: (0.3, 0.9), 10.0: (0.652174, 0.782609)}
        a, c = np.array([1.0, 3.0]), np.array([0.0, 1.0])
        # Summing a_i (c_i - x_i) = lambda (x_i - m) over i: the weights a lambda / (a + lambda).
        weights = a * lam / (a + lam)
        m = (weights * c).sum() / weights.sum()
        star = (a * c + lam * m) / (a + lam)
        assert star == pytest.approx(printed[lam], abs=5e-7)
        p, flips = 0.6, coins(20, 0.6)
        x = torch.from_numpy(star)[:, None]
        mean = torch.full((1,), float(star.mean()), dtype=torch.float64)
        client_state = {"model": {"w": x}, "mean": {"w": mean.expand(2, 1)}}
        server = {"model": {"w": mean}, "informed": torch.ones(2, dtype=torch.bool)}
        expected = torch.zeros_like(x)
        for coin, probability in ((False, 1 - p), (True, p)):
            outcome = local_round(
                L2GD(lam, p),
                QuadraticModule(lr=0.05),
                quadratic_clients(),
                engine,
                round=flips.index(coin),
                server=server,
                client_state=client_state,
            )
            moved = outcome.result.client_state["model"]["w"] - x
            assert float(moved.abs().max()) > 1e-4
            expected += probability * moved
        torch.testing.assert_close(expected, torch.zeros_like(x), rtol=0, atol=1e-15)

    def test_steps_towards_the_mean_keep_it_and_replace_nothing(self, engine: str) -> None:
        recorder = fit(L2GD(1.0), four(), QuadraticModule(), 12, engine).recorder
        for flip, before, after in zip(coins(12), recorder.banks, recorder.banks[1:], strict=False):
            x, y = before["model"]["w"], after["model"]["w"]
            if flip:
                close(y.mean(0), x.mean(0))
                close(y - y.mean(0), (1 - 0.1) * (x - x.mean(0)))

    def test_without_penalty_every_client_trains_alone(self, engine: str) -> None:
        run = fit(L2GD(0.0, local_epochs=1), ragged(), QuadraticModule(2, LR, 0.5), 6, engine)
        alone = sum(not flip for flip in coins(6))
        start = torch.full((2,), 0.5, dtype=torch.float64)
        close(run.models["w"], descend(start, A, C, LR, alone * STEPS))

    def test_a_first_local_round_is_local_training(self, engine: str) -> None:
        assert not coins(1)[0]
        a = fit(L2GD(2.0, local_epochs=2), small_clients(), small_module(), 1, engine)
        b = fit(LocalOnly(local_epochs=2), small_clients(), small_module(), 1, engine)
        assert_trees_equal(a.models, b.models)

    def test_partial_participation(self, engine: str) -> None:
        """The mean is that of the cohort before the coin turned."""
        run = fit(L2GD(2.0), ragged(), QuadraticModule(2, LR, 0.5), 10, engine, participation=2)
        x = torch.full((4, 2), 0.5, dtype=torch.float64)
        mean, flips = x[0], coins(11)
        some = SAMPLES.nonzero().flatten()
        for number, cohort in enumerate(cohorts(10, 2, eligible=some)):
            if flips[number]:
                x[cohort] -= LR * 2.0 * (x[cohort] - mean)
            else:
                x[cohort] = descend(x[cohort], A[cohort], C[cohort], LR, 1)
                mean = x[cohort].mean(0) if flips[number + 1] else mean
        close(run.models["w"], x)

    def test_matches_the_reference_on_a_network(self, engine: str) -> None:
        data, p, lam, lr, rounds = small_clients().subset([0, 2, 3, 4]), 0.4, 3.0, 0.1, 8
        run = fit(L2GD(lam, p), data, plain_module(lr), rounds, engine)
        module = plain_module()
        shapes = {n: leaf.shape for n, leaf in module.state_dict().items()}

        def unflatten(x: np.ndarray) -> dict[str, Tensor]:
            parts = torch.from_numpy(x).split([s.numel() for s in shapes.values()])
            return {n: part.view(s) for (n, s), part in zip(shapes.items(), parts, strict=True)}

        def gradients(x: np.ndarray, t: int) -> np.ndarray:
            found = []
            for k in range(4):
                grads = gradient(module, unflatten(x[k]), next(batches(data, k, t, 1)))
                found.append(torch.cat([g.flatten() for g in grads.values()]).numpy())
            return np.stack(found)

        flat = torch.cat([leaf.flatten() for leaf in module.state_dict().values()]).numpy()
        alpha = lr * 4 * (1 - p)
        *_, last = l2gd(np.tile(flat, (4, 1)), gradients, coins(rounds, p), alpha, lam, p)
        assert any(coins(rounds, p))
        states = [unflatten(x) for x in last]
        assert_trees_close(run.models, {n: torch.stack([s[n] for s in states]) for n in shapes})

    def test_a_model_travels_only_where_the_coin_turns(self, engine: str) -> None:
        method = L2GD(1.0, 0.5)
        rounds = fit(method, small_clients(), plain_module(), 14, engine).recorder.rounds
        flips = coins(15)
        size = 8 * SCALARS
        for number, round in enumerate(rounds):
            turned = flips[number] and not (number and flips[number - 1])
            sends = flips[number + 1] and not flips[number]
            assert (round.bytes_down, round.bytes_up) == (size * turned, size * sends)
        assert sum(r.bytes_up > 0 for r in rounds) > 2

    def test_counters_of_batches_do_not_move(self, engine: str) -> None:
        run = fit(L2GD(4.0, local_epochs=1), small_clients(), small_module(), 2, engine)
        assert coins(2) == [False, True]
        before, after = (client_states["model"] for client_states in run.recorder.banks[1:])
        name = "backbone.1.num_batches_tracked"
        assert torch.equal(before[name], after[name])
        assert not torch.equal(before["backbone.1.running_mean"], after["backbone.1.running_mean"])


def test_the_coin_is_fair_to_its_probability_and_follows_from_seed_and_round() -> None:
    assert coins(4000, 0.3).count(True) == pytest.approx(1200, abs=4 * (4000 * 0.21) ** 0.5)
    assert coins(30) == coins(30)
    assert coins(30) != coins(30, seed=1)


def test_moving_beyond_the_mean_is_refused() -> None:
    with pytest.raises(ValueError, match=r"to be at most 1, but got 2 with lr=0.1, mixing_w.*=20"):
        fit(L2GD(20.0), four(), QuadraticModule(lr=0.1), 3)


@pytest.mark.parametrize("bad", [0.0, 1.0, float("nan")])
def test_the_probability_is_one(bad: float) -> None:
    with pytest.raises(
        ValueError,
        match=rf"`aggregation_probability` to be in \(0, 1\), both ends excluded, .*={bad}",
    ):
        L2GD(aggregation_probability=bad)


def test_l2gd_sends_a_model_where_the_coin_turns_and_nothing_elsewhere() -> None:
    method = L2GD(1.0, 0.4)
    rounds = bytes_of_rounds(method, plain_module(), 12)
    coins = [False, *(method.aggregates(number) for number in range(13))]
    for (down, up), before, now, after in zip(rounds, coins, coins[1:], coins[2:], strict=False):
        assert down == 4 * D * (now and not before)
        assert up == 4 * D * (after and not now)
    assert 0 < sum(up > 0 for _, up in rounds) < 12
