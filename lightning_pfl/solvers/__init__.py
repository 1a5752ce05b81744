"""Mathematics shared by two or more methods, and direct solvers to compare methods with."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_pfl.solvers.losses import ClientLosses, Losses
    from lightning_pfl.solvers.newton import newton, proximal_newton
    from lightning_pfl.solvers.pairs import Pairs
    from lightning_pfl.solvers.sum_of_norms import (
        Solution,
        SumOfNorms,
        regularization_path,
        solve_squared,
    )

__all__ = [
    "ClientLosses",
    "Losses",
    "Pairs",
    "Solution",
    "SumOfNorms",
    "newton",
    "proximal_newton",
    "regularization_path",
    "solve_squared",
]

HOMES = {
    "ClientLosses": "losses",
    "Losses": "losses",
    "Pairs": "pairs",
    "Solution": "sum_of_norms",
    "SumOfNorms": "sum_of_norms",
    "newton": "newton",
    "proximal_newton": "newton",
    "regularization_path": "sum_of_norms",
    "solve_squared": "sum_of_norms",
}


def __getattr__(name: str) -> Any:
    """Load a solver when it is asked for: methods need few of them."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"lightning_pfl.solvers.{HOMES[name]}"), name)
