"""Random numbers that a method draws in a step, at a client and on the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pfl.contract.known import Known
from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Tree, add, scale, select
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.methods.base import LocalStep, Method
from lightning_pfl.testing import QuadraticModule, conformance, local_round
from lightning_pfl.testing.conformance import Problem, small_clients, small_module

CHECKS = (
    conformance.check_engines_agree,
    conformance.check_resume_is_exact,
    conformance.check_seed_decides,
    conformance.check_not_sampled_keeps_its_memory,
)


class Noisy(Method):
    """Noise in each step, in what clients send, and in what the server makes of it."""

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        grads = client.grad(state["model"], minibatches)
        grads = add(grads, scale(client.noise(grads), 0.1))
        return {**state, "model": client.update(state["model"], grads)}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        upload, kept = super().client_final(received, client_state, state, info)
        trained = select(upload["model"], self.parameter_split.trainable)
        noisy = add(trained, scale(self.client_noise(trained, info), 0.1))
        return {"model": {**upload["model"], **noisy}}, kept

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        model = super().server_update(server, uploads, info)["model"]
        trained = select(model, self.parameter_split.trainable)
        noisy = add(trained, scale(self.server_noise(trained, info.round), 0.1))
        return {**server, "model": {**model, **noisy}}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_method_that_draws_keeps_the_contract(check: Any, tmp_path: Path) -> None:
    check(Noisy, Problem(folder=tmp_path))


class Keeps(Method):
    """Sends the draws of its two steps in place of a model."""

    def __init__(self, key: str = "noise") -> None:
        super().__init__(local_epochs=None, local_steps=2)
        self.key = key

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        empty = received["model"]["w"].new_zeros(len(info), 2, 5000)
        return {**super().client_init(received, client_state, info), "drawn": empty}

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        new = client.noise({"w": state["model"]["w"]}, self.key)["w"].unsqueeze(1)
        return {**state, "drawn": torch.cat([state["drawn"][:, 1:], new], 1)}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        upload, kept = super().client_final(received, client_state, state, info)
        return {**upload, "drawn": state["drawn"]}, kept


def drawn(engine: Any = "vectorized", key: str = "noise", **settings: Any) -> Tensor:
    """The draws of some clients in two steps, ``(clients, 2, 5000)``."""
    data = small_clients()
    data = type(data)((torch.ones(17), torch.zeros(17, 5000)), data.indices, batch_size=3)
    module = QuadraticModule(dim=5000, dtype=torch.float32)
    found: Tensor = local_round(Keeps(key), module, data, engine, **settings).result.uploads[
        "drawn"
    ]
    return found


def test_numbers_are_standard_normal_and_independent() -> None:
    """20,000 numbers: moments within five standard errors, no correlation of steps or clients."""
    x = drawn(clients=[3, 4])
    rows = x.double().view(4, 5000)
    n = rows.numel()
    assert abs(rows.mean()) < 5 / n**0.5
    assert abs(rows.square().mean() - 1) < 5 * (2 / n) ** 0.5
    assert abs(rows.pow(4).mean() - 3) < 5 * (96 / n) ** 0.5
    correlation = torch.corrcoef(rows) - torch.eye(4, dtype=torch.float64)
    assert correlation.abs().max() < 5 / 5000**0.5


def test_numbers_depend_on_client_round_and_key_alone() -> None:
    first = drawn(clients=[4, 3])
    assert torch.equal(drawn(clients=[3]), first[1:])
    torch.testing.assert_close(drawn("sequential", clients=[4, 3]), first)
    others = (
        drawn(clients=[4, 3], key="other"),
        drawn(clients=[4, 3], round=1),
        drawn(clients=[4, 3], settings=EngineSettings(seed=1)),
    )
    for other in others:
        assert (other == first).double().mean() < 0.01


def test_clients_and_server_draw_by_round_and_key() -> None:
    method, module = Noisy(), small_module()
    method.bind(Known.of(ParameterSplit(module), 5, seed=1))
    two = torch.tensor([3, 1])
    nothing = torch.zeros(2, dtype=torch.int64)
    info = ClientInfo(two, nothing, nothing, nothing.double(), 0, 5)
    like = {"x": torch.zeros(2, 4), "y": {"z": torch.zeros(2, 4, dtype=torch.float64)}}
    found = method.client_noise(like, info)
    assert found["y"]["z"].dtype == torch.float64
    assert not torch.isclose(found["x"].double(), found["y"]["z"]).any()
    one = method.client_noise({"x": torch.zeros(1, 4)}, info.rows(slice(1, 2)))
    assert torch.equal(one["x"][0], found["x"][1])
    server = {"x": torch.zeros(4)}
    draws = [method.server_noise(server, r, key)["x"] for r in (0, 1) for key in ("a", "b")]
    draws.append(found["x"][0])
    assert len({tuple(d.tolist()) for d in draws}) == 5
    assert torch.equal(method.server_noise(server, 1, "b")["x"], draws[3])
