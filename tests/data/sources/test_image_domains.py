"""Folders by domain and class: layout, pixels, what training and evaluation see."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from lightning_pfl.data import FederatedDataModule, ImageDomains
from lightning_pfl.data.sources.base import NormalizeImages
from lightning_pfl.data.sources.image_domains import IMAGENET_MEAN, IMAGENET_STD, CenterCrop
from tests.data.sources.image_layout import write_domains


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("office31")
    write_domains(path, classes=2, images=5)
    return path


def test_every_domain_is_a_client_and_classes_are_common(folder: Path) -> None:
    source = ImageDomains(str(folder), image_size=32, crop_size=28)
    source.prepare()
    arrays = source.load()
    assert arrays.fields[0].shape == (30, 3, 32, 32)
    assert arrays.labels.tolist() == ([0] * 5 + [1] * 5) * 3
    assert arrays.columns["domain"].tolist() == ["amazon"] * 10 + ["dslr"] * 10 + ["webcam"] * 10
    assert arrays.num_classes == 2
    data = FederatedDataModule(source, test_fraction=0.3, seed=42)
    assert data.train_dataloader().names == ("amazon", "dslr", "webcam")
    assert data.train_dataloader().num_samples.tolist() == [7] * 3
    assert data.test_dataloader().num_samples.tolist() == [3] * 3


def test_domains_can_be_chosen_without_a_folder_between_and_classes_may_differ(
    tmp_path: Path,
) -> None:
    for name in ("b/cat", "b/dog", "a/dog", "c/emu"):
        (tmp_path / name).mkdir(parents=True)
        Image.fromarray(np.zeros((9, 9), dtype=np.uint8)).save(tmp_path / name / "x.PNG")
        (tmp_path / name / "notes.txt").write_text("no image")
    arrays = ImageDomains(str(tmp_path), ["b", "a"], image_size=8, crop_size=8).load()
    assert arrays.columns["domain"].tolist() == ["b", "b", "a"]
    assert arrays.labels.tolist() == [0, 1, 1]  # cat, dog; the emu is of a domain left out
    assert arrays.fields[0].shape == (3, 3, 8, 8)


def test_evaluation_sees_what_the_papers_transform_gives(folder: Path) -> None:
    """Resize(64), CenterCrop(56), ToTensor, Normalize of the file itself."""
    source = ImageDomains(str(folder), image_size=64, crop_size=56)
    data = FederatedDataModule(source, test_fraction=0.3, val_split="test")
    theirs = transforms.Compose(
        [
            transforms.Resize(64),
            transforms.CenterCrop(56),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )
    paths = [path for paths in source.files().values() for path in paths]
    for split in (data.val_dataloader(), data.test_dataloader()):
        for row in split.indices:
            images, _ = split.gather(row)
            want = torch.stack([theirs(Image.open(paths[place])) for place in row.tolist()])
            torch.testing.assert_close(images, want, atol=1e-5, rtol=0)


def test_training_sees_whole_images_and_crops_them_at_random(folder: Path) -> None:
    data = FederatedDataModule(ImageDomains(str(folder), image_size=32, crop_size=28))
    train = data.train_dataloader()
    batch = train.gather(train.indices[0])
    assert batch[0].shape == (8, 3, 32, 32)
    assert train.augment is not None
    cropped, labels = train.augment(batch)
    assert cropped.shape == (8, 3, 28, 28)
    assert torch.equal(labels, batch[1])
    assert data.test_dataloader().augment is None
    plain = FederatedDataModule(
        ImageDomains(str(folder), image_size=32, crop_size=28, augment=False)
    ).train_dataloader()
    assert plain.augment is None
    assert plain.gather(plain.indices[0])[0].shape == (8, 3, 28, 28)


def test_centre_crop_of_odd_margins_is_torchvisions() -> None:
    images = torch.randint(0, 256, (2, 3, 9, 12), dtype=torch.uint8)
    crop = CenterCrop(6, NormalizeImages([0.0] * 3, [1.0] * 3))
    want = transforms.functional.center_crop(images, [6, 6])
    torch.testing.assert_close(crop((images,))[0], want / 255)


@pytest.mark.parametrize("step", ["prepare", "load"])
@pytest.mark.parametrize("settings", [{}, {"domains": ["amazon"]}])
def test_missing_folders_say_what_to_do(
    tmp_path: Path, step: str, settings: dict[str, Any]
) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "nothing", tmp_path / "empty", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"images in folders by domain and class.*Unp"):
            getattr(ImageDomains(str(place), **settings), step)()


def test_the_layout_that_was_looked_for_is_shown(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing/DOMAIN/CLASS/\*\.jpg"):
        ImageDomains(str(tmp_path / "nothing")).files()
    with pytest.raises(FileNotFoundError, match=r"nothing/dslr/CLASS/\*\.jpg"):
        ImageDomains(str(tmp_path / "nothing"), domains=["dslr"]).files()


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "a" / "x").mkdir(parents=True)
    (tmp_path / "a" / "x" / "broken.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"Expected .*broken.jpg to be an image"):
        ImageDomains(str(tmp_path)).load()


def test_a_crop_larger_than_the_images_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`crop_size` to be in 1..64, .* got crop_size=65"):
        ImageDomains(image_size=64, crop_size=65)
