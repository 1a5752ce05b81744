"""Who has what of the model, as a method says it, against the models that clients end with."""

from __future__ import annotations

import pytest
import torch

from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.methods import (
    CFL,
    Ditto,
    FedAvg,
    FedMAP,
    SquaredPenalty,
)
from lightning_pfl.methods.base import (
    PER_CLIENT,
    PER_CLUSTER,
    SHARED,
    Method,
)
from lightning_pfl.priors import GaussianPrior
from lightning_pfl.testing import fit
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.cases import CASES, PROBLEMS
from tests.methods.networks import plain_module

#: CFL's case splits its one cluster after the first round.
ROUNDS = 3


def split(
    method: Method, module: torch.nn.Module
) -> tuple[ParameterSplit, dict[str, frozenset[str]]]:
    parameter_split = ParameterSplit(module, method.resolve_personal(ParameterSplit(module)))
    return parameter_split, method.ownership(parameter_split)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", CASES)
def test_what_is_shared_is_equal_and_all_else_differs(name: str) -> None:
    problem = PROBLEMS.get(name, {})
    data = problem.get("make_data", small_clients)()
    module = problem.get("make_module", small_module)()
    run = fit(CASES[name](), data, module, ROUNDS)
    parameter_split, method = run.strategy.federation.parameter_split, run.strategy.method
    ownership = method.ownership(parameter_split)
    said = [entry for names in ownership.values() for entry in names]
    assert sorted(said) == sorted(parameter_split.names)
    assert method.personalized_entries(parameter_split) == frozenset(
        parameter_split.names
    ) - ownership.get(SHARED, frozenset())
    models = [run.strategy.client_module(k) for k, size in enumerate(data.num_samples) if size]
    for entry in parameter_split.trainable:
        # The parameters themselves: a model of mixed outputs keeps its own beside the other's.
        each = torch.stack([dict(model.named_parameters())[entry].detach() for model in models])
        assert bool((each == each[0]).all()) == (entry in ownership.get(SHARED, ())), entry


def test_what_is_under_the_prior_is_told_apart() -> None:
    parameter_split, ownership = split(FedMAP(GaussianPrior(parameters="head")), plain_module())
    assert ownership[f"{PER_CLIENT}, under the prior"] == {"head.weight", "head.bias"}
    assert ownership[SHARED] == frozenset(parameter_split.names) - {"head.weight", "head.bias"}
    rows = [line.split("  ") for line in parameter_split.table(ownership).splitlines()]
    found = [" ".join(part.strip() for part in row if part) for row in rows]
    assert found == [
        f"{PER_CLIENT}, under the prior head {18 * 3 + 3}",
        f"shared backbone {2 * 9 + 2}",
    ]


@pytest.mark.parametrize(
    ("method", "holder"),
    [
        (SquaredPenalty(), f"{PER_CLIENT} "),
        (Ditto(), f"{PER_CLIENT}, beside a shared one "),
        (CFL(), PER_CLUSTER),
        (FedAvg(), SHARED),
    ],
)
def test_the_table_says_who_has_the_model(method: Method, holder: str) -> None:
    parameter_split, ownership = split(method, plain_module())
    for line in parameter_split.table(ownership).splitlines():
        assert line.strip().startswith(holder)


def test_without_a_global_model_the_error_says_what_differs() -> None:
    run = fit(SquaredPenalty(), small_clients(), plain_module())
    count = len(plain_module().state_dict())
    text = f"got SquaredPenalty, with which {count} of the {count} entries of .* differ between"
    with pytest.raises(Exception, match=text):
        run.strategy.global_state_dict()
