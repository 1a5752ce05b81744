"""Record a gradient once as a list of tensor operators, and replay it without Python in between.

A step on cached features is a dozen small operators; what it costs is the way there: ``vmap``,
``functional_call``, the module's own code. Replaying gives the same operators on the same
tensors, so the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pfl.core.tree import is_expanded
from lightning_pfl.engine.safety.snapshot import attributes

WARM_UP = 2
"""Calls that run as they are before a gradient of a long phase is recorded."""
LONG = 150
"""Steps of a phase from which recording it pays within the phase."""
PATIENCE = 50
"""Calls before a gradient of a shorter phase is recorded: it pays over the rounds, if they come."""
LIMIT = 64
"""Recordings kept; clients with many different batch sizes would fill the memory."""
Function = Callable[..., Any]
log = logging.getLogger(__name__)


class Same:
    """Compares by identity, and keeps its object alive so that the identity stays its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """Every setting of a module and of what is below it: a recording holds them as constants.

    Plain values count by value, collections by what they print, everything else, such as a loss
    function or a tensor that is no parameter, by identity.
    """
    found: list[Any] = [(name, type(part)) for name, part in module.named_modules()]
    found += [(name, key, _setting(value)) for name, key, value in attributes(module)]
    found += [(name, part.training) for name, part in module.named_modules()]
    persistent = set(module.state_dict())
    for name, buffer in module.named_buffers():
        if name not in persistent:
            found.append((name, Same(buffer)))
    found += [(name, Same(p)) for name, p in module.named_parameters() if not p.requires_grad]
    return tuple(found)


def _setting(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return repr(value)
    return Same(value)


def flatten(tree: Any, leaves: list[Tensor]) -> Any:
    """Append the tensors of a tree of dicts, lists and tuples; returns its structure."""
    if isinstance(tree, Tensor):
        leaves.append(tree)
        return None
    if isinstance(tree, dict):
        return tuple((key, flatten(value, leaves)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return tuple(flatten(value, leaves) for value in tree)
    return tree


def rebuild(tree: Any, leaves: Iterator[Tensor]) -> Any:
    """The tree with its tensors replaced, in the order of :func:`flatten`."""
    if isinstance(tree, Tensor):
        return next(leaves)
    if isinstance(tree, dict):
        return {key: rebuild(value, leaves) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(rebuild(value, leaves) for value in tree)
    return tree


class Traces:
    """Recordings by what they depend on.

    Attributes:
        enabled: Whether steps may be recorded. False where the module's step may read anything but
            its arguments and its settings.
        used: Replays so far.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled, self.used = enabled, 0
        self._calls: dict[Any, int] = {}
        self._recorded: dict[Any, Recording] = {}
        self._context: Any = None
        self._unverified: set[Any] = set()

    def enter(self, context: Any) -> None:
        """Begin a phase.

        Args:
            context: What its steps depend on besides their arguments; None to record nothing.
        """
        self._context = context
        self._unverified = set(self._recorded)

    def run(self, function: Function, steps: int, *args: Any) -> Any:
        """``function(*args)``, replayed if it was recorded before.

        Args:
            function: Returns a tree of tensors; must not read anything that changes but ``args``.
            steps: How many steps the phase has.
            args: Trees of tensors.
        """
        if not self.enabled or self._context is None:
            return function(*args)
        leaves: list[Tensor] = []
        structure = flatten(args, leaves)
        # What the recorded operators depend on: shapes, memory layouts, which leaves are expanded.
        shapes = tuple((leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves)
        key = (self._context, structure, shapes)
        recorded = self._recorded.get(key)
        if recorded is None:
            calls = self._calls[key] = self._calls.get(key, 0) + 1
            patience = WARM_UP if steps >= LONG else PATIENCE
            if calls <= patience or len(self._recorded) >= LIMIT:
                return function(*args)
            recorded = self._recorded[key] = Recording(function, args, leaves)
            self._unverified.add(key)
        self.used += 1
        if key in self._unverified:
            return self._verify(key, recorded, function, args, leaves)
        return recorded(leaves)

    def _verify(
        self, key: Any, recorded: Recording, function: Function, args: Any, leaves: list[Tensor]
    ) -> Any:
        """Once a phase, run the step itself beside its recording, and believe the step."""
        replayed: list[Tensor] = []
        real: list[Tensor] = []
        flatten(recorded([_copy(leaf) for leaf in leaves]), replayed)
        result = function(*args)
        flatten(result, real)
        self._unverified.discard(key)
        if not _agree(replayed, real):
            self.enabled = False
            log.info(
                "Steps are no longer recorded: a step gave another result than its recording, so "
                "it reads something besides its batch, its parameters and its settings."
            )
        return result


def _copy(leaf: Tensor) -> Tensor:
    # What is expanded is shared by all clients, and no step writes to it.
    return leaf if is_expanded(leaf) else leaf.clone(memory_format=torch.preserve_format)


def _agree(replayed: list[Tensor], real: list[Tensor]) -> bool:
    """Whether two results are the same but for rounding."""
    return len(replayed) == len(real) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
        for a, b in zip(replayed, real, strict=True)
    )


class Recording:
    """The operators of one call.

    Args:
        function: Returns a tree of tensors.
        args: Trees of tensors.
        leaves: Their tensors, in order.
    """

    def __init__(self, function: Function, args: Any, leaves: list[Tensor]) -> None:
        # Imported here: it takes a second, and short runs never come here.
        from torch.fx.experimental.proxy_tensor import make_fx

        def flat(*tensors: Tensor) -> list[Tensor]:
            self.result = function(*rebuild(args, iter(tensors)))
            results: list[Tensor] = []
            flatten(self.result, results)
            return results

        # Recording runs the function once; what it writes, BatchNorm's statistics, is put back.
        before = [leaf.clone() for leaf in leaves]
        self.replay: Function = simplified(make_fx(flat)(*leaves))
        with torch.no_grad():
            for leaf, old in zip(leaves, before, strict=True):
                if not is_expanded(leaf):
                    leaf.copy_(old)

    def __call__(self, leaves: list[Tensor]) -> Any:
        """Run the operators on other tensors of the same shapes."""
        with torch.no_grad():
            return rebuild(self.result, iter(self.replay(*leaves)))


def simplified(program: Any) -> Any:
    """Leave out operators that do nothing: a third of those of a small step.

    That is views that are their tensor once more, and results that nobody reads.

    Args:
        program: An ``fx.GraphModule`` of tensor operators; changed in place.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.target in _VIEWS and _is_same(node.meta.get("val"), node.args[0].meta.get("val")):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    # Backwards: what fed a dead operator may be dead then.
    for node in reversed(list(graph.nodes)):
        schema = getattr(node.target, "_schema", None)
        if not node.users and schema is not None and not schema.is_mutable:
            graph.erase_node(node)
    program.recompile()
    return program


_VIEWS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("alias", "detach", "expand", "permute", "view")
)


def _is_same(view: object, base: object) -> bool:
    """Whether a view has the geometry of its base; no if the fake tensors that tell are missing."""
    return (
        isinstance(view, Tensor)
        and isinstance(base, Tensor)
        and (view.shape, view.stride(), view.storage_offset(), view.dtype)
        == (base.shape, base.stride(), base.storage_offset(), base.dtype)
    )
