"""Memory is used again only if nothing holds it, and is kept for a round."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pfl.core import kept_memory
from lightning_pfl.core.kept_memory import SMALLEST, KeptMemory
from lightning_pfl.core.tree import Stacked

LARGE = SMALLEST // 4


def test_what_nothing_holds_is_used_again() -> None:
    memory, like = KeptMemory(), torch.empty(0)
    first = memory.empty((2, LARGE), like).data_ptr()
    assert memory.empty((LARGE, 2), like).data_ptr() == first
    assert memory.empty((LARGE, 2), like.double()).data_ptr() != first


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[1:, ::3],
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: torch.nn.Parameter(tensor),
        lambda tensor: {"a": [tensor.unsqueeze(0)]},
    ],
    ids=["itself", "view", "alias", "NumPy", "storage", "parameter", "inside"],
)
def test_what_something_holds_stays(hold: Callable[[Tensor], Any]) -> None:
    memory = KeptMemory()
    tensor = memory.empty((2, LARGE), torch.empty(0)).fill_(1.0)
    address, held = tensor.data_ptr(), hold(tensor)
    del tensor
    other = memory.empty((2, LARGE), torch.empty(0))
    assert other.data_ptr() != address
    del other, held
    # Both pieces are free now.
    assert len({memory.empty((2, LARGE), torch.empty(0)).data_ptr() for _ in range(2)}) == 1


def test_what_a_round_did_not_use_is_given_back() -> None:
    memory, like = KeptMemory(), torch.empty(0)
    both = [memory.empty((LARGE,), like) for _ in range(2)]
    memory.begin_round()
    del both
    memory.empty((LARGE,), like)
    memory.begin_round()
    assert len(memory._pieces) == 1


def test_small_tensors_other_types_and_too_many_are_torchs(monkeypatch: Any) -> None:
    memory = KeptMemory()
    memory.empty((3,), torch.empty(0))
    memory.empty((LARGE,), torch.empty(0, dtype=torch.int32))
    assert memory.empty((LARGE,), torch.empty(0, device="meta")).device.type == "meta"
    assert not memory._pieces
    monkeypatch.setattr(kept_memory, "LIMIT", 2 * SMALLEST)
    held = [memory.empty((LARGE,), torch.empty(0)) for _ in range(3)]
    assert len(memory._pieces) == 2
    assert all(tensor.shape == (LARGE,) and tensor.dtype == torch.float32 for tensor in held)


def test_rows_of_the_next_round_leave_those_of_before_that_are_held() -> None:
    memory, results = KeptMemory(), []
    for round in range(3):
        memory.begin_round()
        rows = Stacked(2, memory)
        for client in range(2):
            rows.put(client, {"a": torch.full((1, LARGE), float(10 * round + client))})
        results.append(rows.tree()["a"])
        if round == 1:
            del results[0]
    assert [leaf[:, 0].tolist() for leaf in results] == [[10.0, 11.0], [20.0, 21.0]]
    assert len(memory._pieces) == 2
