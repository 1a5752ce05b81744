"""Sampling of the clients that train or are evaluated, a pure function of seed and round."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pfl.core.checks import share_of
from lightning_pfl.core.randomness import derive, first_of_permutation, permutation


def cohort_size(participation: float | int, num_clients: int, name: str = "participation") -> int:
    """Compute the size of a cohort.

    It is ``max(1, floor(participation * num_clients))``, or the count itself.

    Args:
        participation: A fraction in (0, 1] (float) or a number of clients (int).
        num_clients: Number of clients that can take part.
        name: Name of the setting, for an error.

    Raises:
        ValueError: If a count exceeds the number of clients.
    """
    if isinstance(participation, int):
        if participation > num_clients:
            raise ValueError(
                f"Expected `{name}` to be at most the {num_clients} clients that can "
                f"take part, but got {name}={participation!r}. Use a smaller count, or a "
                "fraction such as 0.1."
            )
        return participation
    return max(1, share_of(participation, num_clients))


def check_participation(participation: float | int, name: str = "participation") -> float | int:
    """Raise ValueError unless the value is a fraction in (0, 1] or a positive count."""
    number = isinstance(participation, (int, float)) and not isinstance(participation, bool)
    valid = number and (
        participation >= 1 if isinstance(participation, int) else 0 < participation <= 1
    )
    if not valid:
        raise ValueError(
            f"Expected `{name}` to be a fraction in (0, 1] (a float) or a number of clients "
            f">= 1 (an int), but got {name}={participation!r}. Use 0.1 for a tenth of the "
            "clients, 10 for ten of them."
        )
    return participation


def sample_cohort(seed: int, round: int, eligible: Tensor, participation: float | int) -> Tensor:
    """Sample the clients of a round, uniformly without replacement.

    Args:
        seed: The run's seed.
        round: The communication round, from 0.
        eligible: Ids of the clients that may take part, int64 ``(eligible,)``.
        participation: A fraction in (0, 1] or a count.

    Returns:
        Client ids in ascending order, int64 ``(cohort,)``.
    """
    size = cohort_size(participation, len(eligible))
    if size == len(eligible):
        return eligible
    drawn = first_of_permutation(len(eligible), size, derive(seed, "cohort", round))
    return torch.sort(eligible[drawn]).values


def sample_evaluated(seed: int, turn: int, clients: int, share: float | int) -> Tensor:
    """Sample the clients of a validation, in turns that see all of them.

    Clients are shuffled for each pass over them, and each turn takes the next ones; the last turn
    of a pass takes the last ones, of which some had their turn, so that all turns have equally
    many. Places in a random order are fixed, so that each turn alone is a uniform sample without
    replacement.

    Args:
        seed: The run's seed.
        turn: Number of the validation, from 0.
        clients: Number of clients that can be evaluated.
        share: A fraction of them in (0, 1] or a count.

    Returns:
        Positions in ascending order, int64 ``(evaluated,)``.
    """
    size = cohort_size(share, clients, "evaluated_clients")
    if size == clients:
        return torch.arange(clients)
    number, place = divmod(turn, -(-clients // size))
    first = min(place * size, clients - size)
    order = permutation(clients, derive(seed, "evaluated clients", number))
    return torch.sort(order[first : first + size]).values
