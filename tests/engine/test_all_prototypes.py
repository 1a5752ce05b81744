"""Class means of features travel between clients of several architectures, as in FedProto."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.contract.view import StepView
from lightning_pfl.core.tree import Model, Tree
from lightning_pfl.methods.base import LocalStep, Method, Phase
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.models.client_modules import ClientModules
from lightning_pfl.testing.conformance import SIZES, small_clients
from tests.callbacks.setting import trainer
from tests.methods.references.training import batches, with_data

CLASSES, WIDTH, PULL, LR, ROUNDS = 3, 2, 0.7, 0.1, 3


class Prototypical(Method):
    """Models of their own, whose features are pulled to the clients' mean features of a class."""

    personal = "all"

    def __init__(self) -> None:
        super().__init__(local_epochs=1, weighting="uniform")

    def phases(self, round: int) -> tuple[Phase, ...]:
        measure = Phase(epochs=1, evaluate_only=True, name="measure")
        return (*super().phases(round), measure)

    def init_server(self, model: Model) -> Tree:
        nothing = torch.zeros(CLASSES, WIDTH).double()
        return {"means": nothing, "known": torch.zeros(CLASSES).double()}

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        return dict(server)

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        zeros = torch.zeros(len(info), CLASSES, WIDTH + 1).double()
        return {"model": client_state["model"], "received": received, "sums": zeros}

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        model = state["model"]
        if client.phase == "measure":
            (_, labels), real = client.samples(minibatches)
            member = F.one_hot(labels, CLASSES) * real.unsqueeze(2).double()
            features = client.features(model, minibatches)
            ones = torch.ones_like(features[..., :1])
            return {**state, "sums": state["sums"] + member.mT @ torch.cat([features, ones], 2)}
        grads = client.grad(model, minibatches, objective=pulled, given=state["received"])
        return {**state, "model": client.update(model, grads)}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        return {"sums": state["sums"]}, {"model": state["model"]}

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        sums, counts = uploads["sums"][..., :-1], uploads["sums"][..., -1]
        has = counts > 0
        means = (sums / counts.clamp_min(1).unsqueeze(2)).sum(0)
        some = has.sum(0).double()
        return {"means": means / some.clamp_min(1).unsqueeze(1), "known": (some > 0).double()}


def pulled(view: StepView, given: Tree) -> Tensor:
    """The loss, and the squared distance to the class's mean where there is one."""
    difference = view.features - given["means"][view.targets]
    term = difference.square().mean(1) * given["known"][view.targets]
    return view.loss + PULL * view.mean(term)


def network(hidden: int) -> PersonalizedModule:
    torch.manual_seed(hidden)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(25, hidden or WIDTH)]
    layers += [nn.Tanh(), nn.Linear(hidden, WIDTH)] if hidden else []
    settings: dict[str, Any] = {"lr": LR, "momentum": 0.0, "weight_decay": 0.0}
    return PersonalizedModule(
        nn.Sequential(*layers), nn.Linear(WIDTH, CLASSES), **settings
    ).double()


@pytest.mark.filterwarnings("ignore:.*are never sampled")
@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_class_means_meet_across_architectures(engine: str) -> None:
    data, hidden = small_clients(), [4, 0, 0, 4, 0]
    modules = {"deep": network(4), "flat": network(0)}
    names = ["deep" if units else "flat" for units in hidden]
    run = trainer(Prototypical(), max_epochs=ROUNDS, engine=engine, seed=0)
    run.fit(ClientModules(modules, names), data, data)

    nets = [network(units) for units in hidden]
    means, known = torch.zeros(CLASSES, WIDTH).double(), torch.zeros(CLASSES).double()
    for number in range(ROUNDS):
        found: dict[int, list[Tensor]] = {c: [] for c in range(CLASSES)}
        for k in with_data(data):
            optimizer = torch.optim.SGD(nets[k].parameters(), LR)
            for x, y in batches(data, k, number, 1):
                features = nets[k].backbone(x)
                distance = ((features - means[y]) ** 2).mean(1) * known[y]
                optimizer.zero_grad()
                loss = F.cross_entropy(nets[k].head(features), y) + PULL * distance.mean()
                loss.backward()
                optimizer.step()
            x, y = data.gather(data.indices[k])
            features = nets[k].backbone(x).detach()
            for c in y.unique().tolist():
                found[c].append(features[y == c].mean(0))
        assert all(found.values())
        assert all(len(each) < len(with_data(data)) for each in found.values())
        means = torch.stack([torch.stack(found[c]).mean(0) for c in range(CLASSES)])
        known = torch.ones(CLASSES).double()
    torch.testing.assert_close(
        run.strategy.federation.server["means"], means, rtol=1e-10, atol=1e-12
    )
    for k in with_data(data):
        torch.testing.assert_close(
            dict(run.strategy.client_state_dict(k)), nets[k].state_dict(), rtol=1e-10, atol=1e-12
        )
    # Means of two numbers and a count of each class, whatever the network.
    assert run.callback_metrics["round/bytes_up"] == sum(map(bool, SIZES)) * 8 * CLASSES * (
        WIDTH + 1
    )
