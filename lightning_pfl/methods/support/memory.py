"""Memory checks for methods whose state grows with clients, edges or pairs."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.core.tree import Tree, leaves, total_nbytes

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def available(device: torch.device) -> int:
    """Return the bytes that can be allocated on a device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def size(count: int) -> str:
    """Format bytes in the unit in which they are from 1 to 1023.

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
    """Log the memory that something needs, or raise an error if there is less.

    Args:
        needed: Bytes.
        device: Where.
        what: Needs it, such as ``"FedAvg with 3 clients"``.
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
    sentence = f"{what[:1].upper()}{what[1:]} takes"
    rank_zero_info(f"{sentence} {size(needed)} of memory at most.")


MODELS = 10
"""Copies of all clients' models in a round, at most: the server's before and after it, the clients'
and their starts, uploads, and the latter's changes in double precision.
double precision, how far that is from what had come.
"""


def require_rows(method: str, clients: int, row: Tree, copies: int = MODELS) -> None:
    """Call :func:`require` for a method whose server has a model of every client.

    Args:
        method: Its name.
        clients: How many.
        row: One client's model.
        copies: How many models of each there are at once.
    """
    first = next(leaves(row), torch.empty(0))
    require(
        copies * clients * total_nbytes(row),
        first.device,
        f"{method} with the models of {clients} clients, {copies} times,",
        "Use fewer clients, a smaller model, or a method without a model for each client.",
    )
