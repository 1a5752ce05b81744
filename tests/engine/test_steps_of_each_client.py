"""Numbers of passes and of steps that differ between clients, given by their names.

K_k steps of client k map w to c_k + (1 - lr)^K_k (w - c_k).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl.methods import FedAvg, FedRep, FedU, SquaredPenalty
from lightning_pfl.testing import assert_trees_close, fit
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.trainer.setting import (
    BATCH,
    CENTRES,
    SIZES,
    Quadratic,
    mean,
    points,
    steps_of,
    trained,
)

NUMBERS = {"0": 2, "1": 1, "2": 5, "3": 3}
ENGINES = ("vectorized", "sequential")


def loaders() -> list[DataLoader[Any]]:
    """The clients of `points`, with a collate function that only a DataLoader runs."""
    return [
        DataLoader(
            TensorDataset(CENTRES[k].expand(size, -1)), BATCH, collate_fn=lambda b: _collate(b)
        )
        for k, size in enumerate(SIZES)
    ]


def _collate(samples: Any) -> Any:
    return tuple(map(torch.stack, zip(*samples, strict=True)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("what", ["local_epochs", "local_steps"])
def test_each_client_takes_its_own_number(what: str, drawn: bool, engine: str) -> None:
    data: Any = loaders() if drawn else points()
    method = FedAvg(**{what: NUMBERS})  # type: ignore[arg-type]
    ran = fit(method, data, Quadratic(), engine=engine, options={"chunk_size": 3})
    steps = [
        n * (steps_of(SIZES[k]) if what == "local_epochs" else 1)
        for k, n in enumerate(NUMBERS.values())
    ]
    ((round),) = ran.recorder.rounds
    assert round.info.steps.tolist() == steps
    w = torch.zeros(2, dtype=torch.float64)
    ends = [trained(w, k, n) for k, n in enumerate(steps)]
    torch.testing.assert_close(ran.server["model"]["w"], mean(ends, list(SIZES)))
    # Everybody's bytes are those of one model.
    assert (round.bytes_up, round.bytes_down) == (16, 16)


def test_phases_have_numbers_of_their_own() -> None:
    """Shuffled minibatches with momentum: the vectorized engine does what the sequential does."""
    heads = {str(k): 1 + k % 3 for k in range(5)}
    bodies = {str(k): 2 - k % 2 for k in range(5)}

    def run(engine: str) -> Any:
        method = FedRep(head_epochs=heads, body_epochs=None, body_steps=bodies)
        return fit(method, small_clients(), small_module(), 2, engine)

    one, other = run("vectorized"), run("reference")
    # 1, 0, 1, 3 and 2 minibatches in a pass over the heads' data.
    counts = {k: heads[str(k)] * n + bodies[str(k)] for k, n in ((0, 1), (2, 1), (3, 3), (4, 2))}
    info = one.recorder.rounds[0].info
    assert dict(zip(info.index.tolist(), info.steps.tolist(), strict=True)) == counts
    assert_trees_close(one.server, other.server)
    assert_trees_close(one.client_state, other.client_state)


@pytest.mark.parametrize(
    ("numbers", "found"),
    [({"0": 1, "1": 2, "2": 1}, "none for 3"), ({**NUMBERS, "x": 1}, "one for 'x'")],
)
def test_names_that_do_not_fit_are_refused(numbers: dict[str, int], found: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"such as '0', but got {found}"):
        fit(FedAvg(local_epochs=numbers), points(), Quadratic())


def test_numbers_are_at_least_one() -> None:
    with pytest.raises(ValueError, match=r"`local_steps\['a'\]` to be a whole number >= 1"):
        FedAvg(local_steps={"a": 0})


def test_methods_for_which_they_have_no_meaning_refuse_them() -> None:
    with pytest.raises(ValueError, match="one number of all clients for FedU, as R is a factor"):
        FedU("ring", local_epochs=NUMBERS)
    with pytest.raises(ValueError, match="with local_solver='optimizer' only"):
        SquaredPenalty(local_solver="exact", local_epochs=NUMBERS)


def test_a_resumed_run_warns_of_other_numbers(tmp_path: Any) -> None:
    path = fit(FedAvg(local_epochs=NUMBERS), points(), Quadratic()).save(tmp_path / "one.ckpt")
    with pytest.warns(UserWarning, match="local_epochs was {'0': 2, .*}, is 1"):
        fit(FedAvg(), points(), Quadratic(), rounds=2, ckpt_path=path)
