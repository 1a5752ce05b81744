"""Client-side rounds without a Trainer, for tests of engines and methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_pfl.contract.known import Known
from lightning_pfl.contract.records import ClientInfo, LocalResult
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model, Tree, expand, repeat, rows, tmap
from lightning_pfl.data.datasets import FederatedDataset, label_counts
from lightning_pfl.data.public import PublicData
from lightning_pfl.engine.base import EngineSettings, LocalWork
from lightning_pfl.engine.optimizer_options import learning_rates
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.methods.base import Method

EngineName = Literal["vectorized", "sequential", "reference"]


@dataclass
class LocalRound:
    """The results of a round of some clients.

    Attributes:
        info: The cohort, in the order of the ids that were asked for.
        received: What the server sent, ``(clients, ...)``.
        before: The states of the clients before the round, ``(clients, ...)``.
        result: The engine's result; ``result.uploads`` and ``result.own`` are ``(clients, ...)``.
        server: The server's tree after its update, from all clients of the cohort.
        engine: The engine that ran it.
    """

    info: ClientInfo
    received: Tree
    before: Tree
    result: LocalResult
    server: Tree
    engine: SequentialEngine | VectorizedEngine

    @property
    def models(self) -> Model:
        """Each client's trained model: shared and personal part, ``(clients, ...)``."""
        uploaded, kept = (
            self.result.uploads.get("model", {}),
            self.result.client_state.get("model", {}),
        )
        return {**uploaded, **kept}


def local_round(
    method: Method,
    module: Any,
    data: FederatedDataset,
    engine: EngineName = "vectorized",
    clients: Sequence[int] | None = None,
    round: int = 0,
    settings: EngineSettings | None = None,
    server: Tree | None = None,
    client_state: Tree | None = None,
    only: int | None = None,
    **options: Any,
) -> LocalRound:
    """Send, train and aggregate once, with the module's initial model.

    Args:
        method: The method; it is bound here.
        module: A module with ``training_step`` and ``configure_optimizers``.
        data: The training split.
        engine: Which engine runs it.
        clients: Ids of the cohort; None for all clients, also those without samples.
        round: The communication round, from 0.
        settings: The Trainer's flags; None for the defaults.
        server: The server's tree; None for the initial one.
        client_state: The states of all clients ``(num_clients, ...)``; None for the initial ones.
        only: Number of the one phase to run; None for all phases of the round.
        **options: Passed to the engine (``transform``).
    """
    parameter_split = ParameterSplit(module, method.resolve_personal(ParameterSplit(module)))
    known = Known.of(parameter_split, data.num_clients, 0, data.num_samples)
    method.bind(replace(known, label_counts=label_counts(data)))
    index = torch.arange(data.num_clients) if clients is None else torch.tensor(list(clients))
    optimizer = module.configure_optimizers()
    kind: Any = VectorizedEngine
    if engine != "vectorized":
        kind, options = SequentialEngine, {"record": engine == "sequential", **options}
    runner = kind(module, parameter_split, settings or EngineSettings(), **options)
    model = parameter_split.model()
    server = method.init_server(model) if server is None else server
    phases = method.phases(round)
    phases = phases if only is None else phases[only : only + 1]
    samples = data.num_samples[index]
    info = ClientInfo(
        index,
        samples,
        runner.count_steps(data, index, phases),
        method.aggregation_weights(samples),
        round,
        data.num_clients,
        learning_rates(optimizer),
    )
    received = expand(method.download(server, info), len(index))
    received = {**received, **method.download_rows(server, info)}
    before = (
        rows(client_state, index)
        if client_state is not None
        else repeat(method.init_client_state(model), len(index))
    )
    kept = tmap(Tensor.clone, before)
    load = getattr(module, "public_dataloader", None)
    public = PublicData(load(), 0, method.public_samples, data.names) if load else None
    work = LocalWork(method, received, before, info, data, phases, optimizer, public=public)
    result = runner.train(work)
    updated = method.server_update(server, result.uploads, info)
    return LocalRound(info, received, kept, result, updated, runner)


def assert_trees_close(
    actual: Tree, expected: Tree, rtol: float = 1e-10, atol: float = 1e-12, message: str = ""
) -> None:
    """Check that trees have the same names and close leaves; NaN equals NaN.

    Raises:
        AssertionError: If a leaf differs, with ``message`` and the leaf's name.
    """
    lines = f"{message}\n" if message else ""
    assert actual.keys() == expected.keys(), (
        f"{lines}Expected the entries {sorted(expected)}, but got {sorted(actual)}."
    )
    for name, leaf in actual.items():
        if isinstance(leaf, dict):
            assert_trees_close(leaf, expected[name], rtol, atol, message)
            continue
        try:
            torch.testing.assert_close(leaf, expected[name], rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as difference:
            raise AssertionError(f"{lines}{name}: {difference}") from None


def assert_trees_equal(actual: Tree, expected: Tree, message: str = "") -> None:
    """Check that trees have the same names and the same bits; NaN equals NaN.

    Raises:
        AssertionError: If a leaf differs, with ``message`` and the leaf's name.
    """
    assert_trees_close(actual, expected, rtol=0.0, atol=0.0, message=message)


def assert_rounds_equal(actual: LocalRound, expected: LocalRound) -> None:
    """Check that local rounds end with the same uploads, client states and logs, to the bit.

    Raises:
        AssertionError: If a leaf differs, with its name.
    """
    assert_trees_equal(actual.result.uploads, expected.result.uploads)
    assert_trees_equal(actual.result.client_state, expected.result.client_state)
    assert_trees_equal(actual.result.logs, expected.result.logs)
