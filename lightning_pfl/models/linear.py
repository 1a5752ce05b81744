"""Linear models: FedRep's linear representation, and a classifier with squared hinge loss."""

from __future__ import annotations

from typing import Any, Literal, cast

from torch import Tensor, nn

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.models.losses import Loss, half_squared_error, sign_matches, squared_hinge


class LinearRepresentation(PersonalizedModule):
    r"""Linear regression with a shared subspace, without biases.

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
        check_types(LinearRepresentation.__init__, locals())
        if not 1 <= num_features <= num_inputs:
            raise ValueError(
                f"Expected `num_features` to be in [1, {num_inputs}], but got "
                f"num_features={num_features!r}. Use at most the number of inputs."
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
        """Return the matrix B, ``(num_inputs, num_features)``."""
        return self.backbone.get_parameter("weight").T


class SquaredHingeClassifier(PersonalizedModule):
    r"""A linear classifier of two classes with the squared hinge loss, convex and smooth.

    .. math::
        f(w, b) = \frac{c}{2} \lVert w \rVert^2 + \frac{c_b}{2} b^2
        + \frac1m \sum_j \max(0, 1 - \ell_j (w^\top a_j + b))^2

    Targets above 0 are the class :math:`\ell = 1`, others :math:`-1`; the label of :math:`a` is the
    sign of :math:`w^\top a + b`. The weights are the head's; training begins at zero.

    Args:
        num_inputs: Number of features.
        regularization: :math:`c \ge 0`.
        bias_regularization: :math:`c_b \ge 0`. Above 0, a client with samples of only one class
            has an optimum too.
        momentum: See PersonalizedModule.
        weight_decay: See PersonalizedModule; :math:`c` is part of the loss and needs none.
        settings: Further arguments of PersonalizedModule.

    Raises:
        ValueError: If a regularization is negative.

    Deviation from the paper: the bias has the opposite sign there.

    References:
        Armacki, Bajovic, Jakovetic, Kar. Personalized federated learning via convex clustering.
        2022. arXiv:2202.00718, section V.
    """

    def __init__(
        self,
        num_inputs: int,
        regularization: float = 1e-3,
        bias_regularization: float = 0.0,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        **settings: Any,
    ) -> None:
        check_types(SquaredHingeClassifier.__init__, locals(), least=1)
        for name, value in (
            ("regularization", regularization),
            ("bias_regularization", bias_regularization),
        ):
            if not value >= 0:
                raise ValueError(
                    f"Expected `{name}` to be at least 0, but got {name}={value!r}. Use 1e-3, or 0 "
                    "for none."
                )
        super().__init__(
            nn.Flatten(),
            nn.Linear(num_inputs, 1),
            loss=squared_hinge,
            momentum=momentum,
            weight_decay=weight_decay,
            **settings,
        )
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        self.regularization = regularization
        self.bias_regularization = bias_regularization
        self.save_hyperparameters({"num_inputs": num_inputs, "regularization": regularization})

    def per_sample(self, batch: Any) -> dict[str, Tensor]:
        """Return the regularized loss and ``"acc"`` of each sample."""
        inputs, target = batch
        output = self(inputs).squeeze(1)
        head = cast(nn.Linear, self.head)  # `get_parameter` refuses the tensors of `vmap`
        weight, bias = head.weight, head.bias
        size = self.regularization * weight.square().sum()
        size = (size + self.bias_regularization * bias.square().sum()) / 2
        hits = sign_matches(output, (target > 0).to(output.dtype))
        return {"loss": self.loss(output, target) + size, "acc": hits}
