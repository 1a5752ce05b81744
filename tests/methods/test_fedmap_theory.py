"""FedMAP's theorem 1 and section A.4: the server descends on the envelope of the clients' losses.

Three quadratic clients solve exactly, so that the envelope is known: in closed form for Gaussian
priors, else by descent with autograd through all of it, which knows nothing of Danskin's theorem.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_pfl.core.tree import Tree, leaves, tmap
from lightning_pfl.data import FederatedDataModule, ShiftedLines
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.data.partition import Natural
from lightning_pfl.methods import FedMAP
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.priors import (
    DiagonalGaussianPrior,
    GaussianPrior,
    LaplacePrior,
    Prior,
)
from lightning_pfl.priors.base import gradient
from lightning_pfl.testing import (
    QuadraticModule,
    fit,
    local_round,
    quadratic_clients,
)
from tests.methods.references.fedmap import learn_prior, local_line, pooled_fit, shifted_lines

A = torch.tensor([[2.0], [3.0], [2.5]], dtype=torch.float64)
C = torch.tensor([[0.0, 1.0], [1.0, -2.0], [3.0, 0.5]], dtype=torch.float64)
SIZES = (2, 1, 3)
WEIGHTS = torch.tensor(SIZES, dtype=torch.float64) / 6
RATE, STEPS = 1 / 3, 24
"""Curvatures of 2 to 4: each step leaves at most a third of the error, all of them 4e-12."""


def gaussian(gamma: Tree) -> Tensor:
    """min a/2 (t - c)^2 + p/2 (t - m)^2 = a p / (2 (a + p)) (m - c)^2, with p = 1 / 2."""
    each: Tensor = A * 0.5 / (2 * (A + 0.5)) * (gamma["mean"]["w"] - C) ** 2
    return WEIGHTS @ each.sum(1)


def diagonal(gamma: Tree) -> Tensor:
    """The same with p = 1 / (s + 1.5), and the term that depends on the prior alone."""
    m, s = gamma["mean"]["w"], gamma["spread"]["w"]
    p = 1 / (s + 1.5)
    each = A * p / (2 * (A + p)) * (m - C) ** 2
    total: Tensor = WEIGHTS @ each.sum(1) + 0.01 * ((m**2).sum() + (s**2).sum())
    return total


def laplace(gamma: Tree) -> Tensor:
    """Scale 2, smoothing 1: descend, and differentiate through the descent."""
    m, theta = gamma["mean"]["w"], torch.zeros_like(C)
    for _ in range(60):
        d = theta - m
        theta = theta - RATE * (A * (theta - C) + d / (2 * (d**2 + 1).sqrt()))
    each: Tensor = A / 2 * (theta - C) ** 2 + (((theta - m) ** 2 + 1).sqrt() - 1) / 2
    return WEIGHTS @ each.sum(1)


ENVELOPES: dict[str, tuple[Callable[[], Prior], Callable[[Tree], Tensor]]] = {
    "Gaussian": (lambda: GaussianPrior(2.0), gaussian),
    "learned variances": (lambda: DiagonalGaussianPrior(0.2, 1.5, 0.01), diagonal),
    "Laplace": (lambda: LaplacePrior(2.0, 1.0), laplace),
}


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")
@pytest.mark.parametrize("name", ENVELOPES)
def test_the_server_descends_on_the_envelope(name: str, engine: str, tmp_path: Path) -> None:
    make, envelope = ENVELOPES[name]
    method = FedMAP(
        make(), "samples", prior_lr=0.4, log_envelope=True, local_epochs=None, local_steps=STEPS
    )
    data = quadratic_clients(A.flatten(), C, SIZES)
    logger = CSVLogger(tmp_path)
    run = fit(method, data, QuadraticModule(2, RATE, 0.5), 2, engine, logger=logger)
    gamma = method.prior.init({"w": torch.full((2,), 0.5, dtype=torch.float64)})
    values = []
    for server in run.recorder.servers:
        for got, want in zip(leaves(method.gamma(server)), leaves(gamma), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-8)
        values.append(float(envelope(gamma)))
        gamma = tmap(lambda leaf, g: leaf - 0.4 * g, gamma, gradient(envelope, gamma))
    assert values == sorted(values, reverse=True)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        logged = [float(row["prior/envelope"]) for row in csv.DictReader(file)]
    assert logged == pytest.approx(values[:-1], abs=1e-7)  # the logger has single precision


def test_the_summed_data_term_has_the_envelope_of_sums() -> None:
    """N a in the place of a; the steps are those of the mean, so that curvatures stay small."""
    method = FedMAP(
        GaussianPrior(2.0), "uniform", data_term="sum", log_envelope=True,
        local_epochs=None, local_steps=STEPS,
    )  # fmt: skip
    data = quadratic_clients(A.flatten(), C, SIZES)
    out = local_round(method, QuadraticModule(2, RATE, 0.5), data).result.uploads["envelope"]
    a = A.flatten() * torch.tensor(SIZES)
    want = a * 0.5 / (2 * (a + 0.5)) * (0.5 - C).square().sum(1)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-9)


# --- section A.4 ---


def test_the_deterministic_anchor() -> None:
    mean, spread, envelope = learn_prior(shifted_lines(0), 40, np.zeros(2))
    found = [*mean, *spread, envelope]
    assert found == pytest.approx([-0.89616, 6.72340, 4.23769, 49.0379, 1.57036], rel=3e-6)


@pytest.mark.slow
def test_the_pooled_line_rises_and_the_learned_one_falls() -> None:
    for seed in range(6):
        lines = shifted_lines(seed)
        assert pooled_fit(lines)[0] > 1.5
        mean, spread, _ = learn_prior(lines, 10, np.random.default_rng(seed).normal(size=2))
        assert -1.3 < mean[0] < -0.45
        assert 43 < spread[1] < 55
        assert (1 + spread[1]) > 4 * (1 + spread[0])


def lines_module(mean: list[float]) -> PersonalizedModule:
    """A line as a module: slope and intercept."""
    head = nn.Linear(1, 1)
    with torch.no_grad():
        head.weight.fill_(mean[0])
        head.bias.fill_(mean[1])
    settings = {"loss": "mse", "lr": 0.05, "momentum": 0.95, "weight_decay": 0.0}
    return PersonalizedModule(nn.Identity(), head, **settings).double()  # type: ignore[arg-type]


def regression(steps: int) -> tuple[FedMAP, FederatedTensorDataset]:
    source = ShiftedLines(dtype="float64")
    module = FederatedDataModule(source, Natural("client"), batch_size=60)
    module.setup("fit")
    data = module.train_dataloader()
    assert isinstance(data, FederatedTensorDataset)
    prior = DiagonalGaussianPrior()
    method = FedMAP(prior, "samples", local_epochs=None, local_steps=steps, log_envelope=True)
    return method, data


def test_the_samples_are_those_of_the_anchor() -> None:
    fields = ShiftedLines(dtype="float64").load().fields
    want = np.concatenate(shifted_lines(0))
    np.testing.assert_array_equal(torch.cat(fields, 1).numpy(), want)


@pytest.mark.slow
def test_the_anchor_is_a_fixed_point_of_a_round() -> None:
    """Clients begin at the prior's mean and find their exact lines; the server stays."""
    lines = shifted_lines(0)
    mean, spread, envelope = learn_prior(lines, 40, np.zeros(2))
    method, data = regression(750)
    module = lines_module(mean.tolist())
    names = ("head.weight", "head.bias")
    prior = {
        n: torch.full_like(module.state_dict()[n], s) for n, s in zip(names, spread, strict=True)
    }
    model = {n: module.state_dict()[n].clone() for n in names}
    server = {"model": model, "prior": {"spread": prior}}
    out = local_round(method, module, data, server=server)
    found = method.gamma(out.server)
    for entry, want in (("mean", mean), ("spread", spread)):
        got = [float(found[entry][n]) for n in names]
        assert got == pytest.approx(want.tolist(), rel=1e-6)
    for k, line in enumerate(lines):
        theta, value = local_line(line, mean, 1 / (spread + 1))
        got = [float(out.result.uploads["model"][n][k]) for n in names]
        assert got == pytest.approx(theta.tolist(), rel=1e-5)
        assert float(out.result.uploads["envelope"][k]) == pytest.approx(value, rel=1e-6)
    weights = np.array([len(line) for line in lines]) / 116
    more = 1e-4 * (mean @ mean + spread @ spread)
    total = weights @ out.result.uploads["envelope"].numpy() + more
    assert total == pytest.approx(envelope, rel=1e-6)


@pytest.mark.slow
def test_ten_rounds_learn_it() -> None:
    mean, spread, _ = learn_prior(shifted_lines(0), 10, np.array([0.3, -0.4]))
    method, data = regression(1000)
    run = fit(method, data, lines_module([0.3, -0.4]), 10)
    found = method.gamma(run.server)
    names = ("head.weight", "head.bias")
    assert [float(found["mean"][n]) for n in names] == pytest.approx(mean.tolist(), rel=1e-4)
    assert [float(found["spread"][n]) for n in names] == pytest.approx(spread.tolist(), rel=1e-4)
