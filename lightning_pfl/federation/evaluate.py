"""Evaluation of the clients' personal models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.contract.records import (
    BestModel,
    Evaluation,
    LogOptions,
    OnClients,
    as_positions_of,
)
from lightning_pfl.core.mixture import Prediction
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model, Tree, is_expanded, total_nbytes
from lightning_pfl.data.datasets import FederatedDataset
from lightning_pfl.engine.base import EvaluationWork
from lightning_pfl.federation.adapt import adapt
from lightning_pfl.federation.architectures import Architecture, naming_architecture
from lightning_pfl.federation.ranks import RankShard, gather_evaluation
from lightning_pfl.federation.state import FederationState
from lightning_pfl.federation.unchanged import UnchangedClients
from lightning_pfl.metrics.history import higher_is_better
from lightning_pfl.metrics.summary import summarize

GLOBAL = "global/"
"""Prefix of the global model's values."""
MEMORY, FEWEST, ON_GPU = 2**24, 8, 8
"""Largest size in bytes of personal models that are built at once, and how many times as large it
is elsewhere than on a CPU, where memory of this size is used again and fresh pages take longer than
copies. Each evaluation reads code and settings of the module again, so that at least 8 models are
built at once if they fit into 4 times this memory."""


# --- the models that are evaluated ----------------------------------------------------------------


def personal_models(federation: FederationState, clients: Tensor) -> Model:
    """Build the models that clients are evaluated with, ``(clients, ...)``.

    This is the method's ``personal_model`` of the current download and client state, trained by its
    ``evaluation_phases``, if any; outside of a fit the best one, where it is kept. A collective
    call with the same clients on all processes; each builds the models of its shard.

    Args:
        federation: The federation.
        clients: Ids, int64 ``(clients,)``.
    """
    shard = federation.shard(clients)
    mine = clients[shard.index]
    models = _models_of_shard(federation, mine) if len(mine) else {}
    if not federation.fitting:
        models = _with_best(models, federation, mine)
    gathered: Model = shard.all_gather(models)
    return gathered


def _with_best(models: Model, federation: FederationState, clients: Tensor) -> Model:
    """Replace the models of clients by their best ones, where they are kept."""
    ids = clients.tolist() if federation.best else []
    at = [row for row, client in enumerate(ids) if client in federation.best]
    if not at:
        return models
    best = _stacked([federation.best_model(ids[row]) for row in at])
    index = torch.tensor(at)
    return {
        name: leaf.clone().index_copy_(0, index.to(leaf.device), best[name].to(leaf))
        for name, leaf in models.items()
    }


def _stacked(models: list[Model]) -> Model:
    return {name: torch.stack([model[name] for model in models]) for name in models[0]}


def keep_best(
    federation: FederationState, clients: Tensor, values: Tensor, higher: bool, round: int
) -> None:
    """Keep the personal models of clients for which a round is the best so far.

    All processes call it alike; each keeps the models of its own clients. Of equal rounds the first
    counts, and NaN is never best.

    Args:
        federation: The federation.
        clients: Ids, int64 ``(clients,)``.
        values: What the round is judged by, ``(clients,)``.
        higher: Whether larger values are better.
        round: The round, from 0.
    """
    found = dict(zip(clients.tolist(), values.tolist(), strict=True))
    sign = 1 if higher else -1
    better = [
        client
        for client, value in found.items()
        if not math.isnan(value)
        and (client not in federation.best or sign * (value - federation.best[client].value) > 0)
    ]
    ids = torch.tensor(better, dtype=torch.int64)
    mine = ids[federation.ranks.shard(federation.owners[ids]).index]
    federation.best |= {client: BestModel(round, found[client], {}) for client in better}
    with federation.ranks.without_communication():
        for architecture, at in federation.by_architecture(mine) if len(mine) else ():
            for some in mine[at].split(models_at_a_time(architecture)):
                models = _models_of_shard(federation, some)
                for row, client in enumerate(some.tolist()):
                    model = {
                        name: leaf[row].detach().cpu().clone() for name, leaf in models.items()
                    }
                    federation.best[client].model.update(model)


def _models_of_shard(federation: FederationState, clients: Tensor) -> Model:
    federation.require_module()
    architecture = federation.architecture_of(clients)
    method = architecture.method
    device = next(architecture.module.parameters()).device
    info = federation.info(clients, max(federation.rounds - 1, 0))
    client_state = architecture.gather(clients, device, evaluated=True)
    received = federation.download(info)
    models = method.personal_model(received, client_state, info)
    phases = method.evaluation_phases()
    if not phases:
        return models

    def step(state: Tree, minibatches: Any, client: Any) -> Tree:
        moved = method.evaluation_step(state["given"], state["model"], minibatches, client)
        return {**state, "model": moved}

    return adapt(federation, models, clients, phases, step=step, given=received)


def evaluate_clients(
    federation: FederationState,
    models_of: Callable[[Tensor], Model],
    clients: Tensor,
    rows: Tensor,
    data: FederatedDataset,
    step: str,
    limit: float | int,
    on_clients: OnClients | None = None,
    predict: Prediction | None = None,
    dataloader_idx: int | None = None,
    unchanged: UnchangedClients | None = None,
    own: bool = True,
) -> Evaluation:
    """Run a step of the module for clients, building their models in chunks.

    A collective call with the same clients on all processes; each evaluates its shard, and all get
    all results.

    Args:
        federation: The federation.
        models_of: Builds the models of some ids; with several processes, of their shard.
        clients: Ids, int64 ``(clients,)``.
        rows: Their rows in ``data``.
        data: The split.
        step: ``"validation_step"``, ``"test_step"`` or ``"predict_step"``.
        limit: Minibatches per client: a count (int) or a fraction (float).
        on_clients: Called with the positions in ``clients`` that are done.
        predict: The function of the outputs of models with tensors of their own; None: the
            method's.
        dataloader_idx: The number of the data set, where there are several.
        unchanged: Earlier results of clients, for :func:`personal_models`; None to evaluate all.
        own: Whether models are clients' own; one for all takes no memory for each.
    """
    work = (federation, models_of, clients, rows, data, step, limit)
    shard, found = evaluate_shard(*work, on_clients, predict, dataloader_idx, unchanged, own)
    return gather_evaluation(shard, found)[0]


def evaluate_shard(
    federation: FederationState,
    models_of: Callable[[Tensor], Model],
    clients: Tensor,
    rows: Tensor,
    data: FederatedDataset,
    step: str,
    limit: float | int,
    on_clients: OnClients | None = None,
    predict: Prediction | None = None,
    dataloader_idx: int | None = None,
    unchanged: UnchangedClients | None = None,
    own: bool = True,
) -> tuple[RankShard, Evaluation]:
    """Evaluate this process's shard of some clients, as :func:`evaluate_clients` does.

    Returns:
        The shard, dealt by samples where clients may be evaluated anywhere, and its results.
    """
    shard = federation.shard(clients, data.num_samples[rows])
    round = federation.rounds - 1 if federation.rounds else None
    clients, rows = clients[shard.index], rows[shard.index]
    found, order = [], []
    with federation.ranks.without_communication():
        # A process may have no clients, and splitting an empty tensor returns one empty part.
        for architecture, at in federation.by_architecture(clients) if len(clients) else ():
            if unchanged is not None:
                unchanged.begin()
            positions = torch.arange(len(clients))[at]
            function = predict or architecture.method.predict
            together = models_at_a_time(architecture) if own else len(clients)
            for part, some in enumerate(positions.split(together)):
                work = EvaluationWork(
                    {}, rows[some], data, step, limit, round, function, dataloader_idx
                )

                def run(
                    at: Tensor,
                    architecture: Architecture = architecture,
                    some: Tensor = some,
                    work: EvaluationWork = work,
                ) -> Evaluation:
                    models = models_of(clients[some[at]])
                    chosen = replace(work, models=models, clients=work.clients[at])
                    listener = as_positions_of(on_clients, some[at])
                    return architecture.engine.evaluate(chosen, listener)

                with naming_architecture(architecture, data.names, rows[some], step, round):
                    if unchanged is None:
                        found.append(run(torch.arange(len(some))))
                    else:
                        key = (step, dataloader_idx, architecture.name, part)
                        found.append(
                            unchanged.evaluate(
                                federation, architecture, clients[some], work, key, run
                            )
                        )
                order.append(some)
    return shard, join(found, order)


def models_at_a_time(architecture: Architecture) -> int:
    """Count the personal models of an architecture that are built at once."""
    held = architecture.client_states.row_nbytes(architecture.not_evaluated)
    if architecture.method.evaluation_phases():
        held = total_nbytes(dict(architecture.module.named_parameters()))
    memory = MEMORY * (1 if next(architecture.module.parameters()).device.type == "cpu" else ON_GPU)
    fit, more = (size // max(held, 1) for size in (memory, 4 * memory))
    return int(max(1, fit, min(FEWEST, more)))


def join(parts: list[Evaluation], order: list[Tensor]) -> Evaluation:
    """Join evaluations of parts of a list of clients.

    Args:
        parts: The results.
        order: Positions of each part's clients, int64; together all positions once.
    """
    if len(parts) <= 1:
        return parts[0] if parts else Evaluation()
    position = torch.cat(order).argsort()

    def joined(found: list[Tensor | None]) -> Tensor:
        device = next(one.device for one in found if one is not None)
        each = [
            torch.full((len(part.counts),), torch.nan) if one is None else one
            for one, part in zip(found, parts, strict=True)
        ]
        return torch.cat([send(one, device) for one in each]).index_select(
            0, send(position, device)
        )

    names = dict.fromkeys(name for part in parts for name in part.values)
    predictions = [predictions for part in parts for predictions in part.predictions]
    return Evaluation(
        {name: joined([part.values.get(name) for part in parts]) for name in names},
        joined([part.counts for part in parts]),
        {name: options for part in parts for name, options in part.options.items()},
        [predictions[at] for at in position.tolist()] if predictions else [],
        frozenset().union(*(part.orders for part in parts)),
    )


def is_global(models: Model, shared: Model) -> bool:
    """Whether the clients' models are views of the global model, which is then evaluated once."""
    return models.keys() == shared.keys() and all(
        is_expanded(leaf) and leaf.data_ptr() == shared[name].data_ptr()
        for name, leaf in models.items()
    )


def summaries(evaluation: Evaluation, prefix: str = "", share: float = 1.0) -> dict[str, float]:
    """Compute statistics over clients: ``val_acc`` is the mean, and ``val_acc/std`` and so on.

    Args:
        evaluation: The clients' results.
        prefix: Prefix of the names.
        share: Share of the clients that was drawn, in (0, 1].
    """
    found = {}
    for key, values in evaluation.values.items():
        better = direction(key, evaluation)
        for name, number in summarize(values, evaluation.counts, better, share).items():
            found[f"{prefix}{key}/{name}" if name else f"{prefix}{key}"] = number
    return found


def direction(key: str, evaluation: Evaluation) -> bool:
    """Whether larger is better, according to the logged torchmetrics object or else the name."""
    known = evaluation.options.get(key, LogOptions()).higher_is_better
    return higher_is_better(key) if known is None else known
