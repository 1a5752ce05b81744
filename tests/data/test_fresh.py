"""FreshDataModule: a round's samples are those of the source and the round, also after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pfl.core.tree import Tree
from lightning_pfl.data import FreshDataModule, LinearRepresentation
from lightning_pfl.data.sources.base import Fields
from lightning_pfl.methods import FedRep
from lightning_pfl.methods.base import LocalStep, Method
from lightning_pfl.models import LinearRepresentation as Model
from lightning_pfl.testing import Fit, assert_trees_equal, fit

FRESH = {"limit_val_batches": 0, "reload_dataloaders_every_n_epochs": 1}


def source(**settings: Any) -> LinearRepresentation:
    return LinearRepresentation(3, 4, 2, 5, test_samples=1, dtype="float64", **settings)


class Watching(Method):
    """Keeps the samples that the clients see."""

    def __init__(self) -> None:
        super().__init__(local_epochs=None, local_steps=1)
        self.seen: list[torch.Tensor] = []

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        (x, _), _ = client.samples(minibatches)
        self.seen.append(x.flatten(0, 1))
        return super().client_step(state, minibatches, client)


def run(method: Method, data: FreshDataModule, rounds: int, **settings: Any) -> Fit:
    torch.manual_seed(0)
    return fit(method, data, Model(4, 2, lr=0.05).double(), rounds, **{**FRESH, **settings})


def test_every_round_has_the_samples_that_the_source_draws() -> None:
    method = Watching()
    run(method, FreshDataModule(source(), batch_size=5), 3, engine="sequential")
    assert len(method.seen) == 9  # three clients in three rounds
    for round in range(3):
        seen = torch.cat(method.seen[3 * round : 3 * round + 3])
        drawn = source().draw(round)[0]
        assert {tuple(row) for row in seen.tolist()} == {tuple(row) for row in drawn.tolist()}
    assert not torch.equal(source().draw(0)[0], source().draw(1)[0])


def test_drawn_samples_have_the_sources_subspace_and_heads() -> None:
    of = source(noise_variance=0.0)
    basis, heads = (torch.from_numpy(part) for part in of.truth())
    x, y = of.draw(7)
    expected = ((x @ basis) * heads.repeat_interleave(5, 0)).sum(1)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-13)


def test_new_clients_may_have_other_numbers_of_samples() -> None:
    of = source(new_clients=1, new_samples=9)
    data = FreshDataModule(of, new_clients=1)
    data.setup()
    assert data.train_dataloader().num_samples.tolist() == [5, 5]
    assert data.new_clients("train").num_samples.tolist() == [9]
    with pytest.raises(ValueError, match=r"`new_clients` to be in \[0, 3\), with `new_samples`"):
        source(new_clients=1)


def test_a_resumed_run_goes_on_with_the_samples_it_would_have_had(tmp_path: Path) -> None:
    def method() -> FedRep:
        return FedRep(head_steps=2, body_steps=1)

    whole = run(method(), FreshDataModule(source()), 4, participation=2)
    half = run(method(), FreshDataModule(source()), 2, participation=2)
    path = half.save(tmp_path / "half.ckpt")
    resumed = run(method(), FreshDataModule(source()), 4, participation=2, ckpt_path=path)
    assert_trees_equal(resumed.server, whole.server)
    assert_trees_equal(resumed.client_state, whole.client_state)


def test_a_trainer_that_would_keep_the_samples_is_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"reload_dataloaders_every_n_epochs=1\) for"
    ):
        run(FedRep(), FreshDataModule(source()), 2, reload_dataloaders_every_n_epochs=0)


def test_a_source_with_another_number_of_samples_is_refused() -> None:
    class Short(LinearRepresentation):
        def draw(self, round: int) -> Fields:
            return tuple(leaf[1:] for leaf in super().draw(round))

    data = FreshDataModule(Short(3, 4, 2, 5))
    with pytest.raises(ValueError, match=r"`draw` of Short to return 15 samples, .* got 14"):
        data.train_dataloader()
