"""Mistakes in a method of one's own: the error names the function and what it should return."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_pfl import FederatedStrategy
from lightning_pfl.methods.base import Method
from lightning_pfl.testing import QuadraticModule, fit, quadratic_clients


def in_place(self: Any, received: Any, *others: Any) -> Any:
    for leaf in received["model"].values():
        leaf.mul_(0.9)
    return {"model": received["model"]}


MISTAKES: dict[str, tuple[str, Any, str]] = {
    "no server": (
        "init_server",
        lambda self, model: None,
        r"`init_server` of Wrong to return a dict of tensors, but got None\. Does it end with",
    ),
    "a number in the client state": (
        "init_client_state",
        lambda self, model: {"count": 0},
        r"`init_client_state` of Wrong to return tensors, but its entry 'count' is an int, 0",
    ),
    "nothing sent": (
        "download",
        lambda self, server, info: None,
        "`download` of Wrong to return a dict of tensors, but got None",
    ),
    "no local state": (
        "client_init",
        lambda self, received, client_state, info: None,
        "`client_init` of Wrong to return a dict of tensors, but got None",
    ),
    "received in place": ("client_init", in_place, "`client_init` of Wrong to leave `received`"),
    "no step": (
        "client_step",
        lambda self, state, minibatches, client: None,
        "`client_step` of Wrong to return a dict of tensors, but got None",
    ),
    "no client state": (
        "client_final",
        lambda self, received, client_state, state, info: {"model": state["model"]},
        "to return the upload and the client state, but got a dict. End it with",
    ),
    "no axis of clients": (
        "client_final",
        lambda self, received, client_state, state, info: ({"n": torch.ones(())}, client_state),
        r"a row for each client, \d at work, but its entry 'n' has the shape \(\)",
    ),
    "no mean": (
        "server_update",
        lambda self, server, uploads, info: {"model": uploads["model"]},
        r"server's tree with the shape \(1,\) as 'model/w', but it has the shape \(2, 1\)",
    ),
    "an entry that goes": (
        "server_update",
        lambda self, server, uploads, info: {},
        r"the shape \(1,\) as 'model/w', but it has no tensor. Return all entries of `init_server`",
    ),
}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_result_is_named(mistake: str, engine: Any) -> None:
    name, function, match = MISTAKES[mistake]
    wrong = type("Wrong", (Method,), {name: function})
    with pytest.raises((TypeError, ValueError, RuntimeError), match=match):
        fit(wrong(), quadratic_clients([1.0, 2.0], [1.0, 4.0]), QuadraticModule(lr=0.1), 1, engine)


def test_a_constructor_that_forgets_the_base_is_named() -> None:
    wrong = type("Wrong", (Method,), {"__init__": lambda self: None})
    with pytest.raises(TypeError, match=r"`__init__` of Wrong to call `super\(\).__init__"):
        FederatedStrategy(wrong())
