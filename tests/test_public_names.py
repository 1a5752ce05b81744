"""The names that packages export are what they say, whatever was imported before."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import lightning_pfl
from lightning_pfl import FederatedCallback, callbacks, inspect

MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(lightning_pfl.__path__, "lightning_pfl.")
    if not found.name.endswith("__main__")
)
PACKAGES = [
    name
    for name in ("lightning_pfl", *MODULES)
    if hasattr(importlib.import_module(name), "__path__")
]


def test_the_packages_are_found() -> None:
    wanted = ("methods", "priors", "data", "models", "callbacks", "inspect", "solvers", "metrics")
    assert {"lightning_pfl", *(f"lightning_pfl.{name}" for name in wanted)} <= set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_export_is_hidden_by_a_module_of_its_name(package: str) -> None:
    for name in MODULES:
        importlib.import_module(name)
    module = importlib.import_module(package)
    for name in getattr(module, "__all__", ()):
        assert not isinstance(getattr(module, name), ModuleType), f"{package}.{name} is a module"
        assert name in dir(module)


@pytest.mark.parametrize(
    "package", ["lightning_pfl", "lightning_pfl.solvers", "lightning_pfl.metrics"]
)
def test_other_names_are_not_there(package: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        importlib.import_module(package).nothing  # noqa: B018


def test_callbacks_has_every_monitor() -> None:
    monitors = {
        name
        for name in inspect.__all__
        if isinstance(getattr(inspect, name), type)
        and issubclass(getattr(inspect, name), FederatedCallback)
    }
    assert len(monitors) >= 8
    assert monitors <= set(callbacks.__all__)


HEAVY = {
    "torchvision",
    "datasets",
    "tensorboard",
    "sklearn",
    "matplotlib",
    "scipy",
    "networkx",
    "pandas",
}
HEAVY_IMPORTS = """
import json, sys
import lightning
before = set(sys.modules)
import lightning_pfl, lightning_pfl.methods, lightning_pfl.data
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.mark.slow
def test_importing_the_package_loads_nothing_heavy_that_lightning_does_not() -> None:
    result = subprocess.run(
        [sys.executable, "-c", HEAVY_IMPORTS], check=True, capture_output=True, text=True
    )
    loaded = {name.split(".")[0] for name in json.loads(result.stdout.splitlines()[-1])}
    assert "lightning_pfl" in loaded
    assert sorted(loaded & HEAVY) == []
