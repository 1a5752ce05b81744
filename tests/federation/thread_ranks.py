"""Processes that are threads, for tests of what they gather and add up."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import Tensor, distributed

from lightning_pfl.core import tree
from lightning_pfl.federation.ranks import Ranks


class Line:
    """What the threads of a test share."""

    def __init__(self, size: int) -> None:
        self.barrier, self.said, self.calls = Barrier(size, timeout=20), [None] * size, 0


class ThreadRanks(Ranks):
    """Processes that are threads."""

    def __init__(self, rank: int, size: int, line: Line) -> None:
        super().__init__(rank, size)
        self.line = line

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        said: list[Any] = self.line.said
        mine = {distributed.all_reduce: 0}.get(function, 1)
        said[self.rank] = args[mine].clone() if isinstance(args[mine], Tensor) else args[mine]
        self.line.calls += self.rank == 0
        self.line.barrier.wait()
        found = list(said)
        self.line.barrier.wait()
        if function is distributed.all_reduce:
            largest = args[1] == distributed.ReduceOp.MAX
            stacked = torch.stack(found)
            args[0].copy_(stacked.amax(0) if largest else stacked.sum(0))
        elif function is distributed.all_gather:
            assert {len(each) for each in found} == {len(args[1])}  # as backends require
            for place, value in zip(args[0], found, strict=True):
                place.copy_(value)
        else:
            args[0][:] = found


def everywhere(size: int, work: Callable[[ThreadRanks], Any]) -> tuple[list[Any], Line]:
    """Do the work in all processes; return what each finds."""
    line = Line(size)
    with ThreadPoolExecutor(size) as pool:
        runs = [pool.submit(work, ThreadRanks(rank, size, line)) for rank in range(size)]
    return [run.result() for run in runs], line


def trees(count: int, dtype: torch.dtype) -> tree.Tree:
    generator = torch.Generator().manual_seed(count)
    spread = torch.logspace(-9, 9, 35, dtype=torch.float64).view(5, 7)
    drawn = torch.randn(count, 5, 7, generator=generator, dtype=torch.float64) * spread
    return {
        "model": {
            "w": drawn.to(dtype),
            "half": drawn[:, 0].bfloat16(),
            "steps": torch.randint(-(2**60), 2**60, (count,), generator=generator),
            "mask": torch.rand(count, 3, generator=generator) < 0.3,
        },
        "nothing": {},
    }
