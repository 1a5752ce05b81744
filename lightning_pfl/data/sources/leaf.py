"""Readers of LEAF's JSON files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def leaf_files(folder: Path) -> list[Path]:
    """List a folder's JSON files of all data, sorted by the numbers in their names.

    LEAF numbers its files without leading zeros: ``all_data_2`` comes before ``all_data_10``.
    """

    def order(path: Path) -> list[Any]:
        parts = re.split(r"(\d+)", path.name)
        return [int(part) if part.isdigit() else part for part in parts]

    return sorted(folder.glob("all_data*.json"), key=order)


def read_leaf_file(path: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Read one of LEAF's files.

    It holds ``{"users": [user, ...], "user_data": {user: {"x": [...], "y": [...]}, ...}}``.

    Yields:
        For each user, in the order of the file: the name, the samples, and the labels.

    Raises:
        ValueError: The file has another format, or a user's samples and labels differ in number.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        users = [(str(user), content["user_data"][user]) for user in content["users"]]
        pairs = [(user, data["x"], data["y"]) for user, data in users]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"Expected {path} to be a JSON file of LEAF, with 'users' and 'user_data', but got "
            f"{type(error).__name__}: {error}. Make it again with LEAF's preprocess.sh."
        ) from error
    for user, samples, labels in pairs:
        if len(samples) != len(labels):
            raise ValueError(
                f"Expected as many samples as labels in {path}, but got {len(samples)} and "
                f"{len(labels)} for user {user!r}. Make the file again with LEAF's preprocess.sh."
            )
        yield user, samples, labels
