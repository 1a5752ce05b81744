"""IFCA: the choice is by training loss, and each model is averaged over those who chose it."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pfl import FederatedStrategy
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.methods import IFCA, FedAvg
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    assert_trees_equal,
    fit,
    quadratic_clients,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.case import Bytes, Case, D
from tests.methods.networks import SCALARS, cohorts, plain_module
from tests.methods.quadratics import LR, closed_form
from tests.methods.references.ifca import ifca_gradient_round, ifca_round
from tests.methods.references.training import batches, load, train

CASE = Case(
    method=lambda: IFCA(2),
    bytes={
        # All models down; up one and its number.
        "defaults": Bytes(lambda: IFCA(3), 3 * 4 * D, 4 * D + 8),
    },
    twin=lambda: FedAvg(weighting="uniform"),
)

A = np.array([1.0, 3.0, 0.5, 2.0, 1.5])
C = np.array([[0.0], [0.2], [4.0], [5.0], [-0.3]])
STARTS = (-1.0, 6.0, 100.0)
"""The last one is far from everybody: its cluster stays empty."""


def given(*values: float) -> list[dict[str, Tensor]]:
    return [{"w": torch.tensor([value], dtype=torch.float64)} for value in values]


def quadratics() -> Any:
    return quadratic_clients(A.tolist(), C.tolist(), [4, 1, 7, 2, 3], batch_size=3, shuffle=True)


def loss(k: int, w: Any) -> float:
    return float(A[k] / 2 * ((w - C[k]) ** 2).sum())


def descended(k: int, w: Any) -> Any:
    steps = -(-[4, 1, 7, 2, 3][k] // 3)
    return C[k] + (1 - LR * A[k]) ** steps * (w - C[k])


class TestIFCA:
    @closed_form
    @pytest.mark.parametrize("participation", [5, 3])
    def test_rounds_follow_the_algorithm_box(self, engine: str, participation: int) -> None:
        method = IFCA(3, initial=given(*STARTS))
        module = QuadraticModule(lr=LR)
        run = fit(method, quadratics(), module, 4, engine, participation=participation)
        models = [np.array([value]) for value in STARTS]
        last = dict.fromkeys(range(5), -1)
        for number in range(4):
            cohort = cohorts(4, participation, eligible=torch.arange(5))[number].tolist()
            models, choice = ifca_round(models, cohort, loss, descended)
            last |= choice
            server = run.recorder.servers[number + 1]
            np.testing.assert_allclose(server["models"]["w"], np.stack(models), rtol=1e-10)
            assert server["cluster"].tolist() == [last[k] for k in range(5)]
        assert models[2] == STARTS[2]
        popular = np.bincount([j for j in last.values() if j >= 0]).argmax()
        for client in range(5):
            chosen = last[client] if last[client] >= 0 else popular
            found = run.strategy.client_state_dict(client)["w"].numpy()
            np.testing.assert_allclose(found, models[chosen], rtol=1e-10)

    def test_gradient_averaging_follows_the_algorithm_box(self, engine: str) -> None:
        run = fit(
            IFCA(3, averaging="gradients", initial=given(*STARTS)),
            quadratics(),
            QuadraticModule(lr=LR),
            5,
            engine,
        )
        models = [np.array([value]) for value in STARTS]
        for number in range(5):
            models, choice = ifca_gradient_round(
                models, range(5), loss, lambda k, w: A[k] * (w - C[k]), LR
            )
            server = run.recorder.servers[number + 1]
            np.testing.assert_allclose(server["models"]["w"], np.stack(models), rtol=1e-10)
            assert server["cluster"].tolist() == [choice[k] for k in range(5)]

    def test_gradients_are_weighted_by_samples(self, engine: str) -> None:
        method = IFCA(1, averaging="gradients", initial=given(0.5), weighting="samples")
        run = fit(method, quadratics(), QuadraticModule(lr=LR), 1, engine)
        n = np.array([4, 1, 7, 2, 3])
        slope = sum(n[k] / 17 * A[k] * (0.5 - C[k]) for k in range(5))
        found = run.recorder.servers[1]["models"]["w"]
        np.testing.assert_allclose(found, [0.5 - LR * slope], rtol=1e-12)

    def test_a_network_trains_as_the_reference(self, engine: str) -> None:
        data = small_clients(shuffle=True)
        run = fit(IFCA(2, local_epochs=2), data, plain_module(), 3, engine, participation=3)
        start = plain_module()
        first = run.recorder.servers[0]["models"]
        models: Any = [{name: leaf[j] for name, leaf in first.items()} for j in range(2)]
        for number, cohort in enumerate(cohorts(3, 3)):
            choice, trained = {}, {}
            for k in cohort.tolist():
                x, y = data.gather(data.indices[k])
                with torch.no_grad():
                    losses = [F.cross_entropy(load(start, m).eval()(x), y).item() for m in models]
                choice[k] = int(np.argmin(losses))
                # Data are counted through the round: the measuring pass was its first.
                minibatches = batches(data, k, number, 2, first_epoch=1)
                trained[k] = dict(train(load(start, models[choice[k]]), minibatches).state_dict())
            for j in range(2):
                mine = [trained[k] for k in cohort.tolist() if choice[k] == j]
                if mine:
                    models[j] = {n: torch.stack([m[n] for m in mine]).mean(0) for n in mine[0]}
            found = run.recorder.servers[number + 1]["models"]
            expected = {n: torch.stack([m[n] for m in models]) for n in found}
            assert_trees_close(found, expected)

    def test_one_cluster_is_fedavg(self, engine: str) -> None:
        method = IFCA(1)
        assert method.notes(ParameterSplit(small_module())) == ["num_clusters=1 makes IFCA FedAvg."]
        run = fit(method, small_clients(), small_module(), 2, engine, participation=3)
        average = FedAvg(weighting="uniform")
        expected = fit(average, small_clients(), small_module(), 2, engine, participation=3)
        assert_trees_close(run.strategy.global_state_dict(), expected.strategy.global_state_dict())

    def test_planted_groups_are_found_in_one_round(self, engine: str) -> None:
        """Ten clients of two regressions; the models begin nearer to one each."""
        centers = torch.tensor([[2.0, 2.0]] * 5 + [[-2.0, -2.0]] * 5, dtype=torch.float64)
        starts = [{"w": torch.tensor([0.5 * s] * 2, dtype=torch.float64)} for s in (-1, 1)]
        data = quadratic_clients([1.0] * 10, centers)
        run = fit(IFCA(2, initial=starts), data, QuadraticModule(dim=2, lr=0.3), 20, engine)
        method: Any = run.strategy.method
        assert method.clusters(run.server).tolist() == [1] * 5 + [0] * 5
        for client in (0, 9):
            found = run.strategy.client_state_dict(client)["w"]
            torch.testing.assert_close(found, centers[client], rtol=1e-2, atol=0)


def test_models_that_are_alike_are_all_the_first() -> None:
    run = fit(IFCA(2, initial=given(1.0, 1.0)), quadratics(), QuadraticModule(lr=LR), 1)
    assert run.server["cluster"].tolist() == [0] * 5


def test_models_begin_different_and_follow_the_seed() -> None:
    def starts(seed: int) -> Any:
        return fit(IFCA(3), small_clients(), small_module(), 1, seed=seed).recorder.servers[0]

    first = starts(0)["models"]
    module = small_module()
    for name, leaf in first.items():
        assert torch.equal(leaf[0], module.state_dict()[name])
    layers = [name for name in first if name.endswith("weight") and first[name].ndim > 2]
    assert layers
    for name in layers:
        for i in range(3):
            for j in range(i):
                assert not torch.equal(first[name][i], first[name][j])
    assert_trees_equal(starts(0), starts(0))
    assert not torch.equal(starts(1)["models"][layers[0]][1], first[layers[0]][1])


def test_what_no_layer_draws_anew_gets_noise_of_its_size() -> None:
    module = QuadraticModule(dim=4000, start=2.0)
    data = quadratic_clients([1.0], torch.zeros(1, 4000))
    first, second = fit(IFCA(2), data, module, 1).recorder.servers[0]["models"]["w"]
    assert torch.equal(first, torch.full_like(first, 2.0))
    assert float((second - first).std()) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_clusters": 0}, "whole number >= 1, but got num_clusters=0"),
        ({"num_clusters": 2.0}, "whole number >= 1, but got num_clusters=2.0"),
        ({"restarts": -1}, "`restarts` to be a whole number >= 0, but got restarts=-1"),
        ({"trial_rounds": 0}, "`trial_rounds` to be a whole number >= 1, but got trial_rounds=0"),
        ({"restarts": 1, "initial": given(1.0, 2.0)}, "4 models, one for each cluster of each set"),
        (
            {"averaging": "gradients", "local_steps": 5},
            "one step on all samples, but got local_epochs=1, local_steps=5",
        ),
        ({"averaging": "mean"}, "'models' or 'gradients', but got averaging='mean'"),
        ({"initial": given(1.0)}, "to have 2 models, one for each cluster, but got 1"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        IFCA(**{"num_clusters": 2, **settings})


def test_models_of_another_module_are_refused() -> None:
    method = IFCA(2, initial=[{}, {}])
    with pytest.raises(ValueError, match=r"`initial\[0\]` to be a state_dict .* it has no 'w'"):
        fit(method, quadratics(), QuadraticModule(), 1)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_model_that_overflows_is_no_choice(engine: str, broken: int) -> None:
    """Its loss is not a number for a client, which takes the other one, in either order."""
    values = [1.0, 1.0]
    values[broken] = float("nan")
    run = fit(IFCA(2, initial=given(*values)), quadratics(), QuadraticModule(lr=LR), 1, engine)
    assert set(run.server["cluster"].tolist()) == {1 - broken}
    assert not run.recorder.rounds[0].rejected


def test_initial_models_have_the_module_s_shapes() -> None:
    method = IFCA(2, initial=[{"w": torch.zeros(1)}, {"w": torch.zeros(2)}])
    match = r"Expected 'w' of `initial\[1\]` to have the module's shape \(1,\), but got \(2,\)"
    with pytest.raises(ValueError, match=match):
        fit(method, quadratics(), QuadraticModule(lr=LR), 1)


def test_the_choice_counts_samples_not_minibatches(engine: str) -> None:
    """Of the samples 0, 0, 0, 5 the last is a minibatch of its own.

    The model 0 has the loss 25/2 on all samples, the model 4 has 3 * 8 + 1/2. By the means of the
    two minibatches it would be 25/2 against 8 + 1/2.
    """
    a, c = torch.ones(4).double(), torch.tensor([[0.0], [0.0], [0.0], [5.0]]).double()
    data = FederatedTensorDataset((a, c), [torch.arange(4)], batch_size=3)
    run = fit(IFCA(2, initial=given(4.0, 0.0)), data, QuadraticModule(lr=LR), 1, engine)
    assert run.server["cluster"].tolist() == [1]


# --- restarts ---

# Two groups at -1 and 1. Of a set {5, 9} the first model is everybody's best, takes all and goes to
# their mean 0, where it stays the best for all: one model. Of {-2, 2} each takes a group.
PLANTED = [-1.0, -1.0, 1.0, 1.0]
BAD, GOOD = (5.0, 9.0), (-2.0, 2.0)


def planted() -> Any:
    return quadratic_clients([1.0] * 4, PLANTED)


@pytest.mark.parametrize("averaging", ["models", "gradients"])
def test_restarts_find_what_an_unfortunate_start_misses(engine: str, averaging: Any) -> None:
    module, rounds = QuadraticModule(lr=0.5), 16
    alone = IFCA(2, averaging, given(*BAD))
    run = fit(alone, planted(), module, rounds, engine)
    assert run.server["cluster"].tolist() == [0] * 4
    assert float(run.models["w"].abs().max()) < 0.01
    method: Any = IFCA(2, averaging, given(*BAD, *GOOD, *BAD), restarts=2, trial_rounds=2)
    run = fit(method, planted(), module, rounds, engine)
    assert method.clusters(run.server).tolist() == [2, 2, 3, 3]
    torch.testing.assert_close(
        run.models["w"].flatten(), torch.tensor(PLANTED).double(), rtol=0, atol=0.15
    )
    # (w - c)^2 / 2 where the second round of each trial begins.
    servers = run.recorder.servers
    for number, at in enumerate((1, 3, 5)):
        models = servers[at]["models"]["w"].flatten()[2 * number : 2 * number + 2]
        losses = (models.unsqueeze(0) - torch.tensor(PLANTED).double().unsqueeze(1)).square() / 2
        assert float(run.server["trial_loss"][number]) == pytest.approx(
            losses.amin(1).mean().item()
        )
    # A set rests while another is tried, and a set that lost never moves again.
    for at, moves in enumerate([0, 0, 1, 1, 2, 2, 1, 1, 1]):
        before, after = (servers[k]["models"]["w"].view(3, 2) for k in (at, at + 1))
        assert (before != after).any(1).tolist() == [number == moves for number in range(3)]


def test_a_round_of_a_trial_sends_one_set() -> None:
    method = IFCA(3, restarts=2, trial_rounds=1)
    assert method.notes(ParameterSplit(plain_module())) == [
        "IFCA tries 3 sets of models in rounds 0 to 2."
    ]
    run = fit(method, small_clients(), plain_module(), 4)
    for round in run.recorder.rounds:
        assert round.bytes_down == 3 * 8 * SCALARS
        assert round.bytes_up == 8 * SCALARS + 8 + 8  # the choice, and its loss


@pytest.mark.filterwarnings("ignore:Expected more rounds than")
def test_who_chose_among_another_set_has_the_most_popular_model() -> None:
    """Clients 0 to 3 are evaluated in a set in which some of them have not chosen."""
    method = IFCA(2, initial=given(*GOOD, *GOOD), restarts=1, trial_rounds=1)
    run = fit(method, planted(), QuadraticModule(lr=0.5), 2, participation=3)
    cohort = set(run.recorder.rounds[1].info.index.tolist())
    assert len(cohort) == 3
    (away,) = set(range(4)) - cohort
    models = run.server["models"]["w"].flatten()[2:]
    chosen = [int(k >= 2) for k in range(4)]
    popular = int(sum(chosen[k] for k in cohort) > 1)
    expected = [models[popular if k == away else chosen[k]].item() for k in range(4)]
    assert run.models["w"].flatten().tolist() == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:Expected more rounds than")
@pytest.mark.parametrize("half", [1, 3, 5])
def test_a_resumed_trial_ends_as_the_whole_one(half: int, tmp_path: Path) -> None:
    def run(rounds: int, path: Path | None = None) -> Any:
        method = IFCA(2, restarts=1, trial_rounds=2)
        return fit(method, small_clients(), plain_module(), rounds, participation=3, ckpt_path=path)

    whole = run(6)
    resumed = run(6, run(half).save(tmp_path / "half.ckpt"))
    assert_trees_equal(resumed.server, whole.server)
    assert_trees_equal(resumed.client_state, whole.client_state)


@pytest.mark.parametrize("rounds", [3, 4, 5])
def test_a_run_that_ends_in_a_trial_is_warned_of(rounds: int) -> None:
    """Two sets are tried for two rounds each; the best one is in use from the fifth round on."""
    strategy: Any = FederatedStrategy(IFCA(2, restarts=1, trial_rounds=2), seed=0)
    flags: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    trainer = L.Trainer(max_epochs=rounds, accelerator="cpu", strategy=strategy, **flags)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(QuadraticModule(lr=0.5), planted())
    said = [str(one.message) for one in found if "in which IFCA tries" in str(one.message)]
    known = f"more rounds than the 4 .* 2 sets of models, but got max_epochs={rounds}, which ends"
    assert len(said) == (rounds <= 4)
    assert all(re.search(known, one) for one in said)
