"""Clients that limits or drop_last leave without a minibatch: named, not sampled; all: an error.

Of the quadratic federation, the clients have 2, 3, 2 and 3 minibatches; 0.4 of them, rounded down,
is 0, 1, 0 and 1.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.core.errors import ClientError
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.methods import (
    L2GD,
    FedAvg,
    FedRep,
    LocalOnly,
)
from tests.trainer.setting import BATCH, CENTRES, SIZES, Quadratic, mean, points, trained, trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")
ZERO = torch.zeros(2, dtype=torch.float64)
IDLE = r"2 clients are {}, as limit_{}_batches=0.4 and .* leave no minibatch to them: 0, 2\."


class Cohorts(FederatedCallback):
    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def on_round_start(self, trainer: Any, module: Any, round: Any) -> None:
        self.seen.append(round.info.index.tolist())


def loaders(drop_last: bool = False) -> list[DataLoader[Any]]:
    return [
        DataLoader(TensorDataset(c.expand(n, 2)), batch_size=BATCH, drop_last=drop_last)
        for n, c in zip(SIZES, CENTRES, strict=True)
    ]


@pytest.mark.parametrize("make", [points, loaders])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_idle_clients_are_named_and_have_no_weight(make: Any, weighting: Any) -> None:
    cohorts = Cohorts()
    run = trainer(
        FedAvg(weighting=weighting),
        max_epochs=1,
        limit_train_batches=0.4,
        callbacks=[cohorts],
    )
    with pytest.warns(UserWarning, match=IDLE.format("never sampled", "train")):
        run.fit(Quadratic(), make())
    assert cohorts.seen == [[1, 3]]
    weights = [6.0, 5.0] if weighting == "samples" else [1.0, 1.0]
    want = mean([trained(ZERO, 1, 1), trained(ZERO, 3, 1)], weights)
    got = run.strategy.global_state_dict()["w"]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_drop_last_leaves_short_clients_idle() -> None:
    run = trainer(LocalOnly(), max_epochs=1)
    data = points((1, 4), CENTRES[:2], drop_last=True)
    with pytest.warns(UserWarning, match=r"1 clients are never sampled, .*drop_last.* to them: 0"):
        run.fit(Quadratic(), data)
    assert torch.equal(run.strategy.client_state_dict(0)["w"], ZERO)
    want = trained(ZERO, 1, 2)
    torch.testing.assert_close(run.strategy.client_state_dict(1)["w"], want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("flag", ["limit_train_batches", "overfit_batches"])
@pytest.mark.parametrize("make", [points, loaders])
def test_nobody_who_can_train_is_an_error(flag: str, make: Any) -> None:
    limits: dict[str, Any] = {flag: 0.1}
    run = trainer(max_epochs=1, **limits)
    with pytest.raises(MisconfigurationException, match=rf"{flag}=0\.1 and .* of the 4 clients"):
        run.fit(Quadratic(), make())


def test_drop_last_that_leaves_nobody_is_an_error() -> None:
    run = trainer(max_epochs=1)
    with pytest.raises(MisconfigurationException, match=r"leave no minibatch to any of the 2 cl"):
        run.fit(Quadratic(), points((1, 1), CENTRES[:2], drop_last=True))


def test_more_clients_a_round_than_can_train_are_refused() -> None:
    run = trainer(max_epochs=1, limit_train_batches=0.4, participation=3)
    with (
        pytest.warns(UserWarning, match="never sampled"),
        pytest.raises(ValueError, match="at most the 2 clients"),
    ):
        run.fit(Quadratic(), points())


def test_a_budget_of_nothing_and_a_round_without_training_are_no_mistake() -> None:
    for method in (FedAvg(local_epochs=0), FedRep(personal="w", head_epochs=0, body_epochs=0)):
        run = trainer(method, max_epochs=1)
        run.fit(Quadratic(), points())
        assert run.strategy.federation.rounds == 1
    cohorts = Cohorts()
    mixed = L2GD(aggregation_probability=0.9)
    run = trainer(mixed, max_epochs=2, limit_train_batches=0.4, callbacks=[cohorts], seed=0)
    with pytest.warns(UserWarning, match=IDLE.format("never sampled", "train")):
        run.fit(Quadratic(), points())
    assert cohorts.seen == [[1, 3], [1, 3]]


@pytest.mark.parametrize("function", ["fit", "validate", "test"])
def test_clients_without_an_evaluated_batch_are_named_and_left_out(function: str) -> None:
    split = "test" if function == "test" else "val"
    limits: dict[str, Any] = {f"limit_{split}_batches": 0.4}
    run = trainer(FedAvg(local_epochs=0), max_epochs=1, **limits)
    arguments = (points(), points()) if function == "fit" else (points(),)
    with pytest.warns(UserWarning, match=IDLE.format("not evaluated", split)):
        getattr(run, function)(Quadratic(), *arguments)
    # The loss at w = 0 is |c|^2 / 2.
    want = float((CENTRES[[1, 3]] ** 2).sum(1).mean() / 2)
    assert float(run.callback_metrics[f"{split}_loss"]) == pytest.approx(want)


def test_clients_without_a_batch_to_predict_are_named() -> None:
    run = trainer(limit_predict_batches=0.4)
    with pytest.warns(UserWarning, match=IDLE.format("not evaluated", "predict")):
        found = run.predict(Quadratic(), points())
    assert [len(outputs) for outputs in found] == [0, 1, 0, 1]


@pytest.mark.parametrize("split", ["val", "test", "predict"])
def test_nobody_to_evaluate_is_an_error(split: str) -> None:
    limits: dict[str, Any] = {f"limit_{split}_batches": 0.1}
    run = trainer(**limits)
    function = {"val": run.validate, "test": run.test, "predict": run.predict}[split]
    match = rf"limit_{split}_batches=0\.1 and .* any of the 4 clients with samples in the {split} s"
    with pytest.raises(MisconfigurationException, match=match):
        function(Quadratic(), points())


def test_clients_with_nan_in_the_samples_to_evaluate_are_named() -> None:
    """A client that isn't evaluated, and the sample of none, don't count."""
    data = points()
    broken = data.fields[0].clone()
    for client in (0, 3):
        broken[data.indices[client][-1], 1] = float("nan")
    held = FederatedTensorDataset((broken,), data.indices, batch_size=BATCH)
    run = trainer(FedAvg(local_epochs=0), limit_val_batches=0.4)
    with (
        pytest.warns(UserWarning, match="not evaluated"),
        pytest.warns(UserWarning, match=r"The val data of 1 clients hold NaN: 3\."),
    ):
        run.validate(Quadratic(), held)


class Normed(Quadratic):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.w - self.norm(batch[0])).square().mean()


@pytest.mark.parametrize("make", [points, loaders])
def test_last_minibatches_of_one_sample_are_said_before_batch_norm_meets_them(make: Any) -> None:
    """Clients have 4, 6, 3 and 5 samples in minibatches of 2; with 4 the last would have one."""
    cohorts = Cohorts()
    run = trainer(LocalOnly(), max_epochs=1, callbacks=[cohorts], participation=1, seed=0)
    match = r"of 2 clients is one sample \(2, 3\), on which 'norm'.* Use batch_size=6, or drop_last"
    with pytest.warns(UserWarning, match=match), suppress(ClientError):
        run.fit(Normed(), make())
    trainer(LocalOnly(), max_epochs=1).fit(Normed(), make(drop_last=True))  # warnings are errors


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_only_last_minibatches_of_one_sample_may_be_left_out(engine: Any) -> None:
    """Of 4, 3 and 5 samples in minibatches of two."""
    run = trainer(LocalOnly(), max_epochs=1, engine=engine)
    run.fit(Normed(), points((4, 3, 5), CENTRES[:3], drop_last="single"))
    trained = [run.strategy.client_state_dict(k)["norm.num_batches_tracked"] for k in range(3)]
    assert [int(n) for n in trained] == [2, 1, 2]


def test_a_rule_for_last_minibatches_that_is_none_is_refused() -> None:
    one = [torch.arange(2)]
    with pytest.raises(ValueError, match="True, False or 'single', but got drop_last='short'"):
        FederatedTensorDataset(torch.ones(2), one, drop_last="short")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2 for drop_last='single', but got batch_size=1"):
        FederatedTensorDataset(torch.ones(2), one, drop_last="single", batch_size=1)
