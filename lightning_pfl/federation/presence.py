"""Signs of life of processes, by which a slow one is no stopped one.

A process that waits for others in a collective call can't see why they don't come, and a large
client may take hours. So every process counts up a number beside its work. Whoever waits looks
at the numbers of the others: as long as they grow, it waits on.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import Event, Thread
from time import monotonic, sleep
from typing import Protocol

from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

SILENCE = timedelta(minutes=3)
"""Time without a sign of life after which a process counts as stopped."""
LOOKS = 20
"""Signs of life in this time."""
PAUSE = 0.05
"""Seconds after which a process that waits looks again, at most."""


class StoppedProcessError(RuntimeError):
    """A process of the run is stopped, or its machine can't be reached."""


class Call(Protocol):
    """A collective call that has begun."""

    def is_completed(self) -> bool:
        """Whether it has ended."""

    def wait(self) -> object:
        """Wait for its end, and raise its error."""


def _keep(call: Call, group: object) -> None:
    """Keep the connections until a call ends: to close them before waits for it, for ever."""
    call.wait()


class Presence:
    """The processes of a run, as one of them sees them.

    Args:
        host: Host of the run's store.
        port: Its port.
        rank: Number of this process.
        size: Number of processes.
        silence: Time without a sign of life after which a process counts as stopped.
    """

    def __init__(
        self, host: str, port: int, rank: int, size: int, silence: timedelta = SILENCE
    ) -> None:
        self.rank, self.size, self.silence = rank, size, silence.total_seconds()
        self._stopped = ""
        now = monotonic()
        self._seen = dict.fromkeys(range(size), (b"", now))
        self._contact, self._ended = now, Event()
        store = TCPStore(host, port, is_master=False, wait_for_workers=False)
        self._signs = Thread(target=self._show, args=(store,), daemon=True)
        self._signs.start()

    def _show(self, store: TCPStore) -> None:
        """Count up this process's number, and look at those of the others."""
        names = [f"lightning_pfl/alive/{rank}" for rank in range(self.size)]
        for name in names:
            store.add(name, 0)
        while not self._ended.wait(self.silence / LOOKS):
            try:
                store.add(names[self.rank], 1)
                found = store.multi_get(names)
            except RuntimeError:  # the run ends, and its store with it
                return
            now = self._contact = monotonic()
            for rank, value in enumerate(found):
                if value != self._seen[rank][0]:
                    self._seen[rank] = value, now

    def call(self, begin: Callable[[], Call]) -> None:
        """Make a collective call, and look at the others while it runs.

        It looks again and again instead of sleeping until the call wakes it up, which takes as long
        as a small call: after a tenth of the time that it has waited.

        Args:
            begin: Begins the call.

        Raises:
            StoppedProcessError: If a process gives no sign of life.
        """
        if self._stopped:
            raise StoppedProcessError(self._stopped)
        call, start = begin(), monotonic()
        try:
            while not call.is_completed():
                self._look()
                sleep(min((monotonic() - start) / 10, PAUSE))
        except BaseException:  # also an interruption
            Thread(target=_keep, args=(call, distributed.group.WORLD), daemon=True).start()
            raise
        call.wait()

    def _look(self) -> None:
        now = monotonic()
        silent = [rank for rank, (_, at) in self._seen.items() if now - at > self.silence]
        if now - self._contact > self.silence:
            silent = [0]  # which keeps the store
        silent = [rank for rank in silent if rank != self.rank]
        if silent:
            self._stopped = (
                f"Expected all {self.size} processes to go on, but rank "
                f"{', '.join(map(str, silent))} has given no sign of life for "
                f"{self.silence:.0f} seconds. It is stopped (SIGSTOP, a debugger, a suspended "
                "machine) or can't be reached. End its process (kill -9), and go on from the last "
                "checkpoint with `ckpt_path`."
            )
            raise StoppedProcessError(self._stopped)

    def end(self) -> None:
        """Give no more signs of life; a thread that still uses the store could abort the exit."""
        self._ended.set()
        self._signs.join(timeout=1)
