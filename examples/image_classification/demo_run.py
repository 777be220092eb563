"""One run of the demo; `demo` starts it, once per strategy, and Lightning starts its second process."""

from __future__ import annotations

import argparse
import json
import warnings
from typing import Any

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, RichProgressBar

from examples.image_classification.data import ImageData
from examples.image_classification.demo import options
from examples.image_classification.model import ImageClassifier
from lightning_sdp import SDPStrategy, communication_bytes

PROCESSES = 2


class Footprint(Callback):
    """Measures what a process holds at the end of training, and keeps the largest value of any process.

    Attributes:
        held: The parameters' number, and the bytes of gradients and optimizer state together.
    """

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # After the last step, but before the last validation frees the gradients and puts the full model together.
        if trainer.global_step != trainer.estimated_stepping_batches:
            return
        parameters = list(pl_module.parameters())
        gradients = sum(p.grad.nbytes for p in parameters if p.grad is not None)
        states = [
            value for optimizer in trainer.optimizers for state in optimizer.state.values() for value in state.values()
        ]
        state = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
        own = torch.tensor([sum(p.numel() for p in parameters), gradients + state], device=pl_module.device)
        largest = trainer.strategy.reduce(own, reduce_op="max").tolist()
        self.held = dict(zip(("parameters", "gradient_and_optimizer_bytes"), largest, strict=True))


def sent_bytes(strategy: Any, model: LightningModule) -> float:
    """Bytes that a process sends per step in ring all-reduces, the largest of any process."""
    if isinstance(strategy, SDPStrategy):
        assert strategy.plan is not None
        return max(communication_bytes(strategy.plan, model))
    return 2 * (PROCESSES - 1) / PROCESSES * sum(p.nbytes for p in model.parameters())


def run(args: argparse.Namespace) -> None:
    """Trains and tests under one strategy; rank 0 writes the results."""
    # Lightning advises against testing on several processes because images may be counted twice; 500 on two are not.
    warnings.filterwarnings("ignore", message=".*it is recommended to use `Trainer\\(devices=1")
    warnings.filterwarnings("ignore", message=".*does not have many workers")  # a worker would cost more than it saves
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec")  # between Lightning and torch
    seed_everything(args.seed)
    strategy: Any = SDPStrategy(coverage=args.coverage) if args.strategy == "sdp" else "ddp"
    footprint = Footprint()
    trainer = Trainer(
        accelerator="cuda" if torch.cuda.device_count() >= PROCESSES else "cpu",
        devices=PROCESSES,
        strategy=strategy,
        max_epochs=args.epochs,
        check_val_every_n_epoch=min(4, args.epochs),
        callbacks=[footprint, RichProgressBar()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    data = ImageData("digits")
    model = ImageClassifier(data.num_classes, data.in_channels, args.width, learning_rate=0.2)
    trainer.fit(model, data)
    (tested,) = trainer.test(model, data, verbose=False)
    if trainer.is_global_zero:
        results = {**tested, **footprint.held, "sent_bytes": sent_bytes(trainer.strategy, model)}
        (args.output / f"demo_{args.strategy}.json").write_text(json.dumps(results, indent=1) + "\n")
        if isinstance(trainer.strategy, SDPStrategy) and trainer.strategy.plan is not None:
            trainer.strategy.plan.plot(args.output / "demo_plan.png")


if __name__ == "__main__":
    parser = options()
    parser.add_argument("strategy", choices=["ddp", "sdp"])
    run(parser.parse_args())
