"""Recording of a gradient as a list of tensor operators, and replay without Python overhead.

In a step on cached features, a dozen small operators, most time goes to ``vmap``,
``functional_call`` and the module's code. A replay runs the same operators, with the same bits.
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
"""Calls without recording, in a long phase."""
LONG = 150
"""Steps of a phase from which a recording pays within the phase."""
PATIENCE = 50
"""Calls without recording, in shorter phases, where it pays over several rounds."""
LIMIT = 64
"""Largest number of recordings; many different batch sizes would fill the memory."""
Function = Callable[..., Any]
log = logging.getLogger(__name__)


class Same:
    """A key that compares by identity, and keeps its object alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """Collect every setting of a module and its submodules, which recordings treat as constants.

    Plain values are compared by value, collections by ``repr``, other objects, such as a loss
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
    """Append the tensors of a tree of dicts, lists and tuples to a list; return its structure."""
    if isinstance(tree, Tensor):
        leaves.append(tree)
        return None
    if isinstance(tree, dict):
        return tuple((key, flatten(value, leaves)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return tuple(flatten(value, leaves) for value in tree)
    return tree


def rebuild(tree: Any, leaves: Iterator[Tensor]) -> Any:
    """Replace the tensors of a tree, in the order of :func:`flatten`."""
    if isinstance(tree, Tensor):
        return next(leaves)
    if isinstance(tree, dict):
        return {key: rebuild(value, leaves) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(rebuild(value, leaves) for value in tree)
    return tree


class Traces:
    """Recordings by their dependencies.

    Attributes:
        enabled: Whether steps may be recorded; False if the module's step may read anything but its
            arguments and settings.
        used: Number of replays.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled, self.used = enabled, 0
        self._calls: dict[Any, int] = {}
        self._recorded: dict[Any, Recording] = {}
        self._context: Any = None
        self._patience = PATIENCE
        self._unverified: set[Any] = set()

    def enter(self, context: Any, steps: int) -> None:
        """Begin a phase.

        Args:
            context: Dependencies of its steps besides their arguments; None to record nothing.
            steps: Number of steps in the phase.
        """
        self._context = context
        self._patience = WARM_UP if steps >= LONG else PATIENCE
        self._unverified = set(self._recorded)

    def run(self, function: Function, *args: Any) -> Any:
        """Return ``function(*args)``, replayed if it was recorded before.

        Args:
            function: Returns a tree of tensors; must only read ``args`` and constants.
            args: Trees of tensors.
        """
        if not self.enabled or self._context is None:
            return function(*args)
        leaves: list[Tensor] = []
        structure = flatten(args, leaves)
        # Recordings depend on shapes, memory layouts and which leaves are expanded.
        shapes = tuple((leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves)
        key = (self._context, structure, shapes)
        recorded = self._recorded.get(key)
        if recorded is None:
            calls = self._calls[key] = self._calls.get(key, 0) + 1
            if calls <= self._patience or len(self._recorded) >= LIMIT:
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
        """Check the recording once per phase against the step, and return the step's result."""
        replayed: list[Tensor] = []
        real: list[Tensor] = []
        flatten(recorded([_copy(leaf) for leaf in leaves]), replayed)
        result = function(*args)
        flatten(result, real)
        self._unverified.discard(key)
        if not _agree(replayed, real):
            self.enabled = False
            log.info(
                "Steps are no longer recorded: a step differs from its recording, so it reads "
                "something besides its batch, its parameters and its settings."
            )
        return result


def _copy(leaf: Tensor) -> Tensor:
    # Expanded leaves are shared by all clients, and no step writes to them.
    return leaf if is_expanded(leaf) else leaf.clone(memory_format=torch.preserve_format)


def _agree(replayed: list[Tensor], real: list[Tensor]) -> bool:
    """Whether two results agree up to rounding."""
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
        # Imported here: it takes a second, and short runs don't need it.
        from torch.fx.experimental.proxy_tensor import make_fx

        def flat(*tensors: Tensor) -> list[Tensor]:
            self.result = function(*rebuild(args, iter(tensors)))
            results: list[Tensor] = []
            flatten(self.result, results)
            return results

        # Recording runs the function once; buffers that it writes to are restored.
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
    """Remove no-op views and unused results, a third of a small step's operators.

    Args:
        program: An ``fx.GraphModule`` of tensor operators; changed in place.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.target in _VIEWS and _is_same(node.meta.get("val"), node.args[0].meta.get("val")):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    # Backwards: inputs of a removed operator may become unused.
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
    """Whether a view has the geometry of its base; False without fake tensors to compare."""
    return (
        isinstance(view, Tensor)
        and isinstance(base, Tensor)
        and (view.shape, view.stride(), view.storage_offset(), view.dtype)
        == (base.shape, base.stride(), base.storage_offset(), base.dtype)
    )
