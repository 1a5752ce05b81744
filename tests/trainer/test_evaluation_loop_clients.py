"""The results of each client, in memory and for callbacks, and the costs in a round's logs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_pfl import FederatedCallback, FederatedStrategy, read_clients
from lightning_pfl.callbacks import HeadFineTuning
from lightning_pfl.contract.records import ClientResults, Evaluation
from lightning_pfl.methods import Ditto, FedAvg
from lightning_pfl.testing import QuadraticModule, quadratic_clients
from lightning_pfl.testing.fitting import QUIET
from lightning_pfl.trainer.board_layout import add_layout, add_summary, layout

pytestmark = pytest.mark.filterwarnings("ignore")


class Listener(FederatedCallback):
    def __init__(self) -> None:
        self.heard: list[ClientResults] = []

    def on_clients_evaluated(
        self, trainer: L.Trainer, module: L.LightningModule, results: ClientResults
    ) -> None:
        self.heard.append(results)


def fitted(method: Any, *callbacks: Any, rounds: int = 2, logger: Any = False) -> Any:
    strategy = FederatedStrategy(method)
    run = L.Trainer(
        max_epochs=rounds,
        strategy=strategy,
        callbacks=list(callbacks),
        logger=logger,
        accelerator="cpu",
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    data = quadratic_clients([1.0, 2.0, 3.0], [0.0, 1.0, 2.0])
    run.fit(QuadraticModule(), data, data)
    return run


def test_one_process_writes_the_first_page_of_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    trainer: Any = SimpleNamespace(
        is_global_zero=False, loggers=[TensorBoardLogger(tmp_path)], current_epoch=1
    )
    add_layout(trainer, ClientResults("val", 0, ("a",), {"": Evaluation({}, torch.ones(1))}))
    add_summary(trainer, {"val_acc": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_client_metrics_are_those_of_the_table_and_need_no_logger(tmp_path: Path) -> None:
    found = fitted(Ditto()).strategy.client_metrics()
    assert found.keys() == {"num_samples", "val_loss", "global/val_loss"}
    run = fitted(Ditto(), logger=CSVLogger(tmp_path))
    table = read_clients(str(run.log_dir)).query("round == 1")
    for model, name in (("personal", "val_loss"), ("global", "global/val_loss")):
        rows = table.query(f"model == '{model}'")
        assert dict(zip(rows["client"], rows["value"], strict=True)) == found[name]


def test_callbacks_hear_of_every_evaluation_and_of_what_is_added_at_the_end() -> None:
    listener = Listener()
    run = fitted(FedAvg(), listener, HeadFineTuning(epochs=1, scope="full"))
    said = [(each.split, each.round, [*each.evaluations]) for each in listener.heard]
    assert said == [
        ("val", 0, ["", "global/"]),
        ("val", 1, ["", "global/"]),
        ("val", 1, ["", "global/", "ft/"]),
    ]
    assert run.strategy.client_metrics("val").keys() == {
        *("num_samples", "val_loss", "global/val_loss", "ft/val_loss")
    }


def test_a_split_that_was_not_evaluated_is_refused() -> None:
    run = fitted(FedAvg())
    match = r"evaluated split, but got split='test' and evaluations of \['val'\]"
    with pytest.raises(ValueError, match=match):
        run.strategy.client_metrics("test")
    with pytest.raises(ValueError, match="evaluations of none"):
        FederatedStrategy(FedAvg()).client_metrics()


def test_bytes_add_up_over_rounds_and_a_resumed_run(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    first = fitted(FedAvg(), keep, rounds=2)
    each = first.callback_metrics["round/bytes_down"] + first.callback_metrics["round/bytes_up"]
    assert first.callback_metrics["round/bytes_total"] == 2 * each > 0
    (file,) = tmp_path.glob("epoch=1*.ckpt")
    second = L.Trainer(max_epochs=5, strategy=FederatedStrategy(FedAvg()), **QUIET)
    data = quadratic_clients([1.0, 2.0, 3.0], [0.0, 1.0, 2.0])
    second.fit(QuadraticModule(), data, data, ckpt_path=str(file))
    assert second.callback_metrics["round/bytes_total"] == 5 * each


def test_the_first_page_of_the_board_has_charts_that_were_logged(tmp_path: Path) -> None:
    run = fitted(Ditto(), logger=TensorBoardLogger(tmp_path))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run.logger.finalize("success")
    events = EventAccumulator(str(run.log_dir)).Reload()
    assert "custom_scalars__config__" in events.Tags()["tensors"]
    pages = layout(["val_loss", "val_acc"])
    assert next(iter(pages["clients"])) == "val_acc: personal, global, fine-tuned"
    logged = events.Tags()["scalars"]
    assert all(event.value > 0 for event in events.Scalars("round/seconds"))
    assert [event.step for event in events.Scalars("round/seconds")] == [0, 1]
    for page in layout(["val_loss"]).values():
        for _, patterns in page.values():
            assert any(re.match(each, tag) for each in patterns for tag in logged)
    assert not any(re.match("val_loss$", tag) for tag in logged if tag != "val_loss")
