"""Random resized crops: the resizing is torchvision's, the draws have its distribution."""

from typing import Any, Literal

import lightning as L
import pytest
import torch
from torch import nn
from torchvision import transforms
from torchvision.transforms import functional

from lightning_pfl import FederatedStrategy, PersonalizedModule
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.data.sources.resized_crop import RandomResizedCrop, weights
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing.fitting import QUIET


@pytest.mark.parametrize("size", [12, 40])
def test_every_image_is_resized_from_its_own_crop_as_torchvision_does(size: int) -> None:
    torch.manual_seed(0)
    images = torch.rand(16, 3, 30, 24)
    crop = RandomResizedCrop(size)
    torch.manual_seed(1)
    boxes = crop.boxes(16, images.shape[-2:], images.device)
    flips = torch.rand(16) < 0.5
    torch.manual_seed(1)
    got, labels = crop((images, torch.arange(16)))
    assert labels.tolist() == [*range(16)]
    assert flips.any()
    assert not flips.all()
    for row, (image, flip) in enumerate(zip(images, flips, strict=True)):
        top, left, height, width = (int(part[row]) for part in boxes)
        want = functional.resized_crop(image, top, left, height, width, [size, size])
        want = functional.hflip(want) if flip else want
        torch.testing.assert_close(got[row], want, atol=1e-5, rtol=0)


def test_weights_of_the_whole_axis_at_its_own_size_are_the_identity() -> None:
    found = weights(torch.zeros(1), torch.full((1,), 5.0), pixels=5, size=5)
    torch.testing.assert_close(found[0], torch.eye(5))


def test_boxes_lie_inside_and_have_torchvisions_distribution() -> None:
    """Means of both samples of 4000 crops differ by less than four standard errors."""
    count, shape = 4000, (48, 36)
    torch.manual_seed(2)
    top, left, height, width = RandomResizedCrop().boxes(count, shape, torch.device("cpu"))
    assert bool((top >= 0).all())
    assert bool((left >= 0).all())
    assert bool((top + height <= shape[0]).all())
    assert bool((left + width <= shape[1]).all())
    assert bool((height >= 1).all())
    assert bool((width >= 1).all())
    image = torch.empty(3, *shape)
    theirs = torch.tensor(
        [
            transforms.RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
            for _ in range(count)
        ]
    ).float()
    for ours, other in zip((top, left, height, width), theirs.T, strict=True):
        error = (ours.var() / count + other.var() / count).sqrt()
        assert abs(ours.mean() - other.mean()) < 4 * error
        assert abs((ours - ours.mean()).abs().mean() - (other - other.mean()).abs().mean()) < (
            4 * error
        )


def test_an_image_in_which_nothing_fits_is_taken_whole() -> None:
    crop = RandomResizedCrop(4, scale=(1.0, 1.0), ratio=(0.9, 1.1))
    boxes = crop.boxes(3, (10, 200), torch.device("cpu"))
    assert [part.tolist() for part in boxes] == [[0] * 3, [0] * 3, [10] * 3, [200] * 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "`size` to be at least 1, but got size=0"),
        ({"scale": (0.0, 1.0)}, r"`scale` to be two .* got scale=\(0.0, 1.0\)"),
        ({"scale": (0.5, 0.2)}, r"`scale` to be two .* got scale=\(0.5, 0.2\)"),
        ({"ratio": (1.5, 2.0)}, r"`ratio` to be two .* got ratio=\(1.5, 2.0\)"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RandomResizedCrop(**settings)


def test_both_engines_crop_alike_in_training() -> None:
    torch.manual_seed(3)
    fields = torch.rand(22, 3, 12, 12), torch.arange(22) % 2
    rows = [*torch.arange(22).split([10, 5, 7])]
    found = []
    engines: list[Literal["vectorized", "sequential"]] = ["vectorized", "sequential"]
    for engine in engines:
        L.seed_everything(4, verbose=False)
        module = PersonalizedModule(nn.Flatten(), nn.Linear(3 * 8 * 8, 2), lr=0.1)
        run = L.Trainer(
            max_epochs=2,
            strategy=FederatedStrategy(FedAvg(), engine=engine),
            **QUIET,
            limit_val_batches=0,
        )
        data = FederatedTensorDataset(fields, rows, batch_size=4, augment=RandomResizedCrop(8))
        validation = FederatedTensorDataset((fields[0][..., :8, :8], fields[1]), rows)
        run.fit(module, train_dataloaders=data, val_dataloaders=validation)
        strategy: Any = run.strategy
        found.append(strategy.global_state_dict())
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
