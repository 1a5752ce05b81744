"""Synthetic sources: the losses and the subspace are those that they promise."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pfl.data import FederatedDataModule, LinearRepresentation, QuadraticClients


def loss(a: Tensor, c: Tensor, w: Tensor) -> Tensor:
    """f_k(w) = mean_j a_j / 2 |w - c_j|^2, straight from the definition."""
    return (a / 2 * (w - c).square().sum(1)).mean()


def client_losses(source: QuadraticClients, w: Tensor) -> list[Tensor]:
    data = FederatedDataModule(source)
    data.setup()
    train = data.train_dataloader()
    batches = [train.gather(row) for row in train.indices]
    return [loss(a, c, w) for a, c in batches]


def test_q2_is_the_problem_of_the_papers() -> None:
    """F_k(x) = H_k (x - a_k)^2 / 2 with H = (1, 3), a = (0, 1); the mean loss has 0.75."""
    for x in (-1.0, 0.0, 0.3, 2.0):
        got = client_losses(QuadraticClients.q2(), torch.tensor([x], dtype=torch.float64))
        assert got[0].item() == pytest.approx(x**2 / 2, rel=1e-14)
        assert got[1].item() == pytest.approx(3 * (x - 1) ** 2 / 2, rel=1e-14)
    w = torch.tensor([0.75], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(sum(client_losses(QuadraticClients.q2(), w)), w)  # type: ignore[arg-type]
    assert gradient.item() == pytest.approx(0, abs=1e-14)


def test_l4_has_four_clients_on_a_line() -> None:
    fields = QuadraticClients.l4().load().fields
    assert fields[0].tolist() == [1.0] * 4
    assert fields[1].flatten().tolist() == [0.0, 0.1, 1.0, 1.1]


def test_spread_leaves_optimum_and_curvature() -> None:
    """Deviations with zero sum add a constant to f_k: its optimum stays the client's centre."""
    source = QuadraticClients(
        (0.5, 2.0), ((1.0, -1.0), (3.0, 0.0)), samples=(5, 8), spread=0.7, dtype="float64"
    )
    fields = source.load().fields
    owner = np.repeat([0, 1], [5, 8])
    for client, center in enumerate(([1.0, -1.0], [3.0, 0.0])):
        rows = fields[1][owner == client]
        assert torch.allclose(rows.mean(0), torch.tensor(center, dtype=torch.float64), atol=1e-14)
        assert rows.std() > 0.1
        for w in ([0.0, 0.0], [2.0, 5.0]):
            shift = client_losses(source, torch.tensor(w, dtype=torch.float64))[client]
            base = client_losses(source, torch.tensor(center, dtype=torch.float64))[client]
            distance = sum((x - y) ** 2 for x, y in zip(w, center, strict=True))
            assert (shift - base).item() == pytest.approx((0.5, 2.0)[client] / 2 * distance)


def test_samples_and_dtype() -> None:
    arrays = QuadraticClients((1.0, 2.0, 3.0), (0.0, 1.0, 2.0), samples=(3, 1, 2)).load()
    assert arrays.columns["client"].tolist() == [0, 0, 0, 1, 2, 2]
    assert arrays.fields[0].tolist() == [1, 1, 1, 2, 3, 3]
    assert {leaf.dtype for leaf in arrays.fields} == {torch.float32}


class TestLinearRepresentation:
    source = LinearRepresentation(
        num_clients=30, dim=12, rank=3, samples=200, noise_variance=1e-2, seed=1, dtype="float64"
    )

    def test_truth_is_orthonormal_with_heads_on_the_sphere(self) -> None:
        basis, heads = self.source.truth()
        assert np.allclose(basis.T @ basis, np.eye(3), atol=1e-12)
        assert np.allclose(np.linalg.norm(heads, axis=1), np.sqrt(3))

    def test_residuals_are_the_noise(self) -> None:
        """y - w_k B x has mean 0 and variance 1e-2; 6000 residuals: 4 standard errors."""
        basis, heads = self.source.truth()
        arrays = self.source.load()
        x, y = (leaf.numpy() for leaf in arrays.fields)
        residual = y - np.einsum("nd,dr,nr->n", x, basis, heads[arrays.columns["client"]])
        assert abs(residual.mean()) < 4 * 0.1 / np.sqrt(6000)
        assert abs(residual.var() / 1e-2 - 1) < 4 * np.sqrt(2 / 6000)
        assert abs(x.var() - 1) < 4 * np.sqrt(2 / x.size)

    def test_without_noise_least_squares_finds_the_client(self) -> None:
        source = LinearRepresentation(5, 6, 2, samples=10, noise_variance=0, dtype="float64")
        basis, heads = source.truth()
        arrays = source.load()
        for client in range(5):
            rows = arrays.columns["client"] == client
            x, y = (leaf.numpy()[rows] for leaf in arrays.fields)
            found = np.linalg.lstsq(x, y, rcond=None)[0]
            assert np.allclose(found, basis @ heads[client], atol=1e-10)

    def test_train_and_test_are_different_draws(self) -> None:
        arrays = self.source.load()
        assert arrays.test_fields is not None
        assert arrays.test_fields[0].shape == (3000, 12)
        assert not torch.equal(arrays.test_fields[0][:100], arrays.fields[0][:100])
