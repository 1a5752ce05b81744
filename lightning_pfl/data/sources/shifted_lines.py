"""ShiftedLines: FedMAP's linear regression, where pooled data have a slope of the wrong sign."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.data.sources.base import Labels, Source, SourceData
from lightning_pfl.data.sources.synthetic import DType


class ShiftedLines(Source):
    r"""Parallel lines whose intercepts grow with the clients' inputs.

    .. math::
        x_k \sim \mathcal N(k, 1), \qquad y_k = a x_k + b k + \varepsilon, \qquad
        \varepsilon \sim \mathcal N(0, \text{noise\_variance}), \qquad k = 0, \dots, n - 1

    With the slope :math:`a = -1` and intercepts 0, 4, 8, 12, 16 every client has a falling line,
    while the pooled samples rise. Some clients have too few samples to fit a line alone. Fields
    are ``(x, y)``, each ``(samples, 1)``.

    Args:
        samples: Training samples of each client, at least 1; its length is the number of clients.
        slope: :math:`a`.
        intercept_step: :math:`b`.
        noise_variance: Variance of the noise, non-negative.
        test_samples: Test samples per client, at least 1.
        seed: Seed of the samples. Training samples use it directly, client by client, all inputs
            before all noise.
        dtype: Type of the fields.

    Raises:
        ValueError: If a client has no samples or the variance is negative.

    Deviation from the paper: none. Its seed is unknown, and so are its samples.

    Example:
        >>> [len(field) for field in ShiftedLines(samples=(3, 1)).load().fields]
        [4, 4]

    References:
        Zhang, Esteve-Yagüe, Dittmer, Schönlieb, Roberts. FedMAP: Unlocking potential in
        personalized federated learning through bi-level MAP optimization. arXiv:2405.19000,
        section A.4.
    """

    def __init__(
        self,
        samples: Sequence[int] = (60, 1, 2, 3, 50),
        slope: float = -1.0,
        intercept_step: float = 4.0,
        noise_variance: float = 0.8,
        test_samples: int = 100,
        seed: int = 0,
        dtype: DType = "float32",
    ) -> None:
        check_types(ShiftedLines.__init__, locals())
        if not samples or min(samples) < 1 or test_samples < 1:
            raise ValueError(
                "Expected `samples` and `test_samples` to be at least 1 for every client, but got "
                f"{samples=} and {test_samples=}. Use (60, 1, 2, 3, 50) and 100."
            )
        if not noise_variance >= 0:
            raise ValueError(
                f"Expected `noise_variance` to be non-negative, but got {noise_variance=}. Use 0.8 "
                "as in the paper."
            )
        self.samples, self.test_samples = tuple(samples), test_samples
        self.slope, self.intercept_step = slope, intercept_step
        self.noise_variance, self.seed, self.dtype = noise_variance, seed, dtype

    def load(self) -> SourceData:
        """Draw the samples, sorted by client; the column ``client`` numbers the clients."""
        test_sizes = (self.test_samples,) * len(self.samples)
        fields, labels, owner = self._draw(self.samples, np.random.default_rng(self.seed))
        test = self._draw(test_sizes, np.random.default_rng((self.seed, 1)))
        return SourceData(
            fields,
            labels,
            test[0],
            test[1],
            columns={"client": owner},
            test_columns={"client": test[2]},
        )

    def _draw(
        self, sizes: Sequence[int], rng: np.random.Generator
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], Labels, Labels]:
        inputs, targets = [], []
        for client, count in enumerate(sizes):
            x = rng.normal(client, 1.0, count)
            noise = rng.normal(0.0, np.sqrt(self.noise_variance), count)
            inputs.append(x)
            targets.append(self.slope * x + self.intercept_step * client + noise)
        x, y = np.concatenate(inputs), np.concatenate(targets)
        dtype = getattr(torch, self.dtype)
        fields = (torch.from_numpy(x).to(dtype)[:, None], torch.from_numpy(y).to(dtype)[:, None])
        return fields, y, np.repeat(np.arange(len(sizes)), sizes)
