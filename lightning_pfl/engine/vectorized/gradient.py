"""Gradients of many clients' losses in one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_pfl.contract.view import Objective
from lightning_pfl.core.tree import Model, floats, is_expanded
from lightning_pfl.engine.program import ClientProgram, NotVectorizableError, sample_gradient
from lightning_pfl.engine.terms import Term
from lightning_pfl.engine.vectorized.metrics import ClientMetrics

Transform = Literal["forward", "grad"]
Inputs = dict[str, Any]
"""``data`` and optionally ``key``, ``mask`` and ``features``, leaves ``(clients, ...)``."""
SKIPS = "`training_step` skips a minibatch"
Result = tuple[Model, Tensor, dict[str, Tensor]]
"""Gradients ``(clients, ...)``, losses ``(clients,)``, logged values ``(clients,)``."""


class BatchedGradient:
    """The gradient of each client's training loss.

    Args:
        program: The user's step as a function.
        metrics: The module's torchmetrics objects.
        transform: ``"forward"``: ``vmap`` of the forward pass and one ordinary backward pass;
            ``"grad"``: ``vmap`` of the gradient.
        unreached: Error text for a loss that depends on no trainable parameter.
    """

    def __init__(
        self,
        program: ClientProgram,
        metrics: ClientMetrics,
        transform: Transform,
        unreached: Callable[[], str],
    ) -> None:
        self.program, self.metrics = program, metrics
        self.transform, self.unreached = transform, unreached
        self.number = 0
        self.objective: Objective | None = None

    def __call__(self, trained: Model, fixed: Model, inputs: Inputs) -> Result:
        """Compute gradients with respect to ``trained``, at ``{**fixed, **trained}``."""
        if self.transform == "forward":
            return self._forward(trained, fixed, inputs)
        return self._grad(trained, fixed, inputs)

    def _loss(
        self, trained: Model, fixed: Model, inputs: Inputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.metrics.begin()
        loss, logged = self.program.training_loss(
            {**fixed, **trained},
            inputs["data"],
            inputs.get("key"),
            self.number,
            inputs.get("mask"),
            inputs.get("features"),
            None,
            self._term(inputs),
        )
        if loss is None:
            raise NotVectorizableError(SKIPS)
        return loss, self.metrics.take(logged)

    def _term(self, inputs: Inputs) -> Term | None:
        if "given" not in inputs:
            return None
        data = (inputs["given"], inputs.get("weights"), inputs["sample_data"])
        return Term(self.objective, *data)

    def run(self, function: Callable[[Model, Inputs], Any], model: Model, inputs: Inputs) -> Any:
        """Run a function of each client's model and inputs, without gradients."""
        with torch.no_grad():
            if self.transform == "grad":
                return torch.vmap(inside_gradient(function))(model, inputs)
            plain, dims = unbatch(model)
            return torch.vmap(function, in_dims=(dims, 0))(plain, inputs)

    def sample_grads(self, trained: Model, fixed: Model, inputs: Inputs) -> Model:
        """Compute the gradients of the samples' losses, ``(clients, samples, ...)``."""
        if self.transform == "grad":
            raise NotVectorizableError("gradients of single samples need ordinary backward passes")

        def losses(trained: Model, fixed: Model, inputs: Inputs) -> Tensor:
            given = (inputs["data"], inputs.get("key"), inputs.get("mask"))
            return self.program.sample_losses({**fixed, **trained}, *given, training=True)

        trained = {name: leaf.detach().requires_grad_() for name, leaf in trained.items()}
        fixed, dims = unbatch(fixed)
        found = torch.vmap(losses, in_dims=(0, dims, 0))(trained, fixed, inputs).sum(0)
        grads = [sample_gradient(loss, trained) for loss in found]
        return {name: torch.stack([one[name] for one in grads], 1) for name in trained}

    def _forward(self, trained: Model, fixed: Model, inputs: Inputs) -> Result:
        trained = {name: leaf.detach().requires_grad_() for name, leaf in trained.items()}
        fixed, dims = unbatch(fixed)
        loss, logged = torch.vmap(self._loss, in_dims=(0, dims, 0))(trained, fixed, inputs)
        return self._differentiated(loss.sum(), trained), loss.detach(), logged

    def _differentiated(self, loss: Tensor, trained: Model) -> Model:
        try:
            found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        except RuntimeError as cause:
            if loss.requires_grad:
                raise
            raise ValueError(self.unreached()) from cause
        # A parameter that the loss doesn't reach has no gradient, so that weight decay doesn't
        # move it, as in torch.
        return {n: g for n, g in zip(trained, found, strict=True) if g is not None}

    def loss(self, model: Model, inputs: Inputs) -> Tensor:
        """Compute the losses ``(clients,)`` of minibatches, without augmentation and gradients."""
        losses: Tensor = self.run(self._measured, model, inputs)
        return losses

    def _measured(self, model: Model, inputs: Inputs) -> Tensor:
        given = (inputs["data"], inputs.get("key"), self.number, inputs.get("mask"))
        loss = self.program.measured_loss(model, *given)
        if loss is None:
            raise NotVectorizableError(SKIPS)
        return loss

    def _grad(self, trained: Model, fixed: Model, inputs: Inputs) -> Result:
        def nothing(trained: Model, fixed: Model, inputs: Inputs) -> tuple[Tensor, Result]:
            loss, logged = self._loss(trained, fixed, inputs)
            grads = self._differentiated(loss, trained)
            return torch.zeros_like(loss), (grads, loss.detach(), logged)

        # An outer gradient of zeros, since torch's own inner gradient can't distinguish a parameter
        # that the loss doesn't reach, which weight decay must not move, from one with gradient
        # zero. Not unbatched: recurrent layers write in place into results of their weights.
        batched = torch.vmap(torch.func.grad(nothing, has_aux=True))
        result: Result = batched(trained, fixed, inputs)[1]
        return result


def unbatch(model: Model) -> tuple[Model, dict[str, int | None]]:
    """Replace expanded leaves by the tensor behind them, with ``in_dims`` for ``vmap``."""
    dims = {name: None if is_expanded(leaf) else 0 for name, leaf in model.items()}
    return {n: leaf[0] if is_expanded(leaf) else leaf for n, leaf in model.items()}, dims


def inside_gradient(function: Callable[[Model, Any], Any]) -> Callable[[Model, Any], Any]:
    """Run a function of a model and data inside an unused gradient.

    Only there torch decomposes some layers (LSTM, GRU) into batchable operators.
    """

    def loss(weights: Model, others: Model, data: Any) -> tuple[Tensor, Any]:
        nothing = torch.stack([leaf.sum() for leaf in weights.values()]).sum() * 0.0
        return nothing, function({**others, **weights}, data)

    def run(model: Model, data: Any) -> Any:
        weights = floats(model)
        others = {name: leaf for name, leaf in model.items() if name not in weights}
        with torch.enable_grad():
            return torch.func.grad(loss, has_aux=True)(weights, others, data)[1]

    return run
