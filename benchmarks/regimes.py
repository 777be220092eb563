"""Forward and backward masking at low coverage: accuracy after training, eight workers in one process.

    python -m benchmarks.regimes [--coverage 0.375] [--steps 120] [--seeds 0 1 2] [--width 12]

`SDPReference` trains the narrow ResNet-18 of the image classification example on scikit-learn's handwritten digits,
1,000 to train and 500 to test, for eight workers with eight images each. Nothing is kept at the ends, so that this is
the hard case. What counts is the accuracy of the full model, with BatchNorm statistics re-estimated after forward
masking; under backward masking they are the full model's anyway. The schedule is short: nothing here is trained to the
end.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.pytorch import seed_everything
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from examples.image_classification.data import ImageData
from examples.image_classification.model import SmallImageResNet18
from lightning_sdp import MaskPlan, SDPReference

WORKERS, BATCH_SIZE = 8, 8
REGIMES = ("ddp", "block forward", "block backward", "neuron forward", "neuron backward")


def accuracy_after(regime: str, coverage: float, steps: int, seed: int, width: int) -> float:
    """Trains under a regime and returns the test accuracy of the full model."""
    seed_everything(seed, verbose=False)
    data = ImageData("digits", batch_size=WORKERS * BATCH_SIZE)
    data.setup()
    model = SmallImageResNet18(10, 1, width)
    granularity, _, masking = regime.partition(" ")
    if regime == "ddp":
        granularity, masking, coverage = "block", "forward", 1.0
    plan = MaskPlan.build(
        model, num_subnetworks=WORKERS, granularity=granularity, coverage=coverage, keep_ends=0, seed=seed
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    reference = SDPReference(model, plan, optimizer, loss=_loss, masking=masking, scheduler=schedule)
    latest: list[list[Any]] = [[] for _ in range(WORKERS)]
    model.train()
    for images, labels in _endless(data.train_dataloader(), steps):
        shares = list(zip(images.chunk(WORKERS), labels.chunk(WORKERS), strict=True))
        reference.step([[share] for share in shares])
        for own, share in zip(latest, shares, strict=True):
            own.append(share)
    reference.install_buffers([own[-16:] for own in latest])
    model.eval()
    hits = [(model(images).argmax(1) == labels).float() for images, labels in data.test_dataloader()]
    return float(torch.cat(hits).mean())


def _loss(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return torch.nn.functional.cross_entropy(model(images), labels)


def _endless(loader: DataLoader[Any], steps: int) -> Any:
    batches = iter(())
    for _ in range(steps):
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        yield batch


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Accuracy of forward and backward masking at low coverage.")
    parser.add_argument("--coverage", type=float, default=3 / 8)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--width", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, list[float]] = {regime: [] for regime in REGIMES}
    for regime, seed in track([(r, s) for r in REGIMES for s in args.seeds], description="Training"):
        results[regime].append(accuracy_after(regime, args.coverage, args.steps, seed, args.width))
    table = Table(
        title=f"Test accuracy of the full model, {WORKERS} workers, C = {args.coverage:g}, {args.steps} steps"
    )
    for column in ("regime", *(f"seed {seed}" for seed in args.seeds), "mean"):
        table.add_column(column)
    for regime, values in results.items():
        table.add_row(regime, *[f"{value:.1%}" for value in values], f"{sum(values) / len(values):.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
