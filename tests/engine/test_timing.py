"""The choice of an engine by the clock: what is timed, how often, and what a run keeps of it.

A clock of the test's own stands in for the machine's, and engines that advance it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
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
    AFFORDABLE,
    BUDGET,
    CLOSE,
    FAR,
    LEAST,
    MOST,
    Stopwatch,
    chunk_sizes,
    evaluation_piece,
    fastest,
    time_evaluation,
    time_training,
    training_piece,
)
from lightning_pfl.engine.trace import AROUND_RECORDING, Repeated
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

    def run(self, *seconds: tuple[float, float]) -> Callable[[], None]:
        """Return a function that takes these seconds one call after another, and the last after.

        Those in which it records, if it does, and those of all else.
        """
        left = list(seconds)

        def go() -> None:
            recorded, other = left.pop(0) if len(left) > 1 else left[0]
            if recorded:
                with AROUND_RECORDING.get()():
                    self.time += recorded
            self.time += other

        return go


# --- turns ----------------------------------------------------------------------------------------


def test_the_run_that_counts_records_nothing() -> None:
    clock = Clock()
    run = clock.run((0.3, 0.01), (0.2, 0.02), (0.1, 0.03), (0, 0.04), (0, 9))
    assert fastest({0: run}, clock) == pytest.approx({0: 0.04})


def test_a_first_run_that_records_nothing_is_not_the_last() -> None:
    """Some steps are recorded when they come for the third time."""
    clock = Clock()
    run = clock.run((0, 0.05), (0, 0.04), (0.1, 0.03), (0.1, 0.02), (0, 0.01))
    assert fastest({0: run}, clock) == pytest.approx({0: 0.01})


def test_what_always_records_runs_a_few_times() -> None:
    clock = Clock()
    assert fastest({0: clock.run((0.1, 0.02))}, clock) == pytest.approx({0: 0.02})
    assert clock.time == pytest.approx(MOST * 0.12)


def test_candidates_that_are_close_take_turns_of_which_the_fastest_counts() -> None:
    clock = Clock()
    alone = clock.run(*[(0, 0.040)] * LEAST, (0, 0.042), (0, 0.039), (0, 0.041))
    four = clock.run(*[(0, 0.045)] * LEAST, (0, 0.042), (0, 0.038), (0, 0.044))
    other = clock.run((0, 0.040 * CLOSE * 1.01))
    runs = {0: alone, 4: four, 2: other}
    assert fastest(runs, clock) == pytest.approx({0: 0.039, 4: 0.038, 2: 0.0505})


def test_fewer_at_once_are_not_tried_where_many_are_far_behind() -> None:
    """Twice as long before they are recorded tells nothing."""
    clock = Clock()
    runs = {
        0: clock.run((0, 1e-3)),
        8: clock.run((0, 2e-3), (0, 2e-3), (1e-3, 9e-4)),
        4: clock.run((0, FAR * 1.01e-3)),
        2: clock.run((0, 1e-4)),
    }
    assert fastest(runs, clock) == pytest.approx({0: 1e-3, 8: 9e-4, 4: FAR * 1.01e-3})


def test_fewer_at_once_are_tried_as_long_as_that_is_faster() -> None:
    clock = Clock()
    seconds = {0: 0.010, 16: 0.009, 8: 0.008, 4: 0.0085, 2: 0.001}
    runs = {size: clock.run((0, took)) for size, took in seconds.items()}
    assert fastest(runs, clock) == pytest.approx({0: 0.010, 16: 0.009, 8: 0.008, 4: 0.0085})


def test_what_fails_is_left_out() -> None:
    clock = Clock()

    def fail() -> None:
        raise ValueError("under vmap")

    runs = {0: clock.run((0, 1e-3)), 4: fail, 2: clock.run((0, 2e-3))}
    assert fastest(runs, clock) == pytest.approx({0: 1e-3, 2: 2e-3})


def test_time_is_bounded() -> None:
    """But one after another and many at once have to run until they record nothing."""
    clock = Clock()
    runs = {size: clock.run((0, BUDGET)) for size in (0, 4, 2)}
    assert fastest(runs, clock) == pytest.approx({0: BUDGET, 4: BUDGET})
    assert clock.time == pytest.approx(2 * LEAST * BUDGET)
    # When all have settled, there is time for the first two of nine runs in turns.
    clock, seconds = Clock(), BUDGET / (3 * LEAST + 1.5)
    fastest({size: clock.run((0, seconds)) for size in (0, 4, 2)}, clock)
    assert clock.time == pytest.approx((3 * LEAST + 2) * seconds)


def test_the_clock_stands_still_while_steps_are_recorded_and_first_compared() -> None:
    """A step takes 2 s as it is, 5 more to record it, 7 more to compare it, and 1 to replay it."""
    clock = Clock()

    class Steps(Repeated[str]):
        def _really(self, function: Any, given: Any) -> None:
            clock.time += 2

        def _record(self, function: Any, given: Any, leaves: Any) -> tuple[str, None]:
            with AROUND_RECORDING.get()():  # as a step within
                clock.time += 5
            clock.time += 2
            return "it", None

        def _check(self, recorded: str, function: Any, given: Any, leaves: Any) -> None:
            clock.time += 7 + 2

        def _replayed(self, recorded: str, leaves: Any) -> None:
            clock.time += 1

        def stop(self, why: str) -> None: ...

    steps, watch = Steps(), Stopwatch(clock)

    def one() -> None:
        steps._take((0,), lambda: None, None, [])

    steps.begin_round(check=False)
    # As it is, twice; recorded; compared; replayed.
    assert [watch.time(one) for _ in range(5)] == [2, 2, 0, 0, 1]
    assert watch.stops == 3
    steps.begin_round(check=True)
    # Recordings are compared in some rounds of every run.
    assert [watch.time(one) for _ in range(2)] == [9, 1]
    assert watch.stops == 3
    assert AROUND_RECORDING.get() is nullcontext


# --- how much is timed ----------------------------------------------------------------------------


class Engine:
    """An engine whose steps take some time, and that takes some more for each call."""

    def __init__(self, clock: Clock, step: float, call: float = 0.0) -> None:
        self.clock, self.step, self.call = clock, step, call
        self.limits, self.taken = Limits(), list[tuple[int, int]]()

    def train(self, work: LocalWork) -> Any:
        steps = int(work.info.steps.sum())
        self.taken.append((len(work.info), steps))
        self.clock.time += self.call + steps * self.step


def timed(work: LocalWork, sizes: list[int], steps: dict[int, float], call: float = 0.0) -> Any:
    """Time engines with these seconds a step; return the times, and what each has done."""
    clock = Clock()
    engines = {size: Engine(clock, steps[size], call) for size in (0, *sizes)}
    found = time_training(work, engines.__getitem__, sizes, Limits(), clock)
    return found, {size: list(dict.fromkeys(one.taken)) for size, one in engines.items()}


def test_a_whole_round_is_timed_where_it_is_short() -> None:
    """75 steps of 1 ms. One client's one, four and ten steps tell how long they take."""
    work = work_of((40, 80, 160, 20), (Phase(epochs=1),))
    found, taken = timed(work, [4, 2], {0: 1e-3, 4: 5e-4, 2: 4e-4}, call=1.5e-3)
    assert taken == {0: [(1, 1), (1, 4), (1, 10), (4, 75)], 4: [(4, 75)], 2: [(4, 75)]}
    # With what a round takes beside its steps.
    assert found == pytest.approx({0: 1.02e-3, 4: 5.2e-4, 2: 4.2e-4})


def test_a_part_of_a_round_is_timed_where_it_is_long() -> None:
    """Of steps of 12.5 ms one client after another has time for 12 of 75, so for 0.16 of those of
    the clients of a program, whatever the engine: 10, 20, 40 and 5 become 2, 3, 6 and 1."""
    assert AFFORDABLE == 0.15
    work = work_of((40, 80, 160, 20), (Phase(epochs=1),))
    found, taken = timed(work, [4, 2], {0: 12.5e-3, 4: 11e-3, 2: 13e-3})
    assert taken == {0: [(1, 1), (1, 4), (4, 12)], 4: [(4, 12)], 2: [(4, 12)]}
    assert found == pytest.approx({0: 12.5e-3, 4: 11e-3, 2: 13e-3})
    _, taken = timed(work, [2], {0: 12.5e-3, 2: 11e-3})
    # Of five and twenty steps 0.48.
    assert taken[2] == [(2, 2 + 10)]


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
    """The work of a cohort of all clients, as the engine gets it; no step is taken."""
    seen: list[LocalWork] = []

    class SeenError(Exception):
        pass

    class Watched(SequentialEngine):
        def train(self, work: LocalWork, on_clients: Any = None) -> Any:
            seen.append(work)
            raise SeenError

    class Fixed(FedAvg):
        def phases(self, round: int) -> tuple[Phase, ...]:
            return phases

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "SequentialEngine", Watched)
        with pytest.raises(SeenError):
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


def test_a_piece_keeps_the_last_minibatch_of_each_epoch() -> None:
    """42 samples in minibatches of 4 are 11, the last one of 2, and 79 are 20, the last one of 3:
    of 15.5, a fifth of each are 2 and 4."""
    work = work_of((42, 79), (Phase(epochs=1),))
    piece, _, steps = training_piece(work, 2, 3.1, Limits())
    assert (piece.data.num_samples.tolist(), steps) == ([4 + 2, 3 * 4 + 3], 6)
    # Where epochs are limited to five minibatches, their last one isn't that.
    piece, limits, steps = training_piece(work, 2, 2, Limits(batches=5))
    assert (piece.data.num_samples.tolist(), steps, limits) == ([2 * 4, 2 * 4], 4, Limits())
    # What would be left out doesn't come back.
    work = work_of((42, 79), (Phase(epochs=1),), drop_last=True)
    piece, _, steps = training_piece(work, 2, 2.9, Limits())
    assert ((piece.data.num_samples // 4).tolist(), steps) == ([2, 4], 6)


def test_work_that_is_short_enough_is_whole() -> None:
    """With optimizers as at the begin of a run."""
    work = work_of((42, 79), (Phase(epochs=1),))
    work = replace(work, kept=[{"local": {"w": {"momentum": {"sum": torch.ones(1)}}}}, {}])
    piece, limits, steps = training_piece(work, 2, 15.5, Limits(batches=1.0))
    assert (piece.data, limits, steps) == (work.data, Limits(), 31)
    assert piece.kept == [{}, {}]
    assert training_piece(work, 1, 2, Limits())[0].kept == [{}]


def test_clients_of_a_piece_have_typical_sizes() -> None:
    """Not those of the round's clients: of six, the second and the fifth by size stand for all, and
    for one of them the fourth, the middle of the lower half. Samples are the client's own."""
    work = work_of((60, 8, 20, 12, 30, 42), (Phase(epochs=2),))
    two = work.rows(torch.tensor([1, 3]))  # the smallest ones
    piece, _, steps = training_piece(two, 2, math.inf, Limits())
    assert piece.info.index.tolist() == [3, 1]
    assert (piece.info.steps.tolist(), steps) == ([2 * 11, 2 * 3], 28)
    assert isinstance(work.data, FederatedTensorDataset)
    assert isinstance(piece.data, FederatedTensorDataset)
    own = work.data.indices[3]
    assert torch.equal(piece.data.indices[3], torch.cat([own, own, own, own[:6]]))
    assert torch.equal(piece.data.indices[1], torch.cat([work.data.indices[1]] * 2)[:12])
    assert len(piece.data.indices[0]) == 0
    one, _, _ = training_piece(two, 1, math.inf, Limits())
    assert one.data.num_samples.tolist() == [0, 20, 0, 0, 0, 0]


def test_clients_that_can_not_train_are_not_typical() -> None:
    """Two of six have no minibatch of four. Of the others the second and the fourth by size stand
    for all; where half of the minibatches train, of one that is none."""
    work = work_of((0, 20, 3, 8, 60, 4), (Phase(epochs=1),), drop_last=True)
    two = work.rows(torch.tensor([0, 1]))
    piece, _, _ = training_piece(two, 2, math.inf, Limits())
    assert sorted(piece.data.num_samples.tolist()) == [0, 0, 0, 0, 4, 20]
    piece, _, _ = training_piece(two, 2, math.inf, Limits(batches=0.5))
    assert sorted(piece.data.num_samples.tolist()) == [0, 0, 0, 0, 8, 60]


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
    # A batch of all samples is none of four.
    work = work_of((3, 2, 0), (Phase(epochs=30, full_batch=True),), drop_last=True)
    piece, _, steps = training_piece(work, 2, 3, Limits())
    assert (piece.data.num_samples.tolist(), steps) == ([3, 2, 0], 6)


def test_clients_without_samples_stay_without() -> None:
    """The others have the sizes of the first and the third of three."""
    work = work_of((30, 20, 42, 0), (Phase(epochs=1),))
    info = replace(work.info, index=torch.tensor([3, 1, 0]))
    piece, _, steps = training_piece(replace(work, info=info), 3, math.inf, Limits())
    assert sorted(piece.data.num_samples.tolist()) == [0, 0, 20, 42]
    assert (int(piece.data.num_samples[3]), steps) == (0, 5 + 11)


def test_an_evaluation_is_cut_to_a_program() -> None:
    data = image_clients((900, 3, 5, 2))
    work = EvaluationWork({}, torch.tensor([0, 1, 2, 3]), data, "validation_step")
    piece = evaluation_piece(work, torch.tensor([0, 1, 1, 0]))
    assert piece.clients.tolist() == [0, 3]
    assert piece.data.num_samples.tolist() == [timing.SAMPLES, 0, 0, 2]


@pytest.mark.parametrize(("seconds", "whole"), [(0.049, False), (0.037, True)])
def test_all_clients_are_evaluated_where_that_is_short(seconds: float, whole: bool) -> None:
    """Four of them within 0.15 s; else those of the largest program. Three of them tell it."""
    clock, taken = Clock(), list[list[int]]()

    def evaluate(work: EvaluationWork) -> None:
        taken.append(work.clients.tolist())
        clock.time += seconds * len(work.clients)

    def at_once(work: EvaluationWork) -> None:
        taken.append(work.clients.tolist())
        clock.time += 0.04

    work = EvaluationWork({}, torch.arange(4), image_clients((900, 3, 5, 2)), "validation_step")
    found = time_evaluation(work, evaluate, at_once, torch.tensor([0, 1, 1, 1]), clock)
    piece = [0, 1, 2, 3] if whole else [1, 2, 3]
    assert taken[:LEAST] == [[0, 1, 3]] * LEAST  # by size 0, 2, 1, 3
    assert all(some == piece for some in taken[LEAST:])
    assert found == pytest.approx({0: seconds, 3: 0.04 / len(piece)})


# --- a run ----------------------------------------------------------------------------------------

ALONE, TWO, FOUR = 0.010, 0.030, 0.014
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
    data = image_clients((8, 8, 8, 8), batch_size=4)
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
        "sequential (a client's step takes 0.01 ms one after another, 0.014 ms with 4 at once, "
        "0.03 ms with 2 at once)"
    )
    assert choice_of(made).removeprefix("sequential (").removesuffix(")") in caplog.text
    machine[2] = ALONE / 2
    made = run()
    assert choice_of(made).startswith(
        "vectorized (2 clients at once; a client's step takes 0.005 ms"
    )
    engine = made.strategy.federation.engine
    assert engine.seconds["training_step"] == pytest.approx({0: 1e-5, 2: 5e-6, 4: 1.4e-5})
    assert engine.found["cpu training_step"] == "forward 2"


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_program_has_as_many_clients_as_were_chosen_and_gives_the_same_bits(
    rate: float, machine: dict[int, float]
) -> None:
    """As a run that was told so, whose engines have done no other steps, also with dropout."""
    machine[2] = ALONE / 2
    found, drawn = run(rounds=2, rate=rate), torch.rand(1)
    told, then = run(rounds=2, rate=rate, engine="vectorized", chunk_size=2), torch.rand(1)
    assert_trees_equal(found.strategy.server, told.strategy.server)
    assert found.callback_metrics["val_loss"] == told.callback_metrics["val_loss"]
    assert torch.equal(drawn, then)


@pytest.mark.sweep(2)
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

    monkeypatch.setattr(timing, "evaluation_piece", recorded)
    engine = run(num_sanity_val_steps=2, rounds=2).strategy.federation.engine
    assert pieces == [[0, 2, 3], [0, 1, 2, 3]]  # three of them, and the largest program's
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
