"""L-BFGS, Newton and ADMM against closed forms, finite differences and each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.models import SquaredHingeClassifier
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.solvers.lbfgs import minimise
from lightning_pfl.solvers.pairs import Pairs
from lightning_pfl.solvers.pdmm import solve
from recipes.centralized.losses import ClientLosses, Grouped
from recipes.centralized.newtons_method import newton, proximal_newton
from recipes.centralized.sum_of_norms import SumOfNorms, regularization_path
from tests.solvers.problems import L4, Hinges, Quadratics, conic_optimum, ellipses, l4_solution


class TestMinimise:
    def test_ill_conditioned_quadratics(self) -> None:
        """Gradient H (x - c), conditions from 1 to 10,000; each client with a scale of its own."""
        torch.manual_seed(1)
        basis = torch.linalg.qr(torch.randn(5, 6, 6, dtype=torch.float64)).Q
        values = torch.stack([torch.logspace(0, k, 6, dtype=torch.float64) for k in range(5)])
        matrix = basis @ (values.unsqueeze(2) * basis.mT)
        center = torch.randn(5, 6, dtype=torch.float64)

        def gradient(x: Tensor) -> Tensor:
            found: Tensor = (matrix @ (x - center).unsqueeze(2)).squeeze(2)
            return found

        found = minimise(gradient, torch.zeros_like(center), torch.ones(5), iterations=200)
        torch.testing.assert_close(found, center, rtol=0, atol=1e-7)

    def test_squared_hinge_agrees_with_newton(self) -> None:
        points, labels = ellipses("overlap", 3)
        losses = Hinges(points, labels)
        anchor, weight = torch.randn(9, 3, dtype=torch.float64), torch.rand(9).double() + 0.1
        start = torch.zeros_like(anchor)

        def gradient(x: Tensor) -> Tensor:
            return losses.gradient(x) + weight.unsqueeze(1) * (x - anchor)

        found = minimise(gradient, start, weight)
        expected = proximal_newton(losses, anchor, weight, start)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
        torch.testing.assert_close(gradient(expected), start, rtol=0, atol=1e-9)

    def test_a_client_does_not_depend_on_the_others(self) -> None:
        points, labels = ellipses("overlap", 2)

        def alone(rows: list[int]) -> Tensor:
            losses = Hinges(points[rows], labels[rows])
            start = torch.zeros(len(rows), 3, dtype=torch.float64)
            return minimise(
                lambda x: losses.gradient(x) + 0.1 * x, start, torch.full((len(rows),), 0.1)
            )

        together = alone([0, 1, 2, 3, 4, 5])
        torch.testing.assert_close(alone([4]), together[4:5], rtol=0, atol=1e-12)


class TestClientLosses:
    def clients(self) -> tuple[FederatedTensorDataset, Tensor, Tensor]:
        points, labels = ellipses("overlap", 1)
        fields = points.flatten(0, 1), (labels.flatten() > 0).long()
        return FederatedTensorDataset(fields, torch.arange(30).split(10)), points, labels

    def test_are_the_formulas(self) -> None:
        data, points, labels = self.clients()
        found, expected = ClientLosses(SquaredHingeClassifier(2), data), Hinges(points, labels)
        x = torch.randn(3, 3, dtype=torch.float64)
        for name in ("value", "gradient", "hessian"):
            torch.testing.assert_close(
                getattr(found, name)(x), getattr(expected, name)(x), rtol=1e-12, atol=1e-12
            )

    def test_ragged_clients_count_their_own_samples(self) -> None:
        _, points, labels = self.clients()
        fields = points.flatten(0, 1), (labels.flatten() > 0).long()
        ragged = FederatedTensorDataset(fields, torch.arange(30).split((4, 10, 16)))
        losses = ClientLosses(SquaredHingeClassifier(2), ragged)
        x = torch.randn(3, 3, dtype=torch.float64)
        start = 0
        for k, size in enumerate((4, 10, 16)):
            rows = slice(start, start + size)
            alone = Hinges(fields[0][rows].unsqueeze(0), labels.flatten()[rows].unsqueeze(0))
            torch.testing.assert_close(losses.value(x)[k], alone.value(x[k : k + 1])[0])
            start += size

    def test_a_linear_loss_has_no_curvature(self) -> None:
        module = PersonalizedModule(
            nn.Flatten(), nn.Linear(2, 1, bias=False), loss=lambda out, y: out.squeeze(1)
        ).double()
        losses = ClientLosses(module, self.clients()[0])
        assert torch.equal(
            losses.hessian(torch.zeros(3, 2).double()), torch.zeros(3, 2, 2).double()
        )

    def test_modules_without_per_sample_are_refused(self) -> None:
        with pytest.raises(TypeError, match="Expected `module` to have `per_sample`, but got Lin"):
            ClientLosses(nn.Linear(2, 1), self.clients()[0])

    def test_clients_without_samples_are_refused(self) -> None:
        fields = torch.zeros(3, 2), torch.zeros(3)
        data = FederatedTensorDataset(fields, torch.arange(3).split((3, 0)))
        with pytest.raises(ValueError, match=r"Expected every client to have samples.*\[3, 0\]"):
            ClientLosses(SquaredHingeClassifier(2), data)


class TestSumOfNorms:
    @pytest.mark.parametrize("weight", [0.0, 0.02, 0.05, 0.1, 0.25, 0.4])
    def test_four_points_on_a_line(self, weight: float) -> None:
        solver = SumOfNorms(Quadratics(L4), Pairs.complete(4))
        found = solver.solve(weight, L4, tolerance=1e-11)
        torch.testing.assert_close(found.models, l4_solution(weight), rtol=0, atol=1e-9)
        assert found.residual <= 1e-11

    def test_a_path_of_weights_has_four_two_and_one_cluster(self) -> None:
        solver = SumOfNorms(Quadratics(L4), Pairs.complete(4))
        path = regularization_path(solver, [0.02, 0.1, 0.2, 0.3], L4)
        assert [p.clusters.tolist() for p in path] == [
            [0, 1, 2, 3],
            [0, 0, 1, 1],
            [0, 0, 1, 1],
            [0, 0, 0, 0],
        ]

    def test_agrees_with_a_conic_solver(self) -> None:
        points, labels = ellipses("separable", 2)
        solver = SumOfNorms(Hinges(points, labels), Pairs.complete(6))
        found = solver.solve(0.1, torch.zeros(6, 3, dtype=torch.float64))
        best = conic_optimum(points, labels, 0.1)
        assert solver.value(found.models, 0.1) == pytest.approx(best, rel=1e-7)

    def test_agrees_with_pdmm_on_weighted_pairs(self) -> None:
        adjacency = torch.tensor([[0.0, 1, 0, 3], [1, 0, 2, 0], [0, 2, 0, 1], [3, 0, 1, 0]])
        losses, pairs = Quadratics(L4), Pairs.weighted(adjacency)
        found = SumOfNorms(losses, pairs).solve(0.07, L4, tolerance=1e-11)
        state = solve(losses.prox, pairs, 0.07, torch.zeros_like(L4), 0.5, iterations=800)
        torch.testing.assert_close(found.models, state.models, rtol=0, atol=1e-8)


def test_newton_solves_each_row() -> None:
    """x^2 + exp(x) - r x, whose minimiser has 2 x + exp(x) = r."""
    r = torch.tensor([[1.0], [5.0], [-20.0], [1000.0]], dtype=torch.float64)
    found = newton(
        lambda x: (x.square() + x.exp() - r * x).squeeze(1),
        lambda x: 2 * x + x.exp() - r,
        lambda x: (2 + x.exp()).unsqueeze(2),
        torch.zeros_like(r),
    )
    torch.testing.assert_close(2 * found + found.exp(), r, rtol=1e-12, atol=1e-10)


def test_grouped_losses_are_sums() -> None:
    losses = Quadratics(L4)
    grouped = Grouped(losses, torch.tensor([0, 1, 1, 0]))
    w = torch.tensor([[0.3], [2.0]], dtype=torch.float64)
    total = [((0.3 - 0.0) ** 2 + (0.3 - 1.1) ** 2) / 2, ((2 - 0.1) ** 2 + 1.0) / 2]
    torch.testing.assert_close(grouped.value(w), torch.tensor(total, dtype=torch.float64))
    gradient = torch.tensor([[0.3 - 0.8], [1.9 + 1.0]], dtype=torch.float64)
    torch.testing.assert_close(grouped.gradient(w), gradient)
    assert grouped.hessian(w).flatten().tolist() == [2.0, 2.0]
