"""NearestNeighbours: each client mixes its model with the votes of its own training samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_pfl.callbacks.further_evaluation import FurtherEvaluation, When
from lightning_pfl.contract.callback import require_federation
from lightning_pfl.core.checks import check_integer, check_number, is_number
from lightning_pfl.core.mixture import Prediction, is_mixed, with_own
from lightning_pfl.core.randomness import derive, permutation
from lightning_pfl.core.tree import Model
from lightning_pfl.data.datasets import FederatedDataset, FederatedTensorDataset
from lightning_pfl.engine.active_phase import writable
from lightning_pfl.engine.minibatches import evaluation_minibatches
from lightning_pfl.engine.program import ClientProgram
from lightning_pfl.engine.steps import Limits
from lightning_pfl.federation.architectures import Architecture
from lightning_pfl.federation.evaluate import personal_models
from lightning_pfl.federation.federation import Federation
from lightning_pfl.solvers.neighbours import best_share, mixed_logits, neighbour_votes
from lightning_pfl.trainer.data import by_client

PREFIX = "knn/"
SAMPLES = 1024
"""Samples whose features are computed at once."""
STORED = 2**28
"""Bytes of features that are held at once."""


@dataclass
class _Seen:
    """Features ``(samples, D)``, labels ``(samples,)``, and outputs if they are asked for."""

    features: Tensor
    labels: Tensor
    outputs: Tensor


class NearestNeighbours(FurtherEvaluation):
    r"""Evaluates each client with a mixture of its model and its training samples' votes.

    The client stores the features of its training samples, which are the inputs of the module's
    ``head``, in eval mode and without augmentation. With the features :math:`z` of a sample
    :math:`x` and its nearest stored ones :math:`N(z)` in :math:`D` dimensions,

    .. math::
        p(y \mid x) = \lambda\, \frac{\sum_{i \in N(z),\, y_i = y} w_i}{\sum_{i \in N(z)} w_i}
        + (1 - \lambda)\, p_k(y \mid x), \qquad w_i = e^{-\lVert z - z_i \rVert^2 / (D s)}

    where :math:`p_k` is the client's personal model: FedAvg's in kNN-Per, or that of any method
    whose clients predict by one model. Nothing trains, and nothing is sent.

    Values have the names of the evaluation with the prefix ``knn/`` (``knn/val_acc``, ...), in the
    loggers, in ``trainer.callback_metrics`` and in the per-client table. Validation data are used
    in a fit and in ``trainer.validate``, test data in ``trainer.test``.

    Args:
        neighbours: Their number, >= 1. A client with fewer samples uses all.
        share: :math:`\lambda` in [0, 1]; 0 is the model. ``"validation"``: each client takes the
            one of 0, 0.1, ..., 1 with the smallest log loss on its validation samples, 0 without
            any; values on the validation split are then too good.
        scale: :math:`s > 0`.
        capacity: Samples that a client stores at most, a random part; None for all.
        when: ``"end"``: once, after the last round; ``"evaluation"``: in every evaluation.

    Raises:
        ValueError: If an argument is out of its range.
        MisconfigurationException: At the start of a run without FederatedStrategy, without
            training data, or without validation data for ``share="validation"``; at an evaluation
            if the module has no submodule ``head``, or targets aren't class numbers.

    Deviation from the paper: :math:`\lambda` may be chosen for each client, and never on test data;
    the authors' code reads it, and the capacity, off test data.

    Example:
        >>> NearestNeighbours(neighbours=7, share="validation").neighbours
        7

    References:
        Marfoq, Neglia, Vidal, Kameni. Personalized federated learning through local memorization.
        ICML 2022. arXiv:2111.09360, Algorithm 1 and equations 5 and 6.
    """

    prefix: ClassVar[str] = PREFIX
    purpose: ClassVar[str] = "find neighbours in"

    def __init__(
        self,
        neighbours: int = 10,
        share: float | Literal["validation"] = 0.5,
        scale: float = 1.0,
        capacity: int | None = None,
        when: When = "end",
    ) -> None:
        super().__init__(when)
        check_integer("neighbours", neighbours, 1, "Use 10, for example.")
        check_number("scale", scale, "Use 1, for example.", positive=True)
        if capacity is not None:
            check_integer("capacity", capacity, 1, "Use None to store all samples.")
        if share != "validation" and not (is_number(share) and 0 <= share <= 1):
            raise ValueError(
                f"Expected `share` to be in [0, 1] or 'validation', but got share={share!r}. Use "
                "0.5, for example."
            )
        self.neighbours, self.share, self.scale = neighbours, share, scale
        self.capacity = capacity

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check data and modules before training."""
        federation = require_federation(trainer, self)
        for architecture in federation.architectures:
            _check_module(architecture.module)
        self._training_data(federation)
        self._validation_data(trainer)

    # --- prediction -------------------------------------------------------------------------------

    def predict(self, outputs: Any, features: Any, own: Model) -> Tensor:
        """Mix one client's model with its neighbours' votes; see ``Method.predict``."""
        features = features.flatten(1)
        if not own["keys"].shape[1]:  # no client that is evaluated at once has samples
            own = {**own, "keys": features.new_zeros(len(own["stored"]), features.shape[1])}
        votes = self._votes(features, own, outputs.shape[1])
        return mixed_logits(outputs, votes, own["share"])

    def _votes(self, features: Tensor, own: Model, classes: int) -> Tensor:
        return neighbour_votes(
            features,
            own["keys"],
            own["labels"],
            own["stored"],
            self.neighbours,
            classes,
            self.scale,
        )

    # --- evaluation -------------------------------------------------------------------------------

    def begin(self, trainer: L.Trainer) -> tuple[Callable[[Tensor], Model], int, Prediction]:
        """Return what stores clients' features, of how many at once, and the votes."""
        federation: Any = require_federation(trainer, self)
        train, validation = self._training_data(federation), self._validation_data(trainer)
        samples = train.num_samples.clamp_max(self.capacity or int(train.num_samples.max()))
        # As many for everyone: sums over other numbers of places round differently, so that values
        # would depend on the clients that a process evaluates at once.
        places = max(int(samples.max()), 1)
        models_of = partial(self._models, federation, train, validation, places)
        largest = places * self._feature_bytes(federation, train)
        return models_of, STORED // largest, self.predict

    def _feature_bytes(self, federation: Federation, train: FederatedDataset) -> int:
        """Return the size of a sample's features, the largest that a process sees."""
        everyone = torch.arange(train.num_clients)
        mine = everyone[federation.shard(everyone).index]
        size = 0
        if len(mine):
            one = mine[train.num_samples[mine].argmax()].unsqueeze(0)
            with federation.ranks.without_communication():
                model = {n: leaf[0] for n, leaf in personal_models(federation, one).items()}
            architecture = federation.architecture_of(one)
            features = self._seen(federation, architecture, model, train, int(one), 1).features
            size = features.shape[1] * features.element_size()
        largest: int = max(federation.ranks.all_gather_objects(size))
        return largest

    def _models(
        self,
        federation: Federation,
        train: FederatedDataset,
        validation: FederatedDataset | None,
        places: int,
        clients: Tensor,
    ) -> Model:
        """Return the personal models with ``places`` for what each client stores."""
        models = personal_models(federation, clients)
        architecture = federation.architecture_of(clients)
        see = partial(self._seen, federation, architecture)
        each = []
        for row, client in enumerate(clients.tolist()):
            model = {name: leaf[row] for name, leaf in models.items()}
            each.append(self._own(see, model, train, validation, client))
        own = {name: _padded([one[name] for one in each], places) for name in each[0]}
        return with_own(models, own)

    def _own(
        self,
        see: Any,
        model: Model,
        train: FederatedDataset,
        validation: FederatedDataset | None,
        client: int,
    ) -> Model:
        """Return what a client stores, without client axis."""
        samples = int(train.num_samples[client])
        seen = see(model, train, client, self.capacity or samples)
        stored = torch.ones(len(seen.labels), dtype=torch.bool, device=seen.labels.device)
        own = {"keys": seen.features, "labels": seen.labels, "stored": stored}
        share: float = 0.0
        if len(stored) and self.share != "validation":
            share = float(self.share)
        elif len(stored) and validation is not None and validation.num_samples[client]:
            count = int(validation.num_samples[client])
            held = see(model, validation, client, count, outputs=True)
            votes = self._votes(held.features, own, held.outputs.shape[1])
            share = best_share(held.outputs, votes, held.labels)
        return own | {"share": torch.tensor(share, dtype=torch.float64, device=stored.device)}

    def _seen(
        self,
        federation: Federation,
        architecture: Architecture,
        model: Model,
        data: FederatedDataset,
        client: int,
        most: int,
        outputs: bool = False,
    ) -> _Seen:
        """Compute features of some of a client's samples, and outputs if they are needed.

        Raises:
            MisconfigurationException: If the client has several models, or the module no head or
                manual optimization.
        """
        module = architecture.module
        if is_mixed(model):
            raise MisconfigurationException(
                f"Expected clients that predict by one model, as NearestNeighbours mixes it with "
                f"neighbours, but {type(architecture.method).__name__} has several. Use another "
                "method, such as FedAvg."
            )
        _check_module(module)
        program = ClientProgram(module, federation.settings)
        program.throwaway = writable(module)
        key = derive(federation.seed, "neighbours", client)
        device = next(module.parameters()).device
        features, labels, found = [], [], []
        with torch.no_grad(), program.capturing():
            for batch in self._batches(federation, data, client, most, key):
                here = apply_to_collection(batch, Tensor, lambda leaf: leaf.to(device))
                labels.append(_classes(here))
                features.append(program.observed(model, here, None, 0, "features", True).flatten(1))
                if outputs:
                    found.append(program.observed(model, here, None, 0, "outputs", True))
        nothing = next(iter(model.values())).new_zeros(0, 0)
        features, labels = features or [nothing], labels or [nothing[:, :0].sum(1).long()]
        return _Seen(torch.cat(features), torch.cat(labels), torch.cat(found or [nothing]))

    def _batches(
        self, federation: Federation, data: FederatedDataset, client: int, most: int, key: int
    ) -> Iterator[Any]:
        if isinstance(data, FederatedTensorDataset):
            mine = data.indices[client]
            chosen = permutation(len(mine), key)[:most].sort().values.to(mine.device)
            yield from map(data.gather, mine[chosen].split(SAMPLES) if len(chosen) else ())
            return
        chosen = permutation(int(data.num_samples[client]), key)[:most].sort().values
        first = 0
        limits = Limits(1, 1.0)
        (batches,) = evaluation_minibatches(data, [client], limits, federation.settings)
        for _, batch in batches:
            size = len(_classes(batch))
            here = chosen[(chosen >= first) & (chosen < first + size)] - first
            first += size
            if len(here):
                yield apply_to_collection(batch, Tensor, lambda leaf, at=here: leaf[at])

    def _validation_data(self, trainer: L.Trainer) -> FederatedDataset | None:
        """Load the validation split by client, if shares are chosen on it.

        Raises:
            MisconfigurationException: If there is none, or it is the test split.
        """
        if self.share != "validation":
            return None
        source: Any = trainer.datamodule  # type: ignore[attr-defined]
        loop: Any = trainer.fit_loop.epoch_loop.val_loop
        if getattr(source, "val_split", None) == "test":
            raise MisconfigurationException(
                "Expected validation data for share='validation' that aren't test data, but got "
                "val_split='test'. Use val_fraction=0.1, or a number as `share`."
            )
        if not loop._data_source.is_defined():
            raise MisconfigurationException(
                "Expected validation data for share='validation', but got none. Pass a data module "
                "with them, or use a number as `share`."
            )
        names = require_federation(trainer, self).client_names
        return by_client(loop.load(), names, "val_dataloaders")


def _padded(leaves: list[Tensor], places: int) -> Tensor:
    """Stack leaves of different sizes, filled up with 0, to ``places`` rows if they have rows."""
    shape = [max(leaf.shape[axis] for leaf in leaves) for axis in range(leaves[0].ndim)]
    shape[:1] = [places] * len(shape[:1])
    padded = leaves[0].new_zeros(len(leaves), *shape)
    for row, leaf in zip(padded, leaves, strict=True):
        row[tuple(slice(0, size) for size in leaf.shape)] = leaf
    return padded


def _check_module(module: L.LightningModule) -> None:
    """Raise MisconfigurationException unless ``training_step`` shows features."""
    if not isinstance(getattr(module, "head", None), nn.Module):
        raise MisconfigurationException(
            "Expected a module with a submodule `head`, whose inputs are the features for "
            f"NearestNeighbours, but got {type(module).__name__}. Name its last layer `head`."
        )
    if not module.automatic_optimization:
        raise MisconfigurationException(
            "Expected a module with automatic optimization for NearestNeighbours, which runs "
            f"`training_step` to see features, but {type(module).__name__} takes its steps there. "
            "Return the loss from `training_step`, or remove the callback."
        )


def _classes(batch: Any) -> Tensor:
    """Return a minibatch's class numbers, int64 ``(samples,)``.

    Raises:
        MisconfigurationException: If it isn't a pair with class numbers.
    """
    labels = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.is_floating_point():
        found = type(batch).__name__ if labels is None else f"targets {tuple(labels.shape)}"
        raise MisconfigurationException(
            "Expected minibatches (inputs, class numbers), whose classes neighbours vote for, but "
            f"got {found}. NearestNeighbours is for classification."
        )
    return labels.long()
