"""FEMNIST: 805,263 grey images of 62 handwritten characters, 28 x 28, by 3,597 writers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.data.sources.base import NormalizeImages, Source, SourceData, load_error
from lightning_pfl.data.sources.leaf import leaf_files, read_leaf_file
from lightning_pfl.data.sources.table import HuggingFaceTable

#: The classes in the order of their numbers.
CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
#: Number of writers in one of LEAF's JSON files, of which the data set has 36.
WRITERS_PER_FILE = 100
SIDE = 28
HUB = "flwrlabs/femnist"


class FEMNIST(Source):
    """FEMNIST from LEAF's JSON files, else from the table ``flwrlabs/femnist`` of Hugging Face.

    To make the files of LEAF, run ``./preprocess.sh -s niid --sf 1.0 -t sample`` in its folder
    ``data/femnist`` (github.com/TalwalkarLab/leaf) and copy ``data/all_data/all_data_*.json`` into
    ``data_dir``. Or put the parquet files of the table (its folder ``data``, or one made by
    ``save_to_disk``) there. With neither, the table is downloaded and kept in ``data_dir``.

    Images are uint8 ``(1, 28, 28)`` in the pool, white paper is 255, and floats in [0, 1] in the
    batch. Two columns serve the partition `Natural`: ``writer``, and ``file``, the number of the
    JSON file (from 0), which has 100 writers; in the table writers are counted in order of
    appearance.

    Args:
        data_dir: Folder of the files.
        characters: The classes to keep, each once; their order makes the labels 0, 1, ....
        max_per_class: Keep only this many images of each class, the first ones in file order.
            ``None``: all.

    Raises:
        ValueError: ``characters`` has an unknown or repeated character, or ``max_per_class`` is not
            positive.

    Example:
        >>> FEMNIST(characters="abcdefghij", max_per_class=4000).characters
        'abcdefghij'

    References:
        Caldas et al. LEAF: a benchmark for federated settings. 2018. arXiv:1812.01097. Cohen,
        Afshar, Tapson, van Schaik. EMNIST: extending MNIST to handwritten letters. IJCNN 2017.
    """

    def __init__(
        self,
        data_dir: str = "data/femnist",
        characters: str = CHARACTERS,
        max_per_class: int | None = None,
    ) -> None:
        check_types(FEMNIST.__init__, locals())
        unknown = sorted(set(characters) - set(CHARACTERS))
        if not characters or unknown or len(set(characters)) < len(characters):
            raise ValueError(
                "Expected `characters` to be different digits and letters, but got "
                f"characters={characters!r}. Use 'abcdefghij' for ten letters."
            )
        if max_per_class is not None and max_per_class < 1:
            raise ValueError(
                f"Expected `max_per_class` to be at least 1 or None, but got {max_per_class=}. "
                "Use None to keep all images."
            )
        self.data_dir = Path(data_dir)
        self.characters = characters
        self.max_per_class = max_per_class

    def prepare(self) -> None:
        """Download the table unless files are there.

        Raises:
            FileNotFoundError: There are no files and the download failed.
        """
        if not leaf_files(self.data_dir):
            try:
                self._table().prepare()
            except FileNotFoundError as error:
                raise self._missing(error) from error

    def load(self) -> SourceData:
        """Read the files.

        Raises:
            FileNotFoundError: There are no files and no downloaded table.
            ValueError: A file is not what its name says, or there are none of the characters.
        """
        files = leaf_files(self.data_dir)
        pixels, labels, writers, numbers = self._read(files) if files else self._read_table()
        keep = self._kept(labels)
        order = np.full(len(CHARACTERS), -1)
        order[[CHARACTERS.index(character) for character in self.characters]] = np.arange(
            len(self.characters)
        )
        labels = order[labels[keep]]
        return SourceData(
            (torch.from_numpy(pixels[keep]).unsqueeze(1), torch.from_numpy(labels)),
            labels,
            transform=NormalizeImages([0.0], [1.0]),
            num_classes=len(self.characters),
            columns={"writer": writers[keep], "file": numbers[keep]},
        )

    def _read(self, files: list[Path]) -> tuple[npt.NDArray[Any], ...]:
        """Read pixels ``(n, 28, 28)`` uint8, labels, writers and file numbers of LEAF's files."""
        pixels, labels, writers, numbers = [], [], [], []
        for number, path in enumerate(files):
            for writer, samples, classes in read_leaf_file(path):
                pixels.append(_pixels(samples, path))
                labels.append(_classes(classes, path))
                writers.append(np.full(len(classes), writer))
                numbers.append(np.full(len(classes), number))
        return tuple(np.concatenate(parts) for parts in (pixels, labels, writers, numbers))

    def _read_table(self) -> tuple[npt.NDArray[Any], ...]:
        """Read the table; a hundred writers in order of appearance count as a file."""
        try:
            arrays = self._table().load()
        except FileNotFoundError as error:
            raise self._missing(error) from error
        writers = arrays.columns["writer_id"].astype(str)
        _, first, inverse = np.unique(writers, return_index=True, return_inverse=True)
        rank = np.empty(len(first), dtype=np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        pixels = arrays.fields[0][:, 0].numpy()
        return pixels, arrays.labels, writers, rank[inverse] // WRITERS_PER_FILE

    def _table(self) -> HuggingFaceTable:
        # Not in its subfolders, where the library caches downloads.
        saved = ("*.parquet", "data/*.parquet", "state.json", "dataset_dict.json")
        local = any(path for pattern in saved for path in self.data_dir.glob(pattern))
        path = str(self.data_dir) if local else HUB
        cache = None if local else str(self.data_dir)
        return HuggingFaceTable(
            path, "image", "character", client="writer_id", grayscale=True, cache_dir=cache
        )

    def _kept(self, labels: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Find the positions of the images to keep, in the order of the files."""
        found = [
            np.nonzero(labels == CHARACTERS.index(character))[0][: self.max_per_class]
            for character in self.characters
        ]
        positions: npt.NDArray[np.int64] = np.sort(np.concatenate(found))
        if not len(positions):
            raise ValueError(
                f"Expected images of the characters {self.characters!r} in {self.data_dir}, but "
                "got none. Choose others, or more of LEAF's files."
            )
        return positions

    def _missing(self, reason: Exception) -> FileNotFoundError:
        return load_error(
            "LEAF's files all_data_*.json, or the parquet files of flwrlabs/femnist",
            [str(self.data_dir), f"Hugging Face ({reason})"],
            "Run LEAF's data/femnist/preprocess.sh and copy its folder data/all_data to data_dir, "
            "or run once with network access and the package datasets.",
        )


def _pixels(samples: list[Any], path: Path) -> npt.NDArray[np.uint8]:
    """Convert a writer's images, lists of 784 multiples of 1/255, to bytes."""
    try:
        values = np.asarray(samples, dtype=np.float64)
        images: npt.NDArray[np.uint8] = (
            np.rint(values * 255).astype(np.uint8).reshape(-1, SIDE, SIDE)
        )
        if (
            len(images) == len(samples)
            and values.min(initial=0) >= 0
            and values.max(initial=0) <= 1
        ):
            return images
        reason = f"shape {values.shape}, from {values.min():g} to {values.max():g}"
    except (ValueError, TypeError) as error:
        reason = str(error)
    raise ValueError(
        f"Expected images of {SIDE * SIDE} numbers in [0, 1] in {path}, but got {reason}. Make the "
        "file again with LEAF's data/femnist/preprocess.sh."
    )


def _classes(labels: list[Any], path: Path) -> npt.NDArray[np.int64]:
    classes = np.asarray(labels)
    whole = classes.dtype.kind in "iu" or not len(classes)
    if not whole or classes.min(initial=0) < 0 or classes.max(initial=0) >= len(CHARACTERS):
        raise ValueError(
            f"Expected classes from 0 to {len(CHARACTERS) - 1} in {path}, but got "
            f"{classes[:5].tolist()}. Make the file again with LEAF's data/femnist/preprocess.sh."
        )
    return classes.astype(np.int64)
