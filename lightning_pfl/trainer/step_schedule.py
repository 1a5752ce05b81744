"""Schedulers that count steps, for clients whose steps run at once.

All clients begin a phase at the schedule's place of the round, so a step has the same options for
all of them. After a round the schedule has gone on by the steps of the client with most steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

Options = list[dict[str, Any]]


class StepSchedule:
    """The options of an optimizer's groups at each step of a phase.

    Args:
        optimizer: The template of the clients' optimizers.
        configs: Its schedulers; those with ``"interval": "step"`` count.
    """

    def __init__(self, optimizer: Optimizer, configs: Sequence[LRSchedulerConfig]) -> None:
        self.optimizer = optimizer
        self.configs = [config for config in configs if config.interval == "step"]
        self._known: list[Options] = []

    def __call__(self, steps: int) -> list[Options]:
        """Return the options of each group at each of some steps."""
        before = self._options()
        # Plateaus and callbacks may have changed the rates since.
        if len(self._known) < steps or self._known[:1] != [before]:
            states = [deepcopy(config.scheduler.state_dict()) for config in self.configs]
            self._known = self._walk(steps)
            for config, state in zip(self.configs, states, strict=True):
                config.scheduler.load_state_dict(state)
            for group, options in zip(self.optimizer.param_groups, before, strict=True):
                group.update(options)
        return self._known[:steps]

    def end_round(self, steps: int) -> None:
        """Go on by the steps of the client with most steps."""
        self._walk(steps)
        self._known = []

    def _walk(self, steps: int) -> list[Options]:
        found = []
        for number in range(1, steps + 1):
            found.append(self._options())
            for config in self.configs:
                scheduler: Any = config.scheduler
                if number % config.frequency == 0:
                    scheduler.step()
        return found

    def _options(self) -> Options:
        return [
            {name: deepcopy(value) for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
