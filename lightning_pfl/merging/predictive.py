"""Beta-predictive Bayes: between the mean and the product of the clients' predictions."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pfl.core.checks import check_integer, check_number
from lightning_pfl.engine.watching import in_mode
from lightning_pfl.merging.modules import require_modules
from lightning_pfl.solvers.distances import distance_to

LARGEST = 1024.0
"""Where the search for beta ends."""
HALVINGS = 60
"""Steps of the bisection, which leave nothing of a double's digits."""


class _Predictive(nn.Module):
    """Base of predictions of classes and of numbers.

    Args:
        clients: Each client's networks; a single one may stand for a list of one.
        beta: Share of the product, >= 0.
    """

    def __init__(
        self, clients: Sequence[nn.Module | Sequence[nn.Module]], beta: float = 0.5
    ) -> None:
        super().__init__()
        check_number("beta", beta, "Use 0.5, or choose it on labelled samples.")
        require_modules("clients", clients, nested=True)
        drawn = [[each] if isinstance(each, nn.Module) else list(each) for each in clients]
        if not drawn or not all(drawn):
            raise ValueError(
                "Expected at least one network of each client, but got "
                f"{[len(each) for each in drawn]} of them. Give a list of networks by client."
            )
        self.clients = nn.ModuleList(nn.ModuleList(each) for each in drawn)
        self.beta = float(beta)

    @abstractmethod
    def slope_on(self, batches: Iterable[Any]) -> Callable[[float], float]:
        """Return the derivative of the mean log loss by beta, in which that is convex."""

    @abstractmethod
    def distance(self, inputs: Any, outputs: Tensor) -> Tensor:
        """Return the mean distance of a student's outputs to the prediction."""

    @torch.no_grad()
    def choose_beta(self, batches: Iterable[Any]) -> float:
        """Set beta to the one >= 0 with the smallest log loss on labelled samples.

        Args:
            batches: Minibatches (inputs, targets), which trained none of the networks.

        Returns:
            It. Where larger ones are ever better, one from which on the loss stays the same, or
            1024.
        """
        with in_mode(self, training=False):
            slope = self.slope_on(batches)
        if slope(0.0) >= 0:
            self.beta = 0.0
            return self.beta
        low, high = 0.0, 1.0
        while slope(high) < 0 and high < LARGEST:
            low, high = high, 2 * high
        for _ in range(HALVINGS if slope(high) >= 0 else 0):
            middle = (low + high) / 2
            low, high = (low, middle) if slope(middle) >= 0 else (middle, high)
        self.beta = high
        return self.beta

    def distil(
        self, student: nn.Module, batches: Iterable[Any], epochs: int = 50, lr: float = 1e-4
    ) -> nn.Module:
        """Fit a network to the prediction by Adam, on samples whose labels aren't used.

        Args:
            student: The network, which is changed: for instance a copy of a client's.
            batches: Minibatches, the inputs first, which can be passed over several times.
            epochs: Passes over them, >= 1.
            lr: Adam's learning rate, > 0.

        Returns:
            The student, in eval mode.
        """
        check_integer("epochs", epochs, 1, "Use 50, as in the authors' code.")
        check_number("lr", lr, "Use 1e-4, as in the authors' code.", positive=True)
        optimizer = torch.optim.Adam(student.parameters(), lr)
        with in_mode(self, training=False), in_mode(student, training=True):
            for _ in range(epochs):
                for batch in batches:
                    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
                    loss = self.distance(inputs, student(inputs))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        return student.eval()


class BetaPredictive(_Predictive):
    r"""Predicts classes by the models of finished clients.

    Client :math:`k` predicts with the mean over models drawn from its posterior,
    :math:`p_k = \frac1S \sum_s \operatorname{softmax}(f_{ks}(x))`, and all together with

    .. math::
        p_\beta \propto \Big(\prod_k p_k\Big)^{\beta}
        \Big(\frac1n \sum_k p_k\Big)^{1 - \beta}.

    The product is right for clients whose data are independent given the model, and too sure of
    itself where their posteriors are only approximate; the mean is too timid. :math:`\beta` is
    chosen on labelled samples by :meth:`choose_beta`, and :meth:`distil` fits one network to the
    prediction.

    Args:
        clients: Each client's networks, which return logits ``(samples, classes)``; a single one
            may stand for a list of one. They stay as they are.
        beta: :math:`\beta \ge 0`; 0 is the mean, 1 the product.

    Raises:
        ValueError: If there are no networks, or beta is out of its range.

    Deviation from the paper: how models are drawn is up to the user, for instance checkpoints of
    several rounds; the authors' code has cyclical stochastic gradient Hamiltonian Monte Carlo.
    Beta, for which the log loss is convex, is found by bisection instead of by Adam.

    Example:
        >>> networks = [nn.Linear(3, 2), nn.Linear(3, 2)]
        >>> BetaPredictive(networks, beta=0.0)(torch.zeros(5, 3)).shape
        torch.Size([5, 2])

    References:
        Hasan, Zhang, Guo, Chen, Poupart. Calibrated one round federated learning with Bayesian
        inference in the predictive space. AAAI 2024. arXiv:2312.09817.
    """

    def forward(self, inputs: Any) -> Tensor:
        """Return the logarithms of the probabilities, ``(samples, classes)``; they are logits."""
        return combined(self.log_predictives(inputs), self.beta)

    def log_predictives(self, inputs: Any) -> Tensor:
        r"""Return each client's :math:`\log p_k`, ``(clients, samples, classes)``."""
        found = []
        for networks in self.clients:
            drawn = torch.stack([each(inputs).log_softmax(1) for each in networks])  # type: ignore[attr-defined]
            found.append(drawn.logsumexp(0) - math.log(len(drawn)))
        return torch.stack(found)

    def slope_on(self, batches: Iterable[Any]) -> Callable[[float], float]:
        """Return the derivative of the mean log loss by beta."""
        parts = [(self.log_predictives(x), y) for x, y in batches]
        log_p = torch.cat([found for found, _ in parts], 1).double()
        labels = torch.cat([y for _, y in parts]).unsqueeze(1)
        difference = log_p.sum(0) - _log_mean(log_p)

        def slope(beta: float) -> float:
            expected = (combined(log_p, beta).exp() * difference).sum(1)
            return float((expected - difference.gather(1, labels).squeeze(1)).mean())

        return slope

    def distance(self, inputs: Any, outputs: Tensor) -> Tensor:
        """Return the mean divergence of a student's logits from the prediction."""
        with torch.no_grad():
            target = self(inputs)
        return distance_to(outputs, target, "kl").mean()


class BetaPredictiveRegression(_Predictive):
    r"""Predicts numbers by the models of finished clients, as :class:`BetaPredictive` does classes.

    Client :math:`k` predicts the normal distribution :math:`N(m_k, v_k)`: the mean of its networks'
    outputs, and the variance of the noise and of these outputs together. The product of all has
    the precision :math:`P = \sum_k 1 / v_k` and the mean :math:`\sum_k m_k / (v_k P)`; their
    mixture is replaced by the normal distribution with its mean and variance. Both are joined with
    :math:`\beta` as exponents, which interpolates precisions.

    Args:
        clients: Each client's networks, which return numbers, ``(samples, outputs)``; a single one
            may stand for a list of one. They stay as they are.
        noise_variance: Variance of a target around a network's output, > 0.
        beta: :math:`\beta \ge 0`; 0 is the mixture, 1 the product.

    Raises:
        ValueError: If there are no networks, or a number is out of its range.

    Deviation from the paper: as of :class:`BetaPredictive`.

    Example:
        >>> networks = [nn.Linear(3, 2), nn.Linear(3, 2)]
        >>> mean, variance = BetaPredictiveRegression(networks, 0.1)(torch.zeros(5, 3))
        >>> mean.shape, variance.shape
        (torch.Size([5, 2]), torch.Size([5, 2]))

    References:
        Hasan, Zhang, Guo, Chen, Poupart. Calibrated one round federated learning with Bayesian
        inference in the predictive space. AAAI 2024. arXiv:2312.09817.
    """

    def __init__(
        self,
        clients: Sequence[nn.Module | Sequence[nn.Module]],
        noise_variance: float,
        beta: float = 0.5,
    ) -> None:
        super().__init__(clients, beta)
        advice = "Use the mean square of the networks' errors, for example."
        check_number("noise_variance", noise_variance, advice, positive=True)
        self.noise_variance = float(noise_variance)

    def forward(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Return the predictions' means and variances, each ``(samples, outputs)``."""
        return combined_normals(*self.predictives(inputs), self.beta)

    def predictives(self, inputs: Any) -> tuple[Tensor, Tensor]:
        r"""Return :math:`m_k` and :math:`v_k`, each ``(clients, samples, outputs)``."""
        means, variances = [], []
        for networks in self.clients:
            drawn = torch.stack([each(inputs) for each in networks])  # type: ignore[attr-defined]
            means.append(drawn.mean(0))
            variances.append(drawn.var(0, correction=0) + self.noise_variance)
        return torch.stack(means), torch.stack(variances)

    def slope_on(self, batches: Iterable[Any]) -> Callable[[float], float]:
        """Return the derivative of the mean log loss by beta."""
        parts = [(*self.predictives(x), y) for x, y in batches]
        means, variances = (torch.cat([one[i] for one in parts], 1).double() for i in range(2))
        targets = torch.cat([one[2] for one in parts]).to(means).view_as(means[0])
        (scaled, precision), (scaled_mixture, precision_mixture) = _natural(means, variances)
        by_value, by_square = scaled - scaled_mixture, precision - precision_mixture

        def slope(beta: float) -> float:
            mean, variance = combined_normals(means, variances, beta)
            squares = mean.square() + variance - targets.square()
            return float((by_value * (mean - targets) - by_square * squares / 2).mean())

        return slope

    def distance(self, inputs: Any, outputs: Tensor) -> Tensor:
        """Return the mean squared difference of a student's outputs to the predicted means."""
        with torch.no_grad():
            target, _ = self(inputs)
        found: Tensor = (outputs - target).square().mean()
        return found


def _natural(means: Tensor, variances: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return mean times precision, and precision, of the product and of the mixture."""
    product = (means / variances).sum(0), (1 / variances).sum(0)
    mean = means.mean(0)
    precision = 1 / (variances + (means - mean).square()).mean(0)
    return product, (mean * precision, precision)


def combined_normals(means: Tensor, variances: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    r"""Join normal predictions by :math:`\beta`.

    Args:
        means: ``(clients, ...)``.
        variances: ``(clients, ...)``, > 0.
        beta: :math:`\beta`.

    Returns:
        Mean and variance, each ``(...)``.

    Example:
        >>> combined_normals(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 3.0]), 0.5)
        (tensor(0.3125), tensor(1.1250))
    """
    (scaled, precision), (scaled_mixture, precision_mixture) = _natural(means, variances)
    joined = beta * precision + (1 - beta) * precision_mixture
    return (beta * scaled + (1 - beta) * scaled_mixture) / joined, 1 / joined


def combined(log_p: Tensor, beta: float) -> Tensor:
    r"""Compute :math:`\log p_\beta` of logarithms of probabilities.

    Args:
        log_p: ``(clients, samples, classes)``.
        beta: :math:`\beta`.

    Returns:
        ``(samples, classes)``.

    Example:
        >>> p = torch.tensor([[[0.7, 0.2, 0.1]], [[0.1, 0.6, 0.3]]])
        >>> combined(p.log(), 0.5).exp()
        tensor([[0.3607, 0.4723, 0.1670]])
    """
    return (beta * log_p.sum(0) + (1 - beta) * _log_mean(log_p)).log_softmax(1)


def _log_mean(log_p: Tensor) -> Tensor:
    return log_p.logsumexp(0) - math.log(len(log_p))
