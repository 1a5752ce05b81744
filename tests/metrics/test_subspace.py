"""The principal-angle distance: invariances, extremes, SciPy as reference."""

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles
from torch import Tensor

from lightning_pfl.metrics import orthonormal_basis, principal_angle_distance


def random_matrix(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_matches_scipy() -> None:
    first, second = random_matrix(8, 3), random_matrix(8, 3, seed=1)
    expected = np.sin(subspace_angles(first.numpy(), second.numpy()).max())
    assert float(principal_angle_distance(first, second)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("angle", [1e-6, 0.3, 1.2])
def test_is_the_sine_of_the_angle_between_lines(angle: float) -> None:
    first = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    second = torch.tensor([[np.cos(angle)], [np.sin(angle)]], dtype=torch.float64)
    got = float(principal_angle_distance(first, second))
    assert got == pytest.approx(np.sin(angle), rel=1e-9)


def test_depends_on_the_subspaces_alone() -> None:
    first, second = random_matrix(8, 3), random_matrix(8, 3, seed=1)
    change, other_change = random_matrix(3, 3, seed=2), random_matrix(3, 3, seed=3)
    expected = principal_angle_distance(first, second)
    got = principal_angle_distance(first @ change, second @ other_change)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=0)


def test_does_not_change_under_a_rotation_of_both() -> None:
    first, second = random_matrix(8, 3), random_matrix(8, 3, seed=1)
    rotation = torch.linalg.qr(random_matrix(8, 8, seed=2)).Q
    got = principal_angle_distance(rotation @ first, rotation @ second)
    expected = principal_angle_distance(first, second)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=0)


def test_is_symmetric() -> None:
    first, second = random_matrix(8, 3), random_matrix(8, 3, seed=1)
    got = principal_angle_distance(second, first)
    torch.testing.assert_close(got, principal_angle_distance(first, second))


def test_extremes() -> None:
    matrix, axes = random_matrix(8, 3), torch.eye(8, dtype=torch.float64)
    assert float(principal_angle_distance(matrix, matrix)) < 1e-14
    assert float(principal_angle_distance(axes[:, :3], axes[:, 3:6])) == 1
    # One orthogonal direction suffices.
    assert float(principal_angle_distance(axes[:, :3], axes[:, 2:5])) == 1


def test_batch_of_pairs() -> None:
    first, second = random_matrix(4, 8, 3), random_matrix(4, 8, 3, seed=1)
    expected = [principal_angle_distance(a, b) for a, b in zip(first, second, strict=True)]
    torch.testing.assert_close(principal_angle_distance(first, second), torch.stack(expected))


def test_basis_is_orthonormal_and_spans_the_columns() -> None:
    matrix = random_matrix(8, 3)
    basis = orthonormal_basis(matrix)
    torch.testing.assert_close(basis.T @ basis, torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(basis @ basis.T @ matrix, matrix)


class TestGuards:
    @pytest.mark.parametrize("shapes", [((8, 3), (8, 2)), ((3, 8), (3, 8)), ((8,), (8,))])
    def test_shapes(self, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        first, second = (random_matrix(*shape) for shape in shapes)
        with pytest.raises(ValueError, match=r"matrices of one shape \(d, k\) with k <= d, but"):
            principal_angle_distance(first, second)

    def test_dependent_columns(self) -> None:
        matrix = random_matrix(8, 3)
        matrix[:, 2] = matrix[:, 0] + matrix[:, 1]
        with pytest.raises(ValueError, match=r"have 3 independent columns, but got rank 2"):
            principal_angle_distance(random_matrix(8, 3), matrix)
