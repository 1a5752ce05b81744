"""What the tests of all methods need to know of one: ``CASE`` in its own test file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_pfl.methods.base import Method
from lightning_pfl.testing import fit
from lightning_pfl.testing.conformance import SIZES, small_clients
from tests.methods.networks import SCALARS, plain_module

#: Numbers of the small network: all, of its last layer, of what is below.
D, HEAD, BODY = SCALARS, 18 * 3 + 3, 2 * 9 + 2
#: A client's neighbours in the complete graph, in which clients without data take part too.
DEGREE = len(SIZES) - 1
#: A convolution, two numbers for each of two channels, and the last layer.
WITH_BATCHNORM, BATCHNORM = 2 * 9 + 4 + HEAD, 4
LINEAR = 25 * 3 + 3
#: Of the 77 dimensions a tenth is sent over an edge.
EDGE = 7


class Bytes(NamedTuple):
    """What one client receives and sends in a round, single precision, written out in numbers.

    Attributes:
        method: The method; its clients are the conformance suite's.
        down: Bytes that a client receives, messages of other clients included.
        up: Bytes that a client sends.
        make_module: The module.
        from_the_first_round: Whether round 0 is like the others.
    """

    method: Callable[[], Method]
    down: int
    up: int
    make_module: Callable[[], nn.Module] = plain_module
    from_the_first_round: bool = True


@dataclass(frozen=True, kw_only=True)
class Case:
    """One method, for the tests of all methods.

    Attributes:
        method: The smallest settings that use everything the method does.
        bytes: What the method sends by the paper's formula, a line for each setting that changes
            it. None where that differs from round to round: the file then has a test of its own,
            with `sends` in its name.
        twin: What the method would be if a setting were 0, or its idea were missing: the defaults
            must differ from it. None where there is none, with the reason.
        needed: The arguments without a default.
        published: Defaults that are those of the paper, or of its authors' code.
        above_zero: A default of ours, where the paper has another problem or no number, so that any
            value above 0 does.
        problem: Arguments of ``Problem``, where the conformance suite's own network or clients
            are not for the method.
    """

    method: Callable[[], Method]
    bytes: Mapping[str, Bytes] | None
    twin: Callable[[], Method] | None
    needed: tuple[Any, ...] = ()
    published: Mapping[str, Any] = field(default_factory=dict)
    above_zero: str | None = None
    problem: Mapping[str, Any] = field(default_factory=dict)


def bytes_of_rounds(method: Method, module: torch.nn.Module, rounds: int) -> list[tuple[int, int]]:
    """Bytes down and up of one client in each round, messages between clients included."""
    # A client without data is no part of a cohort that trains.
    clients = sum(size > 0 or method.include_clients_without_data for size in SIZES)
    run = fit(method, small_clients(torch.float32), module.float(), rounds)  # type: ignore[arg-type]
    found = []
    for round in run.recorder.rounds:
        assert len(round.info) == clients
        between, rest = divmod(round.bytes_exchanged, clients)
        assert rest == 0
        found.append((round.bytes_down + between, round.bytes_up + between))
    last = tuple(clients * one for one in found[-1])
    assert (run.metrics["round/bytes_down"], run.metrics["round/bytes_up"]) == last
    return found
