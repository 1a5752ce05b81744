"""LocalOnly: every client trains alone ("Individual", "Local")."""

from __future__ import annotations

from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.methods.base import About, Method, PerClient


class LocalOnly(Method):
    r"""Every client trains its own model on its own data; nothing is exchanged.

    Solves :math:`\min_{\theta_k} F_k(\theta_k)` for each client :math:`k`. All clients train in
    every round, whatever ``participation`` is, so that the baseline isn't under-trained.

    Args:
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.

    State:
        client_state: ``model``, the complete model; each leaf ``(clients, *shape)``. The server has
            no state.

    Deviation from the paper: none of its own. As in every method, optimizers start afresh in each
    round: with momentum or Adam, ``T`` rounds of ``E`` epochs differ from one round of ``T * E``
    epochs.

    Example:
        >>> LocalOnly(local_epochs=5).phases(0)[0].epochs
        5
    """

    about = About(
        family="nothing shared",
        personal="everything; nothing is exchanged",
        assumes="enough data per client",
        down="$0$",
        up="$0$",
        keeps="model",
        gradients="1, in every round",
        personal_model="the client's own model, all of it",
        global_model=None,
        paper=None,
    )
    personal: ParameterSpec = "all"

    def __init__(
        self, local_epochs: PerClient | None = 1, local_steps: PerClient | None = None
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting="uniform")

    def full_participation(self, round: int) -> bool:
        """Train all clients in every round, as no client waits for a server."""
        return True
