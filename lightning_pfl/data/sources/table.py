"""Tables: Hugging Face data sets, and local parquet, csv, json, arrow and image files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_used
from lightning_pfl.data.sources.base import Labels, NormalizeImages, Source, SourceData

# Loading scripts of `datasets` by file ending.
BUILDERS = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".arrow": "arrow",
}


class HuggingFaceTable(Source):
    """A table with feature and label columns, and optionally a client column.

    Numbers become float vectors ``(samples, columns)``, lists of numbers float tensors, images
    uint8 tensors ``(samples, channels, height, width)`` that are normalised in the batch. Labels
    may be integers, strings (numbered in sorted order) or floats (regression targets).

    Args:
        path: A file (``.parquet``, ``.csv``, ``.json``, ``.jsonl``, ``.arrow``), a folder of such
            files, of images or from ``save_to_disk``, or the name of a data set on the Hub.
        features: The feature column, or several numeric columns.
        label: The label column.
        client: Column with the client of each sample; the default partition is then `Natural`.
            ``None``: there is none.
        name: Configuration of a Hub data set that has several.
        train_split: Name of the training split.
        test_split: Name of the test split. ``None``: the data module cuts test data per client.
        image_size: Size ``(height, width)`` to resize images to, bilinear. ``None``: no resizing.
        grayscale: Whether images are reduced to one channel; otherwise to three.
        mean: Mean of each image channel, of pixels in [0, 1].
        std: Standard deviation of each image channel.
        cache_dir: Cache for Hub data and converted files. ``None``: the library's default.
        classes: The text labels in the order of their numbers; the file may lack some. ``None``:
            the labels of the file, sorted.

    Raises:
        FileNotFoundError: There is no such file, folder or data set.
        ValueError: A split or column is missing, or a column has a type that can't be a tensor.
    """

    def __init__(
        self,
        path: str,
        features: str | list[str],
        label: str,
        client: str | None = None,
        name: str | None = None,
        train_split: str = "train",
        test_split: str | None = None,
        image_size: tuple[int, int] | None = None,
        grayscale: bool = False,
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.5,),
        cache_dir: str | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        check_types(HuggingFaceTable.__init__, locals())
        self.path, self.name, self.cache_dir = path, name, cache_dir
        self.features = [features] if isinstance(features, str) else list(features)
        self.label, self.client = label, client
        self.train_split, self.test_split = train_split, test_split
        self.image_size, self.grayscale = image_size, grayscale
        self.normalize = NormalizeImages(mean, std)
        self.classes = None if classes is None else [str(each) for each in classes]
        if not self.features:
            raise ValueError(
                f"Expected `features` to name at least one column, but got {features=}. "
                "Name the input columns of the model."
            )
        if label in self.features:
            rank_zero_warn(
                f"The label column {label!r} is also one of the features, so the model can read "
                "its answer there. Leave it out of `features`."
            )

    def prepare(self) -> None:
        """Download or convert the table into the cache."""
        self._open()

    def has_text_labels(self) -> bool:
        """Read whether the labels are text."""
        labels = self._checked(self._open(), self.train_split)[self.label][:]
        return any(isinstance(label, str) for label in labels)

    def load(self) -> SourceData:
        """Read the splits into memory."""
        splits = self._open()
        if self.name is not None and Path(self.path).exists():
            raise ValueError(
                f"Expected `name` for a data set on the Hub only, but got name={self.name!r} and "
                f"the local path={self.path!r}. Leave it out."
            )
        train = self._checked(splits, self.train_split)
        test = None if self.test_split is None else self._checked(splits, self.test_split)
        tables = [train] if test is None else [train, test]
        columns_of_labels = [table[self.label][:] for table in tables]
        labels = encode_labels(columns_of_labels, self.label, self.classes)
        features = [self._features(table) for table in tables]
        if features[0].dtype != torch.uint8:
            of_images = vars(self) | {"mean": self.normalize.mean, "std": self.normalize.std}
            for name in ("image_size", "grayscale", "mean", "std"):
                given = {name: of_images[name]}
                check_used(HuggingFaceTable.__init__, given, False, "a feature column of images")
        fields = [(x, torch.from_numpy(y)) for x, y in zip(features, labels, strict=True)]
        columns = [
            {} if self.client is None else {self.client: np.asarray(table[self.client][:])}
            for table in tables
        ]
        regression = labels[0].dtype.kind == "f"
        return SourceData(
            fields[0],
            labels[0],
            None if test is None else fields[1],
            None if test is None else labels[1],
            transform=self.normalize if features[0].dtype == torch.uint8 else None,
            num_classes=None if regression else self._count_classes(labels),
            columns=columns[0],
            test_columns=columns[-1] if test is not None else {},
        )

    def _count_classes(self, labels: Sequence[Labels]) -> int:
        if self.classes is not None:
            return len(self.classes)
        return 1 + max(int(y.max(initial=0)) for y in labels)

    def _open(self) -> Any:
        """Return a mapping from split name to table."""
        from datasets import load_dataset, load_from_disk

        path = Path(self.path)
        if path.is_file() and path.suffix not in BUILDERS:
            raise ValueError(
                f"Expected `path` to end in one of {sorted(BUILDERS)}, but got path={self.path!r}. "
                "Convert the file, for example to parquet."
            )
        if not path.exists() and (path.suffix in BUILDERS or path.is_absolute()):
            raise self._missing("no such file or folder")  # no name of a Hub data set
        try:
            if path.is_file():
                builder, files = BUILDERS[path.suffix], {self.train_split: str(path)}
                return load_dataset(builder, data_files=files, cache_dir=self.cache_dir)
            if (path / "dataset_dict.json").exists():
                return load_from_disk(str(path))
            if (path / "state.json").exists():
                return {self.train_split: load_from_disk(str(path))}
            return load_dataset(self.path, self.name, cache_dir=self.cache_dir)
        except Exception as error:  # the library raises many kinds, also for missing data
            raise self._missing(error.__cause__ or error) from error

    def _missing(self, reason: object) -> FileNotFoundError:
        return FileNotFoundError(
            "Expected `path` to be a table file, a folder of them or a data set on the Hub, "
            f"but got path={self.path!r} ({reason}). Check the path, the name and the network."
        )

    def _checked(self, splits: Any, split: str) -> Any:
        if split not in splits:
            raise ValueError(
                f"Expected split {split!r} in {self.path!r}, but got the splits {list(splits)}. "
                "Set train_split and test_split."
            )
        table = splits[split]
        wanted = [*self.features, self.label, *([] if self.client is None else [self.client])]
        missing = [column for column in wanted if column not in table.column_names]
        if missing:
            raise ValueError(
                f"Expected columns {missing} in {self.path!r}, but got {table.column_names}. "
                "Set features, label and client to columns of the table."
            )
        if self.client is not None and any(value is None for value in table[self.client][:]):
            raise ValueError(
                f"Expected a client for every sample in column {self.client!r}, but got missing "
                f"values in split {split!r} of {self.path!r}. Fill or drop these rows."
            )
        return table

    def _features(self, table: Any) -> Tensor:
        from datasets import Image

        columns = [
            self._images(table[name])
            if isinstance(table.features[name], Image)
            else numeric_column(table[name][:], name)
            for name in self.features
        ]
        if len(columns) == 1:
            return columns[0] if columns[0].ndim > 1 else columns[0].unsqueeze(1)
        flat = {column.ndim for column in columns} == {1}
        if not flat:
            shapes = [tuple(column.shape[1:]) for column in columns]
            raise ValueError(
                f"Expected several `features` to be numeric columns, but got {self.features} with "
                f"shapes {shapes} per sample. Name one column of lists or images."
            )
        return torch.stack(columns, dim=1)

    def _images(self, column: Any) -> Tensor:
        images = []
        for image in column:
            converted = image.convert("L" if self.grayscale else "RGB")
            if self.image_size is not None:
                height, width = self.image_size
                converted = converted.resize((width, height), resample=2)  # 2 is bilinear
            images.append(np.array(converted, dtype=np.uint8))
        shapes = {pixels.shape[:2] for pixels in images}
        if len(shapes) > 1:
            raise ValueError(
                "Expected images of one size, but got (height, width) "
                f"{sorted(shapes)[:5]}. Set image_size=(height, width) to resize them."
            )
        pixels = torch.from_numpy(np.stack(images))
        return pixels.unsqueeze(1) if self.grayscale else pixels.permute(0, 3, 1, 2).contiguous()


def numeric_column(values: Sequence[Any], name: str) -> Tensor:
    """Turn a column of numbers, or of equally shaped lists of numbers, into floats.

    Raises:
        ValueError: It holds text, missing values or lists of different lengths.
    """
    try:
        array = np.asarray(values)
        if array.dtype.kind not in "biuf":
            gaps = [row for row, value in enumerate(values) if value is None]
            kind = type(values[0]).__name__
            gap = f"no value in row {gaps[0] + 1}, the first below a header being 1" if gaps else ""
            raise ValueError(gap or f"values of type {kind}")
        return torch.from_numpy(array.astype(np.float32))
    except ValueError as error:
        raise ValueError(
            f"Expected column {name!r} to hold numbers, equally long lists of numbers or images, "
            f"but got {error}. Convert it first (tokenise text, fill gaps, pad lists)."
        ) from error


def encode_labels(
    columns: Sequence[Sequence[Any]], name: str, classes: Sequence[str] | None
) -> list[npt.NDArray[Any]]:
    """Turn the label columns of the splits into int64 classes or float32 targets.

    Strings are numbered in the order of ``classes``, or else in sorted order over all splits
    together, so a class has one number.

    Raises:
        ValueError: Labels are missing, negative, not among ``classes``, or neither numbers nor
            strings.
    """
    labels: list[Labels] = [np.asarray(column) for column in columns]
    kinds = {array.dtype.kind for array in labels}
    if kinds <= {"U"}:
        found = np.unique(np.concatenate(labels)).tolist()
        order = found if classes is None else list(classes)
        if unknown := [label for label in found if label not in order]:
            raise ValueError(
                f"Expected labels of column {name!r} to be among `classes`, but got {unknown[:5]}, "
                f"not in {order}. Name all labels, in the order of the model's outputs."
            )
        positions = np.array([order.index(label) for label in found], dtype=np.int64)
        return [positions[np.searchsorted(found, array)] for array in labels]
    if classes is not None:
        raise ValueError(
            f"Expected column {name!r} to hold text for `classes`, but got labels of type "
            f"{labels[0].dtype}. Leave `classes` out: numbers are their own."
        )
    if kinds <= {"f"}:
        return [array.astype(np.float32) for array in labels]
    if kinds <= set("biu") and all(array.min(initial=0) >= 0 for array in labels):
        return [array.astype(np.int64) for array in labels]
    every = [value for column in columns for value in column]
    numbers = (value for value in every if isinstance(value, int) and value < 0)
    wrong = None if None in every else next(numbers, every[0])
    raise ValueError(
        f"Expected label column {name!r} to hold classes from 0, strings or floats, one per "
        f"sample, but got {wrong!r} among {[str(array.dtype) for array in labels]}. "
        "Fill or drop rows without label, and number classes from 0."
    )
