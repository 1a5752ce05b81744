"""The plain loop of the table and the package train the same models."""

import pytest

from benchmarks import table
from benchmarks.plain import METHODS
from benchmarks.workloads import WORKLOADS, Workload
from lightning_pfl.models import MLP

TINY = Workload(
    "tiny", lambda: MLP([6, 5, 10]), (6,), clients=4, samples=9, batch_size=4, cohort=3,
    test_samples=2, head_epochs=2, sigma=0.5,
)  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_both_sides_end_with_the_same_model(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    monkeypatch.setattr(table, "APART", 1e-4)
    cell = table.measure("tiny", method, "sequential", rounds=1, threads=1)
    assert cell.apart < 1e-4


def test_a_loop_that_trains_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    monkeypatch.setattr("benchmarks.plain.PFEDME", 3.0)
    with pytest.raises(AssertionError, match="tiny, PFedMe, sequential: the models differ"):
        table.measure("tiny", "PFedMe", "sequential", rounds=1, threads=1)
