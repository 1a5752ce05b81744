"""Mixed precision trains LeNet as single precision does, but for the type's rounding."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from benchmarks.workloads import WORKLOADS
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing.fitting import fit

SMALL = replace(WORKLOADS["w1"], clients=3, cohort=3, samples=10, test_samples=1)


def moved(accelerator: str, **flags: Any) -> Tensor:
    """How far one step of each client moves the server's parameters, as one vector."""
    torch.manual_seed(0)
    module = SMALL.module()
    before = {name: leaf.clone() for name, leaf in module.state_dict().items()}
    data, _ = SMALL.data()
    outcome = fit(FedAvg(), data, module, accelerator=accelerator, devices=1, **flags)
    model = outcome.server["model"]
    assert {leaf.dtype for leaf in model.values()} == {torch.float32}
    return torch.cat([(model[name].cpu() - leaf).flatten() for name, leaf in before.items()])


gpu = pytest.mark.gpu


@pytest.mark.parametrize(
    ("accelerator", "precision", "bits"),
    [
        pytest.param("cpu", "bf16-mixed", 8, marks=pytest.mark.slow),
        pytest.param("gpu", "bf16-mixed", 8, marks=gpu),
        pytest.param("gpu", "16-mixed", 11, marks=gpu),
    ],
)
def test_a_step_is_that_of_single_precision_to_rounding(
    accelerator: str, precision: str, bits: int
) -> None:
    """Numbers are rounded by 2^-bits of themselves at most, in the forward and the backward pass.

    That switches about the same share of ReLUs and of poolings, whose gradients are another then:
    of a gradient's length, the root of the share counts, far more than the rounding itself. Twice
    that is the bound, as of two numbers in a pooling each may be rounded.
    """
    if accelerator == "gpu" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    flags: dict[str, Any] = {"precision": precision, "engine": "auto"}
    if precision == "16-mixed":  # with a scale at which no step is skipped
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
        plugin = MixedPrecision("16-mixed", "cuda", scaler)
        flags = {"plugins": [plugin], "engine": "auto"}
    single, mixed = moved(accelerator, engine="auto"), moved(accelerator, **flags)
    apart = float((mixed - single).norm() / single.norm())
    assert 2.0 ** (-2 * bits) < apart < 2 * 2.0 ** (-bits / 2)
