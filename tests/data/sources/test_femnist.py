"""FEMNIST from files of the true layout that the tests write."""

import io
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from lightning_pfl.data import FEMNIST, FederatedDataModule, Natural
from lightning_pfl.data.sources.femnist import CHARACTERS
from lightning_pfl.data.sources.leaf import leaf_files, read_leaf_file
from tests.data.sources.leaf_layout import femnist_pixels, write_femnist, write_leaf


@pytest.fixture(autouse=True)
def _quiet() -> None:
    datasets.disable_progress_bars()


def test_leaf_files_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 0):
        write_leaf(tmp_path / f"all_data_{number}.json", [])
    (tmp_path / "state.json").write_text("{}")  # of another library
    names = [path.name for path in leaf_files(tmp_path)]
    assert names == ["all_data_0.json", "all_data_2.json", "all_data_10.json"]


def test_pixels_labels_and_columns_of_leaf(tmp_path: Path) -> None:
    write_femnist(tmp_path, files=2, writers=3, characters="7Zc", repeats=2)
    source = FEMNIST(str(tmp_path))
    source.prepare()
    arrays = source.load()
    numbers = np.repeat([7, 35, 38], 2)  # 10 digits, 26 capitals, then small letters
    assert arrays.labels.tolist() == numbers.tolist() * 6
    want = np.concatenate([femnist_pixels(numbers, seed) for seed in range(6)])
    assert arrays.fields[0].dtype == torch.uint8
    assert np.array_equal(arrays.fields[0].numpy(), want.reshape(36, 1, 28, 28))
    assert arrays.columns["file"].tolist() == [0] * 18 + [1] * 18
    assert sorted(set(arrays.columns["writer"])) == [
        f"f0{n}_0{w}" for n in (0, 1) for w in range(3)
    ]
    assert (arrays.test_fields, arrays.num_classes) == (None, 62)
    assert arrays.transform is not None
    torch.testing.assert_close(
        arrays.transform(arrays.fields)[0], torch.from_numpy(want / 255).float().view(36, 1, 28, 28)
    )


def test_chosen_characters_are_numbered_in_their_order(tmp_path: Path) -> None:
    write_femnist(tmp_path, files=1, writers=4, characters="ab5", repeats=2)
    arrays = FEMNIST(str(tmp_path), characters="b5", max_per_class=3).load()
    # The first three of each: two of writer 0 and one of writer 1, in the order of the file.
    assert arrays.labels.tolist() == [0, 0, 1, 1, 0, 1]
    assert arrays.columns["writer"].tolist() == ["f00_00"] * 4 + ["f00_01"] * 2
    assert arrays.num_classes == 2


def write_table(folder: Path, writers: int, sizes: list[int]) -> np.ndarray:
    """The layout of flwrlabs/femnist: parquet files below ``data``, images as PNG."""
    labels = np.arange(sum(sizes)) % 62
    pixels = femnist_pixels(labels).reshape(-1, 28, 28)
    encoded = []
    for image in pixels:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        encoded.append({"bytes": file.getvalue(), "path": None})
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "writer_id": datasets.Value("string"),
            "hsf_id": datasets.Value("int64"),
            "character": datasets.ClassLabel(names=list(CHARACTERS)),
        }
    )
    names = np.repeat([f"w{writers - k:03d}" for k in range(writers)], sizes)
    columns = {"image": encoded, "writer_id": names, "hsf_id": labels * 0, "character": labels}
    (folder / "data").mkdir(parents=True)
    table = datasets.Dataset.from_pandas(pd.DataFrame(columns), features=features)
    table.to_parquet(str(folder / "data" / "train-00000-of-00001.parquet"))
    return pixels


def test_the_table_has_the_same_images_and_a_hundred_writers_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    pixels = write_table(tmp_path / "table", writers=101, sizes=[1] * 100 + [3])
    source = FEMNIST(str(tmp_path / "table"))
    source.prepare()
    arrays = source.load()
    assert np.array_equal(arrays.fields[0][:, 0].numpy(), pixels)
    assert arrays.labels.tolist() == [k % 62 for k in range(103)]
    assert arrays.columns["file"].tolist() == [0] * 100 + [1] * 3
    assert arrays.columns["writer"][-1] == "w001"


def test_writers_or_files_are_the_clients(tmp_path: Path) -> None:
    write_femnist(tmp_path, files=2, writers=3, characters="ab", repeats=5)
    for column, clients in (("writer", 6), ("file", 2)):
        data = FederatedDataModule(FEMNIST(str(tmp_path)), Natural(column), test_fraction=0.1)
        train, test = data.train_dataloader(), data.test_dataloader()
        assert train.num_clients == clients
        each = 60 // clients
        assert (train.num_samples + test.num_samples).tolist() == [each] * clients
        assert test.num_samples.tolist() == [each // 10] * clients


@pytest.mark.parametrize("step", ["prepare", "load"])
def test_missing_files_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def no_network(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    with pytest.raises(FileNotFoundError) as caught:
        getattr(FEMNIST(str(tmp_path / "mine")), step)()
    for part in (
        "all_data_*.json",
        "mine",
        "no route to host",
        "preprocess.sh",
        "flwrlabs/femnist",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"all_data_0.json to be a JSON file of LEAF.*JSONDecodeError"),
        ("[1]", r"to be a JSON file of LEAF.*TypeError"),
        ('{"users": ["a"], "user_data": {}}', r"to be a JSON file of LEAF.*KeyError: 'a'"),
    ],
)
def test_broken_leaf_files_are_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "all_data_0.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        list(read_leaf_file(path))


@pytest.mark.parametrize(
    ("samples", "labels", "message"),
    [
        ([[0.0] * 784], [1, 2], r"as many samples as labels .* got 1 and 2 for user 'a'"),
        ([[0.0] * 783], [1], r"images of 784 numbers in \[0, 1\] .* cannot reshape"),
        ([[0.0] * 1568], [1], r"images of 784 numbers .* got shape \(1, 1568\)"),
        ([[255.0] * 784], [1], r"images of 784 numbers .* from 255 to 255"),
        ([["x"] * 784], [1], r"images of 784 numbers .* could not convert"),
        ([[0.0] * 784], [62], r"classes from 0 to 61 .* got \[62\]"),
        ([[0.0] * 784], ["a"], r"classes from 0 to 61 .* got \['a'\]"),
    ],
)
def test_wrong_samples_are_refused(tmp_path: Path, samples: Any, labels: Any, message: str) -> None:
    write_leaf(tmp_path / "all_data_0.json", [("a", samples, labels)])
    with pytest.raises(ValueError, match=message):
        FEMNIST(str(tmp_path)).load()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"characters": ""}, "different digits and letters, but got characters=''"),
        ({"characters": "aa"}, "but got characters='aa'"),
        ({"characters": "ä"}, "but got characters='ä'"),
        ({"max_per_class": 0}, "at least 1 or None, but got max_per_class=0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FEMNIST(**arguments)


def test_characters_that_nobody_wrote_are_refused(tmp_path: Path) -> None:
    write_femnist(tmp_path, files=1, writers=1, characters="a", repeats=1)
    with pytest.raises(ValueError, match=r"images of the characters 'xy' in .*, but got none"):
        FEMNIST(str(tmp_path), characters="xy").load()
