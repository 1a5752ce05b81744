"""The choice of an engine by the clock: what is timed, how often, and what a run keeps of it.

A clock of the test's own stands in for the machine's, and engines that advance it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine import probe, select, timing
from lightning_pfl.engine.base import EvaluationWork, LocalWork
from lightning_pfl.engine.select import SelectedEngine
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.engine.steps import Limits
from lightning_pfl.engine.timing import (
    BUDGET,
    FAR,
    LONG,
    TURNS,
    WARM_UP,
    Candidate,
    chunk_sizes,
    evaluation_piece,
    run_in_turns,
    training_piece,
)
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.methods import FedAvg
from lightning_pfl.methods.base import Phase
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing import fit
from lightning_pfl.testing.rounds import assert_trees_equal
from tests.engine.nets import CLASSES, cnn, image_clients
from tests.trainer.setting import trainer


class Clock:
    """Time that goes on by what is run."""

    time = 0.0

    def __call__(self, *_: Any) -> float:
        return self.time

    def run(self, *seconds: float) -> Callable[[], None]:
        """Return a function that takes these seconds one call after another, and the last after."""
        left = list(seconds)

        def go() -> None:
            self.time += left.pop(0) if len(left) > 1 else left[0]

        return go


# --- turns ----------------------------------------------------------------------------------------


def test_the_fastest_run_counts_and_recordings_do_not() -> None:
    clock = Clock()
    one = Candidate([clock.run(0.04, 0.02, 0.011, 0.01, 0.03)], [10], 10)
    other = Candidate([clock.run(0.015)], [10], 10)
    assert run_in_turns({"one": one, "other": other}, clock) == {"one", "other"}
    assert one.rate == pytest.approx(0.001)
    assert other.rate == pytest.approx(0.0015)


@pytest.mark.parametrize(
    ("seconds", "turns"), [(BUDGET / 100, TURNS), (BUDGET, WARM_UP + 1), (4 * BUDGET, 1)]
)
def test_time_is_bounded(seconds: float, turns: int) -> None:
    """The turns that warm up begin within three budgets, the others within one."""
    clock = Clock()
    assert run_in_turns({"one": Candidate([clock.run(seconds)], [1], 1)}, clock) == {"one"}
    assert clock.time == pytest.approx(turns * seconds)


def test_what_is_far_behind_has_no_further_turn_and_what_fails_is_left_out() -> None:
    clock, calls = Clock(), []

    def slow() -> None:
        calls.append("slow")
        clock.time += FAR * 1.01e-3

    def fail() -> None:
        calls.append("fail")
        raise ValueError("under vmap")

    runs = {"fast": clock.run(1e-3), "slow": slow, "fail": fail}
    candidates = {name: Candidate([run], [1], 1) for name, run in runs.items()}
    assert run_in_turns(candidates, clock) == {"fast", "slow"}
    assert calls == ["slow", "fail", *["slow"] * WARM_UP]
    calls.clear()
    run_in_turns({"slow": Candidate([slow], [1], 1)}, clock, known=1e-3)
    assert calls == ["slow"] * (1 + WARM_UP)


def test_what_takes_long_and_is_far_behind_needs_no_warming_up() -> None:
    clock, calls = Clock(), []

    def slow() -> None:
        calls.append("slow")
        clock.time += FAR * LONG * 1.01

    runs = {"fast": clock.run(LONG), "slow": slow}
    run_in_turns({name: Candidate([run], [1], 1) for name, run in runs.items()}, clock)
    assert calls == ["slow"]


def test_two_lengths_tell_the_part_that_is_the_same_for_any_length() -> None:
    """0.5 s and 0.1 s a unit: a unit of 100 takes 0.1 + 0.5 / 100."""
    one = Candidate([], [12, 3], 100, [0.5 + 12 * 0.1, 0.5 + 3 * 0.1])
    assert one.of_all == pytest.approx(0.1 + 0.5 / 100)
    assert Candidate([], [12], 100, [1.7]).of_all == pytest.approx(1.7 / 12)


@pytest.mark.parametrize(
    ("clients", "most", "sizes"),
    [
        (16, 512, [16, 8, 4]),
        (40, 512, [40, 20, 10, 5]),
        (100, 30, [25, 13]),
        (2, 9, [2]),
        (9, 2, [2]),
    ],
)
def test_sizes_are_parts_of_the_cohort_that_fit(clients: int, most: int, sizes: list[int]) -> None:
    assert chunk_sizes(clients, most) == sizes


# --- pieces ---------------------------------------------------------------------------------------


def work_of(
    sizes: tuple[int, ...], phases: tuple[Phase, ...], method: Any = None, **settings: Any
) -> LocalWork:
    """The work of a cohort of all clients, as the engine gets it."""
    seen: list[LocalWork] = []

    class Watched(SequentialEngine):
        def train(self, work: LocalWork, on_clients: Any = None) -> Any:
            seen.append(work)
            return super().train(work, on_clients)

    class Fixed(FedAvg):
        def phases(self, round: int) -> tuple[Phase, ...]:
            return phases

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "SequentialEngine", Watched)
        fit(Fixed(), image_clients(sizes, **settings), cnn(norm=False), 1, "sequential")
    return seen[0]


def test_a_piece_has_the_first_steps_of_some_clients_in_proportion_to_their_sizes() -> None:
    """Clients of 40, 80, 160 and 20 samples in minibatches of 4 have 10, 20, 40 and 5 steps, 18.75
    on average. Three steps of 18.75 are 0.16 of each: 2, 3, 6 and 1."""
    work = work_of((40, 80, 160, 20), (Phase(epochs=1),))
    piece, limits, steps = training_piece(work, 4, 3, Limits())
    taken = dict(zip(piece.info.index.tolist(), piece.info.steps.tolist(), strict=True))
    assert taken == {0: 2, 1: 3, 2: 6, 3: 1}
    assert steps == 12
    assert piece.data.num_samples.tolist() == [8, 12, 24, 4]
    assert isinstance(work.data, FederatedTensorDataset)
    assert isinstance(piece.data, FederatedTensorDataset)
    for client in range(4):
        first = work.data.indices[client][: piece.data.num_samples[client]]
        assert torch.equal(piece.data.indices[client], first)
    assert limits == Limits()
    two, _, _ = training_piece(work, 2, 3, Limits())
    # Of 2, 1, 0, 3 by size: the middle of each half.
    assert two.info.index.tolist() == [1, 3]


def test_phases_keep_their_shares() -> None:
    """20 epochs and one of 15 minibatches are 315 steps. Of 11 steps, 0.035 of each: one minibatch,
    10.5 epochs and one."""
    phases = (Phase("head", epochs=20), Phase("backbone", epochs=1))
    piece, _, steps = training_piece(work_of((60, 60), phases), 2, 11, Limits())
    assert [phase.epochs for phase in piece.phases] == [10, 1]
    assert piece.data.num_samples.tolist() == [4, 4]
    assert steps == 2 * 11
    # Counted steps: 0.1 of 100 and of 20.
    phases = (Phase("head", steps=100), Phase("backbone", steps=20))
    piece, _, steps = training_piece(work_of((60, 60), phases), 2, 12, Limits())
    assert [phase.steps for phase in piece.phases] == [10, 2]


def test_minibatches_of_a_step_stay_together() -> None:
    """Steps of three minibatches: 15 minibatches are 5 steps, of which 2 have 6."""
    work = work_of((60,), (Phase(epochs=1),))
    piece, limits, steps = training_piece(work, 1, 2, Limits(accumulate=3))
    assert (piece.data.num_samples.tolist(), steps) == ([24], 2)
    assert limits == Limits(accumulate=3)


def test_full_batches_stay_whole() -> None:
    work = work_of((60,), (Phase(epochs=30, full_batch=True),))
    piece, _, steps = training_piece(work, 1, 3, Limits())
    assert (piece.data.num_samples.tolist(), steps) == ([60], 3)


def test_an_evaluation_is_cut_to_a_program() -> None:
    data = image_clients((900, 3, 5, 2))
    work = EvaluationWork({}, torch.tensor([0, 1, 2, 3]), data, "validation_step")
    piece = evaluation_piece(work, torch.tensor([0, 1, 1, 0]))
    assert piece.clients.tolist() == [0, 3]
    assert piece.data.num_samples.tolist() == [timing.SAMPLES, 0, 0, 2]


# --- a run ----------------------------------------------------------------------------------------

ALONE, TWO, FOUR = 0.010, 0.030, 0.100
"""Seconds of a client's step, here, with programs of two clients and of all four."""


def network(rate: float = 0.0) -> PersonalizedModule:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, 6), nn.Dropout(rate), nn.Tanh())
    return PersonalizedModule(backbone, nn.Linear(6, CLASSES)).double()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """A machine on which steps take so long: seconds by clients per program, 0 for one by one."""
    clock, costs = Clock(), {0: ALONE, 2: TWO, 4: FOUR}

    def slow(kind: Any) -> None:
        train = kind.train

        def timed(self: Any, work: LocalWork, on_clients: Any = None) -> Any:
            size = self.chunk_size or 4 if isinstance(self, VectorizedEngine) else 0
            clock.time += 1e-3 * costs[size] * int(work.info.steps.sum())
            return train(self, work, on_clients)

        monkeypatch.setattr(kind, "train", timed)

    slow(SequentialEngine)
    slow(VectorizedEngine)
    monkeypatch.setattr(probe, "clock", clock)
    monkeypatch.setattr(probe, "chunk_sizes", lambda clients, most: [4, 2])
    return costs


def run(path: Path | None = None, rounds: int = 1, rate: float = 0.0, **settings: Any) -> Any:
    data = image_clients((16, 16, 16, 16), batch_size=4)
    made = trainer(FedAvg(local_epochs=2), **{"engine": "timed", "max_epochs": rounds, **settings})
    made.fit(network(rate), data, data, ckpt_path=path)
    return made


def choice_of(made: Any) -> str:
    found: str = made.strategy.federation.engine.choices["training_step"]
    return found


def test_the_fastest_runs_and_the_log_has_the_times(
    machine: dict[int, float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        made = run()
    assert choice_of(made) == (
        "sequential (a client's step takes 0.01 ms one after another, 0.03 ms with 2 at once, "
        "0.1 ms with 4 at once)"
    )
    assert choice_of(made).removeprefix("sequential (").removesuffix(")") in caplog.text
    machine[2] = ALONE / 2
    made = run()
    assert choice_of(made).startswith(
        "vectorized (2 clients at once; a client's step takes 0.005 ms"
    )
    engine = made.strategy.federation.engine
    assert engine.seconds["training_step"] == pytest.approx({0: 1e-5, 2: 5e-6, 4: 1e-4})
    assert engine.found["cpu training_step"] == "forward 2"


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_program_has_as_many_clients_as_were_chosen_and_gives_the_same_bits(
    rate: float, machine: dict[int, float]
) -> None:
    """As a run that was told so, whose engines have done no other steps, also with dropout."""
    machine[2] = ALONE / 2
    found, drawn = run(rounds=3, rate=rate), torch.rand(1)
    told, then = run(rounds=3, rate=rate, engine="vectorized", chunk_size=2), torch.rand(1)
    assert_trees_equal(found.strategy.server, told.strategy.server)
    assert found.callback_metrics["val_loss"] == told.callback_metrics["val_loss"]
    assert torch.equal(drawn, then)


@pytest.mark.parametrize(("fastest", "choice"), [(0, "sequential 0"), (2, "forward 2")])
@pytest.mark.parametrize("later", ["timed", "auto"])
def test_a_resumed_run_repeats_the_choice_on_another_machine(
    fastest: int, choice: str, later: str, machine: dict[int, float], tmp_path: Path
) -> None:
    machine[fastest] = ALONE / 2
    run().save_checkpoint(tmp_path / "half.ckpt")
    whole = run(rounds=2)
    machine |= {0: 1.0, 2: 1.0, 4: 1e-9, fastest: 2.0}
    resumed = run(tmp_path / "half.ckpt", rounds=2, engine=later)
    engine = resumed.strategy.federation.engine
    assert engine.found["cpu training_step"] == choice
    assert engine.seconds == {}
    assert engine._engines["training_step"].name == whole_name(choice)
    assert getattr(engine._engines["training_step"], "chunk_size", 0) == fastest
    assert_trees_equal(resumed.strategy.server, whole.strategy.server)


def whole_name(choice: str) -> str:
    return "sequential" if choice.startswith("sequential") else "vectorized"


def test_evaluations_are_timed_after_the_sanity_check_and_with_all_clients(
    machine: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients of a sanity check say nothing about programs of all."""
    pieces = []

    def recorded(work: EvaluationWork, groups: Any) -> EvaluationWork:
        pieces.append(work.clients.tolist())
        return evaluation_piece(work, groups)

    monkeypatch.setattr(probe, "evaluation_piece", recorded)
    engine = run(num_sanity_val_steps=2, rounds=2).strategy.federation.engine
    assert pieces == [[0, 1, 2, 3]]
    assert set(engine.seconds["validation_step with one model"]) == {0, 4}


def test_an_estimates_choice_of_a_checkpoint_is_not_the_clocks(
    machine: dict[int, float], tmp_path: Path
) -> None:
    first = run(engine="auto")
    assert choice_of(first).startswith("vectorized")
    first.save_checkpoint(tmp_path / "half.ckpt")
    assert choice_of(run(tmp_path / "half.ckpt", rounds=2)).startswith("sequential (a client's")


def test_a_chunk_size_that_was_given_is_the_only_one(machine: dict[int, float]) -> None:
    machine[3] = ALONE / 2
    made = run(chunk_size=3)
    assert set(made.strategy.federation.engine.seconds["training_step"]) == {0, 3}
    assert choice_of(made).startswith("vectorized (3 clients at once")


def test_what_can_not_run_at_once_is_not_timed(
    machine: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe.Probe, "problem", lambda *_: probe.Problem("no batching rule"))
    made = run()
    assert choice_of(made) == (
        "sequential (vmap over the forward pass: no batching rule; "
        "vmap over the gradient: no batching rule)"
    )
    assert made.strategy.federation.engine.seconds == {}


@pytest.mark.parametrize(
    ("first", "name"), [("forward 2", "vectorized"), ("sequential 0", "sequential")]
)
def test_processes_take_what_the_first_one_has_found(
    first: str, name: str, machine: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this one's clock says."""
    machine[4] = ALONE / 2
    said: list[str] = []

    def agree(place: str, mine: str) -> str:
        said.append(f"{place}: {mine}")
        return first

    init = SelectedEngine.__init__
    monkeypatch.setattr(
        SelectedEngine, "__init__", lambda *a, **k: init(*a, **{**k, "agree": agree})
    )
    engine = run(limit_val_batches=0).strategy.federation.engine
    assert said == ["cpu training_step: forward 4"]
    assert engine._engines["training_step"].name == name
    assert getattr(engine._engines["training_step"], "chunk_size", 0) in (0, 2)
    assert engine.choices["training_step"].endswith("as in another process)")
