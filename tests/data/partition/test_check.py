"""What a partition of one's own gives: taken as it comes, or refused with the numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_pfl.data import (
    IID,
    Digits,
    FeatureSkew,
    FederatedDataModule,
    HeldOutClasses,
    Partition,
    QuadraticClients,
)

pytestmark = pytest.mark.quick


class Given(Partition):
    """Gives what it is given, from `split` and, unless told otherwise, from `apply`."""

    def __init__(self, parts: Any, applied: Any = None) -> None:
        self.parts, self.applied = parts, parts if applied is None else applied

    def split(self, labels: Any, num_clients: Any, rng: np.random.Generator) -> Any:
        return self.parts, None

    def apply(self, labels: Any, plan: Any, rng: np.random.Generator) -> Any:
        return self.applied


class PartsAlone(Given):
    def split(self, labels: Any, num_clients: Any, rng: np.random.Generator) -> Any:
        return self.parts


def given(parts: Any, applied: Any = None, clients: Any = 2) -> Any:
    """Split the six training and the six test samples of a source."""
    FederatedDataModule(QuadraticClients(samples=3), Given(parts, applied), clients).setup()


Case = tuple[Callable[[], Any], type[Exception], str]
CASES: dict[str, Case] = {
    "too few parts": (
        lambda: given([[0, 1]]),
        ValueError,
        "parts for num_clients=2 clients, but got 1 from Given. Return one array",
    ),
    "too many parts": (
        lambda: given([[0], [1], [2]]),
        ValueError,
        "parts for num_clients=2 clients, but got 3 from Given. Return one array",
    ),
    "no parts": (
        lambda: given([], clients=None),
        ValueError,
        "parts for at least one client, but got 0 from Given. Return one array",
    ),
    "parts for other clients in the test set": (
        lambda: given([[0, 1], [2, 3]], [[0]]),
        ValueError,
        r"parts for num_clients=2 clients, but got 1 from Given\.apply",
    ),
    "parts by name": (
        lambda: given({"a": [0], "b": [1]}),
        TypeError,
        "a list with one array .* but Given returned a dict. Return a list",
    ),
    "parts that are masks": (
        lambda: given([[0, 1], np.ones(6, dtype=bool)]),
        TypeError,
        r"a vector of integers, but got dtype bool and shape \(6,\) from Given for client 1.*zero",
    ),
    "parts of parts": (
        lambda: given([[[0, 1]], [2]]),
        TypeError,
        r"dtype int64 and shape \(1, 2\) from Given for client 0",
    ),
    "position behind the last": (
        lambda: given([[0, 1], [5, 6]]),
        ValueError,
        r"positions in 0\.\.5, but got 6 from Given for client 1\. Positions count",
    ),
    "position before the first": (
        lambda: given([[0, 1], [5]], [[0, -1], []]),
        ValueError,
        r"positions in 0\.\.5, but got -1 from Given\.apply for client 0",
    ),
    "parts without a plan": (
        lambda: FederatedDataModule(QuadraticClients(), PartsAlone([[0], [1]]), 2).setup(),
        TypeError,
        r"samples, plan\), but PartsAlone returned a list. End with `return parts, plan`",
    ),
    "a function as partition": (
        lambda: FederatedDataModule(Digits(), lambda labels, clients, rng: [[0]]),  # type: ignore[arg-type]
        TypeError,
        "`partition` to be a Partition, but got partition=<function .* subclass of Partition",
    ),
    "a class as partition": (
        lambda: FederatedDataModule(Digits(), IID),  # type: ignore[arg-type]
        TypeError,
        "`partition` to be a Partition, but got partition=<class .*IID'>. Use an instance",
    ),
    "a class as base of a feature skew": (
        lambda: FeatureSkew("rotate", base=IID),  # type: ignore[arg-type]
        TypeError,
        "`base` to be a Partition, but got base=<class",
    ),
    "a class as base beside held-out classes": (
        lambda: HeldOutClasses([1], 1, base=IID),  # type: ignore[arg-type]
        TypeError,
        "`base` to be a Partition, but got base=<class",
    ),
    "a class as source": (
        lambda: FederatedDataModule(Digits),  # type: ignore[arg-type]
        TypeError,
        "`source` to be a Source, but got source=<class .*Digits'>. Use an instance",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_partition_is_refused(case: str) -> None:
    call, error, match = CASES[case]
    with pytest.raises(error, match=match):
        call()
