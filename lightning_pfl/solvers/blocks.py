"""Random choice of the blocks that PDMM updates in a round, and its step parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_pfl.core.checks import is_number, share_of
from lightning_pfl.core.randomness import derive, permutation
from lightning_pfl.solvers.pairs import Pairs


def damping(updated: int, blocks: int) -> tuple[float, float]:
    r"""Compute PDMM's :math:`\tau` and :math:`\nu` for updates of :math:`K` of :math:`J` blocks.

    With :math:`\tilde K = \min(3, K)`, as a constraint touches 3 blocks,

    .. math::
        \tau = \frac{K}{\tilde K (2 J - K)}, \qquad \nu = 1 - \frac{1}{\tilde K}

    Args:
        updated: :math:`K \ge 1`, blocks updated per iteration.
        blocks: :math:`J \ge K`, number of blocks.

    Example:
        >>> damping(2, 16)
        (0.03333333333333333, 0.5)

    References:
        Wang, Banerjee, Luo. Parallel direction method of multipliers. NeurIPS 2014.
        arXiv:1406.4064, and the first author's script.
    """
    touched = min(3, updated)
    return updated / (touched * (2 * blocks - updated)), 1 - 1 / touched


@dataclass(frozen=True)
class Drawn:
    """The blocks of one round, on the CPU.

    Attributes:
        models: Clients whose model is updated, bool ``(clients,)``.
        pairs: Pairs whose difference is updated, bool ``(clients, slots)``.
        duals: Pairs whose dual variable is updated, bool ``(clients, slots)``.
    """

    models: Tensor
    pairs: Tensor
    duals: Tensor


class BlockDraws:
    """Uniform draws of primal and of dual blocks, a function of seed and round.

    Args:
        pairs: The pairs, on the CPU.
        members: Clients whose model is updated, bool ``(clients,)``.
        blocks: Primal blocks per round: a fraction (float) or a number (int).
        dual_blocks: Dual variables per round: a fraction (float) or a number (int).
        seed: Seed of the draws.

    Attributes:
        total: :math:`J`, the number of primal blocks.
    """

    def __init__(
        self,
        pairs: Pairs,
        members: Tensor,
        blocks: float | int,
        dual_blocks: float | int,
        seed: int,
    ) -> None:
        self.pairs, self.blocks, self.dual_blocks, self.seed = pairs, blocks, dual_blocks, seed
        self._primal = torch.cat([members, pairs.mask.flatten()])
        self.total = int(self._primal.sum())
        self._last: tuple[int, Drawn] | None = None

    def of(self, round: int) -> Drawn:
        """Draw the blocks of a round."""
        if self._last is None or self._last[0] != round:
            primal = _draw(self._primal, self.blocks, derive(self.seed, "primal blocks", round))
            duals = self.pairs.mask.flatten()
            duals = _draw(duals, self.dual_blocks, derive(self.seed, "dual blocks", round))
            count, shape = len(self.pairs), self.pairs.mask.shape
            drawn = Drawn(primal[:count], primal[count:].view(shape), duals.view(shape))
            self._last = round, drawn
        return self._last[1]


def _draw(existing: Tensor, share: float | int, key: int) -> Tensor:
    at = existing.nonzero().flatten()
    count = max(1, share if isinstance(share, int) else share_of(share, len(at)))
    if count >= len(at):
        return existing
    chosen = torch.zeros_like(existing)
    chosen[at[permutation(len(at), key)[:count]]] = True
    return chosen


def check_block_share(name: str, value: float | int) -> None:
    """Raise ValueError unless ``value`` is a fraction in (0, 1] (float) or an int >= 1."""
    whole = isinstance(value, int)
    if not is_number(value) or not (value >= 1 if whole else 0 < value <= 1):
        raise ValueError(
            f"Expected `{name}` to be a share in (0, 1] or a number of at least 1, but got "
            f"{name}={value!r}. Use 1.0 for all."
        )
