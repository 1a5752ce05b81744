"""FederatedDataModule: a source, split over clients, as train, validation and test data."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_integer, check_used, is_number
from lightning_pfl.core.errors import require_federated
from lightning_pfl.core.randomness import derive
from lightning_pfl.data.datasets import DropLast, FederatedTensorDataset, check_drop_last
from lightning_pfl.data.holdout import Cut, cut, require_cut
from lightning_pfl.data.partition import IID, Natural, Partition, Parts, draw
from lightning_pfl.data.partition.check import checked, require_partition, split_result
from lightning_pfl.data.sources.base import Fields, Source, SourceData

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Split = Literal["train", "val", "test"]
SPLITS = "train", "val", "test"


@dataclass(frozen=True)
class _Split:
    """Positions of all clients (new ones last) in one pool, and the labels of that pool."""

    fields: Fields
    labels: Any
    parts: Parts


class FederatedDataModule(L.LightningDataModule):
    r"""A data module that splits a source over clients, and their samples by train, val and test.

    Train, validation and test samples of a client are disjoint. Everything is a function of
    ``seed``: the same seed makes the same clients for any ``val_fraction`` or ``batch_size``.

    *Test.* A source's own test set is split by the plan of its training set, so that a client's
    test data resemble its training data. Otherwise ``test_fraction`` of each client's samples are
    cut off.

    *Validation.* ``val_fraction`` of each client's training samples. With 0 nothing is validated,
    unless ``val_split="test"`` asks for validation on the test split. Then a fit reports no best
    round, since test data would have chosen it.

    *Public.* ``public_samples`` of all clients' training samples, drawn at random, are nobody's:
    ``public_dataloader`` returns them, for methods that compare models on them. With ``own_share``
    :math:`\lambda < 1` every client also trains on some of them, with their labels, so that its
    loss is :math:`\lambda F_k + (1 - \lambda) F_C` with a sample :math:`C` of its own (DAPPER).

    Args:
        source: The source of the samples.
        partition: Assignment of samples to clients. ``None``: `Natural` if the source names its
            clients, otherwise `IID`.
        num_clients: Number of clients, new ones included. ``None`` where the partition knows it.
        val_fraction: Share of a client's training samples, in [0, 1).
        test_fraction: Share of a client's samples, in (0, 1). ``None``: 0.2. Only for sources
            without a test set.
        batch_size: Samples per training batch of a client.
        eval_batch_size: Samples per batch of a client in evaluation, and of public samples.
        seed: Seed of the partition and the cuts. Training has its own (``seed_everything``), so
            runs with several seeds have the same clients, unless this one differs too.
        new_clients: Number of clients, the last ones, that never take part; see `new_clients`.
        val_split: ``"train"``: validation data are cut from training data; ``"test"``: validation
            uses the test split.
        drop_last: Whether a training epoch omits a last batch that is too short; ``"single"``: only
            one of a single sample, on which BatchNorm can't train.
        cut: Choice of the samples that are cut off for test and validation. ``None``: `Stratified`,
            random samples of every class. `LastSamples` for series, `WholeGroups` for samples that
            belong together.
        public_samples: Number of training samples that are public, >= 0; 0 for none.
        own_share: Share of a client's training samples that are its own, in (0, 1]. The others are
            public ones, as many as it takes, drawn for each client; none twice unless all are in.

    Raises:
        ValueError: A number is out of range, or settings contradict each other; in `setup`, the
            partition doesn't fit the data.
        TypeError: The source is no `Source`, or the partition no `Partition`.

    Example:
        >>> from lightning_pfl.data import ClassesPerClient, Digits
        >>> data = FederatedDataModule(Digits(), ClassesPerClient(2), num_clients=20)
        >>> data.setup("fit")
        >>> data.train_dataloader().num_clients
        20
    """

    def __init__(
        self,
        source: Source,
        partition: Partition | None = None,
        num_clients: int | None = None,
        val_fraction: float = 0.0,
        test_fraction: float | None = None,
        batch_size: int = 10,
        eval_batch_size: int = 256,
        seed: int = 0,
        new_clients: int = 0,
        val_split: Literal["train", "test"] = "train",
        drop_last: DropLast = False,
        cut: Cut | None = None,
        public_samples: int = 0,
        own_share: float = 1.0,
    ) -> None:
        super().__init__()
        _check_settings(val_fraction, test_fraction, val_split, new_clients)
        check_types(FederatedDataModule.__init__, {"num_clients": num_clients})
        check_integer("public_samples", public_samples, 0, "Use 0 for none.")
        if not is_number(own_share) or not 0 < own_share <= 1:
            raise ValueError(
                f"Expected `own_share` to be in (0, 1], but got own_share={own_share!r}. Use 1 to "
                "train on the client's own samples alone."
            )
        if own_share < 1 and not public_samples:
            raise ValueError(
                f"Expected public samples for own_share={own_share}, but got public_samples=0. Set "
                "their number."
            )
        check_integer("seed", seed, 0, "Use 0, or the number of a repetition.")
        for name, value in (("batch_size", batch_size), ("eval_batch_size", eval_batch_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"Expected `{name}` to be an int of at least 1, but got {name}={value!r}. "
                    "Use a large number for full-batch steps."
                )
        check_drop_last(drop_last, batch_size)
        self.source = _require_source(source)
        self.partition = None if partition is None else require_partition("partition", partition)
        self.clients_wanted = num_clients
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.seed = seed
        self.num_new_clients = new_clients
        self.val_split = val_split
        self.drop_last = drop_last
        self.cut = None if cut is None else require_cut(cut)
        self.public_samples = public_samples
        self.own_share = own_share
        self._public: np.ndarray = np.zeros(0, dtype=np.int64)
        self._splits: dict[str, _Split] = {}
        self._arrays: SourceData | None = None
        self._names: tuple[str, ...] = ()
        self._datasets: dict[tuple[str, bool], FederatedTensorDataset] = {}
        self._public_data: FederatedTensorDataset | None = None
        self._kept: frozenset[str] | None = None

    def __repr__(self) -> str:
        """Describe source, partition, clients and, once they are split, samples in one line.

        Lightning's default iterates over the data loaders, one per client.
        """
        partition = self.partition or (self._choose_partition(self._arrays) if self._arrays else "")
        parts = {
            "source": type(self.source).__name__,
            "partition": type(partition).__name__ if partition else None,
            "num_clients": len(self._names) or self.clients_wanted,
            "new_clients": self.num_new_clients or None,
        }
        said = [f"{name}={value}" for name, value in parts.items() if value is not None]
        for split, held in self._splits.items():
            said.append(f"{split}={sum(map(len, held.parts))} samples")
        return f"{type(self).__name__}({', '.join(said)})"

    __str__ = __repr__

    def prepare_data(self) -> None:
        """Download the source where needed (Lightning calls this on one process)."""
        self.source.prepare()

    def setup(self, stage: str | None = None) -> None:
        """Load and split the data once, for all stages.

        Raises:
            MisconfigurationException: If the Trainer has another strategy than a federated one.
            ValueError: If the source has no label for each sample.
        """
        if self.trainer is not None:
            require_federated(self.trainer.strategy, self)
        if self._splits:
            return
        arrays = self.source.load()
        _require_labels(arrays, type(self.source).__name__)
        partition = self._choose_partition(arrays)
        keys = partition.keys(arrays.labels, arrays.columns)
        who, wanted = type(partition).__name__, self.clients_wanted
        parts, plan = split_result(partition.split(keys, wanted, self._rng("partition")), who)
        parts = checked(parts, who, wanted, len(arrays.labels))
        self._check_new(len(parts))
        features, *rest = arrays.fields
        fields = (partition.change_features(features, parts, plan), *rest)
        has_test = arrays.test_fields is not None and arrays.test_labels is not None
        check_used(
            FederatedDataModule.__init__,
            {"cut": self.cut},
            not has_test or self.val_fraction > 0,
            "val_fraction above 0, or a source without a test set",
        )
        if not has_test:
            parts, test_parts = self._cut(parts, arrays, self._test_share(), "test")
            test = _Split(fields, arrays.labels, test_parts)
        else:
            test = self._own_test(arrays, partition, plan, len(parts))
        parts = self._without_public(parts)
        train, val = self._cut(parts, arrays, self.val_fraction, "val")
        self._names = partition.names(plan) or tuple(str(k) for k in range(len(parts)))
        self._arrays = arrays
        self._splits = {
            "train": _Split(fields, arrays.labels, self._with_public(train)),
            "val": _Split(fields, arrays.labels, val) if self.val_split == "train" else test,
            "test": test,
        }

    def train_dataloader(self) -> FederatedTensorDataset:
        """Return the training data of the clients that take part."""
        return self._dataset("train")

    def val_dataloader(self) -> FederatedTensorDataset:
        """Return the validation data, empty for every client if none were requested."""
        return self._dataset("val")

    def test_dataloader(self) -> FederatedTensorDataset:
        """Return the test data of the clients that take part."""
        return self._dataset("test")

    def public_dataloader(self) -> FederatedTensorDataset | None:
        """Return the public samples, as a dataset of one client; None if there are none."""
        arrays = self._loaded()
        if self.public_samples and self._public_data is None:
            self._public_data = FederatedTensorDataset(
                self._splits["train"].fields,
                [torch.from_numpy(self._public)],
                batch_size=self.eval_batch_size,
                transform=arrays.eval_transform or arrays.transform,
            )
        return self._public_data

    def keep_clients(self, names: Collection[str]) -> None:
        """Keep the samples of some clients alone, in a process that reads no others.

        Public samples and those of new clients stay. Sizes, labels and the digest are still those
        of all clients. With other names than before, the source is loaded again.

        Args:
            names: Names of these clients.
        """
        names = frozenset(names)
        if self._kept == names:
            return
        if self._kept is not None:
            self._splits, self._datasets, self._public_data = {}, {}, None
        self.setup()
        arrays = self._loaded()
        for new in (False, True) if self.num_new_clients else (False,):
            for split in ("train", "test") if self.val_split == "test" else SPLITS:
                data = self._dataset(split, new)
                own = [k for k, name in enumerate(data.names) if new or name in names]
                self._datasets[split, new] = data.keep(torch.tensor(own, dtype=torch.int64))
            if self.val_split == "test":  # one copy for both
                self._datasets["val", new] = self._datasets["test", new]
        if (public := self.public_dataloader()) is not None:
            self._public_data = public.keep(torch.arange(1))
        self._splits = {name: replace(split, fields=()) for name, split in self._splits.items()}
        self._arrays = replace(arrays, fields=(), test_fields=None)
        self._kept = names

    def predict_dataloader(self) -> FederatedTensorDataset:
        """Return the test data, on which no client trained."""
        return self._dataset("test")

    def settings(self) -> dict[str, str | int | float]:
        """Return what decides which samples each client has, for loggers."""
        self.setup()
        assert self._arrays is not None
        partition = self.partition or self._choose_partition(self._arrays)
        return {
            "source": type(self.source).__name__,
            "partition": type(partition).__name__,
            **{
                f"partition.{name}": value
                for name, value in vars(partition).items()
                if isinstance(value, (int, float, str)) and not name.startswith("_")
            },
            "val_fraction": self.val_fraction,
            "val_split": self.val_split,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "seed": self.seed,
            "new_clients": self.num_new_clients,
            "public_samples": self.public_samples,
            "own_share": self.own_share,
        }

    def digest(self) -> str:
        """Return a digest of all clients' samples, to compare partitions by."""
        self.setup()
        found = hashlib.sha256()
        for split in SPLITS:
            for part in self._splits[split].parts:
                found.update(f"{split} {len(part)} ".encode())
                found.update(np.ascontiguousarray(part, dtype=np.int64).tobytes())
        return found.hexdigest()[:16]

    def new_clients(self, split: Split = "train") -> FederatedTensorDataset:
        """Return the data of the new clients, which never take part in a round.

        Args:
            split: ``"train"`` (for adaptation), ``"val"`` or ``"test"``.

        Raises:
            ValueError: ``new_clients`` was 0, or there is no such split.
        """
        if self.num_new_clients == 0:
            raise ValueError(
                "Expected a data module with new clients, but got new_clients=0. "
                "Set FederatedDataModule(new_clients=...) to hold some out."
            )
        if split not in ("train", "val", "test"):
            raise ValueError(
                f"Expected `split` to be 'train', 'val' or 'test', but got {split=}. "
                "Choose one of the three."
            )
        if split == "val" and self._no_validation():
            raise ValueError(
                "Expected a data module with validation data, but got val_fraction=0. "
                "Set val_fraction, or val_split='test'."
            )
        return self._dataset(split, new=True)

    @property
    def num_clients(self) -> int:
        """Number of clients that take part, without the new ones."""
        self.setup()
        return len(self._names) - self.num_new_clients

    @property
    def num_classes(self) -> int | None:
        """Number of classes, ``None`` for regression."""
        return self._loaded().num_classes

    def draw(self, split: Split = "train", ax: Axes | None = None) -> Axes:
        """Plot the distribution of classes or sizes over the clients, new ones included."""
        self.setup()
        return draw(self._splits[split].parts, self._splits[split].labels, ax, self._names)

    def _rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng(derive(self.seed, "data", purpose))

    def _cut(
        self, parts: Parts, arrays: SourceData, share: float, split: str
    ) -> tuple[Parts, Parts]:
        return cut(parts, arrays.labels, share, self._rng(split), self.cut, arrays.columns)

    def _without_public(self, parts: Parts) -> Parts:
        """Draw the public samples, and take them away from the clients.

        Raises:
            ValueError: If there are more of them than training samples.
        """
        held = np.unique(np.concatenate([*parts, self._public]))
        if self.public_samples > len(held):
            raise ValueError(
                f"Expected `public_samples` to be at most the {len(held)} training samples, but "
                f"got public_samples={self.public_samples}. Use fewer."
            )
        drawn = self._rng("public").choice(len(held), self.public_samples, replace=False)
        self._public = np.sort(held[drawn]).astype(np.int64)
        return [part[~np.isin(part, self._public)] for part in parts]

    def _with_public(self, parts: Parts) -> Parts:
        """Let clients train on public samples, too, of their own choice."""
        if self.own_share == 1:
            return parts
        rng, mixed = self._rng("interpolation"), []
        for part in parts:
            wanted = round(len(part) * (1 - self.own_share) / self.own_share)
            passes = [rng.permutation(self._public) for _ in range(-(-wanted // len(self._public)))]
            mixed.append(np.concatenate([part, *passes])[: len(part) + wanted])
        return mixed

    def _loaded(self) -> SourceData:
        self.setup()
        assert self._arrays is not None  # set by setup
        return self._arrays

    def _choose_partition(self, arrays: SourceData) -> Partition:
        if self.partition is not None:
            return self.partition
        return Natural() if arrays.columns else IID()

    def _no_validation(self) -> bool:
        return self.val_fraction == 0 and self.val_split == "train"

    def _test_share(self) -> float:
        return 0.2 if self.test_fraction is None else self.test_fraction

    def _own_test(
        self, arrays: SourceData, partition: Partition, plan: Any, num_clients: int
    ) -> _Split:
        """Split the source's test set by the plan of the training set."""
        assert arrays.test_fields is not None  # the caller has checked
        assert arrays.test_labels is not None
        if self.test_fraction is not None:
            raise ValueError(
                f"Expected no `test_fraction` for {type(self.source).__name__}, which has its own "
                f"test set, but got test_fraction={self.test_fraction}. Leave it out."
            )
        keys = partition.keys(arrays.test_labels, arrays.test_columns)
        parts = checked(
            partition.apply(keys, plan, self._rng("test")),
            f"{type(partition).__name__}.apply",
            num_clients,
            len(arrays.test_labels),
        )
        features, *rest = arrays.test_fields
        fields = (partition.change_features(features, parts, plan), *rest)
        return _Split(fields, arrays.test_labels, parts)

    def _dataset(self, split: str, new: bool = False) -> FederatedTensorDataset:
        arrays = self._loaded()
        if (split, new) not in self._datasets:
            data, training = self._splits[split], split == "train"
            first_new = len(self._names) - self.num_new_clients
            chosen = slice(first_new, None) if new else slice(first_new)
            rows: list[Tensor] = [torch.from_numpy(part) for part in data.parts[chosen]]
            self._datasets[split, new] = FederatedTensorDataset(
                data.fields,
                rows,
                names=self._names[chosen],
                batch_size=self.batch_size if training else self.eval_batch_size,
                shuffle=training,
                drop_last=self.drop_last if training else False,
                transform=arrays.transform
                if training
                else arrays.eval_transform or arrays.transform,
                augment=arrays.augment if training else None,
            )
        return self._datasets[split, new]

    def _check_new(self, num_clients: int) -> None:
        if self.num_new_clients >= num_clients:
            raise ValueError(
                f"Expected `new_clients` to be below the number of clients ({num_clients}), but "
                f"got new_clients={self.num_new_clients}. Leave at least one client to train."
            )


def _require_source(source: Any) -> Source:
    if not isinstance(source, Source):
        raise TypeError(
            f"Expected `source` to be a Source, but got source={source!r}. Use an instance of "
            "a class of lightning_pfl.data such as Digits(), or of your subclass of Source."
        )
    return source


def _require_labels(arrays: SourceData, source: str) -> None:
    samples = len(arrays.fields[0])
    if not isinstance(arrays.labels, Sized) or len(arrays.labels) != samples:
        raise ValueError(
            f"Expected {source} to have a label for each of {samples} samples, as partitions split "
            f"by them, but got labels={arrays.labels!r}. Give classes, or for regression the "
            "targets."
        )


def _check_settings(
    val_fraction: float, test_fraction: float | None, val_split: str, new_clients: int
) -> None:
    if not is_number(val_fraction) or not 0 <= val_fraction < 1:
        raise ValueError(
            f"Expected `val_fraction` to be in [0, 1), but got {val_fraction=}. "
            "Use 0.1 to keep a tenth of the training samples for validation."
        )
    if test_fraction is not None and not (is_number(test_fraction) and 0 < test_fraction < 1):
        raise ValueError(
            f"Expected `test_fraction` to be in (0, 1), but got {test_fraction=}. "
            "Use 0.2 to keep a fifth of each client's samples for testing."
        )
    if val_split not in ("train", "test"):
        raise ValueError(
            f"Expected `val_split` to be 'train' or 'test', but got {val_split=}. "
            "Use 'train' together with val_fraction."
        )
    if val_split == "test" and val_fraction > 0:
        raise ValueError(
            f"Expected val_fraction=0 together with val_split='test', but got {val_fraction=}. "
            "Choose one of the two ways to validate."
        )
    if isinstance(new_clients, bool) or not isinstance(new_clients, int) or new_clients < 0:
        raise ValueError(
            f"Expected `new_clients` to be a non-negative int, but got {new_clients=}. "
            "Use 0 to let every client take part."
        )
