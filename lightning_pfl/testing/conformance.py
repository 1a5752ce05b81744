"""Checks that every method must pass, as functions for tests of any method.

Each check takes a function that makes the method, and a :class:`Problem`. For your method::

    @pytest.mark.parametrize("engine", ["vectorized", "sequential"])
    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_method(check, engine, tmp_path):
        check(lambda: MyMethod(strength=0.5), Problem(engine=engine, folder=tmp_path))

No check depends on a method's name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from torch import nn

from lightning_pfl.core import draws
from lightning_pfl.core.mixture import parts
from lightning_pfl.core.randomness import derive
from lightning_pfl.core.tree import Tree, expand, is_expanded, items, leaves, nbytes, rows, tmap
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.methods.base import Method
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.fitting import Fit, fit
from lightning_pfl.testing.rounds import (
    LocalRound,
    assert_trees_close,
    assert_trees_equal,
    local_round,
)

MakeMethod = Callable[[], Method]
SIZES = (1, 0, 3, 8, 5)
"""Training samples per client: one, none, a full minibatch, many."""


def small_module(dtype: torch.dtype = torch.float64) -> PersonalizedModule:
    """Make a convolution with BatchNorm and a linear head, with the same numbers at every call."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        backbone = nn.Sequential(
            nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten()
        )
        module = PersonalizedModule(backbone, nn.Linear(18, 3), lr=0.05, momentum=0.9)
    return module.to(dtype)


def small_clients(
    dtype: torch.dtype = torch.float64, shuffle: bool = True
) -> FederatedTensorDataset:
    """Make five clients with :data:`SIZES` random 5x5 images each, in minibatches of three."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(SIZES), 1, 5, 5, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(3, (sum(SIZES),), generator=generator)
    positions = torch.arange(sum(SIZES)).split(SIZES)
    return FederatedTensorDataset((x, y), positions, batch_size=3, shuffle=shuffle)


@dataclass(frozen=True)
class Problem:
    """A federation small enough for a unit test.

    Args:
        engine: The engine of complete fits.
        folder: Folder for checkpoints.
        make_module: Makes the module, with the same numbers at every call.
        make_data: Makes the clients, from a dtype and whether samples are shuffled.
    """

    engine: str = "vectorized"
    folder: Path = Path()
    make_module: Callable[[torch.dtype], L.LightningModule] = small_module
    make_data: Callable[[torch.dtype, bool], FederatedTensorDataset] = small_clients

    def fit(self, method: Method, **settings: Any) -> Fit:
        """Run two rounds in double precision, unless ``settings`` differ."""
        dtype = settings.pop("dtype", torch.float64)
        given = {"rounds": 2, "module": self.make_module(dtype), "engine": self.engine, **settings}
        data = given.pop("data", None)
        return fit(method, self.make_data(dtype, True) if data is None else data, **given)


def check_engines_agree(
    make_method: MakeMethod, problem: Problem, chunk_sizes: Sequence[int] | None = None
) -> None:
    """Check that engines agree over two rounds, by default for chunks of 1, 2 and all clients.

    The clients have 0, 1, few and many samples, so last minibatches are short.
    """
    data = problem.make_data(torch.float64, True)

    def run(engine: Any, chunk_size: int | None = None) -> list[LocalRound]:
        first = _round(make_method(), problem, data, engine, chunk_size)
        server = tmap(torch.clone, first.server)
        client_state = tmap(torch.clone, first.result.client_state)
        second = _round(make_method(), problem, data, engine, chunk_size, 1, server, client_state)
        return [first, second]

    expected = run("sequential")
    for chunk_size in chunk_sizes or (1, 2, data.num_clients):
        for got, want in zip(run("vectorized", chunk_size), expected, strict=True):
            assert_trees_close(got.result.uploads, want.result.uploads)
            assert_trees_close(got.result.client_state, want.result.client_state)
            assert_trees_close(got.result.logs, want.result.logs)
            assert_trees_close(got.server, want.server)


def check_received_is_not_changed(make_method: MakeMethod, problem: Problem) -> None:
    """Check that clients work on copies of what the server sent."""
    method, data = make_method(), problem.make_data(torch.float64, True)
    outcome = _round(method, problem, data, problem.engine)
    fresh = _round(make_method(), problem, data, problem.engine)
    server = method.init_server(method.parameter_split.model())
    start = expand(method.download(server, outcome.info), len(outcome.info))
    start |= method.download_rows(server, outcome.info)
    for received in (outcome.received, fresh.received):
        assert_trees_equal(received, start)


def check_what_is_kept_is_not_trained(make_method: MakeMethod, problem: Problem) -> None:
    """Check that training doesn't change copies of received trees or client states.

    When training begins, no two entries of the state share memory; when it ends, received trees and
    client states are the same bit for bit.
    """
    method, data = make_method(), problem.make_data(torch.float64, True)
    init, step, final = method.client_init, method.client_step, method.client_final
    begun: list[tuple[Tree, Tree]] = []

    def watched_init(received: Tree, client_state: Tree, info: Any) -> Tree:
        begun.append((tmap(torch.clone, received), tmap(torch.clone, client_state)))
        return init(received, client_state, info)

    def watched_step(state: Tree, minibatches: Any, client: Any) -> Tree:
        if not stepped:
            memory = [
                leaf.untyped_storage().data_ptr() for leaf in leaves(state) if not is_expanded(leaf)
            ]
            assert len(set(memory)) == len(memory), "entries of the state share memory"
        stepped.append(len(begun))
        return step(state, minibatches, client)

    def watched_final(received: Tree, client_state: Tree, state: Tree, info: Any) -> Any:
        before = begun.pop()
        assert_trees_equal(received, before[0])
        assert_trees_equal(client_state, before[1])
        return final(received, client_state, state, info)

    stepped: list[int] = []
    vars(method).update(
        client_init=watched_init, client_step=watched_step, client_final=watched_final
    )
    _round(method, problem, data, problem.engine)
    assert not begun


def check_relabelling_permutes_the_result(make_method: MakeMethod, problem: Problem) -> None:
    """Check that another numbering of the clients only changes their order.

    A method over a graph needs a symmetric one, such as the complete graph. All clients draw the
    same random numbers, which otherwise follow from their ids.
    """
    data = problem.make_data(torch.float64, False)
    order = torch.arange(data.num_clients).roll(2)
    with patch.object(draws, "derive", _same_for_all_clients):
        a = problem.fit(make_method(), data=data)
        b = problem.fit(make_method(), data=data.subset(order.tolist()))
    assert_trees_close(b.server, _relabelled(a.server, make_method().client_axes, order))
    assert_trees_close(
        b.client_state, _relabelled_edges(rows(a.client_state, order), a.federation.method, order)
    )
    assert_trees_close(b.models, rows(a.models, order))


def _same_for_all_clients(seed: int, *purpose: Any) -> int:
    """Derive the keys of ``core.draws`` without the client, which is last."""
    return derive(seed, *(purpose[:-1] if purpose[0] == "random" else purpose))


def check_not_sampled_keeps_its_memory(make_method: MakeMethod, problem: Problem) -> None:
    """Check that the state of a client outside the cohort stays the same bit for bit."""
    recorder = problem.fit(make_method(), participation=2, rounds=3).recorder
    assert len(recorder.rounds) == 3
    for round, (before, after) in zip(recorder.rounds, pairwise(recorder.banks), strict=True):
        idle = round.info.num_samples == 0
        assert make_method().include_clients_without_data or not idle.any()
        clients = torch.arange(round.info.num_clients)
        outside = clients[~torch.isin(clients, round.info.index)]
        assert len(outside) > 0
        assert_trees_equal(rows(after, outside), rows(before, outside))


def check_upload_is_what_the_method_declares(make_method: MakeMethod, problem: Problem) -> None:
    """Check that nothing personal leaves a client, and shapes and bytes of uploads."""
    # Enough rounds for a method that communicates in every other one.
    run = problem.fit(make_method(), rounds=4)
    parameter_split = run.federation.parameter_split
    shapes = {name: leaf.shape for name, leaf in parameter_split.model().items()}
    for round in run.recorder.rounds:
        uploads = round.uploads or {}
        for (*_, name), leaf in items(uploads):
            assert name not in parameter_split.personal, f"personal {name} is uploaded"
            assert leaf.shape[0] == len(round.info)
            assert name not in shapes or leaf.shape[1:] == shapes[name]
        for (*_, name), _ in items(round.received or {}):
            assert name not in parameter_split.personal, f"personal {name} is sent to the clients"
        sizes = [leaf[0].numel() * leaf.element_size() for leaf in leaves(uploads)]
        # A method may declare fewer bytes than its trees have, never more.
        if type(run.federation.method).upload_nbytes is Method.upload_nbytes:
            assert round.bytes_up == sum(sizes)
        assert round.bytes_up <= sum(sizes)
        whole = nbytes(round.received or {})
        if type(run.federation.method).download_nbytes is Method.download_nbytes:
            assert round.bytes_down == whole
        assert round.bytes_down <= whole
    # A method may send nothing in some rounds; rounds with equal phases send trees of one kind.
    kinds: dict[tuple[str, ...], dict[str, Any]] = {}
    for round in (round for round in run.recorder.rounds if round.uploads):
        plan = tuple(phase.name for phase in run.federation.method.phases(round.number))
        kind = _kinds(round.uploads or {})
        assert kinds.setdefault(plan, kind) == kind
    clients, between = len(round.info), round.bytes_exchanged
    assert run.metrics["round/bytes_up"] == round.bytes_up * clients + between
    assert run.metrics["round/bytes_down"] == round.bytes_down * clients + between


def check_types_and_shapes_are_stable(make_method: MakeMethod, problem: Problem) -> None:
    """Check that names, shapes, types and devices of server and client states stay the same.

    The server may add entries in round 0, as torch's optimizers create their state in the first
    step.
    """
    for dtype in (torch.float32, torch.float64):
        run = problem.fit(make_method(), dtype=dtype)
        first, second, third = map(_kinds, run.recorder.servers)
        assert second == third
        assert first.keys() == second.keys()
        assert all(second[path] == kind for path, kind in first.items() if kind)
        states = [_kinds(client_states) for client_states in run.recorder.banks]
        assert states[0] == states[1] == states[2]
        wanted = {
            name: leaf.dtype for name, leaf in problem.make_module(dtype).state_dict().items()
        }
        assert {name: leaf.dtype for name, leaf in parts(run.models)[0].items()} == wanted


def check_resume_is_exact(make_method: MakeMethod, problem: Problem) -> None:
    """Check that a run resumed after round 2 ends with the bits of the uninterrupted one."""
    settings: dict[str, Any] = {"participation": 2, "seed": 3}
    whole = problem.fit(make_method(), rounds=3, **settings)
    begun = problem.fit(make_method(), rounds=2, **settings)
    path = begun.save(problem.folder / "begun.ckpt")
    resumed = problem.fit(make_method(), rounds=3, ckpt_path=path, **settings)
    assert [round.number for round in resumed.recorder.rounds] == [2]
    assert_trees_equal(resumed.server, whole.server)
    assert_trees_equal(resumed.client_state, whole.client_state)
    assert_trees_equal(resumed.models, whole.models)


def check_seed_decides(make_method: MakeMethod, problem: Problem) -> None:
    """Check that the seed alone determines the result."""
    first = problem.fit(make_method(), participation=2, seed=5)
    torch.rand(7)  # changes the state of the global generator
    again = problem.fit(make_method(), participation=2, seed=5)
    other = problem.fit(make_method(), participation=2, seed=6)
    assert_trees_equal(again.server, first.server)
    assert_trees_equal(again.client_state, first.client_state)
    # By more than rounding, to which equal uploads with other weights would lead.
    assert any(not torch.allclose(leaf, other.models[n]) for n, leaf in first.models.items())


def check_trains_through_the_trainer(make_method: MakeMethod, problem: Problem) -> None:
    """Check that validation runs, models load into the module, and the training loss falls."""
    data = problem.make_data(torch.float64, True)
    run = problem.fit(make_method(), data=data, rounds=4, val_data=data)
    assert run.trainer.global_step == 4
    assert torch.tensor(list(run.metrics.values())).isfinite().all()
    for client in data.names:
        model = run.federation.client_module(client)
        problem.make_module(torch.float64).load_state_dict(model.state_dict())
    # A round without training has no loss.
    losses = [r.metrics["train_loss"] for r in run.recorder.rounds if "train_loss" in r.metrics]
    assert len(losses) > 1
    assert losses[-1] < losses[0]


def check_shared_entries_are_equal(make_method: MakeMethod, problem: Problem) -> None:
    """Check that all clients are evaluated with the same shared entries, sampled or not.

    A client that wasn't in the last cohort must not keep the backbone of its last round. Entries
    that differ between clients on purpose are the method's ``personalized_entries``.
    """
    run = problem.fit(make_method(), participation=2, rounds=3)
    parameter_split = run.federation.parameter_split
    differ = run.federation.method.personalized_entries(parameter_split)
    for name in (name for name in parameter_split.names if name not in differ):
        first, *others = run.models[name]
        unlike = [k for k, row in enumerate(others, start=1) if not torch.equal(row, first)]
        assert not unlike, (
            f"Expected all clients to be evaluated with the same {name!r}, which the method "
            f"shares, but the clients {unlike} have other values than client 0. Take shared "
            "entries from `received` in `personal_model`, or name them in `personalized_entries`."
        )


def check_broken_data_stop_nobody(make_method: MakeMethod, problem: Problem) -> None:
    """Check that a client with NaN samples is rejected, and all other results are finite."""
    data = problem.make_data(torch.float64, True)
    broken = int(data.num_samples.argmax())
    inputs = data.fields[0].clone()
    inputs[data.indices[broken]] = torch.nan
    data.fields = (inputs, *data.fields[1:])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*left out 1 of.*")
        run = problem.fit(make_method(), data=data, rounds=3)
    for round in run.recorder.rounds:
        trains = bool(run.federation.method.phases(round.number))
        assert set(round.rejected) == ({broken} if trains else set())
    others = torch.arange(data.num_clients) != broken
    # A method that adapts models to training data returns NaN for the broken client.
    models = rows(run.models, others.nonzero().flatten())
    for tree in (run.server, run.client_state, models):
        assert all(leaf.isfinite().all() for leaf in leaves(tree))


CHECKS: tuple[Callable[[MakeMethod, Problem], None], ...] = (
    check_engines_agree,
    check_received_is_not_changed,
    check_what_is_kept_is_not_trained,
    check_relabelling_permutes_the_result,
    check_not_sampled_keeps_its_memory,
    check_upload_is_what_the_method_declares,
    check_types_and_shapes_are_stable,
    check_resume_is_exact,
    check_seed_decides,
    check_trains_through_the_trainer,
    check_shared_entries_are_equal,
    check_broken_data_stop_nobody,
)
"""All checks of the suite."""


def _round(
    method: Method,
    problem: Problem,
    data: FederatedTensorDataset,
    engine: Any,
    chunk_size: int | None = None,
    round: int = 0,
    server: Tree | None = None,
    client_state: Tree | None = None,
) -> LocalRound:
    """Run a round of all clients, with the module's initial model unless a server is given."""
    module = problem.make_module(torch.float64)
    settings = EngineSettings(chunk_size=chunk_size)
    return local_round(
        method,
        module,
        data,
        engine,
        round=round,
        settings=settings,
        server=server,
        client_state=client_state,
    )


def _relabelled(server: Tree, client_axes: Mapping[str, int], order: torch.Tensor) -> Tree:
    """Renumber the clients in the server's tree: client ``order[k]`` becomes client ``k``."""

    def permute(leaf: torch.Tensor, axes: int) -> torch.Tensor:
        for axis in range(axes):
            leaf = leaf.index_select(axis, order)
        return leaf

    changed = {}
    for name, axes in client_axes.items():
        entry = server[name]
        permuted = partial(permute, axes=axes)
        changed[name] = tmap(permuted, entry) if isinstance(entry, dict) else permuted(entry)
    return {**server, **changed}


def _relabelled_edges(client_state: Tree, method: Method, order: torch.Tensor) -> Tree:
    """Renumber the clients in client states about edges: client ``k`` becomes ``order[k]``."""
    if not method.edge_state:
        return client_state
    graph = method.graph
    here, there = graph.neighbours[order], order[graph.neighbours]
    same = (there.unsqueeze(2) == here.unsqueeze(1)) & graph.mask[order].unsqueeze(1)
    assert same.any(2).eq(graph.mask).all(), "the graph changes with the clients' numbers"
    slots = same.int().argmax(2)
    row = torch.arange(len(order)).unsqueeze(1)
    edges = {name: client_state[name] for name in method.edge_state if name in client_state}
    return {**client_state, **tmap(lambda leaf: leaf[row, slots], edges)}


def _kinds(tree: Tree) -> dict[str, Any]:
    """Map names to shape, type and device."""
    return tmap(lambda leaf: (leaf.shape, leaf.dtype, leaf.device), tree)
