"""The random numbers of one client's steps, one after another: a key for each minibatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from lightning_pfl.core.draws import mix_number, random_keys, with_starts
from lightning_pfl.core.randomness import derive, seeded
from lightning_pfl.core.transfer import send
from lightning_pfl.engine.base import EngineSettings, LocalWork
from lightning_pfl.engine.program import ClientProgram
from lightning_pfl.engine.safety.global_rng import watch_global_rng
from lightning_pfl.engine.whole_steps import WholeSteps

ROWS = 8
"""Minibatches whose keys are made at once, as small tensors cost a call of torch each."""
Source = Literal["nothing", "names", "keys", "seeds"]
"""What steps of a client get to draw from: nothing, keys for random functions that are found by
their names, keys for all random functions, or these and global generators that are seeded for each
minibatch. But for the last, whoever takes the steps has to notice if one uses a generator."""


class ClientRandomness:
    """Gives random functions of a client's steps their keys, and notes whether steps draw.

    Args:
        settings: The Trainer's flags.
        program: The user's step as a function.
        whole: Recordings of whole steps, whose replays seed the generators themselves.
        work: The client's work.
        source: What steps get to draw from.
        known: Whether the code of the module's step is known.
        watched: Whether to notice what steps draw while generators are seeded, which takes as long
            as a small step.

    Attributes:
        keyed: Whether random functions of a step get the client's keys.
        drew: Whether a step has drawn random numbers, while it was watched; None before the first
            one.
        moved: Whether one of these has used a global generator.
        draws_elsewhere: Whether the last of these used Python's or NumPy's global generator; None
            before the first one.
    """

    def __init__(
        self,
        settings: EngineSettings,
        program: ClientProgram,
        whole: WholeSteps,
        work: LocalWork,
        source: Source,
        known: bool,
        watched: bool,
    ) -> None:
        self.settings, self.program, self.whole = settings, program, whole
        self.source, self.keyed, self.known = source, source != "nothing", known
        self.watched = watched
        self.drew: bool | None = None
        self.moved = False
        self.draws_elsewhere: bool | None = None
        self._phase = self._updates = 0
        self._rows: dict[int, Sequence[Tensor]] = {}
        self._stream = settings.seed, work.stream, work.info.round, [int(work.info.index)]
        # Of a whole step: by the minibatch's number its key, on the host and among the arguments.
        self._whole_keys: dict[int, tuple[int, Tensor]] = {}

    @cached_property
    def _client(self) -> int:
        """The key of the client's random numbers."""
        return int(random_keys(*self._stream)[0])

    @property
    def _first(self) -> int:
        return self._client + (self._phase << 32)

    def begin(self, phase: int) -> None:
        """Begin a phase, by its number."""
        self._phase, self._updates = phase, 0
        self._rows.clear()

    def key(self, number: int) -> Tensor:
        """Return the key of a step on the device, ``(1,)``."""
        return self._key(number)[:1]

    def _key(self, number: int) -> Tensor:
        """Return a minibatch's key on the device for draws."""
        block, within = divmod(number, ROWS)
        if block not in self._rows:
            self._rows = {block: self._made(range(block * ROWS, (block + 1) * ROWS))[1]}
        return self._rows[block][within]

    def _made(self, numbers: range) -> tuple[list[int], Sequence[Tensor]]:
        seeds = [mix_number(self._first + number) for number in numbers]
        keys = send(torch.tensor(seeds, dtype=torch.int64), self.settings.device)
        return seeds, with_starts(keys).unbind()

    def keys(self, count: int) -> tuple[list[int], Sequence[Tensor]]:
        """Return the keys of a phase's minibatches on the host, and on the device for draws.

        Without keys both are empty.
        """
        return self._made(range(count)) if self.keyed else ([], ())

    def around_whole_steps(self) -> AbstractContextManager[None]:
        """Restore the global generators behind the whole steps of a phase, which seed them."""
        return seeded(None) if self.keyed else nullcontext()

    @contextmanager
    def in_whole_step(
        self, numbers: list[int], seeds: list[int], keys: list[Tensor]
    ) -> Iterator[None]:
        """Let a whole step's minibatches have keys that are among its arguments."""
        self._whole_keys = dict(zip(numbers, zip(seeds, keys, strict=True), strict=False))
        try:
            yield
        finally:
            self._whole_keys = {}

    def new_step(self) -> None:
        """Start a step, of which it isn't known yet whether it draws elsewhere."""
        self.draws_elsewhere = False if self.watched else None

    def replacing(self) -> AbstractContextManager[None]:
        """Replace random functions inside a ``with`` block, if their names are all that counts."""
        return self.program.drawing_by_name() if self.source == "names" else nullcontext()

    def of_optimizer(self) -> AbstractContextManager[None]:
        """Seed the global generators for a step of an optimizer that may draw, as one for noise."""
        self._updates += 1
        return seeded(derive(self._first, "optimizer", self._updates), everything=True)

    @contextmanager
    def of(
        self, number: int, plain: bool = False, seeds_alone: bool = False
    ) -> Iterator[Tensor | None]:
        """Yield a minibatch's key for random functions, and seed the global generators by it.

        Args:
            number: The minibatch's number.
            plain: Whether nothing runs but the module's step.
            seeds_alone: Whether random functions draw from these generators, without a key.
        """
        if not self.keyed:
            yield None
            return
        if number in self._whole_keys:  # of known code, which draws from no other generators
            seed, key = self._whole_keys[number]
            self.whole.seed(key, seed)
            yield key
            return
        drawn = None if seeds_alone else self._key(number)
        if self.source != "seeds":
            yield drawn
            return
        seed = mix_number(self._first + number)
        plain = plain and self.program.augment is None and self.program.hooks is None
        torch_alone = plain and self.known
        if not self.watched:
            with seeded(seed & (2**63 - 1), everything=not torch_alone):
                yield drawn
            return
        with watch_global_rng(seed & (2**63 - 1), torch_alone) as found:
            yield drawn
        self.draws_elsewhere = bool(self.draws_elsewhere) or found.moved
        moved = found.moved or found.moved_torch
        self.moved |= moved
        self.drew = bool(self.drew) or bool(self.program.random_calls) or moved
