"""HeadFineTuning: adaptation of the trained model to each client's data ("+FT")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, get_args

import lightning as L
import torch
from torch import Tensor

from lightning_pfl.callbacks.further_evaluation import FurtherEvaluation, When
from lightning_pfl.contract.callback import require_federation
from lightning_pfl.core.checks import check_choice, check_number, check_used
from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.core.tree import Model, expand, select, total_nbytes
from lightning_pfl.federation import penalties
from lightning_pfl.federation.adapt import adapt, budget_phase, check_lr
from lightning_pfl.federation.client_states import ClientStateStore
from lightning_pfl.federation.evaluate import personal_models
from lightning_pfl.federation.federation import Federation
from lightning_pfl.federation.penalties import Penalty

PREFIX = "ft/"
TRAINED_TOGETHER = 2**27
"""Largest size in bytes of trained parameters in a batched program, without optimizer state."""
KEPT = 2**30
"""Largest size in bytes of fine-tuned parameters to keep after an evaluation."""


class HeadFineTuning(FurtherEvaluation):
    r"""Fine-tunes the head (or other parts) for every client, and evaluates the result.

    .. math::
        h_k \leftarrow \text{SGD on } F_k(\cdot, \phi) \text{ from the global head } h,
        \quad \phi \text{ frozen}

    Each client starts from the global model, or from its personal model if the method has no global
    one, and trains on its training data with the optimizer of ``configure_optimizers``. Other
    parameters stay unchanged bit for bit, with their normalisation layers in eval mode. Clients
    that were never sampled are fine-tuned too. Server and client states stay as they are.

    Values have the names of the evaluation with the prefix ``ft/`` (``ft/val_acc``,
    ``ft/val_acc/worst_decile``, ...), in the loggers, in ``trainer.callback_metrics`` and in the
    per-client table. Validation data are used in a fit and in ``trainer.validate``, test data in
    ``trainer.test``, which only needs a checkpoint and has the same results.

    Args:
        scope: Parameters that train: ``"head"``, ``"full"`` (all), or names, globs and module
            types.
        epochs: Passes over a client's training data. Exactly one of ``epochs`` and ``steps``; 0
            evaluates the starting model.
        steps: Optimizer steps instead.
        lr: Learning rate, positive, whatever a schedule says; None keeps those of
            ``configure_optimizers``, as schedules have left them.
        penalty: What holds the client near the model it starts from, besides the loss. ``"l2"``:
            half the squared distance; ``"ewc"``: the same, each parameter by its Fisher
            information, the mean over the client's samples of the squared gradient, which another
            pass measures; ``"distillation"``: the divergence of the predicted probabilities from
            the first model's, for logits. None for none.
        penalty_weight: Factor of the penalty, > 0. With ``"l2"`` plain SGD needs ``lr * (L +
            penalty_weight) < 2``.
        when: ``"end"``: once, after the last round; ``"evaluation"``: in every evaluation, so that
            callbacks can monitor ``ft/val_acc``.

    Raises:
        ValueError: If an argument is out of its range.
        MisconfigurationException: At the start of a run without FederatedStrategy, without
            training data, or with several of these callbacks.

    Deviation from the paper: none. Each client's optimizer starts afresh. Distillation is added to
    the loss, at temperature 1.

    Example:
        >>> HeadFineTuning(steps=50).phase.steps
        50

    References:
        Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized
        federated learning. ICML 2021. arXiv:2102.07078, section 5 (FedAvg+FT, FedProx+FT). Yu,
        Bagdasaryan, Shmatikov. Salvaging federated learning by local adaptation. 2020.
        arXiv:2002.04758, section 3 (penalties).
    """

    prefix: ClassVar[str] = PREFIX
    purpose: ClassVar[str] = "fine-tune on"

    def __init__(
        self,
        scope: ParameterSpec = "head",
        epochs: int | None = 10,
        steps: int | None = None,
        lr: float | None = None,
        when: When = "end",
        penalty: Penalty | None = None,
        penalty_weight: float = 1.0,
    ) -> None:
        check_lr(lr)
        super().__init__(when)
        if penalty is not None:
            advice = "Use 'l2', or None to fine-tune without a penalty."
            check_choice("penalty", penalty, get_args(Penalty), advice)
        check_number("penalty_weight", penalty_weight, "Use 1, for example.", positive=True)
        weight = {"penalty_weight": penalty_weight}
        check_used(HeadFineTuning.__init__, weight, penalty is not None, "penalty='l2'")
        if not scope:
            raise ValueError(
                f"Expected `scope` to name parameters, but got scope={scope!r}. "
                "Use 'head', or epochs=0 to train nothing."
            )
        budget = budget_phase(epochs, steps, default_epochs=10)
        self.phase = replace(budget, train=scope, lr=lr, name="fine-tuning")
        self.scope, self.penalty, self.penalty_weight = scope, penalty, penalty_weight
        self._from_best = False
        self._forget()

    # --- what users ask for -----------------------------------------------------------------------

    def client_state_dict(self, client: int | str) -> dict[str, Any]:
        """Return a client's fine-tuned model, as a ``state_dict`` of the user's module.

        It is that of the last evaluation if no round came after it; otherwise it is trained now.

        Args:
            client: Its id or its name.

        Raises:
            RuntimeError: If nothing was trained or loaded yet.
            KeyError: If the client is unknown.
        """
        federation = self._federation
        if federation is None:
            raise RuntimeError(
                "Expected a trained or loaded federation, but got none. Call `trainer.fit` or "
                "`trainer.test(ckpt_path=...)` first."
            )
        self._forget_others(federation)
        state = federation.client_state_dict(client)
        model = self._models(federation, torch.tensor([federation.client_id(client)]))
        tuned = {name: leaf[0].detach().clone() for name, leaf in model.items()}
        tuned = {name: leaf.to(state[name].device) for name, leaf in tuned.items()}
        return {**state, **federation.parameter_split.with_aliases(tuned)}

    # --- hooks ------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Begin a run, and clear models of an earlier run if they may differ."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" or trainer.ckpt_path is not None:
            self._forget()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check scope and training data before training."""
        federation = require_federation(trainer, self)
        self._resolved(federation)
        if self._trains:
            self._training_data(federation)

    def on_round_start(self, trainer: L.Trainer, module: L.LightningModule, round: Any) -> None:
        """Clear the fine-tuned models, which are now out of date."""
        self._forget()

    # --- fine-tuning ------------------------------------------------------------------------------

    @property
    def _trains(self) -> bool:
        return bool(self.phase.epochs or self.phase.steps)

    def _forget(self) -> None:
        self._kept: ClientStateStore | None = None
        self._done = torch.zeros(0, dtype=torch.bool)

    def _forget_others(self, federation: Federation) -> None:
        """Clear models that began at those of the last round, which a fit's best ones replace."""
        from_best = bool(federation.best) and not federation.fitting
        if from_best != self._from_best:
            self._forget()
        self._from_best = from_best

    def begin(self, trainer: L.Trainer) -> tuple[Callable[[Tensor], Model], int, None]:
        """Return the function that fine-tunes clients, and how many train at once."""
        federation: Any = require_federation(trainer, self)
        self._forget_others(federation)
        together = TRAINED_TOGETHER // max(self._allocate(federation), 1)
        return partial(self._models, federation), together, None

    def _allocate(self, federation: Federation) -> int:
        """Allocate the clients' fine-tuned parameters; return the bytes of one client's."""
        with torch.inference_mode(False):
            row = select(federation.parameter_split.model(), self._resolved(federation))
            held = total_nbytes(row)
            if self._kept is None and held * federation.num_clients <= KEPT:
                self._kept = ClientStateStore(
                    row, federation.num_clients, federation.client_states.device
                )
                self._done = torch.zeros(federation.num_clients, dtype=torch.bool)
        return held

    def _models(self, federation: Federation, clients: Tensor) -> Model:
        """Return fine-tuned models, ``(clients, ...)``; other entries are the starting model's."""
        # Models that are trained, or kept, must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            start = self._start(federation, clients)
            if not self._trains:
                return start
            device = next(iter(start.values())).device
            if self._kept is not None and bool(self._done[clients].all()):
                return {**start, **self._kept.gather(clients, device)}
            names = self._resolved(federation)
            phase = replace(self.phase, train=sorted(names))
            data = self._training_data(federation)
            settings: dict[str, Any] = {"phases": (phase,)}
            if self.penalty is not None:
                settings = {
                    "phases": penalties.phases(self.penalty, phase),
                    "given": penalties.given(self.penalty, start, names),
                    "step": partial(penalties.step, self.penalty, self.penalty_weight),
                }
            trained = adapt(federation, start, clients, data=data, stream="fine-tuning", **settings)
            kept = select(trained, names)
            if self._kept is not None:
                self._kept.scatter(clients, kept)
                self._done[clients] = True
            return {**start, **kept}

    def _start(self, federation: Federation, clients: Tensor) -> Model:
        model = federation.method.global_model(federation.server)
        if model is None:
            return personal_models(federation, clients)
        expanded: Model = expand(model, len(clients))
        return expanded

    def _resolved(self, federation: Federation) -> frozenset[str]:
        spec = "all" if self.scope == "full" else self.scope
        return federation.parameter_split.match(spec, "scope")
