"""Uploads get the noise that `privacy` asks for, and nobody can compute it from the seed."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl import methods
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.contract.records import Round
from lightning_pfl.core.tree import weighted_mean
from lightning_pfl.deploy.node import Node
from lightning_pfl.deploy.privacy import add_noise
from lightning_pfl.testing import Problem
from tests.deploy.setting import leaves_of, recipe_of
from tests.methods.cases import case_of

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Flower needs Python 3.11")
SETTINGS = {"clipping_norm": 2.0, "sensitivity": 0.5, "epsilon": 4.0, "delta": 1e-5}


def test_changes_are_clipped_and_noisy() -> None:
    received = {"model": {"w": torch.ones(2, 200, 100)}}
    change = torch.stack([torch.full((200, 100), 1.0), torch.full((200, 100), 1e-3)])
    model = {"w": received["model"]["w"] + change, "n": torch.tensor([3, 4])}
    before = np.random.get_state(legacy=False)["state"]["key"].copy()
    found = add_noise({"model": model}, received, SETTINGS)["model"]
    assert torch.equal(found["n"], model["n"])
    norms = change.flatten(1).norm(dim=1)
    clipped = change * (2.0 / norms).clamp(max=1)[:, None, None]
    noise = found["w"] - 1 - clipped
    std = 0.5 * math.sqrt(2 * math.log(1.25 / 1e-5)) / 4.0  # the Gaussian mechanism
    # The standard error of a standard deviation of N numbers is std / sqrt(2 N).
    assert abs(float(noise.std()) - std) < 5 * std / math.sqrt(2 * noise.numel())
    assert abs(float(noise.mean())) < 5 * std / math.sqrt(noise.numel())
    assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], before)


def test_the_run_s_seed_does_not_tell_the_noise() -> None:
    tree = {"model": {"w": torch.zeros(1, 10)}}
    found = []
    for _ in range(2):
        np.random.seed(3)
        found.append(add_noise(tree, tree, SETTINGS)["model"]["w"])
    assert not torch.equal(*found)


def test_methods_that_need_more_than_a_mean_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mean of the uploaded models alone, but got FedMAP"):
        Node(recipe_of("FedMAP"), tmp_path, ["0"], privacy=SETTINGS)
    with pytest.raises(ValueError, match="Give all four"):
        Node(recipe_of("FedAvg"), tmp_path, ["0"], privacy={"epsilon": 1.0})
    with pytest.raises(ValueError, match=r"what Flower's LocalDpMod takes.*'epsilon': -1"):
        Node(recipe_of("FedAvg"), tmp_path, ["0"], privacy=SETTINGS | {"epsilon": -1.0})


class MeanOfAll(FederatedCallback):
    """Puts the weighted mean of all uploads in the place of each."""

    def on_local_training_end(self, trainer: Any, module: Any, round: Round) -> None:
        assert round.uploads is not None
        assert list(round.uploads) == ["model"]
        mean = weighted_mean(round.uploads["model"], round.info.weights)
        for name, leaf in round.uploads["model"].items():
            leaf.copy_(mean[name].expand_as(leaf))


AVERAGES = [m for m in methods.__all__ if case_of(m).method().averages_models]


@pytest.mark.parametrize("name", AVERAGES)
def test_methods_that_say_so_use_the_mean_of_the_models_alone(name: str) -> None:
    case = case_of(name)
    problem = Problem(**{"engine": "vectorized", **case.problem})
    plain = problem.fit(case.method())
    averaged = problem.fit(case.method(), callbacks=[MeanOfAll()])
    for path, leaf in leaves_of(plain.server).items():
        torch.testing.assert_close(leaves_of(averaged.server)[path], leaf)
