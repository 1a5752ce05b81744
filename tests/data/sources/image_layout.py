"""Tiny folders of images in Office-31's true layout."""

from pathlib import Path

import numpy as np
from PIL import Image

#: Domain: the size of its images, as different as the true ones.
DOMAINS = {"amazon": (300, 300), "dslr": (100, 80), "webcam": (70, 90)}


def write_domains(folder: Path, classes: int = 2, images: int = 5) -> None:
    """``amazon/images/class_0/frame_0001.jpg`` and so on; the brightness tells the class."""
    for domain, (width, height) in DOMAINS.items():
        for number in range(classes):
            path = folder / domain / "images" / f"class_{number}"
            path.mkdir(parents=True)
            for frame in range(1, images + 1):
                noise = np.random.default_rng((number, frame)).integers(0, 40, (height, width, 3))
                pixels = (noise + 200 * number // classes).astype(np.uint8)
                Image.fromarray(pixels).save(path / f"frame_{frame:04d}.jpg", quality=95)
