"""Every client's evaluated values, as pictures take them from an evaluation."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor

from lightning_pfl.contract.records import ClientResults
from lightning_pfl.core.argument_types import check_types
from lightning_pfl.federation.evaluate import direction


def check_metrics(metrics: Sequence[str]) -> tuple[str, ...]:
    """Return the names of evaluated values; raise ValueError unless they are a list of names."""
    if isinstance(metrics, str) or not metrics:
        raise ValueError(
            "Expected `metrics` to be a list of names of evaluated values, but got "
            f"metrics={metrics!r}. Use ['val_acc'], for example."
        )
    check_types(check_metrics, locals())
    return tuple(metrics)


def evaluated(metrics: Sequence[str], results: ClientResults) -> list[str]:
    """Return those of ``metrics`` that an evaluation has; in a test ``test`` replaces ``val``.

    Raises:
        ValueError: If a validation doesn't have one of them.
    """
    known = [*results.columns()]
    if results.split == "test":
        names = [re.sub(r"(^|/)val(?=[_/])", r"\1test", name) for name in metrics]
        return [name for name in names if name in known]
    missing = [name for name in metrics if name not in known]
    if missing and "" in results.evaluations:  # after the last round other models may be alone
        raise ValueError(
            f"Expected `metrics` to name validated values, but got {missing[0]!r} and the "
            f"validation logged {known}. Use some of these."
        )
    return [name for name in metrics if name in known]


def client_values(results: ClientResults, name: str) -> tuple[Tensor, Tensor, bool]:
    """Find a metric's values (float64), sample counts, and whether larger is better."""
    found, key = next(
        (found, key)
        for prefix, found in results.evaluations.items()
        for key in found.values
        if f"{prefix}{key}" == name
    )
    return found.values[key].cpu().double(), found.counts, direction(key, found)
