"""Prior: what a federation believes of its clients' parameters, and learns from them."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.core.tree import Model, Tree, leaves, tmap


class Prior(ABC):
    r"""A family of densities :math:`\rho_\gamma(\theta) \propto \exp(-R(\theta, \gamma))`.

    Clients descend on their loss plus :math:`R`; the server fits :math:`\gamma` to what they find.
    A prior of your own needs :meth:`regularizer`; the rest follows from it by autograd::

        from lightning_pfl.priors import Prior
        from lightning_pfl.priors import sum_entries

        class Cauchy(Prior):
            def regularizer(self, theta, gamma):
                return sum_entries(lambda t, m: (1 + (t - m) ** 2).log(), theta, gamma["mean"])

    :math:`\theta` is a model with the parameters under the prior. :math:`\gamma` is a tree; its
    entry ``mean``, if it has one, is where the density peaks: clients begin there, and there the
    global model is. In :meth:`regularizer` and :meth:`theta_gradient` all leaves, also those of
    :math:`\gamma`, have a leading client axis, and rows don't mix. On the server :math:`\gamma` has
    none. It needn't be learned: :math:`R` may not depend on it, and the server then leaves it as
    :meth:`init` made it. `docs/priors.md` has a complete example.

    Args:
        parameters: Which trainable parameters are under the prior: names, globs, module types, or
            ``"all"``.

    References:
        Zhang, Esteve-Yagüe, Dittmer, Schönlieb, Roberts. FedMAP: Unlocking potential in
        personalized federated learning through bi-level MAP optimization. arXiv:2405.19000,
        equations 2 and 3.
    """

    def __init__(self, parameters: ParameterSpec = "all") -> None:
        self.parameters = parameters

    # --- the density ---

    @abstractmethod
    def regularizer(self, theta: Model, gamma: Tree) -> Tensor:
        r""":math:`R(\theta, \gamma)` without what doesn't depend on :math:`\theta`.

        Args:
            theta: :math:`\theta`, ``(clients, ...)``.
            gamma: :math:`\gamma`, ``(clients, ...)``.

        Returns:
            ``(clients,)``; in float64 where weights are computed from it.
        """

    def hyperprior(self, gamma: Tree) -> Tensor:
        r"""The part of :math:`R` that depends on :math:`\gamma` alone, a scalar; default: 0."""
        return torch.zeros((), dtype=torch.float64)

    def theta_gradient(self, theta: Model, gamma: Tree) -> Model:
        r""":math:`\partial R / \partial\theta`, ``(clients, ...)``; default: autograd."""
        return gradient(lambda tree: self.regularizer(tree, gamma).sum(), theta)

    def curvature(self, gamma: Tree) -> float | None:
        r"""The largest second derivative of :math:`R` by :math:`\theta`, the same everywhere.

        None, the default, where it differs from place to place or isn't known; a number lets FedMAP
        warn of steps that are too long.

        Args:
            gamma: :math:`\gamma`, without client axis.
        """
        return None

    # --- the server ---

    def init(self, model: Model) -> Tree:
        r""":math:`\gamma^0` from the initial parameters; default: they are the mean."""
        return {"mean": model}

    def gamma_gradient(self, theta: Model, gamma: Tree, weights: Tensor) -> Tree:
        r""":math:`\sum_k w_k\, \partial_\gamma R(\theta_k, \gamma)`; default: autograd.

        Args:
            theta: :math:`\theta_k`, ``(clients, ...)``.
            gamma: :math:`\gamma`, without client axis.
            weights: :math:`w_k`, float64 ``(clients,)``, summing to 1.
        """

        def total(gamma: Tree) -> Tensor:
            each = tmap(lambda leaf: leaf.expand(len(weights), *leaf.shape), gamma)
            return (weights * self.regularizer(theta, each)).sum() + self.hyperprior(gamma)

        return gradient(total, gamma)

    def closed_form(self, theta: Model, gamma: Tree, weights: Tensor) -> Tree:
        r""":math:`\arg\min_\gamma \sum_k w_k R(\theta_k, \gamma)`, where it is known."""
        raise NotImplementedError

    def project(self, gamma: Tree) -> Tree:
        r"""The nearest :math:`\gamma` that the family has, after a gradient step."""
        return gamma

    def update(self, theta: Model, gamma: Tree, weights: Tensor, lr: float | None) -> Tree:
        r"""The server's step: :math:`\gamma - \lambda \sum_k w_k \partial_\gamma R` (equation 3).

        Args:
            theta: :math:`\theta_k`, ``(clients, ...)``.
            gamma: :math:`\gamma`, without client axis.
            weights: :math:`w_k`, float64 ``(clients,)``, summing to 1.
            lr: :math:`\lambda`; None for the closed form.
        """
        if lr is None:
            return self.closed_form(theta, gamma, weights)
        slope = self.gamma_gradient(theta, gamma, weights)
        return self.project(tmap(lambda leaf, g: leaf - lr * g, gamma, slope))

    def learned(self, gamma: Tree) -> dict[str, Model]:
        """What there is to show beside the mean, by name; default: all models in ``gamma``."""
        return {
            name: entry
            for name, entry in gamma.items()
            if name != "mean" and isinstance(entry, dict)
        }

    @property
    def has_closed_form(self) -> bool:
        """Whether :meth:`closed_form` is there."""
        return type(self).closed_form is not Prior.closed_form

    def __repr__(self) -> str:
        """The call that makes this prior; a checkpoint tells if it changes."""
        names = inspect.signature(type(self).__init__).parameters
        given = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in given.items())})"


def sum_entries(function: Callable[..., Tensor], theta: Model, *others: Model) -> Tensor:
    """Sum a function of single entries over a model, float64 ``(clients,)``.

    Args:
        function: Elementwise, of a leaf of each tree.
        theta: ``(clients, ...)``.
        others: Trees of the same names.
    """
    terms = leaves(tmap(function, theta, *others))
    # Millions of float32 squares in a float32 sum would cost a log weight its digits.
    sums = [leaf.reshape(len(leaf), -1).sum(1, dtype=torch.float64) for leaf in terms]
    return torch.stack(sums).sum(0)


def gradient(function: Callable[[Tree], Tensor], tree: Tree) -> Tree:
    """Gradient of a scalar function of a tree; 0 for what it doesn't reach."""
    with torch.enable_grad():
        tree = tmap(lambda leaf: leaf.detach().requires_grad_(), tree)
        value = function(tree)
        if not value.requires_grad:
            return tmap(torch.zeros_like, tree)
        inputs = list(leaves(tree))
        found = iter(torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True))
    return _refill(tree, found)


def reaches(function: Callable[[Tree], Tensor], tree: Tree) -> bool:
    """Whether a function depends on a tree, as far as autograd sees."""
    with torch.enable_grad():
        return function(tmap(lambda leaf: leaf.detach().requires_grad_(), tree)).requires_grad


def _refill(tree: Tree, values: Iterator[Tensor]) -> Tree:
    return tmap(lambda _: next(values), tree)
