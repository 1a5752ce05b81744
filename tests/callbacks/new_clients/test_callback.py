"""New clients: what they start from, what they train on, and what is said about it."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, default_collate

from lightning_pfl import FederatedDataModule
from lightning_pfl.callbacks import NewClientAdaptation
from lightning_pfl.callbacks.new_clients.samples import take_samples
from lightning_pfl.data import (
    ClassesPerClient,
    Digits,
    FederatedLoaders,
    FederatedTensorDataset,
)
from lightning_pfl.methods import FedAvg, FedPer, FedRep
from lightning_pfl.metrics import summarize
from lightning_pfl.models import DigitsCNN
from lightning_pfl.testing import assert_trees_equal, descend, quadratic_clients
from tests.callbacks.setting import (
    BATCH,
    LR,
    Data,
    classes,
    network,
    quadratics,
    split,
    steps_of,
    trainer,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*"),
    pytest.mark.filterwarnings("ignore:.*more training samples than some new clients have.*"),
]

ENGINES = ["vectorized", "sequential"]
# More new clients than clients: their rows are not ids of the federation.
NEW_CURVATURES = torch.tensor([1.0, 2.0, 0.5, 1.5, 3.0], dtype=torch.float64)
NEW_CENTERS = torch.tensor([5.0, -1.0, 2.0, 3.0, -4.0], dtype=torch.float64)
NEW_SIZES = (7, 4, 6, 5, 9)
TEST_SIZES = (1, 2, 3, 4, 5)


def new_clients(samples: Any = NEW_SIZES, test: Any = TEST_SIZES) -> Any:
    return (
        quadratic_clients(NEW_CURVATURES, NEW_CENTERS, samples, BATCH, shuffle=True),
        quadratic_clients(NEW_CURVATURES, NEW_CENTERS, test, BATCH),
    )


def fitted_head(backbone: Tensor, client: int, steps: int) -> Tensor:
    """From the head of round 0, with the backbone of now."""
    start = torch.tensor([-0.25], dtype=torch.float64)
    target = NEW_CENTERS[client : client + 1] - backbone
    return descend(start, NEW_CURVATURES[client], target, LR, steps)


@pytest.mark.parametrize("engine", ENGINES)
def test_heads_follow_the_closed_form_from_the_initial_head(engine: str) -> None:
    adaptation = NewClientAdaptation(new_clients(), samples=[1, 3, 6], epochs=2)
    run = trainer(FedRep(head_epochs=2), adaptation, max_epochs=2, engine=engine)
    run.fit(split(), quadratics())
    shared = run.strategy.client_state_dict(0)["backbone.weight"]
    for adapted, m in zip(adaptation.results, (1, 3, 6), strict=True):
        assert adapted.trained_on.tolist() == [min(m, size) for size in NEW_SIZES]
        losses = []
        for client, size in enumerate(NEW_SIZES):
            want = fitted_head(shared, client, 2 * steps_of(min(m, size)))
            head = adapted.models["head.weight"][client]
            torch.testing.assert_close(head, want, rtol=1e-12, atol=1e-12)
            assert torch.equal(adapted.models["backbone.weight"][client], shared)
            offset = shared + want - NEW_CENTERS[client]
            losses.append(float(NEW_CURVATURES[client] / 2 * offset.square().sum()))
        for name, value in summarize(torch.tensor(losses), torch.tensor(TEST_SIZES), False).items():
            key = f"new_clients/loss@{m}" + (f"/{name}" if name else "")
            assert float(run.callback_metrics[key]) == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_scope_all_trains_everything_from_the_global_model(engine: str) -> None:
    adaptation = NewClientAdaptation(new_clients(), samples=[4], steps=3, scope="all", lr=0.05)
    run = trainer(FedAvg(), adaptation, engine=engine)
    run.fit(split(), quadratics())
    start = run.strategy.global_state_dict()
    v, h = start["backbone.weight"], start["head.weight"]
    for client in range(5):
        center = NEW_CENTERS[client : client + 1]
        half = (descend(v + h, NEW_CURVATURES[client], center, 2 * 0.05, 3) - v - h) / 2
        models = adaptation.results[0].models
        torch.testing.assert_close(models["head.weight"][client], h + half, rtol=1e-12, atol=0)
        torch.testing.assert_close(models["backbone.weight"][client], v + half, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scope", ["personal", "all"])
def test_server_and_client_states_stay_the_same_bits(scope: Any) -> None:
    runs = []
    new = classes(7, shuffle=True)
    for callbacks in ([], [NewClientAdaptation(new, samples=[4, 6], scope=scope)]):
        run = trainer(FedPer(), *callbacks, max_epochs=2, participation=2, engine="vectorized")
        run.fit(network(), *classes(shuffle=True))
        before = run.strategy.federation.state_dict()
        server = {name: leaf.clone() for name, leaf in before["server"]["model"].items()}
        run.test(run.lightning_module, classes()[1], verbose=False)
        assert_trees_equal(run.strategy.server["model"], server)
        runs.append(run.strategy.federation)
    assert_trees_equal(runs[0].server, runs[1].server)
    assert_trees_equal(runs[0].client_states.tree, runs[1].client_states.tree)


def test_what_is_frozen_is_frozen_bit_for_bit() -> None:
    adaptation = NewClientAdaptation(classes(7, shuffle=True), samples=[4, 8])
    run = trainer(FedPer(), adaptation, engine="vectorized")
    run.fit(network(), classes()[0])
    shared = run.strategy.server["model"]
    assert "backbone.1.running_var" in shared
    for adapted in adaptation.results:
        for name, leaf in shared.items():
            assert all(torch.equal(row, leaf) for row in adapted.models[name])


def test_a_checkpoint_alone_gives_the_same_values(tmp_path: Path) -> None:
    def adaptation() -> NewClientAdaptation:
        return NewClientAdaptation(classes(7, shuffle=True), samples=[2, 6], epochs=3)

    run = trainer(FedRep(head_epochs=2), adaptation(), max_epochs=2)
    run.fit(network(), classes(shuffle=True)[0])
    want = {k: float(v) for k, v in run.callback_metrics.items() if k.startswith("new_clients/")}
    path = tmp_path / "run.ckpt"
    run.save_checkpoint(path)
    again = trainer(FedRep(head_epochs=2), adaptation())
    # The module's own initial head is another one: that of the checkpoint counts.
    got = again.test(network(1), datamodule=Data(*classes()), ckpt_path=path, verbose=False)[0]
    assert len(want) == 2 * 2 * 5  # numbers of samples, values, statistics
    assert {key: got[key] for key in want} == want


def test_a_test_without_a_trained_model_is_warned_of() -> None:
    run = trainer(FedRep(head_epochs=2), NewClientAdaptation(classes(7, shuffle=True), samples=[2]))
    with pytest.warns(UserWarning, match="expected a trained model, but .* not run a round"):
        run.test(network(1), datamodule=Data(*classes()), verbose=False)


def test_no_samples_evaluate_the_global_model() -> None:
    adaptation = NewClientAdaptation(new_clients(), samples=[0, 2], scope="head")
    run = trainer(FedAvg(), adaptation)
    run.fit(split(), quadratics())
    untouched = adaptation.results[0]
    for name, leaf in run.strategy.server["model"].items():
        assert all(torch.equal(row, leaf) for row in untouched.models[name])
    assert untouched.trained_on.tolist() == [0] * 5
    point = sum(run.strategy.server["model"].values())
    losses = NEW_CURVATURES / 2 * (point - NEW_CENTERS).square()
    got = float(run.callback_metrics["new_clients/loss@0"])
    assert got == pytest.approx(float(losses.mean()), rel=1e-6)


def test_no_samples_are_refused_where_the_head_would_be_untrained() -> None:
    run = trainer(FedRep(head_epochs=2), NewClientAdaptation(new_clients(), samples=[0, 5]))
    with pytest.raises(
        Exception, match=r"Expected samples >= 1 for FedRep, but got samples=\[0, 5\]"
    ):
        run.fit(split(), quadratics())
    assert run.global_step == 0


def test_clients_that_can_not_train_are_left_out_and_named() -> None:
    adaptation = NewClientAdaptation(new_clients((3, 0, 2, 1, 1), (1, 1, 0, 1, 1)), samples=[2])
    with pytest.warns(UserWarning, match=r"1 new clients without a batch .* are left out: 1\."):
        trainer(FedRep(head_epochs=2), adaptation).fit(split(), quadratics())
    # Client 1 has no training samples, client 2 no test samples.
    assert adaptation.results[0].clients.tolist() == [0, 3, 4]
    assert adaptation.results[0].evaluation.counts.tolist() == [1, 1, 1]


def test_nobody_to_train_and_nobody_to_test_are_errors() -> None:
    run = trainer(FedRep(head_epochs=2), NewClientAdaptation(new_clients((0,) * 5), samples=[2]))
    with pytest.raises(Exception, match="none of the 5 can take a step on 2 samples"):
        run.fit(split(), quadratics())
    run = trainer(
        FedRep(head_epochs=2), NewClientAdaptation(new_clients(test=(0,) * 5), samples=[2])
    )
    with pytest.raises(Exception, match="Expected new clients with test data"):
        run.fit(split(), quadratics())


# --- which samples --------------------------------------------------------------------------------


def own_samples(loaders: Any, client: int) -> list[int]:
    return sorted(int(x) for batch in loaders.loaders[client] for x in batch[0])


def shared_loaders() -> FederatedLoaders:
    """Two clients that share a dataset and differ in their samplers."""
    dataset = TensorDataset(torch.arange(20.0))
    samplers = [SubsetRandomSampler(range(0, 12)), SubsetRandomSampler(range(12, 20))]
    return FederatedLoaders([DataLoader(dataset, 3, sampler=sampler) for sampler in samplers])


def test_fewer_samples_are_the_beginning_of_more() -> None:
    data = FederatedTensorDataset((torch.arange(20.0),), [range(0, 12), range(12, 20)])
    resident: dict[int, Any] = {m: take_samples(data, m, 5) for m in (2, 6, 50)}
    loaded = {m: take_samples(shared_loaders(), m, 5) for m in (2, 6, 50)}
    mine = [set(range(0, 12)), set(range(12, 20))]
    for client in range(2):
        chosen: list[dict[int, set[int]]] = [
            {m: set(part.indices[client].tolist()) for m, part in resident.items()},
            {m: set(own_samples(part, client)) for m, part in loaded.items()},
        ]
        for sets in chosen:
            assert sets[2] < sets[6] < sets[50] == mine[client]
            assert [len(sets[2]), len(sets[6])] == [2, 6]


def test_the_seed_decides_which_samples_come_first() -> None:
    picks = [own_samples(take_samples(shared_loaders(), 4, seed), 0) for seed in (0, 0, 1)]
    assert picks[0] == picks[1]
    assert picks[0] != picks[2]


def test_loaders_that_can_not_be_cut_are_refused() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=None)
    with pytest.raises(
        TypeError, match="that of client '0' has a TensorDataset and batch_size=None"
    ):
        take_samples(FederatedLoaders([loader]), 2, 0)


def collate(rows: Any) -> Any:
    """A function of one's own keeps loaders from becoming resident tensors."""
    return default_collate(rows)


@pytest.mark.parametrize("engine", ENGINES)
def test_lists_of_loaders_adapt_like_federated_datasets(engine: str) -> None:
    def loaders(data: FederatedTensorDataset, **kwargs: Any) -> list[DataLoader[Any]]:
        parts = [data.gather(rows) for rows in data.indices]
        return [DataLoader(TensorDataset(*p), BATCH, collate_fn=collate, **kwargs) for p in parts]

    train, test = new_clients()
    pair = (loaders(train, shuffle=True), loaders(test))
    adaptation = NewClientAdaptation(pair, samples=[3], epochs=2)
    run = trainer(FedRep(head_epochs=2), adaptation, engine=engine)
    run.fit(split(), quadratics())
    shared = run.strategy.client_state_dict(0)["backbone.weight"]
    for client in range(5):
        head = adaptation.results[0].models["head.weight"][client]
        want = fitted_head(shared, client, 2 * steps_of(3))
        torch.testing.assert_close(head, want, rtol=1e-12, atol=1e-12)


# --- fewer samples than asked for -----------------------------------------------------------------


def said(samples: list[int]) -> list[str]:
    """Adapt in a fit of clients with 7, 4, 6, 5 and 9 samples, and return what is said of these."""
    adaptation = NewClientAdaptation(new_clients(), samples=samples, epochs=[1, 2])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer(FedRep(), adaptation).fit(split(), quadratics())
    texts = [str(one.message) for one in found]
    return [text for text in texts if text.startswith("NewClientAdaptation")]


def test_clients_with_fewer_samples_than_asked_for_are_counted_once() -> None:
    (text,) = said([100_000, 1, 6, 4])
    assert text.startswith("NewClientAdaptation(samples=[100000, 1, 6, 4]) asks for more training")
    assert ": 5 of 5 have fewer than 100000, 2 of 5 have fewer than 6. These train on" in text
    assert text.endswith("The fewest that one has are 4.")


def test_nothing_is_said_where_all_have_as_many() -> None:
    assert said([1, 4]) == []


# --- from the data module to the table and the curve ----------------------------------------------


def test_new_clients_of_the_data_module_end_in_the_table_and_the_curve(tmp_path: Path) -> None:
    data = FederatedDataModule(
        Digits(), ClassesPerClient(2), num_clients=10, new_clients=4, val_fraction=0.2
    )
    loggers = [TensorBoardLogger(tmp_path, "board"), CSVLogger(tmp_path, "csv")]
    adaptation = NewClientAdaptation(samples=[5, 20], epochs=5)
    run = trainer(FedRep(head_epochs=1), adaptation, logger=loggers, log_every_n_steps=1)
    run.fit(DigitsCNN(), datamodule=data)
    names = data.new_clients("test").names
    assert run.log_dir is not None
    with (Path(run.log_dir) / "new_clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["samples"], row["client"]) for row in rows] == [
        (m, name) for m in ("5", "20") for name in names
    ]
    logged = {m: float(run.callback_metrics[f"new_clients/acc@{m}"]) for m in (5, 20)}
    for m in (5, 20):
        accuracies = [float(row["acc"]) for row in rows if row["samples"] == str(m)]
        assert logged[m] == pytest.approx(sum(accuracies) / 4, rel=1e-6)
    assert {row["trained_on"] for row in rows if row["samples"] == "5"} == {"5"}

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for logger in run.loggers:
        logger.finalize("success")
    board = EventAccumulator(str(loggers[0].log_dir)).Reload()
    curve = {event.step: event.value for event in board.Scalars("new_clients/acc")}
    assert curve == pytest.approx(logged, rel=1e-6)


# --- wrong arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"samples": []},
            r"Expected `samples` to be different whole numbers >= 0, but got samples=\[\]",
        ),
        ({"samples": [3, -1]}, r"but got samples=\[3, -1\]"),
        ({"samples": [3, 3]}, r"but got samples=\[3, 3\]"),
        ({"samples": [2.5]}, r"but got samples=\[2.5\]"),
        (
            {"epochs": 5, "steps": 3},
            "exactly one of `epochs` and `steps`, but got epochs=5, steps=3",
        ),
        ({"epochs": None}, "but got epochs=None, steps=None"),
        ({"steps": -1}, "Expected `steps` to be a whole number >= 0, but got steps=-1"),
        ({"epochs": 0}, "Expected new clients to train, but got no epochs and no steps"),
        ({"lr": 0.0}, "Expected `lr` to be a finite number > 0 or None, but got lr=0.0"),
        ({"lr": "1"}, "Expected `lr` to be a finite number > 0 or None, but got lr='1'"),
        ({"lr": True}, "Expected `lr` to be a finite number > 0 or None, but got lr=True"),
    ],
)
def test_wrong_numbers_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NewClientAdaptation(**arguments)


def test_clients_must_be_a_pair_of_the_same_clients() -> None:
    train, test = new_clients()
    with pytest.raises(
        TypeError, match=r"Expected `clients` to be a pair \(training data, test data\)"
    ):
        NewClientAdaptation(train)
    with pytest.raises(ValueError, match="but got 5 and 3 clients, or other names"):
        NewClientAdaptation((train, test.subset([0, 1, 2])))


def test_a_run_without_new_clients_ends_before_it_begins() -> None:
    with pytest.raises(Exception, match="Expected new clients, but the run has no data module"):
        trainer(FedRep(head_epochs=2), NewClientAdaptation()).fit(split(), quadratics())
    with pytest.raises(
        Exception, match="Expected a data module with new clients, but got new_clients=0"
    ):
        trainer(FedRep(head_epochs=2), NewClientAdaptation()).fit(
            DigitsCNN(), datamodule=FederatedDataModule(Digits(), num_clients=5)
        )


def test_a_scope_must_fit_the_method_and_the_module() -> None:
    with pytest.raises(
        Exception, match="Expected a method with a personal part for scope='personal', but FedAvg"
    ):
        trainer(FedAvg(), NewClientAdaptation(new_clients())).fit(split(), quadratics())
    with pytest.raises(
        Exception, match="Expected `scope` to match at least one parameter, but got scope='neck'"
    ):
        trainer(FedAvg(), NewClientAdaptation(new_clients(), scope="neck")).fit(
            split(), quadratics()
        )
