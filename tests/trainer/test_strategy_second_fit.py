"""A Trainer that fits again, and a method's object in two Trainers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_pfl import PersonalizedModule
from lightning_pfl.methods import (
    FedAvg,
    FedPer,
    FedRep,
    LocalOnly,
)
from lightning_pfl.methods.base import Method
from tests.trainer.setting import (
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


def test_weights_changed_between_fits_are_not_used_and_that_is_said() -> None:
    run, module = trainer(FedAvg(), max_epochs=1), Quadratic()
    run.fit(module, points())
    first = run.strategy.global_state_dict()["w"]
    module.w.data.fill_(100.0)
    run.fit_loop.max_epochs = 2
    with pytest.warns(UserWarning, match=r"Quadratic was changed since its last round \(w\), but"):
        run.fit(module, points())
    want = mean([trained(first, client) for client in range(4)], list(map(float, SIZES)))
    torch.testing.assert_close(run.strategy.global_state_dict()["w"], want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [FedAvg, FedRep, LocalOnly])
def test_a_fit_that_goes_on_says_nothing(method: Callable[[], Method]) -> None:
    run, module = trainer(method(), max_epochs=1), network()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*was changed since.*")
        run.fit(module, *classes())
        run.validate(module, classes()[1], verbose=False)
        run.fit_loop.max_epochs = 2
        run.fit(module, *classes())
    assert run.strategy.federation.rounds == run.current_epoch == 2


def test_another_module_needs_another_trainer() -> None:
    run = trainer(FedAvg(), max_epochs=2)
    run.fit(Quadratic(), points())
    run.fit_loop.max_epochs = 4
    with pytest.raises(MisconfigurationException, match=r"last fit, after 2 rounds, but got oth"):
        run.fit(Quadratic(), points())


def wide() -> PersonalizedModule:
    torch.manual_seed(0)
    return PersonalizedModule(nn.Linear(6, 5), nn.Linear(5, 3), num_classes=3)


def test_one_method_object_serves_two_trainers() -> None:
    shared = FedPer(personal="*")
    first, module = trainer(shared, max_epochs=1), Quadratic()
    first.fit(module, points())
    second = trainer(shared, max_epochs=1)
    second.fit(wide(), classes(3)[0])
    for client in range(4):
        want = trained(ZERO, client)
        got = first.strategy.client_state_dict(client)["w"]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    first.fit_loop.max_epochs = 2
    first.fit(module, points())
    want = trained(ZERO, 3, 2 * steps_of(SIZES[3]))
    torch.testing.assert_close(first.strategy.client_state_dict(3)["w"], want, rtol=0, atol=1e-12)
    assert second.strategy.client_state_dict(0)["head.weight"].shape == (3, 5)


def test_participation_may_change_between_fits_within_its_range() -> None:
    run = trainer(max_epochs=1)
    module = Quadratic()
    run.fit(module, points())
    assert run.callback_metrics["round/clients"] == 4
    run.strategy.participation = 2
    run.fit_loop.max_epochs = 2
    run.fit(module, points())
    assert run.callback_metrics["round/clients"] == 2
    with pytest.raises(ValueError, match=r"Expected `participation` .* got participation=0"):
        run.strategy.participation = 0


# --- clients that would be lost, and changes that no client would hear of


def test_another_module_on_the_same_trainer_is_refused_and_nothing_is_lost() -> None:
    run, module = trainer(FedRep(), max_epochs=2), network()
    run.fit(module, *classes())
    (before,) = run.test(module, classes()[1], verbose=False)
    with pytest.raises(MisconfigurationException, match="clients were trained for 2 rounds, but"):
        run.test(network(1), classes()[1], verbose=False)
    (after,) = run.test(module, classes()[1], verbose=False)
    assert after == before


@pytest.mark.parametrize(("method", "warned"), [(FedRep, True), (FedAvg, False)])
def test_a_new_trainer_has_no_personal_parts_and_that_is_warned_of(
    method: Callable[[], Method], warned: bool
) -> None:
    module = network()
    trainer(method(), max_epochs=1).fit(module, *classes())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer(method()).test(module, classes()[1], verbose=False)
    match = "holds the shared part of a federation that another Trainer has trained with FedRep"
    assert any(match in str(one.message) for one in found) == warned


class Changing(Quadratic):
    """Changes itself in a hook of Lightning's."""

    def __init__(self, hook: str, change: Callable[[Any], object]) -> None:
        super().__init__()
        setattr(self, hook, lambda *_, **__: change(self))


def freeze(module: Any) -> None:
    module.w.requires_grad_(False)


def write(module: Any) -> None:
    module.w.data.fill_(7.0)


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
@pytest.mark.parametrize(
    ("change", "how"), [(freeze, "`w` was frozen or unfrozen"), (write, "`w` was changed")]
)
@pytest.mark.parametrize("method", [FedAvg, LocalOnly])
def test_a_change_after_setup_is_refused(method: Any, change: Any, how: str, hook: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"{how} in a later hook"):
        trainer(method(), max_epochs=2).fit(Changing(hook, change), points())


def test_a_change_in_setup_counts() -> None:
    run = trainer(LocalOnly(), max_epochs=1)
    run.fit(Changing("setup", write), points())
    want = trained(torch.full((2,), 7.0, dtype=torch.float64), 1)
    torch.testing.assert_close(run.strategy.client_state_dict(1)["w"], want, rtol=0, atol=1e-12)
