"""A Trainer that fits again, and a method's object in two Trainers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_pfl import PersonalizedModule
from lightning_pfl.contract.callback import FederatedCallback
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
    network,
    points,
    steps_of,
    trained,
    trainer,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")
ZERO = torch.zeros(2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("method", "name"),
    [(FedAvg, "backbone.0.weight"), (FedRep, "head.weight"), (LocalOnly, "head.weight")],
)
@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
def test_weights_loaded_after_a_fit_need_another_trainer(
    method: Callable[[], Method], name: str, stage: str
) -> None:
    run, module = trainer(method(), max_epochs=1), network()
    train, held_out = classes()
    run.fit(module, train, held_out)
    kept = run.strategy.client_state_dict(0)
    left = {key: leaf.clone() for key, leaf in module.state_dict().items()}
    module.load_state_dict({**left, name: left[name] + 1})
    run.fit_loop.max_epochs = 2
    match = rf"Module as its last round left it, but `{name}` was changed since, .* new Trainer"
    with pytest.raises(MisconfigurationException, match=match):
        getattr(run, stage)(module, train if stage == "fit" else held_out)
    # Nothing is lost: with the module as it was, the clients go on.
    module.load_state_dict(left)
    run.validate(module, held_out, verbose=False)
    assert all(torch.equal(run.strategy.client_state_dict(0)[key], kept[key]) for key in kept)


class InLightningsLoop(PersonalizedModule):
    """Each client's model is in the module itself while it trains."""

    def on_after_backward(self) -> None:
        """Look at the gradients."""


@pytest.mark.parametrize("method", [FedAvg, FedRep, LocalOnly])
@pytest.mark.parametrize("kind", [PersonalizedModule, InLightningsLoop])
def test_a_fit_goes_on(method: Callable[[], Method], kind: type[PersonalizedModule]) -> None:
    run, module = trainer(method(), max_epochs=1, engine="auto"), network(kind=kind)
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


FLAGS = [("gradient_clip_val", 0.05), ("accumulate_grad_batches", 2)]


class SetsFlag(Callback):
    """Sets a flag of the Trainer in a hook."""

    def __init__(self, hook: str, flag: str, value: Any) -> None:
        setattr(self, hook, lambda trainer, *_, **__: setattr(trainer, flag, value))


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_epoch_start", "on_train_batch_end"])
@pytest.mark.parametrize(("flag", "value"), FLAGS)
def test_a_flag_that_a_hook_changes_during_a_fit_is_refused(
    flag: str, value: Any, hook: str
) -> None:
    run = trainer(FedAvg(), max_epochs=2, callbacks=[SetsFlag(hook, flag, value)])
    with pytest.raises(MisconfigurationException, match=rf"`trainer.{flag}` to stay .* {value},"):
        run.fit(Quadratic(), points())


@pytest.mark.parametrize(("flag", "value"), FLAGS)
def test_a_flag_may_be_set_before_a_fit(flag: str, value: Any) -> None:
    """In ``setup``, or between two fits, as if the Trainer had been given it."""

    def model_of(**options: Any) -> Tensor:
        run = trainer(FedAvg(), max_epochs=1, **options)
        run.fit(Quadratic(), points())
        found: Tensor = run.strategy.global_state_dict()["w"]
        return found

    given = model_of(**{flag: value})
    assert torch.equal(model_of(callbacks=[SetsFlag("setup", flag, value)]), given)
    assert not torch.equal(model_of(), given)
    run, module = trainer(FedAvg(), max_epochs=1), Quadratic()
    run.fit(module, points())
    setattr(run, flag, value)
    run.fit_loop.max_epochs = 2
    run.fit(module, points())
    other = trainer(FedAvg(), max_epochs=2)
    other.fit(Quadratic(), points())
    assert not torch.equal(
        run.strategy.global_state_dict()["w"], other.strategy.global_state_dict()["w"]
    )


class Watching(Quadratic):
    """Has buffers in its model and outside of it."""

    seen: Tensor
    apart: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("apart", torch.zeros(()), persistent=False)


def add_to(name: str) -> Callable[[Any], object]:
    return lambda module: getattr(module, name).data.add_(1)


class Writing(FederatedCallback):
    """Does something to the module in a hook."""

    def __init__(self, hook: str, change: Callable[[Any], object]) -> None:
        setattr(type(self), hook, lambda self, trainer, module, *_, **__: change(module))


LATER = (
    *("on_train_batch_start", "on_train_batch_end", "on_round_start", "on_round_end"),
    *("on_validation_batch_end", "on_validation_epoch_end", "on_train_epoch_end"),
)


@pytest.mark.parametrize("hook", LATER)
@pytest.mark.parametrize("name", ["w", "seen"])
@pytest.mark.parametrize("method", [FedAvg, LocalOnly])
@pytest.mark.parametrize("rounds", [1, 2])
def test_what_a_later_hook_writes_is_refused(
    rounds: int, method: Any, name: str, hook: str
) -> None:
    """Each round begins with the server's model, or with the clients' own; the last one counts."""
    change = type("Once", (Writing,), {})(hook, add_to(name))
    match = f"as a round left it, but `{name}` was changed in a later hook"
    with pytest.raises(MisconfigurationException, match=match):
        trainer(method(), max_epochs=rounds, callbacks=[change]).fit(Watching(), points(), points())


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("hook", ["on_validation_epoch_end", "on_train_epoch_end"])
def test_what_a_hook_of_the_module_writes_is_refused(hook: str, rounds: int) -> None:
    module = Watching()
    setattr(module, hook, lambda: module.seen.add_(1))
    with pytest.raises(MisconfigurationException, match="but `seen` was changed in a later hook"):
        trainer(FedAvg(), max_epochs=rounds).fit(module, points(), points())


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end", "teardown"])
def test_what_is_written_after_the_last_round_stays(hook: str) -> None:
    """Such as averaged weights, or those of the best checkpoint."""
    change = type("Last", (Writing,), {})(hook, write)
    module, data = Watching(), points()
    run = trainer(FedAvg(), max_epochs=2, callbacks=[change])
    run.fit(module, data, data)
    assert module.w.tolist() == [7.0, 7.0]
    with pytest.raises(MisconfigurationException, match="`w` was changed since, and this Trainer"):
        run.test(module, data, verbose=False)


@pytest.mark.parametrize("other", [torch.zeros(1), torch.zeros(2), torch.tensor(0), None])
def test_a_buffer_of_another_kind_is_refused_by_name(other: Tensor | None) -> None:
    module = Watching()
    hook = "on_train_epoch_end"
    setattr(module, hook, lambda: setattr(module, "seen", other))
    with pytest.raises(MisconfigurationException, match="but `seen` was replaced in a later hook"):
        trainer(FedAvg(), max_epochs=2).fit(module, points(), points())


@pytest.mark.parametrize("hook", LATER)
def test_what_a_hook_puts_back_or_writes_elsewhere_is_not(hook: str) -> None:
    def swap(module: Any) -> None:
        before = module.w.detach().clone()
        module.w.data.zero_()
        module.w.data.copy_(before)
        module.apart.add_(1)

    module = Watching()
    run = trainer(FedAvg(), max_epochs=2, callbacks=[type("Swap", (Writing,), {})(hook, swap)])
    run.fit(module, points(), points())
    assert module.apart > 0


def test_what_a_hook_inside_a_clients_steps_writes_is_the_clients() -> None:
    module = Watching()
    vars(module)["on_train_batch_end"] = lambda *_: module.seen.add_(1)
    run = trainer(LocalOnly(), max_epochs=2)
    run.fit(module, points(), points())
    for client, size in enumerate(SIZES):
        assert run.strategy.client_state_dict(client)["seen"] == 2 * steps_of(size)
    assert module.seen == 0


def test_a_layer_replaced_after_setup_is_refused() -> None:
    """The engines put a client's tensors into the layers with which the fit began."""

    class Replacing(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch:
                module.head = copy.deepcopy(module.head)

    run = trainer(FedAvg(), max_epochs=2, callbacks=[Replacing()])
    match = "`head.weight` was put into another layer in a later hook"
    with pytest.raises(MisconfigurationException, match=match):
        run.fit(network(), *classes())


def test_a_change_in_setup_counts() -> None:
    run = trainer(LocalOnly(), max_epochs=1)
    run.fit(Changing("setup", write), points())
    want = trained(torch.full((2,), 7.0, dtype=torch.float64), 1)
    torch.testing.assert_close(run.strategy.client_state_dict(1)["w"], want, rtol=0, atol=1e-12)
