"""Feature skew: the maps of the clients, exactly, and the same in train and test."""

import numpy as np
import pytest
import torch

from lightning_pfl.data import ClassesPerClient, FeatureSkew, Natural
from lightning_pfl.data.partition.features import rotate

IMAGES = torch.randint(
    0, 256, (40, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
LABELS = np.arange(40) % 4


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_rotate90_turns_blocks_of_clients() -> None:
    """Eight clients: two each at 0, 90, 180 and 270 degrees; the pool itself stays as it was."""
    skew = FeatureSkew("rotate90")
    parts, plan = skew.split(LABELS, 8, rng())
    before = IMAGES.clone()
    turned = skew.change_features(IMAGES, parts, plan)
    assert torch.equal(IMAGES, before)
    for client, part in enumerate(parts):
        rows = torch.from_numpy(part)
        assert torch.equal(turned[rows], IMAGES[rows].rot90(client // 2, dims=(2, 3)))


@pytest.mark.parametrize("quarter", [0, 1, 2, 3, -1])
def test_rotate_by_right_angles_is_rot90(quarter: int) -> None:
    images = IMAGES.double() / 255
    turned = rotate(images.float(), 90.0 * quarter)
    assert torch.allclose(turned, images.float().rot90(quarter, dims=(2, 3)), atol=1e-4)
    assert torch.equal(rotate(IMAGES, 90.0 * quarter), IMAGES.rot90(quarter, dims=(2, 3)))


def test_small_rotations_move_a_point_counter_clockwise() -> None:
    """A bump right of the centre moves up: row index falls by radius * sin(angle)."""
    size = 41
    place = torch.arange(size, dtype=torch.float32) - 20
    image = torch.exp(-(place[:, None] ** 2 + (place - 10) ** 2) / 8)[None, None]
    turned = rotate(image, 30.0)[0, 0]
    weight = turned / turned.sum()
    row, column = (weight.sum(1) * place).sum(), (weight.sum(0) * place).sum()
    assert torch.allclose(row, torch.tensor(-10 * np.sin(np.pi / 6)).float(), atol=0.05)
    assert torch.allclose(column, torch.tensor(10 * np.cos(np.pi / 6)).float(), atol=0.05)


def test_affine_is_one_affine_map_per_client_shared_by_train_and_test() -> None:
    """x A + b of d + 1 = 5 points in general position determines A and b; others must obey."""
    skew = FeatureSkew("affine")
    train_labels, test_labels = np.zeros(60), np.zeros(30)
    x = torch.randn(60, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x_test = torch.randn(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    parts, plan = skew.split(train_labels, 3, rng())
    test_parts = skew.apply(test_labels, plan, rng(1))
    y, y_test = skew.change_features(x, parts, plan), skew.change_features(x_test, test_parts, plan)
    maps = []
    for part, test_part in zip(parts, test_parts, strict=True):
        bordered = torch.cat([x[part], torch.ones(20, 1, dtype=torch.float64)], 1)
        fit = torch.linalg.lstsq(bordered[:5], y[part][:5]).solution
        assert torch.allclose(bordered @ fit, y[part], atol=1e-8)
        assert torch.allclose(x_test[test_part] @ fit[:4] + fit[4], y_test[test_part], atol=1e-8)
        maps.append(fit)
    assert not torch.allclose(maps[0], maps[1])


def test_affine_shifts_grow_with_the_client_as_in_fedmap() -> None:
    """b_k = 5 (k + 1) z: with x = 0 the features are b_k; its mean square is 25 (k + 1)^2."""
    skew = FeatureSkew("affine", offset=5.0)
    parts, plan = skew.split(np.zeros(3), 3, rng())
    shifts = skew.change_features(torch.zeros(3, 4000), parts, plan)
    for client, part in enumerate(parts):
        ratio = shifts[part].square().mean() / (25 * (client + 1) ** 2)
        assert abs(ratio - 1) < 0.1  # chi-square with 4000 degrees of freedom


def test_random_angles_differ_between_clients_and_follow_the_plan() -> None:
    skew = FeatureSkew("rotate", max_angle=90)
    images = IMAGES[:1].expand(40, 3, 6, 6)
    parts, plan = skew.split(LABELS, 10, rng())
    turned = skew.change_features(images, parts, plan)
    firsts = [turned[part[0]] for part in parts]
    assert all(torch.equal(turned[part], turned[part[:1]].expand(4, 3, 6, 6)) for part in parts)
    assert len({tuple(first.flatten().tolist()) for first in firsts}) == 10
    assert torch.equal(turned, skew.change_features(images, parts, plan))


def test_base_partition_decides_who_holds_what() -> None:
    skew = FeatureSkew("rotate90", base=ClassesPerClient(1))
    parts, plan = skew.split(LABELS, 8, rng())
    assert all(len(set(LABELS[part])) == 1 for part in parts)
    assert np.array_equal(np.unique(plan.base), np.arange(4))
    column = np.array(["a", "b"])[np.arange(40) % 2]
    natural = FeatureSkew("rotate90", base=Natural())
    keys = natural.keys(LABELS, {"who": column})
    parts, plan = natural.split(keys, None, rng())
    assert natural.names(plan) == ("a", "b")
    assert natural.change_features(IMAGES, parts, plan)[1].equal(IMAGES[1].rot90(2, dims=(1, 2)))
