"""The papers' networks as PersonalizedModules with a backbone and a head."""

from lightning_pfl.models.adapters import Adapter, LowRank
from lightning_pfl.models.cifar import CIFAR10CNN, CIFAR100CNN, CIFARBackbone
from lightning_pfl.models.fedmap import (
    FEMNISTCNN,
    AlexNetBackbone,
    AlexNetBN,
    FedMAPMLP,
    FEMNISTBackbone,
)
from lightning_pfl.models.layers import Scaler
from lightning_pfl.models.lenet import (
    DigitsBackbone,
    DigitsCNN,
    LeNet,
    LeNetBackbone,
)
from lightning_pfl.models.linear import LinearRepresentation, SquaredHingeClassifier
from lightning_pfl.models.mlp import (
    FEMNISTMLP,
    MLP,
    DigitsMLP,
    MLPBackbone,
)
from lightning_pfl.models.sent140 import LSTMBackbone, Sent140LSTM

__all__ = [
    "MLP",
    "MLPBackbone",
    "DigitsMLP",
    "DigitsCNN",
    "DigitsBackbone",
    "LeNet",
    "LeNetBackbone",
    "CIFAR10CNN",
    "CIFAR100CNN",
    "CIFARBackbone",
    "FEMNISTMLP",
    "Sent140LSTM",
    "LSTMBackbone",
    "FEMNISTCNN",
    "FEMNISTBackbone",
    "FedMAPMLP",
    "AlexNetBN",
    "AlexNetBackbone",
    "LinearRepresentation",
    "SquaredHingeClassifier",
    "Scaler",
    "Adapter",
    "LowRank",
]
