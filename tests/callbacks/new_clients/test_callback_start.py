"""What new clients begin with, after how many passes they are evaluated, what is written of them.

The setting is that of test_callback.py: the loss of client k is a_k/2 (v + h - c_k)^2 with the
backbone v frozen, so a head follows h -> (c - v) + (1 - lr a)^steps (h - (c - v)).
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from lightning_pfl.callbacks import NewClientAdaptation
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.federation.new_clients import starting_models
from lightning_pfl.methods import (
    APFL,
    CFL,
    IFCA,
    L2GD,
    ClusterOracle,
    FedAvg,
    FedPer,
    FedRep,
    FedU,
    LGFedAvg,
)
from lightning_pfl.testing import QuadraticModule, descend, fit, quadratic_clients
from tests.callbacks.setting import (
    BATCH,
    LR,
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

CURVATURES = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
CENTERS = torch.tensor([5.0, -1.0, 2.0], dtype=torch.float64)
SIZES = (7, 4, 6)


def new_clients() -> tuple[FederatedTensorDataset, FederatedTensorDataset]:
    return (
        quadratic_clients(CURVATURES, CENTERS, SIZES, BATCH, shuffle=True),
        quadratic_clients(CURVATURES, CENTERS, (1, 2, 3), BATCH),
    )


def head_after(start: Tensor, backbone: Tensor, client: int, steps: int) -> Tensor:
    target = CENTERS[client : client + 1] - backbone
    return descend(start, CURVATURES[client], target, LR, steps)


# --- several numbers of passes --------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_each_number_of_passes_follows_the_closed_form(engine: str) -> None:
    adaptation = NewClientAdaptation(new_clients(), samples=[2, 5], epochs=[3, 1])
    run = trainer(FedRep(head_epochs=2), adaptation, max_epochs=2, engine=engine)
    run.fit(split(), quadratics())
    backbone = run.strategy.client_state_dict(0)["backbone.weight"]
    found = [(adapted.samples, adapted.epochs) for adapted in adaptation.results]
    assert found == [(2, 1), (2, 3), (5, 1), (5, 3)]
    start = torch.tensor([-0.25], dtype=torch.float64)
    for adapted, (m, epochs) in zip(adaptation.results, found, strict=True):
        assert epochs is not None
        losses = []
        for client, size in enumerate(SIZES):
            want = head_after(start, backbone, client, epochs * steps_of(min(m, size)))
            got = adapted.models["head.weight"][client]
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
            offset = backbone + want - CENTERS[client]
            losses.append(float(CURVATURES[client] / 2 * offset.square().sum()))
        mean = sum(losses) / len(losses)
        key = f"new_clients/loss@{m}/epoch{epochs}"
        assert float(run.callback_metrics[key]) == pytest.approx(mean, rel=1e-6)
        assert float(run.callback_metrics[f"{key}/worst"]) == pytest.approx(max(losses), rel=1e-6)


def test_fewer_passes_are_the_beginning_of_more() -> None:
    """With shuffled batches and momentum, three passes in a list are three passes alone."""
    new = classes(7, shuffle=True)
    heads = []
    for epochs in ([1, 3], 3):
        adaptation = NewClientAdaptation(new, samples=[9], epochs=epochs)
        trainer(FedPer(), adaptation, engine="vectorized").fit(network(), classes(shuffle=True)[0])
        heads.append(adaptation.results[-1].models["head.weight"])
    assert torch.equal(heads[0], heads[1])


def test_no_samples_are_evaluated_once_beside_a_list_of_passes() -> None:
    adaptation = NewClientAdaptation(new_clients(), samples=[0, 2], epochs=[1, 2], scope="head")
    run = trainer(FedAvg(), adaptation)
    run.fit(split(), quadratics())
    assert [(a.samples, a.epochs) for a in adaptation.results] == [(0, None), (2, 1), (2, 2)]
    assert "new_clients/loss@0" in run.callback_metrics
    assert "new_clients/loss@0/epoch1" not in run.callback_metrics


# --- what new clients begin with ------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [APFL(mixing=0.5), L2GD(mixing_weight=1.0, local_steps=2)], ids=["APFL", "L2GD"]
)
def test_start_global_begins_with_the_servers_model(method: Any) -> None:
    adaptation = NewClientAdaptation(
        new_clients(), samples=[0, 4], steps=3, scope="head", start="global"
    )
    run = trainer(method, adaptation, max_epochs=4)
    run.fit(split(), quadratics())
    server = run.strategy.server["model"]
    before, after = adaptation.results
    for name, leaf in server.items():
        assert all(torch.equal(row, leaf) for row in before.models[name])
    for client in range(3):
        assert torch.equal(after.models["backbone.weight"][client], server["backbone.weight"])
        want = head_after(server["head.weight"], server["backbone.weight"], client, 3)
        got = after.models["head.weight"][client]
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


# Of 16 bytes a model: all four at a time, one, or three and one.
@pytest.mark.parametrize("together", [2**27, 1, 48])
def test_start_mean_begins_with_the_mean_of_the_clients_models(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_pfl.federation.new_clients.TOGETHER", together)
    adaptation = NewClientAdaptation(
        new_clients(), samples=[0, 4], steps=3, scope="head", start="mean"
    )
    run = trainer(LGFedAvg(), adaptation, max_epochs=2)
    run.fit(split(), quadratics())
    models = [run.strategy.client_state_dict(k) for k in range(4)]
    mean = {name: torch.stack([state[name] for state in models]).mean(0) for name in models[0]}
    before, after = adaptation.results
    for client in range(3):
        for name, leaf in mean.items():
            torch.testing.assert_close(before.models[name][client], leaf, rtol=1e-14, atol=1e-14)
        backbone = before.models["backbone.weight"][client]
        assert torch.equal(after.models["backbone.weight"][client], backbone)
        want = head_after(mean["head.weight"], mean["backbone.weight"], client, 3)
        got = after.models["head.weight"][client]
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_start_mean_keeps_types_and_counts_of_batches() -> None:
    adaptation = NewClientAdaptation(classes(3), samples=[4], scope="head", start="mean")
    run = trainer(FedPer(), adaptation, engine="vectorized")
    module = network()
    run.fit(module, classes()[0])
    models = adaptation.results[0].models
    for name, leaf in module.state_dict().items():
        assert (models[name].dtype, models[name].shape[1:]) == (leaf.dtype, leaf.shape)
    batches = [
        run.strategy.client_state_dict(k)["backbone.1.num_batches_tracked"] for k in range(5)
    ]
    assert models["backbone.1.num_batches_tracked"].tolist() == [max(batches)] * 3


# Client 0 is alone, the other three are alike.
GROUPS = ([-3.0], [3.0], [3.0], [3.0])


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        (FedU("complete", 0.01, local_epochs=8), [1 / 4] * 4),
        (CFL(10.0, 0.01, start_round=0, local_epochs=8), [0, 1 / 3, 1 / 3, 1 / 3]),
        (
            IFCA(2, initial=[{"w": torch.tensor([w]).double()} for w in (-2.0, 2.0)]),
            [0, 1 / 3, 1 / 3, 1 / 3],
        ),
        (ClusterOracle([3, 1, 1, 1], local_epochs=8), [0, 1 / 3, 1 / 3, 1 / 3]),
        # New clients have ids 4 and 5.
        (ClusterOracle(lambda k: int(k not in (0, 4, 5)), local_epochs=8), [1, 0, 0, 0]),
    ],
    ids=["FedU", "CFL", "IFCA", "ClusterOracle", "ClusterOracle by a function"],
)
def test_a_new_client_is_none_of_the_old_ones(method: Any, weights: list[float]) -> None:
    """Row 0 of the new clients isn't client 0: it begins with the mean, or the largest cluster."""
    run = fit(method, quadratic_clients([1.0] * 4, GROUPS), QuadraticModule(), 3)
    models = run.models["w"]
    assert abs(float(models[0] - models[1])) > 1
    start = starting_models(run.strategy.federation, 2, "personal")["w"]
    mean = torch.tensor(weights, dtype=torch.float64) @ models
    torch.testing.assert_close(start, mean.expand(2, 1), rtol=1e-12, atol=1e-12)


def test_a_new_client_of_an_unknown_cluster_is_refused() -> None:
    method = ClusterOracle(lambda k: 7 if k >= 4 else k % 2)
    run = fit(method, quadratic_clients([1.0] * 4, GROUPS), QuadraticModule(), 1)
    with pytest.raises(
        ValueError, match=r"new client 4 into one of the clusters \[0, 1\], but got 7"
    ):
        starting_models(run.strategy.federation, 2, "personal")


# --- what is written ------------------------------------------------------------------------------


def test_models_are_written_and_load_as_plain_state_dicts(tmp_path: Path) -> None:
    adaptation = NewClientAdaptation(
        classes(3, shuffle=True), samples=[4, 8], epochs=[1, 2], save_models=True
    )
    run = trainer(FedPer(), adaptation, engine="vectorized", logger=CSVLogger(tmp_path))
    run.fit(network(), classes(shuffle=True)[0])
    shared = run.strategy.server["model"]
    for adapted in adaptation.results[1::2]:
        assert adapted.epochs == 2
        path = Path(str(run.log_dir)) / f"new_clients@{adapted.samples}.pt"
        written = torch.load(path, weights_only=True)
        assert list(written) == ["0", "1", "2"]
        for client, state in enumerate(written.values()):
            network(1).load_state_dict(state)
            assert torch.equal(state["head.weight"], adapted.models["head.weight"][client])
            assert all(torch.equal(state[name], leaf) for name, leaf in shared.items())


def test_passes_are_a_column_and_a_curve(tmp_path: Path) -> None:
    adaptation = NewClientAdaptation(classes(3), samples=[4], epochs=[1, 2])
    run = trainer(FedPer(), adaptation, logger=TensorBoardLogger(tmp_path))
    run.fit(network(), classes()[0])
    folder = Path(str(run.log_dir))
    with (folder / "new_clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["epochs"], row["client"]) for row in rows] == [
        (epochs, client) for epochs in "12" for client in "012"
    ]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run.loggers[0].finalize("success")
    curve = EventAccumulator(str(folder)).Reload().Scalars("new_clients/acc@4/epochs")
    want = {k: float(run.callback_metrics[f"new_clients/acc@4/epoch{k}"]) for k in (1, 2)}
    assert {event.step: event.value for event in curve} == pytest.approx(want, rel=1e-6)


# --- wrong arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": []}, r"a whole number or different whole numbers, but got epochs=\[\]"),
        ({"epochs": [2, 2]}, r"but got epochs=\[2, 2\]"),
        ({"epochs": [0, 2]}, "Expected new clients to train, but got no epochs and no steps"),
        ({"epochs": [1.5]}, "Expected `epochs` to be a whole number >= 0, but got epochs=1.5"),
        ({"epochs": [1], "steps": 3}, "exactly one of `epochs` and `steps`"),
        ({"start": "zero"}, "Expected `start` to be one of .*, but got start='zero'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NewClientAdaptation(**arguments)


def test_start_global_needs_a_global_model() -> None:
    run = trainer(FedRep(head_epochs=2), NewClientAdaptation(new_clients(), start="global"))
    with pytest.raises(Exception, match="a global model for start='global', but FedRep has none"):
        run.fit(split(), quadratics())
    assert run.global_step == 0


def test_mixed_outputs_are_not_one_state_dict_to_save() -> None:
    adaptation = NewClientAdaptation(classes(3), scope="head", save_models=True)
    run = trainer(APFL(mix="outputs"), adaptation)
    with pytest.raises(Exception, match="for save_models=True, but APFL mixes the outputs of two"):
        run.fit(network(), classes()[0])
    assert run.global_step == 0
