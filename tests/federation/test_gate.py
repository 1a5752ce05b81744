"""Uploads that are not finite, or too large, are left out, and their clients keep their
states."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_pfl import PersonalizedModule
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.contract.records import ClientInfo, LocalResult, Round
from lightning_pfl.federation.gate import (
    Verdict,
    accept_uploads,
    find_outliers,
    refuse_step,
    update_norm,
)
from lightning_pfl.methods import IFCA, FedAvg, FedPer, LocalOnly
from tests.trainer.setting import (
    BATCH,
    CENTRES,
    LR,
    SIZES,
    Quadratic,
    classes,
    mean,
    network,
    points,
    trained,
    trainer,
)

pytestmark = pytest.mark.quick

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")
ZERO = torch.zeros(2, dtype=torch.float64)


def info(clients: int) -> ClientInfo:
    ones = torch.ones(clients, dtype=torch.int64)
    return ClientInfo(torch.arange(10, 10 + clients), ones, ones, ones / clients, 0, 20)


def result(upload: Tensor, client_state: Tensor, loss: Tensor) -> LocalResult:
    return LocalResult({"model": {"w": upload}}, {"memory": client_state}, {}, {}, loss)


BAD = (torch.nan, torch.inf, -torch.inf)


@pytest.mark.parametrize(
    ("where", "bad"), [*product(("upload", "client state"), BAD), ("loss", torch.inf)]
)
def test_what_is_not_finite_is_rejected_with_its_reason(where: str, bad: float) -> None:
    parts = {"upload": torch.zeros(3, 2), "client state": torch.zeros(3, 4), "loss": torch.zeros(3)}
    parts[where].view(3, -1)[1, 0] = bad
    verdict = accept_uploads(result(*parts.values()), {}, info(3), None)
    assert verdict.accepted.tolist() == [True, False, True]
    assert verdict.rejected == {11: f"{where} is not finite"}


@pytest.mark.parametrize("clients", [[1], [0, 1]])
@pytest.mark.parametrize("bad", BAD)
def test_an_upload_that_is_no_part_of_the_update_is_read_as_well(
    clients: list[int], bad: float
) -> None:
    log_weight = torch.zeros(3)
    log_weight[clients] = bad
    uploads = {"model": {"w": torch.ones(3, 2)}, "log_weight": log_weight}
    verdict = accept_uploads(LocalResult(uploads, {}, loss=torch.zeros(3)), {}, info(3), None)
    assert verdict.norms.isfinite().all()
    assert verdict.rejected == {10 + one: "upload is not finite" for one in clients}


def test_a_change_without_a_finite_norm_may_be_of_finite_numbers() -> None:
    uploads = {"model": {"w": torch.tensor([[3e38], [torch.inf], [1.0]])}}
    received = {"model": {"w": torch.full((3, 1), -3e38)}}
    verdict = accept_uploads(LocalResult(uploads, {}, loss=torch.zeros(3)), received, info(3), None)
    assert verdict.norms.isfinite().tolist() == [False, False, True]
    assert verdict.accepted.tolist() == [True, False, True]


def test_a_client_without_a_loss_is_accepted() -> None:
    # NaN: no step taken, or a step that solves without a loss. Inf: a loss that wasn't finite.
    loss = torch.tensor([torch.nan, torch.inf])
    verdict = accept_uploads(result(torch.zeros(2, 1), torch.zeros(2, 1), loss), {}, info(2), None)
    assert verdict.accepted.tolist() == [True, False]
    assert list(verdict.rejected.values()) == ["loss is not finite"]


def test_the_norm_is_that_of_the_change() -> None:
    uploads = {
        "model": {"w": torch.tensor([[3.0, 4.0], [0.0, 1.0]]), "count": torch.tensor([7, 7])},
        "extra": torch.tensor([[12.0], [0.0]]),
    }
    received = {"model": {"w": torch.tensor([[0.0, 0.0], [0.0, 1.0]])}}
    # Client 0: (3, 4) changed and 12 new: sqrt(9 + 16 + 144); client 1 changed nothing.
    assert update_norm(uploads, received, torch.ones(2)).tolist() == [13.0, 0.0]
    verdict = accept_uploads(LocalResult(uploads, {}, loss=torch.zeros(2)), received, info(2), 12.9)
    assert verdict.accepted.tolist() == [False, True]
    assert verdict.rejected == {10: "update norm above max_update_norm=12.9"}


def test_a_number_beside_the_model_is_no_part_of_the_update() -> None:
    """A scalar parameter is one; the logarithm of a weight is not, and may be large."""
    uploads = {"model": {"scale": torch.tensor([3.0, 1.0])}, "log_weight": torch.tensor([-9e9, 0])}
    received = {"model": {"scale": torch.tensor([1.0, 1.0])}}
    assert update_norm(uploads, received, torch.ones(2)).tolist() == [2.0, 0.0]


def test_methods_that_send_nothing_pass() -> None:
    verdict = accept_uploads(LocalResult({"model": {}}, {}, loss=torch.zeros(2)), {}, info(2), 1.0)
    assert verdict.accepted.tolist() == [True, True]
    assert verdict.rejected == {}


def test_if_those_that_are_left_have_no_weight_they_count_alike() -> None:
    """Nodes of a graph without samples, say."""
    cohort = info(3)
    cohort.weights = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    assert cohort.keep(torch.tensor([False, True, True])).weights.tolist() == [0.5, 0.5]
    assert cohort.keep(torch.tensor([True, True, False])).weights.tolist() == [1.0, 0.0]


def poisoned(*clients: int) -> Any:
    """Client data with a NaN in it."""
    data = points(names=["ann", "bob", "cem", "dag"])
    for client in clients:
        data.fields[0][data.indices[client][0]] = torch.nan
    return data


class Keep(FederatedCallback):
    rounds: list[Round]

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.rounds = []

    def on_aggregation_start(self, trainer: Any, module: Any, round: Round) -> None:
        assert round.uploads is not None
        assert round.uploads["model"]["w"].isfinite().all()
        self.rounds.append(round)


def test_a_poisoned_client_never_reaches_the_aggregate() -> None:
    module, keep = Quadratic(), Keep()
    run = trainer(max_epochs=1, callbacks=[keep])
    with pytest.warns(
        UserWarning,
        match=r"Round 0 left out 1 of 4 clients \('bob': upload is not finite\).* Look for NaN",
    ):
        run.fit(module, poisoned(1))
    want = mean([trained(ZERO, k) for k in (0, 2, 3)], [SIZES[k] for k in (0, 2, 3)])
    torch.testing.assert_close(module.w.data, want, rtol=0, atol=1e-12)
    assert run.callback_metrics["round/rejected"] == 1
    assert run.callback_metrics["round/bytes_up"] == 4 * 2 * 8  # what is left out was sent
    assert run.callback_metrics["train_loss"].isfinite()
    assert keep.rounds[0].rejected == {1: "upload is not finite"}


def test_a_poisoned_client_keeps_its_memory() -> None:
    run = trainer(LocalOnly(), max_epochs=1)
    with pytest.warns(UserWarning, match="'cem': client state is not finite"):
        run.fit(Quadratic(), poisoned(2))
    assert torch.equal(run.strategy.client_state_dict("cem")["w"], ZERO)
    torch.testing.assert_close(
        run.strategy.client_state_dict("dag")["w"], trained(ZERO, 3), rtol=0, atol=1e-12
    )


def test_if_all_are_rejected_the_server_is_unchanged() -> None:
    module = Quadratic()
    run = trainer(max_epochs=2)
    with (
        pytest.warns(UserWarning, match="left out 4 of 4 clients .* the server is unchanged"),
        pytest.raises(RuntimeError, match=r"all rounds of this fit left out all .*: upload is not"),
    ):
        run.fit(module, poisoned(0, 1, 2, 3))
    assert torch.equal(module.w.data, ZERO)
    assert run.global_step == 2
    assert run.callback_metrics["round/rejected"] == 4


@pytest.mark.parametrize("near", ["second largest", "largest"])
def test_updates_beyond_the_bound_are_left_out(near: str) -> None:
    """The bound is close to a norm above 1, so that its square is on the other side."""
    module = Quadratic()
    moved = torch.stack([trained(ZERO, k) for k in range(4)]).norm(dim=1)
    second, first = moved.sort().values[2:].tolist()
    bound = 1.01 * second if near == "second largest" else 0.99 * first
    run = trainer(max_epochs=1, max_update_norm=bound)
    with pytest.warns(
        UserWarning, match="left out 1 of 4 clients .*'3': update norm above max_update_norm"
    ):
        run.fit(module, points())
    assert int(moved.argmax()) == 3
    torch.testing.assert_close(
        module.w.data,
        mean([trained(ZERO, k) for k in range(3)], list(SIZES[:3])),
        rtol=0,
        atol=1e-12,
    )


def test_values_that_left_out_clients_logged_are_in_no_mean() -> None:
    half = CENTRES.square().sum(1) / 2
    bound = 0.9 * float(trained(ZERO, 3).norm())
    run = trainer(max_epochs=1, max_update_norm=bound)
    with pytest.warns(UserWarning, match="left out 1 of 4 clients .*'3'"):
        run.fit(Quadratic(), points())
    # Half the squared distance to the centre, which every step shrinks by 1 - LR.
    logged = []
    for client in range(3):
        sizes = [min(BATCH, SIZES[client] - at) for at in range(0, SIZES[client], BATCH)]
        losses = [float(half[client]) * (1 - LR) ** (2 * step) for step in range(len(sizes))]
        logged.append(float(np.average(losses, weights=sizes)))
    assert float(run.callback_metrics["train_loss"]) == pytest.approx(np.mean(logged), rel=1e-6)


def test_a_poisoned_head_is_caught_although_it_is_never_sent() -> None:
    run = trainer(FedPer(personal="head"), max_epochs=1)
    train, _ = classes()
    train.fields[0][train.indices[1]] = torch.inf
    with pytest.warns(UserWarning, match="left out 1 of 5 clients"):
        run.fit(network(), train)
    start = network().state_dict()
    assert torch.equal(run.strategy.client_state_dict(1)["head.weight"], start["head.weight"])
    assert all(value.isfinite().all() for value in run.strategy.client_state_dict(1).values())


def test_accepted_clients_are_weighted_among_themselves() -> None:
    module = Quadratic()
    with pytest.warns(UserWarning, match="left out"):
        trainer(FedAvg(weighting="uniform"), max_epochs=1).fit(module, poisoned(0))
    want = mean([trained(ZERO, k) for k in (1, 2, 3)], [1, 1, 1])
    torch.testing.assert_close(module.w.data, want, rtol=0, atol=1e-12)


# --- updates that are far too large, and steps of the server that can't be taken


class Sends(FederatedCallback):
    """Adds a number to the upload of some clients in one round."""

    def __init__(self, size: float, round: int = 1, clients: tuple[int, ...] = (2,)) -> None:
        self.size, self.round, self.clients = size, round, clients

    def on_local_training_end(self, trainer: Any, module: Any, round: Round) -> None:
        if round.number == self.round:
            assert round.uploads is not None
            for client in self.clients:
                round.uploads["model"]["w"][client] += self.size


def outlier_names(norms: list[float], steps: list[int], received: float = 1.0) -> list[int]:
    known = info(len(norms))
    known.steps = torch.tensor(steps)
    everyone = torch.ones(len(norms), dtype=torch.bool)
    verdict = Verdict(everyone, {}, torch.tensor(norms, dtype=torch.float64))
    started = {"model": {"w": torch.full((len(norms), 1), received)}}
    left = find_outliers(verdict, started, known, "auto")
    assert [*left.rejected] == [*find_outliers(verdict, started, known, None).outliers]
    assert left.accepted.tolist() == [k not in left.rejected for k in known.index.tolist()]
    return [client - 10 for client in left.rejected]


def test_where_most_have_converged_an_outlier_is_larger_than_what_it_received() -> None:
    converged = [1e-14, 2e-14, 3e-14, 0.5, 2.0]  # hundred medians are 3e-12
    assert outlier_names(converged, [4] * 5, received=1.0) == [4]
    assert outlier_names(converged, [4] * 5, received=0.0) == [3, 4]


def test_an_outlier_is_a_hundred_medians_away_for_equal_steps() -> None:
    assert outlier_names([1.0, 2.0, 3.0, 201.0, 199.0], [4] * 5) == []  # the median is 3
    assert outlier_names([1.0, 2.0, 3.0, 301.0, 299.0], [4] * 5) == [3]
    # Ten times the steps may lead ten times as far.
    assert outlier_names([1.0, 2.0, 3.0, 301.0, 3001.0], [4, 4, 4, 40, 40]) == [4]
    # Two clients say nothing about what is usual, nor do clients that send what they got.
    assert outlier_names([1.0, 1e9], [1, 1]) == []
    assert outlier_names([0.0, 0.0, 0.0, 1e9], [1] * 4) == []


def test_a_huge_update_is_named_and_with_auto_left_out() -> None:
    module, clean = Quadratic(), Quadratic()
    with pytest.warns(UserWarning, match=r"Round 1 has clients .* '2': update norm .* times the"):
        trainer(max_epochs=2, callbacks=[Sends(1000.0)]).fit(module, points())
    run = trainer(max_epochs=2, callbacks=[Sends(1000.0)], max_update_norm="auto")
    with pytest.warns(UserWarning, match="Round 1 left out 1 of 4 clients .*'2': update norm"):
        run.fit(clean, points())
    first = mean([trained(ZERO, k) for k in range(4)], list(SIZES))
    others = (0, 1, 3)
    want = mean([trained(first, k) for k in others], [SIZES[k] for k in others])
    torch.testing.assert_close(clean.w.data, want, rtol=0, atol=1e-12)
    assert module.w.data.abs().min() > 100


@pytest.mark.parametrize("size", [1e9, 1e200])
def test_a_server_that_would_be_useless_stays_as_it_was(size: float) -> None:
    """1e200 overflows in the norm; the mean of three honest clients and one such is absurd."""
    module = Quadratic()
    run = trainer(max_epochs=3, callbacks=[Sends(size)])
    with (
        pytest.warns(UserWarning, match="Round 1 has clients with far too large updates: '2'"),
        pytest.warns(UserWarning, match="Round 1: the server refused its step .* that of '2'"),
    ):
        run.fit(module, points())
    want = ZERO
    for _ in range(2):
        want = mean([trained(want, k) for k in range(4)], list(SIZES))
    torch.testing.assert_close(module.w.data, want, rtol=0, atol=1e-12)
    assert run.global_step == 3


def test_a_step_that_ruins_one_of_several_models_is_refused() -> None:
    """Everybody is nearer to the first one, which stays what round 0 has made of it."""
    starts = [{"w": ZERO}, {"w": ZERO + 1e4}]
    run = trainer(
        IFCA(2, initial=starts, weighting="samples"), max_epochs=2, callbacks=[Sends(1e9)]
    )
    with (
        pytest.warns(UserWarning, match="Round 1 has clients with far too large updates: '2'"),
        pytest.warns(UserWarning, match="Round 1: the server refused its step .* that of '2'"),
    ):
        run.fit(Quadratic(), points())
    first, second = run.strategy.federation.server["models"]["w"]
    want = mean([trained(ZERO, k) for k in range(4)], list(SIZES))
    torch.testing.assert_close(first, want, rtol=0, atol=1e-12)
    assert torch.equal(second, starts[1]["w"])


@pytest.mark.parametrize("further", [1e12, torch.nan])
def test_a_refused_step_names_the_largest_update_of_those_that_count(further: float) -> None:
    """Client 1 is further away, or nowhere, but is left out already."""
    run = trainer(
        max_epochs=2, callbacks=[Sends(1e9), Sends(further, clients=(1,))], max_update_norm=1e10
    )
    with (
        pytest.warns(UserWarning, match="Round 1 left out 1 of 4 clients .*'1'"),
        pytest.warns(UserWarning, match="Round 1 has clients with far too large updates: '2'"),
        pytest.warns(UserWarning, match="Round 1: the server refused its step .* that of '2'"),
    ):
        run.fit(Quadratic(), points())


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for leaf in group["params"]:
                leaf.data.fill_(torch.nan)


def test_nan_of_the_server_is_its_own_fault() -> None:
    method = FedAvg(server_optimizer=lambda p: Broken(p, lr=1.0))
    module = Quadratic()
    with (
        pytest.warns(UserWarning, match="`model/w` would hold NaN .* or of the server's optimizer"),
        pytest.raises(RuntimeError, match=r"all rounds of this fit .* the server refused its step"),
    ):
        trainer(method, max_epochs=2).fit(module, points())
    assert torch.equal(module.w.data, ZERO)


class Silent(Quadratic):
    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return None


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_a_step_without_loss_is_warned_of(engine: str) -> None:
    with pytest.warns(UserWarning, match="No client has changed anything in round 0, and none has"):
        trainer(max_epochs=1, engine=engine).fit(Silent(), points())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_module_that_isnt_finite_is_refused_before_the_first_round(value: float) -> None:
    module = Quadratic()
    module.w.data[1] = value
    with pytest.raises(MisconfigurationException, match=r"but Quadratic has a NaN or .* in w"):
        trainer().fit(module, points())


class Masked(nn.Module):
    """Attention's causal mask, as a buffer of -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(6, 8)
        self.register_buffer("mask", torch.triu(torch.full((8, 8), -torch.inf), 1))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.lift(x)[:, :, None] + self.mask
        return scores.softmax(-1).mean(1)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("method", [FedAvg, FedPer, LocalOnly])
def test_a_mask_of_infinities_keeps_nobody_out(method: Any, engine: str) -> None:
    backbone = Masked()
    module = PersonalizedModule(backbone, nn.Linear(8, 3), lr=0.1, num_classes=3)
    run = trainer(method(), max_epochs=1, engine=engine)
    run.fit(module, classes()[0])
    assert run.callback_metrics["round/rejected"] == 0
    state = run.strategy.client_state_dict(0)
    assert torch.equal(state["backbone.mask"], torch.triu(torch.full((8, 8), -torch.inf), 1))
    assert run.strategy.federation.parameter_split.static == ("backbone.mask",)


@pytest.mark.parametrize(
    ("norm", "step", "median", "refused"),
    [
        (1.0, 0.9e4, 0.0, False),  # 10,000 times the model's norm
        (1.0, 1.1e4, 0.0, True),
        (1e-9, 0.9e4, 1.0, False),  # a model near 0, whose clients all move far
        (1e-9, 1.1e4, 1.0, True),
        (0.0, 5.0, 0.0, False),  # nothing to compare with
        (1.0, float("inf"), 1.0, True),
    ],
)
def test_a_server_step_is_compared_with_the_model_and_the_median_update(
    norm: float, step: float, median: float, refused: bool
) -> None:
    old = {"w": torch.tensor([norm, 0.0])}
    new = {"w": torch.tensor([norm, step])}
    found = refuse_step({"model": old}, {"model": new}, (old, new), median)
    assert bool(found) == refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", ["model", "control"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_server_step_names_the_entry_that_is_broken(
    value: float, place: str, dtype: torch.dtype
) -> None:
    """Whether the models have it or not; an infinity that was there before is meant."""
    old = {"w": torch.ones(3, dtype=dtype), "b": torch.ones(2, dtype=dtype)}
    meant = torch.tensor([torch.inf, 1.0], dtype=dtype)
    before = {"model": old, "control": {"c": torch.ones(2, dtype=dtype), "meant": meant}}
    after = {part: {k: leaf.clone() for k, leaf in held.items()} for part, held in before.items()}
    models = (before["model"], after["model"])
    assert refuse_step(before, after, models, 1.0) == ""
    name = "b" if place == "model" else "c"
    after[place][name][1] = value
    assert refuse_step(before, after, models, 1.0) == f"`{place}/{name}` would hold NaN or infinity"
