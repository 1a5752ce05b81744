"""The linear representation of FedRep's theory."""

from typing import Any, Literal

from torch import Tensor, nn

from lightning_pfl.metrics.per_sample import Loss, half_squared_error
from lightning_pfl.module import PersonalizedModule


class LinearRepresentation(PersonalizedModule):
    r"""Linear regression through a shared subspace, without biases.

    .. math::
        y = w_i^\top B^\top x, \qquad B \in \mathbb{R}^{d \times k},\; w_i \in \mathbb{R}^k

    The backbone's weight is :math:`B^\top`, the head's is :math:`w_i^\top`. The default loss is
    :math:`\frac{1}{2}(y - \hat y)^2`. Plain gradient steps: no momentum, no weight decay.

    Args:
        num_inputs: :math:`d \ge 1`, the number of features.
        num_features: :math:`k`, the dimension of the representation, in [1, d].
        loss: See PersonalizedModule; None is half the squared error.
        momentum: See PersonalizedModule.
        weight_decay: See PersonalizedModule.
        settings: Further arguments of PersonalizedModule.

    Raises:
        ValueError: If the representation has more dimensions than the inputs.

    Deviation from the paper: none.

    References:
        Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized
        federated learning. ICML 2021. arXiv:2102.07078, equations 5 and 6, algorithm 2.
    """

    def __init__(
        self,
        num_inputs: int,
        num_features: int,
        loss: Literal["cross_entropy", "mse", "bce"] | Loss | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        **settings: Any,
    ) -> None:
        if not 1 <= num_features <= num_inputs:
            raise ValueError(
                f"Expected `num_features` to be in [1, {num_inputs}], but got "
                f"num_features={num_features!r}. A representation can't have more dimensions than "
                "the inputs."
            )
        super().__init__(
            nn.Linear(num_inputs, num_features, bias=False),
            nn.Linear(num_features, 1, bias=False),
            loss=half_squared_error if loss is None else loss,
            momentum=momentum,
            weight_decay=weight_decay,
            **settings,
        )
        self.save_hyperparameters({"num_inputs": num_inputs, "num_features": num_features})

    @property
    def representation(self) -> Tensor:
        """The matrix B, ``(num_inputs, num_features)``."""
        return self.backbone.get_parameter("weight").T
