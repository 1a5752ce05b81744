"""Several models to start from, which must differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_pfl._lightning import copy_apart
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.randomness import derive, seeded
from lightning_pfl.core.tree import Model

Starts = Sequence[Mapping[str, Any]] | None


def check_starts(initial: Starts, count: int, each: str) -> None:
    """Raise ValueError unless ``initial`` is None or a list of ``count`` models.

    Args:
        initial: The argument of the method.
        count: Number of models.
        each: What each of them is for, for the error.
    """
    if initial is None:
        return
    if not isinstance(initial, (list, tuple)) or not all(isinstance(i, Mapping) for i in initial):
        raise ValueError(
            f"Expected `initial` to be a list of state_dicts or None, but got {initial=}. Give "
            f"[module.state_dict(), ...], {each}."
        )
    if len(initial) != count:
        raise ValueError(
            f"Expected `initial` to have {count} models, {each}, but got {len(initial)}. Give one "
            "state_dict each, or None."
        )


def different_models(
    model: Model, count: int, initial: Starts, parameter_split: ParameterSplit, seed: int
) -> list[Model]:
    """Make the given models, or the module's and copies with newly initialised layers.

    Parameters that no layer can initialise get normal noise of their root mean square.

    Args:
        model: The module's model.
        count: Number of models.
        initial: Models as ``state_dict`` of the module; None to draw them.
        parameter_split: The module and its names.
        seed: Seed of the drawn models.

    Raises:
        ValueError: If a given model has another module's names or shapes.
    """
    if initial is None:
        drawn = (_drawn(model, number, parameter_split, seed) for number in range(1, count))
        return [model, *drawn]
    for number, given in enumerate(initial):
        if missing := [name for name in model if name not in given]:
            raise ValueError(
                f"Expected `initial[{number}]` to be a state_dict of the module, but it has no "
                f"{missing[0]!r}. Use module.state_dict()."
            )
        for name, leaf in model.items():
            if (shape := tuple(torch.as_tensor(given[name]).shape)) != tuple(leaf.shape):
                raise ValueError(
                    f"Expected {name!r} of `initial[{number}]` to have the module's shape "
                    f"{tuple(leaf.shape)}, but got {shape}. Use the state_dict of a module of "
                    "the same sizes."
                )
    return [
        {name: torch.as_tensor(given[name]).to(leaf) for name, leaf in model.items()}
        for given in initial
    ]


def _drawn(model: Model, number: int, parameter_split: ParameterSplit, seed: int) -> Model:
    """Make a model with newly initialised layers."""
    module: Any = copy_apart(parameter_split.module)
    with seeded(derive(seed, "cluster", number)), torch.no_grad():
        reached = set()
        for prefix, layer in module.named_modules():
            if callable(getattr(layer, "reset_parameters", None)):
                layer.reset_parameters()
                reached |= {f"{prefix}.{name}" if prefix else name for name in layer.state_dict()}
        drawn = {name: module.state_dict()[name].to(leaf) for name, leaf in model.items()}
        for name in parameter_split.trainable:
            if name not in reached:
                leaf = model[name]
                drawn[name] = leaf + leaf.square().mean().sqrt() * torch.randn_like(leaf)
    return drawn
