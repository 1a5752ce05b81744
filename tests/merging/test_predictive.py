"""Beta-predictive Bayes: between the mean and the product of the clients' probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_pfl.merging import BetaPredictive, BetaPredictiveRegression
from lightning_pfl.merging.predictive import combined, combined_normals

P = torch.tensor([[[0.7, 0.2, 0.1]], [[0.1, 0.6, 0.3]]]).double()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def network(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double()


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        (0.0, (0.4, 0.4, 0.2)),
        (0.25, (0.38090197, 0.43584696, 0.18325107)),
        (0.5, (0.36072207, 0.47229606, 0.16698187)),
        (1.0, (0.31818182, 0.54545455, 0.13636364)),
    ],
)
def test_two_clients_have_the_known_probabilities(beta: float, expected: Any) -> None:
    """Beta weights the product; 0 and 1 are the mean and the normalised product."""
    np.testing.assert_allclose(combined(P.log(), beta).exp()[0], expected, rtol=1e-7)


def test_equal_clients_have_a_sharper_product() -> None:
    p = P[:1].expand(3, 1, 3)
    torch.testing.assert_close(combined(p.log(), 0.0).exp(), P[0])
    cubes = P[0] ** 3
    torch.testing.assert_close(combined(p.log(), 1.0).exp(), cubes / cubes.sum())


def test_matches_numpy_with_several_networks_of_a_client() -> None:
    """Probabilities of a client's networks are averaged, not their outputs; in eval mode."""
    clients = [[network(0), network(1)], [network(2)]]
    x = draw(5, 4)
    predictive = BetaPredictive(clients, 0.3).eval()
    predicted = []
    for networks in clients:
        each = []
        for net in networks:
            state = {n: leaf.numpy() for n, leaf in net.state_dict().items()}
            exp = np.exp(x.numpy() @ state["0.weight"].T + state["0.bias"])
            each.append(exp / exp.sum(1, keepdims=True))
        predicted.append(np.mean(each, 0))
    raw = np.prod(predicted, 0) ** 0.3 * np.mean(predicted, 0) ** 0.7
    expected = raw / raw.sum(1, keepdims=True)
    np.testing.assert_allclose(predictive(x).exp().detach(), expected, rtol=1e-10)


def test_one_client_is_itself_for_every_beta() -> None:
    x = draw(5, 4)
    for beta in (0.0, 0.5, 3.0):
        one = BetaPredictive([network(0)], beta).eval()
        torch.testing.assert_close(one(x), network(0).eval()(x).log_softmax(1))


class Fixed(nn.Module):
    """Returns its inputs' columns as logits."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.first : self.first + 3]


def loss(x: Tensor, y: Tensor, beta: float) -> float:
    p = [torch.softmax(x[:, first : first + 3], 1).numpy() for first in (0, 3)]
    raw = np.prod(p, 0) ** beta * np.mean(p, 0) ** (1 - beta)
    return float(-np.log((raw / raw.sum(1, keepdims=True))[np.arange(len(y)), y.numpy()]).mean())


@pytest.mark.parametrize("noise", [0.7, 2.0])
def test_beta_has_the_smallest_log_loss(noise: float) -> None:
    """Two noisy clients; a fine grid around the solution is no better."""
    y = torch.randint(3, (200,), generator=torch.Generator().manual_seed(5))
    truth = nn.functional.one_hot(y, 3).double().repeat(1, 2)
    x = 1.5 * truth + noise * draw(200, 6, seed=6)
    predictive = BetaPredictive([Fixed(0), Fixed(3)])
    found = predictive.choose_beta([(x[:90], y[:90]), (x[90:], y[90:])])
    assert found == predictive.beta
    best = min(np.linspace(0, 4, 801), key=lambda beta: loss(x, y, beta))
    assert found == pytest.approx(best, abs=5e-3)
    assert 0.05 < found < 4


def test_beta_stays_within_its_bounds() -> None:
    y = torch.tensor([0, 1, 2])
    right = nn.functional.one_hot(y, 3).double().repeat(1, 2)
    predictive = BetaPredictive([Fixed(0), Fixed(3)])
    assert predictive.choose_beta([(0.001 * right, y)]) == 1024.0
    assert loss(2 * right, y, predictive.choose_beta([(2 * right, y)])) < 1e-15
    assert predictive.choose_beta([(-right, y)]) == 0.0


def test_a_student_learns_the_prediction() -> None:
    """Labels are wrong, and play no part; teachers stay as they are, dropout is off in them."""
    clients, x = [network(0), network(1)], draw(64, 4)
    predictive = BetaPredictive(clients, 0.5)
    before = [leaf.clone() for leaf in predictive.parameters()]
    batches = [(some, torch.zeros(16, dtype=torch.int64)) for some in x.split(16)]
    student = nn.Linear(4, 3).double()

    def distance() -> float:
        wanted = predictive.eval()(x)
        found = student(x).log_softmax(1)
        return float((wanted.exp() * (wanted - found)).sum(1).mean().detach())

    far = distance()
    assert predictive.distil(student, batches, epochs=60, lr=0.02) is student
    assert distance() < far / 100
    assert all(map(torch.equal, before, predictive.parameters()))


def test_a_student_steps_as_adam_on_the_divergence() -> None:
    """The first step of Adam is g / (|g| + 1e-8), times the rate."""
    x, student = draw(6, 4), nn.Linear(4, 3).double()
    predictive = BetaPredictive([network(0), network(1)], 0.5).eval()
    start = student.weight.detach().clone()
    target = predictive(x).exp().detach()
    gradient = (torch.softmax(student(x), 1) - target).T @ x / len(x)
    predictive.distil(student, [x], epochs=1, lr=0.01)
    step = 0.01 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(start - student.weight, step, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("beta", "expected"), [(0.0, (0.5, 2.25)), (0.5, (0.3125, 1.125)), (1.0, (0.25, 0.75))]
)
def test_two_clients_have_the_known_normals(beta: float, expected: Any) -> None:
    """N(0, 1) and N(1, 3): product N(1/4, 3/4), mixture of mean 1/2 and variance 2 + 1/4."""
    means, variances = torch.tensor([0.0, 1.0]).double(), torch.tensor([1.0, 3.0]).double()
    found = [float(each) for each in combined_normals(means, variances, beta)]
    assert found == pytest.approx(expected, rel=1e-12)


def numbers(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)).double()


def normals(clients: Any, x: Tensor, noise: float, beta: float) -> Any:
    """Means and variances in NumPy, from densities on a grid."""
    m, v = [], []
    for networks in clients:
        each = []
        for net in networks:
            state = {n: leaf.numpy() for n, leaf in net.state_dict().items()}
            each.append(x.numpy() @ state["0.weight"].T + state["0.bias"])
        m.append(np.mean(each, 0))
        v.append(noise + np.mean(np.square(np.array(each) - m[-1]), 0))
    y = np.linspace(-12, 12, 24001)
    found = np.zeros((2, *m[0].shape))
    pairs = list(zip(m, v, strict=True))
    for at in np.ndindex(m[0].shape):
        log_p = [-((y - a[at]) ** 2) / 2 / b[at] - np.log(b[at]) / 2 for a, b in pairs]
        mixture = np.mean(np.exp(log_p), 0)
        center = (mixture * y).sum() / mixture.sum()
        spread = (mixture * (y - center) ** 2).sum() / mixture.sum()
        joined = np.exp(beta * np.sum(log_p, 0) - (1 - beta) * (y - center) ** 2 / 2 / spread)
        mean = (joined * y).sum() / joined.sum()
        found[0][at], found[1][at] = mean, (joined * (y - mean) ** 2).sum() / joined.sum()
    return found


def test_numbers_match_numpy_with_several_networks_of_a_client() -> None:
    clients, x = [[numbers(0), numbers(1)], [numbers(2)]], draw(5, 4)
    predictive = BetaPredictiveRegression(clients, 0.3, 0.4).eval()
    with torch.no_grad():
        found = torch.stack(predictive(x))
    np.testing.assert_allclose(found, normals(clients, x, 0.3, 0.4), rtol=1e-8, atol=1e-10)


def test_one_client_predicts_its_own_normal_for_every_beta() -> None:
    x = draw(5, 4)
    for beta in (0.0, 0.5, 3.0):
        mean, variance = BetaPredictiveRegression([numbers(0)], 0.7, beta).eval()(x)
        torch.testing.assert_close(mean, numbers(0).eval()(x))
        # A product of beta copies would be narrower: with one client both ends are equal.
        torch.testing.assert_close(variance, torch.full_like(variance, 0.7))


class Column(nn.Module):
    """Returns a column of its inputs."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x[:, [self.number]]


@pytest.mark.parametrize("noise", [1.0, 0.6])
def test_beta_has_the_smallest_log_loss_of_numbers(noise: float) -> None:
    """Two clients with independent errors; a fine grid around the solution is no better."""
    y = draw(200, 1, seed=5)
    x = y + noise * draw(200, 2, seed=6)
    predictive = BetaPredictiveRegression([Column(0), Column(1)], 0.5)
    found = predictive.choose_beta([(x[:90], y[:90]), (x[90:], y[90:])])

    def loss(beta: float) -> float:
        m = x.numpy()
        mixture = 1 / (0.5 + m.var(1))
        precision = beta * 4 + (1 - beta) * mixture
        error = (y.numpy()[:, 0] - m.mean(1)) ** 2
        return float((precision * error / 2 - np.log(precision) / 2).mean())

    best = min(np.linspace(0, 8, 1601), key=loss)
    assert found == predictive.beta == pytest.approx(best, abs=5e-3)
    assert 0.05 < found < 7.9


def test_a_student_of_numbers_steps_as_adam_on_the_squared_difference() -> None:
    """The first step of Adam is g / (|g| + 1e-8), times the rate."""
    x, student = draw(6, 4), nn.Linear(4, 2).double()
    predictive = BetaPredictiveRegression([numbers(0), numbers(1)], 0.3).eval()
    start = student.weight.detach().clone()
    gradient = 2 * (student(x) - predictive(x)[0]).T.detach() @ x / (2 * len(x))
    predictive.distil(student, [x], epochs=1, lr=0.01)
    step = 0.01 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(start - student.weight, step, rtol=1e-7, atol=1e-9)


def test_noise_has_a_variance() -> None:
    with pytest.raises(ValueError, match="`noise_variance` to be a finite number > 0, but got"):
        BetaPredictiveRegression([nn.Linear(2, 2)], 0.0)


@pytest.mark.parametrize(
    ("clients", "settings", "match"),
    [
        ([], {}, r"at least one network of each client, but got \[\] of them"),
        ([[nn.Linear(2, 2)], []], {}, r"but got \[1, 0\] of them"),
        ([nn.Linear(2, 2)], {"beta": -0.1}, "`beta` to be a finite number >= 0, but got beta=-0.1"),
    ],
)
def test_wrong_settings_are_refused(clients: Any, settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        BetaPredictive(clients, **settings)


@pytest.mark.parametrize("settings", [{"epochs": 0}, {"lr": 0}])
def test_wrong_settings_of_a_student_are_refused(settings: Any) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=f"Expected `{name}` to be .*, but got {name}=0"):
        BetaPredictive([nn.Linear(2, 2)]).distil(nn.Linear(2, 2), [], **settings)
