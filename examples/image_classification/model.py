"""ResNet-18 for small images, as a LightningModule that knows nothing of the strategy that trains it."""

from __future__ import annotations

from typing import Any

import torch.nn as nn
import torch.nn.functional as F
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torchmetrics.classification import MulticlassAccuracy
from torchvision.models.resnet import BasicBlock, ResNet


class SmallImageResNet18(ResNet):
    """torchvision's ResNet-18 with the stem that is usual for CIFAR (3×3 convolution, no pooling) and a free width.

    Each block starts as its skip path (`zero_init_residual`), which is also what remains of it on workers without it.

    Args:
        num_classes: Number of classes.
        in_channels: Color channels of an image.
        width: Channels of the first stage; the others have two, four and eight times as many. The original has 64.
    """

    def __init__(self, num_classes: int, in_channels: int = 3, width: int = 64) -> None:
        self.width = width
        super().__init__(BasicBlock, [2, 2, 2, 2], num_classes, zero_init_residual=True)
        self.conv1 = nn.Conv2d(in_channels, width, kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")  # as ResNet does
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity()  # type: ignore[assignment]
        self.fc = nn.Linear(8 * width, num_classes)

    def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:
        # ResNet asks for stages of 64 to 512 channels; only the first of them follows the stem, of 64 channels as well.
        if planes == 64:
            self.inplanes = self.width
        return super()._make_layer(block, planes * self.width // 64, *args, **kwargs)


class ImageClassifier(LightningModule):
    """Classifies small images with a ResNet-18, trained by SGD with momentum and one cycle of the learning rate.

    Args:
        num_classes: Number of classes.
        in_channels: Color channels of an image.
        width: Channels of the ResNet's first stage.
        learning_rate: Highest learning rate of the cycle.
        momentum: Momentum of SGD at the ends of the cycle; where the learning rate is high, the cycle lowers it.
        weight_decay: Weight decay of SGD.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        width: int = 64,
        learning_rate: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.net = SmallImageResNet18(num_classes, in_channels, width)
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes, one row per image."""
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)  # of this process; averaging it would cost traffic in every step
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        scores = self(images)
        self.val_accuracy(scores, labels)
        self.log("val_loss", F.cross_entropy(scores, labels), sync_dist=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)  # a metric counts over all processes by itself

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.test_accuracy(self(images), labels)
        self.log("test_accuracy", self.test_accuracy)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = SGD(
            self.parameters(), lr=self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay
        )
        total_steps = int(self.trainer.estimated_stepping_batches)
        scheduler = OneCycleLR(optimizer, self.learning_rate, total_steps, max_momentum=self.momentum)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
