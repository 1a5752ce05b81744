"""Every public constructor says what it expected, whatever it is given."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl import ClientModules, data, graphs, methods, models
from lightning_pfl.core.argument_types import kind_of
from lightning_pfl.models import base
from lightning_pfl.models.adapters import LowRank
from tests.methods.cases import ALL

PACKAGES = ("", ".callbacks", ".data", ".graphs", ".inspect", ".methods", ".models", ".priors")
MLP = models.MLP([4, 3])
#: The arguments that a constructor can't do without.
NEEDED: dict[Any, dict[str, Any]] = {
    data.FederatedDataModule: {"source": data.Digits()},
    data.FreshDataModule: {"source": data.LinearRepresentation()},
    data.FederatedTensorDataset: {"fields": (torch.zeros(2, 1),), "indices": [[0], [1]]},
    data.HeldOutClasses: {"classes": [1], "new_clients": 2},
    data.WholeGroups: {"column": "day"},
    data.HuggingFaceTable: {"path": "table", "features": "x", "label": "y"},
    models.MLPBackbone: {"sizes": [4, 3]},
    ClientModules: {"modules": {"a": MLP}},
    data.FederatedLoaders: {"loaders": [DataLoader(TensorDataset(torch.zeros(2, 1)))]},
    graphs.KNearest: {"features": np.zeros((3, 2))},
    models.MLP: {"sizes": [4, 3]},
    models.LinearRepresentation: {"num_inputs": 3, "num_features": 2},
    models.SquaredHingeClassifier: {"num_inputs": 3},
    models.Adapter: {"channels": 3},
    LowRank: {"layer": nn.Linear(4, 4)},
    base.PersonalizedModule: {"backbone": nn.Linear(2, 2), "head": nn.Linear(2, 2)},
} | {
    getattr(methods, name): dict(
        zip(inspect.signature(getattr(methods, name)).parameters, case.needed, strict=False)
    )
    for name, case in ALL.items()
}
#: Nothing of ours: no sample of them, or Lightning's own arguments, which the Trainer sets.
LIGHTNINGS = {
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
}


def public() -> Iterator[type]:
    for package in PACKAGES:
        home = import_module(f"lightning_pfl{package}")
        for name in home.__all__:
            found = getattr(home, name)
            if inspect.isclass(found) and not inspect.isabstract(found):
                yield found


#: What the library makes and no user, and what has no plain arguments.
INNER = {"FederatedLoop", "FlowerPartitioner", "Graph", "SourceData"}
CLASSES = [
    cls
    for cls in sorted({*public(), *NEEDED}, key=lambda cls: cls.__qualname__)
    if cls.__name__ not in INNER and cls.__init__ is not object.__init__
]
#: Checked where the module, the clients or the graph are known, which is in `fit`. Names are
#: of any type.
LATER = {"names", "column", "graph", "maps", "personal", "shared", "scope", "parameters"}
LATER |= {"classifier"}


def arguments(cls: type) -> Iterator[tuple[str, bool]]:
    """The arguments of a constructor, and whether they have only plain types."""
    hints = get_type_hints(cls.__init__)  # type: ignore[misc]
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD and name not in LIGHTNINGS:
            yield name, kind_of(hints.get(name)) is not None


#: A second of arithmetic in each constructor.
SLOW = ("AlexNetBN", "AlexNetBackbone")
WRONG = [object(), 1j, b"x", [None], torch.tensor(0.5)]
ODD = ["no such", None, math.nan, math.inf, -1, 0, 2.5, [], {}, ["x"], True, np.int64(2)]


def error_of(cls: Callable[..., Any], name: str, value: Any) -> str | None:
    """Return the error's text; None if there is none."""
    try:
        cls(**{**NEEDED.get(cls, {}), name: value})
    except (TypeError, ValueError, MisconfigurationException, FileNotFoundError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("cls", CLASSES)
def test_what_is_refused_is_refused_in_a_sentence(cls: type) -> None:
    """Also values that are right for some arguments, such as -1, and those of NumPy."""
    some = WRONG if cls.__name__ in SLOW else [*WRONG, *ODD]
    for name, _ in arguments(cls):
        for value in some:
            text = error_of(cls, name, value) or "Expected, but got"
            assert re.search("Expected.* got", text, re.DOTALL), (name, value, text)


@pytest.mark.parametrize("cls", CLASSES)
def test_what_is_of_no_such_type_is_refused_by_name(cls: type) -> None:
    """Where the annotation has only plain types: numbers, flags, texts, choices, lists of them."""
    for name, plain in arguments(cls):
        for value in WRONG:
            if plain and name not in LATER:
                text = error_of(cls, name, value)
                assert f"`{name}`" in (text or "nothing is wrong"), (name, value, text)
