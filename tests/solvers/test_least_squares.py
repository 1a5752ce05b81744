"""Batched least squares and moments, one client after another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_pfl.solvers.least_squares import (
    leading_eigenvectors,
    least_squares,
    mean_product,
    moments,
    residuals,
    symmetric,
    upper_triangle,
)

SIZES = (7, 3, 1, 0)
REAL = torch.arange(7) < torch.tensor(SIZES).unsqueeze(1)


def problem(k: int = 3) -> tuple[Tensor, Tensor]:
    """Four clients with 7, 3, 1 and 0 samples; what fills up is not zero."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(4, 7, k, generator=generator, dtype=torch.float64)
    return a, torch.randn(4, 7, generator=generator, dtype=torch.float64)


def test_each_client_gets_torchs_own_solution() -> None:
    a, y = problem()
    found = least_squares(a, y, REAL)
    for row, size in enumerate(SIZES[:2]):
        expected = torch.linalg.lstsq(a[row, :size], y[row, :size, None]).solution[:, 0]
        torch.testing.assert_close(found[row], expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(found[3], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_sixteen_bits_are_solved_in_more(ridge: float) -> None:
    """The solution of the rounded numbers, rounded: to half of the last of eight bits."""
    a, y = (each.bfloat16() for each in problem())
    found = least_squares(a, y, REAL, ridge)
    expected = least_squares(a.double(), y.double(), REAL, ridge)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)


def test_fewer_samples_than_columns_give_the_solution_of_least_norm() -> None:
    """One sample: a y / |a|^2."""
    a, y = problem()
    expected = a[2, 0] * y[2, 0] / a[2, 0].square().sum()
    torch.testing.assert_close(least_squares(a, y, REAL)[2], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ridge", [0.0, 0.1])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_samples_that_are_not_finite_are_their_clients_own_business(
    ridge: float, bad: float
) -> None:
    a, y = problem()
    expected = least_squares(a, y, REAL, ridge)
    a[0, 2, 1], y[1, 0], a[3, 0, 0] = bad, bad, bad
    found = least_squares(a, y, REAL, ridge)
    assert found[:2].isnan().all()
    # What only fills up may be anything.
    torch.testing.assert_close(found[2:], expected[2:], rtol=1e-12, atol=1e-12)


def test_a_ridge_is_that_of_the_normal_equations() -> None:
    a, y = problem()
    found = least_squares(a, y, REAL, ridge=0.3)
    for row, size in enumerate(SIZES[:3]):
        some, target = a[row, :size], y[row, :size]
        hessian = some.T @ some / size + 0.3 * torch.eye(3, dtype=torch.float64)
        expected = torch.linalg.solve(hessian, some.T @ target / size)
        torch.testing.assert_close(found[row], expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(found[3], torch.zeros(3, dtype=torch.float64))
    everyone = least_squares(a, y, ridge=0.3)
    assert torch.equal(everyone[0], found[0])


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_the_solution_has_no_gradient(ridge: float) -> None:
    a, y = problem()
    w = least_squares(a, y, REAL, ridge)
    gradient = mean_product(a, residuals(a, y, w, REAL), REAL) + ridge * w
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


def test_gradient_is_that_of_autograd() -> None:
    a, y = problem()
    w = torch.full((4, 3), 0.5, dtype=torch.float64, requires_grad=True)
    loss = sum(
        (a[row, :size] @ w[row] - y[row, :size]).square().mean() / 2
        for row, size in enumerate(SIZES[:3])
    )
    assert isinstance(loss, Tensor)
    (expected,) = torch.autograd.grad(loss, w)
    found = mean_product(a, residuals(a, y, w.detach(), REAL), REAL)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_moments_are_the_sum_of_their_definition() -> None:
    x, y = problem()
    found = moments(x, y, REAL)
    for row, size in enumerate(SIZES[:3]):
        terms = [y[row, j] ** 2 * x[row, j].outer(x[row, j]) for j in range(size)]
        expected = torch.stack(terms).sum(0) / size
        torch.testing.assert_close(found[row], expected, rtol=1e-12, atol=1e-14)
    assert not found[3].any()


def test_a_triangle_says_a_symmetric_matrix() -> None:
    x, y = problem()
    matrices = moments(x, y, REAL)
    triangles = upper_triangle(matrices)
    assert triangles.shape == (4, 6)
    torch.testing.assert_close(symmetric(triangles[0], 3), matrices[0], rtol=1e-14, atol=0)


def test_leading_eigenvectors_come_by_descending_eigenvalue() -> None:
    basis = torch.linalg.qr(problem(5)[0][0, :5]).Q
    matrix = basis @ torch.diag(torch.tensor([3.0, -4.0, 5.0, 1.0, 0.5]).double()) @ basis.T
    found = leading_eigenvectors(matrix, 2)
    for vector, column in zip(found.T, (2, 0), strict=True):
        torch.testing.assert_close(
            vector.outer(vector), basis[:, column].outer(basis[:, column]), rtol=1e-10, atol=1e-12
        )
        assert vector[vector.abs().argmax()] > 0
