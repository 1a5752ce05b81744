"""What a method knows of the federation, in a fit and before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_pfl.contract.known import Known
from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Tree
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing import QuadraticModule, fit, q2
from lightning_pfl.testing.conformance import SIZES, small_clients, small_module


class CountsLabels(FedAvg):
    """Keeps what it knew in each round."""

    def server_update(self, server: Tree, uploads: Tree, info: Any) -> Tree:
        self.counts = self.known.require_label_counts("CountsLabels")
        return super().server_update(server, uploads, info)


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_a_fit_counts_the_labels(engine: str) -> None:
    method, data = CountsLabels(), small_clients()
    fit(method, data, small_module(), engine=engine)
    labels = data.fields[1]
    wanted = [torch.bincount(labels[rows], minlength=3).tolist() for rows in data.indices]
    assert method.counts.tolist() == wanted
    assert method.counts.sum(1).tolist() == list(SIZES)
    assert method.has_training_data.tolist() == [size > 0 for size in SIZES]


def test_data_without_classes_are_refused_by_a_method_that_needs_them() -> None:
    with pytest.raises(MisconfigurationException, match=r"as CountsLabels needs .* by class"):
        fit(CountsLabels(), q2())


def test_what_is_not_given_follows_from_the_rest() -> None:
    known = Known.of(ParameterSplit(QuadraticModule(3)), 2, num_samples=torch.tensor([0, 4]))
    assert known.has_training_data.tolist() == [False, True]
    assert known.model_sizes.tolist() == [3, 3]
    assert Known.of(ParameterSplit(QuadraticModule()), 2).num_samples.tolist() == [0, 0]
    assert known.label_counts is None
