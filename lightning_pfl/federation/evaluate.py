"""The models that clients are evaluated with, and their evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.contract.records import Evaluation, LogOptions, OnClients, as_positions_of
from lightning_pfl.core.tree import Model, is_expanded, whole_nbytes
from lightning_pfl.data.datasets import FederatedDataset
from lightning_pfl.engine.base import EvaluationWork
from lightning_pfl.federation.adapt import adapt
from lightning_pfl.federation.architectures import Architecture, naming_architecture
from lightning_pfl.federation.ranks import gather_evaluation
from lightning_pfl.federation.state import FederationState
from lightning_pfl.metrics.history import higher_is_better
from lightning_pfl.metrics.summary import summarize

GLOBAL = "global/"
"""Prefix of the global model's values."""
MEMORY = 2**28
"""Bytes of personal models that are built at a time; more clients are evaluated in several goes."""


# --- the models that are evaluated ----------------------------------------------------------------


def personal_models(federation: FederationState, clients: Tensor) -> Model:
    """The models that clients are evaluated with, ``(clients, ...)``.

    The method's ``personal_model`` of what the server sends now and what the client remembers, then
    the local training of ``evaluation_phases`` where the method has any.

    Several processes call it together, with the same clients; each builds the models of its own.

    Args:
        federation: The strategy.
        clients: Ids, int64 ``(clients,)``.
    """
    shard = federation.shard(clients)
    mine = clients[shard.index]
    models: Model = shard.all_gather(_models_of_shard(federation, mine) if len(mine) else {})
    return models


def _models_of_shard(federation: FederationState, clients: Tensor) -> Model:
    federation.require_module()
    architecture = federation.architecture_of(clients)
    method = architecture.method
    device = next(architecture.module.parameters()).device
    info = federation.info(clients, max(federation.rounds - 1, 0))
    client_state = architecture.gather(clients, device, edges=False)
    models = method.personal_model(federation.download(info), client_state, info)
    phases = method.evaluation_phases()
    if not phases:
        return models

    def step(model: Model, minibatches: Any, client: Any, _: Tensor) -> Model:
        return method.evaluation_step(model, minibatches, client)

    return adapt(federation, models, clients, phases, step=step)


def evaluate_clients(
    federation: FederationState,
    models_of: Callable[[Tensor], Model],
    clients: Tensor,
    rows: Tensor,
    data: FederatedDataset,
    step: str,
    limit: float | int,
    on_clients: OnClients | None = None,
) -> Evaluation:
    """Run a step of the module for clients, building their models a chunk at a time.

    Several processes call it together, with the same clients; each evaluates its own, and has the
    results of all.

    Args:
        federation: The strategy.
        models_of: Gives the models of some ids; with several processes, of its own clients.
        clients: Ids, int64 ``(clients,)``.
        rows: Their rows in ``data``.
        data: The split.
        step: ``"validation_step"``, ``"test_step"`` or ``"predict_step"``.
        limit: Minibatches per client: a count (int) or a fraction (float).
        on_clients: Told the positions in ``clients`` that are done.
    """
    shard = federation.shard(clients)
    round = federation.rounds - 1 if federation.rounds else None
    clients, rows = clients[shard.index], rows[shard.index]
    found, order = [], []
    with federation.ranks.without_communication():
        # A process may have no clients, and splitting nothing gives one empty part.
        for architecture, at in federation.by_architecture(clients) if len(clients) else ():
            positions = torch.arange(len(clients))[at]
            for some in positions.split(models_at_a_time(architecture)):
                with naming_architecture(architecture, data.names, rows[some], step, round):
                    models = models_of(clients[some])
                    work = EvaluationWork(models, rows[some], data, step, limit, round)
                    listener = as_positions_of(on_clients, some)
                    found.append(architecture.engine.evaluate(work, listener))
                order.append(some)
    return gather_evaluation(shard, join(found, order))


def models_at_a_time(architecture: Architecture) -> int:
    """How many personal models of a group fit into :data:`MEMORY`."""
    held = architecture.client_states.row_nbytes()
    if architecture.method.evaluation_phases():
        held = whole_nbytes(dict(architecture.module.named_parameters()))
    return int(max(1, MEMORY // max(held, 1)))


def join(parts: list[Evaluation], order: list[Tensor]) -> Evaluation:
    """One evaluation of the clients of all parts.

    Args:
        parts: The results.
        order: Positions of each part's clients, int64; together all positions once.
    """
    if len(parts) <= 1:
        return parts[0] if parts else Evaluation()
    position = torch.cat(order).argsort()
    names = dict.fromkeys(name for shard in parts for name in shard.values)
    predictions = [predictions for shard in parts for predictions in shard.predictions]
    return Evaluation(
        {
            name: torch.cat(
                [p.values.get(name, torch.full((len(p.counts),), torch.nan)).cpu() for p in parts]
            )[position]
            for name in names
        },
        torch.cat([shard.counts for shard in parts])[position],
        {name: options for shard in parts for name, options in shard.options.items()},
        [predictions[at] for at in position.tolist()] if predictions else [],
    )


def is_global(models: Model, shared: Model) -> bool:
    """Whether the clients' models are views of the global model: one evaluation serves both."""
    return models.keys() == shared.keys() and all(
        is_expanded(leaf) and leaf.data_ptr() == shared[name].data_ptr()
        for name, leaf in models.items()
    )


def summaries(evaluation: Evaluation, prefix: str = "") -> dict[str, float]:
    """Statistics over clients: ``val_acc`` is the mean, beside it ``val_acc/std`` and so on."""
    found = {}
    for key, values in evaluation.values.items():
        better = direction(key, evaluation)
        for name, number in summarize(values, evaluation.counts, better).items():
            found[f"{prefix}{key}/{name}" if name else f"{prefix}{key}"] = number
    return found


def direction(key: str, evaluation: Evaluation) -> bool:
    """Whether larger is better: as the logged torchmetrics object says, else by the name."""
    known = evaluation.options.get(key, LogOptions()).higher_is_better
    return higher_is_better(key) if known is None else known
