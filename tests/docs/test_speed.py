"""docs/speed.md: its program prints what it says, and its steps are replayed where it says so."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl import methods
from lightning_pfl.data.datasets import FederatedLoaders
from lightning_pfl.methods import FedAvg
from lightning_pfl.methods.base import Method
from lightning_pfl.testing.fitting import fit

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "speed.md").read_text()


def lines_of(program: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Run a program, and return what it logs."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        try:
            exec(program, {"__name__": "__main__"})
        finally:
            logging.getLogger("lightning_pfl").setLevel("NOTSET")
    return caplog.messages


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_program_logs_why_a_step_is_not_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    program, printed = re.findall(r"```(?:python)?\n(.*?)```\n", PAGE, re.DOTALL)
    unknown, runs = printed.splitlines()
    found = lines_of(program, caplog)
    assert found.count(unknown) == 1
    assert runs.endswith("...")
    assert any(line.startswith(runs.removesuffix("...")) for line in found)

    mended = lines_of(program.replace("loss.item()", "loss"), caplog)
    assert not any("isn't known" in line or "no longer" in line for line in mended)
    assert any(line.startswith("training_step runs vectorized") for line in mended)


class Config:
    """An object with code of its own."""

    def rate(self) -> float:
        return 0.5


NAMES: dict[str, Any] = {
    "__name__": "users",  # the package of what they define
    "L": L,
    "torch": torch,
    "np": np,
    "cross_entropy": cross_entropy,
}
STEP = """
import math, random

class Module(L.LightningModule):
    def __init__(self, held):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.losses, self.seen, self.held = [], {{}}, held

    def training_step(self, batch, batch_idx):
        losses = cross_entropy(self.layer(batch[0]), batch[1], reduction="none")
        loss = losses.mean()
        {line}
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


def replays(line: str, held: Any = None) -> int:
    """Count the replays of a fit, one client after another, whose step has a line."""
    names = dict(NAMES)
    exec(STEP.format(line=line), names)
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]))
    loaders = FederatedLoaders.from_any([DataLoader(samples, batch_size=4) for _ in range(3)])
    found = fit(FedAvg(), loaders, names["Module"](held), rounds=2, engine="sequential")
    sequential: Any = found.strategy.federation.engine._sequential
    used: int = sequential.whole.used + sequential.traces.used
    return used


# Of each row of the page's table, code of the first column.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("named", "line", "held"),
    [
        ("loss.item()", 'self.log("train_loss", loss.item())', None),
        ("float(loss)", 'self.log("train_loss", float(loss))', None),
        ("torch.Tensor([a, b])", "loss = loss * torch.Tensor([loss, 2.0]).mean()", None),
        (".tolist()", "losses.tolist()", None),
        (".numpy()", "losses.detach().numpy()", None),
        ("NumPy", "np.zeros(3)", None),
        ("`random`", "random.random()", None),
        ("if loss > 1:", "if loss > 1: loss = loss / 2", None),
        ("losses[losses > 1].sum()", "loss = loss + losses[losses > 1].sum()", None),
        ("self.losses.append(loss)", "self.losses.append(loss.detach())", None),
        ("self.last = loss", "self.last = loss.detach()", None),
        ('self.seen["loss"] = loss', 'self.seen["loss"] = loss.detach()', None),
        ("self.count.add_(1)", "self.held.add_(1)", torch.zeros(())),
        ("a config with methods", "loss = loss * self.held.rate()", Config()),
        ('getattr(self, f"layer{i}")', "getattr(self, f'layer{batch_idx}', None)", None),
        ('getattr(batch, "mask", None)', "getattr(batch, 'mask', None)", None),
        ("`print`", "print(end='')", None),
        ("`try`", "try: pass\n        except ValueError: loss = 0", None),
        ("`import`", "import math", None),
        ("`self.logger`", "self.logger", None),
        ("`torch.nn.utils`", "torch.nn.utils.get_total_norm([loss])", None),
        ("`global_step`", "loss = loss * (1 + self.global_step)", None),
        ("`self.trainer`", "self.trainer.callback_metrics", None),
        ("`math.exp`", "loss = loss * math.exp(-self.current_epoch)", None),
        ("`range`", "loss = loss + self.current_epoch + len(range(2))", None),
    ],
)
def test_what_keeps_a_step_from_being_replayed(named: str, line: str, held: Any) -> None:
    (table,) = re.findall(r"\| what keeps a step.*?\n\n", PAGE, re.DOTALL)
    assert named in table
    assert replays(line, held) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("line", "held"),
    [
        ('self.log("train_loss", loss)', None),
        ('self.log("train_loss", loss.detach())', None),
        ("loss = torch.where(losses > 1, losses, 0).sum()", None),
        ("loss = torch.stack([loss, 2 * loss]).mean()", None),
        ("loss = loss * self.held['rate']", {"rate": 0.5}),
        ("loss = loss * self.held.rates[0].a", SimpleNamespace(rates=[SimpleNamespace(a=0.5)])),
        ("loss = loss * min(1.0, self.current_epoch / 10)", None),
        ("loss = loss * (1.0 if self.current_epoch < 5 else self.trainer.max_epochs)", None),
        ("loss = loss * 0.9**batch_idx", None),
        ("loss = loss if hasattr(self, 'aux') else 2 * loss", None),
        ("loss = loss if getattr(self, 'aux', None) is None else 2 * loss", None),
        ("loss = loss + self.hparams.get('weight', 0)", None),
        ("loss = loss if 'weight' in self.hparams else 2 * loss", None),
        ("loss = loss + torch.rand_like(losses).mean()", None),
    ],
)  # fmt: skip
def test_what_to_write_instead_is_replayed(line: str, held: Any) -> None:
    assert replays(line, held) > 0


@pytest.mark.quick
def test_the_methods_whose_arithmetic_is_replayed_are_named() -> None:
    """Those with a step of their own that they call recordable, and of others with one none."""
    (sentence,) = re.findall(r"The arithmetic of a method is replayed.*?;", PAGE, re.DOTALL)
    named = set(re.findall(r"`(\w+)`", sentence))
    own = {
        name: hasattr(step, "recorded_settings")
        for name in methods.__all__
        if (step := getattr(methods, name).client_step) is not Method.client_step
    }
    of_sheaves = {name for name in own if ".sheaf" in getattr(methods, name).client_step.__module__}
    assert named == {name for name, whole in own.items() if whole} - of_sheaves
    assert of_sheaves
    assert {"FedPer", "FedRep", "LGFedAvg"}.isdisjoint(own)
