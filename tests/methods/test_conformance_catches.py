"""The conformance suite itself: each kind of wrong method fails the check that is meant for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pfl.callback import ClientInfo
from lightning_pfl.methods.base import Local, Method
from lightning_pfl.testing import conformance
from lightning_pfl.testing.conformance import Problem
from lightning_pfl.tree import Model, Tree, select, tmap


class MixesClients(Method):
    """A client's upload is the mean of the chunk's."""

    def client_final(self, received: Tree, own: Tree, state: Tree, info: ClientInfo) -> Any:
        upload, own = super().client_final(received, own, state, info)
        return tmap(
            lambda leaf: leaf.double().mean(0, keepdim=True).to(leaf.dtype).expand_as(leaf), upload
        ), own


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

    def client_final(self, received: Tree, own: Tree, state: Tree, info: ClientInfo) -> Any:
        return {"model": state["model"]}, {"model": select(state["model"], self.layout.personal)}

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        shared = {"model": select(uploads["model"], self.layout.shared)}
        return super().server_update(server, shared, info)


class WritesToWhatItReceived(Method):
    """Moves the server's own tensor."""

    def client_init(self, received: Tree, own: Tree, info: ClientInfo) -> Tree:
        received["model"]["head.bias"][0].add_(1.0)
        return super().client_init(received, own, info)


class UsesTheGlobalGenerator(Method):
    """Draws from a generator that depends on what ran before."""

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        noisy = tmap(
            lambda leaf: leaf + torch.randn(()) if leaf.is_floating_point() else leaf, uploads
        )
        return super().server_update(server, noisy, info)


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

    def client_step(self, state: Tree, batch: Any, local: Local) -> Tree:
        local.grad(tmap(lambda leaf: leaf.clone(), state["model"]), batch)
        return state


CASES: list[tuple[type[Method], Callable[..., None]]] = [
    (MixesClients, conformance.check_engines_agree),
    (DependsOnTheOrder, conformance.check_relabelling_permutes_the_result),
    (UploadsTheHead, conformance.check_upload_is_what_the_method_declares),
    (WritesToWhatItReceived, conformance.check_received_is_not_changed),
    (UsesTheGlobalGenerator, conformance.check_seed_decides),
    (HidesState, conformance.check_resume_is_exact),
    (ChangesTypes, conformance.check_types_and_shapes_are_stable),
    (IgnoresTheSeed, conformance.check_seed_decides),
]


@pytest.mark.parametrize(("method", "check"), CASES, ids=lambda value: value.__name__)
def test_a_wrong_method_is_caught(
    method: type[Method], check: Callable[..., None], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError):
        check(method, Problem(folder=tmp_path))
