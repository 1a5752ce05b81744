"""The networks that are merged."""

from __future__ import annotations

from typing import Any

from torch import nn


def require_modules(name: str, given: Any, nested: bool = False) -> None:
    """Raise TypeError unless an argument is a list of networks.

    Args:
        name: Name of the argument.
        given: Its value.
        nested: Whether an entry may be a list of networks.
    """
    entries = list(given) if isinstance(given, (list, tuple, nn.ModuleList)) else [given]
    inner = [each for one in entries for each in (one if nested and _is_list(one) else [one])]
    wrong = [each for each in inner if not isinstance(each, nn.Module)]
    if wrong or not _is_list(given):
        raise TypeError(
            f"Expected `{name}` to be a list of networks, but got {(wrong or [given])[0]!r}. Give "
            "those of the clients, `load_clients(...).client_module(client)`."
        )


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple, nn.ModuleList))
