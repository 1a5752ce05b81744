"""FedRep's linear case, against Algorithm 2 in NumPy and against what it must keep."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_pfl import FederatedDataModule, PersonalizedModule
from lightning_pfl.callbacks import NewClientAdaptation
from lightning_pfl.data import FreshDataModule, LinearRepresentation
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.inspect import SubspaceDistance
from lightning_pfl.methods import (
    FedAvg,
    FedRep,
    LinearFedRep,
    LocalOnly,
)
from lightning_pfl.methods.linear_fedrep import step_bound
from lightning_pfl.metrics.subspace import principal_angle_distance
from lightning_pfl.models import LinearRepresentation as Model
from lightning_pfl.testing import Fit, fit
from tests.methods.case import Bytes, Case
from tests.methods.networks import two_matrices
from tests.methods.quadratics import close, closed_form
from tests.methods.references import linear_fedrep as reference

CASE = Case(
    method=lambda: LinearFedRep(body_lr=0.02, ridge=0.1),
    bytes={
        # After round 0, whose moments are counted below: 25 inputs, 2 dimensions.
        "defaults": Bytes(
            lambda: LinearFedRep(body_lr=0.02),
            4 * 25 * 2,
            4 * 25 * 2,
            two_matrices,
            from_the_first_round=False,
        ),
    },
    twin=None,  # No setting makes it another method of linear models.
    published={"initialization": "moments", "head_solver": "exact", "weighting": "uniform"},
    problem={"make_module": two_matrices},
)

BODY, HEAD = "backbone.weight", "head.weight"
# Steps above the theorem's bound are legal; two tests below look at the warning.
pytestmark = pytest.mark.filterwarnings("ignore:.*Theorem 1")


def source(clients: int = 8, **settings: Any) -> LinearRepresentation:
    given = {"dim": 6, "rank": 2, "samples": 5, "test_samples": 3, "dtype": "float64", **settings}
    return LinearRepresentation(clients, **given)


def module(dim: int = 6, rank: int = 2) -> Model:
    torch.manual_seed(1)
    return Model(dim, rank, lr=0.05).double()


def run(method: Any, data: Any, model: Any = None, rounds: int = 3, **settings: Any) -> Fit:
    settings = {"limit_val_batches": 0, **settings}
    if isinstance(data, FreshDataModule):
        settings["reload_dataloaders_every_n_epochs"] = 1
    return fit(method, data, module() if model is None else model, rounds, **settings)


def fixed(of: LinearRepresentation, **settings: Any) -> FederatedDataModule:
    return FederatedDataModule(of, batch_size=50, **settings)


def of_client(fields: Any, client: int, samples: int) -> tuple[Any, Any]:
    rows = slice(client * samples, (client + 1) * samples)
    return fields[0][rows].numpy(), fields[1][rows].numpy()


class TestAlgorithm2:
    @closed_form
    @pytest.mark.parametrize("steps", [None, 1, 10])
    @pytest.mark.parametrize("samples", [5, 1])  # more samples than dimensions, and fewer
    def test_matches_the_reference(self, engine: str, steps: int | None, samples: int) -> None:
        problem = source(samples=samples)
        solver: Any = "exact" if steps is None else "gradient"
        rate = None if steps is None else 0.1
        method = LinearFedRep("module", solver, steps or 1, body_lr=0.05, head_lr=rate)
        begin, data = module(), FreshDataModule(problem)
        done = run(method, data, rounds=4, engine=engine, participation=0.5)
        cohorts = [(r.number, r.info.index.tolist()) for r in done.recorder.rounds]
        assert all(len(clients) == 4 for _, clients in cohorts)
        body, heads = reference.algorithm2(
            begin.representation.detach().numpy(),
            np.repeat(begin.state_dict()[HEAD].numpy(), 8, 0),
            lambda t, i: of_client(problem.draw(t), i, samples),
            cohorts,
            0.05,
            steps,
            0.1,
        )
        close(done.server["model"][BODY].T, torch.from_numpy(body))
        close(done.client_state["model"][HEAD].squeeze(1), torch.from_numpy(heads))

    def test_round_0_is_the_method_of_moments_of_all_clients(self, engine: str) -> None:
        problem = source()
        method = LinearFedRep(body_lr=0.05)
        done = run(method, fixed(problem), engine=engine, participation=2)
        samples = [of_client(problem.load().fields, i, 5) for i in range(8)]
        first = done.recorder.servers[1]["model"][BODY].T
        expected = torch.from_numpy(reference.moments(samples, 2))
        # Signs of eigenvectors are arbitrary: their products with themselves are not.
        for column in range(2):
            a, b = first[:, column], expected[:, column]
            close(a.outer(a), b.outer(b))
        assert [len(r.info) for r in done.recorder.rounds] == [8, 2, 2]
        # Heads stay with the clients, and as they were.
        assert torch.equal(
            done.recorder.banks[0]["model"][HEAD], done.recorder.banks[1]["model"][HEAD]
        )
        body, _ = reference.algorithm2(
            first.numpy(),
            np.zeros((8, 2)),
            lambda t, i: samples[i],
            [(r.number, r.info.index.tolist()) for r in done.recorder.rounds[1:]],
            0.05,
        )
        close(done.server["model"][BODY].T, torch.from_numpy(body))

    def test_heads_in_bfloat16_are_the_least_squares_of_their_features(self, engine: str) -> None:
        """Of the last round's body, in eight bits; features are rounded to them, too."""
        problem = source(samples=40, dtype="float32")
        begin = module().bfloat16()
        method = LinearFedRep("module", body_lr=0.05)
        settings: Any = {"engine": engine, "precision": "bf16-true"}
        done = run(method, fixed(problem), begin, 2, **settings)
        body = done.recorder.servers[1]["model"][BODY].double().numpy()
        for client in range(8):
            x, y = of_client(problem.load().fields, client, 40)
            head = np.linalg.lstsq(x @ body.T, y, rcond=None)[0].ravel()
            found = done.client_state["model"][HEAD][client].flatten().double().numpy()
            assert np.linalg.norm(found - head) < 0.03 * np.linalg.norm(head)

    @pytest.mark.parametrize("weighting", ["samples", "uniform"])
    def test_ragged_clients_and_the_modules_own_step(self, engine: str, weighting: Any) -> None:
        """Weights of the moments and of the bodies; `body_lr=None` is the optimizer's 0.05."""
        sizes = [5, 1, 9, 3]
        rng = np.random.default_rng(0)
        x = [rng.normal(size=(m, 6)) for m in sizes]
        samples = [(one, rng.normal(size=len(one))) for one in x]
        fields = tuple(
            torch.from_numpy(np.concatenate(part)) for part in zip(*samples, strict=True)
        )
        data = FederatedTensorDataset(fields, torch.arange(18).split(sizes), batch_size=50)
        done = run(LinearFedRep(weighting=weighting), data, rounds=4, engine=engine)
        weights = sizes if weighting == "samples" else [1] * 4
        first = done.recorder.servers[1]["model"][BODY].T
        expected = torch.from_numpy(reference.moments(samples, 2, weights))
        for a, b in zip(first.T, expected.T, strict=True):
            close(a.outer(a), b.outer(b))
        body, heads = reference.algorithm2(
            first.numpy(),
            np.zeros((4, 2)),
            lambda t, i: samples[i],
            [(t, range(4)) for t in (1, 2, 3)],
            0.05,
            weights=weights,
        )
        close(done.server["model"][BODY].T, torch.from_numpy(body))
        close(done.client_state["model"][HEAD].squeeze(1), torch.from_numpy(heads))

    @pytest.mark.parametrize(("body_lr", "step"), [(0.03, 0.03), (None, 0.05)])
    def test_heads_step_like_the_body_unless_they_are_told(
        self, engine: str, body_lr: float | None, step: float
    ) -> None:
        problem, begin = source(), module()
        method = LinearFedRep("module", "gradient", 3, body_lr=body_lr)
        done = run(method, fixed(problem), rounds=2, engine=engine)
        fields = problem.load().fields
        body, heads = reference.algorithm2(
            begin.representation.detach().numpy(),
            np.repeat(begin.state_dict()[HEAD].numpy(), 8, 0),
            lambda t, i: of_client(fields, i, 5),
            [(t, range(8)) for t in (0, 1)],
            step,
            head_steps=3,
            head_lr=step,
        )
        close(done.server["model"][BODY].T, torch.from_numpy(body))
        close(done.client_state["model"][HEAD].squeeze(1), torch.from_numpy(heads))

    def test_the_truth_stays_without_noise(self, engine: str) -> None:
        problem = source(noise_variance=0.0)
        basis, heads = (torch.from_numpy(part) for part in problem.truth())
        model = module()
        with torch.no_grad():
            model.backbone.get_parameter("weight").copy_(basis.T)
        done = run(LinearFedRep("module", body_lr=0.1), fixed(problem), model, engine=engine)
        close(done.server["model"][BODY], basis.T)
        close(done.client_state["model"][HEAD].squeeze(1), heads)

    def test_heads_of_clients_that_were_never_sampled_stay(self, engine: str) -> None:
        done = run(LinearFedRep(body_lr=0.05), fixed(source()), engine=engine, participation=2)
        sampled = {k for r in done.recorder.rounds[1:] for k in r.info.index.tolist()}
        moved = (done.client_state["model"][HEAD] != module().state_dict()[HEAD]).flatten(1).any(1)
        assert {k for k in range(8) if moved[k]} == sampled
        assert len(sampled) < 8

    def test_other_methods_run_on_the_same_samples(self, engine: str) -> None:
        """Gradient descent on the same half squares: one step of everything is FedAvg's."""
        problem = source()
        batch: dict[str, Any] = {"batch_size": 5}
        done = run(
            FedAvg(local_epochs=None, local_steps=1, weighting="uniform"),
            FreshDataModule(problem, **batch),
            rounds=1,
            engine=engine,
        )
        begin = module()
        w, b = begin.state_dict()[HEAD][0].numpy(), begin.representation.detach().numpy()
        gradients = []
        for i in range(8):
            x, y = of_client(problem.draw(0), i, 5)
            gradients.append(x.T @ np.outer(x @ b @ w - y, w) / 5)
        close(done.server["model"][BODY].T, torch.from_numpy(b - 0.05 * np.mean(gradients, 0)))
        for method in (FedRep(head_steps=3, body_steps=1), LocalOnly()):
            other = run(method, FreshDataModule(problem, **batch), engine=engine)
            assert all(torch.isfinite(leaf).all() for leaf in other.models.values())


def distances(clients: int, seed: int, rounds: int, **settings: Any) -> dict[int, float]:
    problem = LinearRepresentation(clients, 10, 2, 5, test_samples=1, seed=seed)
    monitor = SubspaceDistance(torch.from_numpy(problem.truth()[0]))
    method = LinearFedRep(body_lr=0.2, **settings)
    run(
        method,
        FreshDataModule(problem),
        Model(10, 2),
        rounds,
        participation=0.1,
        callbacks=[monitor],
    )
    return monitor.distances


@pytest.mark.slow
def test_exact_heads_and_more_clients_are_faster() -> None:
    """Round 20, medians of three seeds; the anchors are 0.041, 0.150 and 0.011."""
    by_gradient = {"head_solver": "gradient", "head_lr": 0.2}
    runs = {
        "FedRep": [distances(100, seed, 21)[20] for seed in range(3)],
        "GD-GD": [distances(100, seed, 21, **by_gradient)[20] for seed in range(3)],
        "1000": [distances(1000, seed, 21)[20] for seed in range(3)],
    }
    found = {name: statistics.median(values) for name, values in runs.items()}
    assert found["1000"] < found["FedRep"] / 2
    assert found["FedRep"] < found["GD-GD"] / 2


def test_bytes_of_moments_and_of_bodies() -> None:
    """Round 0: nothing down, the triangle of a symmetric d x d matrix up; then d k both ways."""
    done = run(LinearFedRep(body_lr=0.05), fixed(source(dtype="float32")), module().float())
    sent = [(r.bytes_down, r.bytes_up) for r in done.recorder.rounds]
    assert sent == [(0, 4 * 6 * 7 // 2), (4 * 6 * 2, 4 * 6 * 2), (4 * 6 * 2, 4 * 6 * 2)]


def test_new_clients_solve_for_their_heads_and_change_nothing_else(engine: str) -> None:
    problem = source(10, new_clients=4, new_samples=9, noise_variance=0.0, samples=20)
    data = fixed(problem, new_clients=4)
    new = NewClientAdaptation(samples=[1, 2, 9], epochs=1)
    method = LinearFedRep(body_lr=0.2)
    done = run(method, data, rounds=60, engine=engine, callbacks=[new])
    after = done.recorder.servers[-1]["model"][BODY]
    assert torch.equal(done.server["model"][BODY], after)
    assert torch.equal(done.client_state["model"][HEAD], done.recorder.banks[-1]["model"][HEAD])
    for adapted in new.results:
        assert all(torch.equal(body, after) for body in adapted.models[BODY])
    one, two, nine = (adapted.models[HEAD].squeeze(1) for adapted in new.results)
    train = data.new_clients("train")
    for client, row in enumerate(train.indices):
        x, y = train.gather(row)
        close(nine[client], torch.linalg.lstsq(x @ after.T, y.unsqueeze(1)).solution[:, 0])
    errors = [float(adapted.evaluation.values["test_loss"].median()) for adapted in new.results]
    # The dimension of the subspace is 2.
    assert errors[1] < 1e-3 * errors[0]
    assert not torch.allclose(one, two)


def test_a_new_client_needs_all_samples_at_once() -> None:
    data = FederatedDataModule(source(), batch_size=3, new_clients=2)
    new = NewClientAdaptation(samples=[5], epochs=1)
    with pytest.raises(Exception, match=r"with all samples of a new client.*got [23] samples"):
        run(LinearFedRep(body_lr=0.05), data, callbacks=[new])


def test_step_bound_is_that_of_theorem_1() -> None:
    """Heads of norm sqrt(2) along both axes: W^T W / 2 is the identity."""
    assert step_bound(2**0.5 * torch.eye(2)) == pytest.approx((1.0, 0.25), rel=1e-6)
    assert step_bound(torch.zeros(3, 2)) == (0.0, torch.inf)


def test_a_step_above_the_bound_is_warned_of_once() -> None:
    with pytest.warns(UserWarning, match=r"at most 1/\(4 sigma_max\^2\) = .* but got 0.9") as w:
        done = run(LinearFedRep(body_lr=0.9), fixed(source()), rounds=4)
    assert sum("Theorem 1" in str(one.message) for one in w) == 1
    heads = done.client_state["model"][HEAD].flatten(1)
    square = float(np.linalg.svd(heads.numpy() / 8**0.5)[1][0] ** 2)
    assert done.metrics["fedrep/sigma_max_squared"] == pytest.approx(square)
    assert done.metrics["fedrep/step_bound"] == pytest.approx(1 / (4 * square))


@pytest.mark.filterwarnings("error:.*Theorem 1")
def test_a_step_below_the_bound_is_not_warned_of() -> None:
    done = run(LinearFedRep(body_lr=0.01), fixed(source()), rounds=4)
    assert done.metrics["fedrep/step_bound"] > 0.01


def test_moments_find_the_subspace() -> None:
    """Median distance of five seeds with 1000 clients of 5 samples; the anchor is 0.158."""
    found = []
    for seed in range(5):
        problem = LinearRepresentation(1000, 10, 2, 5, test_samples=1, seed=seed, dtype="float64")
        done = run(
            LinearFedRep(), fixed(problem), module(10), rounds=1, options={"chunk_size": 500}
        )
        truth = torch.from_numpy(problem.truth()[0])
        found.append(float(principal_angle_distance(done.server["model"][BODY].T, truth)))
    assert 0.08 < statistics.median(found) < 0.24


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"initialization": "svd"}, r"`initialization` to be 'moments' or 'module', .*'svd'"),
        ({"head_solver": "sgd"}, r"`head_solver` to be 'exact' or 'gradient', .*'sgd'"),
        ({"head_steps": 0}, r"`head_steps` to be a whole number >= 1, .*head_steps=0"),
        ({"head_steps": 5}, r"no `head_steps` for exact heads, but got head_steps=5"),
        ({"body_lr": -1.0}, r"`body_lr` to be a finite number >= 0, but got body_lr=-1.0"),
        ({"head_lr": float("nan")}, r"`head_lr` to be a finite number >= 0, but got head_lr=nan"),
        ({"ridge": -0.1}, r"`ridge` to be a finite number >= 0, but got ridge=-0.1"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LinearFedRep(**settings)


@pytest.mark.parametrize(
    "model",
    [
        PersonalizedModule(nn.Linear(6, 2), nn.Linear(2, 1, bias=False), loss="mse"),
        PersonalizedModule(nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False), loss="mse"),
        PersonalizedModule(nn.Identity(), nn.Linear(6, 1, bias=False), loss="mse"),
    ],
    ids=["bias", "outputs", "no backbone"],
)
def test_other_models_are_refused(model: PersonalizedModule) -> None:
    with pytest.raises(MisconfigurationException, match="Expected a linear model of two matrices"):
        run(LinearFedRep(), fixed(source()), model.double())


def test_inputs_of_another_size_are_refused() -> None:
    with pytest.raises(Exception, match="Expected samples of 5 inputs and one target"):
        run(LinearFedRep(), fixed(source()), module(5))
