"""Each client's best round, on points that move through the best one and beyond it.

Client k begins at 0, and r rounds of K_k steps take it to c_k (1 - (1 - lr)^(r K_k)). Its
validation sample lies on the way, at a share s_k of c_k.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pfl import load_clients
from lightning_pfl.callbacks import BestRound
from lightning_pfl.data import Digits, FederatedDataModule
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.methods import FedAvg, LocalOnly
from lightning_pfl.models import MLP
from tests.trainer.setting import CENTRES, LR, SIZES, Quadratic, points, steps_of, trainer

ROUNDS = 4
SHARES = (0.5, 0.83, 0.82, 1.0)


def validation(clients: tuple[int, ...] = (0, 1, 2, 3)) -> FederatedTensorDataset:
    shares = torch.tensor(SHARES, dtype=torch.float64).unsqueeze(1)
    held = [[k] if k in clients else [] for k in range(4)]
    return FederatedTensorDataset((shares * CENTRES,), held, batch_size=1)


def place(client: int, round: int) -> Tensor:
    return CENTRES[client] * (1 - (1 - LR) ** ((round + 1) * steps_of(SIZES[client])))


def loss(client: int, round: int) -> float:
    return float(((place(client, round) - SHARES[client] * CENTRES[client]) ** 2).sum() / 2)


BEST = [min(range(ROUNDS), key=lambda round, k=k: loss(k, round)) for k in range(4)]  # type: ignore[misc]


def fitted(rounds: int, callback: BestRound | None, **fit: Any) -> Any:
    run = trainer(LocalOnly(), max_epochs=rounds, callbacks=[callback] if callback else [])
    run.fit(Quadratic(), points(), fit.pop("val", validation()), **fit)
    return run


def assert_best(federation: Any) -> None:
    for client, round in enumerate(BEST):
        got = federation.client_state_dict(client)["w"]
        torch.testing.assert_close(got, place(client, round))


def test_every_client_has_the_model_of_its_best_round(tmp_path: Path) -> None:
    assert BEST == [0, 1, 2, 3]
    callback = BestRound()
    run = fitted(ROUNDS, callback)
    assert callback.rounds == {str(k): round for k, round in enumerate(BEST)}
    assert_best(run.strategy)
    # The fit has logged the models of its last round.
    last = sum(loss(k, ROUNDS - 1) for k in range(4)) / 4
    assert float(run.callback_metrics["val_loss"]) == pytest.approx(last)
    (tested,) = run.test(run.lightning_module, validation(), verbose=False)
    assert tested["test_loss"] == pytest.approx(sum(loss(k, r) for k, r in enumerate(BEST)) / 4)
    predicted = run.predict(run.lightning_module, validation())
    want = place(2, BEST[2]) - SHARES[2] * CENTRES[2]
    torch.testing.assert_close(predicted[2][0][0], want)

    path = str(tmp_path / "last.ckpt")
    run.save_checkpoint(path)
    assert_best(load_clients(path, Quadratic(), LocalOnly()))
    other = trainer(LocalOnly())
    (tested,) = other.test(Quadratic(), validation(), ckpt_path=path, verbose=False)
    assert tested["test_loss"] == pytest.approx(sum(loss(k, r) for k, r in enumerate(BEST)) / 4)


def test_a_resumed_run_remembers(tmp_path: Path) -> None:
    path = str(tmp_path / "two.ckpt")
    fitted(2, BestRound()).save_checkpoint(path)
    callback = BestRound()
    run = fitted(ROUNDS, callback, ckpt_path=path)
    assert callback.rounds == {str(k): round for k, round in enumerate(BEST)}
    assert_best(run.strategy)
    # A fit without the callback has the models of now.
    without = fitted(ROUNDS, None, ckpt_path=path)
    for k in range(4):
        got = without.strategy.client_state_dict(k)["w"]
        torch.testing.assert_close(got, place(k, ROUNDS - 1))


def test_clients_without_validation_samples_have_the_model_of_now() -> None:
    run = fitted(ROUNDS, BestRound(mode="max"), val=validation((0, 2)))
    torch.testing.assert_close(run.strategy.client_state_dict(1)["w"], place(1, ROUNDS - 1))
    worst = max(range(ROUNDS), key=lambda round: loss(0, round))
    torch.testing.assert_close(run.strategy.client_state_dict(0)["w"], place(0, worst))


def test_a_global_model_may_be_best_in_different_rounds() -> None:
    callback = BestRound()
    run = trainer(FedAvg(), max_epochs=3, callbacks=[callback])
    run.fit(Quadratic(), points(), validation())
    assert len(set(callback.rounds.values())) > 1
    states = {k: run.strategy.client_state_dict(k)["w"] for k in range(4)}
    for one, first in callback.rounds.items():
        for other, second in callback.rounds.items():
            same = torch.equal(states[int(one)], states[int(other)])
            assert same == (first == second)


def test_what_can_not_choose_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="got monitor='val_acc' and 'val_loss'"):
        fitted(1, BestRound("val_acc"))
    with pytest.raises(ValueError, match="Expected `mode` to be 'min' or 'max'"):
        BestRound(mode="best")  # type: ignore[arg-type]
    data = FederatedDataModule(Digits(), num_clients=3, val_split="test")
    with pytest.raises(MisconfigurationException, match="test data would choose the models"):
        trainer(FedAvg(), callbacks=[BestRound()]).fit(MLP([64, 10]), data)


def test_of_equal_rounds_the_first_counts() -> None:
    callback = BestRound()
    run = trainer(LocalOnly(local_epochs=0), max_epochs=3, callbacks=[callback])
    run.fit(Quadratic(), points(), validation())
    assert callback.rounds == dict.fromkeys("0123", 0)


class Diverges(Quadratic):
    """Its validation is NaN in the first round."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        known = self.trainer.current_epoch > 0
        self.log("val_loss", self.loss(batch) if known else torch.tensor(torch.nan).double())


@pytest.mark.filterwarnings("ignore")
def test_a_round_of_nan_is_never_the_best() -> None:
    callback = BestRound()
    run = trainer(LocalOnly(local_epochs=0), max_epochs=3, callbacks=[callback])
    run.fit(Diverges(), points(), validation())
    assert callback.rounds == dict.fromkeys("0123", 1)
