"""A cache of a frozen backbone's features, computed once per phase instead of once per epoch.

Both engines have it: for the clients of a chunk, and for one client after another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.recent import Recent
from lightning_pfl.core.tree import Model, Tree, is_expanded
from lightning_pfl.data.batch import batch_length, map_batch
from lightning_pfl.data.datasets import FederatedDataset, FederatedTensorDataset
from lightning_pfl.engine.active_phase import ActivePhase, is_unmodified
from lightning_pfl.engine.apart import SAMPLES, samples_to_try, stands_apart, unit_of
from lightning_pfl.engine.fingerprint import Same
from lightning_pfl.engine.operators import NumbersRead
from lightning_pfl.engine.program import ClientProgram, NotVectorizableError
from lightning_pfl.engine.safety.guard import guarded
from lightning_pfl.engine.steps import samples_of_one_model

log = logging.getLogger(__name__)
BATCH = 768
"""Samples per forward pass of the backbone."""
KEPT = 64
"""Largest number of settings of which findings are kept."""
MAX_BYTES = 2**30
"""Largest size of cached features; computing them again is cheaper than swapping."""


class PrefixCache:
    """Caches the backbone's output in phases that allow it.

    The backbone must be frozen, the same for all clients and deterministic: the phase trains none
    of it, its leaves are expanded, the data is resident without augmentation, and it has no active
    dropout. Before the first use with each of the module's settings one step is checked: it must
    call the backbone once, make no random calls until then, and get features of a sample that don't
    depend on the other samples.

    Args:
        parameter_split: Names of the module.
        enabled: Whether to use the cache.
        alone: Whether it is for one client after another, whose kernels don't need ``vmap``.

    Attributes:
        used: Whether the last phase used the cache.
    """

    def __init__(self, parameter_split: ParameterSplit, enabled: bool, alone: bool = False) -> None:
        self.parameter_split, self.enabled, self.alone = parameter_split, enabled, alone
        self.used = False
        backbone = getattr(parameter_split.module, "backbone", None)
        self._backbone = backbone if isinstance(backbone, nn.Module) else None
        self._names = tuple(name for name in parameter_split.names if name.startswith("backbone."))
        self._source = 0
        self._suits = Recent[Any, bool](KEPT)

    def forget(self) -> None:
        """Check steps again, as their code may read more than the module's settings."""
        self._suits.clear()

    def features(
        self,
        data: FederatedDataset,
        clients: Sequence[int],
        passes: int,
        active: ActivePhase,
        state: Tree,
        program: ClientProgram,
        settings: Callable[[], Any],
    ) -> tuple[Tensor, Any] | None:
        """Compute the features of some clients' samples if the phase allows it; else None.

        Args:
            data: The phase's samples.
            clients: Ids.
            passes: The most passes of a client over its samples.
            active: The phase.
            state: The clients' states.
            program: The user's step.
            settings: Returns what steps depend on besides their arguments.

        Returns:
            Features ``(clients, most samples, ...)``, in each client's order, and the rest of a
            batch, leaves ``(clients times most samples, ...)``, where it alone is needed.
        """
        self.used = False
        model = state.get("model")
        if passes < 2 or program.hooks is not None or not isinstance(model, dict):
            return None
        if not self._allows(data, active, model):
            return None
        assert isinstance(data, FederatedTensorDataset)
        shared = {name: leaf[0] for name, leaf in model.items()}
        key = Same(program), settings()
        try:
            if key not in self._suits and self._suiting(data, shared, program):
                self._suits[key] = True
            if not self._suits.get(key, False):
                return None
            given = data, clients, shared, program
            cached = _compute(*given, self.alone, self._takes_pairs(data))
        except NotVectorizableError as reason:
            self._suits[key] = False
            log.info("The frozen backbone's features are not cached: %s.", reason)
            return None
        except Exception:  # the user's, which training raises again, and names its client
            return None
        if cached is not None:
            self.used = True
            self._source = model[self._names[0]].data_ptr()
        return cached

    def _suiting(self, data: FederatedTensorDataset, model: Model, program: ClientProgram) -> bool:
        """Check a step, which may write to attributes of the module: then it doesn't suit."""
        with guarded(self.parameter_split.module, 0):
            return _check(data, model, program)

    def _takes_pairs(self, data: FederatedTensorDataset) -> bool:
        """Whether a step uses ``batch[0]`` for the backbone alone for certain."""
        fields = data.fields
        pair = isinstance(fields, (tuple, list)) and len(fields) == 2
        return pair and isinstance(fields[1], Tensor) and is_unmodified(self.parameter_split.module)

    def fits(self, model: Model) -> bool:
        """Whether a model has the backbone of the features; a method may train a second model."""
        if not self.used:
            return False
        leaf = model[self._names[0]]
        return self._is_one(leaf) and leaf.data_ptr() == self._source

    def _is_one(self, leaf: Tensor) -> bool:
        """Whether the clients have one tensor."""
        return is_expanded(leaf) or self.alone

    def moved(self, state: Tree) -> None:
        """Take note that the state is in other memory."""
        if self.used:
            self._source = state["model"][self._names[0]].data_ptr()

    def expects(self, active: ActivePhase, data: FederatedDataset) -> bool:
        """Whether a phase may use the cache, by what is known before a round."""
        return (
            self.enabled
            and self._backbone is not None
            and bool(self._names)
            and isinstance(data, FederatedTensorDataset)
            and data.augment is None
            and not any(name in active.names for name in self._names)
            and not any(_is_stochastic(module) for module in self._backbone.modules())
        )

    def _allows(self, data: FederatedDataset, active: ActivePhase, model: Model) -> bool:
        return (
            self.expects(active, data)
            and all(self._is_one(model[name]) for name in self._names if name in model)
            and not any(name.startswith("backbone.") for name in active.throwaway)
        )


def _is_stochastic(module: nn.Module) -> bool:
    """Whether a layer in training mode has a dropout rate: dropout, LSTM, attention."""
    rate = getattr(module, "p", None) or getattr(module, "dropout", None)
    return module.training and isinstance(rate, (int, float)) and rate > 0


def _check(data: FederatedTensorDataset, model: Model, program: ClientProgram) -> bool:
    """Check a step of the client with the most samples.

    Returns:
        Whether a step was checked: False if no client has finite features.
    """
    tried = list(samples_to_try(data, max(data.batch_size, SAMPLES)))
    if tried and len(tried[0]) == 1:
        tried = [torch.cat(tried)]
    return any(_check_step(positions, data, model, program) for positions in tried)


def _check_step(
    positions: Tensor, data: FederatedTensorDataset, model: Model, program: ClientProgram
) -> bool:
    """Check a step on some samples of a client; False if their features aren't finite."""
    # A copy, because a step may write to the buffers of the head.
    calls, drawn = program.survey_prefix(_cloned(model), data.gather(positions))
    if calls != 1:
        raise NotVectorizableError(f"`training_step` calls `self.backbone` {calls} times")
    if drawn:
        raise NotVectorizableError("random numbers are drawn before or in `self.backbone`")

    def features(batch: Any) -> Tensor:
        with NumbersRead() as numbers:
            found = program.prefix_features(model, batch)
        if numbers.read:  # all samples that are tried may take one branch
            raise NotVectorizableError("`self.backbone` reads numbers in tensors")
        _require_rows(found, batch_length(batch))
        return found

    with torch.no_grad():
        apart = stands_apart(features, data.gather(positions), unit_of(program, model))
        if apart is None:  # reported elsewhere
            return False
        if not apart:
            raise NotVectorizableError("the features of a sample depend on the rest of its batch")
        half = data.gather(positions[: max(1, len(positions) // 2)])
        alone = features(half)
    _check_loss(model, half, alone, program)
    return True


def _check_loss(model: Model, batch: Any, features: Tensor, program: ClientProgram) -> None:
    """Check that the second minibatch of a phase has the same loss with cached features."""
    key = torch.zeros((), dtype=torch.int64, device=features.device)
    with torch.no_grad():
        try:
            real, cached = (
                program.training_loss(_cloned(model), batch, key, 1, None, given)[0]
                for given in (None, features)
            )
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            raise NotVectorizableError(f"a step with cached features fails: {error}") from error
    # NaN agrees with NaN: broken data are reported elsewhere.
    if real is None or not torch.allclose(real, cached, rtol=0.02, atol=1e-5, equal_nan=True):
        raise NotVectorizableError("a step uses the backbone for more than its features")


def _cloned(model: Model) -> Model:
    return {name: leaf.clone() for name, leaf in model.items()}


def _require_rows(features: object, samples: int) -> None:
    if not isinstance(features, Tensor) or features.ndim == 0 or len(features) != samples:
        raise NotVectorizableError("`self.backbone` doesn't return one row per sample")


def _compute(
    data: FederatedTensorDataset,
    clients: Sequence[int],
    model: Model,
    program: ClientProgram,
    alone: bool,
    with_targets: bool,
) -> tuple[Tensor, Any] | None:
    """Compute features of every sample, ``(clients, longest, ...)`` in each client's order.

    If ``with_targets``, also return the rest of each batch: leaves ``(samples, ...)``.
    """
    positions = torch.cat([data.indices[client] for client in clients])
    if not len(positions):
        return None
    parts: list[Tensor] = []
    targets: list[Tensor] = []
    with torch.no_grad():
        for some in positions.split(samples_of_one_model(data) if alone else BATCH):
            batch = data.gather(some.unsqueeze(0))
            if program.kernels is not nullcontext and not alone:  # they need vmap: of one client
                part = torch.vmap(lambda b: program.prefix_features(model, b))(batch)[0]
            else:  # recurrent layers have no batching rule
                part = program.prefix_features(model, map_batch(batch, lambda leaf: leaf[0]))
            _require_rows(part, len(some))
            parts.append(part)
            targets += [batch[1][0]] if with_targets else []
            if part.numel() * part.element_size() / len(some) * len(positions) > MAX_BYTES:
                return None
    lengths = [len(data.indices[client]) for client in clients]
    features = _by_client(torch.cat(parts), lengths)
    if not with_targets:
        return features, None
    return features, (_by_client(torch.cat(targets), lengths).flatten(0, 1),)


def _by_client(flat: Tensor, lengths: list[int]) -> Tensor:
    if len(set(lengths)) == 1:
        return flat.view(len(lengths), lengths[0], *flat.shape[1:])
    return nn.utils.rnn.pad_sequence(list(flat.split(lengths)), batch_first=True)
