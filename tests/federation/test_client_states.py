"""The bank: gather and scatter touch the clients that were asked for, and nobody else."""

from __future__ import annotations

import pytest
import torch

from lightning_pfl.core.tree import Tree, is_expanded, leaves
from lightning_pfl.federation.client_states import ClientStateStore

pytestmark = pytest.mark.quick


def make_bank(clients: int = 5) -> ClientStateStore:
    row = {
        "model": {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)},
        "mixing": torch.tensor(0.5),
    }
    return ClientStateStore(row, clients)


def snapshot(client_states: ClientStateStore) -> list[torch.Tensor]:
    return [leaf.clone() for leaf in leaves(client_states.tree)]


def test_everyone_starts_with_a_copy_of_the_row() -> None:
    client_states = make_bank()
    assert client_states.tree["model"]["w"].tolist() == [[1.0, 2.0]] * 5
    assert client_states.tree["mixing"].tolist() == [0.5] * 5
    assert not any(is_expanded(leaf) for leaf in leaves(client_states.tree))


def test_the_row_is_not_aliased() -> None:
    row = {"w": torch.zeros(2)}
    client_states = ClientStateStore(row, 1)
    row["w"].fill_(9.0)
    assert client_states.tree["w"].tolist() == [[0.0, 0.0]]


def test_gather_gives_copies_in_the_order_of_the_ids() -> None:
    client_states = make_bank()
    client_states.tree["mixing"].copy_(torch.arange(5.0))
    part = client_states.gather(torch.tensor([3, 0, 4]))
    assert part["mixing"].tolist() == [3.0, 0.0, 4.0]
    before = snapshot(client_states)
    part["model"]["w"].fill_(-1.0)
    assert all(map(torch.equal, leaves(client_states.tree), before))


def test_scatter_leaves_the_others_untouched() -> None:
    client_states = make_bank()
    before = snapshot(client_states)
    ids = torch.tensor([4, 1])
    new: Tree = {
        "model": {"w": torch.tensor([[7.0, 8.0], [5.0, 6.0]]), "n": torch.tensor([10, 20])},
        "mixing": torch.tensor([0.1, 0.2]),
    }
    client_states.scatter(ids, new)
    assert client_states.tree["model"]["w"][4].tolist() == [7.0, 8.0]
    assert client_states.tree["model"]["n"][1] == 20
    others = torch.tensor([0, 2, 3])
    assert all(
        torch.equal(now[others], then[others])
        for now, then in zip(leaves(client_states.tree), before, strict=True)
    )


def test_gather_after_scatter_is_the_identity() -> None:
    client_states, ids = make_bank(), torch.tensor([2, 0])
    new = {"model": {"w": torch.randn(2, 2), "n": torch.tensor([1, 2])}, "mixing": torch.rand(2)}
    client_states.scatter(ids, new)
    assert all(map(torch.equal, leaves(client_states.gather(ids)), leaves(new)))


def test_a_saved_bank_loads_into_another() -> None:
    first, second = make_bank(), make_bank()
    first.scatter(
        torch.tensor([1]),
        {"model": {"w": torch.ones(1, 2), "n": torch.tensor([9])}, "mixing": torch.zeros(1)},
    )
    saved = {"mixing": first.state_dict()["mixing"], "model": first.state_dict()["model"]}
    second.load_state_dict(saved)
    assert all(map(torch.equal, leaves(second.tree), leaves(first.tree)))


def test_bytes_are_counted() -> None:
    assert make_bank(5).nbytes() == 5 * (2 * 4 + 8 + 4)


def test_a_method_without_memory_has_an_empty_bank() -> None:
    client_states = ClientStateStore({"model": {}}, 3)
    assert client_states.gather(torch.tensor([0, 2])) == {"model": {}}
    client_states.scatter(torch.tensor([0, 2]), {"model": {}})
    assert client_states.nbytes() == 0


def test_states_that_could_not_be_stored_are_refused() -> None:
    client_states = make_bank()
    ids = torch.tensor([0, 2])
    right = client_states.gather(ids)
    with pytest.raises(ValueError, match=r"no tensor as 'last', but .* the shape \(2,\)"):
        client_states.scatter(ids, {**right, "last": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"shape \(\) as 'mixing', but .* no tensor"):
        client_states.scatter(ids, {"model": right["model"]})
    with pytest.raises(ValueError, match=r"shape \(\) as 'mixing', but .* \(1,\)"):
        client_states.scatter(ids, {**right, "mixing": torch.zeros(2, 1)})


def test_names_without_a_tensor_may_be_missing() -> None:
    client_states = ClientStateStore({"model": {}, "mixing": torch.tensor(0.5)}, 3)
    client_states.scatter(torch.tensor([1]), {"mixing": torch.tensor([0.25])})
    assert client_states.tree["mixing"].tolist() == [0.5, 0.25, 0.5]
