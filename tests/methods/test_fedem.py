"""FedEM: expectation maximisation, whose numbers on six points are known."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_pfl.core.mixture import Mix, parts
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import select
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.methods import IFCA, FedAvg, FedEM
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing import QuadraticModule, assert_trees_equal, fit, quadratic_clients
from lightning_pfl.testing.conformance import SIZES, small_clients, small_module
from tests.methods.case import Bytes, Case, D
from tests.methods.networks import cohorts, plain_module
from tests.methods.quadratics import closed_form
from tests.methods.references import softmax
from tests.methods.references.fedem import (
    fedem_client,
    normal_estimates,
    normal_responsibilities,
)
from tests.methods.references.softmax import softmax_module

CASE = Case(
    method=lambda: FedEM(2),
    bytes={
        "defaults": Bytes(FedEM, 3 * 4 * D, 3 * 4 * D),
        # Means and variances of 25 pixels; sums of as many, and of responsibilities.
        "normal distributions": Bytes(
            lambda: FedEM(2, input_size=25), 2 * 4 * (D + 50), 2 * 4 * (D + 50 + 1)
        ),
    },
    twin=None,  # Its models are entries of a mixture, which FedAvg's are not: tested below.
    published={"components": 3, "local_epochs": 1, "weighting": "samples"},
)

W = "backbone.w"
POINTS = [[0.0, 0.5, 4.0], [3.5, 4.0, 0.0]]


class Offset(nn.Module):
    """The difference of inputs to a point."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.w


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return output.square() / 2


def point(lr: float) -> PersonalizedModule:
    """A point whose loss is half the squared distance to a sample."""
    settings: Any = {"lr": lr, "momentum": 0.0, "weight_decay": 0.0}
    return PersonalizedModule(Offset(), nn.Identity(), half_square, **settings)


def points(values: list[list[float]] = POINTS) -> FederatedTensorDataset:
    x = torch.tensor(values, dtype=torch.float64)
    positions = torch.arange(x.numel()).split(x.shape[1])
    return FederatedTensorDataset((x.flatten(), x.flatten()), positions, batch_size=100)


def start(*values: float) -> Any:
    return [{W: torch.tensor(value, dtype=torch.float64)} for value in values]


def run_points(lr: float, rounds: int, engine: str, steps: int = 1, **settings: Any) -> Any:
    settings = {"initial": start(1.0, 3.0), **settings}
    method = FedEM(len(settings["initial"]), local_steps=steps, **settings)
    return fit(method, points(), point(lr), rounds, engine)


def models_of(server: Any) -> list[float]:
    return [float(model[W]) for model in server["models"].values()]


def log_likelihood(server: Any, weights: Tensor) -> float:
    """Of all samples, without the Gaussians' constants."""
    theta, pi, x = np.array(models_of(server)), weights.numpy(), np.array(POINTS)
    density = np.exp(-((x[:, :, None] - theta) ** 2) / 2)
    return float(np.log((pi[:, None] * density).sum(2)).sum())


class TestSixPoints:
    @closed_form
    def test_a_step_that_solves_for_the_maximum_follows_em(self, engine: str) -> None:
        """The samples' responsibilities for a model sum to 3 over both clients, which mirror each
        other: half of its two clients' gradients, times 2, is all of the way to the maximum."""
        recorder = run_points(2.0, 40, engine).recorder
        first, weights = recorder.servers[1], recorder.banks[1]["weights"]
        assert models_of(first) == pytest.approx([0.26205577, 3.73794423], rel=1e-6)
        expected = [[0.65085804, 0.34914196], [0.34914196, 0.65085804]]
        np.testing.assert_allclose(weights, expected, rtol=1e-6)
        likelihoods = [
            log_likelihood(server, bank["weights"])
            for server, bank in zip(recorder.servers, recorder.banks, strict=True)
        ]
        assert likelihoods[0] == pytest.approx(-6.23910867, rel=1e-6)
        assert likelihoods[1] == pytest.approx(-4.00595245, rel=1e-6)
        assert likelihoods[-1] == pytest.approx(-3.97834810, rel=1e-6)
        assert (np.diff(likelihoods) > -1e-12).all()
        assert models_of(recorder.servers[-1]) == pytest.approx([0.17094645, 3.82905355], rel=1e-6)
        assert recorder.banks[-1]["weights"][0].tolist() == pytest.approx(
            [0.66630795, 0.33369205], rel=1e-6
        )

    def test_gradient_steps_have_the_known_numbers(self, engine: str) -> None:
        recorder = run_points(0.1, 10, engine).recorder
        for number, expected in (
            (1, [0.96310279, 3.03689721]),
            (2, [0.92691659, 3.07308341]),
            (10, [0.68544536, 3.31455464]),
        ):
            assert models_of(recorder.servers[number]) == pytest.approx(expected, rel=1e-6)
        assert recorder.banks[2]["weights"][0].tolist() == pytest.approx(
            [0.6656197, 0.3343803], rel=1e-6
        )
        five = run_points(0.1, 1, engine, steps=5)
        assert models_of(five.server) == pytest.approx([0.83433692, 3.16566308], rel=1e-6)

    def test_one_component_is_fedavg(self, engine: str) -> None:
        """(X_1's mean + X_2's mean) / 2 = 2, and 2 - 0.9^15 is 1.794."""
        run = run_points(0.1, 3, engine, steps=5, initial=start(1.0))
        assert models_of(run.server) == pytest.approx([1.7941088679], rel=1e-9)
        assert float(run.strategy.global_state_dict()[W]) == models_of(run.server)[0]

    def test_another_order_of_the_models_changes_the_order_alone(self, engine: str) -> None:
        one = run_points(0.1, 3, engine)
        other = run_points(0.1, 3, engine, initial=start(3.0, 1.0))
        assert models_of(other.server) == pytest.approx(models_of(one.server)[::-1], rel=1e-12)
        weights = one.client_state["weights"].flip(1)
        torch.testing.assert_close(other.client_state["weights"], weights)

    def test_a_trajectory_forgets_geometrically(self, engine: str) -> None:
        """Far models leave no doubt whose a sample is, so that the mean of q stays 2/3 and 1/3."""
        run = run_points(1e-9, 6, engine, initial=start(-90.0, 100.0), weight_step=0.25)
        for number, bank in enumerate(run.recorder.banks):
            # Of the first client the samples 0 and 0.5 are nearer to -90, and 4 as well.
            gap = 1.0 - bank["weights"][:, 0]
            torch.testing.assert_close(gap, torch.full_like(gap, 0.5 * 0.75**number))

    def test_where_losses_are_large_a_client_is_ifcas(self, engine: str) -> None:
        """Every sample is its client's model's alone: that one trains as IFCA's does, and the other
        one doesn't move."""
        data, starts = points([[-95.0, -80.0, -70.0], [60.0, 99.0, 120.0]]), start(-90.0, 100.0)
        sent = []
        for method in (FedEM(2, starts, local_steps=3), IFCA(2, initial=starts, local_steps=3)):
            run = fit(method, data, point(0.1), 1, engine)
            assert run.recorder.rounds[0].uploads is not None
            sent.append(run.recorder.rounds[0].uploads)
        mixed, clustered = sent
        assert clustered["cluster"].tolist() == [0, 1]
        own = torch.stack([mixed["models"][str(k)][W][k] for k in range(2)])
        torch.testing.assert_close(own, clustered["model"][W], rtol=1e-12, atol=0)
        others = [float(mixed["models"][str(1 - k)][W][k]) for k in range(2)]
        assert others == [100.0, -90.0]


class Own(L.LightningModule):
    """The network of ``softmax_module`` in a module that isn't a PersonalizedModule.

    Args:
        factor: What ``training_step`` returns is this times the mean of the samples' losses.
    """

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor, self.head = factor, softmax_module().head

    def forward(self, x: Tensor) -> Any:
        return self.head(x.flatten(1))

    def per_sample(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": nn.functional.cross_entropy(self(x), y, reduction="none")}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.factor * self.per_sample(batch)["loss"].mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.per_sample(batch)["loss"].mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class TestNetworks:
    @pytest.mark.parametrize("make_module", [softmax_module, Own])
    def test_a_classifier_trains_as_the_reference(self, make_module: Any, engine: str) -> None:
        data = small_clients(shuffle=True)
        method = FedEM(2, local_epochs=2, weight_step=0.7)
        run = fit(method, data, make_module(), 3, engine, participation=3, val_data=data)
        models = [softmax.as_numpy(m) for m in run.recorder.servers[0]["models"].values()]
        pi = np.full((5, 2), 0.5)
        for number, cohort in enumerate(cohorts(3, 3)):
            sent = []
            for k in cohort.tolist():
                x, y = data.gather(data.indices[k])
                trained, pi[k] = fedem_client(
                    models,
                    pi[k],
                    (x.flatten(1).numpy(), y.numpy()),
                    # Data are counted through the round: the weights' pass was its first.
                    softmax.minibatches(data, k, number, epochs=2, first_epoch=1),
                    lambda w, batch: softmax.losses(w, *batch),
                    lambda w, batch, q: softmax.gradient(w, batch[0], batch[1], q),
                    lambda w, g: softmax.moved(w, g, -0.05),
                    0.7,
                )
                sent.append(trained)
            samples = [SIZES[k] for k in cohort.tolist()]
            models = [softmax.mean([each[j] for each in sent], samples) for j in range(2)]
            np.testing.assert_allclose(run.recorder.banks[number + 1]["weights"], pi, rtol=1e-10)
        for j, model in enumerate(models):
            for name, leaf in model.items():
                found = run.server["models"][str(j)][name]
                np.testing.assert_allclose(found, leaf, rtol=1e-10)
        # The prediction mixes probabilities: p = sum_j pi_j softmax_j.
        expected = []
        for k, rows in enumerate(data.indices):
            if len(rows):
                x, y = data.gather(rows)
                inputs, labels = x.flatten(1).numpy(), y.numpy()
                p = sum(
                    pi[k, j] * np.exp(softmax.log_probabilities(w, inputs))
                    for j, w in enumerate(models)
                )
                expected.append(-np.log(p[np.arange(len(labels)), labels]).mean())
        assert run.metrics["val_loss"] == pytest.approx(np.mean(expected), rel=1e-6)

    def test_one_component_is_fedavg_bit_for_bit(self, engine: str) -> None:
        method = FedEM(1)
        assert method.notes(ParameterSplit(small_module())) == ["components=1 makes FedEM FedAvg."]
        run = fit(method, small_clients(), small_module(), 2, engine, participation=3)
        expected = fit(FedAvg(), small_clients(), small_module(), 2, engine, participation=3)
        assert_trees_equal(run.server["models"]["0"], expected.server["model"])

    def test_several_components_are_not_fedavg(self) -> None:
        """The first model starts as FedAvg's, and trains on a part of each sample."""
        run = fit(FedEM(2), small_clients(), plain_module(), 1)
        average = fit(FedAvg(), small_clients(), plain_module(), 1).server["model"]
        names = [name for name, _ in plain_module().named_parameters()]
        first = select(run.server["models"]["0"], names)
        assert max(float((first[n] - average[n]).abs().max()) for n in names) > 1e-3
        assert parts(run.models)[1] is not None

    def test_a_client_that_never_took_part_mixes_equally(self) -> None:
        run = fit(FedEM(2), small_clients(), plain_module(), 1, participation=2)
        away = [k for k in range(5) if k not in run.recorder.rounds[0].info.index.tolist()]
        weights = run.client_state["weights"]
        assert len(away) == 3
        assert (weights[away] == 0.5).all()
        torch.testing.assert_close(weights.sum(1), torch.ones(5).double())


class TestNormalDistributions:
    """pFedEM's components, in a form of ours."""

    def test_a_classifier_trains_as_the_reference(self, engine: str) -> None:
        data = small_clients(shuffle=True)
        method = FedEM(2, weight_step=0.7, input_size=25)
        run = fit(method, data, softmax_module(), 3, engine, participation=3)
        first = run.recorder.servers[0]
        models = [softmax.as_numpy(model) for model in first["models"].values()]
        mean, variance, pi = first["mean"].numpy(), np.ones((2, 25)), np.full((5, 2), 0.5)
        for number, cohort in enumerate(cohorts(3, 3)):
            sent, shares, inputs = [], [], []
            for k in cohort.tolist():
                x = data.fields[0][data.indices[k]].flatten(1).numpy()
                trained = list(models)
                for some, labels in softmax.minibatches(data, k, number, epochs=1, first_epoch=1):
                    q = normal_responsibilities(pi[k], some, mean, variance)
                    trained = [
                        softmax.moved(w, softmax.gradient(w, some, labels, q[:, j]), -0.05)
                        for j, w in enumerate(trained)
                    ]
                shares.append(normal_responsibilities(pi[k], x, mean, variance))
                inputs.append(x)
                sent.append(trained)
                pi[k] = 0.3 * pi[k] + 0.7 * shares[-1].mean(0)
            models = [
                softmax.mean([each[j] for each in sent], [q[:, j].sum() for q in shares])
                for j in range(2)
            ]
            mean, variance = normal_estimates(np.concatenate(inputs), np.concatenate(shares))
            found = run.recorder.servers[number + 1]
            np.testing.assert_allclose(found["mean"], mean, rtol=1e-8, atol=1e-12)
            np.testing.assert_allclose(found["variance"], variance, rtol=1e-8, atol=1e-6)
            for j, model in enumerate(models):
                for name, leaf in model.items():
                    np.testing.assert_allclose(found["models"][str(j)][name], leaf, rtol=1e-8)
        np.testing.assert_allclose(run.client_state["weights"], pi, rtol=1e-8)

    def test_clients_with_equal_data_are_one_with_all(self, engine: str) -> None:
        """Ten steps of EM of a mixture on the pooled samples: sums add up, weights stay common."""
        values = [[-1.5, -1.0, 0.0, 2.0, 2.5, 1.0]] * 3
        method = FedEM(2, start(1.0, 3.0), input_size=1)
        run = fit(method, points(values), point(0.0), 10, engine)
        x, pi = np.array(values).reshape(-1, 1), np.full(2, 0.5)
        mean, variance = run.recorder.servers[0]["mean"].numpy(), np.ones((2, 1))
        for _ in range(10):
            q = normal_responsibilities(pi, x, mean, variance)
            pi, (mean, variance) = q.mean(0), normal_estimates(x, q)
        np.testing.assert_allclose(run.server["mean"], mean, rtol=1e-8)
        np.testing.assert_allclose(run.server["variance"], variance, rtol=1e-8)
        np.testing.assert_allclose(run.client_state["weights"], [pi] * 3, rtol=1e-8)
        assert abs(mean[0] - mean[1]) > 1

    def test_one_component_is_fedavg_bit_for_bit(self, engine: str) -> None:
        run = fit(FedEM(1, input_size=25), small_clients(), small_module(), 2, engine)
        expected = fit(FedAvg(), small_clients(), small_module(), 2, engine)
        assert_trees_equal(run.server["models"]["0"], expected.server["model"])

    def test_inputs_of_another_size_are_refused(self) -> None:
        match = r"`input_size` numbers, but got input_size=7 and inputs of 25. Use input_size=25"
        with pytest.raises(Exception, match=match):
            fit(FedEM(2, input_size=7), small_clients(), plain_module(), 1, "sequential")


def test_the_mixture_of_probabilities_is_known() -> None:
    """Logits (2, 0, 0) and (0, 3, 0), weights 0.55 and 0.45: the mean of the logits would put the
    classes into another order."""
    net = nn.Linear(1, 3)
    method = FedEM(2)
    models = {
        str(j): {"weight": torch.zeros(1, 3, 1), "bias": torch.tensor([bias])}
        for j, bias in enumerate(([2.0, 0.0, 0.0], [0.0, 3.0, 0.0]))
    }
    state = {"weights": torch.tensor([[0.55, 0.45]], dtype=torch.float64)}
    info: Any = None
    first, mix = parts(method.personal_model({"models": models}, state, info))
    assert isinstance(mix, Mix)
    outputs = [torch.func.functional_call(net, {n: leaf[0] for n, leaf in m.items()},
               (torch.zeros(1, 1),)) for m in (first, *mix.others)]  # fmt: skip
    mix = type(mix)(mix.others, mix.weights[0], mix.space)
    found = mix(outputs).softmax(1)[0]
    assert found.tolist() == pytest.approx([0.45321765, 0.46782819, 0.07895416], rel=1e-6)


def test_equal_models_are_refused() -> None:
    with pytest.raises(ValueError, match="the first models to differ, but 0 and 1 are equal"):
        fit(FedEM(2, start(1.0, 1.0)), points(), point(0.1), 1)


def test_a_loss_that_is_no_mean_over_samples_is_refused() -> None:
    with pytest.raises(Exception, match="whose loss is the mean over samples"):
        fit(FedEM(2), quadratic_clients(), QuadraticModule(start=1.0), 1, "sequential")
    for input_size in (None, 25):  # the losses themselves, and gradients weighted by samples
        with pytest.raises(Exception, match=r"it returns [\d.]+ and the mean is [\d.]+\. Put"):
            fit(FedEM(2, input_size=input_size), small_clients(), Own(2.0), 1, "sequential")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"components": 0}, "`components` to be a whole number >= 1, but got components=0"),
        ({"initial": start(1.0)}, "to have 3 models, one for each component, but got 1"),
        ({"weight_step": 0.0}, r"`weight_step` to be in \(0, 1\], but got weight_step=0.0"),
        ({"weight_step": 1.5}, r"`weight_step` to be in \(0, 1\], but got weight_step=1.5"),
        ({"input_size": 0}, "`input_size` to be a whole number >= 1, but got input_size=0"),
        ({"input_size": 2, "weighting": "uniform"}, "weighting"),
        ({"prediction": "logits"}, "'probabilities' or 'outputs', but got prediction='logits'"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FedEM(**settings)
