"""FedRep's recurrent network for Sent140."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_share
from lightning_pfl.models.base import PersonalizedModule


class LSTMBackbone(nn.Module):
    """An LSTM from sequences ``(batch, tokens, dimensions)`` to features ``(batch, features)``.

    The output of an LSTM at the last token, a fully connected layer and ReLU.

    Args:
        dimensions: Length of a token's vector.
        hidden: Units of the LSTM.
        features: Units of the fully connected layer.
    """

    def __init__(self, dimensions: int = 300, hidden: int = 128, features: int = 10) -> None:
        check_types(LSTMBackbone.__init__, locals(), least=1)
        super().__init__()
        self.lstm = nn.LSTM(int(dimensions), int(hidden), batch_first=True)
        self.dense = nn.Linear(hidden, features)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the features of each sequence."""
        outputs, _ = self.lstm(inputs)
        features: Tensor = self.dense(outputs[:, -1]).relu()
        return features


class Sent140LSTM(PersonalizedModule):
    """FedRep's network for Sent140: an LSTM 300-128, 128-10-2; 221,472 parameters, 22 in the head.

    Word vectors come with the data and are fixed. The dropout before the last layer belongs to the
    head, so that the backbone is deterministic and its features can be computed once in a phase
    that trains the head alone.

    Args:
        dimensions: Length of a word's vector.
        dropout: Probability of dropping a feature before the last layer, in [0, 1].
        settings: Further arguments of PersonalizedModule.

    References:
        Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized
        federated learning. ICML 2021. arXiv:2102.07078, section 5.
    """

    def __init__(self, dimensions: int = 300, dropout: float = 0.5, **settings: Any) -> None:
        check_types(Sent140LSTM.__init__, locals(), least=1)
        check_share("dropout", dropout)
        super().__init__(
            LSTMBackbone(dimensions),
            nn.Sequential(nn.Dropout(dropout), nn.Linear(10, 2)),
            **settings,
        )
        self.save_hyperparameters({"dimensions": dimensions, "dropout": dropout})
