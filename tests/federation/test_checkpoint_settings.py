"""Resuming with other settings: refused where the server's state depends on them, else said. And
what a round had logged before the run was interrupted inside it."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_pfl.core.errors import CheckpointMismatchError
from lightning_pfl.methods import (
    SCAFFOLD,
    FedAvg,
    FedProx,
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

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer] | None] = {
    "None": None,
    "SGD": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


def saved(method: Method, folder: Path) -> str:
    path = str(folder / "round1.ckpt")
    run = trainer(method, max_epochs=1)
    run.fit(Quadratic(), points(), points())
    run.save_checkpoint(path)
    return path


def resume(method: Method, path: str) -> Any:
    run = trainer(method, max_epochs=2)
    run.fit(Quadratic(), points(), points(), ckpt_path=path)
    return run


@pytest.mark.parametrize(
    ("before", "now"),
    [(a, b) for a in OPTIMIZERS for b in OPTIMIZERS if a != b],
)
def test_another_server_optimizer_is_refused(before: str, now: str, tmp_path: Path) -> None:
    path = saved(FedAvg(server_optimizer=OPTIMIZERS[before]), tmp_path)
    match = rf"run with server_optimizer={now}, but .* run with server_optimizer={before}\."
    with pytest.raises(CheckpointMismatchError, match=match):
        resume(FedAvg(server_optimizer=OPTIMIZERS[now]), path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_server_optimizer_goes_on_silently(name: str, tmp_path: Path) -> None:
    path = saved(FedAvg(server_optimizer=OPTIMIZERS[name]), tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*other settings.*")
        resumed = resume(FedAvg(server_optimizer=OPTIMIZERS[name]), path)
    whole = trainer(FedAvg(server_optimizer=OPTIMIZERS[name]), max_epochs=2)
    whole.fit(Quadratic(), points(), points())
    assert torch.equal(whole.strategy.server["model"]["w"], resumed.strategy.server["model"]["w"])


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (FedProx(0.5), FedProx(0.25), "of FedProx .* prox_weight was 0.5, is 0.25"),
        (FedAvg(), FedAvg(local_epochs=3), "local_epochs was 1, is 3"),
        (SCAFFOLD(server_lr=1.0), SCAFFOLD(server_lr=0.5), "server_lr was 1.0, is 0.5"),
        (
            FedAvg(server_optimizer=OPTIMIZERS["Adam"]),
            FedAvg(server_optimizer=lambda p: torch.optim.Adam(p, lr=0.3)),
            r"server_optimizer.lr was 0.1, is 0.3\.",
        ),
    ],
)
def test_other_settings_are_said(before: Method, now: Method, said: str, tmp_path: Path) -> None:
    path = saved(before, tmp_path)
    with pytest.warns(UserWarning, match=f"continues with other settings .*{said}"):
        assert resume(now, path).strategy.federation.rounds == 2


class Stop(Callback):
    """Ends the run before the validation of a round."""

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 2 and not trainer.sanity_checking:
            raise InterruptedError


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_run_resumed_inside_a_round_logs_what_the_round_had_logged(tmp_path: Path) -> None:
    def run(name: str, *callbacks: Callback, **settings: Any) -> dict[int, dict[str, str]]:
        logger = CSVLogger(tmp_path, name)
        folder = tmp_path / f"checkpoints of the {'whole' if name == 'whole' else 'parts'}"
        saver = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)
        new = trainer(
            max_epochs=4,
            logger=logger,
            enable_checkpointing=True,
            callbacks=[*callbacks, saver],
        )
        with suppress(InterruptedError):
            new.fit(Quadratic(), points(), points(), **settings)
        logger.save()
        with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
            found = [row for row in csv.DictReader(file) if row.get("train_loss")]
        names = ("step", "train_loss", "round/clients", "round/bytes_up")
        return {int(row["epoch"]): {name: row[name] for name in names} for row in found}

    whole = run("whole")
    first = run("first", Stop())
    second = run("second", ckpt_path="last")
    assert [(round, row["step"]) for round, row in whole.items()] == [(k, str(k)) for k in range(4)]
    assert len({row["train_loss"] for row in whole.values()}) == 4
    assert {**first, **second} == whole
    assert list(second) == [2, 3]


class More(FedProx):
    """Has the name of a method and another server."""

    def init_server(self, model: Any) -> Any:
        return {**super().init_server(model), "extra": torch.zeros(2)}


def test_another_kind_of_server_is_refused(tmp_path: Path) -> None:
    path = saved(FedProx(), tmp_path)
    More.__name__ = "FedProx"
    with pytest.raises(
        CheckpointMismatchError, match=r"server with the entries \['extra', 'model'\], "
    ):
        resume(More(), path)


# --- optimizers, precision, samples, and what is missing


def sgd(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.25)


def adam(module: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.25)


def adamw(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.25)


def module_with(optimizer: Any) -> Quadratic:
    module: Quadratic = type("With", (Quadratic,), {"configure_optimizers": optimizer})()
    return module


def trained_with(optimizer: Any, folder: Path) -> str:
    path = str(folder / "round1.ckpt")
    run = trainer(LocalOnly(), max_epochs=1)
    run.fit(module_with(optimizer), points(), points())
    run.save_checkpoint(path)
    return path


@pytest.mark.parametrize(
    ("before", "now", "names"), [(sgd, adam, ("Adam", "SGD")), (adam, adamw, ("AdamW", "Adam"))]
)
def test_another_optimizer_of_the_clients_is_refused(
    before: Any, now: Any, names: tuple[str, str], tmp_path: Path
) -> None:
    path = trained_with(before, tmp_path)
    match = rf"train with {names[0]} in 1 parameter groups, but got one of {names[1]} in 1\."
    with pytest.raises(CheckpointMismatchError, match=match):
        trainer(LocalOnly(), max_epochs=2).fit(module_with(now), points(), points(), ckpt_path=path)


def test_a_learning_rate_that_is_not_used_is_said(tmp_path: Path) -> None:
    path = trained_with(sgd, tmp_path)
    run = trainer(LocalOnly(), max_epochs=2)
    with pytest.warns(UserWarning, match=r"settings of SGD: lr=0\.25 instead of 0\.5\. To change"):
        run.fit(
            module_with(lambda module: torch.optim.SGD(module.parameters(), lr=0.5)),
            points(),
            points(),
            ckpt_path=path,
        )
    want = trained(torch.zeros(2, dtype=torch.float64), 3, 2 * steps_of(SIZES[3]), lr=0.25)
    got = run.strategy.client_state_dict(3)["w"]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [FedRep, SCAFFOLD])
def test_a_checkpoint_serves_a_run_of_another_precision(method: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "single.ckpt")
    single = trainer(method(), max_epochs=1)
    single.fit(network(), *classes())
    single.save_checkpoint(path)
    double = trainer(method(), max_epochs=2, precision="64-true")
    double.fit(network(), *classes(), ckpt_path=path)
    assert double.strategy.client_state_dict(0)["head.weight"].dtype == torch.float64
    assert double.strategy.federation.rounds == 2
    tested = trainer(method(), precision="64-true")
    tested.test(network(), classes()[1], ckpt_path=path, verbose=False)
    for name, leaf in tested.strategy.client_state_dict(1).items():
        assert torch.equal(leaf, single.strategy.client_state_dict(1)[name].to(leaf.dtype))


def test_other_numbers_of_samples_are_said(tmp_path: Path) -> None:
    path = saved(FedAvg(), tmp_path)
    run = trainer(FedAvg(), max_epochs=2)
    match = "2 clients have another number of samples, such as '1' with 5 instead of 6"
    with pytest.warns(UserWarning, match=match):
        run.fit(Quadratic(), points((4, 5, 3, 6)), points(), ckpt_path=path)


@pytest.mark.parametrize("part", ["client_states", "structure", "seed", "history", "everything"])
def test_a_checkpoint_that_lacks_something_is_refused(part: str, tmp_path: Path) -> None:
    path = saved(FedAvg(), tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    if part == "everything":
        checkpoint["federated"] = None
    else:
        del checkpoint["federated"][part]
    torch.save(checkpoint, path)
    missing = "method, .*, history" if part == "everything" else part
    with pytest.raises(
        CheckpointMismatchError, match=f"but {missing} is missing. Use an unchanged"
    ):
        resume(FedAvg(), path)


def test_weights_alone_can_be_tested(tmp_path: Path) -> None:
    run = trainer(FedRep(head_epochs=2), max_epochs=1)
    run.fit(network(), *classes())
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    tested = trainer(FedRep(head_epochs=2))
    tested.test(network(1), classes()[1], ckpt_path=str(tmp_path / "weights.ckpt"), verbose=False)
    for name, leaf in run.strategy.client_state_dict(2).items():
        assert torch.equal(tested.strategy.client_state_dict(2)[name], leaf)


def test_other_settings_of_the_run_are_warned_of(tmp_path: Path) -> None:
    path = saved(FedAvg(), tmp_path)
    data = points()
    data.batch_size += 1
    run = trainer(FedAvg(), max_epochs=2, participation=2, gradient_clip_val=0.5)
    match = (
        r"than the checkpoint's: participation was 1.0, is 2; gradient_clip_val was None, is 0.5; "
        rf"batch_size was {data.batch_size - 1}, is {data.batch_size}\."
    )
    with pytest.warns(UserWarning, match=match):
        run.fit(Quadratic(), data, points(), ckpt_path=path)
