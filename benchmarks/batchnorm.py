"""Accuracy of the full model with and without re-estimated BatchNorm statistics.

    python -m benchmarks.batchnorm [--ranks 4] [--granularity block neuron] [--coverage 0.5] [--epochs 12] [--seeds 0 1]

Trains the narrow ResNet-18 of the image classification example on scikit-learn's handwritten digits, 1,000 to train and
500 to test, on several CPU processes. What differs between two runs is only where the full model's running statistics
come from: re-estimated with the latest training batches (`recalibrate_batchnorm`), or the mean of what the subnetworks
collected while training. The weights are the same.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import torch.distributed as dist
from lightning.pytorch import Trainer, seed_everything
from rich.console import Console
from rich.table import Table

from benchmarks.common import GRANULARITIES, on_ranks
from examples.image_classification.data import ImageData
from examples.image_classification.model import ImageClassifier
from lightning_sdp import SDPStrategy


def measure(granularity: str, coverage: float, epochs: int, seeds: Sequence[int], batches: int) -> list[float]:
    """Test accuracy of the full model, for each seed.

    Args:
        granularity: ``"block"`` or ``"neuron"``.
        coverage: Coverage of the strategy.
        epochs: Passes over the training images.
        seeds: Of the weights and of the order of images.
        batches: Training batches that re-estimate the statistics; 0: the mean over holders.
    """
    accuracies = []
    for seed in seeds:
        seed_everything(seed, verbose=False)
        data = ImageData("digits")
        model = ImageClassifier(data.num_classes, data.in_channels, 16, learning_rate=0.2)
        trainer = Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=SDPStrategy(granularity, coverage=coverage, recalibrate_batchnorm=batches),
            max_epochs=epochs,
            logger=False,
            limit_val_batches=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, data)
        (tested,) = trainer.test(model, data, verbose=False)
        accuracies.append(tested["test_accuracy"])
    return accuracies


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Accuracy with and without re-estimated BatchNorm statistics.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--granularity", choices=GRANULARITIES, nargs="+", default=list(GRANULARITIES))
    parser.add_argument("--coverage", type=float, nargs="+", default=[0.5])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    args = parser.parse_args()
    table = Table(title=f"Test accuracy of the full model, {args.ranks} ranks, {args.epochs} epochs")
    for column in ("what is masked", "coverage", "holders' mean", "re-estimated"):
        table.add_column(column)
    for granularity, coverage in itertools.product(args.granularity, args.coverage):
        options = (granularity, coverage, args.epochs, args.seeds)
        results = [on_ranks(measure, args.ranks, *options, batches) for batches in (0, 16)]
        table.add_row(granularity, f"{coverage:g}", *[", ".join(f"{a:.1%}" for a in r) for r in results])
    Console().print(table)


if __name__ == "__main__":
    main()
