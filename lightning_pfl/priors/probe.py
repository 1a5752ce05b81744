"""Checks of a prior on two clients before the first round."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_pfl.core.tree import Model, Tree, expand, leaves, rows, shapes, tmap
from lightning_pfl.priors.base import Prior, reaches

SHIFT = 0.1
"""Distance of the second client from the first, which reveals rows that mix."""


def check_prior(prior: Prior, model: Model) -> None:
    """Check a prior's functions on two clients with different parameters.

    Args:
        prior: The prior.
        model: The initial parameters under it, without client axis.

    Raises:
        TypeError: If ``init`` returns no dict of tensors.
        ValueError: If the mean has other entries than the model; if ``regularizer`` doesn't
            return one number per client, mixes clients, or doesn't depend on ``theta``; or if
            ``theta_gradient`` has other entries than ``theta``.
    """
    gamma = _first(prior, model)
    theta = tmap(lambda leaf: torch.stack((leaf, leaf + SHIFT)), model)
    each = expand(gamma, 2)
    with torch.no_grad():
        both = _penalty(prior, theta, each)
        alone = [_penalty(prior, rows(theta, one), rows(each, one)) for one in _ROWS]
    # Sums over other shapes may round differently, by at most this.
    close = torch.finfo(min((leaf.dtype for leaf in leaves(theta)), key=_digits)).eps ** 0.5
    if not torch.allclose(both.double(), torch.cat(alone).double(), close, close, equal_nan=True):
        raise ValueError(
            f"Expected `regularizer` of {_name(prior)} to return for each client a number that "
            f"depends on no other client, but got {both.tolist()} for two and "
            f"{torch.cat(alone).tolist()} for each alone. Sum over a client's entries only, for "
            "example by `sum_entries`."
        )
    _check_gradient(prior, theta, each)


_ROWS = (slice(0, 1), slice(1, 2))


def depends_on_gamma(prior: Prior, model: Model) -> bool:
    """Whether the server's step can change the prior.

    Args:
        prior: The prior.
        model: The initial parameters under it, without client axis.
    """
    if type(prior).gamma_gradient is not Prior.gamma_gradient or prior.has_closed_form:
        return True
    theta, gamma = expand(model, 1), prior.init(model)
    return reaches(
        lambda tree: prior.regularizer(theta, expand(tree, 1)).sum() + prior.hyperprior(tree), gamma
    )


def _first(prior: Prior, model: Model) -> Tree:
    found: Any = prior.init(model)
    held = [*leaves(found)] if isinstance(found, dict) else []
    others = [type(leaf).__name__ for leaf in held if not isinstance(leaf, Tensor)]
    if others or not isinstance(found, dict):
        got = f"a dict with {others[0]} in it" if others else type(found).__name__
        raise TypeError(
            f"Expected `init` of {_name(prior)} to return a dict of tensors or of dicts of them, "
            f"but got {got}. Return {{'mean': model}}, for example."
        )
    gamma: Tree = found
    if "mean" in gamma and shapes({"": gamma["mean"]}) != shapes({"": model}):
        raise ValueError(
            f"Expected the entry 'mean' that `init` of {_name(prior)} returns to have the model's "
            f"names and shapes, but got {shapes({'mean': gamma['mean']})}. Rename the entry, or "
            "use the model."
        )
    return gamma


def _penalty(prior: Prior, theta: Model, gamma: Tree) -> Tensor:
    clients = len(next(leaves(theta)))
    found: Any = prior.regularizer(theta, gamma)
    if isinstance(found, Tensor) and found.shape == (clients,):
        return found
    got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
    raise ValueError(
        f"Expected `regularizer` of {_name(prior)} to return shape (clients,), one number per "
        f"client, but got {got} for {clients} client{'s' if clients > 1 else ''}. Sum over each "
        "client's entries, for example by `sum_entries`."
    )


def _check_gradient(prior: Prior, theta: Model, gamma: Tree) -> None:
    if type(prior).theta_gradient is Prior.theta_gradient and not reaches(
        lambda tree: prior.regularizer(tree, gamma).sum(), theta
    ):
        raise ValueError(
            f"Expected `regularizer` of {_name(prior)} to depend on `theta`, but got no gradient "
            "by it. Don't detach `theta`; without a penalty, use LocalOnly."
        )
    found = prior.theta_gradient(theta, gamma)
    if shapes(found) != shapes(theta):
        raise ValueError(
            f"Expected `theta_gradient` of {_name(prior)} to have the names and shapes of `theta`, "
            f"{shapes(theta)}, but got {shapes(found)}. Leave it out to use autograd."
        )


def _digits(dtype: torch.dtype) -> float:
    return -torch.finfo(dtype).eps


def _name(prior: Prior) -> str:
    return type(prior).__name__
