"""FedMD: means of outputs, on linear models with known fixed points and against NumPy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.methods import FedMD, LocalOnly
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.models.client_modules import ClientModules
from lightning_pfl.testing import assert_trees_close, fit
from lightning_pfl.testing.conformance import SIZES, small_clients
from tests.callbacks.setting import trainer
from tests.methods.case import Bytes, Case
from tests.methods.networks import cohorts, plain_module
from tests.methods.public import drawn, pictures, with_public
from tests.methods.quadratics import closed_form
from tests.methods.references import softmax
from tests.methods.references.softmax import softmax_module

N = 7
DEGREE = len(SIZES) - 1
CASE = Case(
    method=lambda: FedMD(N, local_epochs=1),
    bytes={
        "a server": Bytes(
            lambda: FedMD(N, local_epochs=1),
            4 * N * 3,
            4 * N * 3,
            with_public(plain_module),
            from_the_first_round=False,
        ),
        "clusters": Bytes(
            lambda: FedMD(N, local_epochs=1, clusters=2),
            4 * N * 3,
            4 * N * 3,
            with_public(plain_module),
            from_the_first_round=False,
        ),
    },
    twin=None,  # LocalOnly, with public samples, which it doesn't need: tested below.
    published={
        "public_samples": 5000,
        "digest_epochs": 1,
        "distance": "l1",
        "local_epochs": 10,
    },
    problem={"make_module": with_public(plain_module)},
)


class Scaled(L.LightningModule):
    """A number w, whose output for an input x is w x, on quadratics h/2 (w - a)^2."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.head, self.lr = nn.Linear(1, 1, bias=False, dtype=torch.float64), lr
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Any:
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        h, a = batch
        found: Tensor = (h * (self(torch.ones_like(a)) - a).square() / 2).mean()
        return found

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)

    def public_dataloader(self) -> FederatedTensorDataset:
        one = torch.ones(1, 1, dtype=torch.float64)
        return FederatedTensorDataset((one, one), [[0]])


def q2(clients: int = 2) -> FederatedTensorDataset:
    h, a = torch.tensor([[1.0], [3.0]]).double(), torch.tensor([[0.0], [1.0]]).double()
    return FederatedTensorDataset((h, a), [[k] for k in range(clients)])


def numbers(run: Any) -> list[float]:
    found: list[float] = run.models["head.weight"].flatten().tolist()
    return found


class TestTwoNumbers:
    def settings(self, **changed: Any) -> dict[str, Any]:
        return {"public_samples": 1, "distance": "l2", "local_steps": 4, **changed}

    @closed_form
    def test_digesting_exactly_is_fedavg(self, engine: str) -> None:
        """A step of 0.5 on (w - m)^2 goes to the mean m; FedAvg's anchor is its mean."""
        method = FedMD(**self.settings(digest_steps=1, digest_lr=0.5))
        run = fit(method, q2(), Scaled(), 6, engine)
        assert np.mean(numbers(run)) == pytest.approx(0.6828665925, rel=1e-9)
        assert run.server["scores"].item() == pytest.approx(0.6828665925, rel=1e-9)

    def test_three_short_steps_have_the_known_fixed_point(self, engine: str) -> None:
        method = FedMD(**self.settings(digest_steps=3, digest_lr=0.05))
        run = fit(method, q2(), Scaled(), 60, engine)
        assert numbers(run) == pytest.approx([0.19865162, 0.96710045], rel=1e-6)

    def test_one_client_digests_nothing(self) -> None:
        method = FedMD(**self.settings(digest_steps=3))
        run = fit(method, q2(1), Scaled(), 3)
        alone = fit(LocalOnly(local_steps=4), q2(1), Scaled(), 3)
        assert numbers(run) == numbers(alone)

    def test_a_complete_graph_is_the_server(self, engine: str) -> None:
        settings = self.settings(digest_steps=3, digest_lr=0.05)
        run = fit(FedMD(**settings, graph="complete"), q2(), Scaled(), 5, engine)
        expected = fit(FedMD(**settings), q2(), Scaled(), 5, engine)
        assert numbers(run) == pytest.approx(numbers(expected), rel=1e-12)
        assert run.metrics["round/bytes_up"] == 2 * 8

    def test_clusters_digest_their_own_mean(self) -> None:
        """Two clients in two clusters digest nothing."""
        settings = self.settings(digest_steps=3)
        run = fit(FedMD(**settings, clusters=2), q2(), Scaled(), 3)
        alone = fit(LocalOnly(local_steps=4), q2(), Scaled(), 3)
        assert numbers(run) == pytest.approx(numbers(alone), rel=1e-12)
        assert run.server["cluster"].tolist() == [0, 1]

    def test_clients_revisit_their_own_data_as_often_as_their_names_say(self) -> None:
        """In two clusters, where they digest nothing."""
        often = {"0": 4, "1": 1}
        settings = self.settings(digest_steps=3, local_steps=often)
        run = fit(FedMD(**settings, clusters=2), q2(), Scaled(), 3)
        alone = fit(LocalOnly(local_steps=often), q2(), Scaled(), 3)
        assert numbers(run) == pytest.approx(numbers(alone), rel=1e-12)


def pull(kind: str, outputs: Any, target: Any, temperature: float) -> Any:
    """The gradient of the distance by the outputs, a row for each sample."""
    if kind == "l1":
        return np.sign(outputs - target) / 3
    if kind == "l2":
        return 2 * (outputs - target) / 3
    found, wanted = (np.exp(each / temperature) for each in (outputs, target))
    found, wanted = (each / each.sum(1, keepdims=True) for each in (found, wanted))
    return temperature * (found - wanted)


@pytest.mark.parametrize("kind", ["l1", "l2", "kl"])
def test_matches_the_reference(engine: str, kind: Any) -> None:
    data = small_clients()
    method = FedMD(
        N,
        2,
        distance=kind,
        temperature=2.0 if kind == "kl" else 1.0,
        digest_weight=0.7,
        digest_lr=0.02,
        local_epochs=1,
    )
    module = with_public(softmax_module)()
    run = fit(method, data, module, 3, engine, participation=3)
    x = pictures().flatten(1).numpy()
    models = [softmax.as_numpy(module.state_dict()) for _ in SIZES]

    def outputs(w: Any, rows: Any) -> Any:
        return x[rows] @ w["head.weight"].T + w["head.bias"]

    mean: Any = None
    for number, cohort in enumerate(cohorts(3, 3)):
        scores = []
        for k in cohort.tolist():
            w, rows = models[k], drawn(number, N).numpy()
            for _ in range(2 if number else 0):
                for at in (slice(0, 3), slice(3, 6), slice(6, 7)):
                    g = 0.7 * pull(kind, outputs(w, rows[at]), mean[at], 2.0) / len(rows[at])
                    step = {"head.weight": g.T @ x[rows[at]], "head.bias": g.sum(0)}
                    w = softmax.moved(w, step, -0.02)
            for batch in softmax.minibatches(data, k, number, epochs=1):
                w = softmax.moved(w, softmax.gradient(w, *batch), -0.05)
            models[k] = w
            scores.append(outputs(w, drawn(number + 1, N).numpy()))
        mean = np.mean(scores, 0)
        np.testing.assert_allclose(run.recorder.servers[number + 1]["scores"][0], mean, rtol=1e-9)
    for name in softmax.NAMES:
        expected = np.stack([w[name] for w in models])
        np.testing.assert_allclose(run.models[name], expected, rtol=1e-9)


def test_without_digesting_it_is_local_training(engine: str) -> None:
    module = with_public(plain_module)
    alone = fit(LocalOnly(), small_clients(), plain_module(), 3, engine)
    for settings in ({"digest_epochs": 0}, {"digest_weight": 0.0}):
        method = FedMD(N, local_epochs=1, **settings)
        note = ["Nothing is digested: that is LocalOnly."]
        assert method.notes(ParameterSplit(module())) == note
        run = fit(method, small_clients(), module(), 3, engine)
        assert_trees_close(run.models, alone.models)
        assert run.metrics["train_loss"] == pytest.approx(alone.metrics["train_loss"], rel=1e-9)


def test_every_round_has_public_samples_of_its_own(engine: str) -> None:
    """Of which all clients see the same ones: what they send is about the next round's."""
    module = with_public(softmax_module)()
    run = fit(FedMD(N, local_epochs=1), small_clients(), module, 3, engine)
    assert len({tuple(drawn(number, N).tolist()) for number in range(4)}) == 4
    for number, round in enumerate(run.recorder.rounds):
        x = pictures()[drawn(number + 1, N)].flatten(1)
        models = run.recorder.banks[number + 1]["model"]
        assert round.uploads is not None
        for row, k in enumerate(round.info.index.tolist()):
            want = x @ models["head.weight"][k].T + models["head.bias"][k]
            torch.testing.assert_close(round.uploads["scores"][row], want)


@pytest.mark.filterwarnings("ignore:Clients without training samples")
def test_architectures_may_differ(engine: str) -> None:
    """Bytes are those of the outputs, whatever the networks."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        wide = nn.Sequential(nn.Flatten(), nn.Linear(25, 6), nn.Tanh())
        modules = {
            "wide": PersonalizedModule(wide, nn.Linear(6, 3), lr=0.05).double(),
            "flat": PersonalizedModule(nn.Flatten(), nn.Linear(25, 3), lr=0.05).double(),
        }
    module: Any = ClientModules(modules, ["wide", "flat", "wide", "flat", "wide"])
    module.public_dataloader = with_public(softmax_module)().public_dataloader
    run = trainer(FedMD(N, local_epochs=1), max_epochs=3, engine=engine)
    run.fit(module, small_clients(), small_clients())
    clients = 4  # one has no data
    assert run.callback_metrics["round/bytes_up"] == clients * 8 * N * 3
    x = pictures()[drawn(3, N, seed=3)]
    with torch.no_grad():
        outputs = [run.strategy.client_module(k)(x) for k in (0, 2, 3, 4)]
    found = run.strategy.federation.server["scores"][0]
    torch.testing.assert_close(found, torch.stack(outputs).mean(0))


def test_a_client_that_missed_a_round_digests_no_old_outputs(engine: str) -> None:
    """On a graph, outputs are for the next round alone."""
    settings: Any = {"local_epochs": 0, "graph": "complete", "digest_weight": 1.0}
    module = with_public(softmax_module)
    run = fit(FedMD(N, **settings), small_clients(), module(), 4, engine, participation=2)
    in_rounds = [cohort.tolist() for cohort in cohorts(4, 2)]
    start = module().state_dict()["head.weight"]
    for k in range(5):
        again = any(k in a and k in b for a, b in pairwise(in_rounds))
        moved = not torch.equal(run.models["head.weight"][k], start)
        assert moved <= again


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"public_samples": 0}, "`public_samples` to be a whole number >= 1, but got"),
        ({"digest_epochs": 2, "digest_steps": 3}, "exactly one of `digest_epochs` and `digest_st"),
        ({"distance": "l3"}, "'l1', 'l2' or 'kl', but got distance='l3'"),
        ({"temperature": 0}, "`temperature` to be a finite number > 0, but got temperature=0"),
        ({"digest_weight": -1}, "`digest_weight` to be a finite number >= 0, but got"),
        ({"digest_lr": 0}, "`digest_lr` to be a finite number > 0, but got digest_lr=0"),
        ({"num_outputs": 0}, "`num_outputs` to be a whole number >= 1, but got num_outputs=0"),
        ({"clusters": 0}, "`clusters` to be a whole number >= 1, but got clusters=0"),
        ({"clusters": 2, "graph": "ring"}, "a graph or clusters, but got graph='ring'"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FedMD(**settings)


def headless() -> Any:
    return PersonalizedModule(nn.Flatten(), nn.Sequential(nn.Linear(25, 3))).double()


@pytest.mark.parametrize(
    ("method", "make", "match"),
    [
        (lambda: FedMD(N), plain_module, "public samples, on which FedMD compares models, but"),
        (lambda: FedMD(50), with_public(plain_module), "at least 50 public samples, but got 9"),
        (lambda: FedMD(N), with_public(headless), "an nn.Linear named `head`, .* but got Pers"),
        (
            lambda: FedMD(N, num_outputs=4),
            with_public(headless),
            r"outputs \(samples, 4\), which FedMD compares, but got \(3, 3\)",
        ),
    ],
)
def test_what_is_missing_is_said(method: Any, make: Any, match: str) -> None:
    with pytest.raises(Exception, match=match):
        fit(method(), small_clients(), make(), 1, "sequential")
