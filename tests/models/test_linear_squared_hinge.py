"""SquaredHingeClassifier: the formula of the loss and of its gradient."""

from __future__ import annotations

import pytest
import torch

from lightning_pfl.models import SquaredHingeClassifier
from tests.solvers.problems import Hinges


@pytest.mark.parametrize("bias_regularization", [0.0, 0.3])
def test_loss_and_gradient_are_the_formulas(bias_regularization: float) -> None:
    module = SquaredHingeClassifier(2, 0.2, bias_regularization).double()
    x = torch.randn(7, 2, dtype=torch.float64)
    y = torch.tensor([1, 0, 1, 1, 0, 0, 1])
    w = torch.tensor([[0.4, -0.7]], dtype=torch.float64)
    b = torch.tensor([0.2], dtype=torch.float64)
    module.head.load_state_dict({"weight": w, "bias": b})
    values = module.per_sample((x, y))
    loss = values["loss"].mean()
    loss.backward()
    losses = Hinges(x.unsqueeze(0), 2.0 * y.unsqueeze(0).double() - 1, 0.2)
    at = torch.cat([w, b.view(1, 1)], 1)
    expected = losses.value(at)[0] + bias_regularization / 2 * 0.2**2
    torch.testing.assert_close(loss, expected)
    gradient = losses.gradient(at)[0]
    gradient[2] += bias_regularization * 0.2
    parameters = dict(module.head.named_parameters())
    found = [parameters[name].grad for name in ("weight", "bias")]
    torch.testing.assert_close(torch.cat([g.flatten() for g in found if g is not None]), gradient)
    scores = x @ w[0] + b
    assert values["acc"].tolist() == ((scores > 0) == (y > 0)).double().tolist()


def test_training_begins_at_zero() -> None:
    module = SquaredHingeClassifier(3)
    assert not any(parameter.any() for parameter in module.parameters())
    assert module.per_sample((torch.ones(1, 3), torch.tensor([0])))["loss"].tolist() == [1.0]


@pytest.mark.parametrize("name", ["regularization", "bias_regularization"])
@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_regularization_is_checked(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=f"Expected `{name}` to be at least 0, but got {name}="):
        SquaredHingeClassifier(2, **{name: bad})
