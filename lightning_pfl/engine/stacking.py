"""Functions of users by which a DataLoader makes minibatches, as far as they stack samples' parts.

Where the code of such a function is known (``known_items.py``), and it has been seen to do nothing
to some number of samples but to stack parts of all of them in their order, it makes the same of
any others whose parts are as large: it can't have read what they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from lightning_pfl.engine.known_code import Read, is_still
from lightning_pfl.engine.known_items import read_by_collate
from lightning_pfl.engine.operators import OperatorMode


class Stacking:
    """The way a function makes minibatches, by the number of samples.

    Args:
        function: The function, such as ``default_collate``.

    Attributes:
        known: Whether its code, and what that reads, are what they were.
        differs: Whether it was found that it does anything else.

    Raises:
        UnknownCodeError: If its code isn't known.
    """

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self.function, self.known, self.differs = function, True, False
        self._read: Read = {} if function is default_collate else read_by_collate(function)
        self._forms: dict[int, Any] = {}

    def holds(self) -> bool:
        """Whether its code, and what that reads, are what they were."""
        self.known = self.known and is_still(self._read)
        return self.known

    def form(self, samples: int) -> Any:
        """Return the structure of a minibatch with the names of its parts; None if unknown."""
        return self._forms.get(samples)

    def note(self, samples: list[Any], names: Any) -> Any:
        """Make a minibatch, and note how.

        Args:
            samples: Samples of the same structure.
            names: This structure, with the names of its parts, which are tensors.
        """
        if len(samples) in self._forms:
            return self.function(samples)
        stacks = _Stacks(samples, names)
        with stacks:
            batch = self.function(samples)
        try:
            self._forms[len(samples)] = stacks.form(batch)
        except LookupError:
            self.differs = True
        return batch


class _Stacks(OperatorMode):
    """Notes which parts of samples are stacked inside a ``with`` block, and if anything else is.

    Args:
        samples: Samples of the same structure.
        names: This structure, with the names of its parts.
    """

    def __init__(self, samples: list[Any], names: Any) -> None:
        super().__init__()
        columns = zip(*(_parts(sample) for sample in samples), strict=True)
        self._names = {tuple(map(id, c)): n for c, n in zip(columns, _parts(names), strict=True)}
        self._made: list[tuple[Tensor, Any]] = []
        self._alone = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        stacks = func is torch.ops.aten.stack.default and args[1:] in ((), (0,)) and not kwargs
        key = tuple(map(id, args[0])) if stacks else ()
        if key in self._names:
            self._made.append((result, self._names[key]))
        else:
            self._alone = False
        return result

    def form(self, batch: Any) -> Any:
        """Return the structure of a minibatch, with the names of the stacked parts.

        Raises:
            LookupError: If it has anything else, or twice the same, which isn't two tensors, or a
                tensor of which gradients are asked for.
        """
        if not self._alone or any(tensor.requires_grad for tensor, _ in self._made):
            raise LookupError
        left = {id(tensor): name for tensor, name in self._made}
        return _form(batch, left)


def _form(part: Any, left: dict[int, Any]) -> Any:
    kind = type(part)
    if kind is dict:
        return {key: _form(one, left) for key, one in part.items()}
    if kind in (tuple, list):
        return kind(_form(one, left) for one in part)
    return left.pop(id(part))


def _parts(sample: Any) -> list[Any]:
    """Return what is in a sample, in the order of its structure."""
    if type(sample) is dict:
        return [part for one in sample.values() for part in _parts(one)]
    if type(sample) in (tuple, list):
        return [part for one in sample for part in _parts(one)]
    return [sample]
