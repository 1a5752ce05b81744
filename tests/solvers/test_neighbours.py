"""Votes of nearest neighbours, against numbers by hand and a loop over sorted distances."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_pfl.solvers.neighbours import best_share, mixed_logits, neighbour_votes
from tests.methods.quadratics import closed_form

KEYS = torch.tensor([[0.0, 0], [1, 0], [0, 2], [3, 3]])
LABELS, ALL = torch.tensor([0, 1, 1, 2]), torch.ones(4, dtype=torch.bool)


@closed_form
def test_four_keys_have_the_known_votes() -> None:
    """Squared distances 0.25, 0.25, 4.25 and 15.25 in two dimensions."""
    votes = neighbour_votes(torch.tensor([[0.5, 0.0]]), KEYS, LABELS, ALL, 3, 3)
    assert votes[0].tolist() == pytest.approx([0.46831053, 0.53168947, 0.0], rel=1e-6)
    mixed = mixed_logits(torch.tensor([[0.2, 0.3, 0.5]]).double().log(), votes, 0.25)
    assert mixed.exp()[0].tolist() == pytest.approx([0.26707763, 0.35792237, 0.375], rel=1e-6)


def test_equal_distances_take_the_first_keys() -> None:
    votes = neighbour_votes(torch.tensor([[0.5, 0.0]]), KEYS, LABELS, ALL, 1, 3)
    assert votes[0].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("neighbours", [4, 50])
def test_as_many_neighbours_as_keys_are_a_kernel_estimate(neighbours: int) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(n, 3, generator=generator).double() for n in (6, 5))
    labels, stored = torch.tensor([2, 0, 1, 2, 0]), torch.tensor([True] * 4 + [False])
    found = neighbour_votes(queries, keys, labels, stored, neighbours, 3, scale=2.0)
    q, k = queries.numpy(), keys.numpy()
    kernel = np.exp(-((q[:, None] - k) ** 2).sum(2) / (3 * 2.0))[:, :4]
    expected = np.stack([kernel[:, labels[:4].numpy() == c].sum(1) for c in range(3)], 1)
    np.testing.assert_allclose(found, expected / expected.sum(1, keepdims=True), rtol=1e-12)


def test_nothing_stored_has_no_votes_and_leaves_the_model() -> None:
    votes = neighbour_votes(torch.ones(2, 2), KEYS, LABELS, ~ALL, 3, 3)
    assert not votes.any()
    outputs = torch.tensor([[1.0, -2.0, 0.5]]).double()
    torch.testing.assert_close(mixed_logits(outputs, votes[:1], 0.0), outputs.log_softmax(1))


def test_the_share_with_the_smallest_loss_is_chosen() -> None:
    """The mean of log(a + b l) over two samples, by hand, has its maximum at 0.7."""
    model = torch.tensor([[0.9, 0.1], [0.3, 0.7]]).double()
    votes = torch.tensor([[0.2, 0.8], [0.7, 0.3]]).double()
    labels = torch.tensor([0, 0])
    means = [np.log(0.9 - 0.7 * s / 10) + np.log(0.3 + 0.4 * s / 10) for s in range(11)]
    chosen = best_share(model.log(), votes, labels)
    assert chosen == int(np.argmax(means)) / 10
    assert 0 < chosen < 1
    assert best_share(model.log(), model, labels) == 0.0
