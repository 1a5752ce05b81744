"""Small networks train many clients at once, large ones one client after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.flop_counter import FlopCounterMode

from lightning_pfl.core.draws import Draws, with_starts
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.engine import cost
from lightning_pfl.engine.base import EngineSettings, EvaluationWork
from lightning_pfl.engine.cost import (
    ALONE,
    ALONE_BY_BLAS,
    CALL,
    CALL_OF_GROUP,
    CALL_OF_PROGRAM,
    CALL_OF_PROGRAM_WATCHED,
    CALL_WATCHED,
    CALLS_ON_FEATURES,
    PROGRAM,
    RECURRENT_TOGETHER,
    SHARED,
    TOGETHER,
    TOGETHER_IN_THREADS,
    WEIGHTS_TOGETHER,
    Gradient,
    Load,
    Share,
    batching_pays,
    evaluating_pays,
)
from lightning_pfl.engine.operators import has_onednn, onednn_product
from lightning_pfl.engine.probe import OperationCounter, Probe, Problem
from lightning_pfl.engine.program import batchable_kernels
from lightning_pfl.engine.safety.compare import OTHER_NUMBERS
from lightning_pfl.engine.sequential_local import SequentialLocalStep
from lightning_pfl.engine.vectorized import evaluation
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.federation.ranks import Ranks
from lightning_pfl.methods import FedAvg, FedRep
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.fitting import fit
from tests.engine.nets import CLASSES, Ran, Recurrent, image_clients
from tests.trainer.setting import trainer


@pytest.fixture
def programs_of_many() -> None:
    """Count clients as they are."""


CALLS, MANY = 40, 10.0
"""Operators of a step, and clients of a program."""
FOUR = (8, 8, 8, 8)
"""Samples of as few clients as are faster together."""


def saved(
    calls: float = CALLS, served: float = MANY, replayed: bool = True, grouped: bool = False
) -> float:
    """Return what a step saves beside its arithmetic where clients run together."""
    alone = calls * (CALL if replayed else CALL_WATCHED)
    each = CALL_OF_GROUP if grouped else CALL_OF_PROGRAM
    program = PROGRAM + calls * (each if replayed else CALL_OF_PROGRAM_WATCHED)
    return alone - calls * SHARED - program / served


def pays(millions: float, shares: list[Share], **settings: Any) -> bool:
    return batching_pays(Gradient(1e6 * millions, CALLS), shares, **settings)


@pytest.mark.parametrize("gradients", [1, 60])
@pytest.mark.parametrize("replayed", [False, True])
def test_the_number_of_steps_does_not_matter_in_one_phase(gradients: int, replayed: bool) -> None:
    even = saved(replayed=replayed) / (TOGETHER - ALONE)
    assert pays(even * 0.99, [Share(gradients, MANY)], replayed=replayed)
    assert not pays(even * 1.01, [Share(gradients, MANY)], replayed=replayed)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("replayed", [False, True])
def test_a_program_pays_for_enough_clients(grouped: bool, replayed: bool) -> None:
    """Without operations, calls alone decide."""
    settings = {"replayed": replayed, "grouped": grouped}
    few, many = (saved(served=clients, **settings) for clients in (1.0, 1e9))
    even = (many - few) / many  # its cost is shared by the clients
    assert 1 < even < MANY
    assert pays(0, [Share(3, even * 1.01, grouped)], replayed=replayed)
    assert not pays(0, [Share(3, even * 0.99, grouped)], replayed=replayed)


def test_more_operators_speak_for_many_clients() -> None:
    """As those that random numbers take."""
    between = (saved(CALLS) + saved(CALLS + 30)) / 2 / (TOGETHER - ALONE)
    for calls in (CALLS, CALLS + 30):
        gradient = Gradient(1e6 * between, calls)
        assert batching_pays(gradient, [Share(3, MANY)], True) is (calls > CALLS)


def test_weights_of_many_models_speak_for_one_client_after_another() -> None:
    """They cost as much as what is left of the calls that are saved; nothing in threads."""
    half = saved() / (TOGETHER - ALONE) / 2
    even = saved() / 2 / WEIGHTS_TOGETHER
    for part in (0.99, 1.01):
        gradient = Gradient(1e6 * half, CALLS, weights=1e6 * even * part)
        assert batching_pays(gradient, [Share(3, MANY)], True) is (part < 1)
        assert batching_pays(gradient, [Share(3, MANY)], True, threads=2)


def test_recurrent_layers_have_a_cost_of_their_own() -> None:
    """Of a third of the operations."""
    even = saved() / ((2 * TOGETHER + RECURRENT_TOGETHER) / 3 - ALONE)
    for part in (0.99, 1.01):
        gradient = Gradient(1e6 * even * part, CALLS, recurrent=1e6 * even * part / 3)
        assert batching_pays(gradient, [Share(3, MANY)], True) is (part < 1)


class Own(PersonalizedModule):
    """Its samples aren't known to be independent, so minibatches aren't padded."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        return self._step("train", batch)


@pytest.mark.parametrize(
    ("kind", "sizes", "served", "grouped"),
    [
        (PersonalizedModule, (8, 8, 8, 8), 2.0, False),
        (Own, (8, 8, 8, 8), 2.0, False),
        # Of the smallest and the third client: two programs for three minibatches.
        (PersonalizedModule, (8, 8, 4, 3), 3 / 2, False),
        # The first minibatches have two sizes if they can't be padded.
        (Own, (8, 8, 4, 3), 1.0, True),
        # One program for the first minibatches of both, one for the second one.
        (Own, (4, 4, 8, 8), 3 / 2, False),
    ],
)
def test_clients_that_a_program_serves_are_counted(
    kind: Any,
    sizes: tuple[int, ...],
    served: float,
    grouped: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Share] = []

    def watch(_: Gradient, shares: list[Share], *__: Any) -> bool:
        seen.extend(shares)
        return True

    monkeypatch.setattr("lightning_pfl.engine.probe.batching_pays", watch)
    module = kind(nn.Sequential(nn.Flatten(), nn.Linear(25, 6)), nn.Linear(6, CLASSES)).double()
    # Of as many of all clients as train in a round, of whom each of several processes has a part.
    fit(FedAvg(), image_clients(sizes, batch_size=4), module, 1, "auto", participation=2)
    assert [(share.served, share.grouped) for share in seen] == [(served, grouped)]


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("too", [False, True])
@pytest.mark.parametrize(("passes", "each"), [(2, 3), (10, 3), (10, 30)])
def test_cached_features_pay_if_there_are_many_passes(
    passes: int, each: int, too: bool, replayed: bool
) -> None:
    """Of a head ``w / 3`` a gradient alone, or once each minibatch there, too, and together; of
    the body ``w``."""
    head = Share(passes * each, MANY, cached=True, passes=passes, cached_alone=too)
    shares = [head, Share(each, MANY)]
    of_head = saved(CALLS * CALLS_ON_FEATURES, replayed=replayed)
    calls = each * (passes * of_head + saved(replayed=replayed))
    slope = each * (TOGETHER * (1 / 3 + 1) - ALONE * ((1 if too else passes) / 3 + 1))
    if slope <= 0:  # alone the operations cost more, too
        assert pays(1e6, shares, replayed=replayed)
        return
    # What is counted is the mean of w / 3 and w.
    even = calls / slope * (1 / 3 + 1) / 2
    assert pays(even * 0.99, shares, replayed=replayed)
    assert not pays(even * 1.01, shares, replayed=replayed)


def network() -> PersonalizedModule:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, 6))
    return PersonalizedModule(backbone, nn.Linear(6, CLASSES)).double()


def test_operations_of_a_gradient_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products (4, 25) (25, 6) and (4, 6) (6, classes), once forward; backward by the weights of
    both, and by the features: 2 n m k operations each."""
    seen: list[float] = []

    def watch(gradient: Gradient, shares: list[Share], replayed: bool, *_: Any) -> bool:
        seen.extend([gradient.operations, *(share.gradients for share in shares), replayed])
        assert [share.cached for share in shares] == [False]
        return True

    monkeypatch.setattr("lightning_pfl.engine.probe.batching_pays", watch)
    data = image_clients((8, 8), batch_size=4)
    fit(FedAvg(local_epochs=3), data, network(), 1, "auto")
    assert seen == [2 * 4 * (25 * 6 * 2 + 6 * CLASSES * 3), 6, True]


@pytest.mark.skipif(not has_onednn(), reason="torch has no oneDNN for this processor")
def test_operations_of_recurrent_layers_and_weights_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of five rows of 4 samples, four gates of 4 units see 5 numbers and 4 states; backward twice
    as many operations. The head is 4 x classes with biases."""
    seen: list[Gradient] = []

    def watch(gradient: Gradient, *_: Any) -> bool:
        seen.append(gradient)
        return False

    monkeypatch.setattr("lightning_pfl.engine.probe.batching_pays", watch)
    torch.manual_seed(0)
    data = image_clients((8, 8), batch_size=4, dtype=torch.float32)
    fit(FedAvg(), data, PersonalizedModule(Recurrent(), nn.Linear(4, CLASSES)), 1, "auto")
    (gradient,) = seen
    recurrent = 3 * 2 * 5 * 4 * 16 * (5 + 4)
    assert gradient.recurrent == recurrent
    assert gradient.operations == recurrent + 3 * 2 * 4 * 4 * CLASSES
    assert gradient.weights == 16 * (5 + 4) + 2 * 16 + 5 * CLASSES


def calls_of(extra: nn.Module, monkeypatch: pytest.MonkeyPatch) -> float:
    """Count the operators of a step, in a network with a layer more."""
    seen: list[float] = []

    def watch(gradient: Gradient, *_: Any) -> bool:
        seen.append(gradient.calls)
        return False

    monkeypatch.setattr("lightning_pfl.engine.probe.batching_pays", watch)
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, 6), extra)
    module = PersonalizedModule(backbone, nn.Linear(6, CLASSES)).double()
    fit(FedAvg(), image_clients((8, 8), batch_size=4), module, 1, "auto")
    return seen[0]


def test_operators_of_a_step_are_counted_without_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ReLU is one forward and one backward."""
    without = calls_of(nn.Identity(), monkeypatch)
    assert calls_of(nn.ReLU(), monkeypatch) == without + 2
    assert calls_of(nn.Unflatten(1, (6,)), monkeypatch) == without


def test_a_mask_is_counted_as_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a cast, a product and a quotient, of which the last two are there backward, too."""
    (row,) = with_starts(torch.zeros(1, dtype=torch.int64))
    with (ran := Ran()):
        Draws(row).at_least(0.5, (4, 6), torch.float64)
    views = ("select", "view")
    drawn = [name for name in ran.operators if name.split(".")[1] not in views]
    assert len(drawn) > 10
    without = calls_of(nn.Identity(), monkeypatch)
    assert calls_of(nn.Dropout(), monkeypatch) == without + len(drawn) + 5


SHIFTS: dict[str, float] = {}


class Unknown(nn.Module):
    """A layer whose code isn't known, as it reads a global dict."""

    def forward(self, x: Tensor) -> Tensor:
        return x + SHIFTS.get("shift", 0.0)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("draws", [False, True])
def test_steps_that_draw_count_as_replayed_where_they_are(
    draws: bool, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those whose code isn't known one client after another records no whole steps."""
    seen: list[bool] = []

    def watch(_: Gradient, __: list[Share], replayed: bool, *___: Any) -> bool:
        seen.append(replayed)
        return False

    monkeypatch.setattr("lightning_pfl.engine.probe.batching_pays", watch)
    whole: list[int] = []
    take = SequentialLocalStep.take_whole_steps

    def count(self: SequentialLocalStep, *args: Any) -> Any:
        whole.append(1)
        return take(self, *args)

    monkeypatch.setattr(SequentialLocalStep, "take_whole_steps", count)
    torch.manual_seed(0)
    extra = (nn.Dropout() if draws else nn.Identity(), nn.Identity() if known else Unknown())
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, 6), *extra)
    module = PersonalizedModule(backbone, nn.Linear(6, CLASSES)).double()
    fit(FedAvg(), image_clients((8, 8), batch_size=4), module, 2, "auto")
    assert seen == [known or not draws]
    assert bool(whole) is (known or not draws)


def test_a_phase_of_the_head_counts_as_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Share] = []

    def watch(_: Gradient, shares: list[Share], *__: Any) -> bool:
        seen.extend(shares)
        return True

    monkeypatch.setattr("lightning_pfl.engine.probe.batching_pays", watch)
    data = image_clients((8, 8), batch_size=4)
    fit(FedRep(head_epochs=5, body_epochs=1), data, network(), 1, "auto")
    assert seen == [Share(10, 2.0, cached=True, passes=5, cached_alone=True), Share(2, 2.0)]


@pytest.mark.parametrize(
    ("differs", "later", "engine", "choice"),
    [
        (
            ["forward"],
            [],
            "vectorized",
            "vectorized (vmap over the gradient, 4 at once, as in the checkpoint's run)",
        ),
        (["forward", "grad"], [], "auto", "sequential (as in the checkpoint's run)"),
        (
            [],
            ["forward", "grad"],
            "auto",
            "vectorized (vmap over the forward pass, 4 at once, as in the checkpoint's run)",
        ),
    ],
)
def test_a_resumed_run_keeps_an_engine_that_rounding_has_chosen(
    differs: list[str],
    later: list[str],
    engine: str,
    choice: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Whatever the comparison on the next round's minibatches says."""
    probe, data, path = Probe.problem, image_clients(FOUR), tmp_path / "a"

    def run(rounds: int, wrong: list[str], resume: Path | None = None) -> Any:
        def problem(self: Any, made: Any, *args: Any) -> Problem | None:
            found = probe(self, made, *args)
            other = Problem(f"its result {OTHER_NUMBERS}", rounding=True)
            return other if made.transform in wrong else found

        monkeypatch.setattr(Probe, "problem", problem)
        made = trainer(FedAvg(), engine=engine, max_epochs=rounds, limit_val_batches=0)
        made.fit(network(), data, data, ckpt_path=resume)
        return made

    run(1, differs).save_checkpoint(path)
    resumed = run(2, later, path)
    assert resumed.strategy.federation.engine.choices["training_step"] == choice


def test_large_networks_train_one_client_after_another_and_a_resumed_run_repeats_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data, path = image_clients(FOUR), tmp_path / "last.ckpt"

    def choice(engine: str, rounds: int, resume: Path | None = None) -> str:
        run = trainer(FedAvg(), engine=engine, max_epochs=rounds)
        run.fit(network(), data, data, ckpt_path=resume)
        if resume is None:
            run.save_checkpoint(path)
        return str(run.strategy.federation.engine.choices["training_step"])

    assert choice("auto", 1).startswith("vectorized")
    monkeypatch.setattr(cost, "TOGETHER", 1e9)  # as if any network were large
    assert choice("auto", 2, resume=path).startswith("vectorized")
    assert choice("vectorized", 1).startswith("vectorized")
    assert choice("auto", 1).startswith("sequential (many clients at once would be slower")
    monkeypatch.undo()
    assert choice("auto", 2, resume=path).startswith("sequential")


@pytest.mark.parametrize("first", ["vectorized (vmap", "sequential (many"])
def test_a_process_takes_the_choice_that_another_has_made_before(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs in a line, which share what processes share."""
    store = HashStore()

    def agreement(_: Ranks) -> Any:
        return lambda name, mine: store.compare_set(name, "", mine).decode()

    monkeypatch.setattr(Ranks, "agreement", agreement)
    data, choices = image_clients(FOUR), []
    usual, large = cost.TOGETHER, 1e9
    for factor in (usual, large) if first.startswith("vectorized") else (large, usual):
        monkeypatch.setattr(cost, "TOGETHER", factor)
        made = trainer(FedAvg(), engine="auto", max_epochs=1, limit_val_batches=0)
        made.fit(network(), data, data)
        choices.append(made.strategy.federation.engine.choices["training_step"])
    assert choices[0].startswith(first)
    taken = {
        "vectorized": "vectorized (vmap over the forward pass, 4 at once, as in another process)",
        "sequential": "sequential (as in another process)",
    }
    assert choices[1] == taken[first.split()[0]]


@pytest.mark.parametrize("threads", [2, 5])
def test_operations_of_many_clients_cost_less_in_threads(threads: int) -> None:
    """Those of matrix products alone; one client's, those of recurrent layers and convolutions cost
    what they do in one."""
    even = saved() / (TOGETHER_IN_THREADS - ALONE)
    assert pays(even * 0.99, [Share(3, MANY)], replayed=True, threads=threads)
    assert not pays(even * 1.01, [Share(3, MANY)], replayed=True, threads=threads)
    even = convolved(1) / (cost.CONVOLVED_TOGETHER - cost.CONVOLVED)
    for part in (0.99, 1.01):
        gradient = Gradient(1e6 * even * part, CALLS, 1)
        assert batching_pays(gradient, [Share(3, MANY)], True, threads) is (part < 1)
    even = saved() / (RECURRENT_TOGETHER - ALONE)
    for part in (0.99, 1.01):
        gradient = Gradient(1e6 * even * part, CALLS, recurrent=1e6 * even * part)
        assert batching_pays(gradient, [Share(3, MANY)], True, threads) is (part < 1)


@pytest.mark.parametrize("threads", [1, 2])
def test_products_of_one_client_by_blas_cost_more(threads: int) -> None:
    """So much that those of many cost less, until their weights cost the difference."""
    operations, together = 1e9, TOGETHER if threads == 1 else TOGETHER_IN_THREADS
    spared = saved() + 1e3 * (ALONE_BY_BLAS - together)
    assert spared > saved() > 0
    for part in (0.99, 1.01):
        weights = 1e6 * part * spared / WEIGHTS_TOGETHER
        gradient = Gradient(operations, CALLS, weights=weights)
        found = batching_pays(gradient, [Share(3, MANY)], True, threads, by_onednn=False)
        assert found is (threads > 1 or part < 1)
        assert not batching_pays(gradient, [Share(3, MANY)], True, threads)


@pytest.mark.parametrize("prefers", [False, True])
def test_the_estimate_asks_who_computes_products(
    prefers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def watch(gradient: Gradient, shares: Any, replayed: bool, threads: int, by: bool) -> bool:
        seen.append(by)
        return True

    monkeypatch.setattr("lightning_pfl.engine.probe.batching_pays", watch)
    monkeypatch.setattr("lightning_pfl.engine.probe.prefers_onednn", lambda: prefers)
    fit(FedAvg(), image_clients((8, 8), batch_size=4), network(), 1, "auto")
    assert seen == [prefers]


def convolved(convolutions: int, served: float = MANY) -> float:
    """Return what a step with convolutions saves where clients run together."""
    of_program = cost.CONVOLUTION_OF_PROGRAM / served
    return saved(served=served) + convolutions * (cost.CONVOLUTION - of_program)


@pytest.mark.parametrize(("threads", "name"), [(1, "sequential"), (2, "vectorized")])
def test_the_choice_depends_on_the_threads_of_torch(
    threads: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "TOGETHER", 1e9)  # as if any network were large for one thread
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run = fit(FedAvg(), image_clients(FOUR), network(), 1, "auto")
    finally:
        torch.set_num_threads(before)
    assert run.federation.engine.choices["training_step"].startswith(name)


@pytest.mark.parametrize("convolutions", [1, 2])
def test_convolutions_have_a_cost_of_their_own(convolutions: int) -> None:
    """Of one client in each step, of many in each program, which few share."""
    for served in (2.0, MANY):
        even = convolved(convolutions, served) / (cost.CONVOLVED_TOGETHER - cost.CONVOLVED)
        for part in (0.99, 1.01):
            gradient = Gradient(1e6 * even * part, CALLS, convolutions)
            assert batching_pays(gradient, [Share(3, served)], True) is (part < 1)


@pytest.mark.parametrize("convolutions", [0, 2])
@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_evaluated_programs_pay_for_small_networks_and_many_clients(
    convolutions: int, replayed: bool, shared: float
) -> None:
    """Clients have 12 minibatches of 4 samples, which 2 programs fill up to 5: calls cost less in
    these, and operations more, so that both are equal for some number of operations."""
    load = Load(minibatches=12, programs=2, parts=12, samples=48, padded=60)
    calls = 12 * (cost.EVALUATED + convolutions * cost.EVALUATED_CONVOLUTION)
    calls += 0 if replayed else 12 * cost.WATCHED
    program = cost.EVALUATED_PROGRAM + convolutions * cost.EVALUATED_PROGRAM_CONVOLUTION
    calls -= 2 * program + 12 * cost.EVALUATED_TOGETHER
    if convolutions:
        slope = 60 * cost.FORWARD_CONVOLVED_TOGETHER - 48 * cost.FORWARD_CONVOLVED
    else:
        rate = shared * cost.FORWARD_SHARED + (1 - shared) * cost.FORWARD_TOGETHER
        slope = 60 * rate - 48 * cost.FORWARD_ALONE
    for part in (0.99, 1.01):
        # Where both signs are equal, one side costs less for any number.
        even = calls / slope if calls * slope > 0 else 1.0
        pays = evaluating_pays(1e6 * even * part, load, replayed, convolutions, shared)
        assert pays is (slope * even * part <= calls)


@pytest.mark.parametrize("programs", [4, 22])
def test_without_replays_few_programs_pay_and_many_do_not(programs: int) -> None:
    """80 minibatches of a small MLP take 0.13 ms each in Python, and a program about 0.7 ms."""
    load = Load(minibatches=80, programs=programs, parts=80, samples=1120, padded=1120)
    assert evaluating_pays(1.1e4, load, replayed=False) is (programs * 0.7 < 80 * 0.13)


class Convolving(PersonalizedModule):
    """Two convolutions and two products."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3), nn.Flatten()
        super().__init__(nn.Sequential(*layers, nn.Linear(2, 4)), nn.Linear(4, CLASSES))
        self.double()


def test_convolutions_of_a_gradient_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once forward in each gradient; operations also backward, by weights and, from the second
    one on, by pictures. Of 4 samples with 3 x 3 and 1 x 1 pixels after them."""
    seen: list[float] = []

    def watch(gradient: Gradient, *_: Any) -> bool:
        seen.extend([gradient.operations, gradient.convolutions])
        return True

    monkeypatch.setattr("lightning_pfl.engine.probe.batching_pays", watch)
    fit(FedAvg(), image_clients((8, 8), batch_size=4), Convolving(), 1, "auto")
    first, second, products = 9 * 2 * 9, 1 * 2 * 2 * 9, 2 * 4 + 4 * CLASSES
    assert seen == [2 * 4 * (2 * first + 3 * second + 3 * products), 2]


@pytest.mark.skipif(not has_onednn(), reason="needs oneDNN")
def test_products_of_a_recurrent_layer_are_counted() -> None:
    """As torch's own operators have them without oneDNN, which ask for no gradient by the first
    state, so that they have a product less."""
    steps, samples, inputs, states = 7, 3, 5, 4
    layer = nn.LSTM(inputs, states)
    words = torch.ones(steps, samples, inputs, requires_grad=True)

    def count() -> int:
        with OperationCounter() as counter:
            layer(words)[0].sum().backward()
        return int(counter.operations)

    each = 2 * samples * 4 * states
    assert count() == 3 * steps * each * (inputs + states)
    with batchable_kernels("grad"):  # without oneDNN
        assert count() == 3 * steps * each * (inputs + states) - each * states


def test_products_of_attention_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products for queries, keys and values, their scores, the sums of values, and a product
    behind them, each forward and backward by both factors; but the first three not by the pictures,
    of 5 rows of 5."""
    seen: list[float] = []

    def watch(gradient: Gradient, *_: Any) -> bool:
        seen.append(gradient.operations)
        return True

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(5, 1, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = x.squeeze(1)
            return self.inner(x, x, x, need_weights=False)[0].flatten(1)  # type: ignore[no-any-return]

    monkeypatch.setattr("lightning_pfl.engine.probe.batching_pays", watch)
    torch.manual_seed(0)
    module = PersonalizedModule(Attention(), nn.Linear(25, CLASSES)).double()
    fit(FedAvg(), image_clients((8, 8), batch_size=4), module, 1, "auto")
    cube = 5 * 5 * 5
    assert seen == [2 * 4 * (2 * 3 * cube + 3 * (2 * cube + cube) + 3 * 25 * CLASSES)]


@pytest.mark.parametrize("inferred", [False, True])
def test_operations_are_those_of_torchs_own_counter(inferred: bool) -> None:
    """In inference mode also of operators that consist of others, such as ``linear``."""
    torch.manual_seed(0)
    picture, rows, several = torch.randn(2, 3, 6, 6), torch.randn(5, 7, 4), torch.randn(5, 4, 3)
    layers = nn.Sequential(
        nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6), nn.ReLU(),
        nn.ConvTranspose2d(6, 2, 2), nn.Flatten(), nn.Linear(50, 9),
    )  # fmt: skip
    attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def step() -> None:
        out = layers(picture).square().sum() + attention(rows, rows, rows)[0].sum()
        out = out + torch.einsum("nij,njk->nik", rows, several).sum() + (rows @ several[0]).sum()
        if not inferred:
            out.backward()

    with torch.inference_mode(inferred):
        with OperationCounter() as counter:
            step()
        with FlopCounterMode(display=False) as expected:
            step()
    assert counter.operations == expected.get_total_flops() > 0
    assert counter.counts == expected.get_flop_counts()["Global"]
    assert counter.convolutions == 2


@pytest.mark.skipif(not has_onednn(), reason="needs oneDNN")
def test_products_of_onednn_are_counted() -> None:
    with OperationCounter() as counter:
        onednn_product(torch.ones(3, 4), torch.ones(4, 5), torch.ones(5))
        torch.ones(2, 3, 4).bmm(torch.ones(2, 4, 5))
    assert counter.operations == 2 * 3 * 4 * 5 + 2 * (2 * 3 * 4 * 5)
    assert counter.shared == 1 / 3


class OwnEvaluation(PersonalizedModule):
    """Its minibatches aren't known to be means of samples."""

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        self._step("val", batch)


@pytest.mark.parametrize("sizes", [(8,) * 6, (9, 0, 5, 13, 2, 8, 8)])
@pytest.mark.parametrize("kind", [PersonalizedModule, OwnEvaluation])
def test_an_evaluation_is_counted(
    kind: Any, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it runs, with the minibatches of one client after another."""
    monkeypatch.setattr(evaluation, "samples_at_once", lambda _: 10)
    data = image_clients(sizes, batch_size=4)
    torch.manual_seed(0)
    module = kind(nn.Sequential(nn.Flatten(), nn.Linear(25, 6)), nn.Linear(6, CLASSES)).double()
    split = ParameterSplit(module)
    own = {name: torch.stack([leaf] * len(sizes)) for name, leaf in split.model().items()}
    work = EvaluationWork(own, torch.arange(len(sizes)), data, "validation_step")
    run, ran = evaluation.VectorizedEvaluation._tick, []

    def tick(self: Any, models: Any, tick: Any, *args: Any) -> Any:
        x, _ = tick.minibatches[0].data
        ran.append(x.shape[:2])
        return run(self, models, tick, *args)

    monkeypatch.setattr(evaluation.VectorizedEvaluation, "_tick", tick)
    engine = VectorizedEngine(module, split, EngineSettings())
    engine.evaluate(work)
    assert engine.load(work) == Load(
        minibatches=sum(-(-size // 4) for size in sizes),
        programs=len(ran),
        parts=sum(clients for clients, _ in ran),
        samples=sum(sizes),
        padded=sum(clients * width for clients, width in ran),
    )


@pytest.mark.parametrize(
    ("sizes", "name"),
    [((6,) * 20, "vectorized"), (tuple(range(1, 21)), "sequential")],
)
def test_evaluations_of_steps_of_ones_own_run_together_where_sizes_are_equal(
    sizes: tuple[int, ...], name: str
) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(25, 6)), nn.Linear(6, CLASSES)
    data = image_clients(sizes, batch_size=20)
    run = fit(FedAvg(), data, OwnEvaluation(*layers).double(), 1, "auto", val_data=data)
    choices: Any = run.federation.engine
    assert choices.choices["validation_step"].startswith(name)
