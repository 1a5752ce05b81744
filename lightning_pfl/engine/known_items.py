"""Code by which data sets of users' get samples and minibatches of them, read as a step's is."""

from __future__ import annotations

from abc import ABCMeta
from types import FunctionType
from typing import Any

from torch.utils.data import default_collate

from lightning_pfl.engine.known_code import FRAMEWORKS, CodeReader, Read, package_of, unknown
from lightning_pfl.engine.known_values import HARMLESS


def read_by_item(dataset: Any) -> tuple[Read, frozenset[str]]:
    """Return what the code by which a data set gets a sample reads, and names of attributes.

    Args:
        dataset: A data set of a user's, with ``__getitem__``.

    Returns:
        As of :func:`~lightning_pfl.engine.known_code.read_by_step`, and all names that it reads of
        objects.

    Raises:
        UnknownCodeError: If it may read anything but its argument, tensors and numbers that are
            attributes, known functions and global numbers.
    """
    reader = _ItemReader(dataset)
    reader.item()
    return reader.read, frozenset(reader.names)


def read_by_collate(function: Any) -> Read:
    """Return what a function of a user's reads that makes a minibatch of a list of samples.

    Args:
        function: The function.

    Raises:
        UnknownCodeError: If it may read anything but its argument, known functions and global
            numbers, or is no plain function.
    """
    if not isinstance(function, FunctionType) or package_of(function) in FRAMEWORKS:
        unknown("it is no function of a user's")
    reader = _ItemReader(function)
    reader._function(function)
    return reader.read


class _ItemReader(CodeReader):
    """Reads the code by which a data set gets a sample, or a function makes a minibatch of some.

    Args:
        dataset: The data set, or the function.

    Attributes:
        names: The attributes that it has found, of whichever object.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.names = dataset, set[str]()
        kinds = [kind for kind in type(dataset).__mro__ if package_of(kind) not in FRAMEWORKS]
        self._kinds, self._own, self._layers = kinds, [dataset], []
        self._hidden, self._metrics = set(), set()
        self._begin()

    def item(self) -> None:
        """Read the code."""
        kind = type(self.dataset)
        special = {name for one in self._kinds for name in vars(one) if name.startswith("__")}
        special -= HARMLESS | {"__getitem__", "__len__"}
        function = getattr(kind, "__getitem__", None)
        if special or type(kind) not in (type, ABCMeta) or not hasattr(self.dataset, "__dict__"):
            unknown(f"{kind.__name__} defines {', '.join(sorted(special)) or 'its class'}")
        if not isinstance(function, FunctionType) or package_of(function) in FRAMEWORKS:
            unknown(f"{kind.__name__} has no code of its own")
        self.read.update(
            {(one, "__getitem__"): vars(one).get("__getitem__") for one in self._kinds}
        )
        self._function(function)
        self._require_layers_alone()

    def _attribute(self, name: str) -> None:
        self.names.add(name)
        super()._attribute(name)

    def _is_followed(self, name: str, value: Any) -> bool:
        return False  # attributes are compared by what they are alone

    def _is_attribute(self, part: Any, name: str) -> bool:
        if name in vars(part):
            self._value(name, vars(part)[name])
            return True
        return any(name in vars(kind) for kind in self._kinds)

    def _known(self, name: str, value: Any) -> None:
        if value is not default_collate:
            super()._known(name, value)

    def _hparams(self, code: list[tuple[str, Any]], at: int) -> int:
        unknown("it reads hparams")
