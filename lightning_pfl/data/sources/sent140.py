"""Sent140: sentiment of tweets by author, with words as GloVe vectors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.data.sources.base import Fields, Labels, Source, SourceData, load_error
from lightning_pfl.data.sources.leaf import leaf_files, read_leaf_file

#: Position of the text in LEAF's list of a tweet's attributes.
TEXT = 4


class WordVectors:
    """Lookup of fixed word vectors for the word numbers of a batch.

    Args:
        table: A vector per word, ``(words, dimensions)``; the last one is for unknown words and
            padding.
    """

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self._copies: dict[torch.device, Tensor] = {table.device: table}

    def __call__(self, batch: Fields) -> Fields:
        """Look up the first field, ``(samples, tokens)``; keep the others."""
        numbers, *rest = batch
        if numbers.device not in self._copies:
            # Outside inference mode, or a later training step could not use the copy.
            with torch.inference_mode(False):
                self._copies[numbers.device] = self.table.to(numbers.device)
        return (F.embedding(numbers, self._copies[numbers.device]), *rest)


class Sent140(Source):
    """Sent140 from LEAF's JSON files and a file of GloVe vectors; there is no download.

    To have the files of FedRep's experiment, 183 users, run ``./preprocess.sh -s niid --sf 0.3 -k
    50 --tf 0.8 -t sample`` in LEAF's folder ``data/sent140`` (github.com/TalwalkarLab/leaf), copy
    its folders ``data/train`` and ``data/test`` into ``data_dir``, and unpack ``glove.6B.300d.txt``
    of nlp.stanford.edu/data/glove.6B.zip there.

    A tweet is split into words and the signs ``. , ! ? ;`` as LEAF does it and cut after
    ``tokens``. Unknown words and padding have the zero vector. Samples are vectors ``(tokens,
    dimensions)`` in the batch and word numbers in the pool, labels 0 (negative) or 1; the column
    ``user`` names the author, for the partition `Natural`.

    Args:
        data_dir: Folder of the folders ``train`` and ``test``.
        vectors: File of word vectors, a word and its numbers per line; relative to ``data_dir``.
        tokens: Number of words per tweet, at least 1.
        lowercase: Whether words are looked up in lower case. The released code doesn't, although
            GloVe's words are, so words with a capital are unknown to it.

    Raises:
        ValueError: ``tokens`` is below 1.

    Deviation from the paper: the released code reshapes a batch of vectors instead of transposing
    it, which mixes the tweets of a batch. Here tweets don't mix.

    References:
        Caldas et al. LEAF: a benchmark for federated settings. 2018. arXiv:1812.01097. Go, Bhayani,
        Huang. Twitter sentiment classification using distant supervision. 2009. Pennington, Socher,
        Manning. GloVe: global vectors for word representation. EMNLP 2014.
    """

    def __init__(
        self,
        data_dir: str = "data/sent140",
        vectors: str = "glove.6B.300d.txt",
        tokens: int = 25,
        lowercase: bool = False,
    ) -> None:
        check_types(Sent140.__init__, locals())
        if tokens < 1:
            raise ValueError(
                f"Expected `tokens` to be at least 1, but got {tokens=}. Use 25 as in the paper."
            )
        self.data_dir = Path(data_dir)
        self.vectors = self.data_dir / vectors
        self.tokens, self.lowercase = tokens, lowercase

    def prepare(self) -> None:
        """Check that the files exist.

        Raises:
            FileNotFoundError: If one of them is missing.
        """
        for split in ("train", "test"):
            if not leaf_files(self.data_dir / split):
                raise load_error(
                    f"LEAF's files of Sent140, all_data_*_{split}_*.json",
                    [str(self.data_dir / split)],
                    "Run LEAF's data/sent140/preprocess.sh with -t sample and copy its folders "
                    "data/train and data/test to data_dir.",
                )
        if not self.vectors.is_file():
            raise load_error(
                "a file of word vectors",
                [str(self.vectors)],
                "Unpack it from nlp.stanford.edu/data/glove.6B.zip, or set `vectors`.",
            )

    def load(self) -> SourceData:
        """Read the tweets, and the vectors of the words in them.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError: A file is not what its name says.
        """
        self.prepare()
        splits = [self._read(self.data_dir / split) for split in ("train", "test")]
        words = {word for texts, _, _ in splits for text in texts for word in text}
        numbers, table = read_vectors(self.vectors, words)
        fields = [
            (torch.from_numpy(self._numbers(texts, numbers)), torch.from_numpy(labels))
            for texts, labels, _ in splits
        ]
        return SourceData(
            fields[0],
            splits[0][1],
            fields[1],
            splits[1][1],
            transform=WordVectors(torch.from_numpy(table)),
            num_classes=2,
            columns={"user": splits[0][2]},
            test_columns={"user": splits[1][2]},
        )

    def _read(self, folder: Path) -> tuple[list[list[str]], Labels, Labels]:
        """Read the words, labels and authors of all tweets of a folder."""
        texts: list[list[str]] = []
        labels: list[Any] = []
        users: list[str] = []
        for path in leaf_files(folder):
            for user, tweets, moods in read_leaf_file(path):
                texts += [self._words(tweet, path) for tweet in tweets]
                labels += [_mood(mood, path) for mood in moods]
                users += [user] * len(moods)
        return texts, np.asarray(labels, dtype=np.int64), np.asarray(users, dtype=str)

    def _words(self, tweet: Any, path: Path) -> list[str]:
        if not isinstance(tweet, list) or len(tweet) <= TEXT or not isinstance(tweet[TEXT], str):
            raise ValueError(
                f"Expected tweets as LEAF lists their attributes in {path}, with the text at "
                f"{TEXT}, but got {tweet!r}. Make the file again with LEAF's preprocess.sh."
            )
        text = tweet[TEXT].lower() if self.lowercase else tweet[TEXT]
        return split_words(text)[: self.tokens]

    def _numbers(self, texts: list[list[str]], numbers: dict[str, int]) -> npt.NDArray[np.int64]:
        """Look up word numbers ``(tweets, tokens)``; the last number means unknown."""
        unknown = len(numbers)
        found = np.full((len(texts), self.tokens), unknown)
        for row, text in zip(found, texts, strict=True):
            row[: len(text)] = [numbers.get(word, unknown) for word in text]
        return found


def split_words(text: str) -> list[str]:
    """Split a text as LEAF does.

    Example:
        >>> split_words("I don't know... really?")
        ['I', "don't", 'know', '.', '.', '.', 'really', '?']
    """
    return re.findall(r"[\w']+|[.,!?;]", text)


def read_vectors(
    path: Path, words: Iterable[str]
) -> tuple[dict[str, int], npt.NDArray[np.float32]]:
    """Read the vectors of some words from a text file of GloVe.

    Returns:
        The numbers of the words found, in file order, and their vectors, with a zero vector at the
        end.

    Raises:
        ValueError: A line has another number of values than the first, or no word is found.
    """
    wanted, dimensions = set(words), 0
    numbers: dict[str, int] = {}
    vectors: list[npt.NDArray[np.float32]] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            word, _, rest = line.rstrip("\n").partition(" ")
            dimensions = dimensions or len(rest.split())
            if word not in wanted or word in numbers:
                continue
            try:
                vector = np.array(rest.split(), dtype=np.float32)
            except ValueError:
                vector = np.empty(0, dtype=np.float32)
            if len(vector) != dimensions or not dimensions:
                raise ValueError(
                    f"Expected a word and {dimensions} numbers in each line of {path}, but got "
                    f"{line[:60]!r}. Unpack the file again."
                )
            numbers[word] = len(vectors)
            vectors.append(vector)
    if not vectors:
        raise ValueError(
            f"Expected vectors of words of the tweets in {path}, but got none. Use a text file of "
            "GloVe."
        )
    return numbers, np.stack([*vectors, np.zeros(dimensions, dtype=np.float32)])


def _mood(label: Any, path: Path) -> int:
    if label not in (0, 1):
        raise ValueError(
            f"Expected labels 0 and 1 in {path}, but got {label!r}. Make the file again with "
            "LEAF's preprocess.sh."
        )
    return int(label)
