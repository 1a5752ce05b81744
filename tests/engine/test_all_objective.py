"""What a method sees of a step: outputs, features, the losses and gradients of single samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pfl import PersonalizedModule
from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.contract.view import StepView
from lightning_pfl.core.errors import ClientError
from lightning_pfl.core.tree import Model, Tree, tmap
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.methods.base import LocalStep, Method, Phase
from lightning_pfl.testing import assert_trees_close, local_round
from lightning_pfl.testing.conformance import small_clients, small_module

SIZES = (4, 1, 7, 0, 3)
LR = 0.05
ENGINES: list[tuple[Any, int | None]] = [
    ("sequential", None),
    ("vectorized", None),
    ("vectorized", 1),
    ("vectorized", 3),
]
engines = pytest.mark.parametrize(("engine", "chunk"), ENGINES)


def regression(seed: int = 0) -> PersonalizedModule:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        module = PersonalizedModule(
            nn.Sequential(nn.Linear(3, 2), nn.Tanh()),
            nn.Linear(2, 1),
            loss="mse",
            lr=LR,
            momentum=0.0,
            weight_decay=0.0,
        )
    return module.double()


def clients() -> FederatedTensorDataset:
    """Unequal clients in minibatches of three, in their stored order."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(SIZES), 3, generator=generator, dtype=torch.float64)
    y = torch.randn(sum(SIZES), 1, generator=generator, dtype=torch.float64)
    positions = torch.arange(sum(SIZES)).split(SIZES)
    return FederatedTensorDataset((x, y), positions, batch_size=3, shuffle=False)


class Local(Method):
    """Local steps that a test gives."""

    def __init__(self, step: Any, phase: Phase | None = None) -> None:
        super().__init__()
        self.step, self.phase = step, phase or Phase("all", epochs=1)

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (self.phase,)

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        first = (info.index + 1).double()
        return {**super().client_init(received, client_state, info), "factor": first}

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        model: Model = self.step(state, minibatches, client)
        return {**state, "model": model}


def uploads(method: Method, engine: Any, chunk: int | None, module: Any, data: Any) -> Model:
    settings = EngineSettings(chunk_size=chunk)
    run = local_round(method, module, data, engine, settings=settings)
    found: Model = run.result.uploads["model"]
    return found


def descend(loss: Any) -> Model:
    """Plain torch: each client's steps on ``loss(module, x, y, client)``, ``(clients, ...)``."""
    data, ends = clients(), []
    for client, rows in enumerate(data.indices):
        module = regression()
        optimizer = torch.optim.SGD(module.parameters(), lr=LR)
        for at in rows.split(3) if len(rows) else ():
            optimizer.zero_grad()
            loss(module, data.fields[0][at], data.fields[1][at], client).backward()
            optimizer.step()
        ends.append({name: leaf.detach() for name, leaf in module.state_dict().items()})
    return {name: torch.stack([end[name] for end in ends]) for name in ends[0]}


def squares(module: Any, x: Tensor, y: Tensor) -> Any:
    return (module(x) - y).square().mean(1)


# --- a further term -------------------------------------------------------------------------------


@engines
def test_a_term_of_outputs_features_and_targets(engine: Any, chunk: int | None) -> None:
    """loss + f_k mean |z|^2 + mean (outputs - 2 targets)^2, with a factor f_k of each client."""

    def objective(view: StepView, given: Tree) -> Tensor:
        pull = view.mean(view.features.square().sum(1))
        other = view.mean((view.outputs - 2 * view.targets).square().sum(1))
        total: Tensor = view.loss + given["factor"] * pull + other
        return total

    def step(state: Tree, minibatches: Any, client: LocalStep) -> Model:
        given = {"factor": state["factor"]}
        grads = client.grad(state["model"], minibatches, objective=objective, given=given)
        return client.update(state["model"], grads)

    def reference(module: Any, x: Tensor, y: Tensor, client: int) -> Any:
        z = module.backbone(x)
        pull = (client + 1) * z.square().sum(1).mean()
        loss = squares(module, x, y).mean()
        return loss + pull + (module.head(z) - 2 * y).square().mean()

    found = uploads(Local(step), engine, chunk, regression(), clients())
    assert_trees_close(found, descend(reference))


@engines
def test_weights_of_samples_with_a_fixed_divisor(engine: Any, chunk: int | None) -> None:
    """sum of w loss over the number of samples, with w from the samples; sum(w) is no divisor."""

    def step(state: Tree, minibatches: Any, client: LocalStep) -> Model:
        (x, _), _ = client.samples(minibatches)
        weights = x[..., 0].abs()
        return client.update(
            state["model"], client.grad(state["model"], minibatches, weights=weights)
        )

    def reference(module: Any, x: Tensor, y: Tensor, client: int) -> Any:
        return (x[:, 0].abs() * squares(module, x, y)).sum() / len(x)

    found = uploads(Local(step), engine, chunk, regression(), clients())
    assert_trees_close(found, descend(reference))


@engines
def test_data_of_samples_and_their_losses(engine: Any, chunk: int | None) -> None:
    """Distillation of half the target: mean of (outputs - t)^2 + loss^2."""

    def objective(view: StepView, given: Tree) -> Tensor:
        distance = (view.outputs - view.sample_data["teacher"]).square().sum(1)
        return view.mean(distance + view.losses.square())

    def step(state: Tree, minibatches: Any, client: LocalStep) -> Model:
        (_, y), _ = client.samples(minibatches)
        data = {"teacher": y / 2}
        grads = client.grad(state["model"], minibatches, objective=objective, sample_data=data)
        return client.update(state["model"], grads)

    def reference(module: Any, x: Tensor, y: Tensor, client: int) -> Any:
        return ((module(x) - y / 2).square().sum(1) + squares(module, x, y).square()).mean()

    found = uploads(Local(step), engine, chunk, regression(), clients())
    assert_trees_close(found, descend(reference))


@pytest.mark.parametrize("accumulate", [1, 2])
@engines
def test_the_loss_as_an_objective_changes_nothing(
    engine: Any, chunk: int | None, accumulate: int
) -> None:
    """Also with a convolution, BatchNorm and momentum, and what is logged is the same."""

    def step(state: Tree, minibatches: Any, client: LocalStep) -> Model:
        grads = client.grad(state["model"], minibatches, objective=lambda view, _: view.loss)
        return client.update(state["model"], grads)

    settings = EngineSettings(chunk_size=chunk, accumulate=accumulate)
    plain, given = (
        local_round(method, small_module(), small_clients(), engine, settings=settings).result
        for method in (Method(), Local(step))
    )
    assert_trees_close(given.uploads, plain.uploads)
    assert_trees_close(given.logs, plain.logs)
    torch.testing.assert_close(given.loss, plain.loss, equal_nan=True)


def test_the_batched_gradient_gives_the_same_as_the_batched_forward_pass() -> None:
    """The transform that recurrent layers need."""

    def objective(view: StepView, given: Tree) -> Tensor:
        other = (view.outputs - view.sample_data["outputs"]).square().sum(1)
        return view.loss + view.mean(other + given["factor"] * view.features.square().sum(1))

    def step(state: Tree, minibatches: Any, client: LocalStep) -> Model:
        still = tmap(torch.clone, state["model"])
        outputs, losses = (f(still, minibatches) for f in (client.outputs, client.losses))
        grads = client.grad(
            state["model"],
            minibatches,
            objective=objective,
            given={"factor": state["factor"]},
            weights=losses,
            sample_data={"outputs": 2 * outputs},
        )
        return client.update(state["model"], grads)

    forward, grad, one = (
        local_round(Local(step), regression(), clients(), engine, **options).result.uploads  # type: ignore[arg-type]
        for engine, options in (
            ("vectorized", {"transform": "forward"}),
            ("vectorized", {"transform": "grad"}),
            ("sequential", {}),
        )
    )
    assert_trees_close(grad, forward)
    assert_trees_close(one, forward)


# --- constants ------------------------------------------------------------------------------------


@engines
@pytest.mark.parametrize("evaluate_only", [False, True])
def test_constants_are_those_of_eval_mode(
    engine: Any, chunk: int | None, evaluate_only: bool
) -> None:
    """A second model's, on each client's one minibatch; its BatchNorm statistics stay."""
    other = small_module().state_dict()
    found: dict[tuple[str, int], Tensor] = {}

    def step(state: Tree, minibatches: Any, client: LocalStep) -> Model:
        model = tmap(lambda leaf: torch.stack([leaf] * len(state["factor"])), other)
        before = tmap(torch.clone, model)
        real = client.samples(minibatches)[1]
        for what in ("outputs", "features", "losses"):
            value = getattr(client, what)(model, minibatches)
            for row, factor in enumerate(state["factor"].tolist()):
                found[what, int(factor) - 1] = value[row][real[row]]
        assert_trees_close(model, before, 0, 0)
        result: Model = state["model"]
        return result

    data = small_clients(shuffle=False)
    data.batch_size = 8
    method = Local(step, Phase("all", epochs=1, evaluate_only=evaluate_only))
    uploads(method, engine, chunk, small_module(), data)
    module = small_module().eval()
    with torch.no_grad():
        for client, rows in enumerate(data.indices):
            if not len(rows):
                continue
            x, y = data.fields[0][rows], data.fields[1][rows]
            features = module.backbone(x)
            outputs = module.head(features)
            torch.testing.assert_close(found["features", client], features)
            torch.testing.assert_close(found["outputs", client], outputs)
            losses = nn.functional.cross_entropy(outputs, y, reduction="none")
            torch.testing.assert_close(found["losses", client], losses)


@engines
def test_constants_see_the_augmented_samples(engine: Any, chunk: int | None) -> None:
    """The distance to the outputs of the same model on the same random samples is 0."""

    def objective(view: StepView, given: Tree) -> Tensor:
        far = view.mean((view.outputs - view.sample_data["outputs"]).square().sum(1))
        return view.loss + 1e6 * far

    def step(state: Tree, minibatches: Any, client: LocalStep) -> Model:
        data = {"outputs": client.outputs(state["model"], minibatches)}
        grads = client.grad(state["model"], minibatches, objective=objective, sample_data=data)
        return client.update(state["model"], grads)

    def noisy(batch: Any) -> Any:
        return batch[0] + torch.rand_like(batch[0]), batch[1]

    ends = []
    for method in (Local(step), Method()):
        data = clients()
        data.augment = noisy
        ends.append(uploads(method, engine, chunk, regression(), data))
    assert_trees_close(ends[0], ends[1], 1e-8)


# --- gradients of samples -------------------------------------------------------------------------


@engines
def test_gradients_of_samples_are_those_of_each_alone(engine: Any, chunk: int | None) -> None:
    """Clipped to norm 1 each and averaged, as in private training."""

    def step(state: Tree, minibatches: Any, client: LocalStep) -> Model:
        grads = client.sample_grads(state["model"], minibatches)
        _, real = client.samples(minibatches)
        norms = torch.stack([g.flatten(2).square().sum(2) for g in grads.values()]).sum(0).sqrt()
        factor = (1 / norms.clamp_min(1)) / real.sum(1, keepdim=True)
        mean = {n: torch.einsum("cs,cs...->c...", factor, g) for n, g in grads.items()}
        return client.update(state["model"], mean)

    data, ends = clients(), []
    for rows in data.indices:
        module = regression()
        for at in rows.split(3) if len(rows) else ():
            total = [torch.zeros_like(p) for p in module.parameters()]
            for row in at.tolist():
                x, y = data.fields[0][[row]], data.fields[1][[row]]
                grads = torch.autograd.grad(squares(module, x, y).sum(), list(module.parameters()))
                norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
                total = [
                    t + g / max(1.0, float(norm)) / len(at)
                    for t, g in zip(total, grads, strict=True)
                ]
            with torch.no_grad():
                for p, g in zip(module.parameters(), total, strict=True):
                    p.sub_(LR * g)
        ends.append({name: leaf.detach() for name, leaf in module.state_dict().items()})
    wanted = {name: torch.stack([end[name] for end in ends]) for name in ends[0]}
    assert_trees_close(uploads(Local(step), engine, chunk, regression(), data), wanted)


# --- what can't work ------------------------------------------------------------------------------


class Penalised(PersonalizedModule):
    """A step that calls ``per_sample`` and returns the mean of its losses and a penalty."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        penalty = sum(leaf.square().sum() for leaf in self.parameters())
        loss: Tensor = self.per_sample(batch)["loss"].mean() + penalty
        return loss


@engines
def test_a_step_with_a_penalty_serves_objectives_that_read_no_losses(
    engine: Any, chunk: int | None
) -> None:
    def step(state: Tree, minibatches: Any, client: LocalStep) -> Model:
        grads = client.grad(
            state["model"],
            minibatches,
            objective=lambda view, _: 2 * view.loss + view.outputs.sum(),
        )
        return client.update(state["model"], grads)

    def reference(module: Any, x: Tensor, y: Tensor, client: int) -> Any:
        penalty = sum(leaf.square().sum() for leaf in module.parameters())
        return 2 * (squares(module, x, y).mean() + penalty) + module(x).sum()

    module = regression()
    module.__class__ = Penalised
    found = uploads(Local(step), engine, chunk, module, clients())
    assert_trees_close(found, descend(reference))
    read = Local(lambda state, batch, client: client.losses(state["model"], batch) and None)
    with pytest.raises(ClientError, match=r"to return the mean of .* but it returns"):
        uploads(read, "sequential", chunk, module, clients())


class OwnStep(PersonalizedModule):
    """A step that isn't the mean of ``per_sample`` for certain, and calls the module twice."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        self(batch[0])
        loss: Tensor = (self(batch[0]) - batch[1]).square().mean()
        return loss


def own_step() -> OwnStep:
    module = OwnStep(nn.Linear(3, 2), nn.Linear(2, 1), loss="mse")
    return module.double()


def ask(what: str) -> Any:
    def step(state: Tree, minibatches: Any, client: Any) -> Model:
        model: Model = state["model"]
        if what == "weights":
            client.grad(model, minibatches, weights=torch.ones(1, 99).double())
        elif what == "view":
            client.grad(model, minibatches, objective=lambda view, _: view.losses.mean())
        else:
            getattr(client, what)(model, minibatches)
        return model

    return Local(step)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("what", "module", "message"),
    [
        ("losses", own_step, r"mean over samples of `per_sample\(batch\)\['loss'\]`"),
        ("view", own_step, r"mean over samples of `per_sample\(batch\)\['loss'\]`"),
        ("outputs", own_step, r"to call the module itself, .* but got 2 calls"),
        ("features", own_step, r"to call the submodule `head`, .* but got 2 calls"),
        (
            "weights",
            regression,
            r"to be \(clients, \d, .* but got \(1, 99\)",
        ),
    ],
)
def test_what_a_module_lacks_is_said(what: str, module: Any, message: str, engine: Any) -> None:
    with pytest.raises(ClientError, match=message):
        uploads(ask(what), engine, None, module(), clients())


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_gradients_of_samples_that_depend_on_each_other_are_refused(engine: Any) -> None:
    with pytest.raises(ClientError, match=r"Expected samples that are independent .*BatchNorm"):
        uploads(ask("sample_grads"), engine, None, small_module(), small_clients())
