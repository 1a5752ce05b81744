"""Runs that go on with other clients: those that stay, that leave, that come back and that join."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl import ClientModules, load_clients, methods
from lightning_pfl.core.errors import CheckpointMismatchError
from lightning_pfl.core.tree import rows
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.federation.new_clients import starting_models
from lightning_pfl.methods import CFL, IFCA, MOCHA, SCAFFOLD, ClusterOracle, FedAvg, LocalOnly
from lightning_pfl.methods.base import Method
from lightning_pfl.testing import assert_trees_close, assert_trees_equal
from lightning_pfl.testing.conformance import Problem
from lightning_pfl.testing.fitting import Fit
from tests.methods.cases import CASES, PROBLEMS
from tests.trainer.setting import Quadratic, points, trainer

NEW = torch.tensor([4])
GRAPHS: dict[str, Callable[[], Method]] = {
    "ConvexClustering": methods.ConvexClustering,
    "FedU": lambda: methods.FedU("ring"),
    "GTVMin": lambda: methods.GTVMin("ring"),
    "HomologicalConstraints": lambda: methods.HomologicalConstraints("ring"),
    "SheafFMTL": lambda: methods.SheafFMTL("ring", edge_dim_ratio=0.5),
}
CLOSED = {*GRAPHS, "MOCHA"}
OPEN = {name: make for name, make in CASES.items() if name not in CLOSED}
# Known clusters and widths, and a step on the client's own data.
OF_ITS_OWN = ("ClusterOracle", "HeteroFL", "PerFedAvg")
OPEN["ClusterOracle"] = lambda: ClusterOracle(lambda client: client % 2)


LEAVING = ("FedRep", "FedU", "MOCHA", "SquaredPenalty")
JOINING = ("CFL", "FedRep", "IFCA", "L2GD", "SCAFFOLD", "SquaredPenalty")


def some_quick(names: Iterable[str], quick: Container[str]) -> list[Any]:
    """Mark the other methods as slow."""
    return [pytest.param(n, marks=[] if n in quick else [pytest.mark.slow]) for n in names]


def problem_of(name: str) -> Problem:
    return Problem(**PROBLEMS.get(name, {}))


def run(name: str, method: Method, clients: list[int], **settings: Any) -> Fit:
    """Rounds of some of five clients, in this order, known as ``"0"`` to ``"4"``."""
    problem = problem_of(name)
    data = problem.make_data(torch.float64, True).subset(clients)
    return problem.fit(method, data=data, **settings)


def states(ran: Fit, clients: list[int]) -> Any:
    return rows(ran.client_state, torch.tensor(clients))


@pytest.mark.parametrize("name", some_quick(CASES, LEAVING))
def test_clients_that_leave_keep_their_states(name: str, tmp_path: Path) -> None:
    begun = run(name, CASES[name](), [0, 1, 2, 3, 4], rounds=1)
    before = states(begun, [3])
    path = begun.save(tmp_path / "one.ckpt")
    after = run(name, CASES[name](), [4, 2, 0, 1], rounds=3, ckpt_path=path)
    assert after.strategy.client_names == ("0", "1", "2", "3", "4")
    assert all(3 not in round.info.index for round in after.recorder.rounds)
    assert_trees_equal(states(after, [3]), before)


@pytest.mark.parametrize("name", some_quick(OPEN, JOINING))
def test_clients_that_join_begin_as_new_clients(name: str, tmp_path: Path) -> None:
    begun = run(name, OPEN[name](), [0, 1, 2, 3], rounds=1)
    path = begun.save(tmp_path / "one.ckpt")
    joined = run(name, OPEN[name](), [4, 0, 1, 2, 3], rounds=1, ckpt_path=path)
    assert_trees_equal(states(joined, [0, 1, 2, 3]), begun.client_state)
    for key, axes in OPEN[name]().client_axes.items():
        corner = (slice(4),) * axes
        for mine, theirs in _leaves(joined.server[key], begun.server[key]):
            assert torch.equal(mine[corner], theirs)
    if name not in OF_ITS_OWN:
        module = problem_of(name).make_module(torch.float64)
        loaded = load_clients(path, module, OPEN[name]())
        assert_trees_equal(rows(joined.models, NEW), starting_models(loaded, 1, "personal"))
    # And it takes part.
    after = run(name, OPEN[name](), [4, 0, 1, 2, 3], rounds=2, ckpt_path=path)
    assert 4 in after.recorder.rounds[0].info.index


def _leaves(one: Any, other: Any) -> list[tuple[Any, Any]]:
    return [(one[k], other[k]) for k in one] if isinstance(one, dict) else [(one, other)]


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_the_others_go_on_bit_by_bit(engine: str, tmp_path: Path) -> None:
    """LocalOnly's clients know nothing of each other; the second one leaves and comes back."""
    settings = {"engine": engine}
    whole = run("LocalOnly", LocalOnly(), [0, 1, 2, 3], rounds=3, **settings)
    path = tmp_path / "last.ckpt"
    run("LocalOnly", LocalOnly(), [0, 1, 2, 3], rounds=1, **settings).save(path)
    second = run("LocalOnly", LocalOnly(), [4, 3, 1, 0], rounds=2, ckpt_path=path, **settings)
    assert second.strategy.client_names == ("0", "1", "2", "3", "4")
    second.save(path)
    last = run("LocalOnly", LocalOnly(), [0, 1, 2, 3], rounds=3, ckpt_path=path, **settings)
    assert_trees_equal(states(last, [0, 1, 3]), states(whole, [0, 1, 3]))
    assert_trees_equal(states(last, [4]), states(second, [4]))
    # The third one has taken part in two rounds; it has one minibatch, whatever the order.
    two = run("LocalOnly", LocalOnly(), [0, 1, 2, 3], rounds=2, **settings)
    assert_trees_close(states(last, [2]), states(two, [2]))


@pytest.mark.parametrize("name", some_quick(sorted(CLOSED), ("FedU", "MOCHA")))
def test_methods_that_tie_clients_together_refuse_new_ones(name: str, tmp_path: Path) -> None:
    make = GRAPHS.get(name, MOCHA)
    path = run(name, make(), [0, 1, 2, 3], rounds=1).save(tmp_path / "one.ckpt")
    match = rf"none can join a run of {name} \((each|the relationship)"
    with pytest.raises(CheckpointMismatchError, match=match):
        run(name, make(), [0, 1, 2, 3, 4], rounds=2, ckpt_path=path)


def test_scaffold_keeps_its_control_variate_the_mean_of_the_clients(tmp_path: Path) -> None:
    """The sum over n clients that the paper's update keeps must hold with n + 1.

    Of those with training data, which one has not.
    """
    trains = problem_of("SCAFFOLD").make_data(torch.float64, True).num_samples > 0
    assert trains.tolist() == [True, False, True, True, True]
    path = run("SCAFFOLD", SCAFFOLD(), [0, 1, 2, 3], rounds=2).save(tmp_path / "one.ckpt")
    ran = run("SCAFFOLD", SCAFFOLD(), [0, 1, 2, 3, 4], rounds=4, ckpt_path=path)
    for bank, server in zip(ran.recorder.banks, ran.recorder.servers, strict=True):
        for name, control in server["control"].items():
            mean = bank["control"][name][trains].mean(0)
            torch.testing.assert_close(mean, control, rtol=0, atol=1e-14)


def test_cfl_puts_new_clients_into_the_largest_cluster() -> None:
    method = CFL()
    run("CFL", method, [0, 1, 2, 3, 4], rounds=1)
    together = torch.tensor([[1, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]).bool()
    begun = method.init_server(method.parameter_split.model())
    server = {key: leaf[:4] for key, leaf in begun.items() if key != "models"}
    server["models"] = {
        key: torch.arange(4.0).view(-1, *[1] * (leaf.ndim - 1)).expand_as(leaf[:4])
        for key, leaf in begun["models"].items()
    }
    server["models"] = {key: leaf[[0, 1, 1, 3]] for key, leaf in server["models"].items()}
    server["together"] = together
    grown, _ = method.admit(server, begun, {})
    assert method.clusters(grown).tolist() == [0, 1, 1, 2, 1]
    for leaf in grown["models"].values():
        assert torch.equal(leaf[4], leaf[1])
    assert grown["fresh"].tolist() == [False] * 5


def test_clients_of_several_architectures_join(tmp_path: Path) -> None:
    groups = {"0": "one", "1": "other", "2": "one", "3": "other"}

    def modules() -> ClientModules:
        return ClientModules({"one": Quadratic(), "other": Quadratic(lr=0.125)}, groups)

    def fitted(clients: list[int], rounds: int, **fit: Any) -> Any:
        ran = trainer(LocalOnly(), max_epochs=rounds)
        ran.fit(modules(), named(points()).subset(clients), named(points()).subset([0]), **fit)
        return ran

    path = tmp_path / "one.ckpt"
    fitted([0, 1, 2], 1).save_checkpoint(path)
    whole, grown = fitted([0, 1, 2], 2), fitted([3, 1, 0, 2], 2, ckpt_path=str(path))
    for client in ("0", "1", "2"):
        ours, theirs = (r.strategy.client_state_dict(client)["w"] for r in (grown, whole))
        assert torch.equal(ours, theirs)
    assert grown.strategy.client_state_dict("3")["w"].any()


def named(data: FederatedTensorDataset) -> FederatedTensorDataset:
    return data.subset(range(data.num_clients))


def loaders(names: str) -> dict[str, DataLoader[Any]]:
    return {
        name: DataLoader(
            TensorDataset(torch.full((4, 2), float(ord(name)), dtype=torch.float64)), 2
        )
        for name in names
    }


def test_lists_and_strangers_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "one.ckpt")
    first = trainer(FedAvg(), max_epochs=1)
    first.fit(Quadratic(), loaders("abc"), loaders("abc"))
    first.save_checkpoint(path)
    with pytest.raises(CheckpointMismatchError, match=r"got a list of 2\. Give a dict by client"):
        trainer(FedAvg()).fit(
            Quadratic(), list(loaders("ab").values()), loaders("a"), ckpt_path=path
        )
    with pytest.raises(CheckpointMismatchError, match="but got 'x', 'y', none of which is in it"):
        trainer(FedAvg()).fit(Quadratic(), loaders("xy"), loaders("x"), ckpt_path=path)


def test_loaders_of_other_clients_train_and_validate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "one.ckpt")
    first = trainer(LocalOnly(), max_epochs=1)
    first.fit(Quadratic(), loaders("abc"), loaders("abc"))
    first.save_checkpoint(path)
    run = trainer(LocalOnly(), max_epochs=2)
    with caplog.at_level(logging.INFO):
        run.fit(Quadratic(), loaders("dca"), loaders("da"), ckpt_path=path)
    assert "have no training data now and keep their states: 'b'." in caplog.text
    assert "Clients that join as new ones (1): 'd'." in caplog.text
    assert run.strategy.federation.num_samples.tolist() == [4, 4, 4, 4]
    assert set(run.strategy.client_metrics()["val_loss"]) == {"a", "d"}
    kept = first.strategy.client_state_dict("b")["w"]
    assert torch.equal(run.strategy.client_state_dict("b")["w"], kept)


def test_ifca_counts_no_choice_of_new_clients(tmp_path: Path) -> None:
    path = run("IFCA", IFCA(), [0, 2, 3], rounds=1).save(tmp_path / "one.ckpt")
    ran = run("IFCA", IFCA(), [0, 2, 3, 4], rounds=1, ckpt_path=path)
    assert ran.server["cluster"][3] == -1
