"""Predictions by several models: evaluated, handed out and refused where one is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pfl.callbacks import HeadFineTuning
from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.mixture import Mix, Space, ensemble, parts, with_own
from lightning_pfl.core.tree import Model, Tree
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing import Fit, fit
from lightning_pfl.testing.conformance import small_clients, small_module

SPACES: tuple[Space, ...] = ("outputs", "probabilities", "log-probabilities")
FACTORS = (1.0, -0.5, 2.0)


def weights_of(clients: Tensor) -> Tensor:
    """Each client has weights of its own; one of client 0's is 0."""
    raw = torch.stack([clients.double(), torch.ones_like(clients).double(), 2.0 + 0 * clients], 1)
    return raw / raw.sum(1, keepdim=True)


class Predicts(FedAvg):
    """FedAvg whose clients predict with three models: multiples of the global one."""

    def __init__(self, space: Space, factors: tuple[float, ...] = FACTORS) -> None:
        super().__init__()
        self.space, self.factors = space, factors

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        model = super().personal_model(received, client_state, info)

        def multiples(leaf: Tensor) -> Tensor:
            floats = leaf.is_floating_point()
            return torch.stack([leaf * f if floats else leaf for f in self.factors], 1)

        weights = weights_of(info.index)[:, : len(self.factors)]
        if len(self.factors) == 1:
            weights = torch.ones_like(weights)
        stacked = {name: multiples(leaf) for name, leaf in model.items()}
        # A variance below 0 is none.
        for name in stacked:
            if name.endswith("running_var"):
                stacked[name] = stacked[name].abs()
        return ensemble(stacked, weights, self.space)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    found: np.ndarray = e / e.sum(1, keepdims=True)
    return found


def reference(run: Fit, client: int, x: Tensor, space: Space) -> np.ndarray:
    """Probabilities of the classes for one client, in NumPy from each model's outputs."""
    outputs = []
    for factor in FACTORS:
        module = small_module().eval()
        state = {
            name: leaf * factor if leaf.is_floating_point() else leaf
            for name, leaf in run.strategy.global_state_dict().items()
        }
        state["backbone.1.running_var"] = state["backbone.1.running_var"].abs()
        module.load_state_dict(state)
        with torch.no_grad():
            outputs.append(module(x).numpy())
    pi = weights_of(torch.tensor([client]))[0].numpy()
    if space == "outputs":
        return softmax(sum(w * o for w, o in zip(pi, outputs, strict=True)))
    if space == "probabilities":
        mixed: np.ndarray = sum(w * softmax(o) for w, o in zip(pi, outputs, strict=True))
        return mixed
    geometric = np.prod([softmax(o) ** w for w, o in zip(pi, outputs, strict=True)], 0)
    normalised: np.ndarray = geometric / geometric.sum(1, keepdims=True)
    return normalised


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_loss_and_accuracy_are_those_of_the_ensemble(engine: str, space: Space) -> None:
    data: FederatedTensorDataset = small_clients()
    run = fit(Predicts(space), data, small_module(), engine=engine, val_data=data)
    losses, hits = [], []
    for client, rows in enumerate(data.indices):
        if not len(rows):
            continue
        x, y = data.fields[0][rows], data.fields[1][rows].numpy()
        p = reference(run, client, x, space)
        losses.append(-np.log(p[np.arange(len(y)), y]).mean())
        hits.append((p.argmax(1) == y).mean())
        with torch.no_grad():
            handed = run.strategy.client_module(client)(x).softmax(1).numpy()
        np.testing.assert_allclose(handed, p, rtol=1e-10)
    assert run.metrics["val_loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert run.metrics["val_acc"] == pytest.approx(np.mean(hits), rel=1e-6)


@pytest.mark.parametrize("space", SPACES)
def test_an_ensemble_of_one_is_the_model(space: Space) -> None:
    data = small_clients()
    one = fit(Predicts(space, (1.0,)), data, small_module(), val_data=data)
    plain = fit(FedAvg(), data, small_module(), val_data=data)
    for name in ("val_loss", "val_acc"):
        assert one.metrics[name] == pytest.approx(plain.metrics[name], rel=1e-6)


def test_one_state_dict_is_refused() -> None:
    run = fit(Predicts("outputs"), small_clients(), small_module())
    with pytest.raises(MisconfigurationException, match=r"Predicts mixes the outputs of 3\. Use"):
        run.strategy.client_state_dict(0)


def test_an_ensemble_comes_apart_again() -> None:
    models = {"w": torch.arange(12.0).view(2, 3, 2), "n": torch.arange(6).view(2, 3)}
    weights = torch.full((2, 3), 1 / 3)
    first, mix = parts(ensemble(models, weights, "log-probabilities"))
    assert isinstance(mix, Mix)
    assert (mix.space, mix.what) == ("log-probabilities", "mixes the outputs of 3")
    assert len(mix.others) == 2
    assert mix.weights is weights
    for k, model in enumerate((first, *mix.others)):
        assert torch.equal(model["w"], models["w"][:, k])
        assert torch.equal(model["n"], models["n"][:, k])


@pytest.mark.parametrize("weights", [torch.ones(2), torch.ones(2, 2)])
def test_weights_must_fit(weights: Tensor) -> None:
    with pytest.raises(ValueError, match=r"Expected `weights` to be \(clients, 3\), .* but got"):
        ensemble({"w": torch.ones(2, 3)}, weights)


def test_an_unknown_space_is_refused() -> None:
    space: Any = "logits"
    with pytest.raises(ValueError, match=r"Expected `space` to be .* but got space='logits'"):
        ensemble({"w": torch.ones(2, 3)}, torch.ones(2, 3), space)


def test_probabilities_need_classes() -> None:
    mix = Mix(({},), torch.tensor([0.5, 0.5]), "probabilities")
    with pytest.raises(ValueError, match=r"logits \(batch, classes, \.\.\.\), .* got \(4,\)"):
        mix([torch.ones(4), torch.ones(4)])


class Prototypes(FedAvg):
    """FedAvg whose clients predict by the nearest of three features, which differ by client."""

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        model = super().personal_model(received, client_state, info)
        return with_own(model, {"prototypes": prototypes(info.index)})

    def predict(self, outputs: Tensor, features: Tensor, own: Model) -> Tensor:
        return outputs - (features.unsqueeze(1) - own["prototypes"]).square().sum(2)


def prototypes(clients: Tensor) -> Tensor:
    return torch.linspace(0, 1, 54).double().view(3, 18) * (1 + clients.double().view(-1, 1, 1))


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_a_function_of_outputs_and_features_is_evaluated_and_handed_out(engine: str) -> None:
    data: Any = small_clients()
    run = fit(Prototypes(), data, small_module(), engine=engine, val_data=data)
    module: Any = small_module().eval()
    module.load_state_dict(run.strategy.global_state_dict())
    losses, outputs = [], {}
    for client, rows in enumerate(data.indices):
        x, y = data.fields[0][rows], data.fields[1][rows].numpy()
        with torch.no_grad():
            features = module.backbone(x)
            logits = module.head(features).numpy()
            handed = run.strategy.client_module(client)(x).numpy()
        differences = features.numpy()[:, None] - prototypes(torch.tensor([client]))[0].numpy()
        outputs[client] = logits - (differences**2).sum(2)
        np.testing.assert_allclose(handed, outputs[client], rtol=1e-10)
        if len(rows):
            losses.append(-np.log(softmax(outputs[client])[np.arange(len(y)), y]).mean())
    assert run.metrics["val_loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    predicted = run.trainer.predict(run.module, data)
    assert predicted is not None
    for client, found in enumerate(predicted):
        for first, batch in enumerate(found):
            want = outputs[client][3 * first : 3 * first + 3]
            np.testing.assert_allclose(batch, want, rtol=1e-10)


def test_a_function_of_outputs_is_no_state_dict() -> None:
    run = fit(Prototypes(), small_clients(), small_module())
    with pytest.raises(MisconfigurationException, match=r"Prototypes changes the model's outputs"):
        run.strategy.client_state_dict(0)


class WithoutGlobal(Prototypes):
    def global_model(self, server: Tree) -> None:
        return None


def test_training_such_a_model_further_is_refused() -> None:
    data = small_clients()
    with pytest.raises(Exception, match="models to train that are plain, but got one that changes"):
        fit(WithoutGlobal(), data, small_module(), val_data=data, callbacks=[HeadFineTuning()])


def test_only_one_model_can_have_such_a_function() -> None:
    mixed = ensemble({"w": torch.ones(2, 3)}, torch.ones(2, 3) / 3)
    with pytest.raises(ValueError, match="one model for a function of its outputs, but got one"):
        with_own(mixed, {"prototypes": torch.ones(2)})
