"""FedMAP's networks: AlexNet for Office-31, a CNN for FEMNIST, a perceptron for synthetic data."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_share
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.models.layers import Layers
from lightning_pfl.models.mlp import LossChoice, MLPBackbone


def normalised_convolution(inputs: int, outputs: int, **settings: Any) -> list[nn.Module]:
    """Make a convolution, batch normalisation and ReLU.

    Args:
        inputs: Number of input channels.
        outputs: Number of output channels.
        settings: Further arguments of ``nn.Conv2d``.
    """
    return [nn.Conv2d(inputs, outputs, **settings), nn.BatchNorm2d(outputs), nn.ReLU()]


def normalised_dense(inputs: int, outputs: int) -> list[nn.Module]:
    """Make a fully connected layer, batch normalisation and ReLU."""
    return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]


class AlexNetBackbone(Layers):
    """AlexNet from images ``(batch, 3, side, side)``, side >= 63, to ``(batch, num_hidden)``.

    Args:
        num_hidden: Units of each of the two fully connected layers.
    """

    def __init__(self, num_hidden: int = 4096) -> None:
        check_types(AlexNetBackbone.__init__, locals(), least=1)
        super().__init__(
            *normalised_convolution(3, 64, kernel_size=11, stride=4, padding=2),
            nn.MaxPool2d(3, stride=2),
            *normalised_convolution(64, 192, kernel_size=5, padding=2),
            nn.MaxPool2d(3, stride=2),
            *normalised_convolution(192, 384, kernel_size=3, padding=1),
            *normalised_convolution(384, 256, kernel_size=3, padding=1),
            *normalised_convolution(256, 256, kernel_size=3, padding=1),
            nn.MaxPool2d(3, stride=2),
            nn.AdaptiveAvgPool2d((6, 6)),
            nn.Flatten(),
            *normalised_dense(256 * 6 * 6, num_hidden),
            *normalised_dense(num_hidden, num_hidden),
        )


class AlexNetBN(PersonalizedModule):
    """AlexNet with batch normalisation: 57,149,535 parameters for the 31 classes of Office-31.

    18,688 of them are scales and shifts of the normalisation, which FedBN keeps on the client.

    Args:
        num_classes: Number of classes.
        num_hidden: Units of each of the two fully connected layers, 4096 in the paper; they have
            nearly all of the parameters.
        settings: Further arguments of PersonalizedModule.

    Deviation from the paper: none.

    References:
        Zhang, Esteve-Yagüe, Dittmer, Schönlieb, Roberts. FedMAP: Unlocking potential in
        personalized federated learning through bi-level MAP optimization. arXiv:2405.19000,
        table 4. The network is that of Li, Jiang, Zhang, Kamp, Dou. FedBN: Federated learning on
        non-IID features via local batch normalization. ICLR 2021. arXiv:2102.07623.
    """

    def __init__(self, num_classes: int = 31, num_hidden: int = 4096, **settings: Any) -> None:
        check_types(AlexNetBN.__init__, locals(), least=1)
        super().__init__(
            AlexNetBackbone(num_hidden),
            nn.Linear(num_hidden, num_classes),
            num_classes=num_classes,
            **settings,
        )
        self.save_hyperparameters({"num_hidden": num_hidden})


class FEMNISTBackbone(Layers):
    """Convolutions from images ``(batch, 1, 28, 28)`` to features ``(batch, 512)``."""

    def __init__(self) -> None:
        super().__init__(
            *normalised_convolution(1, 32, kernel_size=3, padding=1),
            *normalised_convolution(32, 64, kernel_size=3, padding=1),
            nn.MaxPool2d(2),
            *normalised_convolution(64, 64, kernel_size=3, padding=1),
            *normalised_convolution(64, 128, kernel_size=3, padding=1),
            nn.MaxPool2d(2),
            nn.Flatten(),
            *normalised_dense(128 * 7 * 7, 512),
        )


class FEMNISTCNN(PersonalizedModule):
    """FedMAP's network for FEMNIST with 62 classes: 3,374,782 parameters.

    The dropout before the last layer belongs to the head, so that the backbone is deterministic in
    evaluation mode and in phases that train the head alone.

    Args:
        num_classes: Number of classes.
        dropout: Probability of dropping a feature before the last layer, in [0, 1].
        settings: Further arguments of PersonalizedModule.

    Deviation from the paper: none.

    References:
        Zhang, Esteve-Yagüe, Dittmer, Schönlieb, Roberts. FedMAP: Unlocking potential in
        personalized federated learning through bi-level MAP optimization. arXiv:2405.19000,
        table 7.
    """

    def __init__(self, num_classes: int = 62, dropout: float = 0.5, **settings: Any) -> None:
        check_types(FEMNISTCNN.__init__, locals(), least=1)
        check_share("dropout", dropout)
        super().__init__(
            FEMNISTBackbone(),
            nn.Sequential(nn.Dropout(dropout), nn.Linear(512, num_classes)),
            num_classes=num_classes,
            **settings,
        )
        self.save_hyperparameters({"dropout": dropout})


class FedMAPMLP(PersonalizedModule):
    """FedMAP's network for its synthetic data: 30-32-16-1, 1,537 parameters.

    Also logs ``val_balanced_acc`` and ``test_balanced_acc``, the mean of the two classes' recalls,
    which the authors' code reports. With 85 % of samples in one class a constant output has an
    accuracy of 85 %, but a balanced accuracy of 50 %.

    Args:
        num_inputs: Number of features: 30 in the paper. The authors' code keeps the client's index
            as a 31st, which makes 1,569 parameters.
        batch_norm: Whether BatchNorm precedes each ReLU (96 more parameters). Not in the paper's
            table; without it FedBN equals FedAvg.
        loss: See PersonalizedModule.
        settings: Further arguments of PersonalizedModule.

    Deviation from the paper: the final sigmoid is part of the loss ``"bce"``, which is the same
    function computed without overflow; outputs are logits.

    References:
        Zhang, Esteve-Yagüe, Dittmer, Schönlieb, Roberts. FedMAP: Unlocking potential in
        personalized federated learning through bi-level MAP optimization. arXiv:2405.19000,
        table 3.
    """

    def __init__(
        self,
        num_inputs: int = 30,
        batch_norm: bool = False,
        loss: LossChoice = "bce",
        **settings: Any,
    ) -> None:
        check_types(FedMAPMLP.__init__, locals(), least=1)
        layers = [*normalised_dense(num_inputs, 32), *normalised_dense(32, 16)]
        backbone = nn.Sequential(*layers) if batch_norm else MLPBackbone([num_inputs, 32, 16])
        super().__init__(backbone, nn.Linear(16, 1), loss=loss, **settings)
        self.save_hyperparameters({"num_inputs": num_inputs, "batch_norm": batch_norm})
        self.val_balanced_acc, self.test_balanced_acc = (
            MulticlassAccuracy(num_classes=2, average="macro") for _ in range(2)
        )

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        """Log ``val_loss``, ``val_acc`` and ``val_balanced_acc``."""
        super().validation_step(batch, batch_idx)
        self.val_balanced_acc.update(*self._classes(batch))
        self.log("val_balanced_acc", self.val_balanced_acc)

    def test_step(self, batch: Any, batch_idx: int = 0) -> None:
        """Log ``test_loss``, ``test_acc`` and ``test_balanced_acc``."""
        super().test_step(batch, batch_idx)
        self.test_balanced_acc.update(*self._classes(batch))
        self.log("test_balanced_acc", self.test_balanced_acc)

    def _classes(self, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, target = batch
        return (self(inputs)[:, 0] > 0).long(), target.long()
