"""Clients whose models haven't changed keep their results, with the bits of an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl import FederatedStrategy
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.contract.records import ClientInfo, ClientResults, Round
from lightning_pfl.core.tree import Model, Tree, tmap
from lightning_pfl.data.datasets import FederatedLoaders
from lightning_pfl.engine.base import EvaluationWork
from lightning_pfl.engine.select import SelectedEngine
from lightning_pfl.engine.vectorized import evaluation
from lightning_pfl.federation.unchanged import UnchangedClients
from lightning_pfl.methods import Ditto, FedAvg, FedMAP, FedMTL, FedRep, PFedBayes
from lightning_pfl.methods.base import Method
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.models.client_modules import ClientModules
from lightning_pfl.testing import Fit, fit
from lightning_pfl.testing.conformance import SIZES, small_clients, small_module
from lightning_pfl.testing.fitting import quiet, quiet_trainer
from tests.methods.cases import CASES, PROBLEMS

WITH_SAMPLES = sum(size > 0 for size in SIZES)
ROUNDS = 4


class Results(FederatedCallback):
    """Keeps all clients' values of every round, and how many clients an engine has evaluated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: list[dict[str, Tensor]] = []
        self.evaluated: list[int] = []
        evaluate, count = SelectedEngine.evaluate, 0

        def counting(engine: SelectedEngine, work: EvaluationWork, listener: Any = None) -> Any:
            nonlocal count
            count += len(work.clients)
            return evaluate(engine, work, listener)

        def taken() -> int:
            nonlocal count
            found, count = count, 0
            return found

        self.taken = taken
        monkeypatch.setattr(SelectedEngine, "evaluate", counting)

    def on_clients_evaluated(
        self, trainer: L.Trainer, module: L.LightningModule, results: ClientResults
    ) -> None:
        """Keep a round's."""
        self.evaluated.append(self.taken())
        self.values.append(
            {
                prefix + name: values.clone()
                for prefix, one in results.evaluations.items()
                for name, values in {**one.values, "counts": one.counts}.items()
            }
        )


def run(
    method: Method, monkeypatch: pytest.MonkeyPatch, enabled: bool = True, **settings: Any
) -> tuple[Results, Fit]:
    """Some rounds of two clients each, with an evaluation of all after each."""
    monkeypatch.setattr(UnchangedClients, "enabled", enabled)
    # A chunk of one client, or of two small ones.
    monkeypatch.setattr(evaluation, "samples_at_once", lambda _: max(SIZES))
    data = settings.pop("data", None) or small_clients()
    given = {"rounds": ROUNDS, "participation": 2, "val_data": data, "module": small_module()}
    settings = {**given, **settings}
    with monkeypatch.context() as patch:
        results = Results(patch)
        callbacks = [results, *settings.pop("callbacks", ())]
        return results, fit(method, data, callbacks=callbacks, **settings)


def assert_same_bits(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    """Every value of every client in every round."""
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        assert got.keys() == want.keys()
        for name, values in want.items():
            torch.testing.assert_close(got[name], values, rtol=0, atol=0, equal_nan=True)


SOME = (("Ditto", "vectorized"), ("FedMTL", "sequential"))


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        pytest.param(name, engine, marks=[] if (name, engine) in SOME else pytest.mark.slow)
        for name in CASES
        for engine in ("sequential", "vectorized")
    ],
)
def test_values_are_those_of_evaluating_everybody(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = PROBLEMS.get(name, {})

    def settings() -> dict[str, Any]:
        module = problem.get("make_module", small_module)(torch.float64)
        data = problem.get("make_data", small_clients)(torch.float64)
        return {"engine": engine, "module": module, "data": data}

    found, _ = run(CASES[name](), monkeypatch, **settings())
    expected, _ = run(CASES[name](), monkeypatch, enabled=False, **settings())
    assert_same_bits(found.values, expected.values)


@pytest.mark.parametrize("engine", ["sequential", pytest.param("auto", marks=pytest.mark.slow)])
def test_only_changed_models_are_evaluated(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients a round; those of Ditto are evaluated with the common model, too."""
    found, _ = run(FedMTL(), monkeypatch, engine=engine)
    # The engine is known after the first evaluation, and a chunk may have two clients.
    assert found.evaluated[0] >= WITH_SAMPLES
    assert all(1 <= count < WITH_SAMPLES for count in found.evaluated[1:])
    both, _ = run(Ditto(), monkeypatch, engine=engine)
    assert [b - f for b, f in zip(both.evaluated[1:], found.evaluated[1:], strict=True)] == [
        WITH_SAMPLES
    ] * (ROUNDS - 1)


class Cohorts(FederatedCallback):
    """Keeps the clients of every round."""

    def __init__(self) -> None:
        self.clients: list[set[int]] = []

    def on_round_end(self, trainer: L.Trainer, module: L.LightningModule, round: Round) -> None:
        """Keep a round's."""
        self.clients.append(set(round.info.index.tolist()))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("engine", ["sequential", "auto"])
@pytest.mark.parametrize("method", [FedMAP, partial(PFedBayes, kl_weight=1e-3, inner_steps=1)])
def test_clients_that_have_not_begun_are_evaluated_with_what_they_receive(
    method: Callable[[], Method], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those who have begun and don't train in a round one is evaluated, to compare it.

    With this seed the first client begins in round 0, and another one in round 4.
    """
    cohorts = Cohorts()
    settings: dict[str, Any] = {"engine": engine, "rounds": 6, "seed": 3}
    found, _ = run(method(), monkeypatch, callbacks=[cohorts], **settings)
    expected, _ = run(method(), monkeypatch, enabled=False, **settings)
    assert_same_bits(found.values, expected.values)
    if engine == "auto":  # chunks may have two clients
        assert sum(found.evaluated) < sum(expected.evaluated)
        return
    begun, left_out = set[int](), 0
    for round, cohort in enumerate(cohorts.clients[1:], 1):
        begun |= cohorts.clients[round - 1]
        left_out = max(len(begun - cohort) - 1, 0)
        assert found.evaluated[round] == expected.evaluated[round] - left_out
    assert left_out > 0


@pytest.mark.parametrize("change", [False, True])
def test_one_client_of_all_parts_is_compared(change: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are built one by one; two of four clients change in each round."""
    monkeypatch.setattr("lightning_pfl.federation.evaluate.models_at_a_time", lambda _: 1)
    monkeypatch.setattr(Held, "scale", 1.0)

    def results(enabled: bool) -> Results:
        Held.scale = 1.0
        settings: dict[str, Any] = {"module": network(layer=Reading()), "engine": "sequential"}
        settings["callbacks"] = [Change(set_outside)] if change else []
        return run(FedMTL(), monkeypatch, enabled, **settings)[0]

    found = results(True)
    assert_same_bits(found.values, results(False).values)
    assert found.evaluated[1:-1] == [2 + 1] * (ROUNDS - 2)
    assert found.evaluated[-1] == (WITH_SAMPLES if change else 2 + 1)


class Blend(FedMAP):
    """Evaluates half of the prior's mean and half of the client's own model."""

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        own = super().personal_model(received, client_state, info)
        return {**own, **tmap(lambda a, b: (a + b) / 2, self.gamma(received)["mean"], own)}


def test_a_model_that_what_is_received_changes_is_evaluated_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the method says that it isn't."""
    found, _ = run(Blend(), monkeypatch, engine="sequential")
    expected, _ = run(Blend(), monkeypatch, enabled=False, engine="sequential")
    assert found.evaluated[1:] == expected.evaluated[1:]
    assert_same_bits(found.values, expected.values)


class Again(FederatedCallback):
    """Evaluates all clients once more after each round, when none has changed."""

    def __init__(self) -> None:
        self.results: list[set[str]] = []

    def on_clients_evaluated(
        self, trainer: L.Trainer, module: L.LightningModule, results: ClientResults
    ) -> None:
        loop: Any = trainer.fit_loop.epoch_loop.val_loop
        again = loop.federation.evaluate(
            loop.clients, loop.rows, loop.data, "validation_step", trainer.limit_val_batches
        )
        for prefix, one in results.evaluations.items():
            assert torch.equal(again[prefix].values["val_loss"], one.values["val_loss"])
        self.results.append({*again})


def test_where_nobody_changes_the_common_model_is_still_told_from_the_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again = Again()
    found, _ = run(Ditto(), monkeypatch, callbacks=[again], engine="sequential")
    assert again.results == [{"", "global/"}] * ROUNDS
    # One client with its own model, all with the common one, and then a round of two and one to
    # compare.
    assert found.evaluated[2:] == [1 + WITH_SAMPLES + 3 + WITH_SAMPLES] * (ROUNDS - 2)


def test_a_resumed_run_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = run(FedMTL(), monkeypatch)
    _, half = run(FedMTL(), monkeypatch, rounds=2)
    path = half.save(tmp_path / "half.ckpt")
    resumed, _ = run(FedMTL(), monkeypatch, ckpt_path=path)
    assert_same_bits(resumed.values, whole.values[2:])


# --- whatever else a value depends on -------------------------------------------------------------


class Noise(nn.Module):
    """Noise, in evaluations as well."""

    def forward(self, features: Tensor) -> Tensor:
        """Add it."""
        return features + torch.randn_like(features)


class Own(PersonalizedModule):
    """A step that the package doesn't know."""

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        """Log the round."""
        self.log("val_round", float(self.current_epoch))


class Held:
    """An object that a layer, or a loss, reads."""

    scale = 1.0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Scale the cross entropy."""
        return self.scale * nn.functional.cross_entropy(output, target, reduction="none")


class Reading(nn.Module):
    """Reads what a key of settings may not show."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.tensor = Held(), torch.ones(3)
        self.owners: list[Any] = []
        self.frozen = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, features: Tensor) -> Tensor:
        """Scale by all of them."""
        epoch = 1 + sum(owner.current_epoch for owner in self.owners)
        scaled: Tensor = features * self.held.scale * self.tensor[1] * self.frozen * epoch
        return scaled


class Stepwise(nn.Module):
    """Counts its calls in evaluations, and reads the count."""

    calls = 0

    def forward(self, features: Tensor) -> Tensor:
        """Scale by the count."""
        self.calls += not self.training
        return features * (1 + 1e-5 * self.calls)


def network(**layers: Any) -> PersonalizedModule:
    kind = layers.get("kind", PersonalizedModule)
    torch.manual_seed(0)
    more = [layers["layer"]] if "layer" in layers else []
    loss = layers.get("loss", "cross_entropy")
    module: PersonalizedModule = kind(
        nn.Sequential(nn.Flatten(), *more), nn.Linear(25, 3, dtype=torch.float64), loss, lr=0.05
    )
    return module


def hooked() -> PersonalizedModule:
    module = network()
    module.head.register_forward_hook(lambda *_: None)
    return module


def loaders() -> FederatedLoaders:
    data = small_clients()
    x, y = data.fields
    sets = [TensorDataset(x[at], y[at]) for at in data.indices if len(at)]
    return FederatedLoaders([DataLoader(one, batch_size=4) for one in sets])


@pytest.mark.parametrize(
    "settings",
    [
        lambda: {"module": network(layer=Noise()), "engine": "sequential"},
        lambda: {"module": network(kind=Own), "engine": "sequential"},
        lambda: {"module": hooked(), "engine": "sequential"},
        lambda: {"module": network(), "data": loaders(), "engine": "sequential"},
    ],
    ids=["draws", "own step", "hook", "loaders"],
)
def test_what_may_differ_is_evaluated_again(
    settings: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = run(FedMTL(), monkeypatch, **settings())
    assert found.evaluated[1:] == [WITH_SAMPLES] * (ROUNDS - 1)


class Change(FederatedCallback):
    """Changes something before the last validation."""

    def __init__(self, change: Callable[[L.Trainer, Any], None]) -> None:
        self.change = change

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == ROUNDS - 1:
            with torch.no_grad():
                self.change(trainer, pl_module)


def scale_states(trainer: L.Trainer, module: Any) -> None:
    strategy: Any = trainer.strategy
    strategy.federation.client_states.tree["model"]["head.weight"].mul_(2)


def replace_states(trainer: L.Trainer, module: Any) -> None:
    stored = trainer.strategy.federation.client_states  # type: ignore[attr-defined]
    stored.tree = {"model": {name: 2 * leaf for name, leaf in stored.tree["model"].items()}}


def scale_samples(trainer: L.Trainer, module: Any) -> None:
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    loop.data.fields[0].mul_(2)


def set_slope(trainer: L.Trainer, module: Any) -> None:
    module.backbone[1].negative_slope = 0.5


@pytest.mark.parametrize(
    "change", [scale_states, replace_states, scale_samples, set_slope], ids=lambda one: one.__name__
)
def test_a_change_by_other_code_is_seen(
    change: Callable[[L.Trainer, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings() -> dict[str, Any]:
        callbacks = [Change(change)]
        module = network(layer=nn.LeakyReLU())
        return {"module": module, "callbacks": callbacks, "engine": "sequential"}

    found, _ = run(FedMTL(), monkeypatch, **settings())
    expected, _ = run(FedMTL(), monkeypatch, enabled=False, **settings())
    assert found.evaluated[-1] == WITH_SAMPLES
    assert_same_bits(found.values, expected.values)


def set_object(trainer: L.Trainer, module: Any) -> None:
    module.backbone[1].held.scale = 1.5


def write_tensor(trainer: L.Trainer, module: Any) -> None:
    module.backbone[1].tensor[1] = 1.5


def write_frozen(trainer: L.Trainer, module: Any) -> None:
    module.backbone[1].frozen.data.fill_(1.5)  # as those who average a teacher do


def read_epoch(trainer: L.Trainer, module: Any) -> None:
    """Change nothing: the layer reads the epoch."""


def set_loss(trainer: L.Trainer, module: Any) -> None:
    module.loss.__self__.scale = 1.5


def set_outside(trainer: L.Trainer, module: Any) -> None:
    Held.scale = 1.5


@pytest.mark.parametrize(
    "change",
    [set_object, write_tensor, write_frozen, read_epoch, set_loss, set_outside],
    ids=lambda one: one.__name__,
)
def test_a_change_that_no_setting_shows_is_seen_in_values(
    change: Callable[[L.Trainer, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Held, "scale", 1.0)

    def values(enabled: bool) -> list[dict[str, Tensor]]:
        Held.scale = 1.0
        module: Any = network(layer=Reading(), loss=Held().loss)
        module.backbone[1].owners += [module] if change is read_epoch else []
        settings: dict[str, Any] = {"module": module, "engine": "sequential"}
        settings["callbacks"] = [Change(change)]
        return run(FedMTL(), monkeypatch, enabled, **settings)[0].values

    assert_same_bits(values(True), values(False))


class Still(Reading):
    """Reads nothing."""

    def forward(self, features: Tensor) -> Tensor:
        """Leave them as they are."""
        return features


def test_a_client_of_each_architecture_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients train in a round; only the second architecture reads what no setting shows."""
    monkeypatch.setattr(Held, "scale", 1.0)

    def results(enabled: bool) -> Results:
        monkeypatch.setattr(UnchangedClients, "enabled", enabled)
        Held.scale = 1.0
        modules = {"still": network(layer=Still()), "reading": network(layer=Reading())}
        module = ClientModules(modules, ["still", "still", "reading", "reading", "reading"])
        with monkeypatch.context() as patch, quiet():
            found = Results(patch)
            strategy = FederatedStrategy(FedMTL(), 1, "sequential", seed=0)
            trainer = quiet_trainer(strategy, ROUNDS, callbacks=[found, Change(set_outside)])
            trainer.fit(module, small_clients(), small_clients())
        return found

    found = results(True)
    assert_same_bits(found.values, results(False).values)
    assert all(count < WITH_SAMPLES for count in found.evaluated[1:-1])


def test_layers_that_an_evaluation_changes_are_evaluated_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ends(engine: str, enabled: bool) -> tuple[list[dict[str, Tensor]], int]:
        layer = Stepwise()
        settings: dict[str, Any] = {"module": network(layer=layer), "engine": engine}
        return run(FedMTL(), monkeypatch, enabled, **settings)[0].values, layer.calls

    expected, count = ends("sequential", enabled=False)
    for engine in ("sequential", "auto"):
        found, calls = ends(engine, enabled=True)
        assert_same_bits(found, expected)
        assert calls == count > 0


@pytest.mark.parametrize("method", [FedAvg, FedRep])
def test_models_with_a_part_of_the_servers_are_evaluated_again(
    method: Callable[[], Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = run(method(), monkeypatch, engine="sequential")
    assert found.evaluated[1:] == [WITH_SAMPLES] * (ROUNDS - 1)
