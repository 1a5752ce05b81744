"""Evaluation: both engines report each client's own mean over its samples, with its own model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from lightning_pfl.contract.records import Evaluation
from lightning_pfl.core.errors import ClientError
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model, expand
from lightning_pfl.data.datasets import FederatedLoaders
from lightning_pfl.engine.base import EngineSettings, EvaluationWork
from lightning_pfl.engine.cost import Load
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.engine.steps import Limits
from lightning_pfl.engine.vectorized import evaluation
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.engine.vectorized.ordered import OrderedBatches
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.rounds import assert_trees_close
from tests.engine.nets import CLASSES, SIZES, cnn, image_clients

ENGINES = {"vectorized": VectorizedEngine, "sequential": SequentialEngine}


def personal_models(module: Any, head_only: bool = True) -> Model:
    """A shared backbone (expanded) and a head for each client, or everything for each client."""
    model = ParameterSplit(module).model()
    generator = torch.Generator().manual_seed(7)
    shared = expand(model, len(SIZES))
    for name, leaf in model.items():
        if leaf.is_floating_point() and (not head_only or name.startswith("head")):
            noise = torch.rand(len(SIZES), *leaf.shape, generator=generator, dtype=leaf.dtype)
            shared[name] = leaf + 0.5 * noise
    return shared


def evaluate(
    engine: str,
    module: Any,
    models: Model,
    data: Any = None,
    step: str = "validation_step",
    clients: Any = None,
    limit: float | int = 1.0,
) -> Evaluation:
    module.eval()
    kind = ENGINES[engine]
    runner = kind(module, ParameterSplit(module), EngineSettings())
    index = torch.arange(len(SIZES)) if clients is None else torch.tensor(clients)
    data = image_clients() if data is None else data
    found: Evaluation = runner.evaluate(EvaluationWork(models, index, data, step, limit))
    return found


def by_hand(module: Any, models: Model, batches: int | None = None) -> Tensor:
    """Each client's mean loss over its first minibatches of four, NaN for the empty client."""
    data, losses = image_clients(), []
    for client in range(len(SIZES)):
        module.load_state_dict({name: leaf[client] for name, leaf in models.items()})
        rows = data.indices[client]
        x, y = data.gather(rows if batches is None else rows[: 4 * batches])
        losses.append(F.cross_entropy(module(x), y) if len(y) else torch.tensor(torch.nan))
    return torch.stack(losses).detach().double()


@pytest.mark.parametrize("engine", ENGINES)
class TestEvaluation:
    @pytest.mark.parametrize("head_only", [True, False])
    def test_each_client_with_its_own_model_on_its_own_data(
        self, engine: str, head_only: bool
    ) -> None:
        module = cnn().eval()
        models = personal_models(module, head_only)
        found = evaluate(engine, cnn(), models)
        torch.testing.assert_close(
            found.values["val_loss"], by_hand(module, models), equal_nan=True
        )
        assert found.counts.tolist() == list(SIZES)

    @pytest.mark.parametrize("own", [True, False])
    @pytest.mark.parametrize("batch_size", [4, 100])
    def test_accuracy_of_predictions_that_are_nan_is_nan(
        self, engine: str, own: bool, batch_size: int
    ) -> None:
        """The largest of NaN is in the first place, which is the class of all samples here."""
        data = image_clients(batch_size=batch_size)
        data.fields[0][data.indices[3][0]] = torch.nan
        data.fields[1].zero_()
        module = cnn(num_classes=CLASSES)
        models = personal_models(module) if own else expand(ParameterSplit(module).model(), 5)
        values = evaluate(engine, module, models, data).values
        for name in ("val_loss", "val_acc"):
            assert values[name].isnan().tolist() == [False, True, False, True, False]

    @pytest.mark.parametrize("limit", [1, 2, 0.5])
    def test_limits_count_the_users_batches(self, engine: str, limit: float) -> None:
        module = cnn().eval()
        models = personal_models(module)
        found = evaluate(engine, cnn(), models, limit=limit)
        full = [-(-size // 4) for size in SIZES]
        used = [min(limit, n) if isinstance(limit, int) else int(limit * n) for n in full]
        assert found.counts.tolist() == [
            min(size, 4 * n) for size, n in zip(SIZES, used, strict=True)
        ]
        if isinstance(limit, int):
            expected = by_hand(module, models, limit)
            torch.testing.assert_close(found.values["val_loss"], expected, equal_nan=True)

    def test_drop_last_is_of_the_users_batches(self, engine: str) -> None:
        module = cnn().eval()
        models = personal_models(module)
        found = evaluate(engine, cnn(), models, image_clients(drop_last=True))
        whole = [size // 4 for size in SIZES]
        assert found.counts.tolist() == [4 * batches for batches in whole]
        expected = torch.stack([by_hand(module, models, n)[k] for k, n in enumerate(whole)])
        torch.testing.assert_close(found.values["val_loss"], expected, equal_nan=True)

    def test_some_clients_in_another_order(self, engine: str) -> None:
        models = personal_models(cnn())
        index = torch.tensor([3, 0])
        part = {name: leaf[index] for name, leaf in models.items()}
        everyone = evaluate(engine, cnn(), models).values["val_loss"]
        some = evaluate(engine, cnn(), part, clients=[3, 0]).values["val_loss"]
        torch.testing.assert_close(some, everyone[index], rtol=1e-12, atol=0)

    def test_progress_names_every_client_once(self, engine: str) -> None:
        module = cnn().eval()
        runner = ENGINES[engine](module, ParameterSplit(module), EngineSettings())
        done: list[int] = []
        index = torch.arange(len(SIZES))
        work = EvaluationWork(personal_models(module), index, image_clients(), "test_step")
        runner.evaluate(work, done.extend)
        assert sorted(done) == list(range(len(SIZES)))


class Own(PersonalizedModule):
    """A step of the user's own: mean, sum, minimum and maximum of the batches' losses."""

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("mean", loss, prog_bar=True)
        for reduction in ("sum", "min", "max"):
            self.log(reduction, loss, reduce_fx=reduction, logger=False)

    def predict_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return {"classes": self(batch[0]).argmax(-1), "number": batch[1].new_tensor(batch_idx)}


def own() -> Own:
    plain = cnn()
    return Own(plain.backbone, plain.head).double()


@pytest.mark.parametrize("engine", ENGINES)
def test_reductions_of_logged_values(engine: str) -> None:
    module = own().eval()
    models = personal_models(module)
    found = evaluate(engine, own(), models)
    module.load_state_dict({name: leaf[3] for name, leaf in models.items()})
    data = image_clients()
    parts = [data.gather(some) for some in data.indices[3].split(4)]
    losses = torch.stack([F.cross_entropy(module(x), y) for x, y in parts]).detach()
    sizes = torch.tensor([len(y) for _, y in parts]).double()
    expected = {
        "mean": losses @ sizes / sizes.sum(),
        "sum": losses.sum(),
        "min": losses.min(),
        "max": losses.max(),
    }
    assert_trees_close({name: value[3] for name, value in found.values.items()}, expected)
    assert found.values["sum"][1].isnan()
    assert (found.options["mean"].prog_bar, found.options["sum"].logger) == (True, False)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loaders", [True, False])
def test_predictions_come_by_client_and_batch(engine: str, loaders: bool) -> None:
    data: Any = image_clients()
    expected = [-(-size // 4) for size in SIZES]
    if loaders:
        parts = [TensorDataset(*image_clients().gather(rows)) for rows in data.indices]
        data = FederatedLoaders([DataLoader(part, batch_size=4) for part in parts])
    models = personal_models(own())
    found = evaluate(engine, own(), models, data, "predict_step").predictions
    assert [len(batches) for batches in found] == expected
    assert [[len(b["classes"]) for b in batches] for batches in found] == [
        [min(4, size - at) for at in range(0, size, 4)] for size in SIZES
    ]
    module = own().eval()
    module.load_state_dict({name: leaf[3] for name, leaf in models.items()})
    x, _ = image_clients().gather(image_clients().indices[3])
    assert torch.equal(torch.cat([b["classes"] for b in found[3]]), module(x).argmax(-1))
    assert [int(b["number"]) for b in found[3]] == [0, 1, 2, 3]


METRICS: dict[str, Callable[[], Any]] = {
    "accuracy": lambda: MulticlassAccuracy(CLASSES, average="macro"),
    "F1": lambda: MulticlassF1Score(CLASSES),
    "AUROC": lambda: MulticlassAUROC(CLASSES),
    "collection": lambda: MetricCollection(
        [MulticlassF1Score(CLASSES), MulticlassAccuracy(CLASSES)]
    ),
}


class WithMetric(PersonalizedModule):
    """Logs torchmetrics objects, whose value isn't a mean over minibatches."""

    def build(self, make: Callable[[], Any]) -> None:
        self.measured = make()

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        self.measured(self(batch[0]).softmax(-1), batch[1])
        if isinstance(self.measured, MetricCollection):
            self.log_dict(self.measured)
        else:
            self.log("measured", self.measured)


@pytest.mark.filterwarnings("ignore:(No|One or more|Average precision).*")
@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
@pytest.mark.parametrize("make", METRICS.values(), ids=METRICS)
def test_a_torchmetrics_object_is_computed_for_each_client(
    make: Callable[[], Any], engine: Any
) -> None:
    plain, data = cnn(), image_clients()
    module = WithMetric(plain.backbone, plain.head).double()
    module.build(make)
    models = personal_models(module)
    found = evaluate(engine, module, models)
    for client, size in enumerate(SIZES):
        module.load_state_dict({name: leaf[client] for name, leaf in models.items()})
        if size:
            x, y = data.gather(data.indices[client])
            expected = make()(module(x).softmax(-1), y)
            if not isinstance(expected, dict):
                expected = {"measured": expected}
            assert found.values.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found.values[name][client], value.double())


class Unlogged(WithMetric):
    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        self.measured.update(self(batch[0]), batch[1])


def test_a_torchmetrics_object_that_is_read_later_is_not_updated_for_many() -> None:
    plain = cnn()
    module = Unlogged(plain.backbone, plain.head).double()
    module.build(METRICS["F1"])
    with pytest.raises(ClientError, match=r"`measured` is updated but not logged.* Run with"):
        evaluate("vectorized", module, personal_models(module))


def test_a_large_split_is_evaluated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evaluate("vectorized", cnn(), personal_models(cnn())).values
    monkeypatch.setattr(evaluation, "samples_at_once", lambda _: 6)
    parts = evaluate("vectorized", cnn(), personal_models(cnn())).values
    assert_trees_close(parts, whole)


class Scaled(PersonalizedModule):
    """A step that reads a number."""

    factor = 1.0

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        self.log("loss", self.factor * F.cross_entropy(self(batch[0]), batch[1]))


def test_what_a_hook_changes_counts_in_the_next_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where recordings have been compared with steps, and are replayed."""
    monkeypatch.setattr(evaluation, "samples_at_once", lambda _: 6)  # two clients at once
    plain, data = cnn(), image_clients((3,) * 6)
    module = Scaled(plain.backbone, plain.head).double().eval()
    losses = [F.cross_entropy(module(x), y) for x, y in map(data.gather, data.indices)]
    runner = VectorizedEngine(module, ParameterSplit(module), EngineSettings())
    models = expand(ParameterSplit(module).model(), 6)
    work = EvaluationWork(models, torch.arange(6), data, "validation_step")

    def hook(*_: Any, **__: Any) -> Any:
        module.factor += change

    for change in (0.0, 0.0, 0.0, 0.0, 1.0):
        module.factor = 1.0
        found = runner.evaluate(work, hook).values["loss"]
        factors = 1.0 + change * torch.tensor([0, 0, 1, 1, 2, 2])
        torch.testing.assert_close(found, (torch.stack(losses) * factors).detach())


@pytest.mark.parametrize("pad", [True, False])
def test_programs_are_counted_as_they_run(pad: bool) -> None:
    counts = (7, 25, 20, 0, 25, 15)
    clients = image_clients(counts)
    batches = OrderedBatches(clients, torch.arange(len(counts)), Limits(1, 1.0), pad, 10)
    numbers = range(int(batches.steps.max()))
    sizes = [tick.minibatches[0].sizes for number in numbers for tick in batches.at(number)]
    samples = sum(len(each) * int(each.max()) for each in sizes)
    count = evaluation._load_padded if pad else evaluation._load_in_groups
    assert count([*counts], 10) == Load(0, len(sizes), sum(map(len, sizes)), 0, samples)


class Products(TorchDispatchMode):
    """Records the shapes of convolutions' inputs and of products' factors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Any] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name in ("convolution", "addmm", "baddbmm"):  # of which the last add to a bias
            first = 0 if name == "convolution" else 1
            self.found.append((name, *(tuple(leaf.shape) for leaf in args[first : first + 2])))
        return function(*args, **(kwargs or {}))


def test_a_shared_backbone_runs_once_for_all_clients_and_each_head_for_its_own() -> None:
    """As with FedRep or FedPer: one batch of all samples, 3 x 4 of them, for the backbone."""
    module, data = cnn(norm=False), image_clients((4, 4, 4))
    models = {name: leaf[:3] for name, leaf in personal_models(module).items()}
    with Products() as products:
        evaluate("vectorized", module, models, data, clients=[0, 1, 2])
    assert products.found == [
        ("convolution", (12, 1, 5, 5), (3, 1, 3, 3)),
        ("addmm", (12, 27), (27, 4)),
        ("baddbmm", (3, 4, 4), (3, 4, CLASSES)),
    ]


def test_a_padded_sample_may_be_anything() -> None:
    """Padding repeats a sample, which may be one without a finite loss."""
    data = image_clients()
    data.fields[0][data.indices[3][0]] = torch.inf
    found = evaluate("vectorized", cnn(), personal_models(cnn()), data).values["val_loss"]
    assert found.isfinite().tolist() == [True, False, True, False, True]


def test_other_reductions_are_refused() -> None:
    class Median(PersonalizedModule):
        def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
            self.log("x", self(batch[0]).mean(), reduce_fx=torch.median)

    plain = cnn()
    module = Median(plain.backbone, plain.head).double()
    with pytest.raises(
        ClientError,
        match=r"Expected `reduce_fx` of self.log\('x'\) to be one of mean, sum, min, max",
    ):
        evaluate("sequential", module, personal_models(module))
