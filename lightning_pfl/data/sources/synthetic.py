"""Synthetic sources whose federated solutions are known in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.data.sources.base import Fields, FreshSource, Labels, Source, SourceData

DType = Literal["float32", "float64"]


class QuadraticClients(Source):
    r"""Clients with quadratic losses :math:`f_k(w) = \frac1{N_k}\sum_j \frac{a_j}{2}\|w - c_j\|^2`.

    Fields are ``(a, c)`` with shapes ``(samples,)`` and ``(samples, dim)``. All samples of client
    :math:`k` have the curvature ``curvatures[k]``; their centres are ``centers[k]`` plus
    deviations that sum to zero, so :math:`c_k` minimises :math:`f_k` exactly. Train and test
    samples are the same, because the test of these clients is the training objective itself.

    Args:
        curvatures: :math:`a_k > 0`, one per client.
        centers: :math:`c_k`, one per client: a number, or a list of ``dim`` numbers.
        samples: :math:`N_k`, at least 1: one int for all clients or one per client.
        spread: Standard deviation of the centres within a client. 0: all samples are equal, so a
            minibatch gradient is the full gradient.
        seed: Seed of the deviations.
        dtype: ``"float64"`` for comparisons with closed forms.

    Example:
        >>> QuadraticClients.q2().load().fields[1].flatten()
        tensor([0., 1.], dtype=torch.float64)
    """

    def __init__(
        self,
        curvatures: Sequence[float] = (1.0, 3.0),
        centers: Sequence[float] | Sequence[Sequence[float]] = (0.0, 1.0),
        samples: int | Sequence[int] = 1,
        spread: float = 0.0,
        seed: int = 0,
        dtype: DType = "float32",
    ) -> None:
        check_types(QuadraticClients.__init__, locals())
        self.curvatures = np.asarray(curvatures, dtype=np.float64)
        self.centers = np.asarray(centers, dtype=np.float64)
        if len(centers):
            self.centers = self.centers.reshape(len(centers), -1)
        clients = len(self.curvatures)
        self.samples = np.asarray(samples, dtype=np.int64)
        if self.samples.ndim == 0:  # one number for all
            self.samples = np.full(clients, self.samples)
        self.spread, self.seed, self.dtype = spread, seed, dtype
        lengths = {clients, len(self.centers), len(self.samples)}
        if len(lengths) != 1 or clients == 0:
            raise ValueError(
                "Expected `curvatures`, `centers` and `samples` to have one entry per client, but "
                f"got {clients}, {len(self.centers)} and {len(self.samples)}. "
                "Give as many centres (and sample counts) as curvatures."
            )
        if not (self.curvatures > 0).all():
            raise ValueError(
                "Expected `curvatures` to be positive, but got "
                f"curvatures={list(curvatures)!r}. Use numbers above 0."
            )
        if (self.samples < 1).any():
            raise ValueError(
                f"Expected `samples` to be at least 1 for every client, but got {samples=}. "
                "Build a FederatedTensorDataset for clients without samples."
            )
        if not spread >= 0:
            raise ValueError(
                f"Expected `spread` to be non-negative, but got {spread=}. Use 0 for equal samples."
            )

    @classmethod
    def q2(cls) -> QuadraticClients:
        r"""Make two clients with curvatures (1, 3) and optima (0, 1); their mean loss has 0.75."""
        return cls((1.0, 3.0), (0.0, 1.0), dtype="float64")

    @classmethod
    def l4(cls) -> QuadraticClients:
        """Make four clients at 0, 0.1, 1 and 1.1 with curvature 1, which form two clusters."""
        return cls((1.0,) * 4, (0.0, 0.1, 1.0, 1.1), dtype="float64")

    def load(self) -> SourceData:
        """Build the samples, sorted by client; the column ``client`` numbers the clients."""
        owner = np.repeat(np.arange(len(self.samples)), self.samples)
        centers = self.centers[owner]
        if self.spread > 0:
            rng = np.random.default_rng(self.seed)
            for client, count in enumerate(self.samples):
                noise = rng.standard_normal((count, centers.shape[1])) * self.spread
                centers[owner == client] += noise - noise.mean(0)
        dtype = getattr(torch, self.dtype)
        fields = (
            torch.from_numpy(self.curvatures[owner]).to(dtype),
            torch.from_numpy(centers).to(dtype),
        )
        labels = centers[:, 0]
        column = {"client": owner}
        return SourceData(fields, labels, fields, labels, columns=column, test_columns=column)


class LinearRepresentation(FreshSource):
    r"""Linear regression with a shared subspace: :math:`y = w_k^\top B^\top x + \varepsilon`.

    :math:`x \sim \mathcal N(0, I_d)`, :math:`B \in \mathbb R^{d \times r}` has orthonormal columns
    and is shared, the heads :math:`w_k` are uniform on the sphere of radius :math:`\sqrt r`, and
    :math:`\varepsilon \sim \mathcal N(0, \text{noise\_variance})`. Fields are ``(x, y)`` with
    shapes ``(samples, d)`` and ``(samples,)``. The samples of round t of ``FreshDataModule`` are a
    function of ``seed`` and t.

    Args:
        num_clients: :math:`n`, new clients included.
        dim: :math:`d`.
        rank: :math:`r`, at most ``dim``.
        samples: Training samples per client (:math:`m` in the paper).
        test_samples: Test samples per client.
        noise_variance: Variance of the noise, non-negative. The paper states 1e-3; its notebook
            has a *standard deviation* of 1e-3, which is 1e-6 here.
        seed: Seed of the subspace, the heads and the samples.
        dtype: Type of the fields.
        new_clients: Number of clients, the last ones, with ``new_samples``. Give the data module
            the same number, which keeps them out of the rounds.
        new_samples: Training samples of each new client.

    References:
        Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized
        federated learning. ICML 2021. arXiv:2102.07078, section 5 (linear regression).
    """

    def __init__(
        self,
        num_clients: int = 100,
        dim: int = 20,
        rank: int = 2,
        samples: int = 10,
        test_samples: int = 100,
        noise_variance: float = 1e-3,
        seed: int = 0,
        dtype: DType = "float32",
        new_clients: int = 0,
        new_samples: int | None = None,
    ) -> None:
        check_types(LinearRepresentation.__init__, locals())
        sizes = {"num_clients": num_clients, "dim": dim, "rank": rank, "samples": samples}
        sizes |= {} if new_samples is None else {"new_samples": new_samples}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(
                    f"Expected `{name}` to be at least 1, but got {name}={value!r}. "
                    "Use 100 clients, dim 20, rank 2 and 10 samples as in the paper."
                )
        if rank > dim:
            raise ValueError(
                f"Expected `rank` to be at most dim={dim}, but got {rank=}. Lower the rank."
            )
        if not noise_variance >= 0 or test_samples < 1:
            raise ValueError(
                "Expected `noise_variance` to be non-negative and `test_samples` positive, but "
                f"got {noise_variance=}, {test_samples=}. Use 1e-3 and 100."
            )
        if not 0 <= new_clients < num_clients or bool(new_clients) != (new_samples is not None):
            raise ValueError(
                f"Expected `new_clients` to be in [0, {num_clients}), with `new_samples` where it "
                f"isn't 0, but got {new_clients=}, {new_samples=}. Give both, or neither."
            )
        self.num_clients, self.dim, self.rank = num_clients, dim, rank
        self.samples, self.test_samples = samples, test_samples
        self.noise_variance, self.seed, self.dtype = noise_variance, seed, dtype
        self.new_clients, self.new_samples = new_clients, new_samples

    def truth(self) -> tuple[Labels, Labels]:
        """Return the true representation ``(dim, rank)`` and heads ``(num_clients, rank)``."""
        rng = np.random.default_rng((self.seed, 0))
        basis, _ = np.linalg.qr(rng.standard_normal((self.dim, self.rank)))
        heads = rng.standard_normal((self.num_clients, self.rank))
        heads *= np.sqrt(self.rank) / np.linalg.norm(heads, axis=1, keepdims=True)
        return basis, heads

    def load(self) -> SourceData:
        """Draw the samples, sorted by client; the column ``client`` numbers the clients."""
        fields, labels, owner = self._draw(self._counts(), 1)
        test = np.full(self.num_clients, self.test_samples)
        test_fields, test_labels, test_owner = self._draw(test, 2)
        return SourceData(
            fields,
            labels,
            test_fields,
            test_labels,
            columns={"client": owner},
            test_columns={"client": test_owner},
        )

    def draw(self, round: int) -> Fields:
        """Draw a round's training samples of the same subspace and heads."""
        return self._draw(self._counts(), 3, round)[0]

    def _counts(self) -> Labels:
        """Count the training samples of each client."""
        counts = np.full(self.num_clients, self.samples)
        if self.new_samples is not None:
            counts[-self.new_clients :] = self.new_samples
        return counts

    def _draw(
        self, counts: Labels, *stream: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], Labels, Labels]:
        basis, heads = self.truth()
        rng = np.random.default_rng((self.seed, *stream))
        owner = np.repeat(np.arange(self.num_clients), counts)
        x = rng.standard_normal((len(owner), self.dim))
        y = ((x @ basis) * heads[owner]).sum(1)
        y = y + np.sqrt(self.noise_variance) * rng.standard_normal(len(y))
        dtype = getattr(torch, self.dtype)
        return (torch.from_numpy(x).to(dtype), torch.from_numpy(y).to(dtype)), y, owner
