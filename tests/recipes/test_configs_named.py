"""A method that is a setting of another one: the config under its name does what its paper says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.callbacks import HeadFineTuning
from lightning_pfl.core.mixture import Mix, parts
from lightning_pfl.methods import FedAvg, LocalOnly
from lightning_pfl.methods.base import Method
from lightning_pfl.testing import QuadraticModule, assert_trees_close, descend, fit
from lightning_pfl.testing.conformance import SIZES, small_clients, small_module
from tests.methods.networks import cohorts
from tests.methods.quadratics import LR, SAMPLES, STEPS, A, C, close, ragged
from tests.methods.references import softmax
from tests.methods.references.softmax import softmax_module
from tests.methods.references.training import State, average, batches, load, train, with_data
from tests.recipes.test_configs import ROOT, compose, methods_of

ENGINES = pytest.mark.parametrize("engine", ["vectorized", "sequential"])


def method_of(config: str, **settings: Any) -> Method:
    """The method of a file in configs/method, with other settings."""
    part: Path = ROOT / "configs" / "method" / f"{config}.yaml"
    extra = tuple(f"--method.{name}={value}" for name, value in settings.items())
    (method,) = methods_of(compose(part, extra=extra))
    return method


@ENGINES
def test_hypcluster(engine: str) -> None:
    """Mansour et al. (2020), HypCluster: who fits which hypothesis best, local SGD, averages."""
    data = small_clients()
    run = fit(method_of("hypcluster"), data, softmax_module(), 3, engine, participation=3)
    first = run.recorder.servers[0]["models"]
    hypotheses = [softmax.as_numpy({n: leaf[j] for n, leaf in first.items()}) for j in range(3)]
    chosen = set()
    for number, cohort in enumerate(cohorts(3, 3)):
        trained: dict[int, list[Any]] = {0: [], 1: [], 2: []}
        for k in cohort.tolist():
            x, y = (field.flatten(1) if field.ndim > 1 else field for field in data.fields)
            mine = data.indices[k]
            of_all = [softmax.losses(h, x[mine].numpy(), y[mine].numpy()) for h in hypotheses]
            best = int(np.argmin([losses.mean() for losses in of_all]))
            w = hypotheses[best]
            # The pass that measures is the round's first.
            for batch in softmax.minibatches(data, k, number, epochs=1, first_epoch=1):
                w = softmax.moved(w, softmax.gradient(w, *batch), -0.05)
            trained[best].append((w, SIZES[k]))
            chosen.add(best)
        for j, some in trained.items():
            if some:
                hypotheses[j] = softmax.mean([w for w, _ in some], [n for _, n in some])
    assert len(chosen) > 1
    for name in softmax.NAMES:
        expected = np.stack([h[name] for h in hypotheses])
        np.testing.assert_allclose(run.server["models"][name], expected, rtol=1e-10)


@ENGINES
def test_mapper_lies_between_one_model_for_all_and_one_for_each(engine: str) -> None:
    data = small_clients()

    def mixed(share: int) -> Any:
        """For a linear model the mixture of outputs is that of the models."""
        run = fit(method_of("mapper", mixing=share), data, softmax_module(), 2, engine)
        own, mix = parts(run.models)
        assert isinstance(mix, Mix)
        assert mix.weights.tolist() == [share] * 5
        return {n: share * own[n] + (1 - share) * mix.others[0][n] for n in own}

    everybodys, own = mixed(0), mixed(1)
    common = fit(FedAvg(weighting="uniform"), data, softmax_module(), 2, engine)
    alone = fit(LocalOnly(), data, softmax_module(), 2, engine)
    for name in softmax.NAMES:
        close(everybodys[name], common.server["model"][name].expand_as(own[name]))
        close(own[name], alone.models[name])


@ENGINES
def test_fedbabu(engine: str) -> None:
    """Oh et al. (2022): the optimizer has the body alone, so no momentum and no decay moves the
    head; the bodies are averaged."""
    data, rounds = small_clients(), 3
    run = fit(method_of("fedbabu"), data, small_module(), rounds, engine)
    server: State = small_module().state_dict()
    for number in range(rounds):
        sent = []
        for k in with_data(data):
            net = load(small_module(), server)
            net.head.requires_grad_(False)
            sent.append(train(net, batches(data, k, number, 1)).state_dict())
        server = average(sent, [1.0] * len(sent))
    for k in range(data.num_clients):
        found = run.strategy.client_state_dict(k)
        assert_trees_close(found, server)
        assert torch.equal(found["head.weight"], small_module().state_dict()["head.weight"])


@ENGINES
def test_reptile(engine: str) -> None:
    """Nichol et al. (2018), batched: x + epsilon / n sum (y - x), and an adaptation of everything
    to each client's data at the end."""
    tuning = HeadFineTuning(scope="full", epochs=2)
    module = QuadraticModule(2, LR, 0.5)
    method = method_of("reptile")
    run = fit(method, ragged(), module, 3, engine, participation=2, callbacks=[tuning])
    x = torch.full((2,), 0.5, dtype=torch.float64)
    for cohort in cohorts(3, 2, eligible=SAMPLES.nonzero().flatten()):
        x = x + 0.5 * (descend(x, A, C, LR, STEPS)[cohort] - x).mean(0)
    close(run.server["model"]["w"], x)
    for client in range(4):
        steps = 2 * int(STEPS[client])
        want = descend(x, A[client, None], C[client, None], LR, steps)[0]
        close(tuning.client_state_dict(client)["w"], want)
