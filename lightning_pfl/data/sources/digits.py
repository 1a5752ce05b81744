"""Handwritten digits that ship with scikit-learn: 1797 images of 8 x 8, no download."""

from __future__ import annotations

import torch

from lightning_pfl.data.sources.base import Source, SourceData


class Digits(Source):
    """The test part of the UCI optical digits data, as ``(1, 8, 8)`` floats in [0, 1].

    It has no test set: the data module cuts test data from each client.

    References:
        Alpaydin, Kaynak. Optical recognition of handwritten digits. UCI repository, 1998.
    """

    def load(self) -> SourceData:
        """Read the 1797 samples; labels are 0 to 9."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        pixels = torch.from_numpy(images).to(torch.float32).reshape(-1, 1, 8, 8) / 16
        return SourceData((pixels, torch.from_numpy(labels).long()), labels, num_classes=10)
