"""Public samples, which the server and every client have."""

from __future__ import annotations

from typing import Any

import torch

from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.core.randomness import derive, permutation
from lightning_pfl.core.transfer import send
from lightning_pfl.data.datasets import DropLast, FederatedTensorDataset, as_federated


class PublicData:
    """Public samples, of which each round draws some by the seed and the round's number.

    Args:
        source: What ``public_dataloader`` of a data module returns: a DataLoader over tensors, or a
            dataset of one client with all samples. Its ``drop_last`` is the server's; clients see
            all samples.
        seed: The run's seed.
        samples: Number of samples in a round; None for all.
        names: Names of the federation's clients.

    Raises:
        MisconfigurationException: If the samples aren't tensors in memory, or are too few.
    """

    def __init__(self, source: Any, seed: int, samples: int | None, names: tuple[str, ...]) -> None:
        given = isinstance(source, FederatedTensorDataset)
        data = source if given else as_federated([source], what="public_dataloader")
        if not isinstance(data, FederatedTensorDataset) or data.num_clients != 1:
            raise MisconfigurationException(
                "Expected `public_dataloader` to return a DataLoader over a TensorDataset, as all "
                f"clients see its samples in one order, but got {source!r}. Put its samples into "
                "tensors."
            )
        self.data, self.seed, self.names = data, seed, names
        found = int(data.num_samples)
        if found < (samples or 1):
            fewer = f", or draw fewer in a round: the method's `public_samples={found}`"
            raise MisconfigurationException(
                f"Expected at least {samples or 1} public samples, but got {found}. Give more"
                f"{fewer if found else ''}."
            )
        self.samples = samples or found
        self._drawn: dict[int, FederatedTensorDataset] = {}

    def to(self, device: torch.device) -> PublicData:
        """Return the samples on a device."""
        samples = self.samples
        return PublicData(self.data.to(device), self.seed, samples, self.names)

    def for_clients(self, round: int) -> FederatedTensorDataset:
        """Return a round's samples for each client: the same ones in the same order."""
        if round not in self._drawn:
            kept = {k: data for k, data in self._drawn.items() if abs(k - round) <= 1}
            drawn = permutation(int(self.data.num_samples), derive(self.seed, "public", round))
            mine = self.data.indices[0]
            chosen = mine[send(drawn[: self.samples], mine.device)].cpu()
            self._drawn = {**kept, round: self._dataset([chosen] * len(self.names), self.names)}
        return self._drawn[round]

    def for_server(self) -> FederatedTensorDataset:
        """Return all samples for the server, shuffled anew in each pass.

        Raises:
            MisconfigurationException: If ``drop_last`` leaves no minibatch.
        """
        data, found = self.data, int(self.data.num_samples)
        if found < (2 if data.drop_last == "single" else data.batch_size if data.drop_last else 1):
            raise MisconfigurationException(
                "Expected a minibatch of public samples, on which the server trains, but got "
                f"{found} samples with batch_size={data.batch_size} and "
                f"drop_last={data.drop_last!r}. Use smaller minibatches or drop_last=False."
            )
        return self._dataset([data.indices[0].cpu()], ("server",), True, data.drop_last)

    def _dataset(
        self,
        rows: list[torch.Tensor],
        names: tuple[str, ...],
        shuffle: bool = False,
        drop_last: DropLast = False,
    ) -> FederatedTensorDataset:
        data = self.data
        return FederatedTensorDataset(
            data.fields,
            rows,
            names=names,
            batch_size=data.batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            transform=data.transform,
        )
