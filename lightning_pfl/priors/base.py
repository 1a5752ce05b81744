"""Prior: the density of the clients' parameters that a federation learns."""

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

    Clients minimise their loss plus :math:`R`; the server fits :math:`\gamma` to their parameters.
    A subclass needs :meth:`regularizer` only; autograd does the rest::

        from lightning_pfl.priors import Prior
        from lightning_pfl.priors import sum_entries

        class Cauchy(Prior):
            def regularizer(self, theta, gamma):
                return sum_entries(lambda t, m: (1 + (t - m) ** 2).log(), theta, gamma["mean"])

    :math:`\theta` is a model of the parameters under the prior. :math:`\gamma` is a tree; its
    optional entry ``mean`` is the mode, where clients begin, and the global model. In
    :meth:`regularizer` and :meth:`theta_gradient` all leaves, also those of :math:`\gamma`, have a
    leading client axis, and rows must not mix. On the server :math:`\gamma` has none. If
    :math:`R` doesn't depend on :math:`\gamma`, the server keeps the result of :meth:`init`.
    `docs/priors.md` has a complete example.

    Args:
        parameters: Trainable parameters under the prior: names, globs, module types, or ``"all"``.

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
        r"""Compute :math:`R(\theta, \gamma)` without terms that don't depend on :math:`\theta`.

        Args:
            theta: :math:`\theta`, ``(clients, ...)``.
            gamma: :math:`\gamma`, ``(clients, ...)``.

        Returns:
            ``(clients,)``, in float64 if FedMAP computes weights from it.
        """

    def hyperprior(self, gamma: Tree) -> Tensor:
        r"""Compute the part of :math:`R` of :math:`\gamma` alone, a scalar; default: 0."""
        return torch.zeros((), dtype=torch.float64)

    def theta_gradient(self, theta: Model, gamma: Tree) -> Model:
        r"""Compute :math:`\partial R / \partial\theta`, ``(clients, ...)``; default: autograd."""
        return gradient(lambda tree: self.regularizer(tree, gamma).sum(), theta)

    def add_gradient(self, grads: Model, theta: Model, gamma: Tree) -> Model:
        r"""Add :math:`\partial R / \partial\theta` to the gradient of a client's loss.

        Args:
            grads: The gradient; only names of :math:`\theta` get the term.
            theta: :math:`\theta`, ``(clients, ...)``.
            gamma: :math:`\gamma`, ``(clients, ...)``.
        """
        pull = self.theta_gradient(theta, gamma)
        return {name: g + pull[name] if name in pull else g for name, g in grads.items()}

    def curvature(self, gamma: Tree) -> float | None:
        r"""Return the largest second derivative of :math:`R` by :math:`\theta`, if it is constant.

        The default None means unknown or not constant; with a number FedMAP warns of step sizes
        that diverge.

        Args:
            gamma: :math:`\gamma`, without client axis.
        """
        return None

    # --- the server ---

    def init(self, model: Model) -> Tree:
        r"""Make :math:`\gamma^0` from the initial parameters; default: they are the mean."""
        return {"mean": model}

    def gamma_gradient(self, theta: Model, gamma: Tree, weights: Tensor) -> Tree:
        r"""Compute :math:`\sum_k w_k\, \partial_\gamma R(\theta_k, \gamma)`; default: autograd.

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
        r"""Return :math:`\arg\min_\gamma \sum_k w_k R(\theta_k, \gamma)`, if known."""
        raise NotImplementedError

    def project(self, gamma: Tree) -> Tree:
        r"""Project :math:`\gamma` to the nearest valid value after a gradient step."""
        return gamma

    def update(self, theta: Model, gamma: Tree, weights: Tensor, lr: float | None) -> Tree:
        r"""Take the server's step :math:`\gamma - \lambda \sum_k w_k \partial_\gamma R`.

        Args:
            theta: :math:`\theta_k`, ``(clients, ...)``.
            gamma: :math:`\gamma`, without client axis.
            weights: :math:`w_k`, float64 ``(clients,)``, summing to 1.
            lr: :math:`\lambda` of equation 3; None for the closed form.
        """
        if lr is None:
            return self.closed_form(theta, gamma, weights)
        slope = self.gamma_gradient(theta, gamma, weights)
        return self.project(tmap(lambda leaf, g: leaf - lr * g, gamma, slope))

    def learned(self, gamma: Tree) -> dict[str, Model]:
        """Return learned parameters besides the mean, by name; default: all models in ``gamma``."""
        return {
            name: entry
            for name, entry in gamma.items()
            if name != "mean" and isinstance(entry, dict)
        }

    @property
    def has_closed_form(self) -> bool:
        """Whether the class defines :meth:`closed_form`."""
        return type(self).closed_form is not Prior.closed_form

    def __repr__(self) -> str:
        """Return the call that makes this prior; checkpoints compare it."""
        names = inspect.signature(type(self).__init__).parameters
        given = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in given.items())})"


def sum_entries(function: Callable[..., Tensor], theta: Model, *others: Model) -> Tensor:
    """Sum a function of single entries over each client's model, float64 ``(clients,)``.

    Args:
        function: Elementwise function of a leaf of each tree.
        theta: The model, ``(clients, ...)``.
        others: Trees with the same names.
    """
    terms = leaves(tmap(function, theta, *others))
    # In float32 sums of millions of squares a log weight would lose its digits.
    sums = [leaf.reshape(len(leaf), -1).sum(1, dtype=torch.float64) for leaf in terms]
    return torch.stack(sums).sum(0)


def gradient(function: Callable[[Tree], Tensor], tree: Tree) -> Tree:
    """Compute the gradient of a scalar function of a tree; 0 for unused leaves."""
    with torch.enable_grad():
        tree = tmap(lambda leaf: leaf.detach().requires_grad_(), tree)
        value = function(tree)
        if not value.requires_grad:
            return tmap(torch.zeros_like, tree)
        inputs = list(leaves(tree))
        found = iter(torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True))
    return _refill(tree, found)


def reaches(function: Callable[[Tree], Tensor], tree: Tree) -> bool:
    """Whether a function depends on a tree, according to autograd."""
    with torch.enable_grad():
        return function(tmap(lambda leaf: leaf.detach().requires_grad_(), tree)).requires_grad


def _refill(tree: Tree, values: Iterator[Tensor]) -> Tree:
    return tmap(lambda _: next(values), tree)
