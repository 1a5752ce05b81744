"""Which engine runs a module: what the user asked for, or what a probe of one real step shows to be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_pfl.callback import ClientInfo
from lightning_pfl.data.clients import FederatedDataset
from lightning_pfl.engine.base import Evaluation, EngineSettings, LocalResult, OnClients
from lightning_pfl.engine.batching import Budget, LoaderBatches, ResidentBatches, Tick
from lightning_pfl.engine.client import ClientProgram
from lightning_pfl.engine.optimizer import ClientOptimizer, check_optimizer, is_elementwise
from lightning_pfl.engine.phase import ActivePhase
from lightning_pfl.engine.probe import compare, fallback_disabled, first_minibatch, one_row
from lightning_pfl.engine.sequential import SequentialEngine, SequentialLocal
from lightning_pfl.engine.vectorized import VectorizedEngine, VectorizedLocal, phase_steps
from lightning_pfl.layout import Layout
from lightning_pfl.methods.base import Method, Phase
from lightning_pfl.tree import Model, Tree, expand, rows, tmap
