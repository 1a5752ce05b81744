"""FedMAP's synthetic data: classes by distance in a hidden subspace, seen through client maps."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_used
from lightning_pfl.data.sources.base import Fields, Labels, Source, SourceData

Scenario = Literal["iid", "feature", "quantity", "label"]
# Purposes of the independent random streams of one seed.
ROTATION, SAMPLES, MAP, SPLIT = range(4)


class FedMAPSynthetic(Source):
    r"""Binary classification by the distance from the origin in a hidden subspace.

    Of the ``num_features`` coordinates :math:`z` of a sample, the first ``intrinsic_dim`` determine
    the class, the others are a nuisance:

    ===========  ==================================================================================
    class 0      :math:`\mathcal N(0, \text{center\_variance}\, I)`
    class 1      uniform direction times a radius from
                 :math:`\mathcal N(\text{radius}, \text{radius\_variance})`
    nuisance     :math:`\mathcal N(0, \text{nuisance\_variance}\, I)`, of both classes
    ===========  ==================================================================================

    One random rotation :math:`Q`, the same for all clients, hides the subspace. Then client
    :math:`k = 0, 1, \dots` sees

    .. math::
        x = z Q A_k + b_k, \qquad (A_k)_{ij} \sim \mathcal N(0, 1), \quad
        b_k = \text{offset} \cdot (k + 1) \cdot \mathcal N(0, I)

    Every client's samples are cut at random into training and test samples, and scaled by the mean
    and standard deviation of its *training* samples. Validation samples that a data module cuts
    off the training samples were part of this scaling.

    =============  ================================================================================
    ``iid``        all clients have both classes in equal shares, and no map :math:`A_k, b_k`
    ``feature``    equal shares, a map each
    ``quantity``   as ``feature``, but the last ``skewed_clients`` hold ``small_samples`` samples
    ``label``      as ``feature``, but ``majority_share`` of the samples of the last
                   ``skewed_clients`` are of class 0
    =============  ================================================================================

    The column ``client`` numbers the clients, so the partition is `Natural`.

    Args:
        scenario: What differs between clients.
        num_clients: Number of clients.
        samples: Samples of a client, training and test together.
        small_samples: Samples of a small client (``quantity``).
        majority_share: Share of class 0 at a skewed client (``label``), in (0, 1).
        skewed_clients: Number of small or skewed clients, the last ones. None: half of them.
        num_features: Number of features.
        intrinsic_dim: Dimension of the informative subspace, at most ``num_features``.
        radius: Mean radius of class 1.
        center_variance: Variance of each coordinate of class 0 in the subspace.
        radius_variance: Variance of the radius of class 1.
        nuisance_variance: Variance of each coordinate outside the subspace: 2 in the paper's text,
            9 in its code.
        offset: Scale of the clients' shifts, at least 0.
        train_fraction: Training share of a client's samples, in (0, 1).
        standardize: Whether features are scaled per client.
        seed: Seed of everything.

    Raises:
        ValueError: A setting is out of its range.

    Deviation from the paper: its code has the client's index as a 31st feature, which the scaling
    turns into zeros; it is left out here.

    Example:
        >>> FedMAPSynthetic("quantity", samples=20, small_samples=10).sizes()
        [20, 20, 20, 20, 20, 10, 10, 10, 10, 10]

    References:
        Zhang, Esteve-Yagüe, Dittmer, Schönlieb, Roberts. FedMAP: Unlocking potential in
        personalized federated learning through bi-level MAP optimization. arXiv:2405.19000,
        appendix B.1.
    """

    def __init__(
        self,
        scenario: Scenario = "feature",
        num_clients: int = 10,
        samples: int = 2000,
        small_samples: int = 500,
        majority_share: float = 0.85,
        skewed_clients: int | None = None,
        num_features: int = 30,
        intrinsic_dim: int = 4,
        radius: float = 8.0,
        center_variance: float = 2.0,
        radius_variance: float = 2.0,
        nuisance_variance: float = 2.0,
        offset: float = 5.0,
        train_fraction: float = 0.7,
        standardize: bool = True,
        seed: int = 0,
    ) -> None:
        check_types(FedMAPSynthetic.__init__, locals())
        for given, scenarios in (
            ({"majority_share": majority_share}, ("label",)),
            ({"small_samples": small_samples}, ("quantity",)),
            ({"skewed_clients": skewed_clients}, ("label", "quantity")),
            ({"offset": offset}, ("feature", "label", "quantity")),
        ):
            condition = "scenario=" + " or ".join(map(repr, scenarios))
            check_used(FedMAPSynthetic.__init__, given, scenario in scenarios, condition)
        self.scenario, self.num_clients = scenario, num_clients
        self.samples, self.small_samples = samples, small_samples
        self.majority_share = majority_share
        self.skewed_clients = num_clients // 2 if skewed_clients is None else skewed_clients
        self.num_features, self.intrinsic_dim = num_features, intrinsic_dim
        self.radius, self.center_variance = radius, center_variance
        self.radius_variance, self.nuisance_variance = radius_variance, nuisance_variance
        self.offset, self.train_fraction = offset, train_fraction
        self.standardize, self.seed = standardize, seed
        self._check()

    def load(self) -> SourceData:
        """Draw all clients' samples, sorted by client, features ``(samples, num_features)``."""
        clients = [self.client(number) for number in range(self.num_clients)]
        (x, y, owner), (test_x, test_y, test_owner) = (
            (
                np.concatenate([client[split][0] for client in clients]),
                np.concatenate([client[split][1] for client in clients]),
                np.repeat(np.arange(len(clients)), [len(client[split][1]) for client in clients]),
            )
            for split in (0, 1)
        )
        return SourceData(
            _fields(x, y),
            y,
            _fields(test_x, test_y),
            test_y,
            num_classes=2,
            columns={"client": owner},
            test_columns={"client": test_owner},
        )

    def sizes(self) -> list[int]:
        """Return the number of samples of each client, training and test together."""
        small = self.small_samples if self.scenario == "quantity" else self.samples
        large = self.num_clients - self.skewed_clients
        return [self.samples] * large + [small] * self.skewed_clients

    def client(self, number: int) -> tuple[tuple[Labels, Labels], tuple[Labels, Labels]]:
        """Draw one client's training and test samples, each as features and labels, in float64.

        A client doesn't depend on the number of others.
        """
        labels = self._labels(number)
        x = self.hidden(labels, self._rng(SAMPLES, number)) @ self.rotation()
        if self.scenario != "iid":
            matrix, shift = self.map_of(number)
            x = x @ matrix + shift
        order = self._rng(SPLIT, number).permutation(len(labels))
        cut = min(max(1, round(self.train_fraction * len(labels))), len(labels) - 1)
        train, test = order[:cut], order[cut:]
        if self.standardize:
            mean, spread = x[train].mean(0), x[train].std(0)
            x = (x - mean) / np.where(spread > 0, spread, 1)
        return (x[train], labels[train]), (x[test], labels[test])

    def rotation(self) -> Labels:
        """Draw the orthogonal matrix :math:`Q`, uniformly distributed, common to all clients."""
        square = (self.num_features, self.num_features)
        q, r = np.linalg.qr(self._rng(ROTATION, 0).standard_normal(square))
        # Without the signs of R's diagonal the distribution depends on the QR routine.
        rotation: Labels = q * np.sign(np.diag(r))
        return rotation

    def map_of(self, number: int) -> tuple[Labels, Labels]:
        """Draw the matrix :math:`A_k` and the shift :math:`b_k` of a client."""
        rng, dim = self._rng(MAP, number), self.num_features
        matrix = rng.standard_normal((dim, dim))
        return matrix, self.offset * (number + 1) * rng.standard_normal(dim)

    def hidden(self, labels: Labels, rng: np.random.Generator) -> Labels:
        """Draw coordinates before rotation and map, ``(samples, num_features)``.

        Args:
            labels: Classes, 0 or 1, ``(samples,)``.
            rng: Source of all randomness.
        """
        count, dim = len(labels), self.intrinsic_dim
        ball = np.sqrt(self.center_variance) * rng.standard_normal((count, dim))
        direction = rng.standard_normal((count, dim))
        direction /= np.linalg.norm(direction, axis=1, keepdims=True)
        length = self.radius + np.sqrt(self.radius_variance) * rng.standard_normal((count, 1))
        rest = rng.standard_normal((count, self.num_features - dim))
        inside = np.where(labels[:, None] == 0, ball, length * direction)
        hidden: Labels = np.hstack([inside, np.sqrt(self.nuisance_variance) * rest])
        return hidden

    def _labels(self, number: int) -> Labels:
        """Return the classes of a client's samples, sorted; the split shuffles them."""
        size = self.sizes()[number]
        skewed = self.scenario == "label" and number >= self.num_clients - self.skewed_clients
        zeros = round((self.majority_share if skewed else 0.5) * size)
        return np.repeat([0, 1], [zeros, size - zeros])

    def _rng(self, purpose: int, client: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, purpose, client))

    def _check(self) -> None:
        least = {"num_clients": 1, "samples": 2, "small_samples": 2, "intrinsic_dim": 1}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ValueError(
                    f"Expected `{name}` to be at least {lowest}, but got "
                    f"{name}={getattr(self, name)!r}. A client needs training and test samples."
                )
        for name in ("radius_variance", "center_variance", "nuisance_variance", "offset"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(
                    f"Expected `{name}` to be a finite number of at least 0, but got "
                    f"{name}={getattr(self, name)!r}. Use 0 to switch it off."
                )
        for name in ("majority_share", "train_fraction"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(
                    f"Expected `{name}` to be in (0, 1), but got {name}={getattr(self, name)!r}. "
                    "Use 0.85 and 0.7 as in the paper."
                )
        for name, highest in (
            ("intrinsic_dim", self.num_features),
            ("skewed_clients", self.num_clients),
        ):
            if not 0 <= getattr(self, name) <= highest:
                raise ValueError(
                    f"Expected `{name}` to be at most {highest} and not negative, but got "
                    f"{name}={getattr(self, name)!r}. Lower it."
                )


def _fields(x: Labels, y: Labels) -> Fields:
    return torch.from_numpy(x).to(torch.float32), torch.from_numpy(y).long()
