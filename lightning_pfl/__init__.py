"""Personalized federated learning inside the PyTorch Lightning Trainer.

Importing the package registers ``Trainer(strategy="federated")``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

if TYPE_CHECKING:
    from lightning_pfl.callback import FederatedCallback
    from lightning_pfl.client_modules import ClientModules
    from lightning_pfl.data import FederatedDataModule
    from lightning_pfl.loop import FederatedLoop
    from lightning_pfl.module import PersonalizedModule
    from lightning_pfl.strategy import FederatedStrategy

__version__ = "0.1.0"

__all__ = [
    "FederatedStrategy",
    "FederatedDataModule",
    "PersonalizedModule",
    "ClientModules",
    "FederatedLoop",
    "FederatedCallback",
    "__version__",
]

# Loaded when first used, so that `import lightning_pfl` stays as fast as `import lightning`.
_HOME = {
    "FederatedStrategy": "lightning_pfl.strategy",
    "FederatedDataModule": "lightning_pfl.data",
    "PersonalizedModule": "lightning_pfl.module",
    "ClientModules": "lightning_pfl.client_modules",
    "FederatedLoop": "lightning_pfl.loop",
    "FederatedCallback": "lightning_pfl.callback",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


def _federated() -> FederatedStrategy:
    """Make the strategy that ``Trainer(strategy="federated")`` names."""
    from lightning_pfl.strategy import with_default_method

    return with_default_method()


# `override`: a module that is imported again, as in a notebook, registers itself again.
StrategyRegistry.register(
    "federated", _federated, description="Personalized federated learning", override=True
)
