"""LG-FedAvg: personal representations, a shared head."""

from __future__ import annotations

from typing import ClassVar

from lightning_pfl.core.parameters import ParameterSpec, ParameterSplit
from lightning_pfl.methods.base import About, Method, PerClient, Weighting, say_split


class LGFedAvg(Method):
    r"""Federated averaging of the top layers; the lower layers stay on the client.

    .. math::
        (L_k, G_k) \leftarrow \text{local SGD on } F_k \text{ from } (L_k, G^t), \qquad
        G^{t+1} = \frac{1}{|S_t|} \sum_{k \in S_t} G_k

    Args:
        shared: The shared part: submodule names, globs or module types; all else is personal.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.
        weighting: ``"uniform"`` as in the released code, or ``"samples"``.

    State:
        server: ``model``, the shared part. client_state: ``model``, the personal part; each leaf
            ``(clients, *shape)``.

    Deviation from the paper: starts from the module's initial model; the released recipe starts all
    clients from a checkpoint of FedAvg after hundreds of rounds (load one into the module to do the
    same).

    Example:
        >>> LGFedAvg(shared=["head", "backbone.fc2"]).shared
        ['head', 'backbone.fc2']

    References:
        Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency. Think locally, act
        globally: federated learning with local and global representations. 2020. arXiv:2001.01523,
        Algorithm 1.
    """

    about = About(
        family="a personal part",
        personal="the backbone; the head is shared",
        assumes="inputs differ, labels mean the same",
        down="$4d_H$",
        up="$4d_H$",
        keeps="backbone",
        gradients="1",
        personal_model="the client's backbone, the server's head now",
        global_model=None,
        paper="Liang et al. 2020",
    )
    averages_models: ClassVar[bool] = True

    def __init__(
        self,
        shared: ParameterSpec = "head",
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)
        self.shared = shared

    def resolve_personal(self, parameter_split: ParameterSplit) -> ParameterSpec:
        """Return all names that :attr:`shared` doesn't match."""
        return (
            sorted(set(parameter_split.names) - parameter_split.match(self.shared, "shared"))
            or None
        )

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return log lines if the split makes this another method."""
        return say_split("LGFedAvg", parameter_split, "FedAvg", "LocalOnly")
