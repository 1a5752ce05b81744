"""Nearest neighbours at evaluation, against a NumPy reference on the clients' own models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl.callbacks import NearestNeighbours
from lightning_pfl.core.randomness import derive, permutation
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.methods import FedAvg, FedEM, FedRep
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing import QuadraticModule, fit
from lightning_pfl.testing.conformance import small_clients, small_module
from lightning_pfl.testing.fitting import Recorder
from tests.callbacks.setting import Data, classes, network, quadratics, trainer

ENGINES = ["vectorized", "sequential"]
Array = np.ndarray


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(1, keepdims=True))
    found: Array = e / e.sum(1, keepdims=True)
    return found


def votes(queries: Array, keys: Array, labels: Array, neighbours: int) -> Array:
    """One query after another."""
    found: Array = np.zeros((len(queries), 3))
    for row, query in zip(found, queries, strict=True):
        distances = ((keys - query) ** 2).sum(1)
        for i in np.argsort(distances, kind="stable")[:neighbours]:
            row[labels[i]] += np.exp(-distances[i] / keys.shape[1])
    found /= found.sum(1, keepdims=True)
    return found


def numbers(run: Any, client: int, data: Any, rows: Any = None) -> tuple[Array, Array, Array]:
    """Features, probabilities and labels of a client's samples, with its model in eval mode."""
    module = run.strategy.client_module(client)
    x, y = data.gather(data.indices[client] if rows is None else rows)
    with torch.no_grad():
        features = module.backbone(x)
        return features.numpy(), softmax(module.head(features).numpy()), y.numpy()


def mixture(run: Any, train: Any, held: Any, share: float, neighbours: int = 3) -> list[Array]:
    """Each client's probabilities of its held-out samples, and the true ones' losses."""
    losses = []
    for client in range(train.num_clients):
        if not len(held.indices[client]):
            continue
        queries, p, y = numbers(run, client, held)
        keys, _, labels = numbers(run, client, train)
        if len(labels):
            p = share * votes(queries, keys, labels, neighbours) + (1 - share) * p
        with np.errstate(divide="ignore"):  # a class without a vote has probability 0
            losses.append(-np.log(p[np.arange(len(y)), y]))
    return losses


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", [FedAvg, FedRep])
def test_matches_the_reference(engine: str, method: Any) -> None:
    train, held = classes()
    callback = NearestNeighbours(3, 0.3, when="evaluation")
    run = fit(method(), train, network(), 2, engine, 3, val_data=held, callbacks=[callback])
    losses = [each.mean() for each in mixture(run, train, held, 0.3)]
    assert run.metrics["knn/val_loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert run.metrics["knn/val_loss/worst"] == pytest.approx(max(losses), rel=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("alone", [False, True])
def test_a_client_without_samples_uses_its_model(engine: str, alone: bool) -> None:
    data = small_clients()
    held = [torch.arange(4 if k == 1 or not alone else 0) for k in range(5)]
    everybody = FederatedTensorDataset(data.fields, held, batch_size=2)
    run = fit(
        FedAvg(), data, small_module(), 1, engine, val_data=everybody,
        callbacks=[NearestNeighbours(2, 0.6)],
    )  # fmt: skip
    losses = [each.mean() for each in mixture(run, data, everybody, 0.6, 2)]
    assert run.metrics["knn/val_loss"] == pytest.approx(np.mean(losses), rel=1e-6)


def test_no_share_is_the_model() -> None:
    train, held = classes()
    run = fit(FedRep(), train, network(), 2, val_data=held, callbacks=[NearestNeighbours(share=0)])
    for name in ("loss", "acc", "acc/worst_decile"):
        assert run.metrics[f"knn/val_{name}"] == pytest.approx(run.metrics[f"val_{name}"], rel=1e-6)


def test_the_nearest_neighbour_of_a_training_sample_is_itself() -> None:
    train, _ = classes()
    callback = NearestNeighbours(1, 1.0)
    run = fit(FedAvg(), train, network(), 1, val_data=train, callbacks=[callback])
    assert run.metrics["knn/val_acc/worst"] == 1.0
    assert run.metrics["val_acc"] < 1.0


def test_a_client_stores_a_random_part_of_its_samples() -> None:
    train, held = classes()
    callback = NearestNeighbours(2, 0.5, capacity=3)
    run = fit(FedAvg(), train, network(), 1, val_data=held, callbacks=[callback])
    losses = []
    for client, mine in enumerate(train.indices):
        queries, p, y = numbers(run, client, held)
        kept = permutation(len(mine), derive(0, "neighbours", client))[:3].sort().values
        keys, _, labels = numbers(run, client, train, mine[kept])
        p = 0.5 * votes(queries, keys, labels, 2) + 0.5 * p
        losses.append(-np.log(p[np.arange(len(y)), y]).mean())
    assert run.metrics["knn/val_loss"] == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_validation_data_choose_the_share_and_test_data_nothing(
    engine: str, tmp_path: Path
) -> None:
    train, held = classes()
    test = FederatedTensorDataset(held.fields, [rows.flip(0)[:3] for rows in held.indices])
    callback = NearestNeighbours(3, "validation")
    data = Data(train, held, test)
    run = fit(FedRep(), data, network(), 2, engine, callbacks=[callback])
    (found,) = run.trainer.test(run.module, data, verbose=False)
    # So do they in a Trainer that hasn't seen them in a fit.
    another = trainer(FedRep(), NearestNeighbours(3, "validation"), engine=engine, seed=0)
    path = run.save(tmp_path / "last.ckpt")
    (again,) = another.test(network(), data, ckpt_path=path, verbose=False)
    assert again["knn/test_loss"] == pytest.approx(found["knn/test_loss"], rel=1e-6)
    losses = []
    for client in range(5):
        grid = [mixture(run, train, held, s / 10)[client].mean() for s in range(11)]
        losses.append(mixture(run, train, test, int(np.argmin(grid)) / 10)[client].mean())
    assert found["knn/test_loss"] == pytest.approx(np.mean(losses), rel=1e-6)


def test_users_dataloaders_give_the_same(tmp_path: Path) -> None:
    train, held = classes()

    def loaders(data: Any) -> list[Any]:
        pairs = [data.gather(rows) for rows in data.indices]
        return [DataLoader(TensorDataset(*pair), batch_size=4) for pair in pairs]

    def run(a: Any, b: Any) -> Any:
        callback = NearestNeighbours(3, 0.4, capacity=5)
        return fit(FedAvg(), a, network(), 1, val_data=b, callbacks=[callback]).metrics

    expected, found = run(train, held), run(loaders(train), loaders(held))
    assert found["knn/val_loss"] == pytest.approx(expected["knn/val_loss"], rel=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_a_clients_values_have_the_same_bits_beside_whichever_others(seed: int) -> None:
    """As in several processes, each of which evaluates some; clients' sizes are different."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, 24, (6,), generator=generator)
    x = torch.randn(int(sizes.sum()), 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (len(x),), generator=generator)
    rows = torch.arange(len(x)).split(sizes.tolist())
    train = FederatedTensorDataset((x, y), rows, batch_size=5)
    held = FederatedTensorDataset((x, y), [mine[::2] for mine in rows], batch_size=5)
    module, callback = network(), NearestNeighbours(10, 0.4, when="evaluation")
    made = trainer(FedAvg(), callback)
    made.validate(module, Data(train, held), verbose=False)
    module.eval()

    def values(clients: Tensor) -> Tensor:
        with torch.no_grad():
            found = callback.evaluate(made, held, clients, clients, "validation_step")
        losses: Tensor = found.values["val_loss"]
        return losses

    together = values(torch.arange(6))
    for some in ([0, 1, 2], [3, 4], [5], [1, 3, 5], [0, 2, 4]):
        assert torch.equal(values(torch.tensor(some)), together[some])


def test_training_is_the_same_with_it() -> None:
    train, held = classes()
    callback = NearestNeighbours(when="evaluation")
    a = fit(FedAvg(), train, network(), 2, val_data=held, callbacks=[callback])
    b = fit(FedAvg(), train, network(), 2, val_data=held)
    for name, leaf in b.server["model"].items():
        assert torch.equal(a.server["model"][name], leaf)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"neighbours": 0}, "`neighbours` to be a whole number >= 1, but got neighbours=0"),
        ({"share": 1.5}, r"`share` to be in \[0, 1\] or 'validation', but got share=1.5"),
        ({"scale": 0}, "`scale` to be a finite number > 0, but got scale=0"),
        ({"capacity": 0}, "`capacity` to be a whole number >= 1, but got capacity=0"),
        ({"when": "start"}, "`when` to be 'end' or 'evaluation', but got when='start'"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        NearestNeighbours(**settings)


def regression() -> Any:
    """A number for each of four samples."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    data = FederatedTensorDataset((x, x[:, :1]), [[0, 1], [2, 3]])
    module = PersonalizedModule(nn.Identity(), nn.Linear(6, 1), loss="mse").double()
    return FedAvg(), data, module


def manual() -> Any:
    """The conformance suite's module with steps of its own."""
    module = small_module()
    module.automatic_optimization = False
    return FedAvg(), small_clients(), module


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (manual, "a module with automatic optimization for NearestNeighbours"),
        (
            lambda: (FedEM(2), small_clients(), small_module()),
            "clients that predict by one model, .* but FedEM has several",
        ),
        (regression, r"\(inputs, class numbers\), .* but got targets \(1, 1\)"),
        (
            lambda: (FedAvg(), quadratics(), QuadraticModule()),
            "a submodule `head`, .* but got QuadraticModule",
        ),
    ],
)
def test_what_cannot_vote_is_refused(make: Any, match: str) -> None:
    method, data, module = make()
    with pytest.raises(Exception, match=match):
        fit(method, data, module, 1, val_data=data, callbacks=[NearestNeighbours()])


@pytest.mark.parametrize("make", [manual, lambda: (FedAvg(), quadratics(), QuadraticModule())])
def test_a_module_that_shows_no_features_is_refused_before_it_trains(make: Any) -> None:
    method, data, module = make()
    recorder = Recorder()
    with pytest.raises(Exception, match="for NearestNeighbours"):
        fit(method, data, module, callbacks=[NearestNeighbours(), recorder])
    assert recorder.rounds == []


def test_validation_data_must_be_there_and_not_be_test_data() -> None:
    train, held = classes()
    callback = NearestNeighbours(share="validation")
    with pytest.raises(Exception, match="validation data for share='validation', but got none"):
        fit(FedAvg(), train, network(), 1, callbacks=[callback])
    data: Any = Data(train, held)
    data.val_split = "test"
    with pytest.raises(Exception, match="aren't test data, but got val_split='test'"):
        fit(FedAvg(), data, network(), 1, callbacks=[callback])
