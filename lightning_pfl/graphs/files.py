"""Graphs and features from files, for runs from a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from lightning_pfl.graphs.builders import GraphBuilder


class MatrixFile(GraphBuilder):
    """An adjacency matrix from a file, such as a graph made in Python for a run from a recipe.

    Args:
        path: A ``.npy`` file with a symmetric matrix ``(clients, clients)``, or the ``.npz`` file
            of a sparse one by ``scipy.sparse.save_npz``.
    """

    def __init__(self, path: str) -> None:
        check_ending("path", path, (".npy", ".npz"))
        self.path = str(path)

    def __call__(self, num_clients: int, seed: int) -> Any:
        """The matrix.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it can't be read.
        """
        return read("path", self.path)


def check_ending(argument: str, path: str | Path, endings: tuple[str, ...]) -> None:
    """Require the path of a file with one of some endings.

    Args:
        argument: What holds the path, for the error.
        path: The path.
        endings: Such as ``".npy"``.

    Raises:
        ValueError: If it has another one.
    """
    if not str(path).endswith(endings):
        raise ValueError(
            f"Expected `{argument}` to be a {' or '.join(endings)} file, but got "
            f"{argument}={str(path)!r}. Save it by numpy.save"
            f"{' or scipy.sparse.save_npz' if '.npz' in endings else ''}."
        )


def read(argument: str, path: str) -> Any:
    """The array of a ``.npy`` file, or the sparse matrix of a ``.npz`` file.

    Args:
        argument: What holds the path, for the error.
        path: The path.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it can't be read.
    """
    from scipy.sparse import load_npz

    if not Path(path).is_file():
        raise FileNotFoundError(
            f"Expected `{argument}` to be a file, but got {argument}={path!r}, which isn't there, "
            f"seen from {Path.cwd()}. Give a path from there, or an absolute one."
        )
    try:
        return np.load(path) if path.endswith(".npy") else load_npz(path)
    except (EOFError, OSError, ValueError, BadZipFile) as cause:
        raise ValueError(
            f"Expected `{argument}` to be a file of numpy.save or scipy.sparse.save_npz, but got "
            f"{argument}={path!r}, which can't be read: {cause}. Write it again."
        ) from cause
