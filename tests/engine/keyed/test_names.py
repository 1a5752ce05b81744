"""Random functions that are found by their names draw as they do under the mode."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pfl.engine.keyed.functions import HANDLERS
from lightning_pfl.engine.keyed.mode import KeyedRandomness
from lightning_pfl.engine.keyed.names import NamedRandomness, replaced_names

KEY = torch.tensor(7)
X = torch.linspace(1, 2, 24).view(2, 3, 4)
PIXELS = torch.arange(8.0**3).view(1, 8, 8, 8)
ATTENTION = nn.MultiheadAttention(4, 2, dropout=0.5)
DRAWS: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(X),
    "layer": lambda: nn.Dropout(0.5)(X),
    "torch.dropout": lambda: torch.dropout(X, 0.5, True),
    "dropout1d": lambda: F.dropout1d(X),
    "dropout2d": lambda: F.dropout2d(X[None]),
    "dropout3d": lambda: F.dropout3d(X[None, None]),
    "attention": lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.5),
    "heads": lambda: ATTENTION(X, X, X)[0],
    "rand": lambda: torch.rand(3),
    "randn": lambda: torch.randn(3),
    "rand_like": lambda: torch.rand_like(X),
    "randn_like": lambda: torch.randn_like(input=X),
    "randint": lambda: torch.randint(9, (3,)),
    "randperm": lambda: torch.randperm(9),
    "bernoulli": lambda: torch.bernoulli(X / 2),
    "method bernoulli": lambda: (X / 2).bernoulli(),
    "bernoulli_": lambda: torch.empty(3).bernoulli_(0.5),
    "uniform_": lambda: torch.empty(3).uniform_(2, 3),
    "normal_": lambda: nn.Parameter(torch.empty(3)).data.normal_(2, std=3),
    "init.uniform_": lambda: nn.init.uniform_(torch.empty(3)),
    "init.normal_": lambda: nn.init.normal_(torch.empty(3)),
    "init.trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(3)),
    "init.xavier_uniform_": lambda: nn.init.xavier_uniform_(torch.empty(3, 4)),
    "init.kaiming_uniform_": lambda: nn.init.kaiming_uniform_(torch.empty(3, 4)),
    "init.kaiming_normal_": lambda: nn.init.kaiming_normal_(torch.empty(3, 4)),
    "pool": lambda: F.fractional_max_pool2d(PIXELS[0], 2, output_ratio=(0.5, 0.5)),
    "pool of volumes": lambda: F.fractional_max_pool3d(PIXELS, 2, output_size=4),
    "pool's places": lambda: F.fractional_max_pool2d(PIXELS[0], 2, 4, return_indices=True)[1],
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_numbers_are_those_of_the_mode(name: str) -> None:
    def two() -> list[Tensor]:
        return [DRAWS[name](), DRAWS[name]()]

    with KeyedRandomness(KEY) as mode:
        expected = two()
    with replaced_names(), NamedRandomness(KEY) as named:
        found = two()
    assert mode.calls == named.calls > 0
    assert all(map(torch.equal, found, expected))


def test_outside_of_a_step_torch_draws() -> None:
    owners = (F, torch, Tensor)
    before = [dict(vars(owner)) for owner in owners]
    torch.manual_seed(3)
    expected = [draw() for draw in DRAWS.values()]
    torch.manual_seed(3)
    with replaced_names():
        assert F.dropout is not before[0]["dropout"]
        assert all(map(torch.equal, [draw() for draw in DRAWS.values()], expected))
    assert [dict(vars(owner)) for owner in owners] == before


def test_every_function_has_a_name() -> None:
    with replaced_names():
        owners = (F, torch, Tensor)
        assert not [f for f in HANDLERS if any(getattr(o, f.__name__, None) is f for o in owners)]


def test_another_thread_draws_from_torch() -> None:
    found: list[Tensor] = []
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with replaced_names(), NamedRandomness(KEY) as named:
        thread = Thread(target=lambda: found.append(torch.rand(4)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)
    assert not named.calls


def test_a_function_in_the_place_of_torchs_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropout(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x + 1

    monkeypatch.setattr(F, "dropout", dropout)
    with replaced_names(), NamedRandomness(KEY):
        assert torch.equal(nn.Dropout(0.5)(X), X + 1)
    assert F.dropout is dropout


def test_draws_in_the_backward_pass_are_refused() -> None:
    with replaced_names(), NamedRandomness(KEY) as named:
        torch.rand(2)
        with (
            named.closing(),
            pytest.raises(RuntimeError, match="no random numbers in the backward pass"),
        ):
            torch.empty(2).bernoulli_(0.5)
