"""ConvexClustering in the federated loop: PDMM's iterates, its end points, its messages."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.methods import ConvexClustering, LocalOnly, convex_clustering
from lightning_pfl.methods.convex_clustering import canonical_weight
from lightning_pfl.methods.support import memory
from lightning_pfl.models import SquaredHingeClassifier
from lightning_pfl.solvers.blocks import damping
from lightning_pfl.solvers.pairs import Pairs
from lightning_pfl.solvers.pdmm import solve
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    assert_trees_equal,
    fit,
    quadratic_clients,
)
from lightning_pfl.testing.conformance import SIZES, small_clients, small_module
from recipes.centralized.newtons_method import proximal_newton
from tests.methods.case import DEGREE, Bytes, Case, D
from tests.methods.graphs import PATH
from tests.methods.networks import cohorts
from tests.methods.quadratics import LR, A, C, close, closed_form, ragged
from tests.methods.references import softmax
from tests.methods.references.convex_clustering import pdmm
from tests.methods.references.softmax import softmax_module
from tests.solvers.problems import L4, Hinges, ellipses, l4_solution
from tests.solvers.test_pdmm import documented_draws

CASE = Case(
    method=lambda: ConvexClustering(0.2, local_epochs=2),
    bytes={
        # From the second round on: the neighbours' x, the own mu and what the pairs (j, i) add to
        # equation 16; up the own x and z, all blocks being drawn.
        "defaults": Bytes(
            lambda: ConvexClustering(0.2, blocks=1.0, dual_blocks=1.0),
            4 * D * DEGREE + 4 * D * DEGREE + 4 * D,
            4 * D + 4 * D * DEGREE,
            from_the_first_round=False,
        ),
    },
    twin=LocalOnly,
)

DIM = 2


def three() -> FederatedTensorDataset:
    """The ragged quadratic clients that have samples."""
    return ragged().subset([0, 1, 2])


def line(lr: float = 0.1) -> tuple[FederatedTensorDataset, QuadraticModule]:
    return quadratic_clients([1.0] * 4, L4.flatten().tolist()), QuadraticModule(lr=lr)


def exact(weight: float, **settings: Any) -> ConvexClustering:
    return ConvexClustering(weight, local_solver="exact", **settings)


def hinge_clients(points: torch.Tensor, labels: torch.Tensor) -> FederatedTensorDataset:
    fields = points.flatten(0, 1), (labels.flatten() > 0).long()
    return FederatedTensorDataset(
        fields, torch.arange(labels.numel()).split(labels.shape[1]), batch_size=4, shuffle=True
    )


class TestConvexClustering:
    @closed_form
    @pytest.mark.parametrize("step", ["full", "printed"])
    @pytest.mark.parametrize(("blocks", "duals"), [(9, 6), (4, 3)])
    def test_rounds_are_the_papers_iterations(
        self, engine: str, step: Any, blocks: int, duals: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The dual variables of two clients at a time, and so in two chunks that differ in size."""
        monkeypatch.setattr(convex_clustering, "ROWS", 2)
        weight, rho, eta, rounds = 0.3, 0.7, 0.2, 8
        settings = {"step": step, "blocks": blocks, "dual_blocks": duals, "proximal_weight": eta}
        method = exact(weight, penalty=rho, **settings)
        run = fit(method, three(), QuadraticModule(DIM, LR, 0.5), rounds, engine)

        def prox(i: int, b: np.ndarray, c: float) -> np.ndarray:
            a = float(A[i])
            return (a * C[i].numpy() + c * b) / (a + c)

        draws = documented_draws(3, rounds, blocks, duals, seed=0)
        lam = weight / 2 if step == "full" else weight
        start = np.full((3, DIM), 0.5)
        path = pdmm(start, prox, draws, lam, rho, *damping(blocks, 9), step == "full", eta)
        recorder = run.recorder
        for (x, z), client_states, server in zip(
            path, recorder.banks[1:], recorder.servers[1:], strict=True
        ):
            close(client_states["model"]["w"], torch.from_numpy(x))
            close(server["split"], torch.from_numpy(z))
            assert torch.equal(server["models"], client_states["model"]["w"])

    def test_a_classifier_trains_as_the_reference(self, engine: str) -> None:
        """A step on each minibatch's loss and the quadratic, from the client's last model."""
        data, lr, weight, rho, rounds = small_clients().subset([0, 2, 3, 4]), 0.2, 0.3, 0.7, 4
        method = ConvexClustering(weight, penalty=rho, blocks=9, dual_blocks=7)
        run = fit(method, data, softmax_module(lr), rounds, engine)

        def flat(w: Any) -> np.ndarray:
            return np.concatenate([w[name].ravel() for name in softmax.NAMES])

        def descended(i: int, b: np.ndarray, c: float) -> np.ndarray:
            x: np.ndarray = models[i]
            for batch in softmax.minibatches(data, i, now[0], epochs=1):
                w = {"head.weight": x[:75].reshape(3, 25), "head.bias": x[75:]}
                x = x - lr * (flat(softmax.gradient(w, *batch)) + c * (x - b))
            return x

        draws = documented_draws(4, rounds, 9, 7, seed=0)
        models = np.tile(flat(softmax.as_numpy(softmax_module().state_dict())), (4, 1))
        path = pdmm(models, descended, draws, weight / 2, rho, *damping(9, 16))
        now = [0]
        for now[0] in range(rounds):
            models, split = next(path)
        np.testing.assert_allclose(run.server["models"], models, rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(run.server["split"], split, rtol=1e-10, atol=1e-13)

    def test_blocks_that_were_not_drawn_stay(self, engine: str) -> None:
        method = ConvexClustering(0.1, blocks=6, local_epochs=2)
        run = fit(method, small_clients(), small_module(), 4, engine)
        banks, servers = run.recorder.banks, run.recorder.servers
        for number, (before, after) in enumerate(pairwise(banks)):
            drawn = method._draws.of(number)
            old, new = servers[number], servers[number + 1]
            for client in range(5):
                same = all(
                    torch.equal(leaf[client], after["model"][name][client])
                    for name, leaf in before["model"].items()
                )
                # A client without samples may be where its pairs pull it to already.
                assert same != bool(drawn.models[client]) or (same and SIZES[client] == 0)
            assert torch.equal(new["split"][~drawn.pairs], old["split"][~drawn.pairs])

    def test_exact_rounds_are_those_of_the_solver(self, engine: str) -> None:
        """On the squared hinge loss, with its Newton steps from the formulas."""
        points, labels = ellipses("separable", 2)
        data, module = hinge_clients(points, labels), SquaredHingeClassifier(2).double()
        run = fit(exact(0.1, penalty=0.3), data, module, 8, engine)
        losses = Hinges(points, labels)
        state = solve(
            lambda b, c, start: proximal_newton(losses, b, c, start),
            Pairs.complete(6),
            0.1,
            torch.zeros(6, 3, dtype=torch.float64),
            0.3,
            iterations=8,
        )
        torch.testing.assert_close(run.server["models"], state.models, rtol=0, atol=1e-8)
        torch.testing.assert_close(run.server["split"], state.split, rtol=0, atol=1e-8)

    @pytest.mark.parametrize(("step", "pulls"), [("full", 1), ("printed", 0)])
    def test_messages_are_the_blocks(self, engine: str, step: Any, pulls: int) -> None:
        """4 d K up with 4-byte numbers; down a model per neighbour and drawn dual variable.

        The corrected update needs one vector more, what the pairs (j, i) pull with.
        """
        blocks, duals, rounds = 7, 5, 5
        method = exact(0.1, step=step, blocks=blocks, dual_blocks=duals)
        data = quadratic_clients([1.0] * 4, L4.flatten().tolist(), dtype=torch.float32)
        module = QuadraticModule(DIM, dtype=torch.float32)
        run = fit(method, data, module, rounds, engine)
        draws = documented_draws(4, rounds, blocks, duals, seed=0)
        vector = 4 * DIM
        before = 0
        for (some, _, chosen), round in zip(draws, run.recorder.rounds, strict=True):
            assert round.bytes_up == vector * blocks // 4
            # What the round before changed, and the pull of the corrected update.
            assert round.bytes_down == vector * (before + pulls * len(some)) // 4
            before = 3 * len(some) + len(chosen)
        assert run.metrics["round/bytes_up"] == vector * blocks
        assert run.metrics["round/bytes_down"] == vector * (
            3 * len(draws[-2][0]) + len(draws[-2][2]) + pulls * len(draws[-1][0])
        )

    def test_clients_that_were_away_are_told_later(self, engine: str) -> None:
        run = fit(exact(0.1), *line(), 3, engine, participation=2)
        news = torch.zeros(4, 4, dtype=torch.bool)
        duals = torch.zeros(4, 4, dtype=torch.bool)
        client_state = torch.eye(4, dtype=torch.bool)
        everyone = torch.arange(4)
        for cohort, round in zip(
            cohorts(3, 2, eligible=everyone), run.recorder.rounds, strict=True
        ):
            vectors = int((news[cohort].sum() + duals[cohort].sum()) + len(cohort))
            assert round.bytes_down == 8 * vectors // 2
            news[cohort], duals[cohort] = False, False
            news[:, cohort] = True
            news &= ~client_state
            duals = ~client_state
        assert torch.equal(run.server["new_models"], news)

    def test_a_graph_of_all_pairs_is_none(self, engine: str) -> None:
        settings = {"local_solver": "optimizer", "penalty": 0.2}
        data, module = three(), QuadraticModule(DIM, LR, 0.5)
        runs = [
            fit(ConvexClustering(0.3, graph=graph, **settings), data, module, 4, engine)  # type: ignore[arg-type]
            for graph in (None, "complete", (torch.ones(3, 3) - torch.eye(3)).tolist())
        ]
        for other in runs[1:]:
            close(other.models["w"], runs[0].models["w"])
            assert other.server["split"].shape == (3, 2, DIM)

    def test_a_client_without_samples_passes_the_pull_on(self, engine: str) -> None:
        """On a path 0 - 1 - 2 whose middle has no loss, either end is pulled with the weight."""
        data = quadratic_clients([1.0] * 3, [0.0, 9.0, 2.0], [2, 0, 2])
        method = exact(0.5, graph=PATH, penalty=1.0)
        run = fit(method, data, QuadraticModule(), 60, engine)
        first, middle, last = run.models["w"].flatten().tolist()
        assert [first, last] == pytest.approx([0.5, 1.5], abs=1e-4)
        assert 0.5 - 1e-4 <= middle <= 1.5 + 1e-4

    def test_resume_with_drawn_blocks_is_exact(self, engine: str, tmp_path: Path) -> None:
        def run(rounds: int, path: Path | None = None) -> Any:
            method = ConvexClustering(0.2, blocks=0.4, dual_blocks=0.5, graph="ring")
            settings = {"participation": 3, "seed": 4, "ckpt_path": path}
            return fit(method, small_clients(), small_module(), rounds, engine, **settings)  # type: ignore[arg-type]

        whole, half = run(5), run(3)
        resumed = run(5, half.save(tmp_path / "half.ckpt"))
        assert_trees_equal(resumed.server, whole.server)
        assert_trees_equal(resumed.client_state, whole.client_state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("step", ["full", "printed"])
def test_equal_models_stay_to_the_bit(step: Any, dtype: torch.dtype) -> None:
    """Clients at their optimum: 4 * 0.1 * x isn't the sum of four 0.1 x in few bits."""
    start = torch.linspace(0.1, 3, 9).to(dtype)
    data = quadratic_clients([1.0] * 5, [start.double().tolist()] * 5, dtype=dtype)
    module = QuadraticModule(dim=9, lr=0.5, dtype=dtype)
    module.w.data.copy_(start)
    method = ConvexClustering(0.5, step=step, penalty=0.1, proximal_weight=0.3)
    run = fit(method, data, module, 3, "sequential")
    assert torch.equal(run.models["w"], start.expand(5, 9))


class TestFourPointsOnALine:
    def test_are_two_clusters(self) -> None:
        run = fit(exact(0.1, penalty=1.0), *line(), 100)
        torch.testing.assert_close(run.models["w"], l4_solution(0.1), rtol=0, atol=1e-3)
        assert run.strategy.method.clusters(run.server).tolist() == [0, 0, 1, 1]  # type: ignore[union-attr]

    @pytest.mark.slow
    def test_gradient_steps_go_to_the_same_solution(self) -> None:
        """One step a round in the place of the minimiser, on half of the blocks."""
        method = ConvexClustering(0.1, penalty=0.5, blocks=0.5, local_epochs=None, local_steps=1)
        run = fit(method, *line(lr=0.2), 180)
        torch.testing.assert_close(run.models["w"], l4_solution(0.1), rtol=0, atol=1e-2)
        assert run.strategy.method.clusters(run.server).tolist() == [0, 0, 1, 1]  # type: ignore[union-attr]


@pytest.mark.slow
def test_on_a_weighted_graph_it_is_total_variation() -> None:
    """A path 0 - 1 - 2 - 3: x_i = a_i - weight times the signed weights of its edges."""
    path = np.zeros((4, 4))
    for i, weight in enumerate((1.0, 2.0, 0.5)):
        path[i, i + 1] = path[i + 1, i] = weight
    run = fit(exact(0.04, penalty=0.6, graph=path), *line(), 80)
    # 1 and 2 are far apart; 0 and 1 meet, 2 and 3 don't: 0.02 < 0.1 / 2.
    pulls = torch.tensor([[0.04], [-0.04 + 0.08], [-0.08 + 0.02], [-0.02]], dtype=torch.float64)
    torch.testing.assert_close(run.models["w"], L4 + pulls, rtol=0, atol=1e-4)
    assert run.server["split"].shape == (4, 2, 1)


def test_engines_agree_on_a_sparse_graph_with_drawn_blocks() -> None:
    runs = [
        fit(
            ConvexClustering(0.2, blocks=0.4, graph="ring"),
            small_clients(),
            small_module(),
            3,
            engine,
            participation=3,
        )
        for engine in ("vectorized", "sequential")
    ]
    assert_trees_close(runs[0].server, runs[1].server)
    assert_trees_close(runs[0].client_state, runs[1].client_state)


class TestEndPoints:
    def test_without_weight_every_client_is_alone(self) -> None:
        run = fit(exact(0.0, penalty=0.3), *line(), 60)
        torch.testing.assert_close(run.models["w"], L4, rtol=0, atol=1e-4)
        assert ConvexClustering(0.0).notes(run.strategy.federation.parameter_split) == [
            "fusion_weight=0 makes ConvexClustering LocalOnly."
        ]

    @pytest.mark.slow
    def test_above_the_threshold_all_are_one(self) -> None:
        """Where the sum of the losses is least: the mean weighted with the curvatures."""
        run = fit(exact(20.0, penalty=0.5), three(), QuadraticModule(DIM, LR, 0.5), 60)
        mean = (A[:3].unsqueeze(1) * C[:3]).sum(0) / A[:3].sum()
        torch.testing.assert_close(run.models["w"], mean.expand(3, DIM), rtol=0, atol=1e-3)
        assert not run.server["split"].any()
        assert run.strategy.method.clusters(run.server).tolist() == [0, 0, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("scale", "factor"),
    [("theorems", 1), ("equation-3", 8), ("equation-3-unordered", 4), ("equation-14", 2)],
)
def test_scales_are_the_same_problem(scale: Any, factor: float) -> None:
    assert canonical_weight(0.1 / factor, scale, 4) == pytest.approx(0.1)
    a = fit(exact(0.1), *line(), 5)
    b = fit(exact(0.1 / factor, scale=scale), *line(), 5)
    assert_trees_close(b.server, a.server)


def test_what_does_not_fit_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 1000)
    with pytest.raises(
        MisconfigurationException,
        match=r"Expected ConvexClustering with 4 clients, 3 pairs each and 1 parameters to fit .*"
        r"takes 1.5 KiB and 1000 bytes are free. Use a sparse `graph`",
    ):
        fit(exact(0.1), *line(), 1)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"fusion_weight": -1.0}, r"`fusion_weight` to be a finite number >= 0, .*=-1.0"),
        ({"fusion_weight": float("nan")}, "`fusion_weight` to be a finite number >= 0, .*=nan"),
        ({"penalty": 0.0}, "`penalty` to be a finite number > 0, .*penalty=0.0"),
        ({"proximal_weight": -0.1}, "`proximal_weight` to be a finite number >= 0, .*=-0.1"),
        ({"blocks": 0}, r"`blocks` to be a share in \(0, 1\] or a number of at least 1, .*=0"),
        ({"dual_blocks": 1.5}, r"`dual_blocks` to be a share in \(0, 1\] or .*dual_blocks=1.5"),
        ({"scale": "eq3"}, "`scale` to be 'canonical', .*scale='eq3'"),
        ({"step": "half"}, "`step` to be 'full' or 'printed', .*step='half'"),
        ({"local_solver": "lbfgs"}, "`local_solver` to be 'optimizer' or 'exact', .*='lbfgs'"),
        ({"local_epochs": 2, "local_steps": 1}, "exactly one of `local_epochs` and"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"Expected {text}"):
        ConvexClustering(**settings)
