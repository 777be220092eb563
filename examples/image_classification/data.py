"""Handwritten digits that come with scikit-learn, or CIFAR through torchvision, as one LightningDataModule."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchvision import datasets, transforms

_CIFAR: dict[str, Any] = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}
_NUM_CLASSES = {"digits": 10, "cifar10": 10, "cifar100": 100}
# Mean and standard deviation per channel, of values from 0 to 1.
_STATISTICS = {
    "digits": ((0.3053,), (0.3761,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


class ImageData(LightningDataModule):
    """Small images in three disjoint parts, which are the same in every run.

    | dataset | train | val | test | images |
    |---|---|---|---|---|
    | `digits` | 1,000 | 297 | 500 | gray, 8×8 enlarged to `image_size`; no download |
    | `cifar10`, `cifar100` | 45,000 | 5,000 | 10,000 | color, 32×32; training images are shifted and mirrored |

    Lightning gives every process its share of each part, as it does under any strategy.

    Args:
        dataset: ``"digits"``, ``"cifar10"`` or ``"cifar100"``.
        batch_size: Images per process and step.
        image_size: Height and width to which the digits are enlarged. CIFAR keeps its own.
        root: Where CIFAR is, or is downloaded to.
        num_workers: Processes that load data, per training process.

    Raises:
        ValueError: The dataset is unknown.
    """

    def __init__(
        self,
        dataset: Literal["digits", "cifar10", "cifar100"] = "digits",
        batch_size: int = 25,
        image_size: int = 16,
        root: str = "data",
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if dataset not in _NUM_CLASSES:
            raise ValueError(f"dataset={dataset!r} is unknown: choose {', '.join(map(repr, _NUM_CLASSES))}.")
        self.dataset = dataset
        self.batch_size = batch_size
        self.image_size = image_size
        self.root = root
        self.num_workers = num_workers
        self._parts: dict[str, Dataset[Any]] = {}

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return _NUM_CLASSES[self.dataset]

    @property
    def in_channels(self) -> int:
        """Color channels of an image."""
        return len(_STATISTICS[self.dataset][0])

    def prepare_data(self) -> None:
        """Downloads CIFAR where it is missing; Lightning calls this in one process per node."""
        if self.dataset != "digits":
            for train in (True, False):
                _CIFAR[self.dataset](self.root, train=train, download=True)

    def setup(self, stage: str | None = None) -> None:
        """Makes the three parts, in every process."""
        if not self._parts:
            self._parts = self._digits() if self.dataset == "digits" else self._cifar()

    def _digits(self) -> dict[str, Dataset[Any]]:
        from sklearn.datasets import load_digits  # of the extra `examples`; CIFAR does without

        pixels, labels = load_digits(return_X_y=True)
        images = torch.as_tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        images = F.interpolate(images, size=self.image_size, mode="bilinear", align_corners=False)
        (mean,), (std,) = _STATISTICS["digits"]
        everything = TensorDataset((images - mean) / std, torch.as_tensor(labels))
        train, val, test = _shuffled(len(everything), 1000, 297, 500)
        return {"train": Subset(everything, train), "val": Subset(everything, val), "test": Subset(everything, test)}

    def _cifar(self) -> dict[str, Dataset[Any]]:
        to_tensor = [transforms.ToTensor(), transforms.Normalize(*_STATISTICS[self.dataset])]
        plain = transforms.Compose(to_tensor)
        augmented = transforms.Compose(
            [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), *to_tensor]
        )
        cifar = _CIFAR[self.dataset]
        train, val = _shuffled(50_000, 45_000, 5_000)
        return {
            "train": Subset(cifar(self.root, train=True, transform=augmented), train),
            "val": Subset(cifar(self.root, train=True, transform=plain), val),
            "test": cifar(self.root, train=False, transform=plain),
        }

    def train_dataloader(self) -> DataLoader[Any]:
        # A last batch of very few images would give BatchNorm useless statistics.
        return self._loader("train", shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader("test")

    def _loader(self, part: str, shuffle: bool = False, drop_last: bool = False) -> DataLoader[Any]:
        return DataLoader(
            self._parts[part],
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


def _shuffled(total: int, *sizes: int) -> list[list[int]]:
    """Disjoint lists of indices in an order that is the same in every run; the global random state is left alone."""
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    return [part.tolist() for part in order.split(list(sizes))]
