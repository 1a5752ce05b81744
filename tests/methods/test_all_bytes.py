"""Bytes that each method sends, against the formulas of the papers, written out in numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from lightning_pfl import methods
from lightning_pfl.methods.base import Method
from lightning_pfl.priors import DiagonalGaussianPrior
from lightning_pfl.testing import fit
from lightning_pfl.testing.conformance import SIZES, small_clients, small_module
from tests.methods.cases import CASES, linear_module, two_matrices
from tests.methods.networks import SCALARS, plain_module

#: Numbers of the small network: all, of its last layer, of what is below.
D, HEAD, BODY = SCALARS, 18 * 3 + 3, 2 * 9 + 2
#: A client's neighbours in the complete graph, in which clients without data take part too.
DEGREE = len(SIZES) - 1
#: A convolution, two numbers for each of two channels, and the last layer.
WITH_NORM, NORM = 2 * 9 + 4 + HEAD, 4
LINEAR = 25 * 3 + 3
#: Of the 77 dimensions a tenth is sent over an edge.
EDGE = 7


class Bytes(NamedTuple):
    """What one client receives and sends in a round, single precision."""

    method: Callable[[], Method]
    down: int
    up: int
    make_module: Callable[[], torch.nn.Module] = plain_module


FORMULAS: dict[str, Bytes] = {
    "APFL": Bytes(lambda: methods.APFL(adaptive=True), 4 * D, 4 * D),
    "CFL": Bytes(methods.CFL, 4 * D, 4 * D),
    "ClusterOracle": Bytes(lambda: methods.ClusterOracle(lambda client: 0), 4 * D, 4 * D),
    # From the second round on: the neighbours' x, the own mu and what the pairs (j, i) add to
    # equation 16; up the own x and z, all blocks being drawn.
    "ConvexClustering": Bytes(
        lambda: methods.ConvexClustering(0.2, blocks=1.0, dual_blocks=1.0),
        4 * D * DEGREE + 4 * D * DEGREE + 4 * D,
        4 * D + 4 * D * DEGREE,
    ),
    "Ditto": Bytes(methods.Ditto, 4 * D, 4 * D),
    "FedAvg": Bytes(methods.FedAvg, 4 * D, 4 * D),
    "FedBN": Bytes(methods.FedBN, 4 * (WITH_NORM - NORM), 4 * (WITH_NORM - NORM), small_module),
    # The logarithm of the weight is a double.
    "FedMAP": Bytes(methods.FedMAP, 4 * D, 4 * D + 8),
    "FedMAP, learned variances": Bytes(
        lambda: methods.FedMAP(DiagonalGaussianPrior()), 8 * D, 4 * D + 8
    ),
    # Nothing is measured; or one more double, with the weight or without.
    "FedMAP, by samples": Bytes(lambda: methods.FedMAP(weighting="samples"), 4 * D, 4 * D),
    "FedMAP, envelope": Bytes(lambda: methods.FedMAP(log_envelope=True), 4 * D, 4 * D + 16),
    "FedMAP, by samples, envelope": Bytes(
        lambda: methods.FedMAP(weighting="samples", log_envelope=True), 4 * D, 4 * D + 8
    ),
    # All but the buffers.
    "FedMAP, with BatchNorm": Bytes(methods.FedMAP, 4 * WITH_NORM, 4 * WITH_NORM + 8, small_module),
    # Two statistics for each of two channels, and an int64 that counts batches.
    "FedAvg, with BatchNorm": Bytes(
        methods.FedAvg, 4 * (WITH_NORM + 2 * 2) + 8, 4 * (WITH_NORM + 2 * 2) + 8, small_module
    ),
    # The sum of the others' models in the place of all of them.
    "FedMTL": Bytes(methods.FedMTL, 4 * D, 4 * D),
    "FedPer": Bytes(methods.FedPer, 4 * BODY, 4 * BODY),
    "FedProx": Bytes(methods.FedProx, 4 * D, 4 * D),
    "FedRep": Bytes(methods.FedRep, 4 * BODY, 4 * BODY),
    "FedU": Bytes(lambda: methods.FedU("complete"), 4 * D, 4 * D),
    "FedU, decentralized": Bytes(
        lambda: methods.FedU("complete", decentralized=True), 4 * D * DEGREE, 4 * D * DEGREE
    ),
    "GTVMin": Bytes(lambda: methods.GTVMin("complete"), 4 * D * DEGREE, 4 * D * DEGREE),
    "HomologicalConstraints": Bytes(
        lambda: methods.HomologicalConstraints("complete", edge_dim_ratio=0.1),
        8 * EDGE * DEGREE,
        8 * EDGE * DEGREE,
    ),
    # All models down; up one and its number.
    "IFCA": Bytes(lambda: methods.IFCA(3), 3 * 4 * D, 4 * D + 8),
    "LGFedAvg": Bytes(methods.LGFedAvg, 4 * HEAD, 4 * HEAD),
    # After round 0, whose moments test_linear_fedrep counts: 25 inputs, 2 dimensions.
    "LinearFedRep": Bytes(
        lambda: methods.LinearFedRep(body_lr=0.02), 4 * 25 * 2, 4 * 25 * 2, two_matrices
    ),
    "LocalOnly": Bytes(methods.LocalOnly, 0, 0),
    # The weights and one number for the step; up the change of the weights.
    "MOCHA": Bytes(
        lambda: methods.MOCHA(inner_iterations=1), 4 * LINEAR + 4, 4 * LINEAR, linear_module
    ),
    "PFedMe": Bytes(methods.PFedMe, 4 * D, 4 * D),
    "PerFedAvg": Bytes(methods.PerFedAvg, 4 * D, 4 * D),
    "SCAFFOLD": Bytes(methods.SCAFFOLD, 8 * D, 8 * D),
    "SheafFMTL": Bytes(
        lambda: methods.SheafFMTL("complete", 0.05, 0.1, 0.1),
        8 * EDGE * DEGREE,
        8 * EDGE * DEGREE,
    ),
    "SquaredPenalty": Bytes(methods.SquaredPenalty, 4 * D, 4 * D),
}
"""L2GD's depend on its coin."""


def rounds_of(method: Method, module: torch.nn.Module, rounds: int) -> list[tuple[int, int]]:
    """Bytes down and up of one client in each round, messages between clients included."""
    # A client without data is no part of a cohort that trains.
    clients = sum(size > 0 or method.include_clients_without_data for size in SIZES)
    run = fit(method, small_clients(torch.float32), module.float(), rounds)  # type: ignore[arg-type]
    found = []
    for round in run.recorder.rounds:
        assert len(round.info) == clients
        between, rest = divmod(round.bytes_exchanged, clients)
        assert rest == 0
        found.append((round.bytes_down + between, round.bytes_up + between))
    last = tuple(clients * one for one in found[-1])
    assert (run.metrics["round/bytes_down"], run.metrics["round/bytes_up"]) == last
    return found


@pytest.mark.parametrize("name", FORMULAS)
def test_bytes_are_those_of_the_formula(name: str) -> None:
    case = FORMULAS[name]
    rounds = rounds_of(case.method(), case.make_module(), 2)
    assert rounds[1] == (case.down, case.up)
    if name not in ("ConvexClustering", "LinearFedRep"):
        assert rounds[0] == rounds[1]


def test_l2gd_sends_a_model_where_the_coin_turns_and_nothing_elsewhere() -> None:
    method = methods.L2GD(1.0, 0.4)
    rounds = rounds_of(method, plain_module(), 12)
    coins = [False, *(method.aggregates(number) for number in range(13))]
    for (down, up), before, now, after in zip(rounds, coins, coins[1:], coins[2:], strict=False):
        assert down == 4 * D * (now and not before)
        assert up == 4 * D * (after and not now)
    assert 0 < sum(up > 0 for _, up in rounds) < 12


def test_every_method_has_a_formula() -> None:
    named = {name.partition(",")[0] for name in FORMULAS} | {"L2GD"}
    assert named == set(CASES)
