"""Kinds of normalisation layers, by type: a name such as ``downsample.1`` doesn't tell."""

from __future__ import annotations

from torch import nn

BATCH_NORM: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
)
RUNNING_STATISTICS: tuple[type[nn.Module], ...] = (
    *BATCH_NORM,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
"""Layers that may keep running statistics, which they update in training mode."""
NORMS: tuple[type[nn.Module], ...] = (*RUNNING_STATISTICS, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
