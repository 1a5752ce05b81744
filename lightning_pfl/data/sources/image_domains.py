"""Folders of images by domain and class, such as Office-31: every domain is a client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.data.sources.base import Fields, NormalizeImages, Source, SourceData, load_error
from lightning_pfl.data.sources.resized_crop import RandomResizedCrop

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}


class CenterCrop:
    """Centre crop and normalisation, for evaluation.

    Args:
        size: Side of the square in pixels, at most that of the images.
        normalize: Conversion of bytes to floats.
    """

    def __init__(self, size: int, normalize: NormalizeImages) -> None:
        self.size, self.normalize = size, normalize

    def __call__(self, batch: Fields) -> Fields:
        """Crop and normalise the first field, ``(samples, 3, height, width)``; keep the others."""
        images, *rest = batch
        top, left = ((side - self.size + 1) // 2 for side in images.shape[-2:])
        cut = images[..., top : top + self.size, left : left + self.size]
        return self.normalize((cut, *rest))


class ImageDomains(Source):
    """Images in a folder for every class, inside a folder for every domain.

    The layout is ``data_dir/amazon/back_pack/frame_0001.jpg``, or with a folder ``images`` between
    domain and class, as in the archive of Office-31 (4,110 images of 31 classes: 2,817 of the
    domain ``amazon``, 498 of ``dslr``, 795 of ``webcam``; available from its authors). Classes are
    numbered in the order of their names over all domains; the partition is `Natural` by the column
    ``domain``.

    Images are kept as bytes ``(3, image_size, image_size)``: resized until the shorter side fits,
    and cut at the centre. Training crops a random part and mirrors half of the images; evaluation
    takes the centre.

    Args:
        data_dir: Folder of the domains.
        domains: Names of the domains' folders. None: all folders, in the order of their names.
        image_size: Side of the images in memory, in pixels.
        crop_size: Side of the images that the model sees, at most ``image_size``.
        augment: Whether training crops at random; otherwise it takes the centre as well.
        mean: Mean of each channel, of pixels in [0, 1].
        std: Standard deviation of each channel, positive.

    Raises:
        ValueError: The crop is larger than the images.

    Deviation from the paper: its random crops are taken from the images in the files, these from
    the images in memory. A pass that measures the loss on training samples, as FedMAP's weights
    need, uses the images in memory without a crop.

    References:
        Saenko, Kulis, Fritz, Darrell. Adapting visual category models to new domains. ECCV 2010.
        Zhang, Esteve-Yagüe, Dittmer, Schönlieb, Roberts. FedMAP: Unlocking potential in
        personalized federated learning through bi-level MAP optimization. arXiv:2405.19000,
        section 4.
    """

    def __init__(
        self,
        data_dir: str = "data/office31",
        domains: Sequence[str] | None = None,
        image_size: int = 256,
        crop_size: int = 224,
        augment: bool = True,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        check_types(ImageDomains.__init__, locals())
        if not 1 <= crop_size <= image_size:
            raise ValueError(
                f"Expected `crop_size` to be in 1..{image_size}, the side of the images, but got "
                f"{crop_size=}. Raise image_size or lower crop_size."
            )
        self.data_dir, self.domains = Path(data_dir), domains
        self.image_size, self.crop_size, self.augment = image_size, crop_size, augment
        self.normalize = NormalizeImages(mean, std)

    def prepare(self) -> None:
        """Check that the folders exist.

        Raises:
            FileNotFoundError: A domain is missing or has no images.
        """
        self.files()

    def load(self) -> SourceData:
        """Read all images into memory.

        Raises:
            FileNotFoundError: A domain is missing or has no images.
            ValueError: A file is no image.
        """
        files = self.files()
        names = sorted({path.parent.name for paths in files.values() for path in paths})
        paths = [path for domain in files.values() for path in domain]
        labels = np.array([names.index(path.parent.name) for path in paths], dtype=np.int64)
        pool = torch.empty(len(paths), 3, self.image_size, self.image_size, dtype=torch.uint8)
        for row, path in enumerate(paths):
            pool[row] = self._read(path)
        center = CenterCrop(self.crop_size, self.normalize)
        return SourceData(
            (pool, torch.from_numpy(labels)),
            labels,
            transform=self.normalize if self.augment else center,
            augment=RandomResizedCrop(self.crop_size) if self.augment else None,
            eval_transform=center,
            num_classes=len(names),
            columns={"domain": np.repeat([*files], [len(found) for found in files.values()])},
        )

    def files(self) -> dict[str, list[Path]]:
        """List the images of each domain, sorted by class and name.

        Raises:
            FileNotFoundError: A domain is missing or has no images.
        """
        wanted = self.domains
        if wanted is None and self.data_dir.is_dir():
            wanted = sorted(path.name for path in self.data_dir.iterdir() if path.is_dir())
        found = {}
        for domain in wanted or [""]:
            folder = self.data_dir / domain
            folder = folder / "images" if (folder / "images").is_dir() else folder
            images = (path for path in folder.glob("*/*") if path.suffix.lower() in ENDINGS)
            found[domain] = sorted(images)
            if not domain or not found[domain]:
                raise load_error(
                    "images in folders by domain and class",
                    [str(folder / ("" if domain else "DOMAIN") / "CLASS" / "*.jpg")],
                    "Unpack Office-31 there, or set data_dir and domains.",
                )
        return found

    def _read(self, path: Path) -> torch.Tensor:
        """Read one image as bytes ``(3, image_size, image_size)``."""
        from PIL import Image
        from torchvision.transforms import functional

        try:
            with Image.open(path) as file:
                image: Any = file.convert("RGB")
        except OSError as error:
            raise ValueError(
                f"Expected {path} to be an image, but got {error}. Remove or replace the file."
            ) from error
        image = functional.resize(image, self.image_size)
        image = functional.center_crop(image, self.image_size)
        pixels: torch.Tensor = functional.pil_to_tensor(image)
        return pixels
