"""Small data and networks for the engines' tests, and the comparison of the two engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.operators import OperatorMode
from lightning_pfl.methods import FedAvg
from lightning_pfl.methods.base import Method
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.rounds import LocalRound, assert_trees_close, local_round

SIZES = (1, 0, 5, 13, 2)
CLASSES = 3
OPTIMIZERS: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "Adam": torch.optim.Adam,
    "AdamW": partial(torch.optim.AdamW, amsgrad=True),
    "RMSprop": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
}
"""Every elementwise optimizer, with as many buffers as it may have."""


def image_clients(
    sizes: Sequence[int] = SIZES,
    batch_size: int = 4,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> FederatedTensorDataset:
    """Random 5x5 pictures; ``sizes[k]`` of them on client k, scattered over the pool."""
    generator = torch.Generator().manual_seed(3)
    total = sum(sizes)
    x = torch.randn(total, 1, 5, 5, generator=generator, dtype=dtype)
    y = torch.randint(CLASSES, (total,), generator=generator)
    positions = torch.randperm(total, generator=generator).split(list(sizes))
    return FederatedTensorDataset(
        (x, y), positions, batch_size=batch_size, **{"shuffle": True, **settings}
    )


class Recurrent(nn.Module):
    """Rows of a picture through an LSTM of four units, which only a gradient can batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the state after the last row."""
        out: Tensor = self.lstm(x.squeeze(1))[0][:, -1]
        return out


def cnn(
    norm: bool = True, dropout: float = 0.0, dtype: torch.dtype = torch.float64, **settings: Any
) -> PersonalizedModule:
    """Convolution, BatchNorm2d (which trains on a single picture as well), a hidden layer, a
    head."""
    torch.manual_seed(1)
    # A bias before BatchNorm has a gradient of zero, of which Adam would divide the rounding errors
    # by each other.
    layers: list[nn.Module] = [nn.Conv2d(1, 3, 3, bias=not norm)]
    layers += [nn.BatchNorm2d(3)] if norm else []
    layers += [nn.ReLU()]
    layers += [nn.Dropout(dropout)] if dropout else []
    backbone = nn.Sequential(*layers, nn.Flatten(), nn.Linear(27, 4), nn.Tanh())
    rates = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}
    # An optimizer that a function makes has its own.
    options = settings if callable(settings.get("optimizer")) else {**rates, **settings}
    return PersonalizedModule(backbone, nn.Linear(4, CLASSES), **options).to(dtype)


def compare(
    make_module: Callable[[], Any],
    data: Any,
    make_method: Callable[[], Method] = lambda: FedAvg(local_epochs=2),
    chunk_sizes: Iterable[int | None] = (3,),
    rtol: float = 1e-10,
    settings: dict[str, Any] | None = None,
    clients: Sequence[int] | None = None,
    engine: str = "vectorized",
    **options: Any,
) -> LocalRound:
    """Run a round with an engine and the reference, require equal results, and return the latter's.

    By default in chunks of three clients, so that there are several of several.

    Everything that leaves the engine is compared: uploads, client states, logged values, losses and
    the server after them.
    """

    def run(engine: Any, chunk_size: int | None = None, **options: Any) -> LocalRound:
        flags = EngineSettings(chunk_size=chunk_size, **(settings or {}))
        torch.manual_seed(2)  # every run starts from the same parameters
        return local_round(
            make_method(), make_module(), data, engine, clients, settings=flags, **options
        )

    expected = run("reference")
    for chunk_size in chunk_sizes:
        actual = run(engine, chunk_size, **options)
        for got, want in (
            (actual.result.uploads, expected.result.uploads),
            (actual.result.client_state, expected.result.client_state),
            (actual.result.logs, expected.result.logs),
            ({"loss": actual.result.loss}, {"loss": expected.result.loss}),
            (actual.server, expected.server),
        ):
            assert_trees_close(got, want, rtol=rtol, atol=rtol)
    return expected


def moved(outcome: LocalRound, name: str) -> list[bool]:
    """Which clients' entry ``name`` differs from what they began with."""
    start = outcome.received["model"].get(name)
    start = outcome.before["model"][name] if start is None else start
    return [
        not torch.equal(now, then) for now, then in zip(outcome.models[name], start, strict=True)
    ]


class Ran(OperatorMode):
    """Notes the names of operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))
