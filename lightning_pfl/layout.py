"""Which parameters and buffers of a module are shared, personal or static."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from lightning_pfl.tree import Model

Spec = str | type[nn.Module] | Sequence[str | type[nn.Module]] | None
"""What to pick of a module.

Submodule or parameter names, globs, module types, a list of these, ``"all"``, or None.
"""


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


class Layout:
    """The split of a module's state by who holds it.

    A *model* is the dict of all trainable parameters and persistent buffers. Parameters with
    ``requires_grad=False`` are *static*: they never change, are never sent, and every client uses
    the module's own tensor.

    Args:
        module: The user's module.
        personal: What never leaves the client (:data:`Spec`). A buffer follows the module that owns
            it.

    Raises:
        ValueError: If a pattern matches nothing, or the module has nothing to train.
    """

    def __init__(self, module: nn.Module, personal: Spec = None) -> None:
        self.module = module
        self.trainable = tuple(name for name, p in module.named_parameters() if p.requires_grad)
        self.static = tuple(name for name, p in module.named_parameters() if not p.requires_grad)
        if not self.trainable:
            raise ValueError(
                f"Expected the module to have parameters to train, but {type(module).__name__} "
                "has none with "
                "requires_grad=True. Unfreeze at least one parameter."
            )
        persistent = module.state_dict(keep_vars=True)
        self.buffers = tuple(name for name, _ in module.named_buffers() if name in persistent)
        self.names = self.trainable + self.buffers
        self.personal = self.match(personal, "personal")
        self.shared = frozenset(self.names) - self.personal

    def match(self, spec: Spec, argument: str = "train") -> frozenset[str]:
        """The names that a :data:`Spec` picks.

        A string matches a name or any module above it, literally or as a glob: ``"head"``,
        ``"head.*"`` and ``"backbone.layer*.norm1"`` all work. A type matches everything inside
        modules of that type.

        Raises:
            ValueError: If a string matches nothing. A type may match nothing: FedBN on a network
                without normalisation is FedAvg.
        """
        if spec is None:
            return frozenset()
        items = [spec] if isinstance(spec, (str, type)) else list(spec)
        found: set[str] = set()
        for item in items:
            matched = self._of_type(item) if isinstance(item, type) else self._of_pattern(item)
            if not matched and isinstance(item, str):
                known = sorted(
                    {ancestor for name in self.names for ancestor in _ancestors(name)[:2]}
                )
                raise ValueError(
                    f"Expected `{argument}` to match at least one parameter, but got "
                    f"{argument}={item!r} and the model "
                    f"has {', '.join(known)}. Use one of these names, a glob such as "
                    f"{known[0] + '*'!r}, or 'all'."
                )
            found |= matched
        return frozenset(found)

    def _of_pattern(self, pattern: str) -> set[str]:
        if pattern == "all":
            return set(self.names)
        return {
            name
            for name in self.names
            if any(fnmatchcase(part, pattern) for part in _ancestors(name))
        }

    def _of_type(self, kind: type[nn.Module]) -> set[str]:
        prefixes = tuple(
            f"{name}." for name, module in self.module.named_modules() if isinstance(module, kind)
        )
        return {name for name in self.names if name.startswith(prefixes)} if prefixes else set()

    def model(self) -> Model:
        """A copy of the module's current model, without gradients, on the module's device."""
        state = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {name: state[name].detach().clone() for name in self.names}

    def load(self, model: Model) -> None:
        """Write the entries of ``model`` into the module, in place."""
        state: dict[str, Tensor] = {
            **dict(self.module.named_parameters()),
            **dict(self.module.named_buffers()),
        }
        for name, value in model.items():
            state[name].data.copy_(value)

    def describe(self) -> dict[str, object]:
        """What a checkpoint must agree on: the shape and the holder of every entry."""
        shapes = self.model()
        return {
            name: [list(shapes[name].shape), "personal" if name in self.personal else "shared"]
            for name in shapes
        }

    def table(self) -> str:
        """One line per top-level module and holder: names and number of scalars.

        Printed at the start of a fit.
        """
        sizes = {name: p.numel() for name, p in self.module.named_parameters()}
        sizes |= {name: b.numel() for name, b in self.module.named_buffers()}
        lines = []
        for holder, names in (
            ("shared", self.shared),
            ("personal", self.personal),
            ("static", self.static),
        ):
            for top, scalars in _by_top_level(names, sizes).items():
                lines.append(f"  {holder:<8} {top:<24} {scalars:>12,}")
        return "\n".join(lines)


def _by_top_level(names: Iterable[str], sizes: dict[str, int]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for name in sorted(names):
        top = name.split(".")[0]
        totals[top] = totals.get(top, 0) + sizes[name]
    return totals
