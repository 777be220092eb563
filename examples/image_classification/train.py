"""Trains ImageClassifier on ImageData from the command line, with every option of Lightning's Trainer.

From the root of the checkout, two CPU processes with half of the maskable blocks each, as `digits.yaml` says:

    python -m examples.image_classification.train fit --config examples/image_classification/digits.yaml

The same on one device, without SDP:

    python -m examples.image_classification.train fit --config examples/image_classification/digits.yaml \\
        --trainer.devices 1 --trainer.strategy auto

CIFAR-10 with a ResNet-18 of the usual width on the four GPUs of one machine:

    python -m examples.image_classification.train fit --config examples/image_classification/digits.yaml \\
        --trainer.accelerator gpu --trainer.devices 4 --trainer.max_epochs 60 \\
        --data.dataset cifar10 --data.batch_size 128 --data.num_workers 4 --model.width 64

Two nodes of four GPUs each: on the first, whose name is node0 here,

    torchrun --nnodes=2 --nproc-per-node=4 --node-rank=0 --master-addr=node0 --master-port=29500 \\
        -m examples.image_classification.train fit --config examples/image_classification/digits.yaml \\
        --trainer.accelerator gpu --trainer.num_nodes 2 --trainer.devices 4

and on the second the same with `--node-rank=1`. With `test` instead of `fit` and `--ckpt_path`, a checkpoint is tested.
"""

from __future__ import annotations

from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

import lightning_sdp  # noqa: F401  (with it, `--trainer.strategy sdp` is known too)
from examples.image_classification.data import ImageData
from examples.image_classification.model import ImageClassifier


class ImageCLI(LightningCLI):
    """LightningCLI in which the data say what the model has to take and to tell apart."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.num_classes", "model.num_classes", apply_on="instantiate")
        parser.link_arguments("data.in_channels", "model.in_channels", apply_on="instantiate")


def main(args: ArgsType = None) -> None:
    """Runs ``fit``, ``validate``, ``test`` or ``predict``; ``None`` takes the arguments of the command line."""
    ImageCLI(ImageClassifier, ImageData, args=args)


if __name__ == "__main__":
    main()
