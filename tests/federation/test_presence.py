"""Signs of life: who waits for a silent process ends, who waits for a slow one doesn't."""

from __future__ import annotations

from datetime import timedelta
from threading import Event
from time import monotonic

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_pfl.federation.presence import Presence, StoppedProcessError

SILENCE = timedelta(seconds=0.4)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def process(store: TCPStore, rank: int, size: int = 2) -> Presence:
    return Presence("localhost", store.port, rank, size, SILENCE)


def test_a_silent_process_is_named_and_later_calls_end_too(store: TCPStore) -> None:
    first, second, release = process(store, 0, 3), process(store, 2, 3), Event()
    begin = monotonic()
    try:
        match = r"but rank 1 has given no sign of life for 0 seconds. .* ckpt_path='last'"
        with pytest.raises(StoppedProcessError, match=match):
            first.call(release.wait)
        assert monotonic() - begin < 20 * SILENCE.total_seconds()
        with pytest.raises(StoppedProcessError, match="rank 1"):
            first.call(release.is_set)
    finally:
        release.set()
        first.end()
        second.end()


def test_a_slow_process_is_waited_for(store: TCPStore) -> None:
    first, second, late = process(store, 0), process(store, 1), Event()
    try:
        first.call(lambda: late.wait(3 * SILENCE.total_seconds()))
    finally:
        first.end()
        second.end()


def test_a_call_has_the_modes_and_the_error_of_its_place(store: TCPStore) -> None:
    alone, found = process(store, 0, 1), []

    def call() -> None:
        found.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        raise ZeroDivisionError("in the call")

    try:
        with pytest.raises(ZeroDivisionError, match="in the call"), torch.inference_mode():
            alone.call(call)
        with pytest.raises(ZeroDivisionError, match="in the call"), torch.no_grad():
            alone.call(call)
    finally:
        alone.end()
    assert found == [(True, False), (False, False)]
