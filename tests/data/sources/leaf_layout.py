"""Tiny files of LEAF's true layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from lightning_pfl.data.sources.femnist import CHARACTERS

User = tuple[str, list[Any], list[Any]]


def write_leaf(path: Path, users: list[User]) -> None:
    """One of LEAF's JSON files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": [name for name, _, _ in users],
        "num_samples": [len(labels) for _, _, labels in users],
        "user_data": {name: {"x": samples, "y": labels} for name, samples, labels in users},
    }
    path.write_text(json.dumps(content))


def femnist_pixels(labels: np.ndarray, seed: int = 0) -> np.ndarray:
    """White paper with a grey field as bright as the class and a little noise, ``(n, 784)``."""
    rng = np.random.default_rng(seed)
    images = np.full((len(labels), 28, 28), 255)
    images[:, 4:24, 4:24] = 4 * labels[:, None, None] + rng.integers(0, 4, (len(labels), 20, 20))
    return images.reshape(len(labels), 784).astype(np.uint8)


def write_femnist(folder: Path, files: int, writers: int, characters: str, repeats: int) -> None:
    """``all_data_0.json`` and so on; every writer has each character ``repeats`` times."""
    labels = np.repeat([CHARACTERS.index(character) for character in characters], repeats)
    for number in range(files):
        users: list[User] = []
        for writer in range(writers):
            pixels = femnist_pixels(labels, seed=number * writers + writer) / 255
            users.append((f"f{number:02d}_{writer:02d}", pixels.tolist(), labels.tolist()))
        write_leaf(folder / f"all_data_{number}.json", users)


def write_sent140(folder: Path, users: int, train: int, test: int, dimensions: int) -> None:
    """``train`` and ``test`` with the same users, and word vectors beside them.

    The words "good" and "bad" say how a tweet is meant.
    """
    rng = np.random.default_rng(0)
    words = ["good", "bad", *(f"word{k}" for k in range(20)), "!"]
    vectors = rng.normal(size=(len(words), dimensions)).round(4)
    lines = [" ".join([word, *map(str, row)]) for word, row in zip(words, vectors, strict=True)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"glove.6B.{dimensions}d.txt").write_text("\n".join(lines) + "\n")
    for split, count in (("train", train), ("test", test)):
        entries: list[User] = []
        for user in range(users):
            labels = rng.integers(0, 2, count).tolist()
            texts = [
                " ".join([*rng.choice(words[2:-1], rng.integers(1, 30)), ("bad", "good")[y], "!"])
                for y in labels
            ]
            tweets = [
                [str(k), "Sat May 16 2009", "NO_QUERY", f"u{user}", text, "training"]
                for k, text in enumerate(texts)
            ]
            entries.append((f"u{user}", tweets, labels))
        name = f"all_data_0_niid_03_keep_50_{split}_8.json"
        write_leaf(folder / split / name, entries)
