"""How much memory there is, for methods whose state grows with the square of the clients."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_info

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def available(device: torch.device) -> int:
    """Bytes that can be allocated on a device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def size(count: int) -> str:
    """Bytes in the unit in which they are from 1 to 1023.

    Example:
        >>> size(1000), size(1536), size(3 * 2**40)
        ('1000 bytes', '1.5 KiB', '3 TiB')
    """
    if count < 1024:
        return f"{count} bytes"
    power = min((count.bit_length() - 1) // 10, 4)
    number = count / 1024**power
    # Three digits, but 1023 rather than 1.02e+03.
    return f"{number:.0f} {UNITS[power]}" if number >= 100 else f"{number:.3g} {UNITS[power]}"


def require(needed: int, device: torch.device, what: str, remedy: str) -> None:
    """Say how much memory something will take, or refuse to start.

    Args:
        needed: Bytes.
        device: Where.
        what: Begins the sentence, such as ``"FedAvg with 3 clients"``.
        remedy: What to do instead, a sentence.

    Raises:
        MisconfigurationException: If there is less.
    """
    free = available(device)
    if needed > free:
        raise MisconfigurationException(
            f"Expected {what} to fit the memory of {device}, but it takes "
            f"{size(needed)} and {size(free)} are free. {remedy}"
        )
    rank_zero_info(f"{what} takes {size(needed)} of memory at most.")
