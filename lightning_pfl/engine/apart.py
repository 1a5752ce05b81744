"""Whether what is computed of a sample depends on the other samples of its minibatch.

Where it doesn't, samples may share other minibatches than the user's. Most layers of torch leave
samples apart for certain. Any other may subtract a mean over the minibatch, or take its samples for
steps in time, as a recurrent layer does without ``batch_first``, so that it is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from inspect import getattr_static
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_pfl.core.recent import Recent
from lightning_pfl.core.tree import Model
from lightning_pfl.data.batch import batch_length, map_batch
from lightning_pfl.data.datasets import FederatedDataset, FederatedTensorDataset
from lightning_pfl.engine.active_phase import couples_samples, is_unmodified, writable
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.checks import settings_of
from lightning_pfl.engine.known_code import UnknownCodeError, is_torchs, read_by_step
from lightning_pfl.engine.operators import NumbersRead
from lightning_pfl.engine.program import ClientProgram
from lightning_pfl.engine.safety.guard import guarded
from lightning_pfl.engine.safety.snapshot import hooks_of

SAMPLES, TRIES, KEPT, CLIENTS = 5, 8, 8, 8
"""Samples that are tried together, how often others are where their numbers aren't finite, and the
largest numbers of settings of which findings are kept, and of clients whose samples are tried."""
ROUNDINGS, MOST = 8400, 0.02
"""A sample's numbers among others are the same up to so many roundings, but at most to so much."""
PERIOD = 4099
"""Length of the wave by which weights are changed: a prime, so that rows of a matrix get others,
and short, as a sine takes longer than all that a small network computes with a weight."""
APART = frozenset(
    {
        *("linear", "conv", "pooling", "padding", "dropout", "normalization", "batchnorm"),
        *("instancenorm", "container", "channelshuffle", "pixelshuffle", "upsampling", "loss"),
        *("activation", "transformer"),
    }
)
"""Modules of ``torch.nn`` whose layers leave samples apart, save for ``dim``, ``batch_first``."""
OURS = "lightning_pfl.models."


def samples_to_try(data: FederatedTensorDataset, most: int) -> Iterator[Tensor]:
    """Iterate over positions of samples of one client after another, of those with the most.

    Whichever clients train, they are the same.

    Args:
        data: The dataset.
        most: Largest number of samples of a client.
    """
    # Another process may have the samples of some clients.
    here = data.sizes_here()
    order = torch.argsort(here, descending=True, stable=True)
    for client in order[: min(CLIENTS, int((here > 0).sum()))].tolist():
        yield data.indices[client][:most]


def evaluates_apart(
    module: nn.Module, settings: EngineSettings, data: FederatedDataset, round: int | None
) -> bool:
    """Whether values of samples by ``per_sample`` are the same in whichever minibatches.

    Args:
        module: A ``PersonalizedModule``, as it is when it is evaluated.
        settings: The Trainer's flags.
        data: The split; samples of other than resident ones are never moved.
        round: The round; once in each the module is tried again, as its layers may read anything,
            unless their code and the trial show that they don't.
    """
    if couples_samples(module, training=False):
        return False
    ours = is_unmodified(module) or type(module).__module__.startswith(OURS)
    plain = ours and _has_apart(module) and not hooks_of(module)
    if plain or not isinstance(data, FederatedTensorDataset):
        return True
    try:
        read = read_by_step(module, "per_sample")
    except UnknownCodeError:
        read = None
    forwards = tuple(getattr_static(type(part), "forward") for part in module.modules())
    key = settings_of(module, read), forwards
    found = _FOUND.setdefault(module, Recent(KEPT))
    if key not in found or found[key].round not in (None, round):
        found[key] = _find(module, settings, data, round, read is not None)
    return found[key].apart


class _Finding(NamedTuple):
    """Whether samples stay apart, and the round in which that is so; None for any."""

    apart: bool
    round: int | None


_FOUND: WeakKeyDictionary[nn.Module, Recent[Any, _Finding]] = WeakKeyDictionary()


def _find(
    module: nn.Module,
    settings: EngineSettings,
    data: FederatedTensorDataset,
    round: int | None,
    known: bool,
) -> _Finding:
    """Try a module whose code is known or not.

    What known code computes depends on its samples, on settings and on the weights. If no number in
    a tensor chooses what it does, that may show with some weights and not with others, as behind a
    ReLU: so it is tried with their negatives, too.
    """
    numbers = NumbersRead()
    apart = _try(module, settings, data, numbers)
    last = known and not _has_tensors(module)
    negated = _try(module, settings, data, numbers, -1) if apart and last else None
    stays = last and not numbers.read and (apart is False or negated is not None)
    return _Finding(bool(apart) and negated is not False, None if stays else round)


def _has_tensors(module: nn.Module) -> bool:
    """Whether a layer of a user's has tensors that aren't weights, whose numbers may change."""
    parts = [part for part in module.modules() if not is_torchs(part)]
    held = [one for part in parts for one in (*vars(part).values(), *part._buffers.values())]
    return any(isinstance(one, Tensor) for one in held)


def _is_apart(part: nn.Module) -> bool:
    """Whether a layer and those in it leave samples apart for certain."""
    kind = type(part)
    package, _, place = kind.__module__.rpartition(".")
    if package != "torch.nn.modules" or "forward" in vars(part):
        return kind.__module__.startswith(OURS) and _has_apart(part)
    if isinstance(part, nn.Flatten):
        return part.start_dim >= 1
    if isinstance(part, (nn.RNNBase, nn.MultiheadAttention)):
        return part.batch_first
    known = place in APART or isinstance(part, (nn.Embedding, nn.Flatten))
    return known and not hasattr(part, "dim") and _has_apart(part)


def _has_apart(part: nn.Module) -> bool:
    return all(map(_is_apart, part.children()))


def _try(
    module: Any,
    settings: EngineSettings,
    data: FederatedTensorDataset,
    numbers: NumbersRead,
    sign: int = 1,
) -> bool | None:
    """Try an evaluation on samples of several clients; None if its numbers aren't finite.

    Args:
        module: The module.
        settings: The Trainer's flags.
        data: The split.
        numbers: Notes whether numbers in tensors are read.
        sign: What weights are multiplied by.
    """
    program = ClientProgram(module, settings)
    program.throwaway = writable(module)
    model = {name: stirred(p.detach()) * sign for name, p in module.named_parameters()}
    model |= dict(module.named_buffers())

    def losses(batch: Any) -> Tensor:
        with numbers:
            return program.per_sample(model, batch)["loss"]

    for some in data.some_positions(SAMPLES * TRIES).split(SAMPLES):
        # Whatever a user's module raises; the evaluation raises it again, and names its client.
        with suppress(Exception), torch.no_grad(), guarded(module, settings.seed):
            found = stands_apart(losses, data.gather(some), unit_of(program, model))
            if found is not None:
                return found
    return None


def stands_apart(function: Callable[[Any], Tensor], batch: Any, unit: float) -> bool | None:
    """Whether a function's row of a sample is the same in minibatches of other samples.

    Args:
        function: Of a minibatch, ``(samples, ...)``.
        batch: A minibatch.
        unit: The unit of rounding of its numbers.

    Returns:
        None if they aren't finite.
    """
    rows, count = function(batch), batch_length(batch)
    if not rows.isfinite().all():
        return None
    # In another order, so that a sample that is read by later ones comes behind them.
    order = torch.arange(count, device=rows.device).flip(0)
    parts = order.split([count // 3 + 1, count - count // 3 - 1]) if count > 1 else (order,)
    again = torch.cat([function(map_batch(batch, partial(_at, part))) for part in parts])
    return _are_close(again, rows[order], unit)


def begins_alike(function: Callable[[Any], Tensor], batch: Any, unit: float) -> bool:
    """Whether a function's first rows are the same whatever number of samples follows.

    Args:
        function: Of a minibatch, ``(samples, ...)``.
        batch: A minibatch.
        unit: The unit of rounding of its numbers.
    """
    rows, count = function(batch), batch_length(batch)
    for first in {1, count // 2, count - 1} - {0, count}:
        few = map_batch(batch, itemgetter(slice(first)))
        if not _are_close(function(few), rows[:first], unit):
            return False
    return True


def _are_close(rows: Tensor, others: Tensor, unit: float) -> bool:
    bound = min(MOST, ROUNDINGS * max(unit, torch.finfo(rows.dtype).eps))
    return torch.allclose(rows, others, rtol=bound, atol=bound * float(others.abs().max()))


def _at(positions: Tensor, leaf: Tensor) -> Tensor:
    return leaf[positions.to(leaf.device)]


def unit_of(program: ClientProgram, model: Model) -> float:
    """Return the coarsest unit of rounding of what a program computes with a model."""
    kinds = {leaf.dtype for leaf in model.values() if leaf.is_floating_point()}
    kinds |= {kind for kind in (program.autocast, program.default_dtype) if kind is not None}
    return max((torch.finfo(kind).eps for kind in kinds), default=0.0)


def stirred(leaf: Tensor) -> Tensor:
    """Change weights a little, as other samples don't show through a layer of zeros."""
    if not leaf.is_floating_point():
        return leaf
    count = leaf.numel()
    # Not from 0, as the sine of that is none, and a scalar would stay as it is.
    at = torch.arange(1, 1 + min(count, PERIOD), device=leaf.device)
    wave = at.to(leaf.dtype).sin().mul_(0.1)
    return leaf + wave.repeat(-(-count // PERIOD))[:count].view(leaf.shape)
