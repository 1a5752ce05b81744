"""Arguments that would have no effect are refused, in all constructors that have some."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pfl import methods
from lightning_pfl.callbacks import HeadFineTuning, NewClientAdaptation
from lightning_pfl.core.checks import check_used
from lightning_pfl.data import FeatureSkew, FedMAPSynthetic
from lightning_pfl.models import MLP
from lightning_pfl.models.base import PersonalizedModule

MAPS = {(0, 1): torch.ones(1, 1)}
NARROW = {"half": nn.Linear(1, 1)}
EXACT = [
    ("local_epochs", 3, {"local_solver": "exact"}),
    ("local_steps", 3, {"local_solver": "exact"}),
]
#: A constructor with what it needs; an argument, a value that isn't the default, and other
#: arguments that leave it without an effect.
IDLE: list[tuple[Callable[..., Any], str, Any, dict[str, Any]]] = [
    (methods.FedASA, "share", 0.2, {}),
    (methods.FedASA, "share", 0.2, {"rule": "all"}),
    (methods.FedASA, "threshold", 0.2, {"rule": "random"}),
    (methods.FedASA, "every", 2, {"rule": "all"}),
    (methods.FedASA, "cells", ["head"], {"rule": "all"}),
    (methods.FedMD, "temperature", 2.0, {}),
    (partial(methods.HeteroFL, NARROW), "classifier", "fc", {"masked_classes": False}),
    (methods.IFCA, "trial_rounds", 3, {}),
    (methods.LinearFedRep, "head_lr", 0.1, {}),
    (methods.LinearFedRep, "ridge", 0.1, {"head_solver": "gradient"}),
    (methods.PerFedAvg, "difference", 0.1, {}),
    (partial(methods.HomologicalConstraints, "ring"), "map_std", 0.1, {}),
    (partial(methods.SheafFMTL, "ring"), "map_std", 0.1, {"maps": "identity"}),
    (partial(methods.SheafFMTL, "ring"), "edge_dim_ratio", 0.3, {"maps": MAPS}),
    *((methods.ConvexClustering, *each) for each in EXACT),
    *((methods.FedSplit, *each) for each in EXACT),
    *((methods.SquaredPenalty, *each) for each in EXACT),
    *((partial(methods.GTVMin, "ring"), *each) for each in EXACT),
    (partial(MLP, [4, 3]), "lr", 0.1, {"optimizer": torch.optim.SGD}),
    (partial(MLP, [4, 3]), "lr", 0.1, {"backbone_lr": 0.2, "head_lr": 0.3}),
    (partial(MLP, [4, 3]), "weight_decay", 0.1, {"optimizer": torch.optim.SGD}),
    (partial(MLP, [4, 3]), "momentum", 0.9, {"optimizer": "adam"}),
    (HeadFineTuning, "penalty_weight", 0.5, {}),
    (partial(NewClientAdaptation, samples=[0]), "epochs", 3, {}),
    (partial(NewClientAdaptation, samples=[0]), "lr", 0.1, {}),
    (FeatureSkew, "max_angle", 30.0, {}),
    (FeatureSkew, "offset", 1.0, {"kind": "rotate"}),
    (FedMAPSynthetic, "majority_share", 0.6, {}),
    (FedMAPSynthetic, "small_samples", 100, {"scenario": "label"}),
    (FedMAPSynthetic, "skewed_clients", 2, {"scenario": "feature"}),
    (FedMAPSynthetic, "offset", 1.0, {"scenario": "iid"}),
]


@pytest.mark.parametrize(("make", "name", "value", "others"), IDLE)
def test_an_argument_without_effect_is_refused(
    make: Callable[..., Any], name: str, value: Any, others: dict[str, Any]
) -> None:
    given = re.escape(f"{name}={value!r}")
    with pytest.raises(ValueError, match=f"Expected `{name}` with .* only, .* but got {given}"):
        make(**others, **{name: value})
    # Its default is what a recipe that writes out everything has.
    kind: Any = make.func if isinstance(make, partial) else make
    kind = PersonalizedModule if kind is MLP else kind
    make(**others, **{name: signature(kind).parameters[name].default})


@pytest.mark.parametrize("settings", [{"optimizer": "adam"}, {"optimizer": torch.optim.SGD}])
def test_0_is_no_setting_of_a_module_that_needs_an_effect(settings: dict[str, Any]) -> None:
    assert MLP([4, 3], momentum=0.0, weight_decay=0.0, **settings).hparams["momentum"] == 0
    assert MLP([4, 3], backbone_lr=0.2, lr=0.0, head_lr=0.3, **settings).hparams["lr"] == 0


def test_an_argument_with_an_effect_is_taken() -> None:
    def init(share: float = 0.5) -> None: ...

    check_used(init, {"share": 0.2}, True, "rule='random'")
    check_used(init, {"share": 0.5}, False, "rule='random'")
    with pytest.raises(ValueError, match=r"share=0\.2\. Leave it out, or use rule='random'\."):
        check_used(init, {"share": 0.2}, False, "rule='random'")
