"""FedBN: everything is averaged but BatchNorm, which is found by type."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.methods import FedAvg, FedBN
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    assert_trees_equal,
    descend,
    fit,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.case import BATCHNORM, WITH_BATCHNORM, Bytes, Case
from tests.methods.quadratics import LR, SAMPLES, STEPS, A, C, close, closed_form, mean, ragged
from tests.methods.references.split import split

CASE = Case(
    method=lambda: FedBN(),
    bytes={
        "defaults": Bytes(
            FedBN, 4 * (WITH_BATCHNORM - BATCHNORM), 4 * (WITH_BATCHNORM - BATCHNORM), small_module
        ),
    },
    twin=lambda: FedAvg(weighting="uniform"),
    published={"weighting": "uniform"},
)

NORM = [
    f"backbone.1.{name}"
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
]


def without_norm() -> PersonalizedModule:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.ReLU(), nn.Flatten())
    return PersonalizedModule(backbone, nn.Linear(18, 3), lr=0.05, momentum=0.9).double()


class TestFedBN:
    @closed_form
    def test_rounds_without_batchnorm_match_the_closed_form(self, engine: str) -> None:
        run = fit(FedBN(local_epochs=2), ragged(), QuadraticModule(2, LR, 0.5), 2, engine)
        w = torch.full((2,), 0.5, dtype=torch.float64)
        for _ in range(2):
            w = mean(descend(w, A, C, LR, 2 * STEPS), SAMPLES > 0)
        close(run.server["model"]["w"], w)

    def test_a_model_without_batchnorm_makes_it_fedavg(self, engine: str) -> None:
        a = fit(FedBN(), small_clients(), without_norm(), 2, engine)
        b = fit(FedAvg(weighting="uniform"), small_clients(), without_norm(), 2, engine)
        assert_trees_equal(a.server, b.server)

    @pytest.mark.parametrize("weighting", ["samples", "uniform"])
    def test_matches_the_reference(self, engine: str, weighting: str) -> None:
        method = FedBN(local_epochs=2, weighting=weighting)  # type: ignore[arg-type]
        run = fit(method, small_clients(), small_module(), 3, engine)
        expected = split(small_module(), small_clients(), 3, NORM, weighting == "samples", 2)
        assert_trees_close(
            run.models, {n: torch.stack([one[n] for one in expected]) for n in expected[0]}
        )

    def test_batchnorm_differs_between_clients_and_the_rest_is_equal(self, engine: str) -> None:
        models = fit(FedBN(), small_clients(), small_module(), 1, engine).models
        for name, leaf in models.items():
            same = torch.equal(leaf[0], leaf[3])
            assert same == (name not in NORM), name

    def test_a_client_that_never_took_part_has_the_initial_batchnorm(self, engine: str) -> None:
        models = fit(FedBN(), small_clients(), small_module(), 2, engine).models
        start = small_module().state_dict()
        assert all(torch.equal(models[name][1], start[name]) for name in NORM)


def test_layers_are_found_by_type_and_not_by_name() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bnb = nn.Linear(2, 2)
            self.downsample = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))
            self.flat, self.deep = nn.BatchNorm1d(2), nn.BatchNorm3d(1)
            self.layer, self.group = nn.LayerNorm(2), nn.GroupNorm(1, 2)

    personal = ParameterSplit(Net(), FedBN.personal).personal
    assert {name.rsplit(".", 1)[0] for name in personal} == {"downsample.1", "flat", "deep"}
    assert len(personal) == 3 * 5
