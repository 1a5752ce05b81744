"""Federation: the public interface of a federation, such as the clients' models."""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pfl._lightning import copy_apart
from lightning_pfl.contract.records import ClientInfo, Evaluation, OnClients
from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.mixture import Mix, MixedForward, Predictor, parts
from lightning_pfl.core.tree import Model, Tree, expand
from lightning_pfl.data.datasets import FederatedDataset
from lightning_pfl.federation.architectures import (
    Architecture,
    one_architecture,
)
from lightning_pfl.federation.cohort import Cohort
from lightning_pfl.federation.evaluate import (
    GLOBAL,
    evaluate_clients,
    evaluate_shard,
    is_global,
    personal_models,
)
from lightning_pfl.federation.ranks import gather_evaluation
from lightning_pfl.federation.saved_state import SavableState
from lightning_pfl.federation.unchanged import UnchangedClients
from lightning_pfl.methods.base import Phase


class Federation(SavableState):
    """A federation with its public interface; ``trainer.strategy.federation``."""

    def __init__(self) -> None:
        super().__init__()
        self.unchanged = UnchangedClients()

    # --- what the loops ask for -------------------------------------------------------------------

    def cohort(self, info: ClientInfo, received: Tree, phases: tuple[Phase, ...]) -> Cohort:
        """Begin the clients' side of a round.

        Args:
            info: The clients that take part.
            received: What the server sends them, ``(clients, ...)``.
            phases: What trains, and for how long.
        """
        return Cohort(self, info, received, phases)

    def global_model(self) -> Model | None:
        """Return the global model, without client axis; None if the method has none."""
        return self.method.global_model(self.server)

    def evaluate(
        self,
        clients: Tensor,
        rows: Tensor,
        data: FederatedDataset,
        step: str,
        limit: float | int,
        on_clients: OnClients | None = None,
        dataloader_idx: int | None = None,
    ) -> dict[str, Evaluation]:
        """Evaluate the personal models, and the global one if there is one.

        Several processes call it together, with the same clients.

        Args:
            clients: Ids, int64 ``(clients,)``.
            rows: Their rows in ``data``, int64 ``(clients,)``.
            data: The split.
            step: ``"validation_step"`` or ``"test_step"``.
            limit: Minibatches per client: a count (int) or a fraction (float).
            on_clients: Called with the positions of the clients whose personal model is done.
            dataloader_idx: The number of the data set, where there are several.

        Returns:
            The results by prefix: ``""`` for the personal models, ``"global/"``.
        """
        shared = self.global_model()
        same = shared is not None

        def personal(ids: Tensor) -> Model:
            nonlocal same
            models = personal_models(self, ids)
            same = same and shared is not None and is_global(models, shared)
            return models

        work = (clients, rows, data, step, limit)
        shard, own = evaluate_shard(
            self, personal, *work, on_clients, None, dataloader_idx, self.unchanged
        )
        # All processes must agree, also one that has no clients to look at.
        found, same_everywhere = gather_evaluation(shard, own, same)
        results = {"": found}
        if all(same_everywhere):
            results[GLOBAL] = results[""]
        elif shared is not None:
            everybody = shared  # a name that mypy knows to be a model

            def same_for_all(ids: Tensor) -> Model:
                return expand(everybody, len(ids))

            results[GLOBAL] = evaluate_clients(
                self, same_for_all, *work, None, None, dataloader_idx, own=False
            )
        return results

    def evaluate_global(
        self, data: FederatedDataset, step: str, limit: float | int, dataloader_idx: int
    ) -> Evaluation:
        """Evaluate the global model on data of one owner, who is no client.

        Several processes call it together.

        Args:
            data: The data.
            step: ``"validation_step"`` or ``"test_step"``.
            limit: Minibatches: a count (int) or a fraction (float).
            dataloader_idx: The number of the data set.
        """
        model = self.global_model()
        assert model is not None  # the loops have asked before
        one = torch.zeros(1, dtype=torch.int64)
        work = (one, one, data, step, limit)
        return evaluate_clients(
            self, lambda ids: expand(model, len(ids)), *work, dataloader_idx=dataloader_idx
        )

    # --- what users ask for -----------------------------------------------------------------------

    def client_metrics(self, split: str | None = None) -> dict[str, dict[str, float]]:
        """Return what the last evaluation found for every client.

        Args:
            split: ``"val"`` or ``"test"``; None: the split that was evaluated last.

        Returns:
            Value and client's name to number: ``client_metrics()["val_acc"]["hospital_3"]``, also
            ``"num_samples"``. ``pandas.DataFrame(client_metrics())`` has a row for each client.

        Raises:
            ValueError: If the split wasn't evaluated.
        """
        check_types(Federation.client_metrics, {"split": split})
        found = self.client_results.get(split or next(reversed(self.client_results), ""))
        if found is None:
            raise ValueError(
                f"Expected an evaluated split, but got split={split!r} and evaluations of "
                f"{list(self.client_results) or 'none'}. Run `trainer.fit` with validation data, "
                "`trainer.validate` or `trainer.test` before."
            )
        counts = next(iter(found.evaluations.values())).counts.tolist()
        columns = {"num_samples": counts, **found.columns()}
        return {name: dict(zip(found.names, c, strict=True)) for name, c in columns.items()}

    def client_state_dict(self, client: int | str) -> dict[str, Any]:
        """Return a client's personal model as a ``state_dict`` of the user's module.

        Args:
            client: Its id, also of NumPy or torch, or its name; where clients are named by
                integers, an int is a name.

        Raises:
            RuntimeError: If nothing was trained or loaded yet, or the client's state is in another
                process.
            KeyError: If the client is unknown.
            MisconfigurationException: If a client's prediction isn't one model's.
        """
        model, mix = parts(self._personal_model(client))
        if mix is not None:
            raise MisconfigurationException(
                "Expected a personal model that is one state_dict, but "
                f"{type(self.method).__name__} {mix.what}. Use `client_module(client)`."
            )
        return self._state_dict(self._architecture_of(client), model)

    def _architecture_of(self, client: int | str) -> Architecture:
        return self.architecture_of(torch.tensor([self.client_id(client)]))

    def _personal_model(self, client: int | str) -> Model:
        # Users may call this in one process only.
        with self.ranks.without_communication():
            models = personal_models(self, torch.tensor([self.client_id(client)]))
        return {name: leaf[0] for name, leaf in models.items()}

    def client_module(self, client: int | str) -> L.LightningModule:
        """Return a client's personal model as a copy of the module, in eval mode."""
        return self._as_module(self._architecture_of(client), self._personal_model(client))

    def _as_module(self, architecture: Architecture, given: Model) -> L.LightningModule:
        model, mix = parts(given)
        copy: L.LightningModule = copy_apart(architecture.module)
        copy.load_state_dict(self._state_dict(architecture, model))
        if mix is not None:
            copy.__dict__["forward"] = MixedForward(copy, self._kept(architecture, mix))
        return copy.eval()

    def _kept(self, architecture: Architecture, mix: Mix | Predictor) -> Mix | Predictor:
        def copied(model: Model) -> Model:
            return {name: leaf.detach().clone() for name, leaf in model.items()}

        if isinstance(mix, Predictor):
            return Predictor(copied(mix.own), architecture.method.predict)
        others = tuple(map(copied, mix.others))
        return Mix(others, mix.weights.detach().clone(), mix.space)

    def global_state_dict(self) -> dict[str, Any]:
        """Return the global model, as a ``state_dict`` of the user's module.

        Raises:
            MisconfigurationException: If the method has no global model.
        """
        module = self.require_module()
        model = self.method.global_model(self.server)
        if model is None:
            differ = len(self.method.personalized_entries(self.parameter_split))
            why = (
                f"{differ} of the {len(self.parameter_split.names)} entries of "
                f"{type(module).__name__} differ between clients. Use `client_state_dict(client)`"
                if differ
                else "a client predicts by several models. Use `client_module(client)`"
            )
            raise MisconfigurationException(
                f"Expected a method with a global model, but got {type(self.method).__name__}, "
                f"with which {why}, or a method such as FedAvg."
            )
        return self._state_dict(one_architecture(self.architectures), model)

    def client_id(self, client: int | str) -> int:
        """Return the id of a client given by id or name.

        If clients have integers as names, an int is a name: client 1 is ``"1"`` at any position.

        Raises:
            KeyError: If the client is unknown.
        """
        self.require_module()
        names = self.client_names
        known = _plain(client)
        if known is not None:
            by_name = isinstance(known, str) or _integers_are_names(names)
            if by_name and str(known) in names:
                return names.index(str(known))
            if not by_name and 0 <= int(known) < len(names):
                return int(known)
        some = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
        ids = "" if _integers_are_names(names) else f"an id in 0..{len(names) - 1} or "
        raise KeyError(
            f"Expected `client` to be {ids}one of the names {some}, but got client={client!r}. Use "
            "one of these."
        )

    def _state_dict(self, architecture: Architecture, model: Model) -> dict[str, Any]:
        state = architecture.module.state_dict()
        copied = {name: leaf.to(state[name].device) for name, leaf in model.items()}
        full = {**state, **architecture.parameter_split.with_aliases(copied)}
        return {
            name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in full.items()
        }


def _plain(client: object) -> int | str | None:
    """Return a name, or an integer of Python, NumPy or torch as an int; None for all else."""
    if isinstance(client, str):
        return client
    kind = getattr(client, "dtype", type(client))
    if kind in (bool, torch.bool):
        return None
    try:
        return operator.index(client)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        return None


@lru_cache
def _integers_are_names(names: tuple[str, ...]) -> bool:
    """Whether a client has an integer as its name that isn't its id."""
    return any(
        name.removeprefix("-").isdecimal() and name != str(client)
        for client, name in enumerate(names)
    )
