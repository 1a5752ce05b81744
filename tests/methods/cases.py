"""One line per method: the smallest settings that use everything it does."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_pfl import methods
from lightning_pfl.methods.base import Method

CASES: dict[str, Callable[[], Method]] = {
    "FedAvg": lambda: methods.FedAvg(server_optimizer=lambda p: torch.optim.Adam(p, lr=0.01)),
    "FedBN": lambda: methods.FedBN(),
    "FedPer": lambda: methods.FedPer(),
    "FedProx": lambda: methods.FedProx(prox_weight=0.5),
    "FedRep": lambda: methods.FedRep(head_epochs=2, body_epochs=1, head_lr=0.1),
    "LGFedAvg": lambda: methods.LGFedAvg(local_epochs=None, local_steps=3),
    "LocalOnly": lambda: methods.LocalOnly(),
    "SCAFFOLD": lambda: methods.SCAFFOLD(option="I", server_lr=0.7),
}
