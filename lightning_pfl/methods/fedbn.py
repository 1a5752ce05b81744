"""FedBN: federated averaging without the BatchNorm layers."""

from __future__ import annotations

from typing import ClassVar

from lightning_pfl.core.parameters import BATCH_NORM, NORMS, ParameterSpec, ParameterSplit
from lightning_pfl.methods.base import About, Method, PerClient, Weighting, say_split


class FedBN(Method):
    r"""Federated averaging with personal BatchNorm: affine parameters and running statistics.

    .. math::
        x^{t+1}_{\text{rest}} = \frac{1}{|S_t|} \sum_{k \in S_t} y_{k,\text{rest}}, \qquad
        \text{BN}_k \text{ stays with client } k

    BatchNorm is found by module type, so a layer named ``downsample.1`` counts and a layer named
    ``bnb`` doesn't. A client that was never sampled has the initial BatchNorm. Without BatchNorm
    this is FedAvg, exactly. Other normalisation layers are averaged; make them personal by
    :class:`~lightning_pfl.methods.FedPer`: ``FedPer(personal=torch.nn.LayerNorm)``.

    Args:
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.
        weighting: ``"uniform"`` as in the paper, or ``"samples"``.

    State:
        server: ``model`` without BatchNorm. client_state: ``model``, the BatchNorm layers; each
            leaf ``(clients, *shape)``.

    Deviation from the paper: none.

    Example:
        >>> FedBN().weighting
        'uniform'

    References:
        Li, Jiang, Zhang, Kamp, Dou. FedBN: federated learning on non-IID features via local batch
        normalization. ICLR 2021. arXiv:2102.07623, Algorithm 1.
    """

    about = About(
        family="a personal part",
        personal="BatchNorm; for other normalisation layers `FedPer(personal=torch.nn.LayerNorm)`",
        assumes="inputs differ in scale and shift; the model has BatchNorm",
        down="$4(d - d_{BN})$",
        up="$4(d - d_{BN})$",
        keeps="BatchNorm",
        gradients="1",
        personal_model="the server's model now, with the client's BatchNorm layers",
        global_model="none; of a model without BatchNorm, the server's",
        paper="Li et al. 2021",
    )
    personal: ParameterSpec = BATCH_NORM
    averages_models: ClassVar[bool] = True

    def __init__(
        self,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting)

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return log lines if this is another method, with other normalisation layers."""
        said = say_split("FedBN", parameter_split, "FedAvg", "LocalOnly")
        others = (
            []
            if parameter_split.personal
            else [kind for kind in NORMS if parameter_split.match(kind)]
        )
        if not others:
            return said
        names = [f"torch.nn.{kind.__name__}" for kind in others]
        spec = names[0] if len(names) == 1 else f"[{', '.join(names)}]"
        return [f"{said[0]} For other normalisation layers use FedPer(personal={spec})."]
