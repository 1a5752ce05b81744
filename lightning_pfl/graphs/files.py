"""Graphs and features from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from lightning_pfl.graphs.builders import GraphBuilder


class MatrixFile(GraphBuilder):
    """An adjacency matrix from a file.

    Args:
        path: A ``.npy`` file with a symmetric matrix ``(clients, clients)``, or the ``.npz`` file
            of a sparse one by ``scipy.sparse.save_npz``.
    """

    def __init__(self, path: str) -> None:
        check_ending("path", path, (".npy", ".npz"))
        self.path = str(path)

    def __call__(self, num_clients: int, seed: int) -> Any:
        """Read the matrix.

        Raises:
            FileNotFoundError: If the file doesn't exist.
            ValueError: If it can't be read.
        """
        return read("path", self.path)


def check_ending(argument: str, path: str | Path, endings: tuple[str, ...]) -> None:
    """Raise ValueError unless a path has one of some endings.

    Args:
        argument: Name of the argument, for the error.
        path: The path.
        endings: Allowed endings, such as ``".npy"``.
    """
    if not str(path).endswith(endings):
        raise ValueError(
            f"Expected `{argument}` to be a {' or '.join(endings)} file, but got "
            f"{argument}={str(path)!r}. Save it by numpy.save"
            f"{' or scipy.sparse.save_npz' if '.npz' in endings else ''}."
        )


def read(argument: str, path: str) -> Any:
    """Read the array of a ``.npy`` file, or the sparse matrix of a ``.npz`` file.

    Args:
        argument: Name of the argument, for the error.
        path: The path.

    Raises:
        FileNotFoundError: If the file doesn't exist.
        ValueError: If it can't be read.
    """
    from scipy.sparse import load_npz

    if not Path(path).is_file():
        raise FileNotFoundError(
            f"Expected `{argument}` to be a file, but got {argument}={path!r}, which doesn't exist "
            f"in {Path.cwd()}. Use an absolute path, or one from there."
        )
    try:
        return np.load(path) if path.endswith(".npy") else load_npz(path)
    except (EOFError, OSError, ValueError, BadZipFile) as cause:
        raise ValueError(
            f"Expected `{argument}` to be a file of numpy.save or scipy.sparse.save_npz, but got "
            f"{argument}={path!r}, which can't be read: {cause}. Write it again."
        ) from cause
