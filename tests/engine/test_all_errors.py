"""What a user's step raises names the client, in every step and with every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection, R2Score
from torchmetrics.classification import MulticlassAccuracy

from lightning_pfl import FederatedStrategy
from lightning_pfl.callbacks import NewClientAdaptation
from lightning_pfl.core.errors import ClientError, format_names
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.methods import IFCA, FedAvg, FedMAP, FedRep
from lightning_pfl.methods.base import Method
from lightning_pfl.testing.fitting import QUIET, fit, quiet
from lightning_pfl.testing.rounds import assert_trees_close, local_round

NAMES = ("ada", "bob", "cyd")
WRONG = "(Target|index) 9 is out of bounds"
ENGINES = ["sequential", "vectorized", "auto"]


def clients(
    wrong: bool = False, names: tuple[str, ...] = NAMES, at: int = 6
) -> FederatedTensorDataset:
    """Four samples of two classes on each client; ``wrong`` gives one of the second's label 9.

    In its second batch, which no probe looks at, unless ``at`` says so.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4 * len(names), 2, generator=generator)
    y = torch.arange(len(x)) % 2
    if wrong:
        y[at] = 9
    positions = torch.arange(len(x)).split(4)
    return FederatedTensorDataset((x, y), positions, names=names, batch_size=2)


class Classifier(L.LightningModule):
    """Raises ``error`` in its evaluation steps, if there is one."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.error = nn.Linear(2, 2), error

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def evaluation_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.error is not None:
            raise self.error
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss

    validation_step = test_step = evaluation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.error is not None:
            raise self.error
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def shown(engine: str) -> str:
    """The clients that an error of ``bob``'s data names: the chunk's, or the one."""
    return "clients 'ada', 'bob', 'cyd'" if engine == "vectorized" else "client 'bob'"


def advice(engine: str) -> str:
    """The end of an error's text."""
    alone = r"\. If it is a label, number the classes from 0"
    return r".*\. Run with Fed.* to stop at the first" if engine == "vectorized" else alone


# --- the steps ---


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sanity", [0, -1])
def test_validation_in_a_fit(engine: str, sanity: int) -> None:
    """The sanity check is before any round, so it has no number to tell."""
    when = "" if sanity else " in round 0"
    match = rf"^validation_step failed for {shown(engine)}{when}: {WRONG}"
    with pytest.raises(ClientError, match=match + advice(engine)) as caught:
        fit(
            FedAvg(),
            clients(),
            Classifier(),
            2,
            engine,
            val_data=clients(wrong=True),
            num_sanity_val_steps=sanity,
        )
    assert isinstance(caught.value.__cause__, (IndexError, RuntimeError))
    assert caught.value.round == (None if sanity else 0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("step", ["validate", "test", "predict"])
@pytest.mark.parametrize("rounds", [0, 2])
def test_steps_outside_a_fit(engine: Any, step: str, rounds: int) -> None:
    strategy = FederatedStrategy(FedAvg(), engine=engine)
    module, when = Classifier(), " in round 1" if rounds else ""
    with quiet():
        trainer = L.Trainer(max_epochs=rounds, strategy=strategy, **QUIET)
        if rounds:
            trainer.fit(module, clients())
        name = {"validate": "validation"}.get(step, step)
        match = rf"^{name}_step failed for {shown(engine)}{when}: {WRONG}"
        with pytest.raises(ClientError, match=match):
            getattr(trainer, step)(module, clients(wrong=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_probe_names_the_client(engine: str) -> None:
    with pytest.raises(
        ClientError, match=r"^validation_step failed for client 'bob' in round 0: T"
    ):
        fit(FedAvg(), clients(), Classifier(), 1, engine, val_data=clients(wrong=True, at=4))


@pytest.mark.parametrize("engine", ENGINES)
def test_new_clients(engine: str) -> None:
    names = ("eve", "fay", "gus")
    pair = (clients(names=names), clients(True, names))
    adaptation = NewClientAdaptation(pair, samples=(4,), epochs=1, scope="all", start="global")
    who = "clients 'eve', 'fay', 'gus'" if engine == "vectorized" else "client 'fay'"
    with pytest.raises(
        ClientError, match=rf"^test_step failed for new {who} in round 0: {WRONG}"
    ) as caught:
        fit(FedAvg(), clients(), Classifier(), 1, engine, callbacks=[adaptation])
    assert isinstance(caught.value.__cause__, (IndexError, RuntimeError))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_training_of_new_clients(engine: str) -> None:
    names = ("ada", "fay", "gus")  # of whom one is called as a client of the run
    pair = (clients(True, names), clients(names=names))
    adaptation = NewClientAdaptation(pair, samples=(4,), epochs=1, scope="all", start="global")
    who = "clients 'ada', 'fay', 'gus'" if engine == "vectorized" else "client 'fay'"
    with pytest.raises(
        ClientError, match=rf"^client_step failed for new {who} in round 0: {WRONG}"
    ):
        fit(FedAvg(), clients(), Classifier(), 1, engine, callbacks=[adaptation])


# --- what a step returns ---


class Returns(Classifier):
    """Returns something made of its loss."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.make(self.loss(batch))


class HookedReturns(Returns):
    """One that Lightning's own loop trains."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


WRONG_RESULTS: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda loss: "loss", "a str"),
    (lambda loss: 0.5, "a float"),
    (lambda loss: (loss, 1), "a tuple"),
    (lambda loss: {"nll": loss}, r"a dict with \['nll'\]"),
    (lambda loss: {"loss": "loss"}, "a str"),
    (lambda loss: loss.repeat(3), r"a tensor of shape \(3,\)"),
]
GOT = (
    r"^client_step failed for client 'ada' in round 0: Expected `training_step` to return the "
    r"loss, a tensor of one number, .* but got {}\. Return the mean of the samples' losses"
)


@pytest.mark.parametrize("engine", ["reference", *ENGINES])
@pytest.mark.parametrize(("make", "got"), WRONG_RESULTS, ids=[got for _, got in WRONG_RESULTS])
def test_a_step_that_returns_no_loss(make: Callable[[Tensor], Any], got: str, engine: str) -> None:
    with pytest.raises(ClientError, match=GOT.format(got)):
        fit(FedAvg(), clients(), Returns(make), 1, engine)


@pytest.mark.parametrize(("make", "got"), WRONG_RESULTS, ids=[got for _, got in WRONG_RESULTS])
def test_a_step_that_returns_no_loss_in_lightnings_loop_and_where_it_is_measured(
    make: Callable[[Tensor], Any], got: str
) -> None:
    for method, kind in ((FedAvg(), HookedReturns), (IFCA(2), Returns)):
        with pytest.raises(ClientError, match=GOT.format(got)):
            fit(method, clients(), kind(make), 1, "auto")


# --- torchmetrics ---


class Regressor(Classifier):
    """Logs R2, which one sample doesn't have, and two values of the second minibatch alone."""

    def __init__(self, step: str, way: str = "update") -> None:
        super().__init__()
        self.step, self.way, self.score = step, way, R2Score()
        self.seconds, self.listed = MeanMetric(), CatMetric()

    def log_scores(self, batch: Any, batch_idx: int, step: str) -> None:
        if step != self.step:
            return
        getattr(self.score, self.way)(batch[0].sum(1), batch[0][:, 0])
        if batch_idx == 1:
            self.seconds.update(batch[0][:, 0])
            self.listed.update(batch[0][:1, 0])
        self.log("r2", self.score)
        self.log("seconds", self.seconds)
        self.log("listed", self.listed)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log_scores(batch, batch_idx, "training_step")
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log_scores(batch, batch_idx, "validation_step")
        return self.loss(batch)


def few_samples() -> FederatedTensorDataset:
    """Clients of whom bob has one sample, and cyd alone two minibatches."""
    data = clients()
    parts = [range(4), [4], range(7, 12)]
    return FederatedTensorDataset(data.fields, parts, names=NAMES, batch_size=4)


def r2(some: Tensor) -> float:
    """The share of the first column's variance that the rows' sums explain."""
    of, by = some[:, 0].double(), some.sum(1).double()
    return float(1 - ((of - by) ** 2).sum() / ((of - of.mean()) ** 2).sum())


@pytest.mark.filterwarnings("ignore:.*is NaN, or not logged")
@pytest.mark.parametrize("engine", ["reference", "sequential", "vectorized", "auto"])
@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_a_metric_that_has_no_value_for_a_client(engine: str, step: str) -> None:
    """Its mean is over the others, round by round; nor has one that a client never updates."""
    data, few = clients(), few_samples()
    train, val = (few, data) if step == "training_step" else (data, few)
    run = fit(FedAvg(), train, Regressor(step), 3, engine, val_data=val)
    x, last = data.fields[0], few.fields[0][11]
    expected = {"r2": (r2(x[:4]) + r2(x[7:12])) / 2}
    if step == "validation_step":  # in training the order of samples is drawn
        expected |= {"seconds": float(last[0]), "listed": float(last[0])}
        values = run.federation.client_results["val"].evaluations[""].values
        assert values["r2"].isnan().tolist() == [False, True, False]
        for name in ("seconds", "listed"):
            assert values[name].isnan().tolist() == [True, True, False]
    for name, value in expected.items():
        assert run.metrics[name] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("engine", ["reference", "sequential"])
def test_a_value_of_a_minibatch_that_has_none(engine: str) -> None:
    match = (
        "^validation_step failed for client 'bob' in round 0: Needs at least two samples to .*"
        r"\. Where it is a torchmetrics object, call its `update` in the step and log the object"
    )
    module = Regressor("validation_step", "forward")
    with pytest.raises(ClientError, match=match):
        fit(FedAvg(), clients(), module, 1, engine, val_data=few_samples())


class LogsMetric(Classifier):
    """Logs what it is given."""

    def __init__(self, metric: Any, together: bool = False) -> None:
        super().__init__()
        self.metric, self.together = metric, together

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.metric.update(self.layer(batch[0]), batch[1])
        if self.together:
            self.log_dict(self.metric)
        else:
            self.log("acc", self.metric)
        return self.loss(batch)


@pytest.mark.parametrize("engine", ["sequential", "auto"])
@pytest.mark.parametrize(
    ("metric", "match"),
    [
        (
            lambda: MulticlassAccuracy(2, average=None),
            r"logged as 'acc' to compute one number, but got \(2,\). Average them, or",
        ),
        (
            lambda: MetricCollection([MulticlassAccuracy(2)]),
            r"self.log\('acc', ...\) to log a number, .* but got a MetricCollection. Use self",
        ),
    ],
)
def test_metrics_of_several_numbers(engine: str, metric: Callable[[], Any], match: str) -> None:
    with pytest.raises(ClientError, match=match):
        fit(FedAvg(), clients(), LogsMetric(metric()), 1, engine, val_data=clients())


def test_a_collection_of_metrics_by_name() -> None:
    module = LogsMetric(MetricCollection([MulticlassAccuracy(2)]), together=True)
    data = clients()
    run = fit(FedAvg(), data, module, 1, "auto", val_data=data)
    weight, bias = (run.server["model"][f"layer.{name}"] for name in ("weight", "bias"))
    accuracies = []
    for positions in data.indices:
        x, y = data.gather(positions)
        accuracies.append(float(MulticlassAccuracy(2)(F.linear(x, weight, bias), y)))
    expected = sum(accuracies) / len(accuracies)
    assert run.metrics["MulticlassAccuracy"] == pytest.approx(expected, rel=1e-6)


# --- what goes through ---


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("full"),
        MisconfigurationException("wrong flag"),
        AttributeError("no such name"),
        KeyboardInterrupt("stopped"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_that_say_nothing_of_a_client(engine: str, error: BaseException) -> None:
    """As they are; Lightning turns an interruption into one of its own."""
    kind: Any = type(error)
    module = Classifier(error)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit(FedAvg(), clients(), module, 1, engine, val_data=clients())
        return
    with pytest.raises(kind, match=str(error)) as caught:
        fit(FedAvg(), clients(), module, 1, engine, val_data=clients())
    assert not isinstance(caught.value, ClientError)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_memory_that_ran_out_in_training(engine: Any) -> None:
    class Full(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError, match=r"^full$"):
        local_round(FedAvg(), Full(), clients(), engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_of_a_hook_is_the_hooks(engine: str) -> None:
    class Broken(Callback):
        def on_validation_batch_end(self, *_: Any) -> None:
            raise ValueError("broken hook")

    with pytest.raises(ValueError, match=r"^broken hook$"):
        fit(
            FedAvg(),
            clients(),
            Classifier(),
            1,
            engine,
            val_data=clients(),
            callbacks=[Broken()],
        )


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_key_alone_is_no_sentence(engine: Any) -> None:
    class Lost(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return {"x": self.loss(batch)}["label"]

    with pytest.raises(ClientError, match=r"in round 0: KeyError: 'label'"):
        local_round(FedAvg(), Lost(), clients(), engine)


def test_names_of_many_clients() -> None:
    assert format_names("abcdefg", range(5)) == "a, b, c, d, e"
    assert format_names("abcdefg", [3, 2, 1, 0, 6, 5]) == "d, c, b, a, g, ..."


# --- a loss without a gradient ---


class Skipping(Classifier):
    """A loss of the backbone alone, or of nothing."""

    def __init__(self, detached: bool = False) -> None:
        super().__init__()
        self.backbone, self.head, self.detached = nn.Linear(2, 2), nn.Linear(2, 2), detached

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.backbone(batch[0]), batch[1])
        return loss.detach() if self.detached else loss


SKIPPED = (
    r"client_step failed for clients? '.*' in round 0: Expected the loss of `training_step` to "
    r"depend on a parameter that trains in phase 'head' \(head.weight, head.bias\), but got a loss "
    r"without gradient. Don't use `detach` or `torch.no_grad` in it, or train other"
)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_skips_all_that_trains(engine: str) -> None:
    with pytest.raises(ClientError, match=SKIPPED):
        fit(FedRep(head_epochs=1), clients(), Skipping(), 1, engine)


@pytest.mark.parametrize("transform", ["forward", "grad"])
@pytest.mark.parametrize("detached", [False, True])
def test_both_transforms_tell_it(transform: Any, detached: bool) -> None:
    with pytest.raises(ClientError, match=SKIPPED + r".* Run with FederatedStrategy\(engine="):
        local_round(
            FedRep(head_epochs=1),
            Skipping(detached),
            clients(),
            "vectorized",
            settings=EngineSettings(),
            transform=transform,
        )


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_other_errors_of_the_backward_pass_stay(engine: Any) -> None:
    """There is a gradient, so it isn't the phase's fault."""

    class Refuses(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise RuntimeError("no way back")

    class OneWay(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = Refuses.apply(self.loss(batch))
            return loss

    with pytest.raises(ClientError, match="in round 0: no way back"):
        local_round(FedAvg(), OneWay(), clients(), engine)


class Penalised(Classifier):
    """Has a penalty on the gradient of its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        (gradient,) = torch.autograd.grad(loss, self.layer.weight, create_graph=True)
        return loss + gradient.square().sum()


class PenalisedByFunction(Classifier):
    """The same by a function of the weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        def loss_of(weight: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(batch[0], weight, self.layer.bias), batch[1])

        gradient: Tensor = torch.func.grad(loss_of)(self.layer.weight)
        return self.loss(batch) + gradient.square().sum()


@pytest.mark.parametrize("engine", ["reference", *ENGINES])
@pytest.mark.parametrize("method", [FedMAP(), IFCA(2)], ids=["FedMAP", "IFCA"])
def test_gradients_in_steps_whose_losses_are_measured(method: Method, engine: Any) -> None:
    """By the way that the error names."""
    with pytest.raises(ClientError, match=r"also measures its loss.* Use `torch.func.grad`"):
        fit(method, clients(), Penalised(), 2, engine)
    found = fit(method, clients(), PenalisedByFunction(), 2, engine)
    assert all(leaf.isfinite().all() for leaf in found.models.values())


@pytest.mark.parametrize("engine", ["reference", *ENGINES])
def test_gradients_in_steps_whose_losses_are_not_measured(engine: Any) -> None:
    """FedAvg measures none, and takes both."""
    one, other = (
        fit(FedAvg(), clients(), make(), 2, engine).models
        for make in (Penalised, PenalisedByFunction)
    )
    assert_trees_close(one, other, rtol=1e-5, atol=1e-6)
