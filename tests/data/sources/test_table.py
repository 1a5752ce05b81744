"""Tables from local files and folders, with values that the test wrote."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, DatasetDict, disable_progress_bars
from PIL import Image

from lightning_pfl.data import FederatedDataModule, HuggingFaceTable

FRAME = pd.DataFrame(
    {
        "a": [1.0, 2.0, 3.0, 4.0, 5.0],
        "b": [5, 6, 7, 8, 9],
        "kind": ["dog", "cat", "dog", "ant", "cat"],
        "target": [0.5, 1.5, 2.5, 3.5, 4.5],
        "ward": ["w2", "w1", "w1", "w2", "w1"],
    }
)
WRITERS: dict[str, Callable[[Path], Any]] = {
    "parquet": FRAME.to_parquet,
    "csv": lambda path: FRAME.to_csv(path, index=False),
    "jsonl": lambda path: FRAME.to_json(path, orient="records", lines=True),
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    disable_progress_bars()


def table(tmp_path: Path, path: Path, features: Any = "a", **settings: Any) -> HuggingFaceTable:
    settings = {"label": "kind", "cache_dir": str(tmp_path / "cache"), **settings}
    return HuggingFaceTable(str(path), features, **settings)


@pytest.mark.parametrize("ending", WRITERS)
def test_files(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"data.{ending}"
    WRITERS[ending](path)
    source = table(tmp_path, path, ["a", "b"], client="ward")
    source.prepare()
    arrays = source.load()
    assert arrays.fields[0].tolist() == [[1, 5], [2, 6], [3, 7], [4, 8], [5, 9]]
    assert arrays.fields[1].tolist() == [2, 1, 2, 0, 1]  # ant, cat, dog
    assert arrays.columns["ward"].tolist() == ["w2", "w1", "w1", "w2", "w1"]
    assert (arrays.test_fields, arrays.num_classes, arrays.transform) == (None, 3, None)


def test_classes_say_the_numbers_of_text_labels(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    FRAME.to_csv(path, index=False)
    arrays = table(tmp_path, path, classes=["dog", "elk", "cat", "ant"]).load()
    assert arrays.fields[1].tolist() == [0, 2, 0, 3, 2]
    assert arrays.num_classes == 4
    with pytest.raises(ValueError, match=r"among `classes`, but got \['ant'\]"):
        table(tmp_path, path, classes=["dog", "cat"]).load()
    with pytest.raises(ValueError, match="hold text for `classes`, but got labels of type float64"):
        table(tmp_path, path, label="target", classes=["dog"]).load()


def test_a_label_that_is_also_a_feature_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="label column 'b' is also one of the features"):
        HuggingFaceTable("data.csv", ["a", "b"], "b")


def test_the_client_column_is_the_natural_partition(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    FRAME.to_parquet(path)
    data = FederatedDataModule(table(tmp_path, path, client="ward"), test_fraction=0.4)
    data.setup()
    train, test = data.train_dataloader(), data.test_dataloader()
    assert train.names == ("w1", "w2")
    held = [[*a.tolist(), *b.tolist()] for a, b in zip(train.indices, test.indices, strict=True)]
    assert [sorted(rows) for rows in held] == [[1, 2, 4], [0, 3]]


def test_saved_splits_lists_and_regression(tmp_path: Path) -> None:
    values = [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]], [[9.0, 10.0], [11.0, 12.0]]]
    train = Dataset.from_dict({"x": values, "y": [0.1, 0.2, 0.3], "k": [1, 1, 2]})
    test = Dataset.from_dict({"x": values[:1], "y": [0.4], "k": [2]})
    DatasetDict({"train": train, "held_out": test}).save_to_disk(str(tmp_path / "saved"))
    source = table(tmp_path, tmp_path / "saved", "x", label="y", client="k", test_split="held_out")
    arrays = source.load()
    assert arrays.fields[0].tolist() == values
    assert arrays.labels.tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert arrays.num_classes is None
    assert arrays.test_fields is not None
    assert arrays.test_fields[0].tolist() == values[:1]
    assert arrays.test_columns["k"].tolist() == [2]


def test_one_saved_table(tmp_path: Path) -> None:
    Dataset.from_dict({"a": [1, 2], "kind": [0, 3]}).save_to_disk(str(tmp_path / "one"))
    arrays = table(tmp_path, tmp_path / "one").load()
    assert arrays.fields[0].tolist() == [[1.0], [2.0]]
    assert arrays.num_classes == 4


@pytest.mark.parametrize("grayscale", [False, True])
def test_image_folder(tmp_path: Path, grayscale: bool) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 6, 5, 3), dtype=np.uint8)
    for label, image in zip(["cat", "dog"], pixels, strict=True):
        folder = tmp_path / "pets" / "train" / label
        folder.mkdir(parents=True)
        Image.fromarray(image).save(folder / "0.png")
    source = table(tmp_path, tmp_path / "pets", "image", label="label", grayscale=grayscale)
    arrays = source.load()
    want = pixels.transpose(0, 3, 1, 2)
    if grayscale:
        want = np.stack([np.array(Image.fromarray(image).convert("L")) for image in pixels])[
            :, None
        ]
    assert np.array_equal(arrays.fields[0].numpy(), want)
    assert arrays.labels.tolist() == [0, 1]
    assert arrays.transform is not None
    torch.testing.assert_close(
        arrays.transform(arrays.fields)[0], (arrays.fields[0] / 255 - 0.5) / 0.5
    )


def test_images_are_resized(tmp_path: Path) -> None:
    for k, size in enumerate([(8, 8), (4, 12)]):
        folder = tmp_path / "pets" / "train" / ["cat", "dog"][k]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, color=(10, 20, 30)).save(folder / f"{k}.png")
    source = table(tmp_path, tmp_path / "pets", "image", label="label", image_size=(3, 7))
    images = source.load().fields[0]
    assert images.shape == (2, 3, 3, 7)
    assert torch.equal(images, torch.tensor([10, 20, 30]).byte()[:, None, None].expand(2, 3, 3, 7))
    with pytest.raises(ValueError, match=r"images of one size, but got .*\(8, 8\).*image_size"):
        table(tmp_path, tmp_path / "pets", "image", label="label").load()


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "feature column": ({"features": "nope"}, ValueError, r"columns \['nope'\].*but got \['a', 'b'"),
    "label column": ({"label": "nope"}, ValueError, r"columns \['nope'\]"),
    "client column": ({"client": "nope"}, ValueError, r"columns \['nope'\].*Set features, label"),
    "split": ({"test_split": "test"}, ValueError, r"split 'test' .* splits \['train'\]"),
    "text feature": (
        {"features": "kind", "label": "a"},
        ValueError,
        "column 'kind' to hold numbers.*tokenise",
    ),
    "missing value": (
        {"features": "gap"},
        ValueError,
        "column 'gap' to hold numbers.* no value in row 2, the first .* being 1\\. .*fill gaps",
    ),
    "missing label": ({"label": "gap_label"}, ValueError, "label column 'gap_label'.*got None"),
    "negative label": (
        {"label": "minus"},
        ValueError,
        "label column 'minus' to hold classes from 0.* got -3 among .*number classes from 0",
    ),
    "missing client": ({"client": "gap_label"}, ValueError, "a client for every sample.*missing"),
    "ragged lists": ({"features": "ragged"}, ValueError, "column 'ragged' to hold .*pad lists"),
    "list beside number": ({"features": ["a", "pair"]}, ValueError, "several `features`.*shapes"),
    "no features": ({"features": []}, ValueError, "`features` to name at least one column"),
    "no file": ({"path": "gone.parquet"}, FileNotFoundError, "got path='gone.parquet'.*Check"),
    "no folder": ({"path": "/gone/far"}, FileNotFoundError, "path='/gone/far' .no such file"),
    "file type": ({"path": __file__}, ValueError, r"`path` to end in one of .*\.parquet"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tables_are_refused(tmp_path: Path, case: str) -> None:
    frame = FRAME.assign(
        gap=["x", None, "y", "z", "z"],
        gap_label=["x", None, "y", "z", "z"],
        minus=[0, -3, 1, 2, 3],
        ragged=[[1.0], [1.0, 2.0], [], [1.0], [1.0]],
        pair=[[1.0, 2.0]] * 5,
    )
    path = tmp_path / "data.parquet"
    frame.to_parquet(path)
    settings, error, match = WRONG[case]
    given = {"path": path, "features": "a", **settings}
    with pytest.raises(error, match=match):
        table(tmp_path, **given).load()


def test_an_empty_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("a,kind\n")
    with pytest.raises(FileNotFoundError, match=r"data\.csv.*no data"):
        table(tmp_path, tmp_path / "data.csv").load()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_size": (3, 3)}, r"`image_size` with a feature column of images only, .*\(3, 3\)"),
        ({"grayscale": True}, "`grayscale` with a feature column of images only, .*grayscale=True"),
        ({"mean": (0.1,)}, r"`mean` with a feature column of images only, .*mean=\(0\.1,\)"),
        ({"name": "small"}, "`name` for a data set on the Hub only, but got name='small'"),
    ],
)
def test_settings_without_effect_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "data.csv"
    FRAME.to_csv(path, index=False)
    with pytest.raises(ValueError, match=message):
        table(tmp_path, path, **settings).load()
