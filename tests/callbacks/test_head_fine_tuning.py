"""Fine-tuned models against closed forms and a loop of plain torch."""

from __future__ import annotations

import copy
import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_pfl.callbacks import (
    BestRound,
    HeadFineTuning,
    NearestNeighbours,
    head_fine_tuning,
)
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.inspect import ClientHeatMap, ClientHistogram
from lightning_pfl.methods import Ditto, FedAvg, FedRep
from lightning_pfl.metrics import summarize
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing import assert_trees_equal, descend
from tests.callbacks.setting import (
    CENTERS,
    CURVATURES,
    LR,
    SIZES,
    Data,
    classes,
    loss_at,
    network,
    quadratics,
    split,
    steps_of,
    trainer,
)
from tests.orders_by_hand import order_by_hand

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")

ENGINES = ["vectorized", "sequential"]


def tuned_head(backbone: Tensor, head: Tensor, client: int, steps: int, lr: float = LR) -> Tensor:
    """Gradient descent on the head alone: its target is what the frozen backbone leaves."""
    target = CENTERS[client : client + 1] - backbone
    return descend(head, CURVATURES[client], target, lr, steps)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("when", ["end", "evaluation"])
def test_heads_follow_the_closed_form_for_every_client(engine: str, when: Any) -> None:
    tuning = HeadFineTuning(when=when)
    run = trainer(FedAvg(), tuning, participation=1, max_epochs=2, engine=engine)
    run.fit(split(), quadratics(), quadratics((1, 2, 3, 4)))
    start = run.strategy.global_state_dict()
    losses = []
    for client, size in enumerate(SIZES):
        state = tuning.client_state_dict(client)
        want = tuned_head(
            start["backbone.weight"], start["head.weight"], client, 10 * steps_of(size)
        )
        torch.testing.assert_close(state["head.weight"], want, rtol=1e-12, atol=1e-12)
        assert torch.equal(state["backbone.weight"], start["backbone.weight"])
        losses.append(loss_at(start["backbone.weight"] + want, client))
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    want_values = summarize(torch.tensor(losses), torch.tensor([1, 2, 3, 4]), False)
    for name, value in want_values.items():
        key = f"ft/val_loss/{name}" if name else "ft/val_loss"
        assert metrics[key] == pytest.approx(value, rel=1e-6)
    assert metrics["ft/val_loss"] < metrics["global/val_loss"]


@pytest.mark.parametrize("engine", ENGINES)
def test_scope_full_trains_everything(engine: str) -> None:
    tuning = HeadFineTuning("full", steps=3, lr=0.05)
    run = trainer(FedAvg(), tuning, engine=engine)
    run.fit(split(), quadratics())
    start = run.strategy.global_state_dict()
    v, h = start["backbone.weight"], start["head.weight"]
    for client in range(4):
        center = CENTERS[client : client + 1]
        total = descend(v + h, CURVATURES[client], center, 2 * 0.05, 3)
        half = (total - v - h) / 2  # both halves have the same gradient
        state = tuning.client_state_dict(client)
        torch.testing.assert_close(state["head.weight"], h + half, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state["backbone.weight"], v + half, rtol=1e-12, atol=1e-12)


def test_methods_without_a_global_model_start_from_the_personal_one() -> None:
    tuning = HeadFineTuning(epochs=2)
    run = trainer(FedRep(head_steps=1, body_steps=1), tuning, participation=2)
    run.fit(split(), quadratics())
    for client, size in enumerate(SIZES):
        start = run.strategy.client_state_dict(client)
        want = tuned_head(
            start["backbone.weight"], start["head.weight"], client, 2 * steps_of(size)
        )
        got = tuning.client_state_dict(str(client))["head.weight"]
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_methods_with_both_models_start_from_the_global_one() -> None:
    tuning = HeadFineTuning(epochs=2)
    run = trainer(Ditto(prox_weight=0.5), tuning)
    run.fit(split(), quadratics())
    start = run.strategy.global_state_dict()
    for client, size in enumerate(SIZES):
        personal = run.strategy.client_state_dict(client)["backbone.weight"]
        assert not torch.allclose(personal, start["backbone.weight"])
        want = tuned_head(
            start["backbone.weight"], start["head.weight"], client, 2 * steps_of(size)
        )
        got = tuning.client_state_dict(client)
        assert torch.equal(got["backbone.weight"], start["backbone.weight"])
        torch.testing.assert_close(got["head.weight"], want, rtol=1e-12, atol=1e-12)


def plain_torch(state: dict[str, Tensor], data: FederatedTensorDataset, client: int) -> nn.Module:
    """Two epochs of SGD on the head, the backbone in eval mode, written out."""
    module = network()
    module.load_state_dict(copy.deepcopy(state))
    module.train()
    module.backbone.eval()
    weights, bias = module.head.weight, module.head.bias
    groups: Any = [{"params": [weights]}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(2):
        for positions in data.indices[client].split(data.batch_size):
            x, y = data.gather(positions)
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
    return module


@pytest.mark.parametrize("engine", ENGINES)
def test_the_backbone_is_frozen_bit_for_bit_with_batchnorm_momentum_and_decay(engine: str) -> None:
    train, val = classes()
    tuning = HeadFineTuning(epochs=2)
    run = trainer(FedAvg(), tuning, engine=engine)
    run.fit(network(), train, val)
    start = run.strategy.global_state_dict()
    for client in range(5):
        state = tuning.client_state_dict(client)
        frozen = [name for name in state if name.startswith("backbone.")]
        assert "backbone.1.running_mean" in frozen
        assert all(torch.equal(state[name], start[name]) for name in frozen)
        want = plain_torch(start, train, client).state_dict()
        for name in ("head.weight", "head.bias"):
            torch.testing.assert_close(state[name], want[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", [FedAvg, FedRep])
@pytest.mark.parametrize("scope", ["head", "full"])
def test_server_and_client_states_are_the_same_bits_as_without(method: Any, scope: Any) -> None:
    runs = []
    for callbacks in ([], [HeadFineTuning(scope, epochs=1, when="evaluation")]):
        run = trainer(method(), *callbacks, max_epochs=3, participation=2, engine="vectorized")
        run.fit(network(), *classes(shuffle=True))
        runs.append(run.strategy.federation)
    assert_trees_equal(runs[0].server, runs[1].server)
    assert_trees_equal(runs[0].client_states.tree, runs[1].client_states.tree)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_epochs_give_the_global_model_exactly(engine: str) -> None:
    tuning = HeadFineTuning(epochs=0)
    run = trainer(FedAvg(), tuning, engine=engine)
    run.fit(network(), *classes())
    assert_trees_equal(tuning.client_state_dict(4), run.strategy.global_state_dict())
    tuned = {k: v for k, v in run.callback_metrics.items() if k.startswith("ft/")}
    assert len(tuned) == 10  # five statistics of two values
    for key, value in tuned.items():
        assert value == run.callback_metrics[key.replace("ft/", "global/")]


def test_the_order_of_samples_is_that_of_the_last_round_and_no_rounds_own() -> None:
    train, val = classes(shuffle=True)
    seen: list[int] = []

    class Looking(PersonalizedModule):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
            same = (batch[0][:, None] == train.fields[0]).all(2)
            seen.extend(same.nonzero()[:, 1].tolist())
            return super().training_step(batch, batch_idx)

    plain = network()
    run = trainer(FedAvg(), HeadFineTuning(epochs=1), max_epochs=2, seed=3)
    run.fit(Looking(plain.backbone, plain.head).double(), train, val)
    for client, owned in enumerate(train.indices):
        expected: list[int] = []
        for stream, round in (("local", 0), ("local", 1), ("fine-tuning", 1)):
            order = order_by_hand(len(owned), client, 0, seed=3, stream=stream, round=round)
            expected += owned[order].tolist()
        assert [position for position in seen if position in owned] == expected


def rows_of(run: Any, name: str) -> list[dict[str, str]]:
    with (Path(run.log_dir) / name).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("when", ["end", "evaluation"])
def test_the_table_has_a_value_for_each_client(when: Any, tmp_path: Path) -> None:
    tuning = HeadFineTuning(steps=1, when=when)
    run = trainer(FedAvg(), tuning, max_epochs=2, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    run.fit(split(), quadratics(), quadratics())
    rows = rows_of(run, "clients_val.csv")
    assert [(row["round"], row["client"]) for row in rows] == [
        (str(round), str(client)) for round in range(2) for client in range(4)
    ]
    assert all(row["val_loss"] for row in rows)
    assert [bool(row["ft/val_loss"]) for row in rows] == [when == "evaluation"] * 4 + [True] * 4
    for client in range(4):
        state = tuning.client_state_dict(client)
        want = loss_at(state["backbone.weight"] + state["head.weight"], client)
        assert float(rows[4 + client]["ft/val_loss"]) == pytest.approx(want, rel=1e-6)
    logged = [
        float(row["ft/val_loss"]) for row in rows_of(run, "metrics.csv") if row["ft/val_loss"]
    ]
    assert len(logged) == (2 if when == "evaluation" else 1)
    assert float(run.callback_metrics["last10/ft/val_loss"]) == pytest.approx(
        sum(logged) / len(logged), rel=1e-5
    )


def test_callbacks_can_monitor_fine_tuned_values(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, "{epoch}", monitor="ft/val_loss")
    run = trainer(
        FedAvg(),
        HeadFineTuning(steps=1, when="evaluation"),
        best,
        max_epochs=2,
        enable_checkpointing=True,
    )
    run.fit(split(), quadratics(), quadratics())
    assert float(best.best_model_score or 0) == pytest.approx(
        float(run.callback_metrics["best/ft/val_loss"])
    )


class Decaying(type(split())):  # type: ignore[misc]
    """A learning rate that halves every round."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=LR)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


@pytest.mark.parametrize(("method", "best"), [(FedAvg, []), (FedRep, []), (FedRep, [BestRound])])
@pytest.mark.parametrize("when", ["end", "evaluation"])
def test_a_checkpoint_alone_gives_the_same_bits(
    method: Any, best: Any, when: Any, tmp_path: Path
) -> None:
    tuning = HeadFineTuning(epochs=2, when=when)
    data = Data(*(split for split in classes(shuffle=True)))
    # Here the first round is the better one.
    chosen = [callback() for callback in best]
    run = trainer(method(), tuning, *chosen, max_epochs=2, participation=2)
    run.fit(network(), datamodule=data)
    path = tmp_path / "run.ckpt"
    run.save_checkpoint(path)
    want = run.test(run.lightning_module, datamodule=data, verbose=False)[0]
    other = HeadFineTuning(epochs=2, when=when)
    again = trainer(method(), other)
    got = again.test(
        network(1), datamodule=Data(*classes(shuffle=True)), ckpt_path=path, verbose=False
    )
    assert "ft/test_acc/worst_decile" in want
    assert got[0] == want
    for client in range(5):
        assert_trees_equal(other.client_state_dict(client), tuning.client_state_dict(client))


class InSteps(type(split())):  # type: ignore[misc]
    """A learning rate for each of the six steps of two rounds, one for afterwards, and no more."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=LR)
        factors = [1.0, 0.5, 0.75, 0.3, 0.6, 0.8, 0.25]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[step])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class InLightningsLoop(InSteps):
    """A hook inside a step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


@pytest.mark.parametrize("kind", [Decaying, InSteps, InLightningsLoop])
def test_a_checkpoint_alone_keeps_the_learning_rate_of_its_scheduler(
    kind: Any, tmp_path: Path
) -> None:
    """At which the schedule stays while clients fine-tune."""
    module = kind(lr=LR, backbone=0.5, head=-0.25)
    tuning = HeadFineTuning(epochs=2)
    run = trainer(FedAvg(), tuning, max_epochs=2)
    run.fit(module, quadratics(), quadratics())
    start = run.strategy.global_state_dict()
    # Halved after each of the two rounds, or a quarter after their steps.
    want = tuned_head(start["backbone.weight"], start["head.weight"], 3, 6, LR / 4)
    path = tmp_path / "run.ckpt"
    run.save_checkpoint(path)
    other = HeadFineTuning(epochs=2)
    trainer(FedAvg(), other).test(
        kind(lr=LR), datamodule=Data(quadratics()), ckpt_path=path, verbose=False
    )
    for callback in (tuning, other):
        got = callback.client_state_dict(3)["head.weight"]
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_resumed_run_ends_with_the_same_values(tmp_path: Path) -> None:
    def run(rounds: int, path: Path | None = None) -> Any:
        tuning = HeadFineTuning(epochs=1, when="evaluation")
        trained = trainer(FedAvg(), tuning, max_epochs=rounds, participation=2)
        trained.fit(network(), *classes(shuffle=True), ckpt_path=path)
        return trained

    whole, half = run(4), run(2)
    path = tmp_path / "half.ckpt"
    half.save_checkpoint(path)
    resumed = run(4, path)
    keys = [key for key in whole.callback_metrics if "ft/" in key]
    assert "last10/ft/val_acc" in keys
    for key in keys:
        assert resumed.callback_metrics[key] == whole.callback_metrics[key]


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_fit_that_goes_on_ends_as_one_that_ran_through(rounds: int, tmp_path: Path) -> None:
    def run(rounds: int, path: Path | None = None) -> Any:
        trained = trainer(FedAvg(), HeadFineTuning(epochs=1), max_epochs=rounds, participation=2)
        trained.fit(network(), *classes(shuffle=True), ckpt_path=path)
        return trained

    path, whole = tmp_path / "ended.ckpt", run(3)
    run(rounds).save_checkpoint(path)
    resumed = run(3, path)
    found = resumed.callback_metrics
    assert found["last10/ft/val_acc"] == found["ft/val_acc"]
    assert {**found} == {**whole.callback_metrics}
    assert resumed.strategy.federation.history.rounds == whole.strategy.federation.history.rounds


class Killed(FederatedCallback):
    """Saves a checkpoint at the end of the last round, and notes the values of each round's."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, 0

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen += "ft/val_acc" in trainer.callback_metrics
        if trainer.current_epoch == trainer.max_epochs - 1:
            trainer.save_checkpoint(self.path)


def test_a_run_that_was_killed_after_its_last_round_is_evaluated_when_resumed(
    tmp_path: Path,
) -> None:
    def run(rounds: int, path: Path | None = None) -> Any:
        killed = Killed(tmp_path / f"{rounds}.ckpt")
        callbacks = (HeadFineTuning(epochs=1), NearestNeighbours(), killed)
        trained = trainer(FedAvg(), *callbacks, max_epochs=rounds)
        trained.fit(network(), *classes(shuffle=True), ckpt_path=path)
        return trained, killed

    whole, resumed = run(2)[0], run(2, tmp_path / "2.ckpt")[0]
    assert {"ft/val_acc", "last10/ft/val_acc", "knn/val_acc"} <= whole.callback_metrics.keys()
    assert {**resumed.callback_metrics} == {**whole.callback_metrics}
    resumed.save_checkpoint(tmp_path / "ended.ckpt")
    assert not run(3, tmp_path / "ended.ckpt")[1].seen  # the former end's are no round's


class Counting(nn.Sequential):
    """Counts how often it runs."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        for layer in self:
            x = layer(x)
        return x


@pytest.mark.parametrize("feature_cache", [True, False])
def test_the_backbone_runs_once_however_many_epochs_the_head_trains(feature_cache: bool) -> None:
    counts = []
    for epochs in (2, 6):
        Counting.calls = 0
        body = Counting(nn.Linear(6, 8), nn.ReLU())
        run = trainer(
            FedAvg(),
            HeadFineTuning(epochs=epochs),
            engine="vectorized",
            feature_cache=feature_cache,
        )
        run.fit(network(backbone=body), *classes())
        counts.append(Counting.calls)
    assert (counts[0] == counts[1]) == feature_cache


def test_small_groups_and_models_that_are_not_kept_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes = []
    for bytes in (2**27, 1):
        monkeypatch.setattr(head_fine_tuning, "TRAINED_TOGETHER", bytes)
        monkeypatch.setattr(head_fine_tuning, "KEPT", bytes)
        tuning = HeadFineTuning(epochs=1)
        run = trainer(FedAvg(), tuning)
        run.fit(network(), *classes(shuffle=True))
        outcomes.append((dict(run.callback_metrics), tuning.client_state_dict(2)))
    assert outcomes[0][0] == outcomes[1][0]
    assert_trees_equal(outcomes[0][1], outcomes[1][1])


def test_the_data_of_the_fit_serve_a_test_that_is_given_test_data_alone() -> None:
    tuning = HeadFineTuning(steps=2)
    run = trainer(FedAvg(), tuning)
    run.fit(split(), quadratics(), quadratics())
    want = float(run.callback_metrics["ft/val_loss"])
    got = run.test(run.lightning_module, quadratics(), verbose=False)[0]["ft/test_loss"]
    assert got == pytest.approx(want, rel=1e-6)


def test_without_validation_data_models_are_trained_when_asked_for() -> None:
    tuning = HeadFineTuning(epochs=1)
    run = trainer(FedAvg(), tuning)
    run.fit(split(), quadratics())
    assert not [key for key in run.callback_metrics if "ft/" in key]
    start = run.strategy.global_state_dict()
    want = tuned_head(start["backbone.weight"], start["head.weight"], 0, steps_of(SIZES[0]))
    got = tuning.client_state_dict(0)["head.weight"]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_last_round_without_validation_gets_rows_of_its_own(tmp_path: Path) -> None:
    best = BestRound()
    histogram, over_rounds = ClientHistogram(["val_loss"]), ClientHeatMap(["val_loss"])
    run = trainer(
        FedAvg(),
        *(HeadFineTuning(steps=1), best, histogram, over_rounds),
        max_epochs=3,
        check_val_every_n_epoch=2,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
    )
    run.fit(split(), quadratics(), quadratics())
    rows = rows_of(run, "clients_val.csv")
    assert [(row["round"], bool(row["val_loss"]), bool(row["ft/val_loss"])) for row in rows] == [
        *[("1", True, False)] * 4,
        *[("2", False, True)] * 4,
    ]
    assert set(best.rounds.values()) == {1}
    assert list(histogram.rounds["val_loss"]) == [1]


@pytest.mark.parametrize("when", ["end", "evaluation"])
def test_validate_alone_fine_tunes(when: Any) -> None:
    run = trainer(FedAvg(), HeadFineTuning(steps=2, when=when))
    data = Data(quadratics())
    run.fit(split(), datamodule=data)
    want = float(run.callback_metrics["ft/val_loss"])
    got = run.validate(run.lightning_module, datamodule=data, verbose=False)[0]["ft/val_loss"]
    assert got == pytest.approx(want, rel=1e-6)
