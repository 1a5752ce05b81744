"""The clients' losses as functions of parameter vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_pfl.data.datasets import FederatedTensorDataset


class Losses(Protocol):
    """Twice differentiable losses :math:`f_i`, one per client."""

    def value(self, models: Tensor) -> Tensor:
        """Compute :math:`f_i(x_i)`, ``(clients,)``, at ``(clients, dim)``."""

    def gradient(self, models: Tensor) -> Tensor:
        r"""Compute :math:`\nabla f_i(x_i)`, ``(clients, dim)``."""

    def hessian(self, models: Tensor) -> Tensor:
        r"""Compute :math:`\nabla^2 f_i(x_i)`, ``(clients, dim, dim)``."""


class ClientLosses:
    r"""The mean loss of a module over each client's samples.

    A model is the vector of all parameters, in the order of the module's ``named_parameters``.

    Args:
        module: A module with ``per_sample``, such as a PersonalizedModule, without dropout and
            BatchNorm. It must only read the batch and the parameters.
        data: The clients' samples.
        dtype: Type of the computation.

    Raises:
        TypeError: If the module has no ``per_sample``.
        ValueError: If a client has no samples.
    """

    def __init__(
        self, module: Any, data: FederatedTensorDataset, dtype: torch.dtype = torch.float64
    ) -> None:
        if not callable(getattr(module, "per_sample", None)):
            raise TypeError(
                "Expected `module` to have `per_sample`, but got "
                f"{type(module).__name__}. Use a PersonalizedModule."
            )
        if not (data.num_samples > 0).all():
            raise ValueError(
                "Expected every client to have samples, but got num_samples="
                f"{data.num_samples.tolist()}. Use `data.subset` to leave the others out."
            )
        self.num_clients, self.dtype = data.num_clients, dtype
        self._recorded: dict[str, Callable[[Tensor], Tensor]] = {}
        self._call = _PerSample(module)
        self._shapes = {name: p.shape for name, p in module.named_parameters()}
        longest = int(data.num_samples.max())
        at = torch.arange(longest).expand(self.num_clients, longest)
        self._mask = (at < data.num_samples.unsqueeze(1)).to(dtype)
        rows = torch.stack([torch.cat([i, i[:1].expand(longest - len(i))]) for i in data.indices])
        fields = tuple(field[rows.flatten()] for field in data.fields)
        fields = data.transform(fields) if data.transform is not None else fields
        self._batch = tuple(
            (f.to(dtype) if f.is_floating_point() else f).unflatten(0, rows.shape) for f in fields
        )

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return sum(shape.numel() for shape in self._shapes.values())

    def value(self, models: Tensor) -> Tensor:
        """Compute :math:`f_i(x_i)`, ``(clients,)``, at ``(clients, dim)``."""
        return self._run("value", self._loss, models)

    def gradient(self, models: Tensor) -> Tensor:
        r"""Compute :math:`\nabla f_i(x_i)`, ``(clients, dim)``."""
        return self._run("gradient", torch.func.grad(self._loss), models)

    def hessian(self, models: Tensor) -> Tensor:
        r"""Compute :math:`\nabla^2 f_i(x_i)`, ``(clients, dim, dim)``."""
        function = torch.func.jacrev(torch.func.grad(self._loss))
        return self._run("hessian", function, models)

    def _run(self, name: str, function: Callable[..., Tensor], models: Tensor) -> Tensor:
        """Record the operators at the first call and replay them, as solvers call very often."""
        from torch.fx.experimental.proxy_tensor import make_fx

        if name not in self._recorded:
            batched = torch.vmap(function)
            self._recorded[name] = make_fx(lambda x: batched(x, self._batch, self._mask))(models)
        found: Tensor = self._recorded[name](models)
        return found

    def _loss(self, model: Tensor, batch: Any, mask: Tensor) -> Tensor:
        parts = model.split([shape.numel() for shape in self._shapes.values()])
        named = zip(self._shapes.items(), parts, strict=True)
        state = {f"module.{name}": part.view(shape) for (name, shape), part in named}
        losses: Tensor = torch.func.functional_call(self._call, state, (batch,))
        return (losses * mask).sum() / mask.sum()


class _PerSample(nn.Module):
    """The loss of ``per_sample`` as a forward pass, for ``functional_call``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor:
        loss: Tensor = self.module.per_sample(batch)["loss"]  # type: ignore[operator]
        return loss


class Grouped:
    r"""The summed losses of clusters: :math:`n_k g_k(w_k) = \sum_{i \in C_k} f_i(w_k)`.

    Args:
        losses: The clients' losses.
        labels: Each client's cluster from 0, int64 ``(clients,)``.
    """

    def __init__(self, losses: Losses, labels: Tensor) -> None:
        self.losses, self.labels = losses, labels
        self.count = int(labels.max()) + 1

    def value(self, models: Tensor) -> Tensor:
        """Compute the clusters' losses, ``(clusters,)``, at ``(clusters, dim)``."""
        return self._sum(self.losses.value(models[self.labels]))

    def gradient(self, models: Tensor) -> Tensor:
        """Compute the clusters' gradients, ``(clusters, dim)``."""
        return self._sum(self.losses.gradient(models[self.labels]))

    def hessian(self, models: Tensor) -> Tensor:
        """Compute the clusters' Hessians, ``(clusters, dim, dim)``."""
        return self._sum(self.losses.hessian(models[self.labels]))

    def _sum(self, values: Tensor) -> Tensor:
        total = values.new_zeros(self.count, *values.shape[1:])
        return total.index_add(0, self.labels, values)
