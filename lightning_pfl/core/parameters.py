"""The split of a module's parameters and buffers into shared, personal and static ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from lightning_pfl.core.tree import Model

ParameterSpec = str | type[nn.Module] | Sequence[str | type[nn.Module]] | None
"""A choice of parameters: names of submodules or parameters, globs, module types, a list of these,
``"all"``, or None for none."""


def picks(pattern: str, name: str) -> bool:
    """Whether a pattern of a :data:`ParameterSpec` matches a parameter's name or its module's.

    Example:
        >>> picks("head", "head.bias"), picks("*.bias", "head.bias"), picks("all", "head.bias")
        (True, True, True)
    """
    return pattern == "all" or any(fnmatchcase(part, pattern) for part in _ancestors(name))


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


class ParameterSplit:
    """The split of a module's state into shared, personal and static entries.

    A *model* is the dict of all trainable parameters and persistent buffers. Parameters with
    ``requires_grad=False`` are *static*: they never change, are never sent, and every client uses
    the module's own tensor. So are buffers with an infinity, such as attention masks, which can't
    be averaged.

    Args:
        module: The user's module.
        personal: Parameters that never leave the client. A buffer follows the module that owns it.

    Attributes:
        names: Names of the model's entries, ``trainable`` and then ``buffers``.
        trainable: Names of the parameters that train.
        buffers: Names of the persistent buffers, such as BatchNorm's statistics.
        static: Names of what never changes.
        personal: Names that never leave the client.
        shared: All other names of the model.
        aliases: Further names of tied parameters and buffers, each with its name in the model.

    Raises:
        ValueError: If a pattern matches nothing, if nothing is trainable, or if parameters are
            complex, sharded, have hooks, or are embeddings with sparse gradients.
    """

    def __init__(self, module: nn.Module, personal: ParameterSpec = None) -> None:
        self.module = module
        self.trainable = tuple(name for name, p in module.named_parameters() if p.requires_grad)
        self.static = tuple(name for name, p in module.named_parameters() if not p.requires_grad)
        if not self.trainable:
            raise ValueError(
                f"Expected a module with trainable parameters, but {type(module).__name__} has "
                "none. Set `requires_grad=True` for at least one."
            )
        _check_kinds(module)
        persistent = module.state_dict(keep_vars=True)
        kept = {name: b for name, b in module.named_buffers() if name in persistent}
        masks = tuple(name for name, buffer in kept.items() if _has_infinity(buffer))
        self.static += masks
        self.buffers = tuple(name for name in kept if name not in masks)
        self.names = self.trainable + self.buffers
        self.aliases = {k: v for k, v in _aliases(module).items() if v in self.names}
        self.personal = self.match(personal, "personal")
        self.shared = frozenset(self.names) - self.personal

    def match(self, spec: ParameterSpec, argument: str = "train") -> frozenset[str]:
        """Return the names that a :data:`ParameterSpec` selects.

        A string matches a name or any module above it, literally or as a glob: ``"head"``,
        ``"head.*"`` and ``"backbone.layer*.norm1"`` all work. A type matches all parameters inside
        modules of that type. A tied parameter matches by any of its names.

        Raises:
            ValueError: If a string matches nothing, or only what is frozen. A type may match
                nothing: FedBN without normalisation layers is FedAvg.
            TypeError: If it is something else.
        """
        if spec is None:
            return frozenset()
        items = [spec] if isinstance(spec, (str, type)) else spec
        scalar = not getattr(items, "ndim", 1)  # a tensor that can't be iterated over
        if (
            not isinstance(items, Iterable)
            or scalar
            or not all(isinstance(i, (str, type)) for i in items)
        ):
            raise TypeError(
                f"Expected `{argument}` to be names, globs or module types, but got "
                f"{argument}={spec!r}. Use 'head', ['head', 'backbone.norm*'] or nn.BatchNorm2d."
            )
        found: set[str] = set()
        for item in items:
            matched = self._of_type(item) if isinstance(item, type) else self._of_pattern(item)
            if not matched and isinstance(item, str):
                if frozen := [name for name in self.static if picks(item, name)]:
                    raise ValueError(
                        f"Expected `{argument}` to match a parameter that trains, but got "
                        f"{argument}={item!r}, of which all are frozen: {', '.join(frozen[:5])}. "
                        "Set requires_grad, or name another part."
                    )
                known = sorted(
                    {part for name in self._all_names() for part in _ancestors(name)[:2]}
                )
                raise ValueError(
                    f"Expected `{argument}` to match at least one parameter, but got "
                    f"{argument}={item!r} and the model has {', '.join(known)}. Use one of "
                    f"these (the last layer is {self._last_layer()!r}), a glob such as "
                    "'*.bias', or 'all'."
                )
            found |= matched
        return frozenset(found)

    def _all_names(self) -> dict[str, str]:
        """Map every name to the name in the model."""
        return {**{name: name for name in self.names}, **self.aliases}

    def _last_layer(self) -> str:
        """Return the trainable layer registered last, in most modules the output layer."""
        return self.trainable[-1].rpartition(".")[0] or self.trainable[-1]

    def _of_pattern(self, pattern: str) -> set[str]:
        return {kept for name, kept in self._all_names().items() if picks(pattern, name)}

    def _of_type(self, kind: type[nn.Module]) -> set[str]:
        prefixes = tuple(
            f"{name}." for name, module in self.module.named_modules() if isinstance(module, kind)
        )
        names = self._all_names().items()
        return {kept for name, kept in names if name.startswith(prefixes)} if prefixes else set()

    def with_aliases(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Add a tied parameter's value under all of its names."""
        tied = {alias: state[name] for alias, name in self.aliases.items() if name in state}
        return {**state, **tied}

    def notes(self) -> list[str]:
        """Return log lines about tied parameters, for models that are partly personal."""
        if not self.personal or not self.shared:
            return []
        return [
            f"{alias} is tied to {name}: both are "
            f"{'personal' if name in self.personal else 'shared'}."
            for alias, name in self.aliases.items()
        ]

    def model(self) -> Model:
        """Copy the module's current model, without gradients, on the module's device."""
        state = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {name: state[name].detach().clone() for name in self.names}

    def num_trainable(self) -> int:
        """Count the trainable scalars."""
        parameters = dict(self.module.named_parameters())
        return sum(parameters[name].numel() for name in self.trainable)

    def load(self, model: Model) -> None:
        """Write the entries of ``model`` into the module, in place."""
        state: dict[str, Tensor] = {
            **dict(self.module.named_parameters()),
            **dict(self.module.named_buffers()),
        }
        for name, value in model.items():
            state[name].data.copy_(value)

    def describe(self) -> dict[str, object]:
        """Return the shape and the kind (shared or personal) of every entry, for checkpoints."""
        shapes = self.model()
        return {
            name: [list(shapes[name].shape), "personal" if name in self.personal else "shared"]
            for name in shapes
        }

    def table(self, ownership: Mapping[str, frozenset[str]] | None = None) -> str:
        """Format the split for the log: entries and scalars of each top-level module.

        Args:
            ownership: Names of entries by kind; None for shared and personal.
        """
        if ownership is None:
            ownership = {"shared": self.shared, "personal": self.personal}
        sizes = {name: p.numel() for name, p in self.module.named_parameters()}
        sizes |= {name: b.numel() for name, b in self.module.named_buffers()}
        lines = []
        found = {name: names for name, names in ownership.items() if names} | {
            "static": self.static
        }
        width = max(8, *map(len, found))
        for holder, names in found.items():
            for top, scalars in _by_top_level(names, sizes).items():
                lines.append(f"  {holder:<{width}} {top:<24} {scalars:>12,}")
        return "\n".join(lines)


def _by_top_level(names: Iterable[str], sizes: dict[str, int]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for name in sorted(names):
        top = name.split(".")[0]
        totals[top] = totals.get(top, 0) + sizes[name]
    return totals


def _aliases(module: nn.Module) -> dict[str, str]:
    """Map names that `named_parameters` and `named_buffers` leave out to those they have."""
    first: dict[Tensor, str] = {}
    found = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if first.setdefault(tensor, name) != name:
                found[name] = first[tensor]
    return found


def places(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Map each name in the model to the names for ``functional_call(..., tie_weights=False)``.

    These are every owner's name for the tensor, once. A module that is registered twice is one
    owner; torch's own ``tie_weights`` would replace its entries twice, and then restore the
    replacement instead of the original.
    """
    first: dict[Tensor, str] = {}
    found: dict[str, tuple[str, ...]] = {}
    for prefix, part in module.named_modules():
        for named in (part.named_parameters, part.named_buffers):
            for entry, tensor in named(recurse=False, remove_duplicate=False):
                name = f"{prefix}.{entry}" if prefix else entry
                kept = first.setdefault(tensor, name)
                found[kept] = (*found.get(kept, ()), name)
    return found


def _has_infinity(buffer: Tensor) -> bool:
    """Whether a buffer holds an infinity, as attention masks do; False for meta tensors."""
    return not buffer.is_meta and bool(buffer.isinf().any())


def _check_kinds(module: nn.Module) -> None:
    """Raise ValueError for parameters that can't be batched over clients or averaged."""
    for name, part in module.named_modules():
        if type(part).__name__ in PARALLEL:
            raise ValueError(
                f"Expected each process to have whole models of its own clients, but {name!r} is "
                f"{type(part).__name__}, which trains one model with all processes. Use the layer "
                "that it wraps; Trainer(devices=...) divides the clients."
            )
    for name, tensor in module.named_parameters():
        if hasattr(tensor, "full_tensor"):  # a DTensor
            raise ValueError(
                f"Expected each process to have whole models of its own clients, but {name!r} is "
                f"a {type(tensor.data).__name__}, sharded over processes. Don't call `fully_shard` "
                "or `distribute_module`; Trainer(devices=...) divides the clients."
            )
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and tensor.is_complex():
            raise ValueError(
                f"Expected real parameters and buffers, but {name!r} is of {tensor.dtype}. Use "
                "its `torch.view_as_real(...)`."
            )
        hooks = tensor._backward_hooks if isinstance(tensor, nn.Parameter) else None
        if hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"Expected parameters without hooks, but {name!r} has one (`register_hook`). "
                "Change gradients by a torch.autograd.Function in the forward pass."
            )
    for name, part in module.named_modules():
        sparse = isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
        if sparse and part.weight.requires_grad:
            raise ValueError(
                f"Expected dense gradients, but {name!r} is {type(part).__name__}(sparse=True). "
                "Make it with sparse=False."
            )


PARALLEL = frozenset(["DistributedDataParallel", "FullyShardedDataParallel"])
"""Wrappers of one model that several processes train; the names, as their import is slow."""
BATCH_NORM: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
)
RUNNING_STATISTICS: tuple[type[nn.Module], ...] = (
    *BATCH_NORM,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
"""Layers that may keep running statistics, which they update in training mode."""
NORMS: tuple[type[nn.Module], ...] = (*RUNNING_STATISTICS, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
