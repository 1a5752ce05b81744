"""FedPer: shared base layers, personal last layers, trained jointly."""

from __future__ import annotations

from typing import ClassVar

from lightning_pfl.core.parameters import ParameterSpec, ParameterSplit
from lightning_pfl.methods.base import About, Method, PerClient, Weighting, say_split


class FedPer(Method):
    r"""Clients train body and head together; only the body is averaged.

    .. math::
        (B_k, h_k) \leftarrow \text{local SGD on } F_k \text{ from } (B^t, h_k), \qquad B^{t+1} =
        \sum_{k \in S_t} p_k B_k

    The head :math:`h_k` never leaves the client and persists while the client is not sampled.

    Args:
        personal: The personal part: submodule names, globs or module types.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.
        weighting: ``"samples"`` (:math:`p_k = N_k / \sum N_j`) or ``"uniform"``.

    State:
        server: ``model``, the shared part. client_state: ``model``, the personal part; each leaf
            ``(clients, *shape)``.

    Deviation from the paper: the split is by name, the personal part need not be the last layers.

    Example:
        >>> FedPer(personal=["head", "backbone.layer4"]).personal
        ['head', 'backbone.layer4']

    References:
        Arivazhagan, Aggarwal, Singh, Choudhary. Federated learning with personalization layers.
        2019. arXiv:1912.00818, Algorithms 1 and 2.
    """

    about = About(
        family="a personal part",
        personal="the head, trained with the backbone",
        assumes="the backbone suits all, heads don't",
        down="$4d_B$",
        up="$4d_B$",
        keeps="head",
        gradients="1",
        personal_model=(
            "the server's backbone now, the client's head as it was after its last round"
        ),
        global_model=None,
        paper="Arivazhagan et al. 2019",
    )
    averages_models: ClassVar[bool] = True

    def __init__(
        self,
        personal: ParameterSpec = "head",
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "samples",
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        self.personal = personal

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return log lines if the split makes this another method."""
        return say_split("FedPer", parameter_split, "FedAvg", "LocalOnly")
