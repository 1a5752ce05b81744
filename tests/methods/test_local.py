"""LocalOnly: every client alone, whatever the participation; nothing leaves it."""

from __future__ import annotations

import torch

from lightning_pfl.methods import FedPer, LocalOnly
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    assert_trees_equal,
    descend,
    fit,
)
from lightning_pfl.testing.conformance import SIZES, small_clients, small_module
from tests.methods.case import Bytes, Case
from tests.methods.quadratics import LR, STEPS, A, C, close, closed_form, ragged
from tests.methods.references.local import local

CASE = Case(
    method=lambda: LocalOnly(),
    bytes={
        "defaults": Bytes(LocalOnly, 0, 0),
    },
    twin=None,  # The others are compared with it.
)


class Momentum(QuadraticModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)


W0 = torch.tensor([0.5, 0.5], dtype=torch.float64)


class TestLocalOnly:
    @closed_form
    def test_rounds_match_the_closed_form(self, engine: str) -> None:
        run = fit(LocalOnly(local_epochs=2), ragged(), QuadraticModule(2, LR, 0.5), 3, engine)
        close(run.client_state["model"]["w"], descend(W0, A, C, LR, 6 * STEPS))

    def test_everyone_trains_whatever_the_participation(self, engine: str) -> None:
        run = fit(LocalOnly(), ragged(), QuadraticModule(2, LR, 0.5), 2, engine, participation=1)
        close(run.client_state["model"]["w"], descend(W0, A, C, LR, 2 * STEPS))

    def test_many_steps_reach_each_clients_own_optimum(self, engine: str) -> None:
        method = LocalOnly(local_epochs=None, local_steps=60)
        run = fit(method, ragged(), QuadraticModule(2, 0.3, 0.5), 2, engine)
        # The slowest client, a = 0.5, keeps a share of 0.85^120 = 3e-9 of its distance.
        torch.testing.assert_close(run.client_state["model"]["w"][:3], C[:3], rtol=0, atol=1e-7)
        assert torch.equal(run.client_state["model"]["w"][3], W0)

    def test_two_rounds_of_one_epoch_are_one_round_of_two_without_momentum(
        self, engine: str
    ) -> None:
        two = fit(LocalOnly(local_epochs=1), ragged(), QuadraticModule(2, LR, 0.5), 2, engine)
        one = fit(LocalOnly(local_epochs=2), ragged(), QuadraticModule(2, LR, 0.5), 1, engine)
        assert_trees_equal(two.client_state, one.client_state)

    def test_momentum_begins_anew_in_every_round(self, engine: str) -> None:
        """v <- 0.5 v + a (w - c), w <- w - lr v, with v = 0 at the start of each round: so rounds
        of one epoch are behind one round of as many."""

        def by_hand(rounds: int, epochs: int) -> torch.Tensor:
            w = W0.repeat(len(A), 1)
            for k, steps in enumerate((epochs * STEPS).tolist()):
                for _ in range(rounds):
                    v = torch.zeros(2, dtype=torch.float64)
                    for _ in range(int(steps)):
                        v = 0.5 * v + A[k] * (w[k] - C[k])
                        w[k] -= LR * v
            return w

        separate, together = by_hand(3, 1), by_hand(1, 3)
        for rounds, epochs, want in ((3, 1, separate), (1, 3, together)):
            run = fit(LocalOnly(epochs), ragged(), Momentum(2, LR, 0.5), rounds, engine)
            close(run.client_state["model"]["w"], want)
        trained = STEPS > 0
        distance = [(w - C)[trained].norm(dim=1) for w in (separate, together)]
        assert (distance[0] > distance[1] + 1e-3).all()

    def test_is_fedper_with_everything_personal(self, engine: str) -> None:
        a = fit(LocalOnly(), small_clients(), small_module(), 2, engine)
        b = fit(FedPer(personal="all"), small_clients(), small_module(), 2, engine)
        assert_trees_equal(a.client_state, b.client_state)

    def test_matches_the_reference(self, engine: str) -> None:
        run = fit(LocalOnly(local_epochs=2), small_clients(), small_module(), 3, engine)
        expected = local(small_module(), small_clients(), 3, 2)
        assert_trees_close(
            run.models, {n: torch.stack([one[n] for one in expected]) for n in expected[0]}
        )

    def test_nothing_is_sent_and_there_is_no_global_model(self, engine: str) -> None:
        run = fit(LocalOnly(), small_clients(), small_module(), 1, engine)
        round = run.recorder.rounds[0]
        assert (round.uploads, round.bytes_up, round.bytes_down) == ({"model": {}}, 0, 0)
        assert round.info.index.tolist() == [k for k, size in enumerate(SIZES) if size]
        assert run.strategy.method.global_model(run.server) is None
