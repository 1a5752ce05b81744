"""torch optimizers as pure functions on trees."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.optim import Optimizer

from lightning_pfl.core.tree import Model, Tree

OptimizerFactory = Callable[[Iterable[Tensor]], Optimizer]


def functional_step(
    make: OptimizerFactory, params: Model, grads: Model, state: Tree
) -> tuple[Model, Tree]:
    """Take one optimizer step on copies of the parameters.

    Args:
        make: Makes the optimizer from an iterable of parameters.
        params: Parameters by name.
        grads: Gradients under the same names.
        state: State returned by the last call; ``{}`` before the first.

    Returns:
        The new parameters, and the optimizer's tensors as ``{parameter name: {state name:
        tensor}}``.
    """
    copies = {name: leaf.detach().clone().requires_grad_() for name, leaf in params.items()}
    optimizer = make(copies.values())
    for name, entries in state.items():
        optimizer.state[copies[name]] = {key: value.clone() for key, value in entries.items()}
    for name, leaf in copies.items():
        leaf.grad = grads[name].clone()
    optimizer.step()
    new_state = {
        name: {
            key: value for key, value in optimizer.state[leaf].items() if isinstance(value, Tensor)
        }
        for name, leaf in copies.items()
    }
    return {name: leaf.detach() for name, leaf in copies.items()}, {
        k: v for k, v in new_state.items() if v
    }
