"""Image sources, read from small files of the true layout that the tests write."""

import gzip
import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor

from lightning_pfl.data import (
    CIFAR10,
    CIFAR100,
    Digits,
    FashionMNIST,
)
from lightning_pfl.data.sources import fashion_mnist as fashion_module
from lightning_pfl.data.sources.base import NormalizeImages
from lightning_pfl.data.sources.cifar import CropAndFlip


def write_idx(path: Path, array: np.ndarray[Any, np.dtype[np.uint8]], packed: bool) -> None:
    """The IDX format: magic number, big-endian sizes, bytes."""
    sizes = b"".join(int(size).to_bytes(4, "big") for size in array.shape)
    content = bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    if packed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)


def write_fashion(folder: Path, packed: bool) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    written = {}
    for split, count in (("train", 30), ("t10k", 12)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        write_idx(folder / f"{split}-images-idx3-ubyte", images, packed)
        write_idx(folder / f"{split}-labels-idx1-ubyte", labels, packed)
        written[split] = (images, labels)
    return written


def test_digits_are_sixteenths() -> None:
    arrays = Digits().load()
    images, labels = arrays.fields
    assert images.shape == (1797, 1, 8, 8)
    assert torch.equal(images * 16, (images * 16).round())
    assert (images.min().item(), images.max().item()) == (0, 1)
    assert np.array_equal(labels.numpy(), arrays.labels)
    assert (arrays.test_fields, arrays.num_classes) == (None, 10)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("below", ["", "FashionMNIST/raw"])
def test_fashion_mnist_from_files(tmp_path: Path, packed: bool, below: str) -> None:
    written = write_fashion(tmp_path / below, packed)
    source = FashionMNIST(str(tmp_path))
    source.prepare()
    arrays = source.load()
    assert arrays.test_fields is not None
    for fields, split in ((arrays.fields, "train"), (arrays.test_fields, "t10k")):
        images, labels = written[split]
        assert fields[0].dtype == torch.uint8
        assert np.array_equal(fields[0][:, 0].numpy(), images)
        assert np.array_equal(fields[1].numpy(), labels)
    assert arrays.transform is not None
    normalised = arrays.transform(arrays.fields)[0]
    want = (written["train"][0] / 255.0 - 0.2860) / 0.3530
    torch.testing.assert_close(normalised[:, 0], torch.from_numpy(want).float())


def test_fashion_mnist_is_found_in_the_system_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_fashion(tmp_path / "system", packed=True)
    monkeypatch.setattr(fashion_module, "SYSTEM_DIR", tmp_path / "system")
    arrays = FashionMNIST(str(tmp_path / "mine")).load()
    assert np.array_equal(arrays.fields[0][:, 0].numpy(), written["train"][0])
    write_fashion(tmp_path / "mine", packed=True)
    (tmp_path / "mine" / "train-labels-idx1-ubyte.gz").unlink()  # incomplete: not used
    assert len(FashionMNIST(str(tmp_path / "mine")).load().labels) == 30


def test_missing_fashion_mnist_names_all_three_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setattr(fashion_module, "SYSTEM_DIR", tmp_path / "system")
    monkeypatch.setattr(torchvision.datasets, "FashionMNIST", no_network)
    source = FashionMNIST(str(tmp_path / "mine"))
    with pytest.raises(FileNotFoundError) as caught:
        source.prepare()
    for part in (str(tmp_path / "mine"), "system", "no route to host", "dataset-fashion-mnist"):
        assert part in str(caught.value)
    with pytest.raises(FileNotFoundError, match="not tried by load"):
        source.load()


def break_file(path: Path, how: str) -> None:
    content = path.read_bytes()
    broken = {
        "truncated": content[:-5],
        "too long": content + b"x",
        "other type": b"\x00\x00\x0d" + content[3:],
        "text": b"<html>not found</html>",
        "empty": b"",
        "half a header": content[:6],
    }
    path.write_bytes(broken[how])


@pytest.mark.parametrize(
    "how", ["truncated", "too long", "other type", "text", "empty", "half a header"]
)
def test_broken_idx_files_are_refused_by_name(tmp_path: Path, how: str) -> None:
    write_fashion(tmp_path, packed=False)
    break_file(tmp_path / "train-images-idx3-ubyte", how)
    match = r"train-images-idx3-ubyte to be an IDX file.*Delete it and download it again"
    with pytest.raises(ValueError, match=match):
        FashionMNIST(str(tmp_path)).load()


def test_broken_gzip_and_mixed_up_files_are_refused(tmp_path: Path) -> None:
    write_fashion(tmp_path, packed=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="IDX file"):
        FashionMNIST(str(tmp_path)).load()
    path.write_bytes(b"plain text")
    with pytest.raises(ValueError, match="IDX file"):
        FashionMNIST(str(tmp_path)).load()
    path.write_bytes((tmp_path / "t10k-images-idx3-ubyte.gz").read_bytes())
    with pytest.raises(ValueError, match=r"shapes \(12, 28, 28\) and \(30,\)"):
        FashionMNIST(str(tmp_path)).load()


def write_pickle(path: Path, content: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


def write_cifar(
    root: Path, reader: Any, label: str, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Tensor]:
    """Write the batches that torchvision lists and give it their checksums."""
    rng = np.random.default_rng(0)
    folder = root / reader.base_folder
    written: dict[str, Tensor] = {}
    for split in ("train_list", "test_list"):
        entries, images = [], []
        for name, _ in getattr(reader, split):
            pixels = rng.integers(0, 256, (4, 3 * 32 * 32), dtype=np.uint8)
            entries.append(
                [name, write_pickle(folder / name, {"data": pixels, label: [0, 1, 2, 3]})]
            )
            images.append(pixels.reshape(4, 3, 32, 32))
        monkeypatch.setattr(reader, split, entries)
        written[split] = torch.from_numpy(np.concatenate(images))
    meta = dict(reader.meta)
    meta["md5"] = write_pickle(folder / meta["filename"], {meta["key"]: ["a", "b", "c", "d"]})
    monkeypatch.setattr(reader, "meta", meta)
    return written


@pytest.mark.parametrize(
    ("source", "name", "label"),
    [(CIFAR10, "CIFAR10", "labels"), (CIFAR100, "CIFAR100", "fine_labels")],
)
def test_cifar_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any, name: str, label: str
) -> None:
    for reader in (torchvision.datasets.CIFAR100, torchvision.datasets.CIFAR10):
        if reader.__name__ == name:
            written = write_cifar(tmp_path, reader, label, monkeypatch)
    arrays = source(str(tmp_path)).load()
    assert torch.equal(arrays.fields[0], written["train_list"])
    assert torch.equal(arrays.test_fields[0], written["test_list"])
    assert arrays.test_labels.tolist() == [0, 1, 2, 3]
    mean, std = torch.tensor(source.mean), torch.tensor(source.std)
    want = (written["test_list"] / 255 - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(arrays.transform(arrays.test_fields)[0], want)
    assert arrays.augment is not None
    assert source(str(tmp_path), augment=False).load().augment is None


def test_missing_cifar_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"files of CIFAR10 .*unpack the archive"):
        CIFAR10(str(tmp_path)).load()


class TestCropAndFlip:
    """Against padding with black, slicing and flipping, image by image."""

    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    augment = CropAndFlip(mean, std)
    pixels = torch.randint(
        0, 256, (50, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    images = NormalizeImages(mean, std)((pixels,))[0]

    def by_hand(self, image: int, down: int, right: int, flip: bool) -> Tensor:
        black = torch.nn.functional.pad(self.pixels[image], (4, 4, 4, 4))
        crop = black[:, 4 + down : 36 + down, 4 + right : 36 + right]
        crop = crop.flip(-1) if flip else crop
        return NormalizeImages(self.mean, self.std)((crop[None],))[0][0]

    def test_crop_equals_pad_slice_flip_and_normalise(self) -> None:
        draw = np.random.default_rng(0)
        down, right = (torch.from_numpy(draw.integers(-4, 5, 50)) for _ in range(2))
        flip = torch.from_numpy(draw.integers(0, 2, 50) == 1)
        got = self.augment.crop(self.images, down, right, flip)
        for k in range(50):
            want = self.by_hand(k, int(down[k]), int(right[k]), bool(flip[k]))
            assert torch.equal(got[k], want)

    def test_offsets_and_flips_are_uniform(self) -> None:
        """9 equally likely offsets, from -4 to 4, also at the ends of [0, 1)."""
        uniform = (torch.arange(9000) + 0.5) / 9000
        offsets = self.augment._shift(uniform)
        assert torch.bincount(offsets + 4).tolist() == [1000] * 9
        assert self.augment._shift(torch.tensor([0.0, 1 - 2**-24])).tolist() == [-4, 4]

    def test_labels_pass_and_the_generator_decides(self) -> None:
        torch.manual_seed(0)
        first, labels = self.augment((self.images, torch.arange(50)))
        second = self.augment((self.images, labels))[0]
        torch.manual_seed(0)
        again = self.augment((self.images, labels))[0]
        assert torch.equal(labels, torch.arange(50))
        assert torch.equal(first, again)
        assert not torch.equal(first, second)

    def test_it_runs_under_vmap(self) -> None:
        """The engine may augment a stack of clients at once."""
        torch.manual_seed(0)
        stacked = self.images.reshape(5, 10, 3, 32, 32)
        got = torch.vmap(lambda x: self.augment((x,))[0], randomness="different")(stacked)
        assert got.shape == stacked.shape
        assert got[0].ne(stacked[0]).any()
