"""The user's module as a pure function of one client's model and minibatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import Parameter, signature
from typing import Any
from weakref import WeakKeyDictionary

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_pfl.contract.records import LogOptions
from lightning_pfl.contract.view import StepView, require_losses
from lightning_pfl.core.mixture import Prediction, Predictor, excuse, mixed_outputs, parts
from lightning_pfl.core.parameters import places
from lightning_pfl.core.tree import Model
from lightning_pfl.engine.active_phase import is_sample_wise
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.client_logs import Reduction
from lightning_pfl.engine.keyed.mode import KeyedRandomness
from lightning_pfl.engine.keyed.names import NamedRandomness, replaced_names
from lightning_pfl.engine.logs import LogCapture
from lightning_pfl.engine.terms import Term
from lightning_pfl.engine.watching import Seen, in_mode, replaced, watching


class NotVectorizableError(RuntimeError):
    """A step that can't run for many clients at once, with the reason."""


@contextmanager
def batchable_kernels(transform: str) -> Iterator[None]:
    """Disable fused kernels without batching rules.

    Under ``vmap``, fused attention and the fused TransformerEncoderLayer of inference would run in
    a loop over clients, if at all; so would oneDNN's LSTM, which only ``"grad"`` can batch. For
    ``"forward"`` oneDNN stays on, as an unbatched convolution needs it.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    # `mkldnn.flags()` would also set a flag of other hardware, and warn of it.
    backend: Any = torch.backends.mkldnn
    onednn = backend.enabled
    torch.backends.mha.set_fastpath_enabled(False)
    backend.enabled = onednn and transform == "forward"
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        backend.enabled = onednn


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


Randomness = KeyedRandomness | NamedRandomness
"""Gives random functions of a step their numbers."""
Slot = tuple[dict[str, Any], str]
"""Where a module keeps a tensor: the dict of its owner, and the key."""


def _slots(module: nn.Module) -> dict[str, tuple[Slot, ...]]:
    """Find where a module keeps each entry of the model; a tied one has several places."""

    def slot(place: str) -> Slot:
        prefix, _, key = place.rpartition(".")
        owner = module.get_submodule(prefix)
        kept: dict[str, Any] = owner._parameters if key in owner._parameters else owner._buffers
        return kept, key

    return {name: tuple(map(slot, found)) for name, found in places(module).items()}


class ClientProgram:
    """Calls the user's steps with a given model, batch and key, and returns logged values.

    Args:
        module: The user's module, attached to the Trainer.
        settings: The Trainer's flags: precision, and hooks on a batch.
        augment: Random function of a batch, run before ``training_step``.
        kernels: Replaces torch's operators in the module's steps, see
            :class:`~lightning_pfl.engine.large_operators.LargeOperators`.
    """

    def __init__(
        self,
        module: L.LightningModule,
        settings: EngineSettings,
        augment: Callable[[Any], Any] | None = None,
        kernels: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        # Any, as not every module has `per_sample` or `backbone`; callers have checked.
        self.module: Any = module
        self.autocast, self.default_dtype = settings.autocast, settings.default_dtype
        self.augment, self.hooks = augment, settings.batch_hooks
        self.kernels = kernels
        self.log = LogCapture()
        self.throwaway: tuple[str, ...] = ()
        self.predict: Prediction | None = None
        self.dataloader_idx: int | None = None
        self.random_calls = self.gradients = 0
        self.sample_wise = is_sample_wise(module)
        self._keyed: type[Randomness] = KeyedRandomness
        self._slots = _slots(module)
        self._buffers = frozenset(name for name, _ in module.named_buffers())

    # --- calling ---

    @contextmanager
    def capturing(self, step: str = "training_step") -> Iterator[None]:
        """Replace the module's ``log`` inside a ``with`` block.

        Not in `predict_step`, where Lightning's own refuses to log.
        """
        if step == "predict_step":
            yield
            return
        self.module.__dict__["log"] = self.log
        self.log.restart()
        try:
            yield
        finally:
            del self.module.__dict__["log"]

    @contextmanager
    def plain(self, plain: bool) -> Iterator[None]:
        """Leave out augmentation inside a ``with`` block, if ``plain``."""
        augment = self.augment
        self.augment = None if plain else augment
        try:
            yield
        finally:
            self.augment = augment

    @contextmanager
    def drawing_by_name(self) -> Iterator[None]:
        """Give keys to random functions by their names alone inside a ``with`` block.

        Others draw from torch's generators, which the caller has to notice.
        """
        self._keyed = NamedRandomness
        try:
            with replaced_names():
                yield
        finally:
            self._keyed = KeyedRandomness

    def call(self, model: Model, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the module with its parameters and buffers replaced by ``model``."""
        model, mix = parts(model)
        mix = Predictor(mix.own, self.predict) if isinstance(mix, Predictor) else mix
        named = model
        if self.throwaway:
            kept: dict[str, Tensor] = dict(self.module.named_buffers())
            copies = {name: model.get(name, kept[name]).clone() for name in self.throwaway}
            named = {**model, **copies}
        precision = self._precision(self._device(model))
        with precision, self.kernels(), mixed_outputs(self.module, mix), self._holding(named):
            result = function(*args)
            if self._buffers:
                self._keep_assigned(model)
        return result

    def _precision(self, device: str) -> AbstractContextManager[Any]:
        if self.autocast is not None:
            return torch.autocast(device, self.autocast)
        return nullcontext() if self.default_dtype is None else _default(self.default_dtype)

    @contextmanager
    def _holding(self, named: Model) -> Iterator[None]:
        """Put tensors into their places in the module, as ``torch.func.functional_call`` does.

        That function looks the places up in every call, which takes as long as a small step.
        """
        slots = [(*slot, leaf) for name, leaf in named.items() for slot in self._slots[name]]
        before = [kept[key] for kept, key, _ in slots]
        for kept, key, leaf in slots:
            kept[key] = leaf
        try:
            yield
        finally:
            for (kept, key, _), old in zip(slots, before, strict=True):
                kept[key] = old

    def _keep_assigned(self, model: Model) -> None:
        """Copy buffers that a step has assigned, ``self.average = ...``, to the model's."""
        for name in self._buffers.difference(self.throwaway):
            kept, key = self._slots[name][0]
            if name in model and (new := kept[key]) is not model[name]:
                model[name].copy_(new.detach())

    def _device(self, model: Model) -> str:
        return next(iter(model.values())).device.type

    def _randomness(self, key: Tensor | None) -> Any:
        return nullcontext() if key is None else self._keyed(key)

    def prepared(self, batch: Any, augmented: bool = True) -> Any:
        """Return one client's minibatch as the module gets it."""
        if self.augment is not None and augmented:
            batch = self.augment(batch)
        return batch if self.hooks is None else self.hooks(self.module, batch)

    # --- the steps ---

    def training_loss(
        self,
        model: Model,
        batch: Any,
        key: Tensor | None,
        number: int,
        mask: Tensor | None,
        features: Tensor | None,
        backward: Callable[[Tensor], None] | None = None,
        term: Term | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute loss and logged values of one client's minibatch; the loss is None if skipped.

        Args:
            model: One client's parameters and buffers, without client axis.
            batch: Leaves ``(batch, ...)``.
            key: int64 scalar for random calls; None if the step makes none.
            number: ``batch_idx``.
            mask: 1 for real samples, ``(batch,)``; None if all are.
            features: Output of the module's backbone for this batch, which then isn't run.
            backward: Called with the loss while the module has the client's model, which
                ``torch.utils.checkpoint`` needs again.
            term: What is differentiated instead of the loss; None for the loss.
        """

        def run() -> Tensor | None:
            if term is None:
                loss = read_loss(step())
            else:
                loss = self._objective(term, batch, step, mask, checked=backward is not None)
            if loss is None:
                excuse(self.module)
            elif backward is not None:
                self._backward(loss, backward, mode)
            return loss

        self.gradients += 1
        self.log.begin(batch)
        with self._randomness(key) as mode, self._prefix(features):
            batch = self.prepared(batch)
            if mask is not None and term is None:
                return self._masked_loss(model, batch, mask)
            step = call_step(self.module.training_step, batch, number)
            loss = self.call(model, run)
        self.random_calls = mode.calls if mode is not None else 0
        return loss, self.log.take()

    def _backward(
        self, loss: Tensor, backward: Callable[[Tensor], None], mode: Randomness | None
    ) -> None:
        closed = mode.closing() if mode is not None else nullcontext()
        full = torch.autocast(loss.device.type, enabled=False) if self.autocast else nullcontext()
        with full, closed:
            backward(loss)

    def measured_loss(
        self, model: Model, batch: Any, key: Tensor | None, number: int, mask: Tensor | None
    ) -> Tensor | None:
        """Compute the training loss of one client's minibatch, without augmentation.

        None where ``training_step`` skips the minibatch.
        """
        with self.plain(True):
            loss, _ = self.training_loss(model, batch, key, number, mask, None)
        return loss

    def _masked_loss(self, model: Model, batch: Any, mask: Tensor) -> tuple[Tensor, dict[str, Any]]:
        values = self.call(model, self.module.per_sample, batch)
        means = _means(values, mask)
        return means["loss"], self._logged(means)

    def _logged(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means of samples' values, named as `training_step` logs them."""
        logged = {f"train_{name}": mean.detach() for name, mean in means.items()}
        for name in logged:
            self.log.options.setdefault(name, LogOptions(name in self.module.shown))
            self.log.reductions[name] = Reduction()
        return logged

    def _objective(
        self,
        term: Term,
        batch: Any,
        step: Callable[[], Any],
        mask: Tensor | None,
        checked: bool,
    ) -> Tensor | None:
        """Compute a method's objective on one client's minibatch; None if it is skipped.

        ``checked``: as in :meth:`sample_losses`.
        """
        losses: Tensor | None = None
        with watching(self.module) as seen:
            if self.sample_wise:
                values = self.module.per_sample(batch)
                means, losses = _means(values, mask), values["loss"]
                self.log.values.update(self._logged(means))
                loss: Tensor | None = means["loss"]
            else:
                loss = read_loss(step())
                losses = _losses_of(seen)
        if loss is None:
            return None
        mean = loss if checked and not self.sample_wise else None
        if term.weights is not None:
            weighted = {"loss": term.weights.to(loss) * require_losses(losses, mean)}
            loss = _means(weighted, mask)["loss"]
        if term.objective is None:
            return loss
        view = StepView(
            loss,
            batch,
            mask,
            term.sample_data,
            losses,
            tuple(seen.outputs),
            tuple(seen.features),
            mean,
        )
        return term.objective(view, term.given)

    def observed(
        self, model: Model, batch: Any, key: Tensor | None, number: int, what: str, plain: bool
    ) -> Any:
        """Outputs or features of one client's minibatch, in eval mode and without gradient.

        Args:
            model: One client's parameters and buffers.
            batch: Leaves ``(batch, ...)``.
            key: As in :meth:`training_loss`, for the same augmentation.
            number: ``batch_idx``.
            what: ``"outputs"``, or ``"features"``.
            plain: Whether the batch isn't augmented.
        """

        def run() -> Any:
            with watching(self.module) as seen:
                call_step(self.module.training_step, batch, number)()
            view = StepView(
                torch.empty(0),
                batch,
                _outputs=tuple(seen.outputs),
                _features=tuple(seen.features),
            )
            return getattr(view, what)

        self.log.begin(batch)
        with self._randomness(key), torch.no_grad():
            batch = self.prepared(batch, augmented=not plain)
            with in_mode(self.module, training=False):
                found = self.call(model, run)
        self.log.take()
        return found

    def sample_losses(
        self,
        model: Model,
        batch: Any,
        key: Tensor | None,
        mask: Tensor | None,
        training: bool = False,
        checked: bool = False,
    ) -> Tensor:
        """Losses of one client's samples, ``(batch,)``, 0 for those that fill up.

        Args:
            model: One client's parameters and buffers.
            batch: Leaves ``(batch, ...)``.
            key: As in :meth:`training_loss`.
            mask: As in :meth:`training_loss`.
            training: Whether as in :meth:`training_loss`; else in eval mode, without augmentation.
            checked: Whether to compare the loss with their mean, which reads its value.
        """

        def run() -> Tensor:
            if self.sample_wise:
                found: Tensor = self.module.per_sample(batch)["loss"]
                return found
            with watching(self.module) as seen:
                loss = read_loss(call_step(self.module.training_step, batch, 0)())
            return require_losses(_losses_of(seen), loss if checked else None)

        self.log.begin(batch)
        with self._randomness(key), nullcontext() if training else in_mode(self.module, False):
            batch = self.prepared(batch, augmented=training)
            losses: Tensor = self.call(model, run)
        self.log.take()
        return losses if mask is None else losses.where(mask > 0, 0)

    def evaluation_step(
        self, model: Model, step: str, batch: Any, number: int
    ) -> tuple[Any, dict[str, Any]]:
        """Run a validation, test or prediction step on one client's batch, and return its logs."""
        self.log.begin(batch)
        batch = self.prepared(batch)
        function = getattr(self.module, step)
        out = self.call(model, call_step(function, batch, number, self.dataloader_idx))
        return out, self.log.take()

    def per_sample(self, model: Model, batch: Any) -> dict[str, Tensor]:
        """Compute the per-sample values of one client's batch, each ``(batch,)``."""
        values: dict[str, Tensor] = self.call(model, self.module.per_sample, batch)
        return values

    # --- the frozen prefix ---

    @contextmanager
    def _prefix(self, features: Tensor | None) -> Iterator[None]:
        """Make the backbone return cached features instead of running."""
        if features is None:
            yield
            return
        with replaced(self.module.backbone, "forward", lambda *_, **__: features):
            yield

    def prefix_features(self, model: Model, batch: Any) -> Tensor:
        """Compute the backbone's output in a training step, ``(batch, ...)``, and stop there."""
        backbone: Any = self.module.backbone
        original = backbone.forward

        def stop(*args: Any, **kwargs: Any) -> Any:
            raise _PrefixReachedError(original(*args, **kwargs))

        with replaced(backbone, "forward", stop):
            try:
                self.call(model, call_step(self.module.training_step, batch, 0))
            except _PrefixReachedError as reached:
                features: Tensor = reached.features
                return features
        raise NotVectorizableError("`training_step` doesn't call `self.backbone`")

    def survey_prefix(self, model: Model, batch: Any) -> tuple[int, int]:
        """Run a complete training step and count the backbone's calls.

        Returns:
            The number of calls of the backbone, and the number of random calls until the last of
            them returns.
        """
        backbone: Any = self.module.backbone
        original, seen = backbone.forward, [0, 0]

        def count(*args: Any, **kwargs: Any) -> Any:
            features = original(*args, **kwargs)
            seen[:] = seen[0] + 1, mode.calls
            return features

        key = torch.zeros((), dtype=torch.int64, device=self._device(model))
        self.log.begin(batch)
        with KeyedRandomness(key) as mode, replaced(backbone, "forward", count):
            self.call(model, call_step(self.module.training_step, batch, 0))
        return seen[0], seen[1]


def _losses_of(seen: Seen) -> Tensor | None:
    """Return the losses that a step's only call of ``per_sample`` gave; else None."""
    return seen.losses[0] if len(seen.losses) == 1 else None


def sample_gradient(loss: Tensor, trained: Model) -> Model:
    """Differentiate one sample's loss, or a sum over clients; zero for unused parameters.

    The graph stays, for the other samples.
    """
    found = torch.autograd.grad(
        loss, list(trained.values()), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return dict(zip(trained, found, strict=True))


def _means(values: dict[str, Tensor], mask: Tensor | None) -> dict[str, Tensor]:
    """Means over the real samples."""
    if mask is None:
        return {name: value.mean() for name, value in values.items()}
    return {name: (value * mask.to(value)).sum() / mask.sum() for name, value in values.items()}


def read_loss(out: Any) -> Tensor | None:
    """Read the loss in the result of ``training_step``; None if it skips the minibatch.

    Raises:
        TypeError: If it is something else.
    """
    loss: Any = out.get("loss", out) if isinstance(out, Mapping) else out
    if loss is None:
        return None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a {type(loss).__name__}"
        if isinstance(loss, Tensor):
            got = f"a tensor of shape {tuple(loss.shape)}"
        elif loss is out and isinstance(out, Mapping):
            got = f"a {type(out).__name__} with {[*out]}"
        raise TypeError(
            "Expected `training_step` to return the loss, a tensor of one number, alone or in a "
            f"dict under 'loss', or None to skip the minibatch, but got {got}. Return the mean of "
            "the samples' losses, without `item()` or `float()`."
        )
    return loss.view(()) if loss.ndim else loss


class _PrefixReachedError(Exception):
    """Carries the backbone's output out of a training step."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features = features


def call_step(
    step: Callable[..., Any], batch: Any, number: int, dataloader_idx: int | None = None
) -> Callable[[], Any]:
    """Bind a step's arguments: ``batch``, and ``batch_idx`` if the signature has it.

    Likewise ``dataloader_idx``, unless it is None.
    """
    if dataloader_idx is not None and "dataloader_idx" in signature(step).parameters:
        step = partial(step, dataloader_idx=dataloader_idx)
    index = _index_kind(step)
    if index is None:
        return lambda: step(batch)
    if index == Parameter.KEYWORD_ONLY:
        return lambda: step(batch, batch_idx=number)
    return lambda: step(batch, number)


# Cached, as reading a signature takes longer than a small step.
_INDEX_KINDS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _index_kind(step: Callable[..., Any]) -> Any:
    """Return the kind of a step's parameter for the batch's number; None without one."""
    function = getattr(step, "__func__", None)
    if function is None:
        return _read_index_kind(step)
    if function not in _INDEX_KINDS:
        _INDEX_KINDS[function] = _read_index_kind(step)
    return _INDEX_KINDS[function]


def _read_index_kind(step: Callable[..., Any]) -> Any:
    # The signature of the function inside a decorated step.
    found = signature(step).parameters.values()
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    if sum(p.kind in positional for p in found) >= 2:
        return Parameter.POSITIONAL_OR_KEYWORD
    kinds = {p.kind for p in found}
    if Parameter.VAR_POSITIONAL in kinds:
        return Parameter.VAR_POSITIONAL
    named = any(p.name == "batch_idx" and p.kind == Parameter.KEYWORD_ONLY for p in found)
    return Parameter.KEYWORD_ONLY if named else None
