"""Personalized federated learning inside the PyTorch Lightning Trainer.

Importing the package registers ``Trainer(strategy="federated")``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.strategies import StrategyRegistry

from lightning_pfl.core.lazy import lazy_names

if TYPE_CHECKING:
    from lightning_pfl.contract.callback import FederatedCallback
    from lightning_pfl.data import FederatedDataModule
    from lightning_pfl.federation.load import load_clients
    from lightning_pfl.models.base import PersonalizedModule
    from lightning_pfl.models.client_modules import ClientModules
    from lightning_pfl.results.clients import read_clients
    from lightning_pfl.results.comparison import compare
    from lightning_pfl.trainer.fit_loop import FederatedLoop
    from lightning_pfl.trainer.strategy import FederatedStrategy

__version__ = "0.1.0"

__all__ = [
    "FederatedStrategy",
    "FederatedDataModule",
    "PersonalizedModule",
    "ClientModules",
    "FederatedLoop",
    "FederatedCallback",
    "load_clients",
    "read_clients",
    "compare",
    "__version__",
]

# Imported on first use, so that `import lightning_pfl` stays as fast as `import lightning`.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "FederatedStrategy": "lightning_pfl.trainer.strategy",
        "FederatedDataModule": "lightning_pfl.data",
        "PersonalizedModule": "lightning_pfl.models.base",
        "ClientModules": "lightning_pfl.models.client_modules",
        "FederatedLoop": "lightning_pfl.trainer.fit_loop",
        "FederatedCallback": "lightning_pfl.contract.callback",
        "load_clients": "lightning_pfl.federation.load",
        "read_clients": "lightning_pfl.results.clients",
        "compare": "lightning_pfl.results.comparison",
    },
)


def _federated() -> FederatedStrategy:
    """Make the strategy of ``Trainer(strategy="federated")``."""
    from lightning_pfl.trainer.strategy import with_default_method

    return with_default_method()


# `override`, since a reloaded module, as in a notebook, registers itself again.
StrategyRegistry.register(
    "federated", _federated, description="Personalized federated learning", override=True
)
