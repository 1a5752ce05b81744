"""The programs of docs/priors.md run as they are printed, for one round."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pfl.core.tree import expand, leaves, tmap
from lightning_pfl.priors import Prior

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "priors.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the programs leave, one after the other."""
    found: dict[str, Any] = {"trainers": []}
    for snippet in SNIPPETS:
        folder = tmp_path_factory.mktemp("run")
        flags = f"max_epochs=1, accelerator='cpu', default_root_dir={str(folder)!r}"
        code, count = re.subn(r"max_epochs=\d+", flags, snippet)
        assert count == 1
        exec(code, found)
        found["trainers"].append(found["trainer"])
    return found


@pytest.mark.slow
def test_the_server_has_what_the_text_says(names: dict[str, Any]) -> None:
    student, layers = (trainer.strategy for trainer in names["trainers"])
    assert student.federation.rounds == layers.federation.rounds == 1
    mean = student.server["model"]["head.weight"]
    assert torch.equal(names["gamma"]["mean"]["head.weight"], mean)
    assert torch.equal(student.global_state_dict()["head.weight"], mean)
    assert "prior" not in student.server
    variances = layers.server["prior"]["variance"]
    assert set(variances) == set(layers.federation.parameter_split.trainable)
    assert all(leaf.ndim == 0 and float(leaf) >= 0.999 for leaf in variances.values())
    assert all(trainer.callback_metrics["round/rejected"] == 0 for trainer in names["trainers"])


def problem() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {"w": draw(3, 2, 4), "b": draw(3, 2)}, {"w": draw(2, 4), "b": draw(2)}


@pytest.mark.slow
def test_student_t_is_the_density_of_the_library(names: dict[str, Any]) -> None:
    """Differences of R between two thetas are those of the negative log density."""
    theta, model = problem()
    prior: Prior = names["StudentT"](0.5, 3.0)
    gamma = expand(prior.init(model), 3)
    density = torch.distributions.StudentT(3.0, scale=0.5)

    def negative(values: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [-density.log_prob(t - model[n]).flatten(1).sum(1) for n, t in values.items()]
        return torch.stack(parts).sum(0)

    other = tmap(lambda t: 2 * t + 0.1, theta)
    found = prior.regularizer(theta, gamma) - prior.regularizer(other, gamma)
    torch.testing.assert_close(found, negative(theta) - negative(other), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_the_closed_form_of_layers_has_no_gradient_left(names: dict[str, Any]) -> None:
    theta, model = problem()
    prior: Prior = names["LayerGaussian"]()
    found = prior.closed_form(theta, prior.init(model), WEIGHTS)
    for slope in leaves(prior.gamma_gradient(theta, found, WEIGHTS)):
        assert float(slope.abs().max()) < 1e-12
