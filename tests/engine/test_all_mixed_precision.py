"""Mixed precision takes the step of a linear model to the rounding of its type."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.methods import FedAvg
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.fitting import fit

CLIENTS, SAMPLES, CLASSES, SIDE, LR = 3, 10, 10, 8, 0.5
SINGLE = (1 + 2.0**-24) ** 64 - 1
"""What 64 roundings in single precision make of a number, relative: more than a sum over samples,
the loss, the optimizer and the mean have."""
LAYERS = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, CLASSES)),
    # As large as the picture, so that it is the same linear model.
    "convolution": lambda: nn.Sequential(nn.Conv2d(1, CLASSES, SIDE), nn.Flatten()),
}


def moved(layer: str, samples: tuple[Tensor, Tensor], **flags: Any) -> Tensor:
    """Return weights and biases after one step from zero, ``(classes, pixels + 1)``."""
    module = PersonalizedModule(LAYERS[layer](), nn.Identity(), lr=LR)
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    positions = list(torch.arange(CLIENTS * SAMPLES).split(SAMPLES))
    data = FederatedTensorDataset(samples, positions, batch_size=SAMPLES)
    model = fit(FedAvg(), data, module, devices=1, **flags).server["model"]
    assert {leaf.dtype for leaf in model.values()} == {torch.float32}
    weights, biases = (leaf.cpu().double() for leaf in model.values())
    return torch.cat([weights.view(CLASSES, -1), biases[:, None]], 1)


gpu = pytest.mark.gpu


@pytest.mark.parametrize("layer", list(LAYERS))
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("accelerator", "precision", "bits"),
    [
        ("cpu", "bf16-mixed", 8),
        pytest.param("gpu", "bf16-mixed", 8, marks=gpu),
        pytest.param("gpu", "16-mixed", 11, marks=gpu),
    ],
)
def test_a_step_is_that_of_a_linear_model_to_rounding(
    accelerator: str, precision: str, bits: int, engine: str, layer: str
) -> None:
    r"""Logits are 0 at first, so a class's derivative is ``p - y = 1/10 - y``, without rounding.

    A weight's gradient is the mean over samples of ``(p - y) x``. Three numbers are rounded to the
    type, each by 2^-bits of itself at most: the derivative, the input and the sum. So it is off by
    at most :math:`(1 + 2^{-b})^3 - 1` of the mean of ``|p - y| |x|``, beside single precision's
    rounding. Noise isn't exact in the type, so some weight is off by more than single precision.
    """
    if accelerator == "gpu" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(CLIENTS * SAMPLES, 1, SIDE, SIDE, generator=generator)
    labels = torch.randint(CLASSES, (CLIENTS * SAMPLES,), generator=generator)
    flags: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # with a scale at which no step is skipped
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
        flags = {"plugins": [MixedPrecision("16-mixed", "cuda", scaler)]}
    found = moved(layer, (inputs, labels), accelerator=accelerator, engine=engine, **flags)

    pixels = torch.cat([inputs.flatten(1), torch.ones(len(inputs), 1)], 1).double()
    derivative = (1 / CLASSES - nn.functional.one_hot(labels, CLASSES).double()).T / len(inputs)
    apart = (found + LR * derivative @ pixels).abs()
    size = LR * derivative.abs() @ pixels.abs()
    assert (apart <= ((1 + 2.0**-bits) ** 3 * (1 + SINGLE) - 1) * size).all()
    assert (apart > SINGLE * size).any()
