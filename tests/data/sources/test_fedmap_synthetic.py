"""FedMAP's synthetic data: with the maps undone, the coordinates have the promised distributions.

Tolerances are four standard errors of the estimate, for the number of samples drawn.
"""

from typing import Any

import numpy as np
import pytest
from scipy import stats

from lightning_pfl.data import FederatedDataModule, FedMAPSynthetic
from lightning_pfl.data.sources.fedmap_synthetic import Scenario

COUNT = 20_000


def undone(source: FedMAPSynthetic, number: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A client's coordinates before rotation and map, with labels: z = (x - b) A^-1 Q'."""
    (x, y), (test_x, test_y) = source.client(number)
    x, y = np.concatenate([x, test_x]), np.concatenate([y, test_y])
    if source.scenario != "iid":
        matrix, shift = source.map_of(number)
        x = np.linalg.solve(matrix.T, (x - shift).T).T
    return x @ source.rotation().T, y


def raw(scenario: Scenario = "feature", **settings: Any) -> FedMAPSynthetic:
    return FedMAPSynthetic(scenario, standardize=False, samples=COUNT, **settings)


def assert_variance(values: np.ndarray, variance: float) -> None:
    """Normal values: the variance has the standard error variance * sqrt(2 / n)."""
    assert abs(values.var() / variance - 1) < 4 * np.sqrt(2 / values.size)


@pytest.mark.parametrize("scenario", ["iid", "feature"])
def test_class_0_is_a_ball_and_the_rest_is_nuisance(scenario: Scenario) -> None:
    source = raw(scenario, center_variance=3.0, nuisance_variance=9.0, seed=1)
    z, y = undone(source, number=2)
    assert_variance(z[y == 0, :4], 3.0)
    assert_variance(z[:, 4:], 9.0)
    assert np.abs(z.mean(0)).max() < 4 * np.sqrt(64 / COUNT)  # no coordinate spreads beyond 8


def test_class_1_has_a_normal_radius_and_a_uniform_direction() -> None:
    z, y = undone(raw(radius=6.0, radius_variance=0.5, seed=2))
    inside = z[y == 1, :4]
    radius = np.linalg.norm(inside, axis=1)
    assert abs(radius.mean() - 6) < 4 * np.sqrt(0.5 / len(radius))
    assert_variance(radius, 0.5)
    direction = inside / radius[:, None]
    # Uniform on the sphere of R^4: E u = 0, E u u' = I / 4, Var u_i^2 = 2 (4 - 1) / (16 (4 + 2)).
    assert np.abs(direction.mean(0)).max() < 4 * np.sqrt(1 / 4 / len(radius))
    second = direction.T @ direction / len(radius)
    assert np.abs(np.diag(second) - 1 / 4).max() < 4 * np.sqrt(1 / 16 / len(radius))
    assert np.abs(second - np.diag(np.diag(second))).max() < 4 * np.sqrt(1 / 24 / len(radius))


def test_a_threshold_on_the_radius_is_as_right_as_the_distributions_say() -> None:
    """Class 0: |z|^2 / 2 is chi-squared with 4 degrees of freedom; class 1: |z| ~ N(8, 2)."""
    z, y = undone(raw(seed=3))
    outside = np.linalg.norm(z[:, :4], axis=1) > 5
    right = {0: stats.chi2.cdf(25 / 2, 4), 1: stats.norm.sf(5, 8, np.sqrt(2))}
    for label, want in right.items():
        hits = outside[y == label] == label
        assert abs(hits.mean() - want) < 4 * np.sqrt(want * (1 - want) / len(hits))


def test_rotation_is_orthogonal_and_common_and_maps_are_not() -> None:
    source = FedMAPSynthetic(num_clients=40, offset=5.0, seed=4)
    assert np.allclose(source.rotation() @ source.rotation().T, np.eye(30), atol=1e-12)
    maps = [source.map_of(number) for number in range(40)]
    assert_variance(np.stack([matrix for matrix, _ in maps]), 1.0)
    # The shift of client k has the standard deviation 5 (k + 1).
    assert_variance(np.stack([shift / (5 * (k + 1)) for k, (_, shift) in enumerate(maps)]), 1.0)
    correlation = np.corrcoef([matrix.ravel() for matrix, _ in maps])
    assert np.abs(correlation - np.eye(40)).max() < 6 / np.sqrt(900)  # 780 pairs: six, not four


@pytest.mark.parametrize(
    ("scenario", "sizes", "zeros"),
    [
        ("iid", [200] * 4, [100] * 4),
        ("feature", [200] * 4, [100] * 4),
        ("quantity", [200, 200, 50, 50], [100, 100, 25, 25]),
        ("label", [200] * 4, [100, 100, 170, 170]),
    ],
)
def test_scenarios_have_their_sizes_and_class_shares(
    scenario: Scenario, sizes: list[int], zeros: list[int]
) -> None:
    small: dict[str, Any] = {"small_samples": 50} if scenario == "quantity" else {}
    source = FedMAPSynthetic(scenario, num_clients=4, samples=200, **small)
    arrays = source.load()
    assert arrays.test_labels is not None
    for client, (size, zero) in enumerate(zip(sizes, zeros, strict=True)):
        train = arrays.labels[arrays.columns["client"] == client]
        test = arrays.test_labels[arrays.test_columns["client"] == client]
        assert (len(train), len(test)) == (0.7 * size, 0.3 * size)
        assert (train == 0).sum() + (test == 0).sum() == zero


def test_features_are_scaled_by_the_training_samples_alone() -> None:
    settings: dict[str, Any] = {"num_clients": 3, "samples": 300, "seed": 5}
    source, plain = FedMAPSynthetic(**settings), FedMAPSynthetic(standardize=False, **settings)
    for number in range(3):
        (train, y), (test, test_y) = source.client(number)
        (raw_train, raw_y), (raw_test, raw_test_y) = plain.client(number)
        assert np.array_equal(y, raw_y)
        assert np.array_equal(test_y, raw_test_y)
        assert np.allclose(train.mean(0), 0, atol=1e-12)
        assert np.allclose(train.std(0), 1, rtol=1e-12)
        want = (raw_test - raw_train.mean(0)) / raw_train.std(0)
        assert np.allclose(test, want, rtol=1e-12, atol=1e-12)


def test_a_client_depends_on_the_seed_and_its_number_alone() -> None:
    few, many = FedMAPSynthetic(num_clients=2, seed=6), FedMAPSynthetic(num_clients=5, seed=6)
    for number in range(2):
        for one, other in zip(few.client(number), many.client(number), strict=True):
            assert np.array_equal(one[0], other[0])
    assert not np.allclose(few.client(0)[0][0], few.client(1)[0][0])
    assert not np.allclose(few.client(0)[0][0], FedMAPSynthetic(seed=7).client(0)[0][0])


def test_the_data_module_keeps_the_split_and_names_the_clients() -> None:
    source = FedMAPSynthetic("quantity", samples=200, small_samples=100)
    data = FederatedDataModule(source, val_fraction=0.1, batch_size=64)
    train, val, test = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    assert train.names == tuple(str(client) for client in range(10))
    assert test.num_samples.tolist() == [60] * 5 + [30] * 5
    assert val.num_samples.tolist() == [14] * 5 + [7] * 5
    assert train.num_samples.tolist() == [126] * 5 + [63] * 5
    x, y = test.gather(test.indices[7])
    (want_x, want_y) = source.client(7)[1]
    assert np.allclose(x.numpy(), want_x, atol=1e-5)
    assert np.array_equal(y.numpy(), want_y)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scenario": "labels"}, r"`scenario` to be 'iid', .* got scenario='labels'"),
        ({"num_clients": 0}, r"`num_clients` to be at least 1, but got num_clients=0"),
        ({"samples": 1}, r"`samples` to be at least 2, but got samples=1"),
        (
            {"scenario": "quantity", "small_samples": 0},
            r"`small_samples` to be at least 2, but got small_samples=0",
        ),
        ({"intrinsic_dim": 0}, r"`intrinsic_dim` to be at least 1, but got intrinsic_dim=0"),
        ({"intrinsic_dim": 31}, r"`intrinsic_dim` to be at most 30 .* got intrinsic_dim=31"),
        (
            {"scenario": "label", "skewed_clients": 11},
            r"`skewed_clients` to be at most 10 .* got skewed_clients=11",
        ),
        (
            {"scenario": "label", "skewed_clients": -1},
            r"`skewed_clients` to be at most 10 .* got skewed_clients=-1",
        ),
        ({"nuisance_variance": -1.0}, r"`nuisance_variance` to be a finite .*variance=-1.0"),
        ({"center_variance": float("nan")}, r"`center_variance` to be a finite .*variance=nan"),
        ({"radius_variance": float("inf")}, r"`radius_variance` to be a finite .*variance=inf"),
        ({"offset": -5.0}, r"`offset` to be a finite number .* got offset=-5.0"),
        (
            {"scenario": "label", "majority_share": 1.0},
            r"`majority_share` to be in \(0, 1\), but got majority_share=1",
        ),
        ({"train_fraction": 0.0}, r"`train_fraction` to be in \(0, 1\), but got train_fraction=0"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedMAPSynthetic(**settings)
