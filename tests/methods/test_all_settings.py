"""Settings that make a method another one are said; numbers that no run could use are refused."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pfl import methods
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.methods.base import Method
from tests.methods.cases import ALL
from tests.trainer.setting import classes, network, trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("method", "note"),
    [
        (methods.FedProx(0.0), "prox_weight=0 makes FedProx FedAvg."),
        (methods.FedPer(personal=None), "Nothing is personal, which makes FedPer FedAvg."),
        (methods.FedPer(personal=[]), "Nothing is personal, which makes FedPer FedAvg."),
        (methods.FedPer(personal="all"), "Everything is personal, which makes FedPer LocalOnly."),
        (methods.FedRep(personal=None), "Nothing is personal, which makes FedRep FedAvg, of the"),
        (methods.FedRep(personal="all"), "Everything is personal, which makes FedRep local train"),
        (methods.LGFedAvg(shared="all"), "Nothing is personal, which makes LGFedAvg FedAvg."),
        (methods.LGFedAvg(shared=[]), "Everything is personal, which makes LGFedAvg LocalOnly."),
        (methods.Ditto(0.0), "prox_weight=0 makes Ditto LocalOnly besides FedAvg."),
        (methods.L2GD(0.0), "mixing_weight=0 makes L2GD LocalOnly."),
        (methods.FedMTL(0.0), "regularization=0 makes FedMTL LocalOnly."),
        (methods.PerFedAvg(0.0), "inner_lr=0 makes PerFedAvg FedAvg."),
        (methods.FedAvg(local_steps=0), "All local epochs and steps are 0: clients train nothing."),
        (methods.FedRep(head_epochs=0, body_epochs=0), "All local epochs and steps are 0: client"),
        # Its pass that measures the models is no training.
        (
            methods.IFCA(2, local_epochs=0),
            "All local epochs and steps are 0: clients train nothing.",
        ),
    ],
)
def test_the_log_says_what_a_method_has_become(
    method: Method, note: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(method, max_epochs=1)
    with caplog.at_level(logging.INFO):
        run.fit(network(), classes(2)[0])
    assert sum(record.getMessage().startswith(note) for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (partial(methods.FedDF, server_steps=0, server_lr=0.1), "server_lr"),
        (partial(methods.PerAda, server_steps=0, temperature=2.0), "temperature"),
        (partial(methods.PerAda, distil_rounds=0, server_steps=3), "server_steps"),
        (partial(methods.FedMD, digest_epochs=0, digest_weight=2.0), "digest_weight"),
        (partial(methods.FedMD, digest_weight=0.0, distance="l2"), "distance"),
        (partial(methods.FedRep, head_epochs=0, head_lr=0.1), "head_lr"),
        (partial(methods.FedRep, body_steps=0, body_lr=0.1), "body_lr"),
        (partial(methods.MOCHA, outer_iterations=0, inner_iterations=3), "inner_iterations"),
    ],
)
def test_settings_of_a_part_that_is_off_are_refused(make: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"Expected `{name}` with .* only, as it has no effect"):
        make()


WITH_STEPS = [
    name
    for name in methods.__all__
    if "local_steps" in inspect.signature(getattr(methods, name)).parameters
]
NEEDED = {name: case.needed for name, case in ALL.items()}


@pytest.mark.parametrize("name", WITH_STEPS)
def test_steps_alone_replace_the_default_epoch_and_the_other_way_round(name: str) -> None:
    make = partial(getattr(methods, name), *NEEDED[name])
    method = make(local_steps=5)
    assert (method.local_epochs, method.local_steps) == (None, 5)
    method = make(local_epochs=3)
    assert (method.local_epochs, method.local_steps) == (3, None)
    for both in ((3, 5), (None, None)):
        with pytest.raises(ValueError, match="Expected exactly one of `local_epochs` and"):
            make(local_epochs=both[0], local_steps=both[1])


WITH_WEIGHTS = [
    name
    for name in methods.__all__
    if "weighting" in inspect.signature(getattr(methods, name)).parameters
]


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_an_unknown_weighting_is_refused(name: str) -> None:
    match = r"Expected `weighting` to be .*'samples' .*, but got weighting='size'"
    with pytest.raises(ValueError, match=match):
        getattr(methods, name)(*NEEDED[name], weighting="size")


def test_fedbn_without_batchnorm_says_so_and_with_it_doesnt() -> None:
    method = methods.FedBN()
    plain = nn.Linear(2, 2)
    parameter_split = ParameterSplit(plain, method.resolve_personal(ParameterSplit(plain)))
    assert method.notes(parameter_split) == ["Nothing is personal, which makes FedBN FedAvg."]
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert method.notes(ParameterSplit(net, method.resolve_personal(ParameterSplit(net)))) == []


@pytest.mark.parametrize(
    ("norms", "spec"),
    [
        ([nn.LayerNorm(2)], "torch.nn.LayerNorm"),
        ([nn.LayerNorm(2), nn.GroupNorm(1, 2)], "[torch.nn.GroupNorm, torch.nn.LayerNorm]"),
    ],
)
def test_fedbn_names_the_method_that_keeps_other_normalisation_layers(
    norms: list[nn.Module], spec: str
) -> None:
    method = methods.FedBN()
    net = nn.Sequential(nn.Linear(2, 2), *norms)
    (note,) = method.notes(ParameterSplit(net, method.resolve_personal(ParameterSplit(net))))
    assert note == (
        "Nothing is personal, which makes FedBN FedAvg. For other normalisation "
        f"layers use FedPer(personal={spec})."
    )
    kept = methods.FedPer(personal=eval(spec, {"torch": torch}))
    parameter_split = ParameterSplit(net, kept.resolve_personal(ParameterSplit(net)))
    norm_names = {f"{k}.{w}" for k in range(1, len(norms) + 1) for w in ("weight", "bias")}
    assert parameter_split.personal == norm_names


def test_fedbn_offers_no_normalisation_layer_that_has_nothing_to_keep() -> None:
    method = methods.FedBN()
    net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2, elementwise_affine=False))
    parameter_split = ParameterSplit(net, method.resolve_personal(ParameterSplit(net)))
    assert method.notes(parameter_split) == ["Nothing is personal, which makes FedBN FedAvg."]


@pytest.mark.parametrize(
    "method",
    [methods.FedProx(0.1), methods.FedPer(), methods.FedRep(), methods.LGFedAvg(), methods.Ditto()],
)
def test_a_method_that_is_itself_says_nothing(method: Method) -> None:
    module = network()
    assert (
        method.notes(ParameterSplit(module, method.resolve_personal(ParameterSplit(module)))) == []
    )


def given(bad: Any) -> str:
    """How an error repeats a value, as a pattern."""
    return re.escape(repr(bad))


@pytest.mark.parametrize("bad", [-1.0, INF, NAN, "0.5", [0.5], True, torch.tensor(0.5)], ids=repr)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (methods.FedMAP, "prior_lr"),
        (methods.LinearFedRep, "body_lr"),
        (methods.LinearFedRep, "head_lr"),
        (methods.LinearFedRep, "ridge"),
        (methods.MOCHA, "regularization"),
        (methods.MOCHA, "local_fraction"),
        (methods.PFedMe, "moreau_weight"),
        (methods.PFedMe, "server_mixing"),
        (methods.FedProx, "prox_weight"),
        (methods.Ditto, "prox_weight"),
        (methods.FedRep, "head_lr"),
        (methods.FedRep, "body_lr"),
        (methods.FedMTL, "regularization"),
        (methods.L2GD, "mixing_weight"),
        (methods.PerFedAvg, "inner_lr"),
        (methods.PerFedAvg, "difference"),
        (methods.PFedMe, "inner_lr"),
        (methods.SCAFFOLD, "server_lr"),
    ],
)
def test_numbers_that_reject_every_client_are_refused(
    make: Callable[..., Any], name: str, bad: Any
) -> None:
    match = rf"Expected `{name}` to be a finite number .*{name}={given(bad)}"
    with pytest.raises(ValueError, match=match):
        make(**{name: bad})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (methods.PFedMe, "moreau_weight"),
        (methods.PFedMe, "inner_lr"),
        (methods.PFedMe, "server_mixing"),
        (methods.SCAFFOLD, "server_lr"),
    ],
)
def test_numbers_that_do_nothing_at_zero_are_above_it(make: Callable[..., Any], name: str) -> None:
    match = f"Expected `{name}` to be a finite number > 0, but got {name}=0.0"
    with pytest.raises(ValueError, match=match):
        make(**{name: 0.0})


@pytest.mark.parametrize("bad", [-0.5, 1.5, NAN, None, "0.5", True, torch.tensor(0.5)], ids=repr)
@pytest.mark.parametrize(
    ("make", "name"),
    [(methods.APFL, "mixing"), (methods.L2GD, "aggregation_probability")],
)
def test_shares_are_numbers_between_0_and_1(make: Callable[..., Any], name: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"Expected `{name}` to be .*{name}={given(bad)}"):
        make(**{name: bad})


@pytest.mark.parametrize("bad", [0, 1.5, True, None, "1"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (methods.PerFedAvg, "evaluation_steps"),
        (methods.PFedMe, "inner_steps"),
        (methods.LinearFedRep, "head_steps"),
        (methods.MOCHA, "inner_iterations"),
    ],
)
def test_counts_are_whole_numbers_from_1(make: Callable[..., Any], name: str, bad: Any) -> None:
    match = rf"Expected `{name}` to be a whole number >= 1, .*{name}={given(bad)}"
    with pytest.raises(ValueError, match=match):
        make(**{name: bad})


def test_settings_are_the_plain_arguments_and_the_optimizer_by_name() -> None:
    assert methods.FedProx(0.5).settings() == {
        "prox_weight": "0.5",
        "local_epochs": "1",
        "local_steps": "None",
        "weighting": "'samples'",
    }
    adam = methods.FedAvg(server_optimizer=lambda p: torch.optim.Adam(p, lr=0.5)).settings()
    assert (adam["server_optimizer"], adam["server_optimizer.lr"]) == ("Adam", "0.5")
    assert methods.FedAvg().settings()["server_optimizer"] == "None"
