"""Clients with different architectures in one federation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_pfl._lightning import is_overridden

STEPS = ("validation_step", "test_step")


class ClientModules(L.LightningModule):
    """A module per client, or per group of clients: other layers, other sizes, other inputs.

    Each group is batched on its own. Methods that need all clients' parameters on one server refuse
    it unless those have the same shapes in all groups; ``LocalOnly``, ``SheafFMTL`` and
    ``HomologicalConstraints`` work with any.

    Args:
        modules: Ordinary LightningModules by the group's name.
        groups: The group of each client: a name per client in the order of the ids, or a mapping
            from client name to group name. Every group must be one of ``modules``.

    Raises:
        TypeError: If a module is no LightningModule.
        ValueError: If a group is unknown or can't be an attribute's name, or if some of the modules
            define ``validation_step`` or ``test_step`` and others don't.

    Example:
        >>> from lightning_pfl.models import MLP
        >>> modules = {"wide": MLP([8, 4, 2]), "narrow": MLP([5, 3, 2])}
        >>> ClientModules(modules, ["wide", "narrow", "wide"]).names
        ('wide', 'narrow')
    """

    def __init__(
        self,
        modules: Mapping[str, L.LightningModule],
        groups: Sequence[str] | Mapping[str, str],
    ) -> None:
        super().__init__()
        for name, module in modules.items():
            if not isinstance(module, L.LightningModule):
                raise TypeError(
                    "Expected `modules` to be LightningModules by name, but got "
                    f"modules[{name!r}] of type {type(module).__name__}. Wrap it, for example with "
                    "PersonalizedModule."
                )
            if not name.isidentifier() or hasattr(self, name):
                raise ValueError(
                    f"Expected the names in `modules` to be free attribute names, but got {name!r}."
                    " Use letters, digits and underscores, such as 'sensor_a'."
                )
        given = list(groups.values()) if isinstance(groups, Mapping) else list(groups)
        unknown = sorted({str(group) for group in given if group not in modules})
        if unknown or not given:
            raise ValueError(
                f"Expected `groups` to name one of {', '.join(map(repr, modules))} for every "
                f"client, but got {unknown or given}. Give each client one of these."
            )
        self.names = tuple(modules)
        for name, module in modules.items():
            # Direct children, as Lightning gives the Trainer to those only.
            self.add_module(name, module)
        self.assignment = dict(groups) if isinstance(groups, Mapping) else tuple(groups)
        self._offer_steps()

    @property
    def groups(self) -> dict[str, Any]:
        """The modules by the group's name."""
        return {name: self.get_submodule(name) for name in self.names}

    def members(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Ids of the clients of each group, int64, ascending.

        Args:
            names: The clients' names, in the order of their ids.

        Raises:
            ValueError: If ``groups`` is for other clients.
        """
        known = self.assignment
        if isinstance(known, dict):
            missing = [name for name in names if name not in known]
            problem = f"no group for {missing[:5]}" if missing else ""
        else:
            problem = f"{len(known)} groups" if len(known) != len(names) else ""
        if problem:
            raise ValueError(
                f"Expected `groups` to say the group of each of the {len(names)} clients, but got "
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
        """Not called: every module makes its own optimizer."""
        raise NotImplementedError("Every module of ClientModules configures its own optimizer.")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Not called: every client trains the module of its group."""
        raise NotImplementedError("Every client trains the module of its group.")

    def predict_step(self, batch: Any, batch_idx: int = 0) -> Any:
        """Not called: every client predicts with the module of its group."""
        raise NotImplementedError("Every client predicts with the module of its group.")

    def _offer_steps(self) -> None:
        """Have a step where the modules have it: Lightning asks the module what it can do."""
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
    raise NotImplementedError("Every client is evaluated with the module of its group.")
