"""Small networks in modules of users train as the plain loop's do, in first and in later rounds."""

from types import SimpleNamespace

import pytest

from benchmarks import cells, users
from benchmarks.workloads import NETWORKS, of_users

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "norm" else SLOW) for name in NETWORKS]
)
def test_both_sides_end_with_the_same_models(name: str) -> None:
    assert cells.check_workload(name, of_users(name, 1.0), "FedAvg", "auto") < cells.SAME


def test_unequal_clients_have_last_minibatches_of_many_sizes_and_none_of_one() -> None:
    sizes = of_users("norm", 1.0).sizes()
    assert len({size % 10 for size in sizes}) > 6
    assert 1 not in {size % 10 for size in sizes}
    assert max(sizes) > 5 * min(sizes)
    train, test = of_users("norm", 1.0).data()
    assert train.num_samples.tolist() == sizes
    assert test.num_samples.tolist() == [size // 4 for size in sizes]


def test_a_row_is_of_first_and_of_later_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two rounds of 6 and 2 seconds, where the loop takes 2, and three of 4, 1 and 2."""

    def run(*_: object) -> tuple[cells.InTurns, object]:
        clock = cells.InTurns(0.0, ())
        clock.ours = [(took, 0.0) for took in (6.0, 2.0, 4.0, 1.0, 2.0)]
        clock.theirs = [(2.0, 0.0)] * 5

        engine = SimpleNamespace(choices={"training_step": "sequential (for some reason)"})
        return clock, SimpleNamespace(federation=SimpleNamespace(engine=engine))

    monkeypatch.setattr(users, "run", run)
    monkeypatch.setattr(users, "FIRST", 2)
    found = users.measure("mlp", "FedAvg", 0.0, check=False)
    expected = {"first": 0.5, "later": 1.0, "cpu_seconds": 2.0}
    assert found == {**expected, "choice": "sequential (for some reason)"}
    assert users.Row(**found).describe("mlp, FedAvg, 0.0").split()[:4] == [
        "mlp,",
        "FedAvg,",
        "0.0",
        "0.50",
    ]


def test_all_networks_methods_and_sizes_are_measured() -> None:
    assert len(set(users.combinations())) == 6 * 3 * 2
