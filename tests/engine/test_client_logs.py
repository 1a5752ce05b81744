"""Logged values: each client's reduction over its minibatches, weighted by samples."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.engine.client_logs import (
    DEFERRED,
    LOSS,
    ClientLogs,
    LogsInTurn,
    LogsOfSteps,
    Reduction,
)

CLIENTS, BATCHES = 3, DEFERRED + 50
VALUES = torch.rand(BATCHES, CLIENTS, generator=torch.Generator().manual_seed(0))
SIZES = torch.randint(1, 9, (BATCHES, CLIENTS), generator=torch.Generator().manual_seed(1))


def logs() -> ClientLogs:
    return ClientLogs(CLIENTS, torch.device("cpu"))


@pytest.mark.parametrize("equal_sizes", [True, False])
@pytest.mark.parametrize("names", [["mean"], ["mean", "sum", "min", "max"]])
def test_reductions(equal_sizes: bool, names: list[str]) -> None:
    taken = logs()
    sizes = torch.full_like(SIZES, 4) if equal_sizes else SIZES
    for values, size in zip(VALUES, sizes, strict=True):
        reductions = {name: Reduction(name) for name in names}
        given = 4 if equal_sizes else size
        taken.add(dict.fromkeys(names, values), given, None, reductions)
    values, weights = VALUES.double().numpy(), sizes.numpy()
    expected = {
        "mean": np.average(values, axis=0, weights=weights),
        "sum": values.sum(0),
        "min": values.min(0),
        "max": values.max(0),
    }
    found = taken.compute()
    assert list(found) == names
    for name in names:
        assert found[name].dtype == torch.float64
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-12)


@pytest.mark.parametrize("rows", [slice(0, 2), torch.tensor([0, 2])])
def test_rows_without_a_value_are_nan(rows: slice | torch.Tensor) -> None:
    taken = logs()
    for values in ([1.0, 3.0], [3.0, 5.0]):
        taken.add({"x": torch.tensor(values)}, torch.tensor([2, 2]), rows)
    expected = torch.full((CLIENTS,), torch.nan, dtype=torch.float64)
    expected[rows] = torch.tensor([2.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(taken.compute()["x"], expected, equal_nan=True)


def test_values_of_all_and_of_some_clients_are_put_together() -> None:
    taken = logs()
    taken.add({"x": torch.tensor([1.0, 1.0, 1.0])}, torch.tensor([2, 2, 2]), None)
    taken.add({"x": torch.tensor([4.0])}, torch.tensor([1]), torch.tensor([1]))
    taken.add({"x": torch.tensor([1.0, 1.0, 4.0])}, torch.tensor([2, 2, 2]), None)
    assert taken.compute()["x"].tolist() == [1.0, (2 + 4 + 2) / 5, 2.5]


def test_minibatches_of_ever_fewer_first_clients() -> None:
    """As clients finish; some minibatches have a number of samples for all, others one of each."""
    taken, every = logs(), [list[tuple[float, int]]() for _ in range(CLIENTS)]
    for number, values in enumerate(VALUES[:40]):
        active = CLIENTS - number // 15
        size = torch.arange(1, active + 1) if number % 7 == 3 else 4
        taken.add({"x": values[:active]}, size, None if active == CLIENTS else slice(0, active))
        for client in range(active):
            every[client].append((float(values[client]), client + 1 if number % 7 == 3 else 4))
    expected = [sum(v * n for v, n in one) / sum(n for _, n in one) for one in every]
    np.testing.assert_allclose(taken.compute()["x"], expected, rtol=1e-12)


def test_minibatches_of_several_sizes() -> None:
    """The last one of a client is smaller, and an empty one doesn't count."""
    taken, sizes = logs(), [4, 4, 3, 0, 4, 1]
    for values, size in zip(VALUES, sizes, strict=False):
        taken.add({"x": values if size else values * torch.nan}, size, None)
    counted = [number for number, size in enumerate(sizes) if size]
    weights = [sizes[number] for number in counted]
    expected = np.average(VALUES[counted].double().numpy(), axis=0, weights=weights)
    np.testing.assert_allclose(taken.compute()["x"], expected, rtol=1e-12)


def test_values_of_clients_that_are_done_do_not_count() -> None:
    """Whatever they are; a value that counts does, if it isn't finite."""
    taken = logs()
    for values, sizes in (
        ([1.0, 3.0, torch.inf], [2, 3, 0]),
        ([2.0, torch.nan], [1, 0]),
        ([6.0], [1]),
    ):
        rows = slice(0, len(values))
        taken.add(
            {"x": torch.tensor(values), "y": -torch.tensor(values)}, torch.tensor(sizes), rows
        )
    found = taken.compute()
    assert found["x"].tolist()[:2] == [(2 + 2 + 6) / 4, 3.0]
    assert found["y"].tolist()[:2] == [-(2 + 2 + 6) / 4, -3.0]
    assert found["x"][2].isnan()
    taken.add({"x": torch.tensor([torch.inf, 1.0])}, torch.tensor([1, 1]), slice(0, 2))
    assert taken.compute()["x"].tolist()[:2] == [torch.inf, (9.0 + 1.0) / 4]


@pytest.mark.parametrize("first", [torch.float32, torch.float64])
def test_values_of_several_types_keep_their_digits(first: torch.dtype) -> None:
    taken, third = logs(), 1 / 3
    taken.add({"x": torch.full((3,), 0.5, dtype=first)}, torch.tensor([1, 1, 1]), None)
    taken.add({"x": torch.full((3,), third, dtype=torch.float64)}, torch.tensor([1, 2, 1]), None)
    assert taken.compute()["x"].tolist() == [(0.5 + n * third) / (1 + n) for n in (1, 2, 1)]


def test_names_may_come_and_go() -> None:
    taken = logs()
    one = torch.ones(CLIENTS)
    for names in (["a"], ["a", "b"], ["b"]):
        taken.add({name: one * len(names) for name in names}, torch.full((CLIENTS,), 2), None)
    found = taken.compute()
    assert found["a"].tolist() == [1.5] * CLIENTS
    assert found["b"].tolist() == [1.5] * CLIENTS


def test_nothing_logged() -> None:
    assert logs().compute() == {}


@pytest.mark.parametrize("silent", [[0, 1], [0], [1], [2]])
def test_minibatches_without_a_value_are_left_out(silent: list[int]) -> None:
    """Of three minibatches of one size some log 1, 2 and 4, and the others nothing."""
    logs, values = ClientLogs(1, torch.device("cpu")), [1.0, 2.0, 4.0]
    for number, value in enumerate(values):
        logs.add({} if number in silent else {"x": torch.tensor([value])}, 5, None)
    said = [value for number, value in enumerate(values) if number not in silent]
    assert float(logs.compute()["x"]) == pytest.approx(sum(said) / len(said), rel=1e-15)


def test_steps_that_log_nothing_at_all() -> None:
    logs = ClientLogs(1, torch.device("cpu"))
    logs.add({}, 5, None)
    logs.add({}, 5, None)
    assert logs.compute() == {}


def test_a_loss_that_is_not_finite_differs_from_no_loss() -> None:
    logs = ClientLogs(3, torch.device("cpu"))
    logs.add({"loss*": torch.tensor([1.0, torch.nan])}, torch.tensor([2, 2]), torch.tensor([0, 1]))
    loss = logs.compute()["loss*"]
    assert loss[0] == 1.0
    assert loss[1].isinf()
    assert loss[2].isnan()


def test_values_can_follow_a_reading() -> None:
    logs = ClientLogs(1, torch.device("cpu"))
    for value in (1.0, 4.0):
        logs.add({"x": torch.tensor([value])}, 5, None)
        read = float(logs.compute()["x"])
    assert read == (1.0 + 4.0) / 2


# --- clients one after another ---


def client(values: list[float], sizes: list[int], name: str = "x", **reduction: Any) -> LogsOfSteps:
    logs = LogsOfSteps()
    reductions = {name: Reduction(**reduction)} if reduction else None
    for value, size in zip(values, sizes, strict=True):
        logs.add({name: torch.tensor([value])}, size, None, reductions)
    return logs


def of_each(clients: list[LogsOfSteps]) -> LogsInTurn:
    found = LogsInTurn(len(clients), torch.device("cpu"))
    for row, logs in enumerate(clients):
        found.add(row, logs)
    return found


def numbers(generator: random.Random, count: int) -> tuple[list[float], list[int]]:
    sizes = [generator.randrange(1, 11) for _ in range(count)]
    return [float(torch.tensor(generator.random())) for _ in sizes], sizes


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_each_client_has_the_mean_of_its_own_values(most: int, monkeypatch: Any) -> None:
    """To the last bit of sums in order, whoever else logs, and however many are summed at once."""
    monkeypatch.setattr("lightning_pfl.engine.client_logs.IN_TURN", most)
    generator = random.Random(0)
    given = [numbers(generator, count) for count in (3, 1, 12, 5)]
    found = of_each([client(*each) for each in given]).compute()["x"].tolist()
    for (values, sizes), mean in zip(given, found, strict=True):
        total = 0.0
        for value, size in zip(values, sizes, strict=True):
            total += value * size
        assert mean == total / sum(sizes)


def test_clients_that_log_otherwise_are_among_them() -> None:
    """By a weight, by a sum, under other names, more than are queued, and nothing."""
    many = [1.0, 3.0] * (DEFERRED // 2 + 1)
    silent = LogsOfSteps()
    each = [
        client([1.0, 4.0], [1, 2]),
        client([1.0, 4.0], [5, 5], weight=2.0),
        client([1.0, 4.0], [5, 5], kind="sum"),
        silent,
        client([1.0, 4.0], [3, 3], "y"),
        client(many, [2] * len(many)),
    ]
    logs = of_each(each)
    logs.add_computed(3, {"y": torch.tensor([8.0])})
    found = logs.compute()
    assert list(found) == ["x", "y"]
    assert found["x"].nan_to_num(-1).tolist() == [3.0, 2.5, 5.0, -1.0, -1.0, 2.0]
    assert found["y"].nan_to_num(-1).tolist() == [-1.0, -1.0, -1.0, 8.0, 2.5, -1.0]


def test_losses_of_each_client() -> None:
    """One that isn't finite is Inf, none is NaN; alone they are the same."""
    each = [
        client([0.1, 0.7], [3, 4], LOSS),
        client([1.0, torch.nan], [1, 1], LOSS),
        client([], []),
    ]
    values, losses = of_each(each).take_losses()
    assert values == {}
    assert float(losses[0]) == pytest.approx((3 * 0.1 + 4 * 0.7) / 7, rel=1e-7)
    assert losses.isinf().tolist() == [False, True, False]
    assert losses.isnan().tolist() == [False, False, True]
    for logs, loss in zip(each, losses, strict=True):
        assert torch.equal(
            logs.loss(torch.device("cpu")).nan_to_num(-1), loss.view(1).nan_to_num(-1)
        )


def test_smallest_and_largest_of_each_client() -> None:
    """One that isn't a number stays, as clients' minima do that are taken side by side."""
    given = [[3.0, 1.0, 2.0], [5.0], [1.0, torch.nan, 0.0]]
    for kind, expected in (("min", [1.0, 5.0]), ("max", [3.0, 5.0])):
        each = [client(values, [4] * len(values), kind=kind) for values in given]
        found = of_each(each).compute()["x"]
        assert found[:2].tolist() == expected
        assert found[2].isnan()


@pytest.mark.parametrize("most", [1, 4, 1000])
def test_weights_that_change_leave_the_order(most: int, monkeypatch: Any) -> None:
    """A client's sum has its own order, also where another weights its values in another one."""
    monkeypatch.setattr("lightning_pfl.engine.client_logs.IN_TURN", most)
    generator = random.Random(1)
    given = [numbers(generator, 9) for _ in range(3)]
    each = []
    for turn, (values, sizes) in enumerate(given):
        logs = LogsOfSteps()
        for at, (value, size) in enumerate(zip(values, sizes, strict=True)):
            weight = None if (at + turn) % 2 else 0.3
            logs.add({"x": torch.tensor([value])}, size, None, {"x": Reduction(weight=weight)})
        each.append(logs)
    for turn, ((values, sizes), mean) in enumerate(
        zip(given, of_each(each).compute()["x"].tolist(), strict=True)
    ):
        total = weights = 0.0
        for at, (value, size) in enumerate(zip(values, sizes, strict=True)):
            weight = size if (at + turn) % 2 else 0.3
            total, weights = total + value * weight, weights + weight
        assert mean == total / weights
