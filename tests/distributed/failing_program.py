"""A program as a user writes one, to which something happens in its third training step or at its second save.

Arguments: what happens, to which rank ("all" or a number), and the directory of checkpoints.
"""

import os
import resource
import shutil
import signal
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_sdp  # noqa: F401  (registers the strategy names)
from tests.models import CLASSES, Net

SIGNALS = ("SIGTERM", "SIGINT", "SIGKILL")


def say(line: str) -> None:
    """Prints a line in one write, so that lines of different ranks do not mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Happen(Callback):
    """Makes it happen."""

    def __init__(self, what: str, rank: str) -> None:
        self.what, self.rank, self.steps = what, rank, 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.steps += 1
        if self.rank not in ("all", str(trainer.global_rank)) or self.steps != 3:
            return
        say(f"happens at {time.time()}")
        if self.what in SIGNALS:
            os.kill(os.getpid(), getattr(signal, self.what))
        elif self.what == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        elif self.what == "killed while saving":
            shutil.move = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        say(f"rank {trainer.global_rank} came to the end")


def main(what: str, rank: str, directory: str) -> None:
    seed_everything(11, verbose=False)
    net = Net("mlp", blocks=4)
    data = TensorDataset(torch.randn(256, 5), torch.randint(CLASSES, (256,)))
    save = ModelCheckpoint(directory, filename="saved", every_n_train_steps=2, enable_version_counter=False)
    trainer = Trainer(
        strategy="sdp",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        callbacks=[Happen(what, rank), save, OnExceptionCheckpoint(directory)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(data, batch_size=4))


if __name__ == "__main__":
    main(*sys.argv[1:])
