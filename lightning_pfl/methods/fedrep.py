"""FedRep: a shared representation, and heads that each client trains anew in every round."""

from __future__ import annotations

from typing import ClassVar

from lightning_pfl.core.checks import check_budget, check_number, check_used
from lightning_pfl.core.parameters import ParameterSpec, ParameterSplit
from lightning_pfl.methods.base import About, Method, PerClient, Phase, Weighting, say_split


class FedRep(Method):
    r"""Clients train their head on the received body, then the body; the body is averaged.

    .. math::
        h_k &\leftarrow \tau \text{ updates of the head on } F_k(\cdot, \phi^t), \quad \phi \text{
        frozen} \\ \phi_k &\leftarrow \text{update of the body on } F_k(h_k, \cdot), \quad h_k
        \text{ frozen} \\ \phi^{t+1} &= \sum_{k \in S_t} p_k\, \phi_k

    In each phase, frozen parameters stay the same bit for bit, without momentum and weight decay,
    and their normalisation layers run in eval mode. The frozen shared body's features are computed
    once per round.

    Args:
        personal: The head, which stays on the client (names, globs or module types).
        head_epochs: :math:`\tau` in passes over the client's data. Exactly one of ``head_epochs``
            and ``head_steps``.
        head_steps: :math:`\tau` in optimizer steps.
        body_epochs: Passes of the body phase. Exactly one of ``body_epochs`` and ``body_steps``.
        body_steps: Optimizer steps of the body phase; 1 as in Algorithm 1.
        head_lr: :math:`\alpha` of the head phase; a schedule scales it. None keeps the rates of
            ``configure_optimizers``.
        body_lr: Learning rate of the body phase, as ``head_lr``.
        weighting: ``"samples"``, as the released code does where sizes differ, or ``"uniform"`` as
            in Algorithm 1. Both are equal for clients of equal size.

    State:
        server: ``model``, the body. client_state: ``model``, the head; each leaf
            ``(clients, *shape)``.

    Deviation from the paper: Algorithm 1 updates the body by a single step; the default is one
    epoch, as in its experiments. Each phase has a fresh optimizer; the released code shares one
    (with momentum).

    Example:
        >>> FedRep(head_epochs=10, body_steps=1).body_steps
        1

    References:
        Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized
        federated learning. ICML 2021. arXiv:2102.07078, Algorithm 1.
    """

    about = About(
        family="a personal part",
        personal="the head, trained before the backbone",
        assumes="the backbone suits all, heads don't; heads are cheap to fit exactly",
        down="$4d_B$",
        up="$4d_B$",
        keeps="head",
        gradients="1, and the head's",
        personal_model=(
            "the server's backbone now, the client's head as it was after its last round"
        ),
        global_model=None,
        paper="Collins et al. 2021",
    )
    averages_models: ClassVar[bool] = True

    def __init__(
        self,
        personal: ParameterSpec = "head",
        head_epochs: PerClient | None = 10,
        body_epochs: PerClient | None = 1,
        head_steps: PerClient | None = None,
        body_steps: PerClient | None = None,
        head_lr: float | None = None,
        body_lr: float | None = None,
        weighting: Weighting = "samples",
    ) -> None:
        # `head_steps=5` alone means steps instead of the default epochs, not both.
        head_epochs = None if head_steps is not None and head_epochs == 10 else head_epochs
        body_epochs = None if body_steps is not None and body_epochs == 1 else body_epochs
        check_budget(head_epochs, head_steps, "head")
        check_budget(body_epochs, body_steps, "body")
        for name, lr in (("head_lr", head_lr), ("body_lr", body_lr)):
            if lr is not None:
                advice = "Use None for the learning rates of `configure_optimizers`."
                check_number(name, lr, advice)
        for name, lr, budget in (
            ("head", head_lr, head_epochs if head_steps is None else head_steps),
            ("body", body_lr, body_epochs if body_steps is None else body_steps),
        ):
            condition = f"{name}_epochs or {name}_steps of 1 or more"
            check_used(FedRep.__init__, {f"{name}_lr": lr}, budget != 0, condition)
        super().__init__(weighting=weighting)
        self.personal = personal
        self.head_epochs, self.head_steps, self.head_lr = head_epochs, head_steps, head_lr
        self.body_epochs, self.body_steps, self.body_lr = body_epochs, body_steps, body_lr

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Return a phase for the head, then one for the body."""
        head = sorted(self.parameter_split.personal)
        body = sorted(self.parameter_split.shared)
        return (
            Phase(
                head, epochs=self.head_epochs, steps=self.head_steps, lr=self.head_lr, name="head"
            ),
            Phase(
                body, epochs=self.body_epochs, steps=self.body_steps, lr=self.body_lr, name="body"
            ),
        )

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return log lines if the split makes this another method."""
        return say_split(
            "FedRep",
            parameter_split,
            "FedAvg, of the length of the body phase",
            "local training of the length of the head phase",
        )
