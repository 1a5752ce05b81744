"""ClientModules: clients with different architectures in one federation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_pfl._lightning import is_overridden

STEPS = ("validation_step", "test_step")


class ClientModules(L.LightningModule):
    """Clients with different architectures: a LightningModule per client or group of clients.

    Each architecture is batched separately. Methods that aggregate parameters need the same shapes
    in all of them; ``LocalOnly``, ``SheafFMTL`` and ``HomologicalConstraints`` don't.

    Args:
        modules: LightningModules by name of the architecture.
        groups: The architecture's name for each client, as a list in the order of the ids or a
            mapping from client name. Each is a key of ``modules``. None: the clients take turns, in
            the order of the ids and of ``modules``.

    Raises:
        TypeError: If a module is no LightningModule.
        ValueError: If a name is unknown or can't be an attribute's name, or if only some of the
            modules define ``validation_step`` or ``test_step``.

    Example:
        >>> from lightning_pfl.models import MLP
        >>> modules = {"wide": MLP([8, 4, 2]), "narrow": MLP([5, 3, 2])}
        >>> ClientModules(modules, ["wide", "narrow", "wide"]).names
        ('wide', 'narrow')
    """

    def __init__(
        self,
        modules: Mapping[str, L.LightningModule],
        groups: Sequence[str] | Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(modules, Mapping) or not modules:
            raise ValueError(
                f"Expected `modules` to have a LightningModule, but got modules={modules!r}. Give "
                "one by name for each architecture."
            )
        for name, module in modules.items():
            if not isinstance(module, L.LightningModule):
                raise TypeError(
                    "Expected `modules` to be LightningModules by name, but got "
                    f"modules[{name!r}] of type {type(module).__name__}. Wrap it, for example in "
                    "a PersonalizedModule."
                )
            if not name.isidentifier() or hasattr(self, name):
                raise ValueError(
                    f"Expected the names in `modules` to be free attribute names, but got {name!r}."
                    " Use letters, digits and underscores, such as 'sensor_a'."
                )
        if not isinstance(groups, (Mapping, list, tuple, type(None))):
            raise TypeError(
                "Expected `groups` to be a list or a dict of names of modules, but got "
                f"{groups=}. Give a name for each client, or None to take turns."
            )
        named = groups.values() if isinstance(groups, Mapping) else groups
        given = list(modules if named is None else named)
        unknown = sorted({str(group) for group in given if group not in modules})
        if unknown or not given:
            raise ValueError(
                f"Expected `groups` to be one of {', '.join(map(repr, modules))} for every "
                f"client, but got {unknown or given}. Use one of these for each client."
            )
        self.names = tuple(modules)
        for name, module in modules.items():
            # Direct children, since Lightning sets the Trainer of those only.
            self.add_module(name, module)
        self.assignment = dict(groups) if isinstance(groups, Mapping) else groups and tuple(groups)
        self._offer_steps()

    @property
    def groups(self) -> dict[str, Any]:
        """Map names to the modules."""
        return {name: self.get_submodule(name) for name in self.names}

    def members(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Find the ids of each architecture's clients, int64, ascending.

        Args:
            names: The clients' names, in the order of their ids.

        Raises:
            ValueError: If ``groups`` doesn't fit these clients.
        """
        known = self.assignment
        if known is None:
            known = tuple(self.names[i % len(self.names)] for i in range(len(names)))
        if isinstance(known, dict):
            missing = [name for name in names if name not in known]
            problem = f"no entry for {missing[:5]}" if missing else ""
        else:
            problem = f"{len(known)} entries" if len(known) != len(names) else ""
        if problem:
            raise ValueError(
                f"Expected `groups` to have an entry for each of the {len(names)} clients, but got "
                f"{problem}. Give one per client, in the order of the data, or by client name."
            )
        of = [known[name] for name in names] if isinstance(known, dict) else list(known)
        return {
            group: torch.tensor(
                [i for i, name in enumerate(of) if name == group], dtype=torch.int64
            )
            for group in self.names
        }

    def configure_optimizers(self) -> Any:
        """Raise an error: every module has its own optimizer."""
        raise NotImplementedError("Every module of ClientModules configures its own optimizer.")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Raise an error: every client trains its own architecture."""
        raise NotImplementedError("Every client trains its own architecture.")

    def predict_step(self, batch: Any, batch_idx: int = 0) -> Any:
        """Raise an error: every client predicts with its own architecture."""
        raise NotImplementedError("Every client predicts with its own architecture.")

    def _offer_steps(self) -> None:
        """Define the steps that the modules define, which Lightning looks up on the module."""
        for step in STEPS:
            able = [name for name, module in self.groups.items() if is_overridden(step, module)]
            if able and len(able) < len(self.names):
                without = [name for name in self.names if name not in able]
                raise ValueError(
                    f"Expected all modules or none to define `{step}`, but {', '.join(able)} do "
                    f"and {', '.join(without)} don't. Define it in all of them."
                )
            if able:
                setattr(self, step, _not_called)


def _not_called(batch: Any, batch_idx: int = 0) -> Any:
    raise NotImplementedError("Every client is evaluated with its own architecture.")
