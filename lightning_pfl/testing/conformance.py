"""Checks that every method must pass, as functions for tests of any method.

Each check takes a function that makes the method, and a :class:`Problem`. For your method::

    @pytest.mark.parametrize("engine", ["vectorized", "sequential"])
    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_method(check, engine, tmp_path):
        check(lambda: MyMethod(strength=0.5), Problem(engine=engine, folder=tmp_path))

Checks that get the same function and the same ``Problem`` share fits, which saves time. No check
depends on a method's name.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from torch import nn

from lightning_pfl.contract.records import Round
from lightning_pfl.core import draws
from lightning_pfl.core.mixture import parts
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.randomness import derive
from lightning_pfl.core.tree import Tree, expand, items, leaves, nbytes, rows, tmap
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

    _fits: dict[Any, Fit] = field(default_factory=dict, init=False, repr=False, compare=False)

    def fit(self, method: Method, **settings: Any) -> Fit:
        """Run two rounds in double precision, unless ``settings`` differ."""
        dtype = settings.pop("dtype", torch.float64)
        given = {"rounds": 2, "module": self.make_module(dtype), "engine": self.engine, **settings}
        data = given.pop("data", None)
        return fit(method, self.make_data(dtype, True) if data is None else data, **given)

    def fit_of_all(self, make_method: MakeMethod) -> Fit:
        """Run four rounds of all clients with validation, once for all checks.

        Four are enough for a method that communicates in every other round.
        """
        if (key := ("all", make_method)) not in self._fits:
            data = self.make_data(torch.float64, True)
            self._fits[key] = self.fit(make_method(), data=data, rounds=4, val_data=data)
        return self._fits[key]

    def fit_of_some(self, make_method: MakeMethod) -> Fit:
        """Run three rounds of two clients each, once for all checks."""
        if (key := ("some", make_method)) not in self._fits:
            self._fits[key] = self.fit(make_method(), participation=2, rounds=3)
        return self._fits[key]

    def fit_begun(self, make_method: MakeMethod) -> Fit:
        """Run the first two of these rounds by themselves, once for all checks.

        The global generator has another state than before the three, which nothing may read.
        """
        if (key := ("begun", make_method)) not in self._fits:
            torch.rand(7)
            self._fits[key] = self.fit(make_method(), participation=2)
        return self._fits[key]


def check_engines_agree(
    make_method: MakeMethod, problem: Problem, chunk_sizes: Sequence[int] | None = None
) -> None:
    """Check that engines agree with the reference over two rounds.

    Those are one client after another with recorded steps, and many at once, by default in chunks
    of 1, 2 and all clients. The clients have 0, 1, few and many samples, so last minibatches are
    short.
    """
    data = problem.make_data(torch.float64, True)

    def run(engine: Any, chunk_size: int | None = None) -> list[LocalRound]:
        first = _round(make_method(), problem, data, engine, chunk_size)
        server = tmap(torch.clone, first.server)
        client_state = tmap(torch.clone, first.result.client_state)
        second = _round(make_method(), problem, data, engine, chunk_size, 1, server, client_state)
        return [first, second]

    expected = run("reference")
    for chunk_size in (None, *(chunk_sizes or (1, 2, data.num_clients))):
        if chunk_size is None:
            rounds, how = run("sequential"), "recorded steps as without"
            advice = "Name what `client_step` reads in `@recordable(...)`, or leave that out."
        else:
            rounds = run("vectorized", chunk_size)
            how = f"{chunk_size} clients in a chunk as with one client after another"
            advice = "Don't mix rows along the leading axis, which is that of the clients."
        for got, want in zip(rounds, expected, strict=True):
            for what, one, other in (
                ("upload", got.result.uploads, want.result.uploads),
                ("client state", got.result.client_state, want.result.client_state),
                ("log", got.result.logs, want.result.logs),
                ("server's tree", got.server, want.server),
            ):
                assert_trees_close(
                    one,
                    other,
                    message=f"Expected the same {what} with {how}, but got another in round "
                    f"{got.info.round}. {advice}",
                )


def check_received_is_not_changed(make_method: MakeMethod, problem: Problem) -> None:
    """Check that clients work on copies of what the server sent."""
    method, data = make_method(), problem.make_data(torch.float64, True)
    outcome = _round(method, problem, data, problem.engine)
    fresh = _round(make_method(), problem, data, problem.engine)
    server = method.init_server(method.parameter_split.model())
    start = expand(method.download(server, outcome.info), len(outcome.info))
    start |= method.download_rows(server, outcome.info)
    for received in (outcome.received, fresh.received):
        assert_trees_equal(
            received,
            start,
            "Expected `received` to stay as the server sent it, but a client changed it in place. "
            "Clone a tensor before you write to it.",
        )


def check_what_is_kept_is_not_trained(make_method: MakeMethod, problem: Problem) -> None:
    """Check that training doesn't change copies of received trees or client states.

    When it ends, received trees and client states are the same bit for bit.
    """
    method, data = make_method(), problem.make_data(torch.float64, True)
    init, final = method.client_init, method.client_final
    begun: list[tuple[Tree, Tree]] = []

    def watched_init(received: Tree, client_state: Tree, info: Any) -> Tree:
        begun.append((tmap(torch.clone, received), tmap(torch.clone, client_state)))
        return init(received, client_state, info)

    def watched_final(received: Tree, client_state: Tree, state: Tree, info: Any) -> Any:
        before = begun.pop()
        for name, now, then in (
            ("received", received, before[0]),
            ("client_state", client_state, before[1]),
        ):
            assert_trees_equal(
                now,
                then,
                f"Expected `{name}` to be the same after local training, but a step changed it in "
                "place. Keep a clone in the state that trains.",
            )
        return final(received, client_state, state, info)

    vars(method).update(client_init=watched_init, client_final=watched_final)
    _round(method, problem, data, problem.engine)
    assert not begun, (
        f"Expected `client_final` to end each local training, but {len(begun)} had none. Call "
        "`super().client_final`, and don't call `client_init` elsewhere."
    )


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
    wanted = _relabelled_edges(rows(a.client_state, order), a.federation.method, order)
    for what, got, want in (
        ("server's tree", b.server, _relabelled(a.server, make_method().client_axes, order)),
        ("client states", b.client_state, wanted),
        ("clients' models", b.models, rows(a.models, order)),
    ):
        assert_trees_close(
            got,
            want,
            message=f"Expected the {what} to follow the clients' numbers, but other numbers gave "
            "other values. Find a client's rows by `info.index`, not by its position in the "
            "cohort, and name entries of the server with a row for each client in `client_axes`.",
        )


def _same_for_all_clients(seed: int, *purpose: Any) -> int:
    """Derive the keys of ``core.draws`` without the client, which is last."""
    return derive(seed, *(purpose[:-1] if purpose[0] == "random" else purpose))


def check_not_sampled_keeps_its_memory(make_method: MakeMethod, problem: Problem) -> None:
    """Check that the state of a client outside the cohort stays the same bit for bit."""
    recorder = problem.fit_of_some(make_method).recorder
    for round, (before, after) in zip(recorder.rounds, pairwise(recorder.banks), strict=True):
        idle = round.info.num_samples == 0
        assert make_method().include_clients_without_data or not idle.any(), (
            "Expected a cohort of clients with samples, but clients without any were in it. Set "
            "`include_clients_without_data` if they are to take part."
        )
        clients = torch.arange(round.info.num_clients)
        outside = clients[~torch.isin(clients, round.info.index)]
        assert len(outside) > 0, (
            f"Expected two clients in round {round.number}, but all took part. Give the problem "
            "more clients."
        )
        assert_trees_equal(
            rows(after, outside),
            rows(before, outside),
            "Expected the states of clients outside the cohort to stay as they were, but round "
            f"{round.number} changed them. Return new client states from `client_final` alone.",
        )


def check_upload_is_what_the_method_declares(make_method: MakeMethod, problem: Problem) -> None:
    """Check that nothing personal leaves a client, and shapes and bytes of uploads."""
    run = problem.fit_of_all(make_method)
    method, rounds = run.federation.method, run.recorder.rounds
    for round in rounds:
        _require_shared(round, run.federation.parameter_split)
        _require_declared_bytes(round, method)
    # A method may send nothing in some rounds; rounds with equal phases send trees of one kind.
    kinds: dict[tuple[str, ...], dict[str, Any]] = {}
    for round in (round for round in rounds if round.uploads):
        plan = tuple(phase.name for phase in method.phases(round.number))
        kind = _kinds(round.uploads or {})
        assert (before := kinds.setdefault(plan, kind)) == kind, (
            f"Expected rounds with the phases {plan} to upload the same names, shapes and types, "
            f"but got {kind} in round {round.number} after {before}. Return one kind of upload "
            "from `client_final`, or name the phases differently."
        )
    last = rounds[-1]
    clients, between = len(last.info), last.bytes_exchanged
    for direction, each in (("up", last.bytes_up), ("down", last.bytes_down)):
        logged = run.metrics[f"round/bytes_{direction}"]
        assert logged == each * clients + between, (
            f"Expected `round/bytes_{direction}` to be {each} bytes for each of {clients} clients "
            f"and {between} between them, but got {logged:.0f}. Don't log under that name."
        )


def _require_shared(round: Round, parameter_split: ParameterSplit) -> None:
    """Require that uploads have a row for each client and, as what is sent, nothing personal."""
    shapes = {name: leaf.shape for name, leaf in parameter_split.model().items()}
    for (*_, name), leaf in items(round.uploads or {}):
        assert name not in parameter_split.personal, (
            f"Expected {name!r} to stay with the client, as it is personal, but it is in the "
            "upload. Leave it out of what `client_final` returns."
        )
        assert leaf.shape[0] == len(round.info), (
            f"Expected a row for each of the {len(round.info)} clients, but {name!r} of the "
            f"upload has the shape {tuple(leaf.shape)}. Keep the leading client axis."
        )
        assert name not in shapes or leaf.shape[1:] == shapes[name], (
            f"Expected the upload's {name!r} to have the parameter's shape "
            f"{tuple(shapes[name])} for each client, but got {tuple(leaf.shape[1:])}. Upload "
            "it under another name."
        )
    for (*_, name), _ in items(round.received or {}):
        assert name not in parameter_split.personal, (
            f"Expected {name!r} to stay with the clients, as it is personal, but the server "
            "sends it. Leave it out of `init_server` or `download`."
        )


def _require_declared_bytes(round: Round, method: Method) -> None:
    """Require that trees have the bytes that are counted; a method may declare fewer, not more."""
    sizes = [leaf[0].numel() * leaf.element_size() for leaf in leaves(round.uploads or {})]
    received = nbytes(round.received or {})
    for name, overridden, declared, held in (
        ("upload", _overrides(method, "upload_nbytes"), round.bytes_up, sum(sizes)),
        ("download", _overrides(method, "download_nbytes"), round.bytes_down, received),
    ):
        assert declared <= held if overridden else declared == held, (
            f"Expected the {name} of a client to count {'at most ' if overridden else ''}the "
            f"{held} bytes of its tree, but got {declared}. Correct `{name}_nbytes`."
        )


def _overrides(method: Method, name: str) -> bool:
    return getattr(type(method), name) is not getattr(Method, name)


def check_types_and_shapes_are_stable(make_method: MakeMethod, problem: Problem) -> None:
    """Check that names, shapes, types and devices of server and client states stay the same.

    The server may add entries in round 0, as torch's optimizers create their state in the first
    step.
    """
    single = problem.fit(make_method(), dtype=torch.float32)
    for dtype, run in ((torch.float32, single), (torch.float64, problem.fit_of_all(make_method))):
        first, second, *later = map(_kinds, run.recorder.servers)
        _same_kinds("server's tree", [second, *later], "server_update")
        begun = [name for name, kind in first.items() if kind and second.get(name) != kind]
        missing = first.keys() ^ second.keys()
        assert not {*begun, *missing}, (
            f"Expected `server_update` to keep names, shapes and types of the server's tree, but "
            f"round 0 made {second} of {first}. Return entries as `init_server` made them."
        )
        _same_kinds("client states", [_kinds(bank) for bank in run.recorder.banks], "client_final")
        wanted = {
            name: leaf.dtype for name, leaf in problem.make_module(dtype).state_dict().items()
        }
        found = {name: leaf.dtype for name, leaf in parts(run.models)[0].items()}
        assert found == wanted, (
            f"Expected the clients' models to have the module's names and types {wanted}, but got "
            f"{found}. Let `personal_model` return all parameters and buffers in their types."
        )


def _same_kinds(what: str, kinds: Sequence[Any], function: str) -> None:
    for number, (before, after) in enumerate(pairwise(kinds)):
        assert before == after, (
            f"Expected names, shapes and types of the {what} to stay the same, but step {number} "
            f"made {after} of {before}. Keep them in `{function}`; a type changes where an integer "
            "and a float are added."
        )


def check_resume_is_exact(make_method: MakeMethod, problem: Problem) -> None:
    """Check that a run resumed after round 2 ends with the bits of the uninterrupted one."""
    whole = problem.fit_of_some(make_method)
    path = problem.fit_begun(make_method).save(problem.folder / "begun.ckpt")
    resumed = problem.fit(make_method(), participation=2, rounds=3, ckpt_path=path)
    found = [round.number for round in resumed.recorder.rounds]
    assert found == [2], (
        f"Expected the resumed run to do round 2 alone, but it did {found}. Leave the Trainer's "
        "counters to the loop."
    )
    for what, got, want in (
        ("server's tree", resumed.server, whole.server),
        ("client states", resumed.client_state, whole.client_state),
        ("clients' models", resumed.models, whole.models),
    ):
        assert_trees_equal(
            got,
            want,
            f"Expected a resumed run to end with the {what} of one that was not interrupted, but "
            "got others. Keep what lasts longer than a round in the server's tree or the client "
            "states, which the checkpoint holds, and not in attributes of the method.",
        )


def check_seed_decides(make_method: MakeMethod, problem: Problem) -> None:
    """Check that the seed alone determines the result."""
    whole = problem.fit_of_some(make_method).recorder
    again = problem.fit_begun(make_method)
    other = problem.fit(make_method(), participation=2, seed=6)
    for what, got, want in (
        ("server's tree", again.server, whole.servers[2]),
        ("client states", again.client_state, whole.banks[2]),
    ):
        assert_trees_equal(
            got,
            want,
            f"Expected two runs of one seed to end with the same {what}, but got others. Draw "
            "random numbers by `client.noise` or with a key of `core.randomness.derive`, not from "
            "a generator of the method's own.",
        )
    # By more than rounding, to which equal uploads with other weights would lead.
    assert any(not torch.allclose(leaf, other.models[n]) for n, leaf in again.models.items()), (
        "Expected another seed, and so other cohorts, to give other models, but all are the same. "
        "Use the clients' gradients: return what `client.train` or `client.update` returns."
    )


def check_trains_through_the_trainer(make_method: MakeMethod, problem: Problem) -> None:
    """Check that validation runs, models load into the module, and the training loss falls."""
    run = problem.fit_of_all(make_method)
    assert run.trainer.global_step == 4, (
        f"Expected a server update a round, but got {run.trainer.global_step} in 4 rounds. Leave "
        "the Trainer's counters to the loop."
    )
    wrong = {name: value for name, value in run.metrics.items() if not math.isfinite(value)}
    assert not wrong, (
        f"Expected finite values in the logs, but got {wrong}. Look where the method divides, or "
        "takes a root or a logarithm."
    )
    for name in problem.make_data(torch.float64, True).names:
        model = run.federation.client_module(name)
        problem.make_module(torch.float64).load_state_dict(model.state_dict())
    # A round without training has no loss.
    losses = [r.metrics["train_loss"] for r in run.recorder.rounds if "train_loss" in r.metrics]
    assert len(losses) > 1, (
        f"Expected training in at least two of 4 rounds, but {len(losses)} logged `train_loss`. "
        "Return a phase from `phases` in each round that trains, and take gradients in "
        "`client_step`."
    )
    assert losses[-1] < losses[0], (
        f"Expected the training loss to fall, but it went from {losses[0]:.4g} to "
        f"{losses[-1]:.4g}. Look at the sign of the step, and whether the server keeps what it "
        "gets."
    )


def check_shared_entries_are_equal(make_method: MakeMethod, problem: Problem) -> None:
    """Check that all clients are evaluated with the same shared entries, sampled or not.

    A client that wasn't in the last cohort must not keep the backbone of its last round. Entries
    that differ between clients on purpose are the method's ``personalized_entries``.
    """
    run = problem.fit_of_some(make_method)
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
        run = problem.fit(make_method(), data=data)
    for round in run.recorder.rounds:
        trains = bool(run.federation.method.phases(round.number))
        wanted = {broken} if trains else set()
        assert set(round.rejected) == wanted, (
            f"Expected the clients {sorted(wanted)}, whose samples are NaN, to be rejected in "
            f"round {round.number}, but got {sorted(round.rejected)}. Let NaN reach the upload: "
            "don't replace it, and don't mix clients."
        )
    others = torch.arange(data.num_clients) != broken
    # A method that adapts models to training data returns NaN for the broken client.
    models = rows(run.models, others.nonzero().flatten())
    for what, tree in (
        ("the server's tree", run.server),
        ("the client states", run.client_state),
        ("the other clients' models", models),
    ):
        wrong = ["/".join(path) for path, leaf in items(tree) if not leaf.isfinite().all()]
        assert not wrong, (
            f"Expected finite numbers in {what} without the client whose samples are NaN, but "
            f"{wrong} have others. Multiplying a row by 0 doesn't remove NaN: aggregate by "
            "`core.tree.weighted_mean`, or select rows."
        )


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
