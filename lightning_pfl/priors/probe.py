"""A prior is tried on two clients before the first round: its mistakes then have a name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_pfl.core.tree import Model, Tree, expand, leaves, rows, shapes, tmap
from lightning_pfl.priors.base import Prior, reaches

SHIFT = 0.1
"""How far the second client is from the first, so that rows that mix are seen."""


def check_prior(prior: Prior, model: Model) -> None:
    """Require what a federation needs of a prior, on two clients with different parameters.

    Args:
        prior: The prior.
        model: The initial parameters under it, without client axis.

    Raises:
        TypeError: If ``init`` returns no dict of tensors.
        ValueError: If the prior's mean is of other parameters, if ``regularizer`` returns anything
            but one number per client, lets clients mix, or doesn't depend on ``theta``; or if
            ``theta_gradient`` is that of other parameters.
    """
    gamma = _first(prior, model)
    theta = tmap(lambda leaf: torch.stack((leaf, leaf + SHIFT)), model)
    each = expand(gamma, 2)
    with torch.no_grad():
        both = _penalty(prior, theta, each)
        alone = [_penalty(prior, rows(theta, one), rows(each, one)) for one in _ROWS]
    # Sums over other shapes may round differently, by no more than this.
    close = torch.finfo(min((leaf.dtype for leaf in leaves(theta)), key=_digits)).eps ** 0.5
    if not torch.allclose(both.double(), torch.cat(alone).double(), close, close, equal_nan=True):
        raise ValueError(
            f"Expected `regularizer` of {_name(prior)} to treat clients apart, but got "
            f"{both.tolist()} for two clients together and {torch.cat(alone).tolist()} for each "
            "alone. Sum over the entries of a client, never over the first axis; `sum_entries` of "
            "lightning_pfl.priors does."
        )
    _check_gradient(prior, theta, each)


_ROWS = (slice(0, 1), slice(1, 2))


def depends_on_gamma(prior: Prior, model: Model) -> bool:
    """Whether the server's step can change the prior: a prior may also be fixed.

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
            f"Expected the entry 'mean' that `init` of {_name(prior)} returns to have the names "
            "and shapes of the parameters under the prior, as the global model is read from it, "
            f"but got {shapes({'mean': gamma['mean']})}. Give it another name, or use the model."
        )
    return gamma


def _penalty(prior: Prior, theta: Model, gamma: Tree) -> Tensor:
    clients = len(next(leaves(theta)))
    found: Any = prior.regularizer(theta, gamma)
    if isinstance(found, Tensor) and found.shape == (clients,):
        return found
    got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
    raise ValueError(
        f"Expected `regularizer` of {_name(prior)} to return one number per client, shape "
        f"(clients,), but got {got} for {clients} client{'s' if clients > 1 else ''}. Sum over the "
        "entries of each client alone; `sum_entries` of lightning_pfl.priors does."
    )


def _check_gradient(prior: Prior, theta: Model, gamma: Tree) -> None:
    if type(prior).theta_gradient is Prior.theta_gradient and not reaches(
        lambda tree: prior.regularizer(tree, gamma).sum(), theta
    ):
        raise ValueError(
            f"Expected `regularizer` of {_name(prior)} to depend on `theta`, but got no gradient "
            "by it. Compute with the tensors of `theta` themselves, without `detach`, `item` or "
            "NumPy; without a pull on the clients, use LocalOnly."
        )
    found = prior.theta_gradient(theta, gamma)
    if shapes(found) != shapes(theta):
        raise ValueError(
            f"Expected `theta_gradient` of {_name(prior)} to have the names and shapes of `theta`, "
            f"{shapes(theta)}, but got {shapes(found)}. Leave it out, and autograd does it."
        )


def _digits(dtype: torch.dtype) -> float:
    return -torch.finfo(dtype).eps


def _name(prior: Prior) -> str:
    return type(prior).__name__
