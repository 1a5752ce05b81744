"""FederatedStrategy: its settings, which method it takes, what it hands out, and optimizers."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl import FederatedLoop, FederatedStrategy
from lightning_pfl.federation.client_states import choose_device
from lightning_pfl.methods import (
    FedAvg,
    FedRep,
    GTVMin,
    LocalOnly,
    SheafFMTL,
)
from lightning_pfl.methods.base import Method
from lightning_pfl.testing import QuadraticModule, fit, quadratic_clients
from tests.trainer.setting import (
    CENTRES,
    LR,
    SIZES,
    Quadratic,
    classes,
    mean,
    network,
    points,
    steps_of,
    trained,
    trainer,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")
ZERO = torch.zeros(2, dtype=torch.float64)


# --- which method


def quiet(**kwargs: Any) -> Any:
    return trainer(**{"max_epochs": 1, "strategy": FederatedStrategy(), **kwargs})


def test_the_method_may_be_a_callback() -> None:
    run = quiet(callbacks=[LocalOnly()])
    run.fit(Quadratic(), points())
    assert type(run.strategy.method) is LocalOnly


def test_a_method_that_is_an_argument_becomes_a_callback_once() -> None:
    method = FedAvg()
    run = trainer(method, max_epochs=1)
    module = Quadratic()
    run.fit(module, points())
    run.validate(module, points(), verbose=False)
    assert run.callbacks.count(method) == 1


def test_the_registered_name_means_fedavg_unless_a_callback_says_otherwise() -> None:
    for callbacks, kind in (([], FedAvg), ([FedRep()], FedRep)):
        run = quiet(strategy="federated", callbacks=callbacks)
        run.fit(network(), classes()[0])
        assert type(run.strategy.method) is kind
        assert isinstance(run.fit_loop, FederatedLoop)


@pytest.mark.parametrize(
    ("strategy", "callbacks", "found"),
    [
        (FederatedStrategy(), [], "none"),
        (FederatedStrategy(), [FedAvg(), FedRep()], "FedAvg, FedRep"),
        (FederatedStrategy(FedAvg()), [FedRep()], "FedRep, FedAvg"),
    ],
)
def test_no_method_or_several_are_refused(
    strategy: FederatedStrategy, callbacks: list[Callback], found: str
) -> None:
    with pytest.raises(
        MisconfigurationException,
        match=f"Expected exactly one federated method, but found {found} ",
    ):
        quiet(strategy=strategy, callbacks=callbacks).fit(Quadratic(), points())


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        (
            {"method": "FedAvg"},
            TypeError,
            "Expected `method` to be a federated method, but got method='FedAvg'",
        ),
        ({"engine": "fast"}, ValueError, "Expected `engine` to be one of"),
        (
            {"client_state_device": "disk"},
            ValueError,
            "Expected `client_state_device` to be 'auto', 'device' or 'host', but got "
            "client_state_device='disk'",
        ),
        (
            {"chunk_size": 0},
            ValueError,
            "Expected `chunk_size` to be a whole number >= 1, but got chunk_size=0",
        ),
        ({"chunk_size": 1.5}, ValueError, "Expected `chunk_size` to be a whole number >= 1"),
        ({"chunk_size": True}, ValueError, "Expected `chunk_size` to be a whole number >= 1"),
        ({"max_update_norm": 0.0}, ValueError, "Expected `max_update_norm` to be a number > 0"),
        ({"max_update_norm": "1"}, ValueError, "Expected `max_update_norm` to be a number > 0"),
        (
            {"max_update_norm": float("nan")},
            ValueError,
            "Expected `max_update_norm` to be a number > 0, but got max_update_norm=nan",
        ),
        ({"seed": 1.5}, ValueError, "Expected `seed` to be a whole number >= 0, but got seed=1.5"),
        ({"seed": "x"}, ValueError, "Expected `seed` to be a whole number >= 0, but got seed='x'"),
        ({"seed": -1}, ValueError, "Expected `seed` to be a whole number >= 0, but got seed=-1"),
        ({"participation": 0}, ValueError, "Expected `participation`"),
    ],
)
def test_settings_out_of_range_are_refused(
    settings: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        FederatedStrategy(**settings)


def test_more_clients_a_round_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected `participation` to be at most the 4 clients"):
        trainer(participation=5).fit(Quadratic(), points())


# --- the client API


def test_clients_are_found_by_id_and_by_name() -> None:
    run = trainer(LocalOnly(), max_epochs=1)
    run.fit(Quadratic(), points(names=list("abcd")))
    strategy: Any = run.strategy
    assert strategy.federation.num_clients == 4
    assert strategy.client_names == ("a", "b", "c", "d")
    assert torch.equal(strategy.client_state_dict("c")["w"], strategy.client_state_dict(2)["w"])
    for two in (np.int64(2), torch.tensor(2), torch.arange(4)[2]):
        assert torch.equal(
            strategy.client_state_dict("c")["w"], strategy.client_state_dict(two)["w"]
        )
    for wrong in ("e", 4, -1, True, np.int64(4), np.True_, torch.tensor(True), 2.0, None):
        with pytest.raises(
            KeyError, match=r"Expected `client` to be an id in 0..3 or one of the names"
        ):
            strategy.client_state_dict(wrong)


def test_where_names_are_integers_an_int_is_a_name() -> None:
    """A dict with the keys 1 to 4, or a column of integers in a table."""
    run = trainer(LocalOnly(), max_epochs=1)
    run.fit(Quadratic(), points(names=list("1234")))
    strategy: Any = run.strategy
    each = [strategy.client_state_dict(name)["w"] for name in strategy.client_names]
    for number in (1, 2, 3, 4):
        assert torch.equal(strategy.client_state_dict(number)["w"], each[number - 1])
    match = "Expected `client` to be one of the names '1', '2', '3', '4', but got client=0"
    with pytest.raises(KeyError, match=match):
        strategy.client_state_dict(0)


def test_a_state_dict_loads_into_the_users_module_and_is_a_copy() -> None:
    run = trainer(FedRep(), max_epochs=1)
    module = network()
    module.backbone[0].bias.requires_grad_(False)  # static: not part of the model that clients hold
    run.fit(module, classes()[0])
    state = run.strategy.client_state_dict(0)
    assert state.keys() == module.state_dict().keys()
    fresh = network(seed=7)
    fresh.load_state_dict(state)
    assert torch.equal(fresh.backbone[0].bias, module.backbone[0].bias)
    before = run.strategy.client_state_dict(0)["head.weight"].clone()
    state["head.weight"].zero_()
    assert torch.equal(run.strategy.client_state_dict(0)["head.weight"], before)


def test_a_client_module_stands_alone() -> None:
    run = trainer(FedRep(), max_epochs=1)
    module = network()
    run.fit(module, classes()[0])
    copy = run.strategy.client_module(1)
    assert type(copy) is type(module)
    assert copy._trainer is None
    assert module._trainer is run
    assert not any(part.training for part in copy.modules())
    for name, value in run.strategy.client_state_dict(1).items():
        assert torch.equal(copy.state_dict()[name], value)


def test_the_global_model_is_the_servers() -> None:
    run = trainer(max_epochs=1)
    run.fit(Quadratic(), points())
    want = mean([trained(ZERO, k) for k in range(4)], list(SIZES))
    torch.testing.assert_close(run.strategy.global_state_dict()["w"], want, rtol=0, atol=1e-12)


def test_a_method_without_global_model_says_so() -> None:
    run = trainer(FedRep(), max_epochs=1)
    run.fit(network(), classes()[0])
    with pytest.raises(
        MisconfigurationException,
        match="Expected a method with a global model, but got FedRep, with which 2 of the 9",
    ):
        run.strategy.global_state_dict()


def test_before_a_run_there_is_nothing_to_ask() -> None:
    strategy: Any = FederatedStrategy(FedAvg())
    for question, arguments in (
        (strategy.client_state_dict, (0,)),
        (strategy.client_module, (0,)),
        (strategy.global_state_dict, ()),
    ):
        with pytest.raises(RuntimeError, match="a trained or loaded federation, but got none"):
            question(*arguments)


def test_a_second_fit_continues_and_another_module_does_not_replace_the_clients() -> None:
    run = trainer(LocalOnly(), max_epochs=1)
    module = Quadratic()
    run.fit(module, points())
    run.fit_loop.max_epochs = 2
    run.fit(module, points())
    want = trained(ZERO, 3, 2 * steps_of(SIZES[3]))
    torch.testing.assert_close(run.strategy.client_state_dict(3)["w"], want, rtol=0, atol=1e-12)
    with pytest.raises(MisconfigurationException, match="trained for 2 rounds, but got others"):
        run.validate(Quadratic(), points(), verbose=False)
    torch.testing.assert_close(run.strategy.client_state_dict(3)["w"], want, rtol=0, atol=1e-12)


def test_a_list_of_loaders_trains_an_ordinary_module() -> None:
    loaders = [
        DataLoader(TensorDataset(centre.expand(size, 2)), batch_size=2)
        for centre, size in zip(CENTRES, SIZES, strict=True)
    ]
    module = Quadratic()
    trainer(max_epochs=1).fit(module, loaders, loaders)
    torch.testing.assert_close(
        module.w.data, mean([trained(ZERO, k) for k in range(4)], list(SIZES)), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(
    ("place", "device", "num_clients", "want"),
    [
        ("auto", "cpu", 10, "cpu"),
        ("host", "meta", 10, "cpu"),
        ("device", "meta", 10, "meta"),
        ("auto", "meta", 10, "meta"),
    ],
)
def test_the_place_of_the_bank(place: str, device: str, num_clients: int, want: str) -> None:
    assert choose_device(place, torch.device(device), 12 * num_clients).type == want


@pytest.mark.parametrize(
    ("method", "scalars"),
    [
        (FedAvg(), 0),
        # The model, and three maps from it to half of its size; a model, and its three duals.
        (SheafFMTL("complete", edge_dim_ratio=0.5), 4 + 3 * 2 * 4),
        (GTVMin("complete"), 4 + 4 + 3 * 4),
    ],
)
def test_all_client_states_count_for_their_device(
    method: Method, scalars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def place(kind: str, device: torch.device, size: int) -> torch.device:
        asked.append(size)
        return torch.device("cpu")

    monkeypatch.setattr("lightning_pfl.trainer.setup.choose_device", place)
    data = quadratic_clients([1.0] * 4, torch.zeros(4, 4))
    fit(method, data, QuadraticModule(dim=4), 1)
    assert set(asked) == {4 * scalars * 8}


# --- seeds


def seed_of(seed: int | None) -> int:
    run = trainer(seed=seed, max_epochs=1)
    run.fit(Quadratic(), points())
    return int(run.strategy.federation.seed)


def test_the_seed_is_the_argument_else_that_of_seed_everything_else_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert seed_of(5) == 5
    assert seed_of(None) == 17
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert seed_of(None) != seed_of(None)


# --- optimizers


def module_with(**members: Any) -> Any:
    return type("Special", (Quadratic,), members)()


def two(self: Any) -> Any:
    return [torch.optim.SGD([self.w], lr=0.1), torch.optim.SGD([self.w], lr=0.1)]


def test_no_optimizer_is_refused() -> None:
    module = module_with(configure_optimizers=lambda self: None)
    with pytest.raises(MisconfigurationException, match="`configure_optimizers` returned None"):
        trainer().fit(module, points())


def test_several_optimizers_need_manual_optimization() -> None:
    with pytest.raises(RuntimeError, match="only supported with manual optimization"):
        trainer().fit(module_with(configure_optimizers=two), points())


class Halving(Quadratic):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def test_schedulers_step_once_a_round(tmp_path: Any) -> None:
    run = trainer(
        LocalOnly(),
        max_epochs=3,
        logger=CSVLogger(tmp_path),
        callbacks=[LearningRateMonitor()],
        log_every_n_steps=1,
    )
    run.fit(Halving(), points())
    w = ZERO
    for round in range(3):
        w = trained(w, 1, lr=LR / 2**round)
    torch.testing.assert_close(run.strategy.client_state_dict(1)["w"], w, rtol=0, atol=1e-12)
    assert run.optimizers[0].param_groups[0]["lr"] == LR / 8
    run.logger.save()
    rows = [
        line.split(",")
        for line in (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    ]
    rates = [
        float(row[rows[0].index("lr-SGD")]) for row in rows[1:] if row[rows[0].index("lr-SGD")]
    ]
    assert rates == [LR, LR / 2, LR / 4]


@pytest.mark.parametrize("monitor", ["val_loss", "train_loss"])
def test_plateau_schedulers_look_at_values_of_the_round(monitor: str) -> None:
    class Plateau(Quadratic):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, mode="max", patience=0, factor=0.5
            )
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": monitor}

    run = trainer(LocalOnly(), max_epochs=3)
    run.fit(Plateau(), points(), points())
    # The loss falls, so for mode="max" every round but the first is worse.
    assert run.optimizers[0].param_groups[0]["lr"] == LR / 4


def test_estimated_stepping_batches_counts_rounds() -> None:
    class Cycle(Quadratic):
        def configure_optimizers(self) -> Any:
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module = Cycle()
    trainer(max_epochs=3, accumulate_grad_batches=2).fit(module, points())
    assert module.estimate == 3


# --- imports


def test_another_lightning_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of such a module Lightning says its name alone, before a strategy is asked."""
    monkeypatch.setitem(sys.modules, "pytorch_lightning", ModuleType("pytorch_lightning"))
    with pytest.warns(
        UserWarning, match="`pytorch_lightning` is imported.* `import lightning as L`"
    ):
        strategy = FederatedStrategy(FedAvg())
    # What a Trainer of pytorch_lightning writes in its refusal.
    assert "not of `import pytorch_lightning`" in repr(strategy)


def test_callbacks_of_another_lightning_are_refused() -> None:
    class EarlyStopping:
        state_key = "early"

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    run = trainer()
    run.callbacks.append(EarlyStopping())
    match = "Expected callbacks of `lightning`, but EarlyStopping .*`import lightning as L`"
    with pytest.raises(MisconfigurationException, match=match):
        run.fit(Quadratic(), points(), points())
