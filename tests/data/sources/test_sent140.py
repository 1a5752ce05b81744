"""Sent140 from files of the true layout that the tests write."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.data import FederatedDataModule, Sent140
from lightning_pfl.data.sources.sent140 import WordVectors, read_vectors, split_words
from tests.data.sources.leaf_layout import write_leaf, write_sent140

VECTORS = {"good": [1.0, 2.0], "Bad": [3.0, 4.0], "!": [5.0, 6.0], "unused": [7.0, 8.0]}


def tweet(text: str) -> list[str]:
    return ["1467810369", "Mon Apr 06 22:19:45 PDT 2009", "NO_QUERY", "someone", text, "training"]


def write(folder: Path, train: list[str], test: list[str]) -> Sent140:
    """Tweets of one user, the first one happy and the others not."""
    for split, texts in (("train", train), ("test", test)):
        labels = [int(k == 0) for k in range(len(texts))]
        path = folder / split / f"all_data_0_niid_03_keep_50_{split}_8.json"
        write_leaf(path, [("ann", [tweet(text) for text in texts], labels)])
    lines = [f"{word} {' '.join(map(str, row))}" for word, row in VECTORS.items()]
    (folder / "vectors.txt").write_text("\n".join(lines) + "\n")
    return Sent140(str(folder), "vectors.txt", tokens=3)


def test_words_become_vectors_and_the_rest_zeros(tmp_path: Path) -> None:
    arrays = write(tmp_path, ["good, Bad one!", "bad!"], ["! good", "Bad Bad Bad good"]).load()
    assert arrays.fields[1].tolist() == arrays.labels.tolist() == [1, 0]
    assert arrays.test_labels is not None
    assert arrays.test_labels.tolist() == [1, 0]
    assert arrays.transform is not None
    none, good, bad, end = [0.0, 0.0], VECTORS["good"], VECTORS["Bad"], VECTORS["!"]
    vectors, labels = arrays.transform(arrays.fields)
    # "good" "," "Bad": the comma has no vector, "one" and "!" are cut off; "bad" isn't "Bad".
    assert vectors.tolist() == [[good, none, bad], [none, end, none]]
    assert vectors.dtype == torch.float32
    assert torch.equal(labels, arrays.fields[1])
    assert arrays.test_fields is not None
    tested, _ = arrays.transform(arrays.test_fields)
    assert tested.tolist() == [[end, good, none], [bad, bad, bad]]
    assert arrays.num_classes == 2


def test_lowercase_finds_words_with_capitals(tmp_path: Path) -> None:
    source = write(tmp_path, ["GOOD !"], ["good"])
    source.lowercase = True
    arrays = source.load()
    assert arrays.transform is not None
    found = arrays.transform(arrays.fields)[0][0]
    assert found.tolist() == [VECTORS["good"], VECTORS["!"], [0.0, 0.0]]


def test_authors_are_the_clients_in_training_and_test(tmp_path: Path) -> None:
    write_sent140(tmp_path, users=4, train=6, test=2, dimensions=5)
    data = FederatedDataModule(Sent140(str(tmp_path), "glove.6B.5d.txt"), batch_size=4)
    data.setup()
    train, test = data.train_dataloader(), data.test_dataloader()
    assert train.names == test.names == ("u0", "u1", "u2", "u3")
    assert train.num_samples.tolist() == [6] * 4
    assert test.num_samples.tolist() == [2] * 4
    vectors, labels = train.gather(train.indices[1])
    assert vectors.shape == (6, 25, 5)
    assert set(labels.tolist()) <= {0, 1}


def test_vectors_are_copied_to_a_device_once() -> None:
    vectors = WordVectors(torch.eye(3))
    meta = torch.zeros(2, 4, dtype=torch.int64, device="meta")
    with torch.inference_mode():
        vectors((meta,))
    copies = dict(vectors._copies)
    vectors((meta,))
    assert {key.type: value for key, value in vectors._copies.items()}.keys() == {"cpu", "meta"}
    assert all(vectors._copies[key] is value for key, value in copies.items())
    assert not any(copy.is_inference() for copy in copies.values())


def test_words_are_split_as_leaf_splits_them() -> None:
    assert split_words("@ann: that's   OK?!\nyes_no; 2nd") == (
        ["ann", "that's", "OK", "?", "!", "yes_no", ";", "2nd"]
    )


@pytest.mark.parametrize("missing", ["train", "test", "vectors.txt"])
def test_missing_files_say_what_to_do(tmp_path: Path, missing: str) -> None:
    source = write(tmp_path, ["good"], ["good"])
    path = tmp_path / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    what = "glove.6B.zip" if missing == "vectors.txt" else r"preprocess.sh with -t sample"
    for step in (source.prepare, source.load):
        with pytest.raises(FileNotFoundError, match=rf"{missing}.*{what}"):
            step()


@pytest.mark.parametrize(
    ("entry", "label", "message"),
    [
        ("a text", 0, r"tweets as LEAF lists their attributes in .*, but got 'a text'"),
        (["1", "2", "3", "4"], 0, r"with the text at 4, but got \['1', '2', '3', '4'\]"),
        (tweet("good"), 4, r"labels 0 and 1 in .*, but got 4"),
        (tweet("unheard"), 0, r"vectors of words of the tweets in .*vectors.txt, but got none"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, entry: Any, label: Any, message: str) -> None:
    source = write(tmp_path, [], [])
    write_leaf(tmp_path / "train" / "all_data_1.json", [("bob", [entry], [label])])
    with pytest.raises(ValueError, match=message):
        source.load()


@pytest.mark.parametrize("line", ["Bad 1.0", "Bad 1.0 x", "Bad"])
def test_broken_vectors_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text(f"good 1.0 2.0\n{line}\n")
    with pytest.raises(ValueError, match=rf"a word and 2 numbers in each line .* got '{line}"):
        read_vectors(path, ["Bad"])
    numbers, table = read_vectors(path, ["good"])  # what isn't needed isn't read
    assert (numbers, table.tolist()) == ({"good": 0}, [[1.0, 2.0], [0.0, 0.0]])
    assert table.dtype == np.float32


def test_no_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="Expected `tokens` to be at least 1, but got tokens=0"):
        Sent140(tokens=0)
