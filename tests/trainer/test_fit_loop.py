"""A round against its closed form, and what a fit fires, counts and logs on the way."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.contract.records import Round
from lightning_pfl.federation.sampling import sample_cohort
from lightning_pfl.methods import FedAvg, FedRep, LocalOnly
from tests.trainer.setting import (
    CENTRES,
    LR,
    SIZES,
    Quadratic,
    classes,
    mean,
    network,
    points,
    steps_of,
    trained,
    trainer,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")


@pytest.mark.quick
def test_rounds_of_fedavg_match_the_closed_form() -> None:
    module = Quadratic()
    trainer(max_epochs=3).fit(module, points())
    w = torch.zeros(2, dtype=torch.float64)
    for _ in range(3):
        w = mean([trained(w, k) for k in range(4)], list(SIZES))
    torch.testing.assert_close(module.w.data, w, rtol=0, atol=1e-12)


def test_uniform_weights_reach_the_server() -> None:
    module = Quadratic()
    trainer(FedAvg(weighting="uniform"), max_epochs=1).fit(module, points())
    w = torch.zeros(2, dtype=torch.float64)
    torch.testing.assert_close(
        module.w.data, mean([trained(w, k) for k in range(4)], [1] * 4), rtol=0, atol=1e-12
    )


def test_clients_that_are_not_sampled_keep_their_memory() -> None:
    run = trainer(FedRep(head_epochs=2), participation=2, max_epochs=1)
    run.fit(network(), classes()[0])
    start = network().state_dict()
    cohort = sample_cohort(3, 0, torch.arange(5), 2).tolist()
    for client in range(5):
        head = run.strategy.client_state_dict(client)["head.weight"]
        assert torch.equal(head, start["head.weight"]) == (client not in cohort)


def test_local_only_trains_everyone_whatever_the_participation() -> None:
    run = trainer(LocalOnly(), participation=1, max_epochs=2)
    run.fit(Quadratic(), points())
    for client in range(4):
        w = trained(torch.zeros(2, dtype=torch.float64), client, 2 * steps_of(SIZES[client]))
        torch.testing.assert_close(
            run.strategy.client_state_dict(client)["w"], w, rtol=0, atol=1e-12
        )


def test_a_client_without_samples_is_named_and_never_sampled() -> None:
    run = trainer(max_epochs=1)
    module = Quadratic()
    data = points((4, 0, 3, 5), names=["ann", "bob", "cem", "dag"])
    with pytest.warns(
        UserWarning, match=r"Clients without training samples are never sampled \(1 of \d\): bob\."
    ):
        run.fit(module, data)
    w = torch.zeros(2, dtype=torch.float64)
    want = mean([trained(w, 0, 2), trained(w, 2, 2), trained(w, 3, 3)], [4, 3, 5])
    torch.testing.assert_close(module.w.data, want, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Clients without training samples.*")
def test_no_client_with_samples_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="Expected at least one client with training samples, but none of the 4"
    ):
        trainer().fit(Quadratic(), points((0, 0, 0, 0)))


class Recorder(FederatedCallback):
    """Keeps what the round hooks are told."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.rounds: list[Round] = []
        self.steps: list[tuple[str, Any, int, int]] = []

    def on_round_start(self, trainer: L.Trainer, module: Any, round: Round) -> None:
        self.events.append("start")
        assert round.received is None
        assert round.uploads is None

    def on_local_training_start(self, trainer: L.Trainer, module: Any, round: Round) -> None:
        self.events.append("train")
        assert round.received is not None

    def on_local_training_end(self, trainer: L.Trainer, module: Any, round: Round) -> None:
        self.events.append("trained")
        assert round.uploads is not None
        assert len(round.uploads["model"]["w"]) == len(round.info)

    def on_aggregation_start(self, trainer: L.Trainer, module: Any, round: Round) -> None:
        self.events.append("aggregate")
        self.before = module.w.detach().clone()

    def on_aggregation_end(self, trainer: L.Trainer, module: Any, round: Round) -> None:
        self.events.append("aggregated")
        assert not torch.equal(self.before, module.w)

    def on_round_end(self, trainer: L.Trainer, module: Any, round: Round) -> None:
        self.events.append("end")
        self.rounds.append(round)

    def on_train_batch_start(
        self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.steps.append(("start", batch, batch_idx, trainer.global_step))

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self.steps.append(("end", batch, batch_idx, trainer.global_step))


@pytest.fixture
def recorded() -> tuple[Recorder, Any]:
    recorder = Recorder()
    run = trainer(callbacks=[recorder], participation=0.5)
    run.fit(Quadratic(), points())
    return recorder, run


def test_round_hooks_fire_in_order_with_what_is_known(recorded: tuple[Recorder, Any]) -> None:
    recorder, _ = recorded
    assert recorder.events == ["start", "train", "trained", "aggregate", "aggregated", "end"] * 2
    assert [round.number for round in recorder.rounds] == [0, 1]
    for round in recorder.rounds:
        sizes = torch.tensor(SIZES)[round.info.index]
        assert torch.equal(round.info.num_samples, sizes)
        assert round.info.steps.tolist() == [steps_of(size) for size in sizes.tolist()]
        assert torch.equal(round.info.weights, sizes.double() / sizes.sum())


def test_batch_hooks_fire_once_for_each_client_and_the_last_one_after_the_server(
    recorded: tuple[Recorder, Any],
) -> None:
    recorder, _ = recorded
    for number, round in enumerate(recorder.rounds):
        first, second = round.info.index.tolist()
        assert recorder.steps[4 * number : 4 * number + 4] == [
            ("start", first, 0, number),
            ("end", first, 0, number),
            ("start", second, 1, number),
            ("end", second, 1, number + 1),
        ]


def test_a_round_is_an_epoch_and_a_step(recorded: tuple[Recorder, Any]) -> None:
    _, run = recorded
    assert (run.current_epoch, run.global_step, run.num_training_batches) == (2, 2, 2)


def test_the_traffic_is_that_of_the_trees(recorded: tuple[Recorder, Any]) -> None:
    _, run = recorded
    bytes_of_w = 2 * 8
    assert run.callback_metrics["round/bytes_up"] == 2 * bytes_of_w
    assert run.callback_metrics["round/bytes_down"] == 2 * bytes_of_w
    assert run.callback_metrics["round/clients"] == 2
    assert run.callback_metrics["round/rejected"] == 0


def test_train_values_are_the_mean_over_clients() -> None:
    run = trainer(max_epochs=1)
    run.fit(Quadratic(), points())
    losses = []
    for client, size in enumerate(SIZES):
        w, total = torch.zeros(2, dtype=torch.float64), 0.0
        for begin in range(0, size, 2):
            total += float(((w - CENTRES[client]) ** 2).sum() / 2) * min(2, size - begin)
            w = trained(w, client, 1)
        losses.append(total / size)
    assert float(run.callback_metrics["train_loss"]) == pytest.approx(sum(losses) / 4, rel=1e-6)
    assert run.progress_bar_metrics["train_loss"] == pytest.approx(sum(losses) / 4, rel=1e-6)


class SkippingModule(Quadratic):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


def test_skipping_the_rest_of_an_epoch_is_refused() -> None:
    with pytest.raises(
        Exception,
        match="can't skip the rest of an epoch, but `on_train_batch_start` of SkippingModule",
    ):
        trainer().fit(SkippingModule(), points())


class NamesData(L.LightningDataModule):
    """Other clients from the second round on."""

    def train_dataloader(self) -> Any:
        first = self.trainer is None or self.trainer.current_epoch == 0
        return points(names=list("abcd") if first else list("abce"))


def test_reloaded_data_must_hold_the_same_clients() -> None:
    with pytest.raises(
        Exception, match="Expected reloaded training data to hold the same 4 clients"
    ):
        trainer(reload_dataloaders_every_n_epochs=1).fit(Quadratic(), NamesData())


class GrowingData(L.LightningDataModule):
    """Other numbers of samples from the second round on."""

    sizes = (SIZES, (2, 9, 3, 1))

    def train_dataloader(self) -> Any:
        first = self.trainer is None or self.trainer.current_epoch == 0
        return points(self.sizes[not first])


def test_weights_are_those_of_the_reloaded_data() -> None:
    module = Quadratic()
    trainer(reload_dataloaders_every_n_epochs=1).fit(module, GrowingData())
    w = torch.zeros(2, dtype=torch.float64)
    for sizes in GrowingData.sizes:
        ends = [trained(w, k, steps_of(size)) for k, size in enumerate(sizes)]
        w = mean(ends, list(sizes))
    torch.testing.assert_close(module.w.data, w, rtol=0, atol=1e-12)


def test_results_do_not_depend_on_the_chunks_or_the_global_generator() -> None:
    states = []
    for chunk, seed in ((None, 1), (1, 2), (3, 4)):
        module = network()
        torch.manual_seed(seed)
        run = trainer(FedRep(head_epochs=2), engine="vectorized", chunk_size=chunk)
        run.fit(module, *classes())
        states.append(run.strategy.client_state_dict(2))
    for other in states[1:]:
        for name, value in states[0].items():
            torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-6)


class Elsewhere(Quadratic):
    """Its optimizer holds the parameters of another module."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    match = "of Elsewhere to return an optimizer of its parameters, but SGD holds none of them"
    with pytest.raises(MisconfigurationException, match=match):
        trainer(max_epochs=1).fit(Elsewhere(), points())


class Traced(torch.optim.SGD):
    """Keeps the calls that lead to its last step."""

    calls: ClassVar[list[str]] = []

    def step(self, closure: Any = None) -> Any:
        files = traceback.extract_stack()
        Traced.calls[:] = [f"{Path(one.filename).name}: {one.name}" for one in files]
        return super().step(closure)


class Stepping(Quadratic):
    def configure_optimizers(self) -> Any:
        return Traced(self.parameters(), lr=0.1)


def test_the_page_names_every_call_from_a_round_to_a_clients_step() -> None:
    trainer(max_epochs=1, engine="reference").fit(Stepping(), points())
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    named = re.findall(r"^\d+\. `\w+\.(\w+)` \(`(?:\w+/)*(\w+\.py)`", page, re.MULTILINE)
    named = [f"{file}: {name}" for name, file in named]
    assert len(named) == 12
    begin = Traced.calls.index(named[0])
    # The last one is the optimizer's own step, which torch wraps.
    assert Traced.calls[begin : begin + 12] == named
    assert all("optim" in call or "test_fit" in call for call in Traced.calls[begin + 12 :])


def test_logged_means_are_those_of_accepted_clients() -> None:
    """The first step is at 0, with the loss |c|^2 / 2, and moves by LR |c|: the farthest is out."""
    far = CENTRES.norm(dim=1)
    last = int(far.argmax())
    bound = LR * float(far[last]) * 0.99
    assert sum(float(LR * each) > bound for each in far) == 1
    run = trainer(FedAvg(local_steps=1), max_epochs=1, max_update_norm=bound)
    with pytest.warns(UserWarning, match="Round 0 left out 1 of 4 clients"):
        run.fit(Quadratic(), points())
    want = [float(far[k] ** 2 / 2) for k in range(4) if k != last]
    assert float(run.callback_metrics["train_loss"]) == pytest.approx(sum(want) / 3)
