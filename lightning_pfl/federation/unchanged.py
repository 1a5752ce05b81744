"""Results of clients whose models are those of the last evaluation, which stay as they were.

Where a client's personal model is a part of its state, as with ``LocalOnly``, ``Ditto`` or methods
over a graph, and with ``FedMAP`` once it has trained, it changes in the client's own rounds alone.
The others' results are taken from the last evaluation: what would be computed again has the same
bits. Each time one of them of each architecture, or a program of some, is evaluated all the same,
and if that has other values, all are: a layer may read anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.contract.records import Evaluation
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Path, items
from lightning_pfl.data.batch import batch_leaves
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.base import EvaluationWork
from lightning_pfl.engine.fingerprint import Same, fingerprint
from lightning_pfl.federation.architectures import Architecture
from lightning_pfl.federation.state import FederationState

Source = tuple[tuple[str, Path], ...]
"""Each entry of a personal model with its place in the client's state."""


@dataclass(frozen=True)
class Known:
    """An evaluation of some clients.

    Attributes:
        conditions: What its values depend on besides the clients' states.
        writes: Number of each state's last write before it, int64 ``(clients,)``.
        evaluation: The results.
    """

    conditions: tuple[Any, ...]
    writes: Tensor
    evaluation: Evaluation


class UnchangedClients:
    """The last evaluation of each set of clients.

    Attributes:
        enabled: False evaluates all clients.
    """

    enabled = True

    def __init__(self) -> None:
        self._known: dict[Any, Known] = {}
        self._turn, self._compared = 0, False

    def begin(self) -> None:
        """Begin an evaluation of an architecture, perhaps in parts, to compare some results."""
        self._compared = False

    def evaluate(
        self,
        federation: FederationState,
        architecture: Architecture,
        clients: Tensor,
        work: EvaluationWork,
        key: Any,
        run: Callable[[Tensor], Evaluation],
    ) -> Evaluation:
        """Evaluate clients of an architecture, as far as their models aren't those of before.

        Args:
            federation: The federation.
            architecture: The clients' architecture.
            clients: Their ids, int64 ``(clients,)``.
            work: Their evaluation; its models aren't read.
            key: Distinguishes evaluations in one round.
            run: Evaluates the personal models of clients at some positions, int64 ``(some,)``.
        """
        known, everyone = self._known.pop(key, None), torch.arange(len(clients))
        # Outside of a fit, models may be the best ones instead.
        fitting = self.enabled and federation.fitting and len(clients)
        own = _have_own(architecture, clients) if fitting else torch.zeros(0, dtype=torch.bool)
        source = own_parts(federation, architecture, clients[own][:1]) if own.any() else None
        if source is None:
            return run(everyone)
        writes = architecture.client_states.written(architecture.positions(clients))
        groups = architecture.engine.groups(work)
        before = None if groups is None else _conditions(architecture, clients, work, source)
        evaluation = None
        if known is not None and groups is not None and known.conditions == before:
            same = own & (known.writes == writes)
            again = self._to_evaluate(groups, same)
            evaluation = _updated(known.evaluation, again, run)
            # A layer or a loss may read what no key shows: an object, a global name, the epoch.
            if not _same_bits(known.evaluation, evaluation, again & same):
                evaluation = _updated(evaluation, ~again, run)
                self._known.clear()  # nor are those of other parts what they would be now
        if evaluation is None:
            evaluation = run(everyone)
        # Only now an engine knows whether a step draws, or can run at all.
        if architecture.engine.groups(work) is not None:
            conditions = _conditions(architecture, clients, work, source)
            # A step that changes a setting may give other values when it runs again.
            if before is None or before == conditions:
                self._known[key] = Known(conditions, writes, evaluation)
        return evaluation

    def _to_evaluate(self, groups: Tensor, same: Tensor) -> Tensor:
        """Choose the clients to evaluate, whole groups, bool ``(clients,)``.

        Besides clients whose models have changed, there is one other in the first part of an
        architecture's evaluation that has some, to compare its values with those of before.

        Args:
            groups: Number of each client's group, int64 ``(clients,)``.
            same: The clients whose models are those of before, bool ``(clients,)``.
        """
        again = torch.isin(groups, groups[~same])
        if not (self._compared or again.all() or (again & same).any()):
            rest = groups[~again].unique()
            self._turn += 1
            again |= groups == rest[self._turn % len(rest)]
        self._compared |= bool((again & same).any())
        return again


def own_parts(
    federation: FederationState, architecture: Architecture, client: Tensor
) -> Source | None:
    """Find where a client's personal model is in its state; None if it is anything else.

    A method's functions don't branch on values, so that one client stands for all whose models are
    parts of their states.

    Args:
        federation: The federation.
        architecture: The client's architecture.
        client: Its id, int64 ``(1,)``.
    """
    method = architecture.method
    if method.evaluation_phases() or not architecture.client_states.has_entries():
        return None
    client_state = architecture.gather(client, federation.settings.device, evaluated=True)
    info = federation.info(client, max(federation.rounds - 1, 0))
    model = method.personal_model(federation.download(info), client_state, info)
    places = {id(leaf): path for path, leaf in items(client_state)}
    if method.begun_state:  # chosen from what is kept and what is received, with the former's bits
        pairs = [
            (path, leaf, kept)
            for path, kept in items(client_state)
            if (leaf := model.get(path[-1])) is not None
            and (leaf.dtype, leaf.shape) == (kept.dtype, kept.shape)
        ]
        equal = [leaf.eq(kept).all() for _, leaf, kept in pairs]
        found = torch.stack(equal).tolist() if equal else []
        for path, leaf, _ in compress(pairs, found):
            places.setdefault(id(leaf), path)
    if not all(id(leaf) in places for leaf in model.values()):
        return None
    return tuple((name, places[id(leaf)]) for name, leaf in model.items())


def _have_own(architecture: Architecture, clients: Tensor) -> Tensor:
    """Find the clients whose personal models may be parts of their states, bool ``(clients,)``."""
    entry = architecture.method.begun_state
    if not entry:
        return torch.ones(len(clients), dtype=torch.bool)
    states = architecture.client_states
    others = [name for name in states.tree if name != entry]
    begun: Tensor = states.gather(architecture.positions(clients), "cpu", others)[entry]
    return begun


def _conditions(
    architecture: Architecture, clients: Tensor, work: EvaluationWork, source: Source
) -> tuple[Any, ...]:
    """Collect what the clients' values depend on besides their states."""
    module, data = architecture.module, work.data
    assert isinstance(data, FederatedTensorDataset)  # of others, an engine knows no groups
    evaluated = {name for name, _ in source}
    # Entries that the models lack are the module's.
    lacking = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    held = [leaf for name, leaf in lacking.items() if name not in evaluated]
    return (
        source,
        tuple(clients.tolist()),
        tuple(work.clients.tolist()),
        work.limit,
        Same(data),
        Same(data.transform),
        tuple((Same(leaf), leaf._version) for leaf in (*held, *batch_leaves(data.fields))),
        fingerprint(module),
    )


def _same_bits(before: Evaluation, after: Evaluation, at: Tensor) -> bool:
    """Whether some clients, bool ``(clients,)``, have the same values in both evaluations."""
    a, b = before.values, after.values
    if a.keys() != b.keys():
        return False
    # One wait for a device. A NaN isn't equal to itself.
    differ = [
        (a[name] != b[name]) & ~(a[name].isnan() & b[name].isnan()) & send(at, a[name].device)
        for name in a
    ]
    return not differ or not torch.stack(differ).any()


def _updated(before: Evaluation, which: Tensor, run: Callable[[Tensor], Evaluation]) -> Evaluation:
    """Evaluate some clients, bool ``(clients,)``, and replace their results."""
    at = which.nonzero().flatten()
    if not len(at):
        return before
    new = run(at)

    def replaced(old: Tensor | None, values: Tensor | None) -> Tensor:
        like = values if old is None else old
        assert like is not None
        gap = torch.full((len(before.counts),), torch.nan, dtype=torch.float64, device=like.device)
        result, rows = gap if old is None else old.clone(), send(at, like.device)
        found = torch.nan if values is None else send(values, like.device).to(result.dtype)
        result[rows] = found
        return result

    names = dict.fromkeys((*before.values, *new.values))
    return Evaluation(
        {name: replaced(before.values.get(name), new.values.get(name)) for name in names},
        replaced(before.counts, new.counts),
        {**before.options, **new.options},
        orders=before.orders | new.orders,
    )
