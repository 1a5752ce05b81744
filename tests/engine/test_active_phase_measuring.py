"""A phase that measures: the loss of eval mode over all of a client's data, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.tree import Tree
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.steps import joined
from lightning_pfl.methods.base import LocalStep, Method, Phase
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing import assert_trees_equal, local_round
from tests.engine.nets import CLASSES, SIZES, Recurrent, cnn, image_clients

ENGINES = ("vectorized", "sequential")


class Measures(Method):
    """Trains for an epoch, or not at all, and uploads the loss that it measures then."""

    def __init__(self, trains: bool = False) -> None:
        super().__init__()
        self.trains = trains

    def phases(self, round: int) -> tuple[Phase, ...]:
        measure = Phase(epochs=1, name="measure", evaluate_only=True)
        return (Phase(epochs=1), measure) if self.trains else (measure,)

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        nothing = torch.zeros(len(info), dtype=torch.float64)
        model = {name: leaf.clone() for name, leaf in received["model"].items()}
        zeros = {name: nothing.clone() for name in ("total", "count", "calls")}
        return {"model": model, **zeros}

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        if client.phase != "measure":
            return super().client_step(state, minibatches, client)
        loss, count = client.loss(state["model"], minibatches)
        found = {"total": loss * count, "count": count, "calls": (count > 0).to(count)}
        return {**state, **{name: state[name] + more for name, more in found.items()}}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        measured = {name: state[name] for name in ("total", "count", "calls")}
        return {"model": state["model"], **measured}, {}


def recurrent() -> PersonalizedModule:
    torch.manual_seed(1)
    return PersonalizedModule(Recurrent(), nn.Linear(4, CLASSES)).double()


MODULES: dict[str, tuple[Callable[[], PersonalizedModule], dict[str, Any]]] = {
    "BatchNorm": (lambda: cnn(True), {}),
    "padded": (lambda: cnn(False), {}),
    "dropout": (lambda: cnn(True, dropout=0.5), {}),
    "LSTM": (recurrent, {"transform": "grad"}),
}


def losses(net: Any, models: Tree, data: FederatedTensorDataset) -> list[float]:
    """Sum of the eval-mode losses of each client's samples, by plain torch."""
    found = []
    for k, positions in enumerate(data.indices):
        net.load_state_dict({name: leaf[k] for name, leaf in models.items()})
        x, y = (field[positions] for field in data.fields)
        with torch.no_grad():
            total = F.cross_entropy(net.eval()(x), y, reduction="sum") if len(x) else torch.zeros(1)
        found.append(float(total))
    return found


@pytest.mark.parametrize(("engine", "chunk"), [("vectorized", 3), ("sequential", None)])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_it_is_the_loss_of_eval_mode(
    name: str, trains: bool, chunk: int | None, engine: Any
) -> None:
    make, options = MODULES[name]
    options = options if engine == "vectorized" else {}
    data, module = image_clients(), make()
    modes = {name: part.training for name, part in module.named_modules()}
    out = local_round(
        Measures(trains), module, data, engine, settings=EngineSettings(chunk_size=chunk), **options
    )
    uploads = out.result.uploads
    assert uploads["count"].tolist() == list(SIZES)
    want = losses(make(), uploads["model"], data)
    assert uploads["total"].tolist() == pytest.approx(want, rel=1e-10, abs=1e-12)
    assert {name: part.training for name, part in module.named_modules()} == modes


@pytest.mark.parametrize("engine", ENGINES)
def test_the_model_is_not_changed_and_nothing_is_logged(engine: Any) -> None:
    out = local_round(Measures(), cnn(dropout=0.3), image_clients(), engine)
    assert_trees_equal(out.result.uploads["model"], out.received["model"])
    assert out.result.logs == {}
    assert out.result.loss.isnan().all()
    assert out.info.steps.tolist() == [1, 0, 2, 4, 1]  # minibatches of four


@pytest.mark.parametrize("engine", ENGINES)
def test_flags_cut_and_group_the_minibatches(engine: Any) -> None:
    """Two of a client's minibatches at most, three to a step: sums count each sample once."""
    settings = EngineSettings(accumulate=3, limit_train_batches=2)
    data, module = image_clients(shuffle=False), cnn()
    out = local_round(Measures(), module, data, engine, settings=settings)
    uploads = out.result.uploads
    assert uploads["count"].tolist() == [min(size, 8) for size in SIZES]
    few = FederatedTensorDataset(data.fields, [p[:8] for p in data.indices], batch_size=4)
    want = losses(cnn(), uploads["model"], few)
    assert uploads["total"].tolist() == pytest.approx(want, rel=1e-10, abs=1e-12)


class OwnStep(PersonalizedModule):
    """Has a step of its own, whose loss may be anything of a minibatch."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return super().training_step(batch)


def linear(kind: type[PersonalizedModule], *layers: nn.Module) -> PersonalizedModule:
    torch.manual_seed(1)
    return kind(nn.Sequential(*layers, nn.Flatten()), nn.Linear(25, CLASSES)).double()


# Of minibatches of 4 samples, 13 are three and a rest, and three are joined as two and one.
JOINED, CUT = [1, 0, 2, 3, 1], [1, 0, 2, 4, 1]


@pytest.mark.parametrize("engine", ["sequential", "reference"])
@pytest.mark.parametrize(
    ("module", "settings", "calls"),
    [
        (linear(PersonalizedModule), {}, JOINED),
        (linear(PersonalizedModule, nn.BatchNorm2d(1)), {}, JOINED),
        (linear(PersonalizedModule, nn.BatchNorm2d(1, track_running_stats=False)), {}, CUT),
        (linear(OwnStep), {}, CUT),
        (linear(PersonalizedModule), {"accumulate": 3}, [1, 0, 1, 2, 1]),
    ],
    ids=["plain", "BatchNorm", "statistics of the minibatch", "own step", "accumulated"],
)
def test_minibatches_are_joined_where_no_cut_changes_the_sum(
    module: PersonalizedModule, settings: dict[str, Any], calls: list[int], engine: Any
) -> None:
    flags = EngineSettings(**settings)
    out = local_round(Measures(), module, image_clients(), engine, settings=flags)
    assert out.result.uploads["calls"].tolist() == calls
    assert out.info.steps.tolist() == ([1, 0, 2, 4, 1] if not settings else calls)


@pytest.mark.parametrize("options", [{"drop_last": True}, {"drop_last": "single"}, {}], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{}, {"limit_train_batches": 3}, {"limit_train_batches": 0.5}, {"overfit_batches": 2}],
    ids=str,
)
def test_joined_minibatches_have_the_samples_of_those_that_are_cut(
    options: dict[str, Any], settings: dict[str, Any]
) -> None:
    data = image_clients((27, 0, 5, 13, 8), **options)
    flags = EngineSettings(**settings)
    ours, theirs = (
        local_round(
            Measures(trains=True), linear(kind), data, "sequential", settings=flags
        ).result.uploads
        for kind in (PersonalizedModule, OwnStep)
    )
    assert ours["calls"].sum() < theirs["calls"].sum()
    assert ours["count"].tolist() == theirs["count"].tolist()
    assert ours["total"].tolist() == pytest.approx(theirs["total"].tolist(), rel=1e-12)
    assert_trees_equal(ours["model"], theirs["model"])


def test_many_lengths_have_few_shapes_of_joined_minibatches() -> None:
    sizes = {size for number in range(200) for size in joined(number, 21)}
    assert sizes == {1, 2, 4, 8, 16}
    assert all(sum(joined(number, 21)) == number for number in range(200))


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_augmented(engine: Any) -> None:
    def broken(batch: Any) -> Any:
        raise AssertionError("augmented")

    module, data = cnn(), image_clients(augment=broken)
    uploads = local_round(Measures(), module, data, engine).result.uploads
    assert uploads["total"].tolist() == pytest.approx(losses(cnn(), uploads["model"], data))


class Counting(PersonalizedModule):
    """Keeps the training accuracy in a torchmetrics object."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Flatten(), nn.Linear(25, CLASSES))
        self.seen = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        self.seen.update(torch.ones(len(batch[0])) if self.training else torch.zeros(1))
        self.log("seen", self.seen)
        return super().training_step(batch)


def test_metrics_objects_keep_what_training_told_them() -> None:
    module = Counting().double()
    result = local_round(Measures(trains=True), module, image_clients(), "sequential").result
    assert result.logs["seen"].nan_to_num(1.0).tolist() == [1.0] * len(SIZES)
    assert "loss" not in result.logs


class Skips(PersonalizedModule):
    """Skips minibatches of a single sample."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return None if len(batch[0]) == 1 else super().training_step(batch)


def test_what_a_step_skips_is_not_counted() -> None:
    torch.manual_seed(1)
    module = Skips(nn.Flatten(), nn.Linear(25, CLASSES)).double()
    uploads = local_round(Measures(), module, image_clients(), "sequential").result.uploads
    assert uploads["count"].tolist() == [0, 0, 4, 12, 2]
    assert uploads["total"][0] == 0.0
