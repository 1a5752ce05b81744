r"""FedASA: a cell is the mean over those who share it, and a client's own elsewhere.

The cells of the split quadratic, a/2 ||b + h - c||^2, are its halves b and h, which have the same
gradient: both move by half of what ``descend`` changes the sum by.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.core.randomness import derive, permutation
from lightning_pfl.methods import FedASA, FedAvg, FedPer, HeteroFL, LocalOnly
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing import assert_trees_close, assert_trees_equal, descend, fit
from lightning_pfl.testing.conformance import SIZES, small_clients, small_module
from tests.methods.case import BODY, HEAD, Bytes, Case
from tests.methods.networks import cohorts
from tests.methods.quadratics import LR, STEPS, A, C, close, closed_form, mean, ragged
from tests.methods.references.fedasa import fedasa
from tests.methods.references.softmax import NAMES, as_numpy, softmax_module
from tests.methods.split_quadratic import SplitQuadraticModule

PARTS = ["backbone", "head"]
CASE = Case(
    method=lambda: FedASA(every=1),
    bytes={
        "all": Bytes(lambda: FedASA(rule="all"), 4 * (BODY + HEAD), 4 * (BODY + HEAD)),
        "given": Bytes(
            lambda: FedASA(PARTS, "given", ["backbone"]),
            4 * BODY,
            4 * BODY,
        ),
        "drift, no selection yet": Bytes(
            lambda: FedASA(every=5), 4 * (BODY + HEAD), 4 * (BODY + HEAD) + 2
        ),
    },
    twin=FedAvg,
    published={},
    above_zero="every",
)


@closed_form
def test_each_half_is_the_mean_over_those_who_share_it(engine: str) -> None:
    """The clients share both halves, the first, and none; the fourth has no data."""
    shared = [["backbone", "head"], ["backbone"], [], ["head"]]
    module = SplitQuadraticModule(2, LR, backbone=0.5, head=-0.2)
    run = fit(FedASA(PARTS, "given", shared), ragged(), module, 2, engine)
    server = {"backbone": C.new_full((2,), 0.5), "head": C.new_full((2,), -0.2)}
    own = {name: leaf.expand(4, 2) for name, leaf in server.items()}
    has = {name: torch.tensor([[name in each] for each in shared]) for name in PARTS}
    for _ in range(2):
        begin = {name: server[name].where(has[name], own[name]) for name in PARTS}
        total = begin["backbone"] + begin["head"]
        change = (descend(total, A, C, 2 * LR, STEPS) - total) / 2
        own = {name: begin[name] + change for name in PARTS}
        # The first two clients have 4 samples and 1.
        weights = torch.tensor([4, 1, 0, 0])
        server = {
            "backbone": mean(own["backbone"], weights),
            "head": own["head"][0],
        }
    for name in PARTS:
        close(run.server["model"][f"{name}.weight"], server[name])
        close(run.models[f"{name}.weight"], server[name].where(has[name], own[name]))
    assert run.strategy.method.global_model(run.server) is not None


@pytest.mark.parametrize(
    "rule",
    [
        {"rule": "given"},
        {"rule": "random", "every": 2},
        {"rule": "drift", "threshold": 0.3, "every": 2},
    ],
)
def test_matches_the_reference(engine: str, rule: dict[str, Any]) -> None:
    data, cells = small_clients(), list(NAMES)
    each = [[NAMES[0]], list(NAMES), [NAMES[1]], [], [NAMES[1]]]

    def given(round: int) -> set[tuple[int, str]]:
        return {(k, name) for k, names in enumerate(each) for name in names}

    def random(round: int) -> set[tuple[int, str]]:
        keys = [derive(0, "cells", round // 2, k) for k in range(5)]
        return {(k, cells[int(permutation(2, key)[0])]) for k, key in enumerate(keys)}

    name = rule["rule"]
    shared = each if name == "given" else None
    method = FedASA(cells, shared=shared, **rule)
    run = fit(method, data, softmax_module(), 5, engine, participation=3)
    server, models, shares = fedasa(
        data,
        as_numpy(softmax_module().state_dict()),
        [cohort.tolist() for cohort in cohorts(5, 3)],
        {"given": given, "random": random, "drift": None}[name],
        SIZES,
        threshold=0.3,
        every=2,
    )
    for entry, leaf in server.items():
        np.testing.assert_allclose(run.server["model"][entry], leaf, rtol=1e-10)
        expected = np.stack([each[entry] for each in models])
        np.testing.assert_allclose(run.models[entry], expected, rtol=1e-10)
    if name == "drift":
        found = run.server["shared"]
        assert {(k, cells[c]) for k, c in found.nonzero().tolist()} == shares
        assert 0 < len(shares) < 10
        assert torch.equal(found, run.client_state["shared"])


def test_everything_shared_is_fedavg(engine: str) -> None:
    """So is HeteroFL whose clients have the full network."""
    settings: Any = {"rounds": 2, "engine": engine, "participation": 3}

    def run(method: Any) -> Any:
        return fit(method, small_clients(), small_module(), **settings)

    for method in (
        FedASA(rule="all", weighting="uniform"),
        FedASA(rule="random", share=1, weighting="uniform"),
        HeteroFL({"same": small_module()}, "full", masked_classes=False),
    ):
        assert_trees_close(
            run(method).server["model"], run(FedAvg(weighting="uniform")).server["model"]
        )


def test_nothing_shared_is_local_training(engine: str) -> None:
    expected = fit(LocalOnly(), small_clients(), small_module(), 2, engine)
    for method in (FedASA(rule="random", share=0), FedASA(rule="given", shared=[])):
        run = fit(method, small_clients(), small_module(), 2, engine)
        assert_trees_equal(run.models, expected.models)
        assert run.metrics["round/bytes_up"] == run.metrics["round/bytes_down"] == 0
    assert run.strategy.method.global_model(run.server) is None


def test_a_shared_backbone_is_fedper(engine: str) -> None:
    run = fit(FedASA(PARTS, "given", ["backbone"]), small_clients(), small_module(), 2, engine)
    expected = fit(FedPer(), small_clients(), small_module(), 2, engine)
    assert_trees_close(run.models, expected.models)


def test_bytes_follow_the_selection() -> None:
    """A threshold of 1 leaves no cell; in rounds of selection the server sends its move too."""
    method = FedASA(list(NAMES), threshold=1.0, every=2)
    run = fit(method, small_clients(), softmax_module(), 4)
    model = 8 * (75 + 3)
    assert [round.bytes_down for round in run.recorder.rounds] == [model, model, 2 * model, 0]
    assert [round.bytes_up for round in run.recorder.rounds] == [model + 2, model + 2, 2, 2]


def test_a_cell_of_buffers_alone_is_shared() -> None:
    backbone = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(25, affine=False))
    module = PersonalizedModule(backbone, torch.nn.Linear(25, 3), lr=0.05).double()
    data = small_clients().subset([2, 3])  # of the others BatchNorm sees one sample
    run = fit(FedASA(threshold=1.0), data, module, 2)
    assert run.server["shared"].tolist() == [[False, True]] * 2


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"rule": "some"}, "'all', 'given', 'random' or 'drift', but got rule='some'"),
        ({"rule": "given"}, "`shared` with rule='given' and only then, but got rule='given'"),
        ({"shared": ["head"]}, "`shared` with rule='given' and only then, but got rule='drift'"),
        ({"share": 1.5}, r"`share` to be in \[0, 1\], but got share=1.5"),
        ({"threshold": -2}, r"`threshold` to be in \[-1, 1\], but got threshold=-2"),
        ({"every": 0}, "`every` to be a whole number >= 1, but got every=0"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FedASA(**settings)


@pytest.mark.parametrize(
    ("method", "match"),
    [
        (lambda: FedASA(["head"]), "'backbone.0.weight' is in none"),
        (lambda: FedASA(["backbone", "head", "head.bias"]), "'head.bias' is in 'head' and in"),
        (lambda: FedASA(PARTS, "given", ["tail"]), "name cells, backbone, head, but got 'tail'"),
        (lambda: FedASA(PARTS, "given", [["head"]]), "each of 5 clients, but got 1"),
    ],
)
def test_cells_must_fit(method: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fit(method(), small_clients(), small_module(), 1)


def test_settings_of_another_method_are_noted() -> None:
    def note(**settings: Any) -> list[str]:
        return FedASA(**settings).notes(None)  # type: ignore[arg-type]

    assert note(rule="all") == note(rule="random", share=1)
    assert note(rule="all") == ["Every cell is shared, which makes FedASA FedAvg."]
    assert note(rule="random", share=0) == ["No cell is shared, which makes FedASA LocalOnly."]
    assert note() == []
