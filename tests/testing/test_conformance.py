"""The conformance suite itself: each kind of wrong method fails the check that is meant for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import (
    Model,
    Tree,
    floats,
    per_client,
    rows,
    select,
    tmap,
    weighted_mean,
)
from lightning_pfl.methods.base import LocalStep, Method, Phase, recordable
from lightning_pfl.testing import conformance
from lightning_pfl.testing.conformance import Problem


class MixesClients(Method):
    """A client's upload is the mean of the chunk's."""

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> Any:
        upload, client_state = super().client_final(received, client_state, state, info)
        return tmap(
            lambda leaf: leaf.double().mean(0, keepdim=True).to(leaf.dtype).expand_as(leaf), upload
        ), client_state


class CountsItsSteps(Method):
    """A client's last steps are longer, by a count that a recorded step doesn't keep."""

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        self.steps = 0
        return super().client_init(received, client_state, info)

    @recordable()
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        self.steps += 1
        grads = client.grad(state["model"], minibatches)
        scale = 1.0 if self.steps < 5 else 2.0
        return {**state, "model": client.update(state["model"], tmap(lambda g: scale * g, grads))}


class DependsOnTheOrder(Method):
    """The first client of the cohort counts twice."""

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        weights = info.weights.clone()
        weights[0] *= 2
        info.weights = weights / weights.sum()
        return super().server_update(server, uploads, info)


class UploadsTheHead(Method):
    """The whole model leaves the client, the head included."""

    personal = "head"

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> Any:
        return {"model": state["model"]}, {
            "model": select(state["model"], self.parameter_split.personal)
        }

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        shared = {"model": select(uploads["model"], self.parameter_split.shared)}
        return super().server_update(server, shared, info)


class WritesToWhatItReceived(Method):
    """Moves the server's own tensor, past the counter of its changes."""

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        received["model"]["head.bias"][0].data.add_(1.0)
        return super().client_init(received, client_state, info)


class UsesItsOwnGenerator(Method):
    """Draws from a generator that depends on what ran before."""

    generator = torch.Generator()

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        noisy = tmap(
            lambda leaf: leaf + self._draw() if leaf.is_floating_point() else leaf, uploads
        )
        return super().server_update(server, noisy, info)

    def _draw(self) -> Tensor:
        return torch.randn((), generator=self.generator)


class HidesState(Method):
    """Remembers something outside of its trees, which no checkpoint holds."""

    rounds = 0

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        self.rounds += 1
        scaled = tmap(
            lambda leaf: leaf / self.rounds if leaf.is_floating_point() else leaf, uploads
        )
        return super().server_update(server, scaled, info)


class ChangesTypes(Method):
    """A counter that becomes a float on the way."""

    def init_server(self, model: Model) -> Tree:
        return {**super().init_server(model), "rounds": torch.tensor(0)}

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        return {**super().server_update(server, uploads, info), "rounds": server["rounds"] + 1.0}


class IgnoresTheSeed(Method):
    """The clients compute gradients and throw them away, so no seed matters."""

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        client.grad(tmap(lambda leaf: leaf.clone(), state["model"]), minibatches)
        return state


class RemembersClients(Method):
    """The server keeps every client's last model and sends each its own; nothing is wrong yet."""

    client_axes: ClassVar[Mapping[str, int]] = MappingProxyType({"models": 1})

    def init_server(self, model: Model) -> Tree:
        return {"models": tmap(lambda leaf: torch.stack([leaf] * self.num_clients), model)}

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        return {}

    def download_rows(self, server: Tree, info: ClientInfo) -> Tree:
        return {"model": rows(server["models"], info.index)}

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        store = self.places(info)
        return {
            "models": tmap(
                lambda old, new: old.index_copy(0, store, new), server["models"], uploads["model"]
            )
        }

    def places(self, info: ClientInfo) -> torch.Tensor:
        return info.index

    def global_model(self, server: Tree) -> Model | None:
        return None

    def personalized_entries(self, parameter_split: ParameterSplit) -> frozenset[str]:
        return frozenset(parameter_split.names)


class StoresByPosition(RemembersClients):
    """Takes the position in the cohort for the client's number."""

    def places(self, info: ClientInfo) -> torch.Tensor:
        return torch.arange(len(info.index))


class SendsTheFirstRow(RemembersClients):
    """Everybody gets what belongs to client 0."""

    def download_rows(self, server: Tree, info: ClientInfo) -> Tree:
        return {"model": rows(server["models"], torch.zeros_like(info.index))}


class HidesItsClients(RemembersClients):
    """Doesn't say that its server knows clients one by one."""

    client_axes: ClassVar[Mapping[str, int]] = MappingProxyType({})


class WritesToItsRow(RemembersClients):
    """Moves what was sent to the client alone, at the end of its round, past that counter."""

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> Any:
        received["model"]["head.bias"].data.add_(1.0)
        return super().client_final(received, client_state, state, info)


class PullsItsAnchorAlong(RemembersClients):
    """Moves what it keeps of what was sent."""

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        self.anchor = received["model"]
        return super().client_init(received, client_state, info)

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        self.anchor["head.bias"].add_(1.0)
        return super().client_step(state, minibatches, client)


class SpeaksOfSomethingElse(Method):
    """Silent in every other round, and then it sends another kind of thing."""

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> Any:
        upload, client_state = super().client_final(received, client_state, state, info)
        if info.round % 2:
            return {}, client_state
        return (
            upload if info.round else {"model": select(upload["model"], ["head.bias"])}
        ), client_state

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        moved = weighted_mean(uploads["model"], info.weights) if uploads else {}
        return {"model": {**server["model"], **moved}}


class SaysThatItSendsMore(Method):
    """Counts bytes that its trees don't hold."""

    def upload_nbytes(self, uploads: Tree, info: ClientInfo) -> torch.Tensor | None:
        return torch.full((len(info),), 10**6)


class NeverTrains(Method):
    """No round has a step."""

    def phases(self, round: int) -> tuple[Phase, ...]:
        return ()


class TrainsOnce(Method):
    """Rests after the first round."""

    def phases(self, round: int) -> tuple[Phase, ...]:
        return () if round else super().phases(round)


class Ascends(Method):
    """Steps up the gradient in the rounds in which it trains at all."""

    def phases(self, round: int) -> tuple[Phase, ...]:
        return () if round % 2 else super().phases(round)

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        up = tmap(lambda leaf: -10 * leaf, client.grad(state["model"], minibatches))
        return {**state, "model": client.update(state["model"], up)}


class EvaluatesWithAStaleBackbone(Method):
    """Clients remember the whole model of their last round, and are evaluated with it."""

    def init_client_state(self, model: Model) -> Tree:
        return {"last": dict(model)}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> Any:
        upload, client_state = super().client_final(received, client_state, state, info)
        return upload, {**client_state, "last": state["model"]}

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        return dict(client_state["last"])


class PassesOverBrokenData(Method):
    """Puts a number in the place of what isn't one, so that nobody notices the client."""

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        (inputs, *_), real = client.samples(minibatches)
        seen = inputs.nan_to_num().flatten(1).mean(1) * real.any(1)
        moved = tmap(lambda leaf: leaf + 0.01 * per_client(seen, leaf), floats(state["model"]))
        return {**state, "model": {**state["model"], **moved}}


CASES: list[tuple[Callable[[], Method], Callable[..., None], str]] = [
    (MixesClients, conformance.check_engines_agree, "Expected the same upload with 2 clients"),
    (
        lambda: CountsItsSteps(local_epochs=4),
        conformance.check_engines_agree,
        "Expected the same upload with recorded steps as without, but got another in round 0. Name",
    ),
    (
        DependsOnTheOrder,
        conformance.check_relabelling_permutes_the_result,
        "Expected the server's tree to follow the clients' numbers",
    ),
    (
        UploadsTheHead,
        conformance.check_upload_is_what_the_method_declares,
        "Expected 'head.weight' to stay with the client",
    ),
    (
        WritesToWhatItReceived,
        conformance.check_received_is_not_changed,
        "a client changed it in place",
    ),
    (
        UsesItsOwnGenerator,
        conformance.check_seed_decides,
        "Expected two runs of one seed to end with the same server's tree",
    ),
    (
        HidesState,
        conformance.check_resume_is_exact,
        "Expected a resumed run to end with the server's tree of one that was not interrupted",
    ),
    (
        ChangesTypes,
        conformance.check_types_and_shapes_are_stable,
        "Expected `server_update` to keep names, shapes and types",
    ),
    (
        IgnoresTheSeed,
        conformance.check_seed_decides,
        "to give other models, but all are the same. Use the clients' gradients",
    ),
    (
        StoresByPosition,
        conformance.check_relabelling_permutes_the_result,
        "Find a client's rows by `info.index`",
    ),
    (
        SendsTheFirstRow,
        conformance.check_relabelling_permutes_the_result,
        "Find a client's rows by `info.index`",
    ),
    (
        HidesItsClients,
        conformance.check_relabelling_permutes_the_result,
        "with a row for each client in `client_axes`",
    ),
    (WritesToItsRow, conformance.check_received_is_not_changed, "a client changed it in place"),
    (
        PullsItsAnchorAlong,
        conformance.check_what_is_kept_is_not_trained,
        "Expected `received` to be the same after local training",
    ),
    (
        SpeaksOfSomethingElse,
        conformance.check_upload_is_what_the_method_declares,
        "to upload the same names, shapes and types",
    ),
    (
        SaysThatItSendsMore,
        conformance.check_upload_is_what_the_method_declares,
        "to count at most the .* bytes of its tree, but got 1000000",
    ),
    (
        NeverTrains,
        conformance.check_trains_through_the_trainer,
        "Expected training in at least two of 4 rounds, but 0 logged",
    ),
    (
        TrainsOnce,
        conformance.check_trains_through_the_trainer,
        "Expected training in at least two of 4 rounds, but 1 logged",
    ),
    (
        Ascends,
        conformance.check_trains_through_the_trainer,
        "Expected the training loss to fall",
    ),
    (
        EvaluatesWithAStaleBackbone,
        conformance.check_shared_entries_are_equal,
        "Expected all clients to be evaluated with the same",
    ),
    (
        PassesOverBrokenData,
        conformance.check_broken_data_stop_nobody,
        r"Expected the clients \[3\], whose samples are NaN, to be rejected",
    ),
]


@pytest.mark.parametrize(
    ("method", "check", "message"), CASES, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_wrong_method_is_caught(
    method: type[Method], check: Callable[..., None], message: str, tmp_path: Path
) -> None:
    # The vectorized engine works on a copy of rows, so that writing to them harms nobody there.
    engine = "sequential" if method is WritesToItsRow else "vectorized"
    with pytest.raises(AssertionError, match=message):
        check(method, Problem(engine, tmp_path))


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    """Make a problem whose fits the checks share."""
    return Problem(folder=tmp_path_factory.mktemp("fits"))


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_the_method_beneath_the_wrong_ones_is_right(
    check: Callable[..., None], problem: Problem
) -> None:
    """So that what is caught above is the fault and nothing else."""
    check(RemembersClients, problem)


def test_fits_are_shared_by_checks_of_one_method_alone() -> None:
    problem = Problem(engine="sequential")
    first = problem.fit_of_some(RemembersClients)
    assert problem.fit_of_some(RemembersClients) is first
    assert problem.fit_of_some(Method) is not first
