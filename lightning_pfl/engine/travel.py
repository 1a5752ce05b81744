"""Distances of the clients' optimizer along a constant gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

OPTIONS = ("lr", "momentum", "dampening", "weight_decay", "nesterov")


class Travel:
    r"""The distance that a constant gradient of 1 would have moved each client.

    A further scalar per client is stepped by the clients' SGD, with momentum, dampening, Nesterov's
    step and weight decay. Divided by the learning rate of each phase it is, for plain SGD, the
    number of steps.

    Args:
        clients: Number of clients.
        device: Device of their training.

    Attributes:
        total: The distance in units of the learning rate, float64 ``(clients,)``.
    """

    def __init__(self, clients: int, device: torch.device) -> None:
        self.total = torch.zeros(clients, dtype=torch.float64, device=device)
        self._moved = torch.zeros_like(self.total)

    def begin(self, template: Optimizer, lr: float | None) -> None:
        """Begin a phase with momentum zero.

        Args:
            template: The optimizer that ``configure_optimizers`` returned.
            lr: The phase's learning rate; None for the template's.

        Raises:
            ValueError: If the optimizer isn't SGD with the same options for all parameters.
        """
        known = type(template) is torch.optim.SGD
        groups = template.param_groups if known else []
        options = {tuple(group[name] for name in OPTIONS) for group in groups}
        if len(options) != 1:
            found = type(template).__name__
            raise ValueError(
                "Expected torch.optim.SGD with the same options for all parameters, as the method "
                "asks how far a constant gradient would move a client, but got "
                f"{f'{found} with {len(options)} sets of options' if known else found}. Return "
                "such an SGD from `configure_optimizers`."
            )
        self._lr, self._momentum, self._dampening, self._decay, self._nesterov = options.pop()
        self._lr = self._lr if lr is None else lr
        self._buffer = torch.zeros_like(self.total)
        self._begun = torch.zeros_like(self.total, dtype=torch.bool)

    def step(self, rows: slice | Tensor | None = None) -> None:
        """Take a step.

        Args:
            rows: Positions of these clients; None for all.
        """
        at = slice(None) if rows is None else rows
        gradient = 1 - self._decay * self._moved[at]
        step = gradient
        if self._momentum:
            kept = self._momentum * self._buffer[at] + (1 - self._dampening) * gradient
            buffer = torch.where(self._begun[at], kept, gradient)
            self._buffer[at], self._begun[at] = buffer, True
            step = gradient + self._momentum * buffer if self._nesterov else buffer
        self._moved[at] += self._lr * step
        self.total[at] += step
