r"""FedMAP on quadratics: with a Gaussian prior the local steps are ``descend`` to
(a c + gamma / variance) / (a + 1 / variance)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pfl.callbacks import NewClientAdaptation
from lightning_pfl.core.tree import Tree
from lightning_pfl.methods import FedMAP, LocalOnly, PFedMe
from lightning_pfl.priors import (
    DiagonalGaussianPrior,
    GaussianPrior,
    LaplacePrior,
    Prior,
)
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    assert_trees_equal,
    descend,
    fit,
    local_round,
    q2,
    quadratic_clients,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.case import WITH_BATCHNORM, Bytes, Case, D
from tests.methods.networks import cohorts, plain_module
from tests.methods.quadratics import (
    LR,
    SAMPLES,
    STEPS,
    A,
    C,
    close,
    closed_form,
    mean,
    ragged,
)
from tests.methods.references.fedmap import fedmap
from tests.methods.split_quadratic import SplitQuadraticModule

CASE = Case(
    method=lambda: FedMAP(DiagonalGaussianPrior(0.5), log_envelope=True),
    bytes={
        # The logarithm of the weight is a double.
        "defaults": Bytes(FedMAP, 4 * D, 4 * D + 8),
        "learned variances": Bytes(lambda: FedMAP(DiagonalGaussianPrior()), 8 * D, 4 * D + 8),
        # Nothing is measured; or one more double, with the weight or without.
        "by samples": Bytes(lambda: FedMAP(weighting="samples"), 4 * D, 4 * D),
        "uniform": Bytes(lambda: FedMAP(weighting="uniform"), 4 * D, 4 * D),
        "envelope": Bytes(lambda: FedMAP(log_envelope=True), 4 * D, 4 * D + 16),
        "by samples, envelope": Bytes(
            lambda: FedMAP(weighting="samples", log_envelope=True), 4 * D, 4 * D + 8
        ),
        # All but the buffers.
        "with BatchNorm": Bytes(FedMAP, 4 * WITH_BATCHNORM, 4 * WITH_BATCHNORM + 8, small_module),
    },
    twin=LocalOnly,
    published={"weighting": "posterior", "data_term": "mean", "prior_lr": None},
)

W0 = torch.full((2,), 0.5, dtype=torch.float64)
WEIGHTINGS = ("posterior", "exact", "per_sample", "samples", "uniform")


def exact(variance: float, lr: float | None = None, **settings: Any) -> dict[str, Any]:
    """Settings that solve the local problem on Q2 to rounding: curvatures 1 and 3, plus that of
    the prior; with ``rate`` = 1 / (2 + 1 / variance) each step leaves at most half of the error."""
    given = {"weighting": "uniform", "local_epochs": None, "local_steps": 40, **settings}
    return {"method": FedMAP(GaussianPrior(variance), prior_lr=lr, **given), "data": q2()}


def rate(variance: float) -> float:
    return 1 / (2 + 1 / variance)


EXACT = exact(1.0, local_steps=20)
"""With variance 1 each step leaves a third, and rounds begin where the last one ended."""


def fixed_point(variance: float) -> tuple[float, list[float]]:
    """gamma = sum(w A a) / sum(w A), A = H / (variance H + 1), and theta there."""
    weight = [h / (variance * h + 1) for h in (1.0, 3.0)]
    gamma = weight[1] / sum(weight)
    return gamma, [
        (h * a * variance + gamma) / (h * variance + 1) for h, a in ((1.0, 0.0), (3.0, 1.0))
    ]


class TestQ2:
    @pytest.mark.parametrize(
        ("variance", "printed"),
        [(0.001, 0.749626), (0.1, 0.717391), (1, 0.6), (10, 0.515625), (1000, 0.500167)],
    )
    def test_the_fixed_point_stays_and_is_reached(
        self, engine: str, variance: float, printed: float
    ) -> None:
        """A small variance moves the prior little in a round. A step by the inverse curvature of
        the envelope, which is quadratic here, reaches the minimum in one."""
        gamma, theta = fixed_point(variance)
        assert gamma == pytest.approx(printed, abs=5e-7)
        curvature = sum(h / (variance * h + 1) for h in (1.0, 3.0)) / 2
        for lr, start in ((None, gamma), (1 / curvature, 0.0)):
            run = fit(
                **exact(variance, lr),
                module=QuadraticModule(1, rate(variance), start),
                rounds=1,
                engine=engine,
            )
            assert float(run.server["model"]["w"]) == pytest.approx(gamma, abs=1e-9)
            again = fit(
                **exact(variance),
                module=QuadraticModule(1, rate(variance), gamma),
                rounds=1,
                engine=engine,
            )
            assert again.models["w"].flatten().tolist() == pytest.approx(theta, abs=1e-9)

    @pytest.mark.slow
    def test_rounds_converge_to_it(self, engine: str) -> None:
        run = fit(**EXACT, module=QuadraticModule(1, rate(1.0)), rounds=20, engine=engine)
        assert float(run.server["model"]["w"]) == pytest.approx(0.6, abs=1e-8)
        assert run.models["w"].flatten().tolist() == pytest.approx([0.3, 0.9], abs=1e-8)

    def test_equation_9_is_a_step_of_equation_3_by_the_variance(self, engine: str) -> None:
        runs = [
            fit(
                **exact(2.0, lr),
                module=QuadraticModule(1, rate(2.0), 0.3),
                rounds=4,
                engine=engine,
            ).recorder.servers
            for lr in (None, 2.0)
        ]
        for a, b in zip(*runs, strict=True):
            assert_trees_close(a, b)
        assert float(runs[0][0]["model"]["w"]) != float(runs[0][-1]["model"]["w"])

    @pytest.mark.slow
    def test_personal_models_are_those_of_pfedme_and_l2gd(self, engine: str) -> None:
        """For moreau_weight = 1 / variance all have one optimum: L2GD's is where each model is its
        mean minus the client's gradient over the mixing weight."""
        ours = fit(**EXACT, module=QuadraticModule(1, rate(1.0)), rounds=20, engine=engine)
        theirs = PFedMe(1.0, 22, 0.3, local_epochs=None, local_steps=1)
        other = fit(theirs, q2(), QuadraticModule(lr=1.5), 9, engine)
        assert_trees_close(ours.models, other.models, rtol=1e-8, atol=1e-8)
        theta = ours.models["w"].flatten()
        slope = torch.tensor([1.0, 3.0]) * (theta - torch.tensor([0.0, 1.0]))
        torch.testing.assert_close(theta, theta.mean() - slope, rtol=0, atol=1e-8)

    def test_one_client_takes_proximal_points(self, engine: str) -> None:
        """x <- (a c + x / variance) / (a + 1 / variance), which ends at c."""
        data = quadratic_clients([2.0], [[3.0]])
        method = FedMAP(GaussianPrior(0.5), local_epochs=None, local_steps=15)
        recorder = fit(method, data, QuadraticModule(1, 0.2), 20, engine).recorder
        x = 0.0
        for server in recorder.servers[1:]:
            x = (2.0 * 3.0 + x / 0.5) / (2.0 + 1 / 0.5)
            assert float(server["model"]["w"]) == pytest.approx(x, abs=1e-10)
        assert x == pytest.approx(3.0, abs=1e-5)


def by_formula(in_rounds: list[Tensor], variance: float) -> tuple[Tensor, Tensor]:
    """Gaussian prior, weights by samples, one epoch from where each client stopped."""
    gamma, client_state, begun = W0, W0.repeat(4, 1), set[int]()
    for cohort in in_rounds:
        for k in cohort.tolist():
            a = A[k, None] + 1 / variance
            star = (A[k] * C[k] + gamma / variance) / a
            start = client_state[k] if k in begun else gamma
            client_state[k] = descend(start, a, star[None], LR, int(STEPS[k]))[0]
            begun.add(k)
        gamma = mean(client_state[cohort], SAMPLES[cohort])
    unbegun = [k for k in range(4) if k not in begun]
    client_state[unbegun] = gamma
    return gamma, client_state


class TestFedMAP:
    @closed_form
    @pytest.mark.parametrize("participation", [3, 2, 1])
    def test_rounds_match_the_closed_form(self, engine: str, participation: int) -> None:
        """Also those of clients that weren't there: theirs wait, and begin at the prior's mean."""
        method = FedMAP(GaussianPrior(1.5), weighting="samples")
        module = QuadraticModule(2, LR, 0.5)
        run = fit(method, ragged(), module, 3, engine, participation=participation)
        in_rounds = cohorts(3, participation, eligible=SAMPLES.nonzero().flatten())
        gamma, client_state = by_formula(in_rounds, 1.5)
        close(run.server["model"]["w"], gamma)
        close(run.models["w"], client_state)

    def test_an_infinite_variance_is_local(self, engine: str) -> None:
        ours, local = (
            fit(method, small_clients(), small_module(), 3, engine).models
            for method in (FedMAP(GaussianPrior(math.inf)), LocalOnly())
        )
        trained = [0, 2, 3, 4]  # the other client has no samples
        for name, leaf in local.items():
            assert torch.equal(ours[name][trained], leaf[trained])

    @pytest.mark.parametrize("weighting", WEIGHTINGS)
    def test_matches_the_reference(self, engine: str, weighting: Any) -> None:
        """With BatchNorm, momentum and weight decay; buffers stay on the client."""
        method = FedMAP(GaussianPrior(1.0), weighting=weighting)
        run = fit(method, small_clients(), small_module(), 3, engine, participation=3)
        gamma, client_state, weights = fedmap(
            small_module(), small_clients(), cohorts(3, 3), weighting=weighting
        )
        server = run.server["model"]
        assert_trees_close(server, {n: gamma[n] for n in server})
        begun = run.client_state["begun"].nonzero().flatten().tolist()
        for k in begun:
            assert_trees_close({n: leaf[k] for n, leaf in run.models.items()}, client_state[k])
        for round, want in zip(run.recorder.rounds, weights, strict=True):
            got = method.weights(round.uploads or {}, round.info)
            order = round.info.index.argsort()
            torch.testing.assert_close(
                got[order], torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-12
            )

    @pytest.mark.parametrize("settings", [{"summed": True}, {"head_only": True}])
    def test_other_terms_match_the_reference(self, engine: str, settings: dict[str, bool]) -> None:
        summed, head_only = settings.get("summed", False), settings.get("head_only", False)
        prior = GaussianPrior(0.5, parameters="head" if head_only else "all")
        method = FedMAP(prior, data_term="sum" if summed else "mean", local_epochs=2)
        run = fit(method, small_clients(), plain_module(), 3, engine, participation=3)
        gamma, client_state, _ = fedmap(
            plain_module(), small_clients(), cohorts(3, 3), 0.5, "posterior", 2, summed, head_only
        )
        assert_trees_close(run.server["model"], gamma)
        for k in run.client_state["begun"].nonzero().flatten().tolist():
            for name in ("head.weight", "head.bias"):
                torch.testing.assert_close(
                    run.models[name][k], client_state[k][name], rtol=1e-10, atol=0
                )

    def test_a_prior_over_the_head_shares_the_backbone(self, engine: str) -> None:
        method = FedMAP(GaussianPrior(0.5, parameters="head"))
        run = fit(method, small_clients(), plain_module(), 2, engine)
        backbone = run.models["backbone.0.weight"]
        assert all(torch.equal(one, run.server["model"]["backbone.0.weight"]) for one in backbone)
        heads = run.models["head.weight"]
        assert not torch.equal(heads[0], heads[2])
        assert set(run.client_state["model"]) == {"head.weight", "head.bias"}

    def test_what_is_personal_is_neither_sent_nor_pulled(self, engine: str) -> None:
        """Both halves move by half of the change of the sum; the prior pulls one of them alone."""
        prior = GaussianPrior(2.0, parameters="head")
        method = FedMAP(prior, weighting="uniform", personal="backbone")
        module = SplitQuadraticModule(1, 0.1, 0.2, 0.4)
        run = fit(method, q2(), module, 2, engine)
        body, head, gamma = [0.2, 0.2], [0.4, 0.4], 0.4
        for _ in range(2):
            for k, (a, c) in enumerate(((1.0, 0.0), (3.0, 1.0))):
                slope = a * (body[k] + head[k] - c)
                body[k] -= 0.1 * slope
                head[k] -= 0.1 * (slope + (head[k] - gamma) / 2.0)
            gamma = sum(head) / 2
        assert run.models["backbone.weight"].flatten().tolist() == pytest.approx(body, abs=1e-12)
        assert run.models["head.weight"].flatten().tolist() == pytest.approx(head, abs=1e-12)
        assert float(run.server["model"]["head.weight"]) == pytest.approx(gamma, abs=1e-12)
        assert list(run.server["model"]) == ["head.weight"]
        for round in run.recorder.rounds:
            assert list((round.uploads or {})["model"]) == ["head.weight"]

    def test_each_layer_may_have_a_variance_of_its_own(self, engine: str) -> None:
        """Both halves move by their half of the change of the sum, each with a pull of its own."""
        prior = GaussianPrior({"head": 0.5, "*": math.inf})
        run = fit(FedMAP(prior, "uniform"), q2(), SplitQuadraticModule(1, 0.1, 0.2, 0.4), 2, engine)
        body, head, gamma = [0.2, 0.2], [0.4, 0.4], 0.4
        for _ in range(2):
            for k, (a, c) in enumerate(((1.0, 0.0), (3.0, 1.0))):
                slope = a * (body[k] + head[k] - c)
                body[k] -= 0.1 * slope
                head[k] -= 0.1 * (slope + (head[k] - gamma) / 0.5)
            gamma = sum(head) / 2
        assert run.models["backbone.weight"].flatten().tolist() == pytest.approx(body, abs=1e-12)
        assert run.models["head.weight"].flatten().tolist() == pytest.approx(head, abs=1e-12)
        server = run.server["model"]
        assert float(server["head.weight"]) == pytest.approx(gamma, abs=1e-12)
        assert float(server["backbone.weight"]) == pytest.approx(sum(body) / 2, abs=1e-12)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: FedMAP(DiagonalGaussianPrior(), "exact", prior_lr=0.1),
            lambda: FedMAP(LaplacePrior(parameters="head"), prior_lr=0.05),
        ],
        ids=["learned variances", "Laplace"],
    )
    def test_resume_is_exact(self, engine: str, make: Any, tmp_path: Path) -> None:
        settings: dict[str, Any] = {"engine": engine, "participation": 2, "seed": 3}
        whole = fit(make(), small_clients(), small_module(), 4, **settings)
        half = fit(make(), small_clients(), small_module(), 2, **settings)
        path = half.save(tmp_path / "half.ckpt")
        resumed = fit(make(), small_clients(), small_module(), 4, ckpt_path=path, **settings)
        assert_trees_equal(resumed.server, whole.server)
        assert_trees_equal(resumed.client_state, whole.client_state)


# --- what a user may ask ---


def test_the_prior_is_the_global_model_where_it_is_a_whole_one() -> None:
    run = fit(FedMAP(), q2(), rounds=2)
    assert torch.equal(run.strategy.global_state_dict()["w"], run.server["model"]["w"])
    assert torch.equal(run.module.state_dict()["w"], run.server["model"]["w"])
    normed = fit(FedMAP(), small_clients(), small_module())
    assert normed.strategy.method.global_model(normed.server) is None


class Anywhere(Prior):
    """A prior without a mean: it shrinks, by a factor that it learns."""

    def init(self, model: Tree) -> Tree:
        return {"log_factor": torch.zeros((), dtype=torch.float64)}

    def regularizer(self, theta: Tree, gamma: Tree) -> Tensor:
        squares: Tensor = torch.stack([x.flatten(1).square().sum(1) for x in theta.values()]).sum(0)
        count = sum(leaf[0].numel() for leaf in theta.values())
        penalty: Tensor = squares * (-gamma["log_factor"]).exp() + count * gamma["log_factor"]
        return penalty / 2


def test_a_prior_of_the_users_own_needs_no_mean(engine: str) -> None:
    """One step by lr = 0.1 of (a + 1) theta - a c; then half the factor's slope is 1 - theta^2."""
    method = FedMAP(Anywhere(), "uniform", prior_lr=0.2)
    run = fit(method, q2(), QuadraticModule(1, 0.1, 0.5), 1, engine)
    theta = [0.5 - 0.1 * (0.5 + 0.5), 0.5 - 0.1 * (-1.5 + 0.5)]
    assert run.models["w"].flatten().tolist() == pytest.approx(theta, abs=1e-12)
    slope = sum((1 - t * t) / 2 for t in theta) / 2
    assert float(run.server["prior"]["log_factor"]) == pytest.approx(-0.2 * slope, abs=1e-12)
    assert "model" not in run.server
    with pytest.raises(Exception, match=r"got FedMAP, with which 1 of the 1 entries of .* differ"):
        run.strategy.global_state_dict()


def test_settings_tell_the_prior() -> None:
    assert FedMAP(GaussianPrior(2.0)).settings()["prior"] == repr(GaussianPrior(2.0))


def test_an_infinite_variance_is_said() -> None:
    method = FedMAP(GaussianPrior(math.inf))
    module = QuadraticModule()
    parameter_split = local_round(method, module, q2()).engine.parameter_split
    said = ["variance=inf makes FedMAP LocalOnly with a mean."]
    assert method.notes(parameter_split) == said
    assert FedMAP(GaussianPrior({"*": math.inf})).notes(parameter_split) == said
    assert FedMAP().notes(parameter_split) == []


@pytest.mark.parametrize(("data_term", "scope"), [("mean", "all"), ("sum", "personal")])
def test_a_new_client_adapts_under_the_prior(engine: Any, data_term: Any, scope: Any) -> None:
    """Many steps from the prior's mean m end at (a c + r m) / (a + r), r = 1 / (variance [N]).
    Personal is what is under the prior, here all."""
    curvature, center, samples, variance = 2.0, 5.0, 4, 0.5
    train = quadratic_clients([curvature], [center], samples)
    adaptation = NewClientAdaptation(
        samples=[samples], scope=scope, epochs=400, clients=(train, train)
    )
    method = FedMAP(GaussianPrior(variance), weighting="uniform", data_term=data_term)
    run = fit(method, q2(), QuadraticModule(lr=0.1), 1, engine, callbacks=[adaptation])
    mean = float(run.server["model"]["w"])
    pull = 1 / variance / (samples if data_term == "sum" else 1)
    expected = (curvature * center + pull * mean) / (curvature + pull)
    found = adaptation.results[0].models["w"]
    assert found.flatten().tolist() == pytest.approx([expected], rel=1e-9)
    assert abs(expected - center) > 0.1
