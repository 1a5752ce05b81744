"""What FedRep's Figures 1, 3 and 4 have in common: runs on linear regressions, and their risks."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_pfl import FederatedDataModule, FederatedStrategy
from lightning_pfl.data import LinearRepresentation
from lightning_pfl.methods.base import Method
from lightning_pfl.models import LinearRepresentation as Model
from lightning_pfl.solvers.least_squares import least_squares
from lightning_pfl.testing.fitting import quiet_trainer
from recipes.experiments.setting import parser

#: The penalty on heads and on local models that the authors' notebook has.
RIDGE = 1e-5


def train(
    method: Method,
    data: FederatedDataModule,
    rounds: int,
    participation: float = 1.0,
    lr: float = 0.1,
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
    start: Tensor | None = None,
) -> Any:
    """Run a method on the source of a data module; returns the strategy.

    The samples are new in every round if the data module is ``FreshDataModule``. The first
    representation is ``start``, ``(k, d)``; None: the module's random one.
    """
    source: Any = data.source
    L.seed_everything(seed, verbose=False)
    strategy = FederatedStrategy(method, participation, "vectorized", chunk_size=100)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Theorem 1")
        trainer = quiet_trainer(
            strategy,
            rounds,
            limit_val_batches=0,
            reload_dataloaders_every_n_epochs=int(type(data) is not FederatedDataModule),
            callbacks=[*callbacks],
        )
        module = Model(source.dim, source.rank, lr=lr)
        if start is not None:
            module.load_state_dict({**module.state_dict(), "backbone.weight": start})
        trainer.fit(module, data)
    return strategy


def samples_of(source: LinearRepresentation, clients: slice, count: int) -> tuple[Tensor, Tensor]:
    """The first training samples of some clients, ``(clients, count, d)`` and ``(clients, count)``.

    The clients must have equally many, at least ``count``.
    """
    arrays = source.load()
    x, y = (leaf.double() for leaf in arrays.fields)
    chosen = range(source.num_clients)[clients]
    of = [np.flatnonzero(arrays.columns["client"] == k)[:count] for k in chosen]
    rows = torch.from_numpy(np.stack(of))
    return x[rows], y[rows]


def risks(models: Tensor, source: LinearRepresentation, clients: slice) -> Tensor:
    """Half the squared distance of linear models ``(clients, d)`` to the truth, ``(clients,)``.

    It is the expected half squared error on new inputs, without the noise's part.
    """
    basis, heads = source.truth()
    return (models - torch.from_numpy(heads[clients] @ basis.T)).square().sum(1) / 2


def with_heads(basis: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Each client's linear model ``(clients, d)``: a head by least squares on a representation."""
    return least_squares(x @ basis, y, ridge=RIDGE) @ basis.T


def parse(arguments: list[str] | None, title: str, seeds: int = 5) -> argparse.Namespace:
    """Read the command line."""
    options = ("results", "figures", "readme")
    made = parser(title, "Few clients and rounds.", *options, seeds=[*range(seeds)])
    return made.parse_args(arguments)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def short(value: float) -> str:
    """Two digits: 0.25, 0.025, and 2.5e-03."""
    if value < 0.01:
        return f"{value:.1e}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def by_samples(
    expected: Mapping[str, Sequence[str]],
    found: Mapping[str, Sequence[float]],
    samples: Iterable[int],
) -> str:
    """Compare expected and measured values, by method and number of samples."""
    rows = []
    for name, values in found.items():
        pairs = zip(expected[name], values, strict=True)
        rows.append([name, *(f"{wanted} / {short(value)}" for wanted, value in pairs)])
    return table(["expected / measured", *(f"m = {m}" for m in samples)], rows)


def figure(path: Path, width: float, draw: Callable[[Any], None], panels: int = 1) -> None:
    """Draw on one or more axes side by side, and save."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(width, 3.6), dpi=100, layout="constrained")
    draw(drawing.subplots(1, panels, sharey=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path)
