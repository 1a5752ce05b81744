"""Signs of life: who waits for a silent process ends, who waits for a slow one doesn't."""

from __future__ import annotations

from datetime import timedelta
from threading import Event, Timer
from time import monotonic

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_pfl.federation.presence import Presence, StoppedProcessError

SILENCE = timedelta(seconds=0.4)


class Waiting:
    """A call that ends when it is released."""

    def __init__(self, error: Exception | None = None) -> None:
        self.released, self.error, self.begun = Event(), error, 0

    def begin(self) -> Waiting:
        self.begun += 1
        return self

    def is_completed(self) -> bool:
        return self.released.is_set()

    def wait(self) -> None:
        self.released.wait()
        if self.error is not None:
            raise self.error


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def process(store: TCPStore, rank: int, size: int = 2) -> Presence:
    return Presence("localhost", store.port, rank, size, SILENCE)


def test_a_silent_process_is_named_and_later_calls_do_not_begin(store: TCPStore) -> None:
    first, second, call = process(store, 0, 3), process(store, 2, 3), Waiting()
    begin = monotonic()
    try:
        match = r"but rank 1 has given no sign of life for 0 seconds. .* with `ckpt_path`"
        with pytest.raises(StoppedProcessError, match=match):
            first.call(call.begin)
        assert monotonic() - begin < 20 * SILENCE.total_seconds()
        call.released.set()
        with pytest.raises(StoppedProcessError, match="rank 1"):
            first.call(call.begin)
        assert call.begun == 1
    finally:
        first.end()
        second.end()


def test_a_slow_process_is_waited_for(store: TCPStore) -> None:
    first, second, late = process(store, 0), process(store, 1), Waiting()
    begin, slow = monotonic(), 3 * SILENCE.total_seconds()
    try:
        Timer(slow, late.released.set).start()
        first.call(late.begin)
        assert monotonic() - begin >= slow
    finally:
        first.end()
        second.end()


def test_the_error_of_a_call_is_raised_where_it_is_made(store: TCPStore) -> None:
    alone, broken = process(store, 0, 1), Waiting(ZeroDivisionError("in the call"))
    broken.released.set()
    try:
        with pytest.raises(ZeroDivisionError, match="in the call"):
            alone.call(broken.begin)
    finally:
        alone.end()
