"""Fashion-MNIST: 70,000 grey images of clothes, 28 x 28, ten classes."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.data.sources.base import NormalizeImages, Source, SourceData, load_error

SYSTEM_DIR = Path("/usr/share/datasets/fashion-mnist")
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
# Mean and standard deviation of the 60,000 training images, pixels in [0, 1].
MEAN, STD = 0.2860, 0.3530


class FashionMNIST(Source):
    """Fashion-MNIST from disk where possible, else by torchvision's download.

    The four files (``train-images-idx3-ubyte`` and so on, plain or ``.gz``) are looked for in
    ``data_dir``, in ``data_dir/FashionMNIST/raw`` (torchvision's layout) and in the directory of
    Debian's package ``dataset-fashion-mnist``; otherwise torchvision downloads them to
    ``data_dir``. Images are uint8 ``(1, 28, 28)`` in the pool and normalised in the batch.

    Args:
        data_dir: Directory to look in and to download to.

    References:
        Xiao, Rasul, Vollgraf. Fashion-MNIST. 2017. arXiv:1708.07747.
    """

    def __init__(self, data_dir: str = "data") -> None:
        check_types(FashionMNIST.__init__, locals())
        self.data_dir = Path(data_dir)

    def prepare(self) -> None:
        """Download unless the files are there.

        Raises:
            FileNotFoundError: They are nowhere and the download failed.
        """
        if self._find() is not None:
            return
        try:
            from torchvision.datasets import FashionMNIST as Download

            Download(str(self.data_dir), download=True)
        except Exception as error:  # torchvision missing, no network, a broken mirror
            raise self._missing(f"torchvision's download ({error})") from error

    def load(self) -> SourceData:
        """Read the four files.

        Raises:
            FileNotFoundError: They are nowhere; run `prepare` first.
            ValueError: A file is not what its name says.
        """
        folder = self._find()
        if folder is None:
            raise self._missing("torchvision's download (not tried by load)")
        arrays = [read_idx(_present(folder, name)) for name in FILES]
        for start in (0, 2):
            images, labels = arrays[start : start + 2]
            if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
                raise ValueError(
                    f"Expected images (n, 28, 28) and labels (n,) in {folder / FILES[start]}*, "
                    f"but got shapes {images.shape} and {labels.shape}. "
                    "Download the files again."
                )
        train, test = arrays[:2], arrays[2:]
        return SourceData(
            (torch.from_numpy(train[0]).unsqueeze(1), torch.from_numpy(train[1]).long()),
            train[1].astype(np.int64),
            (torch.from_numpy(test[0]).unsqueeze(1), torch.from_numpy(test[1]).long()),
            test[1].astype(np.int64),
            transform=NormalizeImages([MEAN], [STD]),
            num_classes=10,
        )

    def _folders(self) -> list[Path]:
        return [self.data_dir, self.data_dir / "FashionMNIST" / "raw", SYSTEM_DIR]

    def _find(self) -> Path | None:
        """Return the first folder that has all four files."""
        for folder in self._folders():
            if all(_present(folder, name).exists() for name in FILES):
                return folder
        return None

    def _missing(self, download: str) -> FileNotFoundError:
        return load_error(
            "the four Fashion-MNIST files (train-images-idx3-ubyte.gz, ...)",
            [str(folder) for folder in self._folders()] + [download],
            "Put them into data_dir, install Debian's package dataset-fashion-mnist, or run once "
            "with network access and torchvision.",
        )


def _present(folder: Path, name: str) -> Path:
    """Return the plain file if it exists, else the path of the compressed one."""
    plain = folder / name
    return plain if plain.exists() else folder / f"{name}.gz"


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, plain or gzip.

    The header is big-endian: two zero bytes, the type (8: unsigned byte), the number of
    dimensions, then one 32-bit size per dimension.

    Raises:
        ValueError: The header is another one, or the file has not the size that it states.
    """
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            content = file.read()
    except (EOFError, gzip.BadGzipFile) as error:
        raise _broken(path, str(error)) from error
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise _broken(path, f"a file that begins with {content[:4]!r}")
    dims = content[3]
    shape = np.frombuffer(content[4 : 4 + 4 * (len(content[4 : 4 + 4 * dims]) // 4)], ">u4")
    body = np.frombuffer(content, np.uint8)[4 + 4 * dims :]
    if len(shape) != dims or shape.prod(dtype=np.int64) != len(body):
        raise _broken(path, f"{len(body)} bytes for shape {tuple(shape.tolist())}")
    array: npt.NDArray[np.uint8] = body.reshape(shape.tolist()).copy()
    return array


def _broken(path: Path, got: str) -> ValueError:
    return ValueError(
        f"Expected {path} to be an IDX file of unsigned bytes, but got {got}. "
        "Delete it and download it again."
    )
