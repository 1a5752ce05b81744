"""Code inside a step: Lightning's own loop for each client."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl.callbacks import HeadFineTuning
from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.methods import SCAFFOLD, FedAvg, FedMAP, FedPer, FedProx, FedRep
from lightning_pfl.testing.fitting import fit as federate
from lightning_pfl.testing.fitting import quiet
from tests.trainer.plain import QUIET, Regression, fields, fit, require_plain

# --- manual optimization ---


class GAN(L.LightningModule):
    """Two networks with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(3, 3), nn.Linear(3, 1)
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        optimizers: Any = self.optimizers()
        first, second = optimizers
        noise = x.roll(1, 0)
        with first.toggle_model():
            loss = -self.critic(self.generator(noise)).mean()
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
        self.log("generator_loss", loss, on_step=False, on_epoch=True)
        self.toggle_optimizer(second)
        made = self.critic(self.generator(noise).detach())
        loss = made.tanh().mean() - self.critic(x).tanh().mean()
        second.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(second, 0.5, "norm")
        second.step()
        self.untoggle_optimizer(second)
        self.log("critic_loss", loss, on_step=False, on_epoch=True)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.generator.parameters(), lr=0.1)
        second = torch.optim.SGD(self.critic.parameters(), lr=0.2)
        return [first, second], [torch.optim.lr_scheduler.StepLR(second, 1, 0.5)]


def test_gan() -> None:
    trainer = require_plain(GAN)
    assert [one.param_groups[0]["lr"] for one in trainer.optimizers] == [0.1, 0.2 / 4]


class AdversarialMoments(GAN):
    def configure_optimizers(self) -> Any:
        rate = {"lr": 0.05, "betas": (0.5, 0.9)}
        first = torch.optim.Adam(self.generator.parameters(), **rate)  # type: ignore[arg-type]
        second = torch.optim.AdamW(self.critic.parameters(), **rate)  # type: ignore[arg-type]
        return [first, second], [torch.optim.lr_scheduler.StepLR(second, 1, 0.5)]


def test_optimizers_keep_their_moments_through_the_epochs_of_a_round() -> None:
    require_plain(AdversarialMoments, rounds=1, local_epochs=3)


class EveryOther(Regression):
    """Gradients of two minibatches, and a loss for the log."""

    def build(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer: Any = self.optimizers()
        if batch_idx % 2 == 1 or self.trainer.is_last_batch:
            optimizer.step()
            optimizer.zero_grad()
        return loss


def test_gradients_stay_between_minibatches() -> None:
    require_plain(EveryOther)


class Silent(Regression):
    """Neither a loss nor a logged value, as manual optimization may have it."""

    def build(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(torch.nn.functional.mse_loss(self(batch[0]), batch[1]))
        optimizer.step()


def test_a_step_may_return_and_log_nothing() -> None:
    require_plain(Silent)


def test_a_client_begins_without_what_another_left() -> None:
    """Clients that are trained together and alone end alike: moments, schedules, gradients."""

    def models(parts: list[Any]) -> Any:
        data = FederatedTensorDataset(fields(), parts, batch_size=4)
        return federate(FedPer("layers"), data, EveryOther(), 2, "auto").models["layers.0.weight"]

    parts = [range(5), range(5, 10)]
    both = models(parts)
    for number, part in enumerate(parts):
        torch.testing.assert_close(models([part])[0], both[number], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", [SCAFFOLD(), FedProx(0.1)], ids=["SCAFFOLD", "FedProx"])
def test_methods_that_compute_gradients_refuse_manual_optimization(method: Any) -> None:
    match = f"{type(method).__name__} computes gradients itself, but GAN sets automatic_optim"
    with pytest.raises(MisconfigurationException, match=match):
        fit(GAN(), 1, method)


def test_the_vectorized_engine_names_what_it_can_not_run() -> None:
    with pytest.raises(ValueError, match=r"vectorized', but it can't: GAN sets automatic_optim"):
        fit(GAN(), 1, FedAvg(), engine="vectorized")


def test_frozen_parameters_of_a_phase_stay() -> None:
    class Halves(EveryOther):
        pass

    before = Halves().state_dict()
    trainer = fit(Halves(), 1, FedRep("layers.2", head_steps=3, body_steps=0))
    state = trainer.strategy.client_state_dict("ada")  # type: ignore[attr-defined]
    assert torch.equal(state["layers.0.weight"], before["layers.0.weight"])
    assert not torch.equal(state["layers.2.weight"], before["layers.2.weight"])


# --- hooks ---


class Clipped(Regression):
    """Clips the layers apart."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for layer in (self.layers[0], self.layers[2]):
            nn.utils.clip_grad_norm_(layer.parameters(), 0.1)


class WarmUp(Regression):
    """Raises the rate over the first five steps, by the counter of the Trainer."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 5)
        optimizer.step(closure=optimizer_closure)


class Average(Regression):
    """Keeps a moving average of the weights in a buffer."""

    average: Tensor

    def build(self) -> None:
        self.register_buffer("average", torch.zeros(4, 3))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert set(outputs) == {"loss"}
        self.average = 0.9 * self.average + 0.1 * self.layers[0].weight.detach()


class GradientHooks(Regression):
    """Doubles the loss, halves gradients of one layer, adds decay, logs a norm."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("seen", loss, on_step=False, on_epoch=True)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()

    def on_after_backward(self) -> None:
        self.layers[0].weight.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.layers[2].weight.grad.add_(self.layers[2].weight.detach(), alpha=0.1)
        norm = self.layers[0].weight.grad.norm()
        self.log("norm", norm, on_step=False, on_epoch=True)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class ByStep(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.3, int(total), cycle_momentum=False
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Both(Regression):
    """One schedule counts steps, the other epochs."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        epochs = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": steps, "interval": "step"}, epochs]


class Twice(Regression):
    """An optimizer that evaluates the loss again, as SAM does."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()
        with torch.no_grad():
            moves = [p.grad.mul(0.1) for p in self.parameters() if p.grad is not None]
            for p, move in zip(self.parameters(), moves, strict=True):
                p.add_(move)
        optimizer_closure()
        with torch.no_grad():
            for p, move in zip(self.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()


class BothWithHooks(Both, Clipped):
    pass


KINDS = [Clipped, WarmUp, Average, GradientHooks, BothWithHooks, Twice]


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
@pytest.mark.parametrize("kind", [ByStep, Both])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_schedules_of_steps(kind: type[Regression], engine: str, accumulate: int) -> None:
    require_plain(kind, engine=engine, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("kind", KINDS)
def test_hooks(kind: type[Regression]) -> None:
    require_plain(kind)


@pytest.mark.parametrize("kind", [WarmUp, BothWithHooks])
def test_hooks_under_accumulation(kind: type[Regression]) -> None:
    require_plain(kind, accumulate_grad_batches=2)


def test_flags_reach_the_hook() -> None:
    class Passing(Regression):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            assert gradient_clip_val == 0.05
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    require_plain(Passing, gradient_clip_val=0.05)


def test_methods_with_gradients_of_their_own_call_the_hooks() -> None:
    """FedProx without its term, taken apart into gradient and step, is FedAvg."""

    class Apart(FedProx):
        def client_step(self, state: Any, minibatches: Any, client: Any) -> Any:
            grads = client.grad(state["model"], minibatches)
            return {**state, "model": client.update(state["model"], grads)}

    for kind in (GradientHooks, BothWithHooks):
        whole, apart = kind(), kind()
        fit(whole, 2, FedAvg())
        fit(apart, 2, Apart(0.0))
        for name, leaf in whole.state_dict().items():
            torch.testing.assert_close(apart.state_dict()[name], leaf, rtol=1e-12, atol=1e-12)


# --- steps that read the Trainer's counters ---


class WarmsLoss(Regression):
    """The loss grows over the first five steps, by a property."""

    @property
    def weight(self) -> float:
        return min(1.0, (self.global_step + 1) / 5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.weight


def last_counts_more(module: L.LightningModule) -> float:
    return 3.0 if module.trainer.is_last_batch else 1.0


class LastCountsMore(Regression):
    """A function of the file reads the counter."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * last_counts_more(self)


class GrowsInEpoch(Regression):
    """Its forward reads it, in a function within."""

    def forward(self, x: Tensor) -> Any:
        def share() -> float:
            return 1.0 / float(self.trainer.num_training_batches) if self.training else 1.0

        return super().forward(x) * share()


COUNTERS = {
    WarmsLoss: "global_step",
    LastCountsMore: "is_last_batch",
    GrowsInEpoch: "num_training_batches",
}


@pytest.mark.parametrize("kind", COUNTERS)
def test_a_step_reads_the_counters_of_its_client(kind: type[Regression]) -> None:
    trainer = require_plain(kind)
    choice = trainer.strategy.federation.engine.choices["training_step"]
    assert choice == f"sequential ({kind.__name__} reads `{COUNTERS[kind]}` in its step)"


def test_names_that_are_no_counters_leave_a_step_as_it_is() -> None:
    class Own(Regression):
        """An attribute of its own, the name of an argument, and a counter read elsewhere."""

        def build(self) -> None:
            self.is_last_batch = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            dict(global_step=self.is_last_batch)  # noqa: C408
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.global_step >= 0
            return super().validation_step(batch, batch_idx)

    trainer: Any = fit(Own(), 1, FedAvg())
    assert "reads" not in trainer.strategy.federation.engine.choices["training_step"]


# --- hooks of callbacks ---


class Counting(L.Callback):
    """Counts the hooks of a step."""

    def __init__(self) -> None:
        self.steps, self.norms = 0, list[float]()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.steps += 1
        self.norms.append(float(module.layers[0].weight.grad.norm()))


def test_hooks_of_callbacks_see_every_step_of_the_client() -> None:
    plain, ours = Counting(), Counting()
    fit(Regression(), 2, callbacks=[plain])
    trainer: Any = fit(Regression(), 2, FedAvg(), callbacks=[ours])
    assert ours.steps == plain.steps == 6
    assert ours.norms == pytest.approx(plain.norms, rel=1e-9)
    choice = trainer.strategy.federation.engine.choices["training_step"]
    assert choice == "sequential (Counting overrides `on_before_optimizer_step`)"


class Noisy(Regression):
    """Adds noise to gradients, from Python's, NumPy's and torch's global generators."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            noise = torch.rand(()).double() + random.random() + float(np.random.rand())
            p.grad = p.grad + 0.1 * noise  # type: ignore[operator]


class Reading(L.Callback):
    """Draws numbers after each round, and after each client, as callbacks may."""

    def __init__(self) -> None:
        self.drawn = list[float]()

    def on_train_batch_end(self, *_: Any) -> None:
        self.drawn += [random.random(), float(np.random.rand())]

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.on_train_batch_end()


def test_noise_of_hooks_follows_from_the_minibatch_and_leaves_generators_alone() -> None:
    """Whatever was drawn before; callbacks draw what they would without the module's noise."""
    found = []
    for kind, before in ((Noisy, 5), (Noisy, 6), (Regression, 6)):
        module, reading = kind(), Reading()
        random.seed(before)
        np.random.seed(before)
        fit(module, 3, FedAvg(), callbacks=[reading])
        one, two = random.Random(before), np.random.RandomState(before)
        calls = len(reading.drawn) // 2
        assert calls >= 6
        assert reading.drawn == [draw() for _ in range(calls) for draw in (one.random, two.rand)]
        found.append(module.state_dict()["layers.0.weight"].clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


class Replacing(L.Callback):
    """Gives the module another step, and a hook more, after the first round."""

    def __init__(self) -> None:
        self.called = list[str]()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            first = module.training_step

            def step(batch: Any) -> Any:
                self.called.append("step")
                return first(batch, 0)

            module.training_step = step
            module.on_train_batch_end = lambda *_: self.called.append("end")


def test_steps_and_hooks_that_come_later_are_called() -> None:
    """A round of one client has three minibatches."""
    replacing = Replacing()
    fit(Clipped(), 3, FedAvg(), callbacks=[replacing])
    assert replacing.called == ["step", "end"] * 6


def test_the_module_is_the_users_again_after_a_step() -> None:
    module = Clipped()
    own = {name: leaf.data_ptr() for name, leaf in module.named_parameters()}
    fit(module, 2, FedAvg())
    assert {name: leaf.data_ptr() for name, leaf in module.named_parameters()} == own
    assert all(leaf.requires_grad and leaf.grad is None for leaf in module.parameters())


def test_more_than_the_loss_is_refused_by_name() -> None:
    class Weighted(FedAvg):
        def client_step(self, state: Any, minibatches: Any, client: Any) -> Any:
            grads = client.grad(
                state["model"], minibatches, objective=lambda view, _: 2 * view.loss
            )
            return {**state, "model": client.update(state["model"], grads)}

    match = "Weighted differentiates more than its loss, but Clipped overrides `configure_gradient"
    with pytest.raises(MisconfigurationException, match=match):
        fit(Clipped(), 1, Weighted())


# --- hooks on a batch ---


class Scaled(Regression):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [2 * batch[0], batch[1]]

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        batch = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return [batch[0] + 1, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x = batch[0].square() if self.trainer.training else batch[0]
        return [x, batch[1]]


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_hooks_on_a_batch(engine: str) -> None:
    require_plain(Scaled, engine=engine)


def test_hooks_on_a_batch_with_code_inside_a_step() -> None:
    class All(Scaled, Clipped):
        pass

    require_plain(All)


def test_loss_of_the_step_is_logged_under_accumulation() -> None:
    """The loss that is checked for infinities is that of a minibatch, not its share."""
    trainer: Any = fit(Clipped(), 1, FedAvg(), accumulate_grad_batches=2)
    expected = fit(Clipped(), 1, accumulate_grad_batches=2)
    found = float(trainer.callback_metrics["loss"])
    assert found == pytest.approx(float(expected.callback_metrics["loss"]), rel=1e-6)


# --- from round to round ---


def sized(*sizes: int) -> FederatedTensorDataset:
    """Clients with their own numbers of samples, in minibatches of two."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return FederatedTensorDataset(fields(), parts, batch_size=2)


def rates(data: FederatedTensorDataset, rounds: int, **options: Any) -> list[float]:
    """The rate at the end of each client's steps, and that of the next round."""
    seen: list[float] = []

    class Watched(ByStep):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            seen.append(optimizer.param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            self.total = self.trainer.estimated_stepping_batches
            steps = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": steps, "interval": "step"}]

    module = Watched()
    run = federate(FedAvg(), data, module, rounds, "auto", **options)
    assert module.total == 3 * rounds
    return [*seen, run.trainer.optimizers[0].param_groups[0]["lr"]]


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_a_schedule_outside_of_the_loop_goes_on_as_well(engine: str) -> None:
    """The second round begins at an eighth, after three steps of the larger client."""

    class Halved(ByStep):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            steps = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": steps, "interval": "step"}]

    for rounds in (1, 2):
        run = federate(FedAvg(), sized(2, 6), Halved(), rounds, engine)
        assert run.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.125**rounds)


def test_a_phase_with_a_rate_of_its_own_refuses_a_schedule_of_steps() -> None:
    match = "a scheduler changes it in each step, but phase 'head' has lr=0.1"
    with pytest.raises(MisconfigurationException, match=match):
        fit(Both(), 1, FedRep("layers.2", head_lr=0.1))


def test_a_schedule_goes_on_from_the_client_with_most_steps() -> None:
    """Two and then six samples are one and three steps, from 1 and from an eighth."""
    halves = [2.0**-n for n in range(8)]
    first, second = [halves[1], *halves[1:4]], [halves[4], *halves[4:7]]
    assert rates(sized(2, 6), 2) == pytest.approx([*first, *second, halves[6]])


class ByProgress(Regression):
    """A weight of the loss grows with the part of the run that is over."""

    def build(self) -> None:
        self.parts: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        part = self.global_step / self.total
        self.parts.append(part)
        return super().training_step(batch, batch_idx) * (1 + part)

    def configure_optimizers(self) -> Any:
        self.total = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@pytest.mark.parametrize(("epochs", "accumulate"), [(1, 1), (2, 1), (2, 2)])
def test_all_steps_are_those_of_the_client_with_most(epochs: int, accumulate: int) -> None:
    """One and three minibatches in an epoch, from where the larger client was."""
    module, data = ByProgress(), sized(2, 6)
    flags: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    federate(FedAvg(local_epochs=epochs), data, module, 2, "auto", **flags)
    of_epoch = [1, math.ceil(3 / accumulate)]
    of_round = epochs * of_epoch[1]
    assert module.total == 2 * of_round
    expected = [
        (round * of_round + epoch * steps + number // accumulate) / (2 * of_round)
        for round in range(2)
        for steps, minibatches in zip(of_epoch, (1, 3), strict=True)
        for epoch in range(epochs)
        for number in range(minibatches)
    ]
    assert module.parts == pytest.approx(expected)


def test_rounds_are_all_steps_where_a_schedule_counts_them() -> None:
    class ByRound(ByProgress):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]

    module = ByRound()
    federate(FedAvg(), sized(2, 6), module, 2, "auto")
    assert module.total == 2


class Estimates(Regression):
    """Asks for all steps by a property."""

    @property
    def all_steps(self) -> Any:
        return self.trainer.estimated_stepping_batches


class InStep(Estimates):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * float(self.all_steps)


class InHook(Estimates):
    def on_train_start(self) -> None:
        self.total = self.all_steps


class InSetup(Estimates):
    def setup(self, stage: str) -> None:
        self.total = self.all_steps


@pytest.mark.parametrize(
    ("kind", "function"),
    [(InStep, "training_step"), (InHook, "on_train_start"), (InSetup, "setup")],
)
def test_all_steps_are_asked_for_in_one_place(kind: type[Estimates], function: str) -> None:
    match = f"in `configure_optimizers`, but `{function}` of {kind.__name__} reads it.*self.total"
    with pytest.raises(MisconfigurationException, match=match):
        federate(FedAvg(), sized(2, 6), kind(), 2, "auto")


class StepsInLoss(BothWithHooks):
    """The step's number is in the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + 0.1 * self.trainer.global_step)


@pytest.mark.parametrize("kind", [Both, StepsInLoss])
def test_a_resumed_run_goes_on_with_schedules_and_steps(
    kind: type[Regression], tmp_path: Path
) -> None:
    data = sized(2, 6)
    whole = federate(FedAvg(), data, kind(), 4, "auto")
    half = federate(FedAvg(), data, kind(), 2, "auto").save(tmp_path / "half.ckpt")
    rest = federate(FedAvg(), data, kind(), 4, "auto", ckpt_path=half)
    for name, leaf in whole.models.items():
        assert torch.equal(rest.models[name], leaf)
    assert rest.trainer.global_step == whole.trainer.global_step == 4


@pytest.mark.parametrize("kind", [Clipped, EveryOther])
def test_heads_are_tuned_by_the_modules_own_steps(kind: type[Regression]) -> None:
    """Two epochs of a client's head after the run are those of a plain Trainer with this head."""
    module, data = kind(), sized(10)
    tuning = HeadFineTuning("layers.2", epochs=2)
    run = federate(FedAvg(), data, module, 1, "auto", val_data=data, callbacks=[tuning])
    tuned = tuning.client_state_dict(0)

    alone = kind()
    alone.load_state_dict(run.federation.client_state_dict(0))
    alone.layers[0].requires_grad_(False)
    plain = L.Trainer(max_epochs=2, **QUIET)
    with quiet():
        plain.fit(alone, DataLoader(TensorDataset(*fields()), batch_size=2))
    for name, leaf in alone.state_dict().items():
        torch.testing.assert_close(tuned[name], leaf, rtol=1e-6, atol=1e-8)


class WeightedByBatch(Regression):
    """A hook on a batch sets what the loss reads."""

    weight = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weight = 1.0 + batch_idx

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self(batch[0]), batch[1]) * self.weight


def test_losses_behind_training_read_what_a_hook_has_set_for_this_client() -> None:
    """FedMAP measures a client's loss after training, with the weight of its last minibatch."""
    data, servers = sized(1, 5, 4), []
    for engine in ("reference", "sequential", "auto"):
        servers.append(federate(FedMAP(), data, WeightedByBatch(), 3, engine).server)
    for server in servers[1:]:
        torch.testing.assert_close(server, servers[0], rtol=1e-9, atol=1e-12)
