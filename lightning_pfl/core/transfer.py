"""Copies between the host and a device that wait for nothing that was launched before.

An ordinary copy waits until the device has done all that it was given, evaluations and steps of a
round included. On CUDA a copy from the host takes its numbers with it before it returns, and one to
the host is ready once an event says so. Others, such as Apple's GPUs, may read memory of the host
that is no longer the tensor's; there copies wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

EVENTS: dict[str, Callable[[], Any]] = {"cuda": torch.cuda.Event}
"""By type of device where copies need not wait: makes an event, which tells how far it is."""


def send(tensor: Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Move a tensor to a device; from the host without waiting, where that is safe.

    Pinned memory mustn't be written to afterwards, until the device has the numbers.

    Args:
        tensor: On the host, or on a device, of which the host waits for it.
        device: Where to.
        dtype: Type there; None for the tensor's.
    """
    there = torch.device(device)
    at_once = tensor.device.type == "cpu" and there.type in EVENTS
    return tensor.to(device=there, dtype=dtype, non_blocking=at_once)


def begin_copies(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Begin to copy tensors to the host.

    Args:
        tensors: Of the host or of one device.

    Returns:
        A function that waits for the copies, and returns them in order.
    """
    kind = next((one.device.type for one in tensors if one.device.type != "cpu"), "cpu")
    if kind not in EVENTS:
        return lambda: [one.cpu() for one in tensors]
    copies, event = [one.to("cpu", non_blocking=True) for one in tensors], EVENTS[kind]()
    event.record()

    def read() -> list[Tensor]:
        event.synchronize()
        return copies

    return read
