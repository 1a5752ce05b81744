"""CFL: federated averaging until a cluster's clients disagree at its stationary point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pfl import FederatedStrategy
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.methods import CFL, FedAvg
from lightning_pfl.solvers.clusters import bipartition, cluster_means, gap
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    fit,
    quadratic_clients,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.case import Bytes, Case, D
from tests.methods.networks import cohorts
from tests.methods.quadratics import LR, closed_form
from tests.methods.references import softmax
from tests.methods.references.cfl import cfl_round, complete_linkage
from tests.methods.references.softmax import softmax_module

CASE = Case(
    method=lambda: CFL(eps_mean=10.0, eps_max=1e-6, start_round=0),
    bytes={
        "defaults": Bytes(CFL, 4 * D, 4 * D),
    },
    twin=None,  # CFL splits nobody before round 20.
    published={"eps_mean": 0.4, "eps_max": 1.6, "start_round": 20},
)

CENTERS = np.array([[3.0, 0.1], [3.2, 0.0], [-3.0, 0.3], [2.9, -0.2], [-3.1, 0.1], [-0.5, 9.0]])


def quadratics(centers: Any = CENTERS) -> Any:
    return quadratic_clients([1.0] * len(centers), torch.as_tensor(centers), 2, batch_size=1)


def descended(k: int, w: Any) -> Any:
    return CENTERS[k] + (1 - LR) ** 2 * (w - CENTERS[k])


def count(server: Any) -> int:
    """Number of clusters."""
    return len(server["together"].unique(dim=0))


def partition(run: Any) -> list[list[int]]:
    labels = run.strategy.method.clusters(run.server).tolist()
    return sorted([k for k, one in enumerate(labels) if one == label] for label in set(labels))


def run_cfl(method: CFL, rounds: int, engine: str = "vectorized", **settings: Any) -> Any:
    return fit(method, quadratics(), QuadraticModule(dim=2, lr=LR), rounds, engine, **settings)


@closed_form
def test_rounds_follow_the_algorithm_box(engine: str) -> None:
    """Two splits: the lonely client leaves, then the others part by sign."""
    run = run_cfl(CFL(0.2, 0.4, start_round=3), 40, engine)
    models, clusters = [np.zeros(2)], [list(range(6))]
    sizes = []
    for number in range(40):
        models, clusters = cfl_round(models, clusters, descended, 0.2, 0.4, number + 1 > 3)
        server = run.recorder.servers[number + 1]
        for model, members in zip(models, clusters, strict=True):
            for k in members:
                assert server["together"][k].nonzero().flatten().tolist() == members
                found = server["models"]["w"][k]
                np.testing.assert_allclose(found, model, rtol=1e-10, atol=1e-12)
        sizes.append(len(models))
    assert sizes[0] == 1
    assert sizes[-1] >= 3
    assert partition(run) == sorted(clusters)
    found = [run.strategy.client_state_dict(k)["w"].numpy() for k in range(6)]
    for model, members in zip(models, clusters, strict=True):
        for k in members:
            np.testing.assert_allclose(found[k], model, rtol=1e-10, atol=1e-12)


def test_a_classifier_trains_as_the_reference(engine: str) -> None:
    data, rounds = small_clients().subset([0, 2, 3, 4]), 4
    method = CFL(10.0, 1e-6, start_round=1)
    run = fit(method, data, softmax_module(), rounds, engine)

    def flat(w: Any) -> np.ndarray:
        return np.concatenate([w[name].ravel() for name in softmax.NAMES])

    def trained(k: int, vector: np.ndarray) -> np.ndarray:
        w = {"head.weight": vector[:75].reshape(3, 25), "head.bias": vector[75:]}
        for batch in softmax.minibatches(data, k, number, epochs=1):
            w = softmax.moved(w, softmax.gradient(w, *batch), -0.05)
        return flat(w)

    models = [flat(softmax.as_numpy(softmax_module().state_dict()))]
    clusters = [[0, 1, 2, 3]]
    for number in range(rounds):
        models, clusters = cfl_round(models, clusters, trained, 10.0, 1e-6, number >= 1)
    assert len(clusters) > 1
    assert partition(run) == sorted(clusters)
    for model, members in zip(models, clusters, strict=True):
        for k in members:
            found = flat({name: run.models[name][k].numpy() for name in softmax.NAMES})
            np.testing.assert_allclose(found, model, rtol=1e-10)


def test_without_splits_it_is_fedavg(engine: str) -> None:
    method = CFL(eps_mean=0.0, start_round=0)
    assert method.notes(ParameterSplit(small_module())) == [
        "eps_mean=0 makes CFL FedAvg with uniform weights."
    ]
    run = fit(method, small_clients(), small_module(), 3, engine, participation=3)
    average = FedAvg(weighting="uniform")
    expected = fit(average, small_clients(), small_module(), 3, engine, participation=3)
    assert_trees_close(run.strategy.global_state_dict(), expected.strategy.global_state_dict())


def test_opposite_groups_are_split_exactly() -> None:
    centers = np.array([[1.0], [-1.0], [1.1], [-0.9], [1.2], [-1.2], [-1.1], [0.9]])
    method = CFL(0.1, 0.15, start_round=0)
    run = fit(method, quadratics(centers), QuadraticModule(lr=LR), 3)
    assert partition(run) == [[0, 2, 4, 7], [1, 3, 5, 6]]


def test_the_round_of_the_first_split_is_the_one_after_start_round() -> None:
    centers = np.array([[1.0], [-1.0], [1.0], [-1.0]])
    for start in (0, 2, 4):
        method = CFL(0.1, 0.15, start_round=start)
        run = fit(method, quadratics(centers), QuadraticModule(lr=LR), 6)
        counts = [count(server) for server in run.recorder.servers]
        # Before round 0, and after rounds 0..start-1, there is one cluster.
        assert counts[: start + 2] == [1] * (start + 1) + [2]


class Norms(L.Callback):
    """What CFL logs after each round."""

    def __init__(self) -> None:
        self.rounds: list[list[float]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        found = trainer.callback_metrics
        self.rounds.append([float(found[f"cfl/{name}_norm"]) for name in ("mean", "max")])


def test_a_round_logs_the_norms_of_the_largest_cluster(engine: str) -> None:
    """From one model w all move by (1 - (1 - lr)^2) (c - w); the last split leaves four of six."""
    centers = np.array([[1.0], [-1.0], [1.1], [-0.9], [1.2], [0.9]])
    share, seen = 1 - (1 - LR) ** 2, Norms()
    method = CFL(0.1, 0.15, start_round=2)
    run = fit(method, quadratics(centers), QuadraticModule(lr=LR), 4, engine, callbacks=[seen])
    assert partition(run) == [[0, 2, 4, 5], [1, 3]]
    everybody, most = np.arange(6), np.array([0, 2, 4, 5])
    before, after = [everybody] * 3 + [most], [everybody] * 2 + [most] * 2
    w = np.zeros(1)
    for found, judged, averaged in zip(seen.rounds, before, after, strict=True):
        change = share * (centers - w)
        mean, lengths = change[judged].mean(0), np.linalg.norm(change[judged], axis=1)
        np.testing.assert_allclose(found, [np.linalg.norm(mean), lengths.max()], rtol=1e-5)
        w = w + change[averaged].mean(0)


@pytest.mark.filterwarnings("ignore:.*dirpath has changed from.*")
def test_a_run_resumed_inside_a_round_logs_its_norms(tmp_path: Path) -> None:
    """A checkpoint of the validation lies before what the round logs at its end."""

    def run(folder: Path, path: Path | None = None) -> list[list[float]]:
        seen, data = Norms(), quadratics()
        saving = ModelCheckpoint(
            folder, "{epoch}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=False
        )
        trainer = L.Trainer(
            max_epochs=3,
            accelerator="cpu",
            strategy=FederatedStrategy(CFL(), seed=0),
            callbacks=[seen, saving],
            logger=False,
        )
        trainer.fit(QuadraticModule(dim=2, lr=LR), data, data, ckpt_path=path)
        return seen.rounds

    whole = run(tmp_path / "whole")
    resumed = run(tmp_path / "resumed", tmp_path / "whole" / "epoch=1.ckpt")
    assert resumed == whole[1:]


def test_two_clients_stay_together() -> None:
    centers = np.array([[1.0], [-1.0]])
    run = fit(CFL(0.1, 0.1, 0), quadratics(centers), QuadraticModule(lr=LR), 3)
    assert partition(run) == [[0, 1]]


def test_the_split_does_not_depend_on_the_lengths_of_the_changes() -> None:
    """Scaling a client's Delta by a positive number changes no cosine."""
    generator = torch.Generator().manual_seed(0)
    change = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    scale = torch.rand(9, 1, generator=generator, dtype=torch.float64) * 100 + 0.01
    parts = []
    for each in (change, change * scale):
        unit = torch.nn.functional.normalize(each, dim=1)
        parts.append(bipartition(unit @ unit.T).tolist())
    assert parts[0] == parts[1]


@pytest.mark.parametrize("seed", range(5))
def test_the_partition_is_that_of_complete_linkage(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    change = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    unit = torch.nn.functional.normalize(change, dim=1)
    second = bipartition(unit @ unit.T)
    first, other = complete_linkage((unit @ unit.T).numpy())
    assert second.nonzero().flatten().tolist() == other
    assert (~second).nonzero().flatten().tolist() == first


def test_a_split_without_a_gap_is_refused_on_request() -> None:
    """Six directions around a circle, 60 degrees apart: parts of three span 120 degrees."""
    angles = torch.arange(6, dtype=torch.float64) * torch.pi / 3
    centers = torch.stack([angles.cos(), angles.sin()], 1)
    similarity = centers @ centers.T
    second = bipartition(similarity)
    assert gap(similarity, second) == pytest.approx(np.cos(2 * np.pi / 3) - np.cos(np.pi / 3))
    for min_gap, parts in ((None, 2), (0.0, 1)):
        method = CFL(0.01, 0.1, 0, min_gap=min_gap)
        run = fit(method, quadratics(centers), QuadraticModule(dim=2, lr=LR), 1)
        assert count(run.server) == parts


def test_a_cluster_waits_for_all_of_its_clients() -> None:
    """With two of four clients a round, changes since the last split are complete later."""
    centers = np.array([[1.0], [-1.0], [1.0], [-1.0]])
    method = CFL(0.5, 0.15, start_round=0)
    run = fit(method, quadratics(centers), QuadraticModule(lr=LR), 12, participation=2)
    seen: set[int] = set()
    waited = 0
    for number, cohort in enumerate(cohorts(12, 2, eligible=torch.arange(4))):
        seen |= set(cohort.tolist())
        server = run.recorder.servers[number + 1]
        if len(seen) < 4:
            waited += 1
            assert count(server) == 1
            assert server["fresh"].nonzero().flatten().tolist() == sorted(seen)
        else:
            assert count(server) == 2
            break
    assert waited > 0
    assert partition(run) == [[0, 2], [1, 3]]


def test_a_client_without_data_stops_no_split_and_stays_with_the_larger_part() -> None:
    centers = np.array([[1.0], [-1.0], [1.0], [-1.0], [7.0], [-1.0]])
    data = quadratic_clients([1.0] * 6, centers.tolist(), [2, 2, 2, 2, 0, 2], batch_size=1)
    run = fit(CFL(0.1, 0.15, 0), data, QuadraticModule(lr=LR), 2)
    assert partition(run) == [[0, 2], [1, 3, 4, 5]]


def test_means_are_inside_the_clusters_and_counters_take_the_maximum() -> None:
    models = {"w": torch.tensor([1.0, 2.0, 3.0]), "n": torch.tensor([5, 6, 7])}
    uploads = {"w": torch.tensor([10.0, 20.0, 40.0]), "n": torch.tensor([8, 2, 9])}
    member = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0]]).double()
    weights = torch.tensor([0.2, 0.5, 0.3]).double()
    means = cluster_means(models, uploads, member, weights)
    expected = torch.tensor([(10 * 0.2 + 40 * 0.3) / 0.5, 20.0, 3.0])
    torch.testing.assert_close(means["w"], expected)
    assert means["n"].tolist() == [9, 2, 7]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_means_of_clusters_whose_clients_have_not_moved_are_their_models(
    dtype: torch.dtype,
) -> None:
    models = {"w": torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).to(dtype)}
    cluster = torch.arange(31) % 2
    member = torch.nn.functional.one_hot(cluster, 2).T.double()
    weights = torch.full((31,), 1 / 31, dtype=torch.float64)
    means = cluster_means(models, {"w": models["w"][cluster]}, member, weights)
    assert torch.equal(means["w"], models["w"])


def test_masks_of_clusters_take_the_maximum() -> None:
    models = {"m": torch.tensor([[True, True], [True, False], [True, False]])}
    uploads = {"m": torch.tensor([[True, False], [False, False], [False, False]])}
    member = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0]]).double()
    means = cluster_means(models, uploads, member, torch.full((3,), 1 / 3))
    assert means["m"].tolist() == [[True, False], [False, False], [True, False]]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"eps_mean": -1.0}, "finite number >= 0, but got eps_mean=-1.0"),
        ({"eps_max": np.inf}, "finite number >= 0, but got eps_max=inf"),
        ({"start_round": -1}, "whole number >= 0, but got start_round=-1"),
        ({"min_gap": 3.0}, r"in \[-2, 2\], but got min_gap=3.0"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CFL(**settings)
