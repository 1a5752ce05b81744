"""HeteroFL: a narrow network inside of the full one, and means over owners."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_pfl.contract.known import Known
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.federation.new_clients import starting_models
from lightning_pfl.methods import FedAvg, HeteroFL
from lightning_pfl.models import MLP, Scaler
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    assert_trees_equal,
    descend,
    fit,
    quadratic_clients,
)
from lightning_pfl.testing.conformance import SIZES, small_clients, small_module
from tests.methods.case import Bytes, Case
from tests.methods.networks import cohorts, plain_module
from tests.methods.quadratics import closed_form
from tests.methods.references import heterofl as reference
from tests.methods.references import softmax


def network(channels: int) -> PersonalizedModule:
    """A convolution with BatchNorm and a scaler, flattened into a hidden layer."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        backbone = nn.Sequential(
            nn.Conv2d(1, channels, 3),
            Scaler(channels / 4),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(9 * channels, 2 * channels),
            nn.Sigmoid(),
        )
        head = nn.Linear(2 * channels, 3)
        return PersonalizedModule(backbone, head, lr=0.05, momentum=0.9).double()


def thin(norm: bool = False) -> nn.Module:
    """The conformance suite's network with one channel instead of two."""
    layers = [nn.Conv2d(1, 1, 3, bias=not norm), nn.BatchNorm2d(1), nn.ReLU(), nn.Flatten()]
    layers = layers if norm else [layers[0], nn.Tanh(), layers[3]]
    return PersonalizedModule(nn.Sequential(*layers), nn.Linear(9, 3))


CASE = Case(
    method=lambda: HeteroFL({"thin": thin()}, "thin"),
    bytes={
        "defaults": Bytes(lambda: HeteroFL({"thin": thin()}, "thin"), 4 * 40, 4 * 40 + 3),
        "full": Bytes(lambda: HeteroFL({"thin": thin()}, "full"), 4 * 77, 4 * 77 + 3),
    },
    twin=lambda: FedAvg(weighting="uniform"),
    needed=({"thin": thin(norm=True)},),
    problem={"make_module": lambda dtype=torch.float64: plain_module().to(dtype)},
    published={"rule": "first", "masked_classes": True, "weighting": "uniform"},
)

A = [1.0, 3.0, 0.5]
C = torch.tensor([[1.0, 2, 3, 4], [5, 6, -7, 8], [9, 10, 11, -12]]).double()


def owned_units(rule: str, round: int) -> Tensor:
    """Of four numbers the first client owns all, the others two."""
    half = {"first": [0, 1], "rolling": [round % 4, (round + 1) % 4]}[rule]
    owned = torch.zeros(3, 4, dtype=torch.bool)
    owned[0] = True
    owned[1:, half] = True
    return owned


class TestQuadratics:
    @closed_form
    @pytest.mark.parametrize("rule", ["first", "rolling"])
    @pytest.mark.parametrize("participation", [3, 2])
    def test_entries_are_means_over_their_owners(
        self, engine: str, rule: Any, participation: int
    ) -> None:
        narrow = {"half": QuadraticModule(dim=2)}
        method = HeteroFL(narrow, ["full", "half", "half"], rule, masked_classes=False)
        data = quadratic_clients(A, C)
        module = QuadraticModule(dim=4, lr=0.1, start=0.5)
        run = fit(method, data, module, 3, engine, participation=participation)
        x = torch.full((4,), 0.5).double()
        in_rounds = cohorts(3, participation, eligible=torch.arange(3))
        for number, cohort in enumerate(in_rounds):
            owned = owned_units(rule, number)
            trained = descend(x, torch.tensor(A).double(), C, 0.1, 1)
            for i in range(4):
                mine = [trained[k, i] for k in cohort.tolist() if owned[k, i]]
                x[i] = torch.stack(mine).mean() if mine else x[i]
            torch.testing.assert_close(run.recorder.servers[number + 1]["model"]["w"], x)
        owned = owned_units(rule, 2)
        torch.testing.assert_close(run.models["w"], x * owned)

    def test_random_units_are_drawn_for_each_client_and_round(self) -> None:
        method = HeteroFL({"half": QuadraticModule(dim=20)}, "half", "random", masked_classes=False)
        module = QuadraticModule(dim=40, start=1.0)
        run = fit(method, quadratic_clients([1.0] * 3, torch.zeros(3, 40)), module, 2)
        drawn = [round.uploads["model"]["w"] != 0 for round in run.recorder.rounds]  # type: ignore[index]
        assert all((units.sum(1) == 20).all() for units in drawn)
        different = {tuple(row.tolist()) for units in drawn for row in units}
        assert len(different) == 6

    def test_bytes_are_those_of_the_narrow_network(self) -> None:
        method = HeteroFL({"half": QuadraticModule(dim=2)}, masked_classes=False)
        run = fit(method, quadratic_clients(A, C), QuadraticModule(dim=4), 1)
        # The clients take turns: full, half, full; eight bytes a number.
        assert run.metrics["round/bytes_up"] == run.metrics["round/bytes_down"] == 8 * (4 + 2 + 4)


def test_a_narrow_network_inside_of_the_full_one_trains_as_if_alone(engine: str) -> None:
    """With momentum, weight decay, BatchNorm and a scaler; entries that nobody owns stay."""
    data, full = small_clients(), network(4)
    method = HeteroFL({"half": network(2)}, "half", masked_classes=False)
    run = fit(method, data, full, 3, engine, participation=3)
    start = run.recorder.servers[0]["model"]
    narrow = network(2)
    narrow.load_state_dict(method.narrow_state_dict(start, 0, 0))
    alone = fit(FedAvg(weighting="uniform"), data, narrow, 3, engine, participation=3)
    found = method.narrow_state_dict(run.server["model"], 0, 2)
    assert_trees_close(found, dict(alone.strategy.global_state_dict()))
    for name in ("backbone.0.weight", "backbone.5.weight", "head.weight"):
        before, after = start[name].clone(), run.server["model"][name].clone()
        cut = tuple(slice(0, n) for n in narrow.state_dict()[name].shape)
        before[cut] = after[cut] = 0
        assert torch.equal(before, after)
    own = run.strategy.client_state_dict(1)
    network(2).load_state_dict(method.narrow_state_dict(own, 1, 2))
    x = data.fields[0]
    wide, small = run.strategy.client_module(1).eval(), alone.strategy.client_module(1).eval()
    torch.testing.assert_close(wide(x), small(x))


def test_half_of_the_hidden_units_are_75_of_179_numbers() -> None:
    """9 x 8 + 8 + 8 x 8 + 8 + 8 x 3 + 3, and with fours in the place of eights."""
    full, half = MLP([9, 8, 8, 3]), MLP([9, 4, 4, 3])
    method = HeteroFL({"half": half}, masked_classes=False)
    method.bind(Known.of(ParameterSplit(full), 2))
    for client, numbers in ((0, 179), (1, 75)):
        cut = method.narrow_state_dict(full.state_dict(), client, 0)
        assert sum(leaf.numel() for leaf in cut.values()) == numbers
    half.load_state_dict(cut)


def test_the_full_network_for_all_is_fedavg(engine: str) -> None:
    settings: Any = {"rounds": 2, "engine": engine, "participation": 3}
    method = HeteroFL({"thin": thin(norm=True)}, "full", masked_classes=False)
    run = fit(method, small_clients(), small_module(), **settings)
    expected = fit(FedAvg(weighting="uniform"), small_clients(), small_module(), **settings)
    assert_trees_close(run.server["model"], expected.server["model"], rtol=1e-12)


def hidden_layer(units: int) -> PersonalizedModule:
    """The network of the reference, by plain SGD."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, units), nn.Tanh())
        settings: dict[str, Any] = {"lr": 0.2, "momentum": 0.0, "weight_decay": 0.0}
        return PersonalizedModule(backbone, nn.Linear(units, 3), **settings).double()


def test_three_widths_train_as_the_reference(engine: str) -> None:
    """Of six units clients own all, three or two, and no row of a class that they lack."""
    data, widths = small_clients(shuffle=True), [6, 3, 2, 3, 6]
    narrow = {"half": hidden_layer(3), "third": hidden_layer(2)}
    groups = [{6: "full", 3: "half", 2: "third"}[width] for width in widths]
    run = fit(HeteroFL(narrow, groups), data, hidden_layer(6), 3, engine, participation=3)
    server = {name: leaf.numpy() for name, leaf in hidden_layer(6).state_dict().items()}
    has = {}
    for k, rows in enumerate(data.indices):
        labels = data.fields[1][rows]
        has[k] = np.array([(labels == c).any().item() for c in range(3)])
    assert any(not each.all() for k, each in has.items() if SIZES[k])
    for number, cohort in enumerate(cohorts(3, 3)):
        sent = []
        for k in cohort.tolist():
            batches = softmax.minibatches(data, k, number, epochs=1)
            start = reference.cut(server, widths[k])
            sent.append((has[k], reference.client(start, has[k], batches, 0.2)))
        server = reference.merged(server, sent)
    for name, leaf in server.items():
        np.testing.assert_allclose(run.server["model"][name], leaf, rtol=1e-10)
    for k in range(5):
        if SIZES[k]:
            taken = any(k in cohort.tolist() for cohort in cohorts(3, 3))
            rows = run.models["head.weight"][k][~torch.from_numpy(has[k])]
            assert bool((rows == 0).all()) == (taken or not len(rows))


def test_the_order_of_the_clients_does_not_matter() -> None:
    narrow = {"half": QuadraticModule(dim=2)}

    def run(order: list[int]) -> Any:
        groups = [["full", "half", "half"][k] for k in order]
        data = quadratic_clients([A[k] for k in order], C[order])
        method = HeteroFL(narrow, groups, masked_classes=False)
        return fit(method, data, QuadraticModule(dim=4), 2).server

    assert_trees_close(run([2, 0, 1]), run([0, 1, 2]))


def test_one_owner_keeps_what_it_sends() -> None:
    method = HeteroFL({"half": QuadraticModule(dim=2)}, "half", masked_classes=False)
    run = fit(method, quadratic_clients(A[:1], C[:1]), QuadraticModule(dim=4), 1)
    cut = {"w": run.server["model"]["w"][:2]}
    assert_trees_equal(method.narrow_state_dict(run.server["model"], 0, 0), cut)


@pytest.mark.parametrize(
    ("method", "match"),
    [
        (lambda: HeteroFL(), "networks by name, without 'full', but got narrow=None. Use"),
        (lambda: HeteroFL({"full": thin()}), "networks by name, without 'full'"),
        (lambda: HeteroFL({"thin": thin()}, ["thin", "small"]), "name networks, full, thin, but"),
        (lambda: HeteroFL({"thin": thin()}, rule="last"), "'first', 'rolling' or 'random', but"),  # type: ignore[arg-type]
    ],
)
def test_wrong_settings_are_refused(method: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        method()


@pytest.mark.parametrize(
    ("method", "match"),
    [
        (lambda: HeteroFL({"wide": network(4)}), "to be the module with smaller sizes, but its"),
        (lambda: HeteroFL({"thin": thin()}, ["thin"]), "each of 5 clients, but got 1"),
        (lambda: HeteroFL({}, classifier="backbone"), "a layer with 3 outputs, one per class"),
    ],
)
def test_networks_must_fit(method: Any, match: str) -> None:
    with pytest.raises(Exception, match=match):
        fit(method(), small_clients(), plain_module(), 1)


def test_units_move_in_blocks_of_one_share() -> None:
    narrow: Any = network(2)
    narrow.backbone[5] = nn.Linear(18, 3)
    narrow.head = nn.Linear(3, 3)
    method = HeteroFL({"odd": narrow}, rule="rolling", masked_classes=False)
    with pytest.raises(ValueError, match=r"narrowed by one share, .* but got 3/8, 1/2"):
        fit(method, small_clients(), network(4), 1)


def test_layers_that_mix_channels_are_refused() -> None:
    module: Any = plain_module()
    module.backbone.append(nn.LayerNorm(18).double())
    with pytest.raises(Exception, match=r"treat channels apart, .* backbone.3, a LayerNorm"):
        fit(HeteroFL({}), small_clients(), module, 1)


@pytest.mark.parametrize("rate", [0.0, 1.5])
def test_a_scaler_has_a_rate(rate: float) -> None:
    with pytest.raises(ValueError, match=r"`rate` to be in \(0, 1\], but got rate="):
        Scaler(rate)


def test_a_classifier_that_has_batchnorm_is_refused_by_name() -> None:
    """Its counter of batches has no rows."""
    with pytest.raises(MisconfigurationException, match=r"one per class, but got classifier='back"):
        fit(HeteroFL({}, classifier="backbone"), small_clients(), small_module(), 1)


@pytest.mark.parametrize(("rule", "units"), [("first", [0, 1]), ("rolling", [1, 2])])
def test_new_clients_go_on_with_the_turns_and_the_last_rounds_units(
    rule: Any, units: list[int]
) -> None:
    """Of three clients the full network is the first's and the third's, and the fifth's."""
    method = HeteroFL({"half": QuadraticModule(dim=2)}, rule=rule, masked_classes=False)
    run = fit(method, quadratic_clients(A, C), QuadraticModule(dim=4), 2)
    server = run.server["model"]["w"]
    assert (server != 0).all()
    fourth, fifth = starting_models(run.federation, 2, "personal")["w"]
    assert fourth.nonzero().flatten().tolist() == units
    assert torch.equal(fourth[units], server[units])
    assert torch.equal(fifth, server)


def test_a_list_says_nothing_of_new_clients() -> None:
    method = HeteroFL({"half": QuadraticModule(dim=2)}, ["full"] * 3, masked_classes=False)
    run = fit(method, quadratic_clients(A, C), QuadraticModule(dim=4), 1)
    with pytest.raises(MisconfigurationException, match="which network new clients have, but got"):
        starting_models(run.federation, 1, "personal")
