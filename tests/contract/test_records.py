"""The order of an evaluation's values."""

import pytest
import torch

from lightning_pfl.contract.records import Evaluation


@pytest.mark.quick
@pytest.mark.parametrize(
    ("orders", "names"),
    [
        ([("c", "a", "b")], "cab"),
        ([("c", "a"), ("c", "b", "a")], "cba"),  # b in some steps alone
        ([("a", "c"), ("b",)], "abc"),  # none logs both a and b
        ([("z", "d", "b"), ("d", "a")], "dab"),  # z isn't among the values
        ([("b", "a"), ("a", "b")], "ab"),
        ([("d", "c"), ("b", "a"), ("a", "b"), ("b", "d")], "abdc"),
        ([], "xcbad"),
    ],
)
def test_names_are_in_the_order_of_steps(orders: list[tuple[str, ...]], names: str) -> None:
    values = {name: torch.zeros(1) for name in "xcbad" if not orders or name in names}
    evaluation = Evaluation(values, torch.ones(1), orders=frozenset(orders))
    assert "".join(evaluation.ordered().values) == names
