"""ClusterOracle: FedAvg in each cluster, and nothing between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.core.tree import rows
from lightning_pfl.methods import (
    L2GD,
    SCAFFOLD,
    ClusterOracle,
    Ditto,
    FedAvg,
    FedDF,
    FedProx,
    FedRep,
    FedSplit,
    FedU,
    HeteroFL,
    PerFedAvg,
)
from lightning_pfl.methods.base import Method
from lightning_pfl.testing import (
    CHECKS,
    Problem,
    QuadraticModule,
    assert_trees_close,
    assert_trees_equal,
    descend,
    fit,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.core.test_mixture import Prototypes
from tests.methods.case import Bytes, Case, D
from tests.methods.networks import SCALARS, cohorts, even_clients, plain_module
from tests.methods.quadratics import LR, SAMPLES, STEPS, A, C, close, closed_form, ragged
from tests.methods.references.cluster_oracle import cluster_oracle
from tests.methods.test_heterofl import thin

CASE = Case(
    method=lambda: ClusterOracle(lambda client: client % 2),
    bytes={
        "defaults": Bytes(lambda: ClusterOracle(lambda client: 0), 4 * D, 4 * D),
    },
    twin=FedAvg,
    needed=(lambda client: client % 2,),
    problem={"make_data": even_clients},
)

LABELS = [7, 2, 7, 2]


class TestClusterOracle:
    @closed_form
    @pytest.mark.parametrize("participation", [3, 2, 1])
    def test_rounds_match_the_reference(self, engine: str, participation: int) -> None:
        method = ClusterOracle(LABELS)
        module = QuadraticModule(2, LR, 0.5)
        run = fit(method, ragged(), module, 4, engine, participation=participation)

        def train(k: int, w: np.ndarray) -> np.ndarray:
            at = slice(k, k + 1)
            found = descend(torch.from_numpy(w), A[at], C[at], LR, int(STEPS[k]))
            return found[0].numpy()

        drawn = [c.tolist() for c in cohorts(4, participation, eligible=torch.arange(3))]
        expected = cluster_oracle(np.full(2, 0.5), train, LABELS, SAMPLES.tolist(), drawn)
        models = np.stack([expected[label] for label in LABELS])
        close(run.models["w"], torch.from_numpy(models))

    def test_one_cluster_is_fedavg(self, engine: str) -> None:
        a = fit(ClusterOracle([3] * 5), small_clients(), small_module(), 2, engine)
        b = fit(FedAvg(), small_clients(), small_module(), 2, engine)
        assert_trees_equal({n: leaf[0] for n, leaf in a.models.items()}, b.server["model"])

    def test_uniform_weights(self, engine: str) -> None:
        method = ClusterOracle([0, 0, 1, 1], weighting="uniform")
        run = fit(method, ragged(), QuadraticModule(2, LR, 0.5), 1, engine)
        start = torch.full((2,), 0.5, dtype=torch.float64)
        trained = descend(start, A, C, LR, STEPS)
        close(run.models["w"][:2], trained[:2].mean(0).expand(2, 2))
        close(run.models["w"][2:], trained[2].expand(2, 2))

    def test_a_model_each_way(self, engine: str) -> None:
        run = fit(ClusterOracle([0, 1, 0, 1, 0]), small_clients(), plain_module(), 1, engine)
        round = run.recorder.rounds[0]
        assert round.bytes_down == round.bytes_up == 8 * SCALARS
        assert list(run.server["clusters"]) == ["0", "1"]

    def test_a_function_says_the_clusters(self, engine: str) -> None:
        a = fit(ClusterOracle(lambda k: k // 2), ragged(), QuadraticModule(2, LR), 2, engine)
        b = fit(ClusterOracle([0, 0, 1, 1]), ragged(), QuadraticModule(2, LR), 2, engine)
        assert_trees_equal(a.models, b.models)


INNER: dict[str, Callable[[], Method]] = {
    "FedAvg, Adam": lambda: FedAvg(server_optimizer=lambda p: torch.optim.Adam(p, lr=0.1)),
    "FedProx": lambda: FedProx(0.3),
    "SCAFFOLD": SCAFFOLD,
    "FedSplit": lambda: FedSplit(0.5),
    "FedRep": FedRep,
    "Ditto": Ditto,
    "PerFedAvg": lambda: PerFedAvg(0.1, learn_inner_lr=True),
}
GROUPS = ([0, 2], [1, 3, 4])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", INNER)
def test_a_cluster_is_a_federation_of_its_method(name: str, engine: str) -> None:
    """Samples in their stored order, which doesn't depend on a client's number."""
    data = small_clients(shuffle=False)
    method = ClusterOracle([5, 7, 5, 7, 7], method=INNER[name]())
    run = fit(method, data, small_module(), 3, engine)
    for number, members in enumerate(GROUPS):
        alone = fit(INNER[name](), data.subset(members), small_module(), 3, engine)
        assert_trees_close(run.server["clusters"][str(number)], alone.server)
        mine = torch.tensor(members)
        assert_trees_close(rows(run.client_state, mine), alone.client_state)
        assert_trees_close(rows(run.models, mine), alone.models)


def test_clients_predict_as_the_method_does(engine: str) -> None:
    """By a function of outputs and features, with tensors of each client's own."""
    data = small_clients()
    method = ClusterOracle([0] * 5, method=Prototypes())
    run = fit(method, data, small_module(), engine=engine, val_data=data)
    alone = fit(Prototypes(), data, small_module(), engine=engine, val_data=data)
    assert run.metrics["val_loss"] == pytest.approx(alone.metrics["val_loss"], rel=1e-12)


def test_widths_are_those_of_the_clients_in_the_whole_federation(engine: str) -> None:
    """Every second client has the narrow network, and they are a cluster."""
    inner = HeteroFL({"thin": thin()}, ["thin", "full", "thin", "full", "thin"])
    method = ClusterOracle([0, 1, 0, 1, 0], method=inner)
    run = fit(method, small_clients(shuffle=False), plain_module(), 2, engine)
    data = small_clients(shuffle=False).subset([0, 2, 4])
    expected = fit(HeteroFL({"thin": thin()}, "thin"), data, plain_module(), 2, engine)
    assert_trees_close(run.server["clusters"]["0"], expected.server)


def test_a_cluster_without_a_client_in_the_cohort_keeps_its_server(engine: str) -> None:
    method = ClusterOracle([0, 1, 0, 1, 1], method=SCAFFOLD())
    run = fit(method, small_clients(), small_module(), 6, engine, participation=1)
    servers = run.recorder.servers
    for number, (cohort,) in enumerate(cohorts(6, 1)):
        other = "0" if int(cohort) in GROUPS[1] else "1"
        before, after = (servers[t]["clusters"][other] for t in (number, number + 1))
        assert_trees_equal(after, before)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_conformance_with_another_method(check: Any, engine: str, tmp_path: Path) -> None:
    def make() -> Method:
        return ClusterOracle(lambda client: client % 2, method=SCAFFOLD("I"))

    check(make, Problem(engine, tmp_path, make_data=even_clients))


def test_settings_are_also_those_of_the_method() -> None:
    settings = ClusterOracle([0, 1], method=FedProx(0.3)).settings()
    assert settings["method"] == "FedProx"
    assert settings["method.prox_weight"] == "0.3"


@pytest.mark.parametrize(
    ("method", "match"),
    [
        (L2GD(), "but got L2GD, which knows its clients by id"),
        (FedDF(), "but got FedDF, which needs public samples"),
        (FedU("ring"), "but got FedU, which exchanges messages over a graph|knows its clients"),
    ],
)
def test_a_method_has_to_have_a_server_for_any_clients(method: Method, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ClusterOracle([0, 1], method=method)


def test_the_budget_is_that_of_the_method() -> None:
    with pytest.raises(ValueError, match="weighting to be those of `method`, but got"):
        ClusterOracle([0, 1], local_steps=3, method=FedProx())


def test_every_client_needs_a_cluster() -> None:
    with pytest.raises(
        ValueError, match="Expected `clusters` to have one entry for each of 4 clients, but got 3"
    ):
        fit(ClusterOracle([0, 0, 1]), ragged(), QuadraticModule(2))


@pytest.mark.parametrize("clusters", [[0.2, 0.9, 1.5, 0.0], ["a", "b", "a", "b"]])
def test_clusters_are_whole_numbers(clusters: Any) -> None:
    """0.2 and 0.9 would be one cluster if they were cut off."""
    match = f"Expected `clusters` to hold whole numbers, but got {clusters[0]!r}"
    with pytest.raises(ValueError, match=match):
        ClusterOracle(clusters)
    with pytest.raises(ValueError, match=match):
        fit(ClusterOracle(lambda k: clusters[k]), ragged(), QuadraticModule(2))
    for whole in ([0, 1, 0, 1], np.array([0, 1, 0, 1]), torch.tensor([0, 1, 0, 1])):
        assert ClusterOracle(whole).given_clusters == [0, 1, 0, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize("clusters", [4, "0011", None])
def test_clusters_are_a_list_or_a_function(clusters: Any) -> None:
    with pytest.raises(ValueError, match=f"function of the client's id, but got {clusters=}"):
        ClusterOracle(clusters)
