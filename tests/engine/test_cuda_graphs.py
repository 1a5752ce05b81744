"""Captured steps give the bits of the steps themselves.

On every machine a pretended device captures: as a CUDA graph, it repeats the operators on the same
memory with the same numbers, without Python. With ``-m gpu`` the same runs go to the first GPU.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_pfl import FederatedStrategy
from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.core.tree import is_expanded, items
from lightning_pfl.engine import trace
from lightning_pfl.engine.cuda_graphs import CAPTURES, StepGraphs
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.methods import (
    APFL,
    IFCA,
    SCAFFOLD,
    Ditto,
    FedAvg,
    FedMAP,
    FedRep,
    LpProj,
    PFedMe,
)
from lightning_pfl.methods.base import Method
from lightning_pfl.priors import DiagonalGaussianPrior
from lightning_pfl.testing.fitting import Fit, fit, quiet_trainer
from lightning_pfl.testing.quadratic import QuadraticModule, quadratic_clients
from tests.engine.nets import OPTIMIZERS, cnn, image_clients
from tests.engine.pretended_device import (
    NAME,
    PretendedCapture,
    PretendedDevice,
    pretended_accelerator,
)

METHODS: dict[str, Callable[[], Method]] = {
    "FedAvg": lambda: FedAvg(local_epochs=2),
    "FedRep": lambda: FedRep(head_epochs=2, body_epochs=2),
    "Ditto": lambda: Ditto(local_epochs=2, personal_epochs=2),
    "SCAFFOLD": lambda: SCAFFOLD(local_epochs=2),
    "FedMAP": lambda: FedMAP(DiagonalGaussianPrior(0.5), prior_lr=0.1, local_epochs=2),
    "PFedMe": lambda: PFedMe(local_epochs=2),
    "APFL": lambda: APFL(0.3, local_epochs=2),
    "IFCA": lambda: IFCA(local_epochs=2),
}
EQUAL = (8, 8, 8, 8)
RAGGED = (13, 8, 6, 3)


def engine_of(outcome: Fit) -> VectorizedEngine:
    """The engine that has trained."""
    found = outcome.federation.engine._engines["training_step"]
    assert isinstance(found, VectorizedEngine)
    return found


def run(
    accelerator: Any, graphs: bool, method: Callable[[], Method] = METHODS["FedAvg"], **given: Any
) -> Fit:
    """Three rounds; settings are functions that make them."""
    settings = {name: make() for name, make in given.items()}
    data = settings.pop("data", None) or image_clients(EQUAL)
    module = settings.pop("module", None) or cnn(norm=False)
    return fit(
        method(),
        data,
        module,
        rounds=3,
        val_data=data,
        accelerator=accelerator,
        devices=1,
        # Tensors made in inference mode can't be wrapped.
        inference_mode=False,
        options={"cuda_graphs": graphs},
        **settings,
    )


def on_gpu(graphs: bool, **given: Any) -> Fit:
    """On the first GPU."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        return run("gpu", graphs, **given)


def elsewhere(graphs: bool, **given: Any) -> Fit:
    """On the pretended device."""
    accelerator = pretended_accelerator()
    with PretendedDevice(), patch.dict(CAPTURES, {NAME: PretendedCapture}):
        return run(accelerator, graphs, **given)


Runs = Callable[..., Fit]


@pytest.fixture(params=[elsewhere, pytest.param(on_gpu, marks=pytest.mark.gpu)])
def runs(request: pytest.FixtureRequest) -> Runs:
    """Where a test runs with graphs and without."""
    chosen: Runs = request.param
    return chosen


def assert_same_bits(runs: Runs, least: int, **given: Any) -> Fit:
    """Everything that a run leaves is the same with graphs, of which it replays some."""
    plain, graphed = runs(False, **given), runs(True, **given)
    graphs = engine_of(graphed).graphs
    assert graphs is not None
    assert not graphs.said
    assert graphs.used >= least
    for want, got in (
        (plain.server, graphed.server),
        (plain.client_state, graphed.client_state),
        ({"models": plain.models}, {"models": graphed.models}),
    ):
        found = dict(items(got))
        for path, leaf in items(want):
            assert torch.equal(found.pop(path).cpu(), leaf.cpu()), path
        assert not found
    assert graphed.metrics == plain.metrics
    return graphed


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "FedRep" else pytest.mark.slow) for n in METHODS]
)
def test_graphs_give_the_bits_of_the_steps(name: str, runs: Runs) -> None:
    # FedRep's head has cached features. In a round each phase has a first step, without states
    # of the optimizer, and others, which are captured at the third.
    assert_same_bits(runs, least=4, method=METHODS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_running_statistics_are_those_of_the_steps(name: str, runs: Runs) -> None:
    assert_same_bits(runs, least=4, method=METHODS[name], module=cnn)


@pytest.mark.slow
def test_masks_of_ragged_clients_and_those_that_end(runs: Runs) -> None:
    """Numbers of active clients have a graph each."""
    outcome = assert_same_bits(
        runs, least=4, data=partial(image_clients, RAGGED), method=partial(FedAvg, local_epochs=4)
    )
    graphs = engine_of(outcome).graphs
    assert graphs is not None
    assert len(graphs) >= 3


@pytest.mark.slow
def test_random_numbers_are_those_of_the_steps(runs: Runs) -> None:
    assert_same_bits(runs, least=4, module=partial(cnn, norm=False, dropout=0.5))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
        {"precision": "bf16-true"},
        {"precision": "16-true"},
    ],
    ids=str,
)
def test_flags_of_the_trainer_hold_in_graphs(flags: dict[str, Any], runs: Runs) -> None:
    made = {name: partial(flags.get, name) for name in flags}
    assert_same_bits(runs, least=1, method=partial(FedAvg, local_epochs=4), **made)


@pytest.mark.gpu
def test_mixed_precision_holds_in_graphs() -> None:
    """Not on the pretended device, whose operators have no rules of their own for it."""

    def module() -> Any:
        return cnn(norm=False, dtype=torch.float32)

    assert_same_bits(
        on_gpu, 4, module=module, data=partial(image_clients, EQUAL, dtype=torch.float32),
        precision=partial(str, "bf16-mixed"),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"Adagrad"}))
def test_states_of_optimizers_are_in_graphs(name: str, runs: Runs) -> None:
    """Numbers of steps are on the device then, whose single precision is another rounding."""

    def module() -> Any:
        return cnn(norm=False, optimizer=partial(OPTIMIZERS[name], lr=0.01))

    plain, graphed = runs(False, module=module), runs(True, module=module)
    graphs = engine_of(graphed).graphs
    assert graphs is not None
    assert not graphs.said
    assert graphs.used >= 4
    for (path, want), (_, got) in zip(items(plain.server), items(graphed.server), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=str(path))


@pytest.mark.slow
def test_adagrad_counts_on_the_host_and_runs_as_usual() -> None:
    def module() -> Any:
        return cnn(norm=False, optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.1))

    graphs = engine_of(elsewhere(True, module=module)).graphs
    assert graphs is not None
    (why,) = graphs.said
    assert "a step can't be recorded (TypeError: its optimizer counts steps on the host)" in why


# --- one step -------------------------------------------------------------------------------------


@pytest.fixture
def graphs() -> Iterator[StepGraphs]:
    """Graphs of the pretended device, which is there for the time of a test."""
    pretended_accelerator()
    with PretendedDevice(), patch.dict(CAPTURES, {NAME: PretendedCapture}):
        yield StepGraphs(torch.device(NAME, 0))


def there(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(NAME)


def averaged(state: Any, batch: Any) -> Any:
    """One step of a running mean, in place, whose second entry appears in the first step."""
    state["model"].mul_(0.5).add_(batch["x"])
    return {**state, "moved": state["model"] - batch["x"]}, [state["model"], batch["x"].sum()]


def taken(
    graphs: StepGraphs, function: Any, steps: int, kind: Any = "all"
) -> tuple[Any, list[Any]]:
    """Take steps on other numbers each; return the state and all that was logged."""
    graphs.load(graphs.context("test") or 0, {"model": there(1.0, 2.0), "same": there(7.0)})
    logged = [graphs.step(function, {"x": there(s, 2.0 * s)}, kind) for s in range(steps)]
    return graphs.unload(), logged


def test_a_replay_has_the_numbers_of_its_own_minibatch(graphs: StepGraphs) -> None:
    end, logged = taken(graphs, averaged, 8)
    assert (
        graphs.used == 4
    )  # the first step has fewer entries; the fourth of the others is captured
    expected, values = torch.tensor([1.0, 2.0], dtype=torch.float64), []
    for step in range(8):
        expected = expected / 2 + step * torch.tensor([1.0, 2.0])
        values.append((expected, 3.0 * step))
    assert end["model"].tolist() == expected.tolist()
    assert end["moved"].tolist() == (expected - 7 * torch.tensor([1.0, 2.0])).tolist()
    assert end["same"].tolist() == [7.0]
    # What was logged stays, though replays write to one place.
    for (model, total), (want, sums) in zip(logged, values, strict=True):
        assert model.tolist() == want.tolist()
        assert float(total) == sums


def test_a_state_that_is_returned_stays(graphs: StepGraphs) -> None:
    first, _ = taken(graphs, averaged, 5)
    before = first["model"].tolist()
    taken(graphs, averaged, 6)
    assert first["model"].tolist() == before


def test_what_clients_share_stays_one_row(graphs: StepGraphs) -> None:
    shared = there(3.0).expand(2, 1)

    def step(state: Any, batch: Any) -> Any:
        assert is_expanded(state["shared"])
        return {**state, "model": state["model"] + state["shared"][:, 0] * batch["x"]}, []

    graphs.load(0, {"model": there(0.0, 0.0), "shared": shared})
    for number in range(6):
        graphs.step(step, {"x": there(number, 1.0)}, None if number == 0 else "all")
    end = graphs.unload()
    assert end["shared"] is shared
    assert end["model"].tolist() == [3.0 * (1 + 2 + 3 + 4 + 5), 18.0]
    assert graphs.used == 2


@pytest.mark.parametrize(
    ("reads", "reason"),
    [
        (lambda x: x * float(x.sum()), "isn't permitted while a stream is captured"),
        (lambda x: x.cpu().to(NAME), "isn't permitted while a stream is captured"),
        (lambda x: x + torch.ones(2, dtype=x.dtype).to(NAME), "isn't permitted while a stream is"),
    ],
)
def test_a_step_that_waits_for_the_device_runs_as_usual(
    graphs: StepGraphs, reads: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def step(state: Any, batch: Any) -> Any:
        return {**state, "model": state["model"] + reads(batch["x"])}, []

    with caplog.at_level(logging.INFO):
        end, _ = taken(graphs, step, 6)
    expected = there(1.0, 2.0).cpu()
    for number in range(6):
        expected += reads(there(number, 2.0 * number)).cpu()
    assert end["model"].tolist() == expected.tolist()
    assert not graphs.used
    assert len(graphs.said) == 1
    assert reason in caplog.text
    assert "Steps run without CUDA graphs: a step can't be recorded (RuntimeError" in caplog.text
    assert graphs.context("test") is None


def test_a_step_that_reads_something_else_runs_as_usual(
    graphs: StepGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    counted = [0]

    def step(state: Any, batch: Any) -> Any:
        counted[0] += 1
        return {**state, "model": torch.full_like(state["model"], counted[0])}, []

    with caplog.at_level(logging.INFO):
        end, _ = taken(graphs, step, 6)
    assert end["model"].tolist() == [counted[0], counted[0]]
    assert "a step differs from its recording" in caplog.text
    assert graphs.used == 1


def test_a_state_whose_entries_change_is_not_captured(graphs: StepGraphs) -> None:
    odd = [False]

    def step(state: Any, batch: Any) -> Any:
        odd[0] = not odd[0]
        return {**state, "model": state["model"] + 1, "x" if odd[0] else "y": batch["x"]}, []

    graphs.load(0, {"model": there(0.0, 0.0), "x": there(0.0, 0.0), "y": there(0.0, 0.0)})
    for _ in range(4):
        graphs.step(step, {"x": there(1.0, 1.0)}, "all")
    assert graphs.unload()["model"].tolist() == [4.0, 4.0]


def test_the_oldest_graphs_make_room(graphs: StepGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "LIMIT", 1)
    ends = [taken(graphs, averaged, 7, kind)[0]["model"].tolist() for kind in "aba"]
    assert ends[0] == ends[1] == ends[2]
    assert len(graphs) == 1


# --- who gets them --------------------------------------------------------------------------------


def test_a_cpu_is_refused() -> None:
    expected = "Expected a GPU of CUDA with FederatedStrategy"
    with pytest.raises(MisconfigurationException, match=expected) as error:
        fit(FedAvg(), quadratic_clients([1.0], [1.0]), options={"cuda_graphs": True})
    assert "but the Trainer runs on 'cpu'" in str(error.value)


def test_a_trained_federation_is_evaluated_on_a_cpu() -> None:
    data = quadratic_clients([1.0, 2.0], [1.0, 4.0])
    strategy = FederatedStrategy(FedAvg(), cuda_graphs=True)
    quiet_trainer(strategy, 1).validate(QuadraticModule(), data, verbose=False)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"engine": "sequential", "cuda_graphs": True}, "but got engine='sequential'"),
        ({"engine": "reference", "cuda_graphs": True}, "but got engine='reference'"),
        ({"cuda_graphs": "yes"}, "`cuda_graphs`"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        FederatedStrategy(FedAvg(), **settings)


def scheduled() -> Any:
    """A module whose scheduler steps after each batch."""
    module: Any = cnn(norm=False)
    make = module.configure_optimizers

    def configure_optimizers() -> Any:
        optimizer = make()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module.configure_optimizers = configure_optimizers
    return module


def with_one_group() -> Any:
    """A module whose optimizer has the same options for all parameters."""

    def optimizer(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for group in groups for p in group["params"]], lr=0.1)

    return cnn(norm=False, optimizer=optimizer)


class ReadsTheRound(QuadraticModule):
    """A module whose step reads the Trainer."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        assert self.current_epoch < 3
        return super().training_step(batch)


class Measuring(FedAvg):
    """A method that asks for the way of each client."""

    measures_travel = True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"method": lambda: LpProj()}, "`client_step` of LpProj isn't marked by `recordable`"),
        (
            {"method": Measuring, "module": with_one_group},
            "Measuring measures the way of each client",
        ),
        ({"module": scheduled}, "a scheduler changes the optimizer in each step"),
        (
            {"module": ReadsTheRound, "data": lambda: quadratic_clients([1.0], [1.0])},
            "the code of ReadsTheRound may read what a recording wouldn't",
        ),
    ],
)
def test_others_run_as_usual_and_the_log_says_why(given: dict[str, Any], reason: str) -> None:
    graphed = elsewhere(True, **given)
    graphs = engine_of(graphed).graphs
    assert graphs is not None
    assert not graphs.used
    assert [why[: len(reason)] for why in graphs.said] == [reason]
    for (path, leaf), (_, got) in zip(
        items(elsewhere(False, **given).server), items(graphed.server), strict=True
    ):
        assert torch.equal(leaf.cpu(), got.cpu()), path
