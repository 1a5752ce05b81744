"""Partitions by class, for clients with different labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_share
from lightning_pfl.data.partition.base import (
    Array,
    Partition,
    Parts,
    Positions,
    check_classes,
    check_clients,
    check_min_size,
    check_positive,
    cut_by_shares,
    top_up,
)
from lightning_pfl.data.partition.draw import class_counts


class ClassesPerClient(Partition):
    r"""Each client holds a fixed number of classes, the same ones in train and test.

    With :math:`n` clients and :math:`C` classes, every class is split evenly into
    :math:`s = S n / C` shards. A list that contains every class :math:`s` times is shuffled and cut
    into :math:`n` rows of :math:`S`; a client takes one shard per entry of its row. The same class
    can come up twice in a row, so a client has *at most* :math:`S` classes. Where :math:`S n / C`
    isn't an integer, random classes get one shard more than the others. All samples are used.

    Args:
        classes_per_client: :math:`S`, between 1 and the number of classes.

    References:
        Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized
        federated learning. ICML 2021. arXiv:2102.07078, section 5 and its released code.

    Example:
        >>> labels = np.arange(40) % 4
        >>> parts = ClassesPerClient(2)(labels, 10, np.random.default_rng(0))
        >>> {len(part) for part in parts}, max(len(np.unique(labels[part])) for part in parts)
        ({4}, 2)
    """

    def __init__(self, classes_per_client: int = 2) -> None:
        if (
            isinstance(classes_per_client, bool)
            or not isinstance(classes_per_client, int)
            or classes_per_client < 1
        ):
            raise ValueError(
                "Expected `classes_per_client` to be a positive int, but got "
                f"{classes_per_client=}. Use 2 for strong and more for mild label skew."
            )
        self.classes_per_client = classes_per_client

    def split(self, labels: Array, num_clients: int | None, rng: Generator) -> tuple[Parts, Any]:
        """Draw the rows of classes, the plan ``(num_clients, S)``, and deal out the shards."""
        clients = check_clients(len(labels), num_clients)
        classes, counts = np.unique(labels, return_counts=True)
        self._check(check_classes(labels, "ClassesPerClient"), clients)
        times, extra = divmod(clients * self.classes_per_client, len(classes))
        shards = np.full(len(classes), times)
        shards[rng.permutation(len(classes))[:extra]] += 1
        short = counts < shards
        if short.any():
            raise ValueError(
                "Expected every class to have at least one sample per shard, but got "
                f"{counts[short][0]} samples for {shards[short][0]} shards of class "
                f"{classes[short][0]}. Use fewer clients or fewer classes per client."
            )
        rows = rng.permutation(np.repeat(classes, shards))
        plan = rows.reshape(clients, self.classes_per_client)
        return self.apply(labels, plan, rng), plan

    def apply(self, labels: Array, plan: Any, rng: Generator) -> Parts:
        """Split every class evenly over its entries in the rows; classes of no row are left out."""
        pieces: list[list[Positions]] = [[] for _ in plan]
        for label in np.unique(plan):
            owners = rng.permutation(np.nonzero(plan == label)[0])
            shards = np.array_split(rng.permutation(np.nonzero(labels == label)[0]), len(owners))
            for owner, shard in zip(owners, shards, strict=True):
                pieces[owner].append(shard)
        return [np.concatenate(piece) for piece in pieces]

    def _check(self, classes: Array, num_clients: int) -> None:
        if self.classes_per_client > len(classes):
            raise ValueError(
                f"Expected `classes_per_client` to be at most the number of classes "
                f"({len(classes)}), but got classes_per_client={self.classes_per_client}. "
                "Use a smaller number, or IID."
            )
        if num_clients * self.classes_per_client < len(classes):
            raise ValueError(
                f"Expected {len(classes)} classes to fit into num_clients * classes_per_client "
                f"places, but got {num_clients} * {self.classes_per_client}. "
                "Use more clients or more classes per client."
            )


class Dirichlet(Partition):
    r"""Each class is split over the clients in Dirichlet proportions.

    For each class the proportions over the :math:`n` clients are drawn from
    :math:`\mathrm{Dir}(\alpha 1_n)`. Small :math:`\alpha` concentrates a class at few clients,
    large :math:`\alpha` approaches IID. All samples are used, and each class of the test split is
    divided in proportion to the clients' training samples of it. Clients below ``min_size`` are
    topped up with random samples of the largest ones, where drawing again might never end.

    Args:
        alpha: :math:`\alpha > 0`, concentration.
        min_size: Smallest number of samples of a client, at least 0, before the data module cuts
            validation (and, without a test set, test) samples off them.

    References:
        Yurochkin et al. Bayesian nonparametric federated learning of neural networks. ICML 2019.
        arXiv:1905.12022, section 4 (proportions over clients for each class).
    """

    def __init__(self, alpha: float = 0.5, min_size: int = 1) -> None:
        self.alpha = check_positive("alpha", alpha)
        self.min_size = check_min_size(min_size)

    def split(self, labels: Array, num_clients: int | None, rng: Generator) -> tuple[Parts, Any]:
        """Draw proportions, cut every class by them, and top up small clients.

        The plan ``{class: (num_clients,)}`` has the clients' samples of each class, so that no
        client is tested on a class that rounding left it without, or that it was topped up with.
        """
        clients = check_clients(len(labels), num_clients, self.min_size)
        classes = check_classes(labels, "Dirichlet")
        shares = {label: self._proportions(clients, rng) for label in classes.tolist()}
        parts = top_up(cut_classes(labels, shares, rng), self.min_size, rng)
        return parts, dict(zip(classes.tolist(), class_counts(parts, labels)[1], strict=True))

    def apply(self, labels: Array, plan: Any, rng: Generator) -> Parts:
        """Divide each class in proportion to the clients' training samples of it.

        Classes outside the plan are left out.
        """
        return cut_classes(labels, plan, rng)

    def _proportions(self, num_clients: int, rng: Generator) -> npt.NDArray[np.float64]:
        with np.errstate(all="ignore"):
            drawn = rng.dirichlet(np.full(num_clients, self.alpha))
        if np.isfinite(drawn).all() and drawn.sum() > 0.5:
            return drawn
        # Outside the range of floats: the limits, all samples at one client or equal shares.
        if self.alpha < 1:
            drawn = np.zeros(num_clients)
            drawn[rng.integers(num_clients)] = 1.0
            return drawn
        return np.full(num_clients, 1 / num_clients)


@dataclass(frozen=True)
class LabelShares:
    """Plan of `LabelSkew`: the label, and its share in each client's samples."""

    label: Any
    shares: npt.NDArray[np.float64]


class LabelSkew(Partition):
    """Equal sizes, with a given share of one label in the last clients.

    The other clients have the label's share in the data. Samples that would break these
    proportions are left out, so clients are as large as the data allow. The defaults are the label
    skew of the FedMAP experiments (of ten clients, the last five have 85 % of class 0).

    Args:
        label: The prevailing label.
        share: Its share in the skewed clients, in [0, 1].
        skewed_fraction: Share of clients that are skewed, in [0, 1], rounded to a number of
            clients; the last ones.
    """

    def __init__(self, label: int = 0, share: float = 0.85, skewed_fraction: float = 0.5) -> None:
        check_types(LabelSkew.__init__, {"label": label})
        self.label = label
        self.share = check_share("share", share)
        self.skewed_fraction = check_share("skewed_fraction", skewed_fraction)

    def split(self, labels: Array, num_clients: int | None, rng: Generator) -> tuple[Parts, Any]:
        """Fix the shares, the plan, and assign samples by them."""
        clients = check_clients(len(labels), num_clients)
        classes = check_classes(labels, "LabelSkew")
        if self.label not in classes:
            raise ValueError(
                f"Expected `label` to be one of the classes {classes.tolist()[:20]}, but got "
                f"label={self.label!r}. Choose a label that the data have."
            )
        shares = np.full(clients, np.mean(labels == self.label))
        shares[clients - round(self.skewed_fraction * clients) :] = self.share
        plan = LabelShares(self.label, shares)
        parts = self.apply(labels, plan, rng)
        if len(parts[0]) == 0:
            raise ValueError(
                f"Expected enough samples for {clients} clients with share={self.share} of label "
                f"{self.label!r}, but got {int((labels == self.label).sum())} samples with it and "
                f"{int((labels != self.label).sum())} without. Use fewer clients or another share."
            )
        return parts, plan

    def apply(self, labels: Array, plan: Any, rng: Generator) -> Parts:
        """Give every client the same number of samples, with its share of the label."""
        inside = rng.permutation(np.nonzero(labels == plan.label)[0])
        outside = rng.permutation(np.nonzero(labels != plan.label)[0])
        need_in, need_out = plan.shares.sum(), (1 - plan.shares).sum()
        size = int(
            min(
                len(inside) / need_in if need_in > 0 else np.inf,
                len(outside) / need_out if need_out > 0 else np.inf,
            )
            + 1e-9  # 3 / 0.3 is 10, also in floats
        )
        # Rounding the cumulated counts keeps both totals within the available samples.
        cuts_in = np.floor(np.cumsum(plan.shares) * size + 1e-9).astype(np.int64)
        cuts_out = size * np.arange(1, len(plan.shares) + 1) - cuts_in
        split_in, split_out = np.split(inside, cuts_in), np.split(outside, cuts_out)
        return [np.concatenate(pair) for pair in zip(split_in[:-1], split_out[:-1], strict=True)]


def cut_classes(labels: Array, plan: dict[Any, Any], rng: Generator) -> Parts:
    """Cut the samples of each class by the class's shares of the clients."""
    num_clients = len(next(iter(plan.values())))
    pieces: list[list[Positions]] = [[] for _ in range(num_clients)]
    for label, shares in plan.items():
        order = rng.permutation(np.nonzero(labels == label)[0])
        for piece, part in zip(pieces, cut_by_shares(order, shares), strict=True):
            piece.append(part)
    return [np.concatenate(piece) for piece in pieces]
