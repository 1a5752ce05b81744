"""Modules whose output is not one model's: it is mixed from several, or a function's of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import lightning as L
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_pfl.core.checks import check_choice
from lightning_pfl.core.parameters import places
from lightning_pfl.core.tree import Model

Space = Literal["outputs", "probabilities", "log-probabilities"]
"""What an ensemble averages."""
OTHER = "other:"
"""Prefix of the entries of all models but the first."""
SHARE = "other:share"
"""Name of the first model's weight in the output, ``(clients,)``."""
WEIGHTS = "other:weights:"
"""Prefix of the name of an ensemble's weights, which ends in its space."""
OWN = "other:own:"
"""Prefix of the entries that a client's function of outputs gets."""
Prediction = Callable[[Any, Any, Model], Any]
"""A function of outputs, features and a client's own tensors, which returns outputs.

It is called for one client at a time, or under ``vmap``: no tensor has a client axis. Features are
the inputs of the module's ``head``; None if it has no such submodule.
"""


def mixture(model: Model, other: Model, share: Tensor) -> Model:
    r"""Combine two models so that the module computes :math:`s f_1(x) + (1 - s) f_2(x)`.

    Args:
        model: The first model, ``(clients, ...)``, which is trained.
        other: The second model, ``(clients, ...)``, a constant.
        share: :math:`s` in [0, 1], ``(clients,)``.
    """
    return {**model, **{OTHER + name: leaf for name, leaf in other.items()}, SHARE: share}


def ensemble(models: Model, weights: Tensor, space: Space = "probabilities") -> Model:
    r"""Combine :math:`K` models so that the module's output is a mean over them.

    With the outputs :math:`o_k` and weights :math:`\pi_k`: ``"outputs"``: :math:`\sum_k \pi_k o_k`,
    for regression; ``"probabilities"``: :math:`\log \sum_k \pi_k \operatorname{softmax}(o_k)`;
    ``"log-probabilities"``: :math:`\sum_k \pi_k \log \operatorname{softmax}(o_k)`. The last two are
    logits as well: the softmax of the first is the mixture, that of the second the normalised
    geometric mean, so the module's own loss and accuracy are those of the ensemble.

    Args:
        models: Leaves ``(clients, K, ...)``.
        weights: :math:`\pi`, ``(clients, K)``, at least 0 with the sum 1.
        space: What is averaged. The outputs' classes are their second axis.

    Raises:
        ValueError: If the space is unknown, or there aren't as many weights as models.
    """
    check_choice("space", space, get_args(Space), "Use 'probabilities' for classes.")
    count = next(iter(models.values())).shape[1]
    if weights.ndim != 2 or weights.shape[1] != count:
        raise ValueError(
            f"Expected `weights` to be (clients, {count}), one for each model, but got "
            f"{tuple(weights.shape)}. Give every client a weight for each of the models."
        )
    first = {name: leaf[:, 0] for name, leaf in models.items()}
    others = {
        f"{OTHER}{k}:{name}": leaf[:, k] for k in range(1, count) for name, leaf in models.items()
    }
    return {**first, **others, WEIGHTS + space: weights}


def with_own(model: Model, own: Model) -> Model:
    """Give clients tensors of their own for ``Method.predict``, a function of the outputs.

    Args:
        model: The model, ``(clients, ...)``, which is no mixture.
        own: The tensors by name, ``(clients, ...)``.

    Raises:
        ValueError: If the model is a mixture, or already has such tensors.
    """
    if is_mixed(model):
        raise ValueError(
            "Expected one model for a function of its outputs, but got one whose outputs are "
            "changed already. Use a method whose clients predict by one model."
        )
    return {**model, **{OWN + name: leaf for name, leaf in own.items()}}


@dataclass(frozen=True)
class Predictor:
    """A function of a model's outputs.

    Args:
        own: A client's tensors.
        function: The function; None where it isn't known.
    """

    own: Model
    function: Prediction | None = None

    @property
    def what(self) -> str:
        """The effect on outputs, for messages."""
        return "changes the model's outputs by a function"

    def __call__(self, outputs: list[Any], features: Any) -> Any:
        """Return the function's outputs of the only model.

        Raises:
            TypeError: If the function isn't known, as in training.
        """
        if self.function is None:
            raise TypeError(
                "Expected models to train that are plain, but got one that changes its outputs by "
                "a function. Use a method with a global model, or one whose clients predict by "
                "one model."
            )
        return self.function(outputs[0], features, self.own)


@dataclass(frozen=True)
class Mix:
    """The models besides the first, and how outputs are mixed.

    Args:
        others: The other models.
        weights: The first model's share, ``()``, or the weights of an ensemble, ``(K,)``; with
            clients in front where the models have them.
        space: What an ensemble averages; None for two models with a share.
    """

    others: tuple[Model, ...]
    weights: Tensor
    space: Space | None = None

    @property
    def what(self) -> str:
        """The effect on outputs, for messages."""
        count = "two" if len(self.others) == 1 else str(len(self.others) + 1)
        return f"mixes the outputs of {count}"

    def __call__(self, outputs: list[Any], features: Any = None) -> Any:
        """Mix the outputs of all models, the first one's first."""
        weights = self.weights.to(outputs[0])
        if self.space is None:
            return weights * outputs[0] + (1 - weights) * outputs[1]
        if self.space != "outputs":
            if outputs[0].ndim < 2:
                raise ValueError(
                    "Expected outputs to be logits (batch, classes, ...), as probabilities are "
                    f"averaged, but got {tuple(outputs[0].shape)}. Average outputs instead."
                )
            outputs = [output.log_softmax(1) for output in outputs]
        stacked = torch.stack(outputs, -1)
        if self.space == "probabilities":
            return torch.logsumexp(stacked + weights.log(), -1)
        return (stacked * weights).sum(-1)


def is_mixed(model: Model) -> bool:
    """Whether it is more than a model: a mixture, an ensemble, or one with tensors of its own."""
    return any(name.startswith(OTHER) for name in model)


def parts(model: Model) -> tuple[Model, Mix | Predictor | None]:
    """Split into the first model and the rest, which is None for a plain model."""
    if not is_mixed(model):
        return model, None
    first = {name: leaf for name, leaf in model.items() if not name.startswith(OTHER)}
    rest = {
        name.removeprefix(OTHER): leaf for name, leaf in model.items() if name.startswith(OTHER)
    }
    own = {name.removeprefix(OWN): leaf for name, leaf in model.items() if name.startswith(OWN)}
    if own:
        return first, Predictor(own)
    if SHARE in model:
        share = rest.pop(SHARE.removeprefix(OTHER))
        return first, Mix((rest,), share)
    name = next(name for name in model if name.startswith(WEIGHTS))
    weights, count = model[name], model[name].shape[-1]
    others = tuple({n: rest[f"{k}:{n}"] for n in first} for k in range(1, count))
    space: Any = name.removeprefix(WEIGHTS)
    return first, Mix(others, weights, space)


def shielded(model: Model, buffers: Iterable[str]) -> Model:
    """Copy the other models' buffers, which a forward pass in training mode would change."""
    if not is_mixed(model):
        return model
    constant = frozenset(buffers)
    copies = {
        name: leaf.clone(memory_format=torch.contiguous_format)
        for name, leaf in model.items()
        if name.startswith(OTHER) and name.rpartition(":")[2] in constant
    }
    return {**model, **copies}


class MixedForward:
    """A replacement of a module's ``forward`` that changes its outputs.

    Args:
        module: The module, which holds the first model.
        mix: The other models and the weights, or the function, without client axis.

    Attributes:
        calls: Number of calls.
    """

    def __init__(self, module: L.LightningModule, mix: Mix | Predictor) -> None:
        self.module, self.mix = module, mix
        at = places(module)
        self.others = [
            {place: leaf for name, leaf in other.items() for place in at[name]}
            for other in (mix.others if isinstance(mix, Mix) else ())
        ]
        self.original = module.forward
        self.calls = 0
        self._inside = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mixed outputs of all models, or the function's.

        Raises:
            TypeError: If outputs are mixed that are no tensors.
        """
        if self._inside:
            return self.original(*args, **kwargs)
        self.calls += 1
        features: list[Any] = []
        head = getattr(self.module, "head", None)
        hooks = []
        if isinstance(self.mix, Predictor) and isinstance(head, nn.Module):
            hooks = [head.register_forward_pre_hook(lambda _, given: features.append(given[0]))]
        try:
            outputs = [self.original(*args, **kwargs)]
        finally:
            for hook in hooks:
                hook.remove()
        if self.others and not isinstance(outputs[0], Tensor):
            raise TypeError(
                "Expected `forward` to return a tensor, since outputs of models are mixed, but got "
                f"{type(outputs[0]).__name__}. Return a tensor, or mix parameters."
            )
        self._inside = True
        try:
            for other in self.others:
                device = outputs[0].device
                here = {name: leaf.to(device) for name, leaf in other.items()}
                outputs.append(functional_call(self.module, here, args, kwargs, tie_weights=False))
        finally:
            self._inside = False
        return self.mix(outputs, features[-1] if features else None)


def excuse(module: L.LightningModule) -> None:
    """Count a call for a step that skips its minibatch without calling the module."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, MixedForward):
        forward.calls += 1


@contextmanager
def mixed_outputs(module: L.LightningModule, mix: Mix | Predictor | None) -> Iterator[None]:
    """Make the module return mixed outputs, or a function's, inside a ``with`` block.

    Raises:
        RuntimeError: If the module is never called, which would ignore them.
    """
    if mix is None:
        yield
        return
    forward = MixedForward(module, mix)
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
    if not forward.calls:
        raise RuntimeError(
            f"Expected the steps of {type(module).__name__} to call the module itself, so that "
            "outputs of models can be mixed. Write `self(inputs)` in them, or mix parameters."
        )
