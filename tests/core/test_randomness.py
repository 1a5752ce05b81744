"""Keys: functions of their arguments, independent of each other and of the global generator."""

from __future__ import annotations

import hashlib
import random
from itertools import product

import numpy as np
import pytest
import torch

from lightning_pfl.core.randomness import (
    derive,
    first_of_permutation,
    generator,
    permutation,
    put_generators_back,
    restoring_once,
    seeded,
)

pytestmark = pytest.mark.quick


def test_a_key_is_the_hash_of_its_path() -> None:
    digest = hashlib.blake2b(b"7/order/3/12", digest_size=8).digest()
    assert derive(7, "order", 3, 12) == int.from_bytes(digest, "little") >> 1


def test_keys_fit_int64_and_do_not_collide() -> None:
    keys = [
        derive(s, p, r, c)
        for s, p, r, c in product(range(4), ("order", "random"), range(20), range(20))
    ]
    assert len(set(keys)) == len(keys)
    assert min(keys) >= 0
    assert max(keys) < 2**63
    assert torch.tensor(keys).dtype == torch.int64


def test_the_bits_of_keys_are_balanced() -> None:
    keys = torch.tensor([derive(0, "order", 0, client) for client in range(4000)])
    shares = torch.stack([(keys >> bit & 1).double().mean() for bit in range(63)])
    # A share has standard deviation 0.5 / sqrt(4000); 5 of them fail once in 10^4 runs for 63 bits.
    assert (shares - 0.5).abs().max() < 5 * 0.5 / 4000**0.5


def test_neighbouring_arguments_are_not_glued_together() -> None:
    assert derive(0, "a", 1, 23) != derive(0, "a", 12, 3)
    assert derive(1, 2) != derive(12)


def test_a_permutation_is_torch_randperm_of_the_key() -> None:
    order = permutation(10, 5)
    assert torch.equal(order, torch.randperm(10, generator=torch.Generator().manual_seed(5)))
    assert sorted(order.tolist()) == list(range(10))
    assert not torch.equal(order, permutation(10, 6))
    assert permutation(0, 5).shape == (0,)


@pytest.mark.parametrize("key", [0, 5, 2**32 - 1, 2**32 + 7, 2**63 - 1])
@pytest.mark.parametrize(("length", "count"), [(2**15, 1), (70_001, 300), (10**6, 40)])
def test_few_positions_are_the_first_of_the_permutation(
    length: int, count: int, key: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.randperm(length, generator=torch.Generator().manual_seed(key))
    with monkeypatch.context() as patch:
        patch.delattr(torch, "randperm")  # no other position is drawn
        found = first_of_permutation(length, count, key)
    assert torch.equal(found, whole[:count])


@pytest.mark.parametrize(("length", "count"), [(1, 1), (10, 3), (10, 10), (40_000, 400)])
def test_many_positions_are_the_first_of_the_permutation_too(length: int, count: int) -> None:
    assert torch.equal(first_of_permutation(length, count, 9), permutation(length, 9)[:count])


def test_generators_of_equal_keys_agree() -> None:
    assert torch.equal(torch.rand(3, generator=generator(4)), torch.rand(3, generator=generator(4)))


def test_seeded_puts_the_global_state_back() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    with seeded(123):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    with seeded(123):
        assert torch.equal(torch.rand(2), inside)


def test_seeded_draws_from_the_key_alone_and_leaves_no_trace() -> None:
    def draws() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    def seed_all() -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    seed_all()
    undisturbed = draws()
    seed_all()
    with seeded(7, everything=True):
        inside = draws()
    assert draws() == undisturbed
    with seeded(7, everything=True):
        assert draws() == inside
    with seeded(8, everything=True):
        assert all(a != b for a, b in zip(draws(), inside, strict=True))


def test_seeded_leaves_other_generators_alone_unless_asked() -> None:
    random.seed(1)
    expected = [random.random(), random.random()]
    random.seed(1)
    with seeded(7):
        first = random.random()
    assert [first, random.random()] == expected


def _draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.randn())


def _seed_all() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    _draws()  # half of a pair of normal numbers is left


def test_blocks_that_are_restored_once_draw_the_same_and_leave_no_trace() -> None:
    _seed_all()
    undisturbed = _draws()
    alone = []
    for key in (7, 8):
        with seeded(key, everything=True):
            alone.append(_draws())
    _seed_all()
    with restoring_once():
        for key, expected in zip((7, 8), alone, strict=True):
            with restoring_once(), seeded(key, everything=True):
                assert _draws() == expected
    assert _draws() == undisturbed


def test_code_of_users_between_blocks_draws_on_from_where_it_was() -> None:
    _seed_all()
    undisturbed = [_draws() for _ in range(3)]
    _seed_all()
    with restoring_once():
        for expected in undisturbed:
            with seeded(7, everything=True):
                _draws()
            put_generators_back()
            assert _draws() == expected


def test_an_error_in_blocks_that_are_restored_once_leaves_no_trace() -> None:
    _seed_all()
    undisturbed = _draws()
    _seed_all()

    def fail() -> None:
        with restoring_once(), seeded(7, everything=True):
            _draws()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert _draws() == undisturbed
    with seeded(7, everything=True):  # which restores by itself again
        _draws()
    _seed_all()
    with seeded(7, everything=True):
        _draws()
    assert _draws() == undisturbed
