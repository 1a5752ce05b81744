"""The gate, which rejects uploads that aren't finite or too large."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from lightning_pfl.contract.records import ClientInfo, LocalResult
from lightning_pfl.core.sums import double_sqnorm
from lightning_pfl.core.tree import (
    Model,
    Path,
    Tree,
    finite,
    items,
    leaf_at,
    leaves,
    named_leaves,
    rows,
)
from lightning_pfl.federation.ranks import RankShard

MaxNorm = float | Literal["auto"] | None
OUTLIER = 100.0
"""Multiple of the round's median norm above which an update is an outlier."""
ABSURD = 1e4
"""Multiple of the model's norm and the median update above which a server step is refused."""
FEWEST = 3
"""Smallest number of clients for a meaningful median."""


@dataclass
class Verdict:
    """The gate's decisions about the uploads of a round.

    Attributes:
        accepted: Accepted clients, bool ``(clients,)``, on the CPU.
        rejected: Reasons by id of the rejected clients.
        norms: Norm of each client's update, float64 ``(clients,)``, on the CPU.
        outliers: Descriptions by id of accepted clients with outlying updates.
    """

    accepted: Tensor
    rejected: dict[int, str]
    norms: Tensor
    outliers: dict[int, str] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Median norm of the accepted updates; 0 where there are none."""
        known = self.norms[self.accepted]
        return float(known.median()) if len(known) else 0.0


def accept_uploads(
    result: LocalResult, received: Tree, info: ClientInfo, max_norm: MaxNorm
) -> Verdict:
    r"""Decide for each client separately whether its upload is accepted.

    A client is rejected if its upload, its state or its training loss isn't finite, or if
    :math:`\lVert \text{upload} - \text{received} \rVert_2` is above ``max_norm``. Entries of an
    upload without a counterpart in what was received count as they are, except scalars per client
    such as a log weight.

    Args:
        result: The clients' results.
        received: Trees that the clients started from, ``(clients, ...)``.
        info: The clients.
        max_norm: Largest norm of an update; None or ``"auto"`` for no fixed bound.
    """
    loss = result.loss
    everyone = torch.ones(len(info), dtype=torch.bool, device=loss.device)
    norms = update_norm(result.uploads, received, everyone)
    checks = {
        "upload is not finite": everyone & _finite(result.uploads, received, norms),
        "client state is not finite": everyone & finite(result.client_state),
        # NaN means no loss: the client took no step, or the method solves in closed form.
        "loss is not finite": ~loss.isinf(),
    }
    if isinstance(max_norm, (int, float)):
        checks[f"update norm above max_update_norm={max_norm}"] = norms <= max_norm
    # The round's only synchronisation with the device.
    *passed, norms = torch.stack([*(ok.double() for ok in checks.values()), norms]).cpu()
    accepted = torch.stack(passed).bool().all(0)
    rejected = {}
    for position in (~accepted).nonzero().flatten().tolist():
        failed = [reason for reason, ok in zip(checks, passed, strict=True) if not ok[position]]
        rejected[int(info.index[position])] = failed[0]
    return Verdict(accepted, rejected, norms)


def _finite(uploads: Tree, received: Tree, norms: Tensor) -> Tensor:
    """Find the clients whose uploads are finite, bool ``(clients,)``.

    Args:
        uploads: Trees that clients send, ``(clients, ...)``.
        received: Trees that they received, ``(clients, ...)``.
        norms: Those of the differences; finite ones are of finite entries, which aren't read again.
    """
    if norms.device.type != "cpu" or not norms.isfinite().all():
        return finite(uploads)
    measured = {path for path, _, _ in changes(uploads, received)}
    others = {"/".join(path): leaf for path, leaf in items(uploads) if path not in measured}
    return finite(others)


Decisions = tuple[dict[int, str], list[bool], list[float]]
"""What a process says about its clients: reasons by id, who is accepted, and norms."""


def decide(
    shard: RankShard, mine: LocalResult, received: Tree, info: ClientInfo, max_norm: MaxNorm
) -> Decisions:
    """Decide about this process's shard of a cohort.

    Args:
        shard: The shard.
        mine: Results of its clients.
        received: Trees that the cohort started from, ``(clients, ...)``.
        info: The cohort.
        max_norm: As in :func:`accept_uploads`.
    """
    found = accept_uploads(mine, shard.slice(received), info.rows(shard.index), max_norm)
    return found.rejected, found.accepted.tolist(), found.norms.tolist()


def accept_cohort(
    shard: RankShard,
    decisions: Sequence[Decisions],
    received: Tree,
    info: ClientInfo,
    max_norm: MaxNorm,
) -> Verdict:
    """Join the decisions of all processes about their shards of a cohort.

    Args:
        shard: This process's shard of the cohort.
        decisions: Those of each process.
        received: Trees that the cohort started from, ``(clients, ...)``.
        info: The cohort.
        max_norm: As in :func:`accept_uploads`; ``"auto"`` rejects the result of
            :func:`find_outliers`.
    """
    rejected, accepted, norms = zip(*decisions, strict=True)
    reasons = {client: reason for part in rejected for client, reason in part.items()}
    verdict = Verdict(
        torch.tensor(shard.in_order(accepted), dtype=torch.bool),
        {client: reasons[client] for client in info.index.tolist() if client in reasons},
        torch.tensor(shard.in_order(norms), dtype=torch.float64),
    )
    return find_outliers(verdict, received, info, max_norm)


def find_outliers(verdict: Verdict, received: Tree, info: ClientInfo, max_norm: MaxNorm) -> Verdict:
    """Find accepted updates that are far larger than the median.

    The bound is :data:`OUTLIER` times the median of the accepted, scaled by the client's local
    steps over the median ones. An outlier is also larger than all that its client received: where
    most clients have converged, the median is next to 0 and means nothing. With fewer than three
    clients there are none.

    Args:
        verdict: Decisions about each client separately.
        received: Trees that the clients started from, ``(clients, ...)``.
        info: The clients.
        max_norm: ``"auto"`` rejects the outliers.
    """
    accepted, median = verdict.accepted, verdict.median
    if int(accepted.sum()) < FEWEST or median == 0:
        return verdict
    steps = info.steps.cpu().double()
    further = (steps / steps[accepted].median().clamp_min(1)).clamp_min(1)
    large = accepted & (verdict.norms > OUTLIER * median * further)
    if not large.any():
        return verdict
    at = large.nonzero().flatten()
    started = rows(received, at)
    device = next((leaf.device for leaf in leaves(started)), at.device)
    large[at] = verdict.norms[at] > update_norm(started, {}, at.to(device)).cpu()
    found = {
        int(info.index[at]): f"update norm {float(verdict.norms[at]):.3g} is "
        f"{float(verdict.norms[at]) / median:.3g} times the median of the round"
        for at in large.nonzero().flatten().tolist()
    }
    if max_norm != "auto":
        return replace(verdict, outliers=found)
    reasons = {**verdict.rejected, **found}
    ordered = {client: reasons[client] for client in info.index.tolist() if client in reasons}
    return replace(verdict, accepted=accepted & ~large, rejected=ordered)


def refuse_step(before: Tree, after: Tree, models: tuple[Model, Model], median: float) -> str:
    """Return why the server must not take a step, although all uploads were accepted.

    Args:
        before: The server's tree.
        after: The result of ``server_update``.
        models: The server's models, before and after.
        median: Median norm of the accepted updates.

    Returns:
        The reason; empty for a step that may be taken.
    """
    old_model, new_model = models
    pairs = [
        (old_model[name].unsqueeze(0), leaf.unsqueeze(0))
        for name, leaf in new_model.items()
        if _is_float(leaf) and name in old_model
    ]
    moved = [double_sqnorm(new, old).sum() for old, new in pairs]
    # A norm that is finite is that of finite entries, and reads them once.
    measured = {id(new_model[name]) for name in new_model.keys() & old_model.keys()}
    others = [leaf for leaf in leaves(after) if _is_float(leaf) and id(leaf) not in measured]
    sums = [*(_as_sum(leaf) for leaf in others), *moved]
    if not sums:
        return ""
    numbers = torch.stack([leaf.double() for leaf in sums]).cpu()
    step = float(numbers[len(others) :].sum().sqrt())
    if numbers.isfinite().all() and step <= ABSURD * median:
        return ""
    if name := _broken(before, after):
        return f"`{name}` would hold NaN or infinity"
    size = sum(float(double_sqnorm(old).sum()) for old, _ in pairs)
    usual = max(math.sqrt(size), median)
    if usual and not step <= ABSURD * usual:
        return (
            f"it would move the model by {step:.3g}, {step / usual:.3g} times its own norm and the "
            "median update"
        )
    return ""


def _broken(before: Tree, after: Tree) -> str:
    """Return the first entry that isn't finite and was, or is new; empty if there is none."""
    known = {name: leaf for name, leaf in named_leaves(before).items() if _is_float(leaf)}
    for name, leaf in named_leaves(after).items():
        # A method may have infinities on purpose, as initial values.
        meant = name in known and not known[name].isfinite().all()
        if _is_float(leaf) and not meant and not leaf.isfinite().all():
            return name
    return ""


def _as_sum(leaf: Tensor) -> Tensor:
    """Return a number that is finite if all entries are, but for an overflow."""
    if leaf.dtype == torch.float64:
        return leaf.sum()
    # Squares of the other types are finite in double precision, and a sum reads the leaf once.
    return double_sqnorm(leaf.unsqueeze(0))[0]


def _is_float(leaf: Tensor) -> bool:
    return leaf.is_floating_point() and leaf.numel() > 0


def update_norm(uploads: Tree, received: Tree, like: Tensor) -> Tensor:
    """Compute the norm of the difference of uploads and received trees, ``(clients,)``.

    Args:
        uploads: Trees that clients send, ``(clients, ...)``.
        received: Trees that they received, ``(clients, ...)``.
        like: A tensor ``(clients,)`` on the device, for uploads without entries.
    """
    total = torch.zeros(len(like), dtype=torch.float64, device=like.device)
    for _, leaf, before in changes(uploads, received):
        total += double_sqnorm(leaf, before)
    return total.sqrt()


def changes(uploads: Tree, received: Tree) -> Iterator[tuple[Path, Tensor, Tensor | None]]:
    """Iterate over the paths of floating-point entries, and what they are after and before.

    An entry that wasn't received changes from zero, None; a number per client, such as a loss, is
    none.

    Args:
        uploads: Trees that clients send, ``(clients, ...)``.
        received: Trees that they received, ``(clients, ...)``.
    """
    for path, leaf in items(uploads):
        before = leaf_at(received, path)
        if not leaf.is_floating_point():
            continue
        if before is not None and before.shape == leaf.shape:
            yield path, leaf, before
        elif leaf.ndim > 1:
            yield path, leaf, None
