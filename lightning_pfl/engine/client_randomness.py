"""The random numbers of one client's steps, one after another: a key for each minibatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property

import torch
from torch import Tensor

from lightning_pfl.core.draws import mix_number, random_keys, with_starts
from lightning_pfl.core.randomness import seeded
from lightning_pfl.engine.base import EngineSettings, LocalWork
from lightning_pfl.engine.program import ClientProgram
from lightning_pfl.engine.safety.global_rng import watch_global_rng
from lightning_pfl.engine.whole_steps import WholeSteps


class ClientRandomness:
    """Gives random functions of a client's steps their keys, and notes whether steps draw.

    Args:
        settings: The Trainer's flags.
        program: The user's step as a function.
        whole: Recordings of whole steps, whose replays seed the generators themselves.
        work: The client's work.
        keyed: Whether random functions of a step get the client's keys.
        known: Whether the code of the module's step is known.

    Attributes:
        drew: Whether a keyed step has drawn random numbers; None before the first one.
        draws_elsewhere: Whether the last step used Python's or NumPy's global generator; None
            before the first one.
    """

    def __init__(
        self,
        settings: EngineSettings,
        program: ClientProgram,
        whole: WholeSteps,
        work: LocalWork,
        keyed: bool,
        known: bool,
    ) -> None:
        self.settings, self.program, self.whole = settings, program, whole
        self.keyed, self.known = keyed, known
        self.drew: bool | None = None
        self.draws_elsewhere: bool | None = None
        self._phase = 0
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
        self._phase = phase

    def key(self, number: int) -> tuple[int, Tensor]:
        """Return the key of a minibatch or a step, on the host and on the device."""
        key = mix_number(self._first + number)
        return key, torch.tensor(key).to(self.settings.device, non_blocking=True)

    def keys(self, count: int) -> tuple[list[int], Sequence[Tensor]]:
        """Return the keys of a phase's minibatches on the host, and on the device for draws.

        Without keys both are empty.
        """
        if not self.keyed:
            return [], ()
        seeds = [mix_number(self._first + number) for number in range(count)]
        keys = torch.tensor(seeds, dtype=torch.int64).to(self.settings.device, non_blocking=True)
        return seeds, with_starts(keys).unbind()

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
        self.draws_elsewhere = False

    @contextmanager
    def of(self, number: int, plain: bool = False) -> Iterator[Tensor | None]:
        """Yield a minibatch's key for random functions, and seed the global generators by it.

        Args:
            number: The minibatch's number.
            plain: Whether nothing runs but the module's step.
        """
        if not self.keyed:
            yield None
            return
        if number in self._whole_keys:  # of known code, which draws from no other generators
            seed, key = self._whole_keys[number]
            self.whole.seed(key, seed)
            yield key
            return
        seed, key = self.key(number)
        plain = plain and self.program.augment is None and self.program.hooks is None
        torch_alone = plain and self.known
        with watch_global_rng(seed & (2**63 - 1), torch_alone) as found:
            yield key
        self.draws_elsewhere = bool(self.draws_elsewhere) or found.moved
        drew = bool(self.program.random_calls) or found.moved or found.moved_torch
        self.drew = bool(self.drew) or drew
