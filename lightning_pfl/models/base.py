"""PersonalizedModule: a backbone and a head with loss, metrics and optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_used
from lightning_pfl.core.parameters import NORMS
from lightning_pfl.models.losses import LOSSES, Loss, class_matches, one_per_sample, sign_matches

OptimizerFactory = Callable[[Iterable[Any]], Optimizer]
OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}
#: Names of the optimizers with an argument ``momentum``.
MOMENTUM_OPTIMIZERS = ("sgd", "rmsprop")


class PersonalizedModule(L.LightningModule):
    r"""A LightningModule ``head(backbone(x))`` with loss, metrics and optimizer.

    Methods that split a network refer to the halves as ``backbone`` and ``head``; each half can
    have its own learning rate and weight decay.

    **The per-sample protocol.** Any LightningModule may define it; the engines use it to pad
    batches:

    ``per_sample(batch) -> dict[str, Tensor]``
        Named values of each sample, each of shape ``(batch,)``: always ``"loss"``, here also
        ``"acc"`` (0.0 or 1.0) for classification. A sample's values don't depend on the other
        samples of the batch, except through BatchNorm in training mode. ``training_step`` is the
        mean of ``per_sample(batch)["loss"]``, so the masked mean over a padded batch has the
        gradient of the short batch. The function must only read the batch, the parameters and
        torch's random functions: the engines may record its operators and replay them.

    For batches of another structure, override ``per_sample`` alone. Logged, as means over the
    epoch's samples: ``train_loss``, ``val_loss``, ``test_loss`` and, for classification,
    ``train_acc``, ``val_acc``, ``test_acc``. Where the loss of an evaluation is NaN, so is the
    accuracy.

    Args:
        backbone: The representation: inputs to features. Shared by most methods.
        head: Features to outputs (logits for ``"cross_entropy"`` and ``"bce"``).
        loss: ``"cross_entropy"`` (class indices or probabilities), ``"mse"`` (squared error, no
            factor one half), ``"bce"`` (targets 0 or 1), or a function of (output, target) that
            returns one value per sample, ``(batch,)`` or ``(batch, ...)``, for instance
            ``torch.nn.L1Loss(reduction="none")``. Values beyond the first axis are averaged.
        optimizer: ``"sgd"``, ``"adam"``, ``"adamw"``, ``"rmsprop"``, or a function of parameter
            groups that returns an optimizer. For a function ``lr``, ``momentum`` and
            ``weight_decay`` don't apply, but those given per half do.
        lr: Step size of both halves, at least 0.
        momentum: In [0, 1); for ``"sgd"`` and ``"rmsprop"``.
        weight_decay: Factor of the L2 term (decoupled in ``"adamw"``), at least 0.
        backbone_lr: Step size of the backbone. None: ``lr``.
        head_lr: Step size of the head. None: ``lr``.
        backbone_weight_decay: Weight decay of the backbone. None: ``weight_decay``.
        head_weight_decay: Weight decay of the head. None: ``weight_decay``.
        decay_bias: Whether biases and the parameters of normalisation layers decay as well.
        num_classes: Number of logits, checked against the head. With a function as ``loss`` it
            makes the outputs class logits, for which ``"acc"`` is reported.

    Raises:
        TypeError: If a half is no ``nn.Module``.
        ValueError: If a setting is out of its range.

    Deviation from the paper: none. The defaults are FedRep's local training.

    Example:
        >>> module = PersonalizedModule(nn.Linear(8, 4), nn.Linear(4, 3))
        >>> batch = torch.zeros(5, 8), torch.tensor([0, 1, 2, 0, 1])
        >>> {name: tuple(values.shape) for name, values in module.per_sample(batch).items()}
        {'loss': (5,), 'acc': (5,)}
        >>> [group["name"] for group in module.configure_optimizers().param_groups]
        ['backbone', 'backbone/no_decay', 'head', 'head/no_decay']

    References:
        Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized
        federated learning. ICML 2021. arXiv:2102.07078, section 5.
    """

    shown: ClassVar[frozenset[str]] = frozenset({"train_loss", "val_acc"})
    """Values that the progress bar shows."""

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Module,
        loss: Literal["cross_entropy", "mse", "bce"] | Loss = "cross_entropy",
        optimizer: Literal["sgd", "adam", "adamw", "rmsprop"] | OptimizerFactory = "sgd",
        lr: float = 0.01,
        momentum: float = 0.5,
        weight_decay: float = 1e-4,
        backbone_lr: float | None = None,
        head_lr: float | None = None,
        backbone_weight_decay: float | None = None,
        head_weight_decay: float | None = None,
        decay_bias: bool = False,
        num_classes: int | None = None,
    ) -> None:
        settings = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__()
        check_types(PersonalizedModule.__init__, settings)
        check_module_settings(settings)
        self.backbone = backbone
        self.head = head
        self.loss = LOSSES[loss] if isinstance(loss, str) else loss
        self.loss_name = loss if isinstance(loss, str) else None
        self.optimizer = optimizer
        self.num_classes = num_classes
        # Only plain values, as checkpoints load with `weights_only=True`.
        plain = (str, float, int, bool, type(None))
        self.save_hyperparameters({k: v for k, v in settings.items() if isinstance(v, plain)})

    def forward(self, inputs: Any) -> Tensor:
        """Map inputs ``(batch, ...)`` to outputs, ``head(backbone(inputs))``."""
        output: Tensor = self.head(self.backbone(inputs))
        return output

    def per_sample(self, batch: Any) -> dict[str, Tensor]:
        """Return the named values of each sample, each ``(batch,)``; see the class docstring.

        Args:
            batch: A pair (inputs, targets).

        Raises:
            TypeError: If the batch is no such pair.
            ValueError: If output and target don't fit, or the loss returns no value per sample.
        """
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(
                "Expected `batch` to be a pair (inputs, targets), but got "
                f"batch={_describe(batch)}. Override `per_sample` for other structures."
            )
        inputs, target = batch
        output = self(inputs)
        self._check_width(output)
        values = {"loss": one_per_sample(self.loss(output, target), len(output))}
        if self.loss_name == "bce":
            values["acc"] = one_per_sample(sign_matches(output, target), len(output))
        elif self.loss_name == "cross_entropy" or (not self.loss_name and self.num_classes):
            values["acc"] = one_per_sample(class_matches(output, target), len(output))
        return values

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """Return the mean loss of the batch; logs ``train_loss`` and ``train_acc``."""
        return self._step("train", batch)

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        """Log ``val_loss`` and ``val_acc``."""
        self._step("val", batch)

    def test_step(self, batch: Any, batch_idx: int = 0) -> None:
        """Log ``test_loss`` and ``test_acc``."""
        self._step("test", batch)

    def predict_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """Return the outputs of a batch of inputs, or of a tuple whose first entry is inputs."""
        inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
        output: Tensor = self(inputs)
        return output

    def configure_optimizers(self) -> Optimizer:
        """Return one optimizer with up to four parameter groups.

        They are named ``backbone``, ``backbone/no_decay``, ``head`` and ``head/no_decay``; empty
        ones are left out.

        Raises:
            ValueError: If backbone and head have a parameter in common.
        """
        groups = list(self._groups())
        if not isinstance(self.optimizer, str):
            return self.optimizer(groups)
        settings = {"lr": self.hparams["lr"], "weight_decay": self.hparams["weight_decay"]}
        if self.optimizer in MOMENTUM_OPTIMIZERS:
            settings["momentum"] = self.hparams["momentum"]
        return OPTIMIZERS[self.optimizer](groups, **settings)

    def _groups(self) -> Iterator[dict[str, Any]]:
        _check_tie(self.backbone, self.head)
        for half in ("backbone", "head"):
            group: dict[str, Any] = {}
            if self.hparams[f"{half}_lr"] is not None:
                group["lr"] = self.hparams[f"{half}_lr"]
            if self.hparams[f"{half}_weight_decay"] is not None:
                group["weight_decay"] = self.hparams[f"{half}_weight_decay"]
            weights, others = split_decay(getattr(self, half))
            if self.hparams["decay_bias"]:
                weights, others = [*weights, *others], []
            if weights:
                yield {"params": weights, "name": half, **group}
            if others:
                yield {"params": others, "name": f"{half}/no_decay", **group, "weight_decay": 0.0}

    def _step(self, stage: str, batch: Any) -> Tensor:
        values = self.per_sample(batch)
        means = {name: value.mean() for name, value in values.items()}
        if stage != "train":
            means = nan_with_the_loss(means, means["loss"].detach())
        for name, mean in means.items():
            key = f"{stage}_{name}"
            self.log(
                key,
                mean.detach(),
                prog_bar=key in self.shown,
                on_step=False,
                on_epoch=True,
                batch_size=len(values["loss"]),
            )
        return means["loss"]

    def _check_width(self, output: Tensor) -> None:
        if self.num_classes is None or self.loss_name in ("mse", "bce"):
            return
        if output.ndim < 2 or output.shape[1] != self.num_classes:
            raise ValueError(
                f"Expected `num_classes` to be the number of outputs of the head, but got "
                f"num_classes={self.num_classes} and outputs of shape {tuple(output.shape)}. "
                "Give the head `num_classes` outputs."
            )


def nan_with_the_loss(means: dict[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
    """Let means over samples be NaN where that of the loss is.

    The largest of NaN logits is a class, which may be the right one.
    """
    return {name: mean.where(~loss.isnan(), loss) for name, mean in means.items()}


def split_decay(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the parameters into (weights, others); others are biases and those of norm layers.

    A parameter used in several places appears once.
    """
    weights: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            # "bias" also as part of a name: LSTMs have `bias_ih_l0`, attention `in_proj_bias`.
            is_weight = "bias" not in name and not isinstance(owner, NORMS)
            (weights if is_weight else others).append(parameter)
    return weights, others


def _check_tie(backbone: nn.Module, head: nn.Module) -> None:
    names = {parameter: name for name, parameter in backbone.named_parameters()}
    for name, parameter in head.named_parameters():
        if parameter in names:
            raise ValueError(
                "Expected `backbone` and `head` to have no parameter in common, but "
                f"head.{name} is backbone.{names[parameter]}. Copy the parameter, or write a "
                "LightningModule with one optimizer."
            )


def check_module_settings(settings: dict[str, Any]) -> None:
    """Check the arguments of a PersonalizedModule.

    Raises:
        TypeError: If a half is no ``nn.Module``, or ``loss`` or ``optimizer`` can't be called.
        ValueError: If a value is out of its range or a name is unknown.
    """
    for half in ("backbone", "head"):
        if not isinstance(settings[half], nn.Module):
            raise TypeError(
                f"Expected `{half}` to be an nn.Module, but got {half}={settings[half]!r}. "
                "Pass an instance; in a recipe give it as class_path and init_args."
            )
    for name, known in (("loss", LOSSES), ("optimizer", OPTIMIZERS)):
        _check_choice(name, settings[name], known)
    for name, value in settings.items():
        if name.endswith(("lr", "weight_decay")) and value is not None:
            _check_range(name, value, upper=math.inf)
    _check_range("momentum", settings["momentum"], upper=1.0)
    _check_used(settings)
    if settings["num_classes"] is not None and settings["num_classes"] < 1:
        raise ValueError(
            "Expected `num_classes` to be a positive int, but got "
            f"num_classes={settings['num_classes']!r}. Use the number of outputs of the head."
        )


def _check_used(settings: dict[str, Any]) -> None:
    """Raise ValueError for a setting other than 0 that no optimizer gets."""
    init, optimizer = PersonalizedModule.__init__, settings["optimizer"]
    for name in ("lr", "momentum", "weight_decay"):
        given = {name: settings[name]} if settings[name] else {}
        check_used(init, given, isinstance(optimizer, str), "an optimizer given by its name")
        halves = [settings.get(f"{half}_{name}") for half in ("backbone", "head")]
        check_used(init, given, None in halves, "a half that has none of its own")
    momentum = {"momentum": settings["momentum"]} if settings["momentum"] else {}
    has_one = optimizer in MOMENTUM_OPTIMIZERS
    check_used(init, momentum, has_one, "optimizer='sgd' or 'rmsprop'")


def _check_choice(name: str, value: object, known: dict[str, Any]) -> None:
    if isinstance(value, str) and value not in known:
        raise ValueError(
            f"Expected `{name}` to be one of {sorted(known)} or a callable, but got "
            f"{name}={value!r}. Use one of these names or pass the function itself."
        )
    if not isinstance(value, str) and not callable(value):
        raise TypeError(
            f"Expected `{name}` to be one of {sorted(known)} or a callable, but got "
            f"{name}={value!r}. Use one of these names or pass the function itself."
        )


def _check_range(name: str, value: float, upper: float) -> None:
    # True for nan too.
    if not 0 <= value < upper:
        raise ValueError(
            f"Expected `{name}` to be in [0, {upper}), but got {name}={value!r}. "
            "Use 0 to switch it off."
        )


def _describe(batch: object) -> str:
    if isinstance(batch, (tuple, list)):
        return f"{type(batch).__name__} of length {len(batch)}"
    return type(batch).__name__
