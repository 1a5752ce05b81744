"""Messages between neighbours against a plain loop over the edges."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pfl import ClientModules
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.contract.known import Known
from lightning_pfl.contract.records import ClientInfo, Round
from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.core.tree import Model, Tree
from lightning_pfl.graphs.messages import Exchange, PeerExchange, ReceivedMessages
from lightning_pfl.methods.base import Method
from lightning_pfl.testing import Recorder
from tests.federation.test_architectures import OF, loaders, modules
from tests.trainer.setting import SIZES, Quadratic, points, trained, trainer

EDGES = {(0, 1): 0.5, (0, 2): 2.0, (1, 2): 1.0, (3, 0): 0.25}
"""Ragged: three neighbours, two, two, one."""


def graph(edges: dict[tuple[int, int], float], clients: int) -> Any:
    """Lists of neighbours, filled up."""
    of: list[list[int]] = [[] for _ in range(clients)]
    for i, j in edges:
        of[i].append(j)
        of[j].append(i)
    slots = max(map(len, of))
    neighbours = torch.zeros(clients, slots, dtype=torch.int64)
    reverse, mask = torch.zeros_like(neighbours), torch.zeros(clients, slots, dtype=torch.bool)
    weights = torch.zeros(clients, slots, dtype=torch.float64)
    for i, mine in enumerate(of):
        for s, j in enumerate(mine):
            neighbours[i, s], mask[i, s], reverse[i, s] = j, True, of[j].index(i)
            weights[i, s] = edges.get((i, j), edges.get((j, i), 0.0))
    rows = torch.tensor([[i, j, weight] for (i, j), weight in edges.items()], dtype=torch.float64)
    return SimpleNamespace(
        neighbours=neighbours, mask=mask, reverse=reverse, slot_weights=weights, rows=rows
    )


GRAPH = graph(EDGES, 4)


def listed(client: int) -> list[int]:
    """The neighbours of a client, in the order of its slots."""
    kept = GRAPH.mask[client]
    return [int(j) for j in GRAPH.neighbours[client][kept]]


def edge(i: int, j: int) -> float:
    return EDGES.get((i, j), EDGES.get((j, i), 0.0))


class Letters(Method):
    """Clients write their point and who they are, in all three ways, and keep what they get."""

    personal: ParameterSpec = "all"
    edge_state = ("each", "all", "weights")

    def __init__(self, when: Literal["before", "after"] = "after") -> None:
        super().__init__(weighting="uniform")
        self.when = when

    def bind(self, known: Known) -> None:
        super().bind(known)
        self.graph = GRAPH
        self.slots = self.graph.mask.shape[1]

    def exchanges(self, round: int) -> tuple[Exchange, ...]:
        return tuple(Exchange(to, to, self.when) for to in ("each", "all", "sum"))

    def init_client_state(self, model: Model) -> Tree:
        nothing = torch.zeros(self.slots, 3, dtype=torch.float64)
        state = {"each": nothing, "all": nothing, "weights": nothing[:, 0], "sum": nothing[0]}
        return {"model": model, "who": torch.zeros((), dtype=torch.float64), **state}

    def init_client_state_rows(self, client_state: Tree, model: Model, info: ClientInfo) -> Tree:
        return {**client_state, "who": 10.0 * (1 + info.index.double())}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        assert not set(self.edge_state) & set(client_state)  # which local training has no use for
        return {"model": {}}, {**client_state, "model": state["model"]}

    def send(self, exchange: str, client_state: Tree, info: ClientInfo) -> Tree:
        letter = torch.cat([client_state["who"][:, None], client_state["model"]["w"]], 1)
        if exchange != "each":
            return {"": letter}
        slot = torch.arange(self.slots, dtype=torch.float64)
        letter = letter[:, None].repeat(1, self.slots, 1)
        letter[..., 0] += slot
        return {"": letter}

    def receive(
        self, exchange: str, client_state: Tree, inbox: ReceivedMessages, info: ClientInfo
    ) -> Tree:
        torch.testing.assert_close(
            inbox.sent, self.send(exchange, client_state, info), rtol=0, atol=0
        )
        return {**client_state, exchange: inbox.messages[""], "weights": inbox.weights}


def by_loop(points: dict[int, Tensor], cohort: list[int]) -> dict[int, dict[str, Tensor]]:
    """What each client of the cohort has, edge by edge."""
    found = {}
    for i in cohort:
        each, everybody = torch.zeros(3, 3), torch.zeros(3, 3)
        weights, total = torch.zeros(3), torch.zeros(3)
        for s, j in enumerate(listed(i)):
            if j not in cohort:
                continue
            letter = torch.cat([torch.tensor([10.0 * (1 + j)]), points[j].float()])
            everybody[s], weights[s] = letter, edge(i, j)
            total += edge(i, j) * letter
            each[s] = letter + torch.tensor([listed(j).index(i), 0.0, 0.0])
        found[i] = {"each": each, "all": everybody, "weights": weights, "sum": total}
    return found


def check(client_state: Tree, client: int, expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(client_state[name][client].float(), value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_letters_reach_the_neighbours(when: Any, engine: str) -> None:
    recorder = Recorder()
    run = trainer(Letters(when), engine=engine, max_epochs=2, callbacks=[recorder])
    run.fit(Quadratic(), points(), points())
    start = torch.zeros(2, dtype=torch.float64)
    once = {k: trained(start, k) for k in range(4)}
    twice = {k: trained(once[k], k) for k in range(4)}
    expected = by_loop(once if when == "before" else twice, [0, 1, 2, 3])
    for client in range(4):
        check(run.strategy.federation.client_states.tree, client, expected[client])
        torch.testing.assert_close(run.strategy.client_state_dict(client)["w"], twice[client])
    # Three doubles over each of four edges, both ways, in three exchanges.
    bytes_each = 3 * 2 * len(EDGES) * 3 * 8
    assert [round.bytes_exchanged for round in recorder.rounds] == [bytes_each] * 2
    assert run.callback_metrics["round/bytes_up"] == bytes_each
    assert run.callback_metrics["round/bytes_down"] == bytes_each


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_only_the_cohort_writes_and_reads(engine: str) -> None:
    recorder = Recorder()
    run = trainer(Letters(), engine=engine, participation=3, max_epochs=3, callbacks=[recorder])
    run.fit(Quadratic(), points(), points())
    w = dict.fromkeys(range(4), torch.zeros(2, dtype=torch.float64))
    kept: dict[int, dict[str, Tensor]] = {}
    for round in recorder.rounds:
        cohort = round.info.index.tolist()
        w |= {k: trained(w[k], k) for k in cohort}
        kept |= by_loop(w, cohort)
        there = sum(i in cohort and j in cohort for i, j in EDGES)
        assert round.bytes_exchanged == 3 * 2 * there * 3 * 8
    assert len(kept) == 4
    for client, expected in kept.items():
        check(run.strategy.federation.client_states.tree, client, expected)


def test_who_fails_neither_writes_nor_reads() -> None:
    data = points()
    data.fields[0][SIZES[0] : SIZES[0] + SIZES[1]] = torch.nan  # client 1
    run = trainer(Letters(), max_epochs=1)
    with pytest.warns(UserWarning, match=r"left out 1 of 4 clients \('1'"):
        run.fit(Quadratic(), data, points())
    start = torch.zeros(2, dtype=torch.float64)
    expected = by_loop({k: trained(start, k) for k in range(4)}, [0, 2, 3])
    for client in (0, 2, 3):
        check(run.strategy.federation.client_states.tree, client, expected[client])
    assert not run.strategy.federation.client_states.tree["weights"][1].any()


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_run_resumes_bitwise(engine: str, tmp_path: Path) -> None:
    def make(rounds: int) -> Any:
        return trainer(Letters(), engine=engine, max_epochs=rounds, participation=3)

    whole, first, rest = make(4), make(2), make(4)
    whole.fit(Quadratic(), points(), points())
    first.fit(Quadratic(), points(), points())
    first.save_checkpoint(tmp_path / "last.ckpt")
    rest.fit(Quadratic(), points(), points(), ckpt_path=str(tmp_path / "last.ckpt"))
    for name, leaf in whole.strategy.federation.client_states.tree.items():
        if isinstance(leaf, Tensor):
            assert torch.equal(rest.strategy.federation.client_states.tree[name], leaf)


class Numbers(Letters):
    """Letters without the point: of one shape whatever the architecture."""

    def send(self, exchange: str, client_state: Tree, info: ClientInfo) -> Tree:
        letter = client_state["who"][:, None].expand(-1, 3).clone()
        if exchange == "each":
            letter = letter[:, None] + torch.arange(self.slots, dtype=torch.float64)[:, None]
        return {"": letter}

    def message_nbytes(self, exchange: str, sent: Tree, info: ClientInfo) -> Tensor | None:
        return 7 + GRAPH.neighbours[info.index] if exchange == "each" else None


def test_clients_of_different_architectures_write_to_each_other() -> None:
    traffic = Traffic()
    some = range(4)
    run = trainer(Numbers(), max_epochs=1, callbacks=[traffic])
    run.fit(ClientModules(modules(), OF[:4]), loaders(0, some), loaders(1, some))
    for group in run.strategy.federation.architectures:
        assert 0 < len(group.clients) < 4
        for row, client in enumerate(group.clients.tolist()):
            for s, j in enumerate(listed(client)):
                letter = torch.full((3,), 10.0 * (1 + j), dtype=torch.float64)
                assert torch.equal(group.client_states.tree["all"][row, s], letter)
                in_slot = letter + listed(j).index(client)
                assert torch.equal(group.client_states.tree["each"][row, s], in_slot)
            assert not group.client_states.tree["all"][row, len(listed(client)) :].any()
            assert (
                group.client_states.tree["weights"][row].tolist()
                == GRAPH.slot_weights[client].tolist()
            )
    # The size of a letter is what the method says, where it says something.
    sizes = sum(7 + j for i in range(4) for j in listed(i))
    assert traffic.found == [sizes + 2 * 2 * len(EDGES) * 3 * 8]


class Traffic(FederatedCallback):
    """Notes the bytes between clients."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_round_end(self, trainer: Any, module: Any, round: Round) -> None:
        self.found.append(round.bytes_exchanged)


class Models(Numbers):
    """Writes what depends on the architecture."""

    def send(self, exchange: str, client_state: Tree, info: ClientInfo) -> Tree:
        return {"weight": client_state["model"]["backbone.0.weight"]}


def test_letters_of_different_shapes_are_refused_before_anybody_trains() -> None:
    with pytest.raises(
        MisconfigurationException,
        match=r"messages between clients of Models to have .* `weight` is \(1, 3, 6\) "
        r"in architecture 'wide' and \(1, 3, 4\) "
        r"in architecture 'narrow'.*Use SheafFMTL",
    ):
        trainer(Models(), max_epochs=1).fit(
            ClientModules(modules(), OF[:4]), loaders(0, range(4)), loaders(1, range(4))
        )


def test_a_client_without_neighbours_gets_nothing() -> None:
    lonely = graph({(0, 2): 1.0}, 3)
    peers = PeerExchange(lonely, torch.tensor([2, 1, 0]), "cpu")
    sent = {"": torch.tensor([[2.0], [1.0], [0.5]])}
    assert peers.deliver(Exchange("a", "all"), sent).messages[""].tolist() == [
        [[0.5]],
        [[0.0]],
        [[2.0]],
    ]
    total = peers.deliver(Exchange("a", "sum"), sent).messages[""]
    assert total.tolist() == [[0.5], [0.0], [2.0]]


def test_numbers_that_nobody_gets_do_not_spread() -> None:
    """What an absent neighbour, or a slot without one, holds never counts, not even NaN."""
    peers = PeerExchange(GRAPH, torch.tensor([0, 3]), "cpu")
    each = torch.full((2, 3, 1), torch.nan)
    each[0, listed(0).index(3)], each[1, listed(3).index(0)] = 5.0, 6.0
    got = peers.deliver(Exchange("a", "each"), {"": each}).messages[""].squeeze(2)
    assert got.tolist() == [[0.0, 0.0, 6.0], [5.0, 0.0, 0.0]]
