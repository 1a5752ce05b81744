"""Hidden units of a chain of layers, whose order doesn't matter to what the network computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from lightning_pfl.core.tree import Model

WIDE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class HiddenLayer:
    """The units of one layer, which may be put into another order.

    Attributes:
        units: How many there are.
        rows: Names of the entries whose first axis are the units: the layer's weight and bias, and
            those of a normalisation behind it.
        columns: The next layer's weight, whose second axis are the units.
        repeats: Entries of that axis for one unit: positions of an image that was flattened.
    """

    units: int
    rows: tuple[str, ...]
    columns: str
    repeats: int

    def vectors(self, model: Model, names: frozenset[str]) -> Tensor:
        """Return each unit's numbers, ``(clients, units, numbers)``.

        Args:
            model: Leaves ``(clients, ...)``.
            names: Entries that count.
        """
        parts = [
            model[n].flatten(2) if model[n].ndim > 2 else model[n].unsqueeze(2)
            for n in self.rows
            if n in names
        ]
        if self.columns in names:
            leaf = self._by_unit(model[self.columns])
            parts.append(leaf.movedim(2, 1).flatten(2))
        return torch.cat(parts, 2)

    def permuted(self, model: Model, order: Tensor) -> Model:
        """Put unit ``order[k, i]`` of client k into place i, in this layer and the next.

        Args:
            model: Leaves ``(clients, ...)``.
            order: int64 ``(clients, units)``.
        """
        new = {name: _taken(model[name], order) for name in self.rows}
        leaf = model[self.columns]
        swapped = _taken(self._by_unit(leaf).movedim(2, 1), order).movedim(1, 2)
        return {**model, **new, self.columns: swapped.reshape(leaf.shape)}

    def _by_unit(self, leaf: Tensor) -> Tensor:
        """View ``(clients, outputs, inputs, ...)`` as ``(clients, outputs, units, numbers)``."""
        return leaf.reshape(*leaf.shape[:2], self.units, -1)


def _taken(leaf: Tensor, order: Tensor) -> Tensor:
    index = order.view(*order.shape, *([1] * (leaf.ndim - 2))).expand(-1, -1, *leaf.shape[2:])
    return leaf.gather(1, index)


def hidden_layers(module: nn.Module) -> list[HiddenLayer]:
    """Find the hidden layers of a chain, from the inputs to the outputs.

    Fully connected and convolutional layers and BatchNorm may stand in it, one after another in
    ``nn.Sequential``s, or as the submodules ``backbone`` and ``head``; what has no parameters must
    treat all units alike.

    Raises:
        ValueError: If the module isn't such a chain, or has no hidden layer.

    Example:
        >>> [one.units for one in hidden_layers(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))]
        [3]
    """
    wide: list[tuple[str, torch.Size]] = []
    rows: dict[str, list[str]] = {}
    for name, layer in _chain(module):
        own = [f"{name}.{n}" for n, leaf in _state(layer).items() if leaf.ndim]
        if isinstance(layer, WIDE) and getattr(layer, "groups", 1) == 1:
            wide.append((name, layer.weight.shape))
            rows[name] = own
        elif isinstance(layer, NORMS) and wide and layer.num_features == wide[-1][1][0]:
            rows[wide[-1][0]] += own
        elif own:
            raise ValueError(
                "Expected a chain of fully connected and convolutional layers, and BatchNorm of "
                "their units behind them, which are matched, but got "
                f"{name} of type {type(layer).__name__}. "
                "Use another network."
            )
    found = []
    for (name, (units, *_)), (following, (_, inputs, *_)) in pairwise(wide):
        if inputs % units:
            raise ValueError(
                f"Expected the inputs of {following} to be the units of {name}, but got {inputs} "
                f"inputs and {units} units. Put the layers into the order in which they run."
            )
        found.append(HiddenLayer(units, tuple(rows[name]), f"{following}.weight", inputs // units))
    if not found:
        raise ValueError(
            f"Expected a network with a hidden layer, but got {type(module).__name__}. Use a "
            "network of two layers at least."
        )
    return found


def _state(layer: nn.Module) -> Mapping[str, Tensor]:
    found: Mapping[str, Tensor] = layer.state_dict()
    return found


def _chain(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers in the order in which they run."""
    children = dict(module.named_children())
    halves = {"backbone", "head"} <= set(children)
    if isinstance(module, nn.Sequential):
        inside = list(children)
    elif halves:
        inside = ["backbone", "head"]
    else:
        yield name or type(module).__name__, module
        return
    for child in inside:
        yield from _chain(children[child], f"{name}.{child}" if name else child)
    others = {n: c for n, c in children.items() if n not in inside and _state(c)}
    for child, layer in others.items():
        yield child, layer
