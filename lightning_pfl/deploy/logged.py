"""The values that nodes log, as they come from node to node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.contract.records import Evaluation, LogOptions
from lightning_pfl.deploy.packet import PacketError
from lightning_pfl.deploy.wire import read_numbers

LARGEST = 1e12
"""A logged value with a larger absolute value is taken for a lie."""
VALUES = 100
"""Values that a node logs at most, and characters of a name."""

Values = dict[str, tuple[list[float], LogOptions]]
"""Name of a value to one number per client, and how it is logged."""


class LoggedValues:
    """Logged values of a cohort, as they come from node to node.

    A name counts if at least half of the nodes give it: one node alone can't invent a value that
    stops a run or picks its best checkpoint.
    """

    def __init__(self, clients: int) -> None:
        self.clients, self.nodes = clients, 0
        self.counts = torch.zeros(clients, dtype=torch.int64)
        self.values: dict[str, Tensor] = {}
        self.options: dict[str, Counter[tuple[bool, bool, bool | None]]] = {}

    def add(
        self,
        at: Tensor,
        values: Mapping[str, tuple[list[float], LogOptions]],
        counts: Sequence[int] = (),
    ) -> None:
        """Add the values of the clients of one node."""
        self.nodes += 1
        if counts:
            self.counts[at] = torch.tensor(counts)
        for name, (numbers, options) in values.items():
            gap = torch.full((self.clients,), torch.nan, dtype=torch.float64)
            self.values.setdefault(name, gap)[at] = torch.tensor(numbers, dtype=torch.float64)
            said = (options.prog_bar, options.logger, options.higher_is_better)
            self.options.setdefault(name, Counter())[said] += 1

    def evaluation(self) -> Evaluation:
        """Give the values that count."""
        known = [n for n, said in self.options.items() if 2 * said.total() >= self.nodes]
        return Evaluation(
            {name: self.values[name] for name in known},
            self.counts,
            {name: LogOptions(*self.options[name].most_common(1)[0][0]) for name in known},
        )


def read_values(found: Any, clients: int) -> dict[str, tuple[list[float], LogOptions]]:
    """Read logged values by name."""
    if not isinstance(found, dict) or len(found) > VALUES:
        raise PacketError(f"logged values aren't at most {VALUES} by name")
    read = {}
    for name, said in found.items():
        if len(name) > VALUES or not name.isprintable():
            raise PacketError("a logged value has a name of another form")
        match said["options"]:
            case [bool(prog_bar), bool(logger), bool() | None as better]:
                options = LogOptions(prog_bar, logger, better)
            case _:
                raise PacketError(f"options of {name!r} are of another form")
        read[name] = (read_numbers(said["values"], clients, name, LARGEST), options)
    return read
