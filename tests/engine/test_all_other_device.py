"""Runs on a device of its own: nothing is left on the host, and no step waits for the device.

On every machine the device is pretended; with ``-m gpu`` the same runs go to the first GPU.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl import methods
from lightning_pfl.callbacks import HeadFineTuning, NewClientAdaptation
from lightning_pfl.core.draws import Draws
from lightning_pfl.data.datasets import FederatedLoaders, FederatedTensorDataset
from lightning_pfl.engine import registers, trace
from lightning_pfl.engine.agreement import agree
from lightning_pfl.inspect import (
    ClientGraph,
    ClientHistogram,
    ClusterMonitor,
    DriftMonitor,
    PairwiseDistance,
    PriorMonitor,
)
from lightning_pfl.methods import (
    APFL,
    Ditto,
    FedAvg,
    FedMAP,
    FedProx,
    FedRep,
    PFedMe,
)
from lightning_pfl.methods.base import Method
from lightning_pfl.priors import DiagonalGaussianPrior
from lightning_pfl.testing.conformance import small_clients, small_module
from lightning_pfl.testing.fitting import Fit, fit
from lightning_pfl.trainer.fit_loop import FederatedLoop
from tests.engine.nets import OPTIMIZERS, cnn, image_clients
from tests.engine.pretended_device import NAME, OnDevice, PretendedDevice, pretended_accelerator
from tests.methods.cases import CASES, PROBLEMS


@dataclass
class Outcome:
    """What a run left behind, and how often the host waited for the device in it.

    Without ``checks``, the comparisons of replays with steps: at the first use of each recording,
    and once a phase of a round. ``rounds`` has both counts of each round but the last.
    """

    fit: Fit
    models: list[dict[str, Tensor]]
    waits: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    checks: int = 0
    rounds: list[tuple[Counter[str], Counter[str]]] = field(default_factory=list)


def small_fit(method: Method, save: Path | None = None, **settings: Any) -> Outcome:
    """Two rounds of four ragged clients, with an evaluation of all after each."""
    data = settings.pop("data", None) or small_clients()
    given = {"rounds": 2, "participation": 4, "val_data": data, "module": small_module()}
    result = fit(method, data, **{**given, **settings})
    if save is not None:
        result.save(save)
    clients = range(result.strategy.federation.num_clients)
    # A method whose clients mix outputs has no single state_dict, but a module.
    modules = [result.strategy.client_module(client) for client in clients]
    return Outcome(result, [module.state_dict() for module in modules])


def on_gpu(method: Method, **settings: Any) -> Outcome:
    """The same on the first GPU."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    return small_fit(method, accelerator="gpu", devices=1, **settings)


def elsewhere(method: Method, **settings: Any) -> Outcome:
    """The same on the pretended device."""
    accelerator = pretended_accelerator()
    begun: list[tuple[Counter[str], Counter[str]]] = []
    advance = FederatedLoop.advance

    def counted(loop: FederatedLoop) -> None:
        begun.append((device.waits.copy(), device.sent.copy()))
        advance(loop)

    with (
        PretendedDevice() as device,
        checks_apart(device) as checks,
        patch.object(FederatedLoop, "advance", counted),
    ):
        # Tensors made in inference mode can't be wrapped.
        outcome = small_fit(method, accelerator=accelerator, inference_mode=False, **settings)
    assert outcome.fit.strategy.root_device.type == NAME
    outcome.waits, outcome.sent, outcome.checks = device.waits, device.sent, len(checks)
    outcome.rounds = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(begun)]
    return outcome


@contextmanager
def checks_apart(device: PretendedDevice) -> Iterator[list[Counter[str]]]:
    """Count apart what each check of a recording waits for."""
    checks: list[Counter[str]] = []

    def agrees(replayed: list[Tensor], real: list[Tensor], given: list[Tensor]) -> bool:
        before, device.waits = device.waits, Counter()
        found = agree(replayed, real, given)
        checks.append(device.waits)
        device.waits = before
        return found

    with patch.object(trace, "agree", agrees), patch.object(registers, "agree", agrees):
        yield checks
    # However many gradients, parameters and logged values a step has.
    assert all(waits == {"aten::_local_scalar_dense": 1} for waits in checks)


def assert_same(result: Outcome, expected: Outcome, tolerance: float = 1e-9) -> None:
    """Every client's model and every metric, to rounding: kernels of the CPU are its own."""
    for got, want in zip(result.models, expected.models, strict=True):
        assert got.keys() == want.keys()
        for name, leaf in want.items():
            assert got[name].device.type == "cpu"  # a state_dict is for the host
            torch.testing.assert_close(got[name], leaf, rtol=tolerance, atol=tolerance)
    metrics = pytest.approx(expected.fit.metrics, rel=tolerance, abs=tolerance, nan_ok=True)
    assert result.fit.metrics == metrics


Run = Callable[..., Outcome]
#: A pretended device takes its time. `make test` has a state on the server and on the clients, and
#: a graph; all others, and the other engine, are slow tests.
FIRST = ("SCAFFOLD", "SheafFMTL")
engines = pytest.mark.parametrize(
    "engine", ["vectorized", pytest.param("sequential", marks=pytest.mark.slow)]
)


@pytest.fixture(params=[elsewhere, pytest.param(on_gpu, marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Run:
    """Where a test compares with the CPU."""
    chosen: Run = request.param
    return chosen


def test_an_operator_with_tensors_of_two_devices_is_refused(device: PretendedDevice) -> None:
    there = torch.ones(3, device=NAME)
    assert isinstance(there, OnDevice)
    assert there.device.type == NAME
    with pytest.raises(RuntimeError, match="tensors of the host"):
        there + torch.ones(3)
    with pytest.raises(RuntimeError, match="tensors of the host"):
        there.index_select(0, torch.tensor([0]))
    with pytest.raises(RuntimeError, match="tensors of the host"):
        torch.ones(3)[torch.zeros(1, dtype=torch.long, device=NAME)]
    assert not device.waits


def test_what_the_host_waits_for_is_counted(device: PretendedDevice) -> None:
    there = torch.ones(3).to(NAME + ":0", non_blocking=True)
    assert float((there * torch.tensor(2.0)).sum()) == 6.0
    assert device.waits == {"aten::_local_scalar_dense": 1}
    assert there.cpu().tolist() == [1.0, 1.0, 1.0]
    assert device.waits["aten::_to_copy"] == 1
    torch.ones(3).to(NAME)
    assert device.waits["aten::_to_copy"] == 2
    assert there[there > 1].shape == (0,)
    assert device.waits["aten::index.Tensor"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_of_dropout_copy_no_number_from_the_host(
    dtype: torch.dtype, device: PretendedDevice
) -> None:
    """What is captured as a graph mustn't."""
    draws = Draws(torch.full((), 5, device=NAME))
    before = Counter(device.launches)
    assert isinstance(draws.at_least(0.3, (4, 5), dtype), OnDevice)
    launched = device.launches - before
    assert launched["aten::add.Tensor"] > 0
    assert not [name for name in launched if "copy" in name]


@engines
@pytest.mark.parametrize(
    "name",
    [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_every_method_ends_as_on_the_cpu(name: str, engine: str, run: Run) -> None:
    problem = PROBLEMS.get(name, {})

    def settings() -> dict[str, Any]:
        make_data = problem.get("make_data", small_clients)
        module = problem.get("make_module", small_module)(torch.float64)
        return {"engine": engine, "module": module, "data": make_data(torch.float64)}

    assert_same(run(CASES[name](), **settings()), small_fit(CASES[name](), **settings()))


EPOCHS: dict[str, Callable[[int], Method]] = {
    "APFL": lambda epochs: APFL(adaptive=True, local_epochs=epochs),
    "Ditto": lambda epochs: Ditto(local_epochs=epochs, personal_epochs=epochs),
    "FedAvg": lambda epochs: FedAvg(local_epochs=epochs),
    # With a rate, as the closed form looks after each sweep whether it ends.
    "FedMAP": lambda epochs: FedMAP(DiagonalGaussianPrior(0.5), prior_lr=0.1, local_epochs=epochs),
    "FedProx": lambda epochs: FedProx(local_epochs=epochs),
    "FedRep": lambda epochs: FedRep(head_epochs=1 + epochs, body_epochs=epochs),
    "PFedMe": lambda epochs: PFedMe(local_epochs=epochs),
}


@engines
@pytest.mark.parametrize(
    "name",
    [
        "FedAvg",
        *(pytest.param(name, marks=pytest.mark.slow) for name in EPOCHS if name != "FedAvg"),
    ],
)
def test_no_step_waits_for_the_device(name: str, engine: str) -> None:
    few = elsewhere(EPOCHS[name](1), engine=engine)
    many = elsewhere(EPOCHS[name](2), engine=engine)
    assert_waits_no_more(many.waits, few.waits)
    assert many.waits.total() > 0  # the gate and the metrics of a round
    if engine == "vectorized":
        assert many.checks > 0  # steps are replayed


def assert_waits_no_more(many: Counter[str], few: Counter[str]) -> None:
    """A round of many steps waits as often as one of few, and compares no more."""
    compared = "aten::equal"
    # Less often where more steps are replayed: an unrecorded one has its state compared at the end.
    assert many[compared] <= few[compared]
    assert {**many, compared: 0} == {**few, compared: 0}


def twice(data: FederatedTensorDataset) -> FederatedTensorDataset:
    """Each client with every sample twice, and so with more steps in an epoch."""
    rows = [torch.cat([positions, positions]) for positions in data.indices]
    return FederatedTensorDataset(
        data.fields, rows, batch_size=data.batch_size, shuffle=data.shuffle
    )


NOT_COUNTED = {
    "FedMAP": "its closed form looks after each sweep whether it ends",
    "HomologicalConstraints": "it warns that twice as many steps are too long",
}
COUNTED = sorted({*methods.__all__} - NOT_COUNTED.keys())


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTED)
def test_no_step_of_any_method_waits_for_the_device(name: str) -> None:
    """With twice as many steps in a round, a round waits no more often."""
    problem = PROBLEMS.get(name, {})

    def waits(more: bool) -> Counter[str]:
        data = problem.get("make_data", small_clients)(torch.float64)
        module = problem.get("make_module", small_module)(torch.float64)
        data = twice(data) if more else data
        return elsewhere(CASES[name](), engine="vectorized", module=module, data=data).waits

    assert_waits_no_more(waits(more=True), waits(more=False))


@pytest.mark.parametrize(
    "name",
    [
        name if name == "FedMTL" else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(CASES)
    ],
)
def test_no_later_round_waits_for_what_the_host_sends(name: str) -> None:
    """Such as positions of clients, which an ordinary copy would send after all other work."""
    problem = PROBLEMS.get(name, {})

    data = problem.get("make_data", small_clients)(torch.float64)
    module = problem.get("make_module", small_module)(torch.float64)
    found = elsewhere(CASES[name](), engine="vectorized", module=module, data=data, rounds=4)
    (_, first), *_, (_, last) = found.rounds
    assert first
    assert last == {}


def test_a_round_waits_for_the_gate_the_logs_the_servers_step_and_the_evaluation() -> None:
    waits, _ = elsewhere(FedAvg(), rounds=4).rounds[-1]
    assert waits == {"aten::_to_copy": 3, "event": 1}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_no_step_of_an_optimizer_waits_for_the_device(optimizer: Any) -> None:
    def trained(run: Run, epochs: int) -> Outcome:
        module = cnn(optimizer=lambda parameters: optimizer(parameters, lr=0.01))
        return run(FedAvg(local_epochs=epochs), module=module, data=image_clients())

    more = trained(elsewhere, 2)
    assert trained(elsewhere, 1).waits == more.waits
    # ASGD's rate, which is read on the device there, is in single precision: 24 bits.
    single = optimizer is torch.optim.ASGD
    assert_same(more, trained(small_fit, 2), 16 * 2.0**-24 if single else 1e-9)


def loaders(clients: Any) -> FederatedLoaders:
    """A DataLoader for each client with samples."""
    images, labels = clients.fields
    return FederatedLoaders(
        [
            DataLoader(TensorDataset(images[positions], labels[positions]), batch_size=4)
            for positions in clients.indices
            if len(positions)
        ]
    )


def test_data_loaders_feed_the_device(run: Run) -> None:
    def settings() -> dict[str, Any]:
        return {"data": loaders(small_clients()), "engine": "vectorized", "participation": 3}

    assert_same(run(FedAvg(), **settings()), small_fit(FedAvg(), **settings()))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_dropout_on_the_device_is_that_of_the_cpu(engine: str, run: Run) -> None:
    def settings() -> dict[str, Any]:
        module = cnn(dropout=0.5)
        return {"module": module, "data": image_clients(), "engine": engine}

    assert_same(run(FedRep(), **settings()), small_fit(FedRep(), **settings()))


@pytest.mark.slow
def test_fine_tuning_and_new_clients_work_on_the_device(run: Run) -> None:
    def settings() -> dict[str, Any]:
        new = image_clients((3, 5))
        callbacks = [
            HeadFineTuning(epochs=2, when="evaluation"),
            NewClientAdaptation((new, new), samples=(1, 3), epochs=2),
        ]
        return {"callbacks": callbacks, "data": image_clients(), "module": cnn()}

    outcome = run(FedRep(), **settings())
    assert_same(outcome, small_fit(FedRep(), **settings()))
    assert "new_clients/acc@3" in outcome.fit.metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CFL", "FedMAP", "SheafFMTL"])
def test_monitors_read_the_device(name: str, tmp_path: Path, run: Run) -> None:
    from lightning.pytorch.loggers import TensorBoardLogger

    client_state: dict[str, list[type[Callback]]] = {
        "CFL": [ClusterMonitor, DriftMonitor],
        "FedMAP": [PriorMonitor],
        "SheafFMTL": [ClientGraph],
    }

    def settings(folder: str) -> dict[str, Any]:
        kinds: list[type[Callback]] = [ClientHistogram, PairwiseDistance, *client_state[name]]
        monitors = [kind() for kind in kinds]
        return {"callbacks": monitors, "logger": TensorBoardLogger(tmp_path / folder)}

    outcome = run(CASES[name](), **settings("device"))
    assert_same(outcome, small_fit(CASES[name](), **settings("cpu")))


@pytest.mark.slow
def test_a_run_resumes_on_the_device_and_on_the_cpu(tmp_path: Path, run: Run) -> None:
    whole = small_fit(Ditto(), rounds=4)
    saved = tmp_path / "half.ckpt"
    run(Ditto(), save=saved)
    assert_same(run(Ditto(), rounds=4, ckpt_path=saved), whole)
    assert_same(small_fit(Ditto(), rounds=4, ckpt_path=saved), whole)
