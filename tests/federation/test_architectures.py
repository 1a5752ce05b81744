"""Clients with different architectures in one federation."""

from __future__ import annotations

import csv
import logging
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl import ClientModules, PersonalizedModule
from lightning_pfl.callbacks import HeadFineTuning
from lightning_pfl.contract.records import as_positions_of
from lightning_pfl.core.errors import CheckpointMismatchError, ClientError
from lightning_pfl.inspect import PairwiseDistance
from lightning_pfl.methods import (
    SCAFFOLD,
    FedAvg,
    FedPer,
    LGFedAvg,
    LocalOnly,
)
from lightning_pfl.methods.base import Method
from tests.trainer.setting import trainer

WIDTHS = {"wide": 6, "narrow": 4}
OF = ("wide", "narrow", "wide", "narrow", "narrow")
SIZES = (12, 9, 7, 12, 5)
EVERYBODY = range(5)


def module(width: int, seed: int, lr: float = 0.1, hidden: int = 3) -> Any:
    torch.manual_seed(seed)
    backbone = nn.Sequential(nn.Linear(width, hidden), nn.Tanh())
    settings: dict[str, Any] = {"lr": lr, "momentum": 0.0, "weight_decay": 0.0, "num_classes": 2}
    return PersonalizedModule(backbone, nn.Linear(hidden, 2), **settings).double()


def modules(**kwargs: Any) -> dict[str, Any]:
    return {name: module(width, width, **kwargs) for name, width in WIDTHS.items()}


def samples(client: int, split: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * client + split)
    x = torch.randn(SIZES[client], WIDTHS[OF[client]], generator=generator, dtype=torch.float64)
    return x, (x[:, 0] > 0).long()


def loaders(split: int = 0, clients: Any = EVERYBODY) -> list[Any]:
    return [DataLoader(TensorDataset(*samples(client, split)), batch_size=4) for client in clients]


def fit(method: Method, model: Any, clients: Any = EVERYBODY, **kwargs: Any) -> Any:
    run = trainer(method, **kwargs)
    run.fit(model, loaders(0, clients), loaders(1, clients))
    return run


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_each_client_is_trained_as_in_a_federation_of_its_own_architecture(engine: str) -> None:
    """LocalOnly: the same as without the other group, batch by batch."""
    mixed = fit(LocalOnly(), ClientModules(modules(), OF), engine=engine, max_epochs=3)
    for name, width in WIDTHS.items():
        clients = [client for client, architecture in enumerate(OF) if architecture == name]
        alone = fit(LocalOnly(), module(width, width), clients, engine="sequential", max_epochs=3)
        for position, client in enumerate(clients):
            expected = alone.strategy.client_state_dict(position)
            found = mixed.strategy.client_state_dict(client)
            assert found.keys() == expected.keys()
            for key, leaf in expected.items():
                torch.testing.assert_close(found[key], leaf, rtol=1e-10, atol=1e-12)


def sgd(model: Any, client: int, epochs: int) -> None:
    """Plain training, batch by batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = samples(client)
    for _ in range(epochs):
        for some in torch.arange(len(x)).split(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[some]), y[some]).backward()
            optimizer.step()


def test_what_is_shared_meets_on_the_server() -> None:
    """LGFedAvg with a common head: one round is local training and a mean of the heads."""
    method = LGFedAvg(shared="head", weighting="samples")
    run = fit(method, ClientModules(modules(), OF), max_epochs=1)
    starts = {name: module(width, width) for name, width in WIDTHS.items()}
    trained, total = [], sum(SIZES)
    for client, architecture in enumerate(OF):
        model = module(WIDTHS[architecture], WIDTHS[architecture])
        model.head.load_state_dict(starts["wide"].head.state_dict())  # what is shared begins alike
        sgd(model, client, 1)
        trained.append(model)
    parts = zip(SIZES, trained, strict=True)
    weight = torch.stack([size / total * model.head.weight for size, model in parts]).sum(0)
    for client, model in enumerate(trained):
        found = run.strategy.client_state_dict(client)
        torch.testing.assert_close(found["head.weight"], weight, rtol=1e-10, atol=1e-12)
        backbone = model.backbone[0].weight
        torch.testing.assert_close(found["backbone.0.weight"], backbone, rtol=1e-10, atol=1e-12)


def test_each_architecture_has_its_own_learning_rate() -> None:
    both = {"wide": module(6, 6, lr=0.1), "narrow": module(4, 4, lr=0.0)}
    run = fit(LocalOnly(), ClientModules(both, OF), max_epochs=1)
    for client, architecture in enumerate(OF):
        start = both[architecture].state_dict()["head.weight"]
        moved = not torch.equal(run.strategy.client_state_dict(client)["head.weight"], start)
        assert moved == (architecture == "wide")


def test_the_log_says_which_group_runs_how(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        fit(LocalOnly(), ClientModules(modules(), OF), engine="vectorized", max_epochs=1)
    for name in WIDTHS:
        assert f"{name}: training_step runs vectorized" in caplog.text


def test_evaluation_prediction_and_modules_are_each_client_s_own() -> None:
    run = fit(LocalOnly(), ClientModules(modules(), OF), max_epochs=2)
    predictions = run.predict(run.lightning_module, loaders(1))
    tested = run.test(run.lightning_module, loaders(1), verbose=False)[0]
    right = []
    for client in range(len(OF)):
        x, y = samples(client, 1)
        own = run.strategy.client_module(client)
        assert own.backbone[0].in_features == x.shape[1]
        found = torch.cat([own.predict_step(x[some], 0) for some in torch.arange(len(x)).split(4)])
        torch.testing.assert_close(torch.cat(predictions[client]), found)
        right.append((own(x).argmax(1) == y).double().mean())
    assert tested["test_acc"] == pytest.approx(float(torch.stack(right).mean()))


def test_the_table_has_each_client_s_own_values(tmp_path: Path) -> None:
    """Clients of the two architectures alternate, and no two have the same loss."""
    flags: dict[str, Any] = {"check_val_every_n_epoch": 1, "logger": CSVLogger(tmp_path)}
    run = fit(LocalOnly(), ClientModules(modules(), OF), max_epochs=1, **flags)
    with Path(run.log_dir, "clients_val.csv").open(newline="") as file:
        table = {row["client"]: row for row in csv.DictReader(file)}
    assert len({row["val_loss"] for row in table.values()}) == len(OF)
    for client, size in enumerate(SIZES):
        x, y = samples(client, 1)
        row = table[run.strategy.client_names[client]]
        loss = nn.functional.cross_entropy(run.strategy.client_module(client)(x), y)
        assert float(row["val_loss"]) == pytest.approx(loss.item())
        assert int(row["num_samples"]) == size


def test_without_groups_clients_take_turns() -> None:
    members = ClientModules(modules()).members([f"site {i}" for i in range(5)])
    assert {name: ids.tolist() for name, ids in members.items()} == {
        "wide": [0, 2, 4],
        "narrow": [1, 3],
    }


def test_no_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`modules` to have a LightningModule, but got .*{}"):
        ClientModules({})


def test_only_the_sampled_groups_train() -> None:
    model = ClientModules(modules(), OF)
    run = fit(LocalOnly(), model, max_epochs=1)
    assert sum(
        len(architecture.clients) for architecture in run.strategy.federation.architectures
    ) == len(OF)
    one = trainer(LGFedAvg(shared="head"), participation=1, max_epochs=1, seed=1)
    one.fit(ClientModules(modules(), OF), loaders(), loaders(1))
    starts = {name: module(width, width).state_dict() for name, width in WIDTHS.items()}
    moved = [
        not torch.equal(
            one.strategy.client_state_dict(client)["backbone.0.weight"],
            starts[OF[client]]["backbone.0.weight"],
        )
        for client in range(len(OF))
    ]
    assert sum(moved) == 1


def test_a_client_that_fails_is_left_out_and_its_group_goes_on() -> None:
    data = loaders()
    data[2].dataset.tensors[0][0] = torch.nan
    run = trainer(LGFedAvg(shared="head"), max_epochs=1)
    with pytest.warns(UserWarning, match=r"left out 1 of 5 clients \('2'"):
        run.fit(ClientModules(modules(), OF), data, loaders(1))
    start = module(6, 6).state_dict()
    assert torch.equal(
        run.strategy.client_state_dict(2)["backbone.0.weight"], start["backbone.0.weight"]
    )
    for client in (0, 1, 3, 4):
        found = run.strategy.client_state_dict(client)
        assert all(leaf.isfinite().all() for leaf in found.values())


def test_a_run_resumes_bitwise(tmp_path: Path) -> None:
    def make(rounds: int) -> Any:
        return trainer(LGFedAvg(shared="head"), max_epochs=rounds, participation=3)

    whole, first, rest = make(4), make(2), make(4)
    whole.fit(ClientModules(modules(), OF), loaders(), loaders(1))
    first.fit(ClientModules(modules(), OF), loaders(), loaders(1))
    last = str(tmp_path / "last.ckpt")
    first.save_checkpoint(last)
    rest.fit(ClientModules(modules(), OF), loaders(), loaders(1), ckpt_path=last)
    for client in range(len(OF)):
        expected = whole.strategy.client_state_dict(client)
        found = rest.strategy.client_state_dict(client)
        assert all(torch.equal(found[key], leaf) for key, leaf in expected.items())
    torch.load(last, weights_only=True)
    other = {**modules(), "narrow": module(4, 4, hidden=3)}
    other["narrow"].backbone = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    with pytest.raises(CheckpointMismatchError, match=r"narrow: backbone.2.weight: missing in the"):
        make(4).fit(ClientModules(other, OF), loaders(), loaders(1), ckpt_path=last)


@pytest.mark.parametrize("method", [FedAvg(), SCAFFOLD()])
def test_a_server_that_can_not_hold_all_architectures_says_which_methods_can(
    method: Method,
) -> None:
    with pytest.raises(
        MisconfigurationException,
        match=r"`\w+/backbone.0.weight` is \(3, 6\) in architecture 'wide' and \(3, 4\) "
        r"in architecture 'narrow'"
        r".*LocalOnly, SheafFMTL",
    ):
        fit(method, ClientModules(modules(), OF))


def test_a_split_method_is_told_to_name_another_part() -> None:
    match = "Name every part that differs in `personal=`, or use LocalOnly"
    with pytest.raises(MisconfigurationException, match=match):
        fit(FedPer(personal="head"), ClientModules(modules(), OF))
    match = "Name a part that is equal in `shared=`, or use LocalOnly"
    with pytest.raises(MisconfigurationException, match=match):
        fit(LGFedAvg(shared="backbone"), ClientModules(modules(), OF))


def test_constants_that_differ_between_groups_are_shared_by_no_server() -> None:
    def groups() -> ClientModules:
        both = {name: module(4, 4) for name in WIDTHS}
        for name, weight in (("wide", 1.0), ("narrow", 100.0)):
            both[name].register_buffer("weight", torch.tensor([1.0, weight]).double())
        return ClientModules(both, ["wide", "wide", "narrow", "narrow", "narrow"])

    data = [DataLoader(TensorDataset(x[:, :4], y), batch_size=4) for x, y in map(samples, range(5))]
    for method in (FedAvg(), FedPer()):
        with pytest.raises(MisconfigurationException, match="shared buffer `weight` has another"):
            trainer(method, max_epochs=1).fit(groups(), data, data)
    run = trainer(FedPer(personal=["head", "weight"]), max_epochs=1)
    run.fit(groups(), data, data)
    weights = [run.strategy.client_state_dict(client)["weight"][1] for client in range(5)]
    assert weights == [1, 1, 100, 100, 100]


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "auto"])
@pytest.mark.parametrize("sanity", [0, 1])
def test_a_module_that_does_not_fit_names_its_group_and_clients(engine: Any, sanity: int) -> None:
    """Client 1 has the inputs of the other group."""
    wrong = ["wide" if client == 1 else name for client, name in enumerate(OF)]
    match = r"'.*1.*' in round 0: .*shapes cannot be multiplied.* They have the module 'wide'"
    with pytest.raises(ClientError, match=match):
        fit(
            LocalOnly(), ClientModules(modules(), wrong), engine=engine, num_sanity_val_steps=sanity
        )


def test_what_needs_one_architecture_says_so() -> None:
    run = fit(LocalOnly(), ClientModules(modules(), OF), max_epochs=1)
    with pytest.raises(MisconfigurationException, match="one architecture, but got clients of"):
        _ = run.strategy.federation.parameter_split
    with pytest.raises(MisconfigurationException, match="one architecture, but got clients of"):
        fit(LocalOnly(), ClientModules(modules(), OF), callbacks=[HeadFineTuning(epochs=1)])


def test_models_of_different_shapes_have_no_distance(tmp_path: Path) -> None:
    pairs, logger = PairwiseDistance(part="all"), TensorBoardLogger(tmp_path)
    match = (
        "one architecture for PairwiseDistance, but got ClientModules with 'wide', 'narrow'. Remove"
    )
    with pytest.raises(MisconfigurationException, match=match):
        fit(LocalOnly(), ClientModules(modules(), OF), callbacks=[pairs], logger=logger)


def test_groups_by_client_name() -> None:
    names = [f"c{client}" for client in range(len(OF))]
    data, val = (dict(zip(names, loaders(split), strict=True)) for split in (0, 1))
    run = trainer(LocalOnly(), max_epochs=1)
    run.fit(ClientModules(modules(), dict(zip(names, OF, strict=True))), data, val)
    assert run.strategy.client_module("c1").backbone[0].in_features == 4


bare_layer: Any = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (
            lambda: ClientModules({"a": bare_layer}, ["a"]),
            TypeError,
            r"modules\['a'\] of type",
        ),
        (lambda: ClientModules(modules(), ["wide", "other"]), ValueError, r"but got \['other'\]"),
        (lambda: ClientModules(modules(), []), ValueError, r"for every client, but got \[\]"),
        (
            lambda: ClientModules({"a.b": module(4, 4)}, ["a.b"]),
            ValueError,
            "free attribute names, but got 'a.b'",
        ),
        (
            lambda: ClientModules({"forward": module(4, 4)}, ["forward"]),
            ValueError,
            "free attribute names, but got 'forward'",
        ),
        (
            lambda: fit(LocalOnly(), ClientModules(modules(), OF[:4])),
            ValueError,
            "each of the 5 clients, but got 4 entries",
        ),
        (
            lambda: fit(LocalOnly(), ClientModules(modules(), {"0": "wide"})),
            ValueError,
            r"each of the 5 clients, but got no entry for \['1'",
        ),
    ],
)
def test_wrong_groups_are_refused(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


class Bare(L.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise NotImplementedError


def test_a_step_is_defined_by_all_or_none() -> None:
    with pytest.raises(ValueError, match="`validation_step`, but wide do and bare don't"):
        ClientModules({"wide": module(6, 6), "bare": Bare()}, ["wide", "bare"])


def test_positions_in_a_part_are_told_as_positions_in_the_list() -> None:
    heard: list[tuple[list[int], Any]] = []

    def hear(positions: list[int], losses: Any = None) -> None:
        heard.append((positions, losses))

    listener = as_positions_of(hear, torch.tensor([4, 7, 9]))
    assert listener is not None
    losses = partial(torch.tensor, [0.5, 0.25])
    listener([2, 0], losses)
    listener([])
    assert heard == [([9, 4], losses), ([], None)]
    assert as_positions_of(None, torch.tensor([4])) is None
    assert as_positions_of(hear, slice(None)) is hear
