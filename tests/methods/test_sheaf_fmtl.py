"""SheafFMTL against the reference, and where the sheaf is that of a graph or of two sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pfl import ClientModules
from lightning_pfl.methods import FedU, LocalOnly, SheafFMTL
from lightning_pfl.methods.support import memory
from lightning_pfl.solvers.sheaf import map_steps
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    assert_trees_equal,
    fit,
    quadratic_clients,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.federation.test_architectures import OF, loaders, modules
from tests.methods.case import DEGREE, EDGE, Bytes, Case
from tests.methods.graphs import (
    PAIR,
    PATH,
    RAGGED,
    TWO_CENTRES,
    TWO_MAPS,
    complete,
    edges_among,
    random_maps,
    ring,
    two_clients,
)
from tests.methods.networks import EVERYBODY, SCALARS, cohorts, plain_module
from tests.methods.quadratics import LR, A, C, close, closed_form
from tests.methods.references.sheaf_fmtl import sheaf_fmtl
from tests.trainer.setting import trainer

CASE = Case(
    method=lambda: SheafFMTL("complete", 0.05, 0.1, 0.3, maps="identity"),
    bytes={
        "defaults": Bytes(
            lambda: SheafFMTL("complete", 0.05, 0.1, 0.1),
            8 * EDGE * DEGREE,
            8 * EDGE * DEGREE,
        ),
    },
    twin=lambda: SheafFMTL("complete", 0.0),
    needed=("complete",),
    published={"regularization": 1e-3, "map_lr": 0.01, "map_std": 0.01},
)

ONE_STEP: dict[str, Any] = {"local_epochs": None, "local_steps": 1}
STILL: dict[str, Any] = {"map_lr": 0.0, "maps": "identity", "edge_dim_ratio": 1.0}


def quadratics() -> Any:
    return quadratic_clients(A, C)


def start_of_maps(rank: int = 6, dim: int = SCALARS) -> dict[Any, Tensor]:
    return random_maps(RAGGED, [dim] * 5, rank)


class TestSheafFMTL:
    @closed_form
    @pytest.mark.parametrize("laplacian", ["combined", "separate"])
    @pytest.mark.parametrize("participation", [5, 3])
    def test_matches_the_reference(self, engine: str, laplacian: Any, participation: int) -> None:
        """Three rounds of a network: models, and the maps at both ends of all edges."""
        data, maps = small_clients(), start_of_maps()
        method = SheafFMTL(RAGGED, 0.3, 0.2, laplacian=laplacian, maps=maps)
        run = fit(method, data, plain_module(), 3, engine, participation=participation)
        some = cohorts(3, participation, eligible=EVERYBODY)
        arrays = {edge: p.numpy() for edge, p in maps.items()}
        separate, lr = laplacian == "separate", 0.05
        client_state, found = sheaf_fmtl(
            plain_module(), data, some, RAGGED, arrays, 0.3, 0.2, separate, lr
        )
        assert_trees_close(
            run.models, {n: torch.stack([o[n] for o in client_state]) for n in client_state[0]}
        )
        graph, moved = run.strategy.method.graph, 0
        for i, slot in graph.mask.nonzero().tolist():
            edge = (i, int(graph.neighbours[i, slot]))
            np.testing.assert_allclose(
                run.client_state["maps"][i, slot].numpy(), found[edge], rtol=1e-9, atol=1e-12
            )
            moved += not np.allclose(found[edge], arrays[edge])
        assert moved >= 4
        assert not run.client_state["maps"][~graph.mask].any()

    def test_without_regularization_every_client_trains_alone(self, engine: str) -> None:
        method = SheafFMTL(RAGGED, 0.0, 0.1, edge_dim_ratio=0.2)
        a = fit(method, small_clients(), small_module(), 2, engine)
        b = fit(LocalOnly(), small_clients(), small_module(), 2, engine)
        assert_trees_equal(a.models, b.models)

    @pytest.mark.parametrize("laplacian", ["combined", "separate"])
    def test_a_client_without_samples_is_between_its_neighbours(
        self, engine: str, laplacian: Any
    ) -> None:
        """A path 0 - 1 - 2 whose middle has no loss, identity maps: the rounds written out."""
        method = SheafFMTL(PATH, 0.5, laplacian=laplacian, **STILL, **ONE_STEP)
        data = quadratic_clients([1.0] * 3, [0.0, 9.0, 2.0], [2, 0, 2])
        run = fit(method, data, QuadraticModule(lr=0.3, start=5.0), 4, engine)
        of_graph, w = np.diag(PATH.sum(1)) - PATH, np.full(3, 5.0)
        for _ in range(4):
            trained = w - 0.3 * np.array([1.0, 0.0, 1.0]) * (w - [0.0, 9.0, 2.0])
            w = trained - 0.3 * 0.5 * of_graph @ (trained if laplacian == "separate" else w)
        close(run.models["w"].flatten(), torch.from_numpy(w))

    @pytest.mark.parametrize("laplacian", ["combined", "separate"])
    def test_identity_maps_that_stay_make_it_the_graph_s_laplacian(
        self, engine: str, laplacian: Any
    ) -> None:
        """Step for step decentralized FedU where the Laplacian step follows the local one."""
        method = SheafFMTL("ring", 0.7, laplacian=laplacian, **STILL, **ONE_STEP)
        run = fit(method, quadratics(), QuadraticModule(2, LR, 0.5), 4, engine)
        of_graph = torch.from_numpy(np.diag([2.0] * 4) - ring(4))
        w = torch.full((4, 2), 0.5, dtype=torch.float64)
        for _ in range(4):
            trained = w - LR * A[:, None] * (w - C)
            at = trained if laplacian == "separate" else w
            w = trained - LR * 0.7 * of_graph @ at
        close(run.models["w"], w)

    def test_it_is_then_decentralized_fedu_step_for_step(self, engine: str) -> None:
        """With the Laplacian step after the local one, on unequal weights and with BatchNorm."""
        settings: dict[str, Any] = {"local_epochs": None, "local_steps": 1}
        sheaf = SheafFMTL(RAGGED, 0.4, laplacian="separate", **STILL, **settings)
        fedu = FedU(RAGGED, 0.4, decentralized=True, **settings)
        a, b = (
            fit(method, small_clients(), small_module(), 4, engine, participation=3)
            for method in (sheaf, fedu)
        )
        assert_trees_close(a.models, b.models)
        sent = [[r.bytes_exchanged for r in run.recorder.rounds] for run in (a, b)]
        assert sent[0] == sent[1]

    def test_what_an_edge_s_space_is_turned_to_does_not_matter(self, engine: str) -> None:
        maps = start_of_maps()
        turned = dict(maps)
        for i, j in maps:
            if i < j:
                random = torch.randn(6, 6, generator=torch.Generator().manual_seed(i + 7 * j))
                turn = torch.linalg.qr(random.double()).Q
                turned[i, j], turned[j, i] = turn @ maps[i, j], turn @ maps[j, i]
        found = [
            fit(SheafFMTL(RAGGED, 0.3, 0.2, maps=some), small_clients(), plain_module(), 3, engine)
            for some in (maps, turned)
        ]
        assert_trees_close(found[1].models, found[0].models, rtol=1e-9, atol=1e-11)
        assert not torch.allclose(found[0].client_state["maps"], found[1].client_state["maps"])

    @pytest.mark.slow
    def test_clients_of_different_sizes_reach_the_optimum(self, engine: str) -> None:
        """(I + L) theta = a for the two clients; what no edge sees keeps its own optimum."""
        module, data = two_clients(lr=0.5)
        method = SheafFMTL(PAIR, 1.0, 0.0, maps=TWO_MAPS, **ONE_STEP)
        run = trainer(method, engine=engine, max_epochs=35)
        run.fit(module, data, data)
        coboundary = np.array([[1.0, 0, 0, -1, 0]])
        system = np.eye(5) + coboundary.T @ coboundary
        expected = np.linalg.solve(system, np.concatenate(TWO_CENTRES))
        assert expected.tolist() == pytest.approx([7 / 3, 2, 0, 11 / 3, 7])
        got = [run.strategy.client_state_dict(client)["w"] for client in (0, 1)]
        assert torch.cat(got).tolist() == pytest.approx(expected.tolist(), abs=1e-9)

    def test_architectures_exchange_projections_and_learn_maps(self, engine: str) -> None:
        """Five clients of two networks; rows beyond an edge's dimension stay exactly zero."""
        method = SheafFMTL("complete", 0.2, 0.1, 0.4, map_std=0.3)
        run = trainer(method, engine=engine, max_epochs=2)
        run.fit(ClientModules(modules(), OF), loaders(), loaders(1))
        alone = trainer(LocalOnly(), engine=engine, max_epochs=2)
        alone.fit(ClientModules(modules(), OF), loaders(), loaders(1))
        wide, narrow = 6 * 3 + 3 + 3 * 2 + 2, 4 * 3 + 3 + 3 * 2 + 2
        sizes = {"wide": wide, "narrow": narrow}
        messages = 0
        for group in run.strategy.federation.architectures:
            maps = group.client_states.tree["maps"]
            assert maps.shape[1:] == (4, int(0.4 * wide), sizes[group.name])
            for row, client in enumerate(group.clients.tolist()):
                neighbours = [j for j in range(5) if j != client]
                for slot, j in enumerate(neighbours):
                    rank = int(0.4 * min(sizes[group.name], sizes[OF[j]]))
                    messages += 2 * 8 * rank  # before and after the step, in double precision
                    assert (maps[row, slot, :rank] != 0).all()
                    assert not maps[row, slot, rank:].any()
        for client in range(5):
            pulled, free = (
                one.strategy.client_state_dict(client)["head.weight"] for one in (run, alone)
            )
            assert not torch.equal(pulled, free)
        assert run.callback_metrics["round/bytes_up"] == messages
        assert run.callback_metrics["round/bytes_down"] == messages


def test_bytes_are_those_of_the_projections() -> None:
    """2 sum_j 4 d_ij per client and round; half of it where maps stay."""
    for map_lr, times in ((0.1, 2), (0.0, 1)):
        method = SheafFMTL(RAGGED, 0.1, map_lr, 0.1)
        run = fit(method, small_clients(torch.float32), plain_module().float(), 2, participation=3)
        for round in run.recorder.rounds:
            edges = edges_among(RAGGED, round.info.index)
            assert round.bytes_exchanged == times * 4 * (SCALARS // 10) * edges > 0


@pytest.mark.filterwarnings("ignore:Expected `graph` to have edges")
def test_without_neighbours_it_is_local_training() -> None:
    nobody = np.zeros((5, 5))
    for maps in ("random", "identity"):
        method = SheafFMTL(nobody, 0.5, 0.1, maps=maps)
        a = fit(method, small_clients(), plain_module(), 2)
        b = fit(LocalOnly(), small_clients(), plain_module(), 2)
        assert_trees_equal(a.models, b.models)


def test_edges_without_both_ends_are_left_out() -> None:
    """Two of five clients that are no neighbours train as if alone."""
    graph = np.zeros((5, 5))
    graph[0, 2] = graph[2, 0] = 1.0
    method = SheafFMTL(graph, 0.5, 0.1, 0.3, map_std=0.1)
    run = fit(method, small_clients(), plain_module(), 6, participation=2)
    alone = fit(LocalOnly(), small_clients(), plain_module(), 6)
    banks = run.recorder.banks
    for round, before, after in zip(run.recorder.rounds, banks[:-1], banks[1:], strict=True):
        together = set(round.info.index.tolist()) == {0, 2}
        assert torch.equal(before["maps"], after["maps"]) != together
    assert alone.models.keys() == run.models.keys()


def test_the_maps_are_measured_and_collapse_shows() -> None:
    """Clients that disagree shrink their maps: the penalty vanishes without agreement."""
    method = SheafFMTL("complete", 0.2, 0.05, maps="identity", edge_dim_ratio=1.0, **ONE_STEP)
    data = quadratic_clients([1.0] * 4, [0.0, 0.1, 1.0, 1.1])
    run = fit(method, data, QuadraticModule(lr=0.25), 60)
    norms = run.client_state["maps"].abs().flatten()
    assert run.metrics["sheaf/map_norm"] == pytest.approx(float(norms.mean()))
    assert run.metrics["sheaf/map_norm/min"] == pytest.approx(float(norms.min()))
    assert run.metrics["sheaf/map_norm/min"] < 0.75
    squares = run.models["w"].square().sum(1)
    steps = map_steps(run.strategy.method.graph, squares, 0.05 * 0.2)
    assert run.metrics["sheaf/map_step"] == pytest.approx(float(steps.max()))


def still(map_lr: float) -> Any:
    """Models of norm 2 that don't move: the residuals alone tell whether the maps diverge."""
    return SheafFMTL(
        PAIR, 0.5, map_lr, maps={(0, 1): torch.ones(1, 1), (1, 0): torch.zeros(1, 1)}, **ONE_STEP
    )


@pytest.mark.parametrize(("map_lr", "stable"), [(0.49, True), (0.51, False)])
def test_unstable_steps_of_the_maps_are_reported_before_they_are_taken(
    map_lr: float, stable: bool
) -> None:
    """eta lambda (4 + 4) = 2 at eta = 1/2."""
    data = quadratic_clients([1.0, 1.0], [2.0, 2.0])
    rounds = 40
    module = QuadraticModule(lr=0.0, start=2.0)
    if stable:
        run = fit(still(map_lr), data, module, rounds)
    else:
        with pytest.warns(
            UserWarning,
            match=r"on every edge, but got 2.04 before round 0 between clients '0' and '1'. "
            r"The maps grow without bound: use map_lr < 0.5,",
        ):
            run = fit(still(map_lr), data, module, rounds)
    gap = float((run.client_state["maps"][0] - run.client_state["maps"][1]).abs())
    assert gap == pytest.approx(abs(1 - 4 * map_lr) ** rounds, rel=1e-6)
    assert (gap < 1) == stable


@pytest.mark.parametrize(("strength", "stable"), [(0.95, True), (1.05, False)])
@pytest.mark.parametrize("laplacian", ["combined", "separate"])
def test_unstable_steps_of_the_models_are_reported_before_they_are_taken(
    strength: float, stable: bool, laplacian: Any
) -> None:
    """alpha lambda 4 = 2 on a complete graph of four at alpha = lambda^-1 / 2."""
    method = SheafFMTL("complete", strength, laplacian=laplacian, **STILL, **ONE_STEP)
    data = quadratic_clients([1e-6] * 4, [0.0, 1.0, 2.0, 4.0])
    module = QuadraticModule(lr=0.5)
    if stable:
        fit(method, data, module, 2)
        return
    with pytest.warns(
        UserWarning, match=rf"but got {strength * 2:.3g} before round 0 .* use regularization < 1"
    ):
        fit(method, data, module, 2)


def test_more_steps_along_the_pull_count() -> None:
    """With four steps of momentum 0.9 the models go 8 times as far as with one."""
    method = SheafFMTL("complete", 0.2, **STILL, local_epochs=None, local_steps=4)
    far = sum((1 - 0.9**k) / 0.1 for k in range(1, 5))
    step = 0.05 * far * 0.2 * 5
    assert step < 2  # with five neighbours instead of four it is
    fit(method, small_clients(), small_module(), 1)
    method = SheafFMTL("complete", 0.2 * 2.1 / step, **STILL, local_epochs=None, local_steps=4)
    with pytest.warns(UserWarning, match=r"but got 2.1 before round 0 \(learning rate and local"):
        fit(method, small_clients(), small_module(), 1)


def test_an_adaptive_optimizer_has_no_such_bound() -> None:
    module = small_module()
    module.optimizer = "adam"
    method = SheafFMTL("complete", 1e3, **STILL)
    fit(method, small_clients(), module, 1)


def test_maps_that_do_not_fit_are_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 50_000)
    method = SheafFMTL("complete", 0.1, 0.1, 0.5)
    # 5 clients, 4 slots, 38 of 77 dimensions, 8 bytes, three times
    with pytest.raises(
        Exception, match=r"restriction maps of SheafFMTL for 5 .* takes 1.3[0-9] MiB"
    ):
        fit(method, small_clients(), plain_module(), 1)
    fit(SheafFMTL("complete", 0.1, **STILL), small_clients(), plain_module(), 1)


def test_there_is_no_global_model_and_edges_need_a_dimension() -> None:
    run = fit(SheafFMTL("ring", 0.1), small_clients(), plain_module(), 1)
    assert run.strategy.method.global_model(run.server) is None
    with pytest.raises(ValueError, match=r"at least one dimension, but got edge_dim_ratio=0\.001"):
        fit(SheafFMTL("ring", 0.1, 0.1, 0.001), small_clients(), plain_module(), 1)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"regularization": -1.0}, "Expected `regularization` to be a finite number >= 0, but got"),
        ({"map_lr": float("inf")}, "Expected `map_lr` to be a finite number >= 0, but got"),
        ({"laplacian": "none"}, "Expected `laplacian` to be 'combined' or 'separate', but got"),
        ({"edge_dim_ratio": 2.0}, "Expected `edge_dim_ratio` to be a number in"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SheafFMTL("ring", **settings)


def test_graphs_of_the_tests_are_symmetric() -> None:
    for matrix in (RAGGED, PAIR, complete(4), ring(4)):
        assert (matrix == matrix.T).all()
