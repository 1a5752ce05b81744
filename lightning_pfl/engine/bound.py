"""A client's model inside the user's module itself, for code that looks at its parameters."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from lightning_pfl.core.parameters import places
from lightning_pfl.core.tree import Model, is_expanded


class BoundModule:
    """Lets the module's parameters and buffers be those of a client, in the same memory.

    Args:
        module: The user's module.
        changing: Names that may change; a client's expanded leaves are copied first.
        throwaway: Buffers that a step may write to without effect.
    """

    def __init__(
        self, module: nn.Module, changing: Collection[str], throwaway: Collection[str]
    ) -> None:
        self._changing, self._throwaway = frozenset(changing), tuple(throwaway)
        self._parameters = dict(module.named_parameters())
        self._own = {name: leaf.data for name, leaf in self._parameters.items()}
        buffers = dict(module.named_buffers())
        self._buffers = {
            name: [_owner(module, place) for place in places]
            for name, places in places(module).items()
            if name in buffers
        }
        self._own |= buffers
        self._bound: Model = {}

    def bind(self, model: Model) -> Model:
        """Put a client's model, ``(1, ...)``, into the module, and return it as it is there."""
        model = dict(model)
        for name in self._throwaway:
            kept = model[name][0] if name in model else self._own[name]
            self._put(name, kept.clone())
        for name, leaf in model.items():
            if name in self._throwaway or self._bound.get(name) is leaf:
                continue
            if name in self._changing and is_expanded(leaf):
                model[name] = leaf = leaf.clone(memory_format=torch.contiguous_format)
            self._put(name, leaf[0])
            self._bound[name] = leaf
        return model

    def keep(self, model: Model) -> None:
        """Copy what a step has assigned, and not written in place, to the client's model."""
        for name in self._changing.intersection(model):
            now = self._now(name)
            if now.data_ptr() != model[name].data_ptr():  # where its one row begins, too
                kept = model[name][0]
                kept.copy_(now)
                self._put(name, kept)

    def gradients(self, names: Collection[str]) -> Model:
        """Return the parameters' gradients, ``(1, ...)``."""
        found = {name: self._parameters[name].grad for name in names}
        return {name: grad[None] for name, grad in found.items() if grad is not None}

    def set_gradients(self, grads: Model) -> None:
        """Replace the parameters' gradients."""
        for name, parameter in self._parameters.items():
            parameter.grad = grads[name][0].contiguous() if name in grads else None

    def release(self) -> None:
        """Give the module its own parameters and buffers back."""
        for name, leaf in self._own.items():
            self._put(name, leaf)
        for parameter in self._parameters.values():
            parameter.grad = None

    def _now(self, name: str) -> Tensor:
        if name in self._parameters:
            return self._parameters[name].data
        owner, entry = self._buffers[name][0]
        now: Tensor = owner._buffers[entry]  # type: ignore[assignment]
        return now

    def _put(self, name: str, tensor: Tensor) -> None:
        if name in self._parameters:
            self._parameters[name].data = tensor
        for owner, entry in self._buffers.get(name, ()):
            owner._buffers[entry] = tensor


def _owner(module: nn.Module, place: str) -> tuple[nn.Module, str]:
    prefix, _, entry = place.rpartition(".")
    return module.get_submodule(prefix), entry
