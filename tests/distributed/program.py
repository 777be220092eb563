"""A program as a user writes one: fits a small model, and prints what each rank ends up with.

Arguments: the strategy's name, the number of devices per node and of nodes, and optionally a rank that fails.
"""

import hashlib
import inspect
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_sdp  # noqa: F401  (registers the strategy names)
from tests.models import CLASSES, Net


def fingerprint(module: torch.nn.Module) -> str:
    """A hash of names and values of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


class _Report(Callback):
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.held = sum(parameter.numel() for parameter in pl_module.parameters())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _say(f"rank {trainer.global_rank} of {trainer.world_size} held {self.held} has {fingerprint(pl_module)}")


class _Fail(Callback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == 5:
            _say(f"raises at {time.time()}")
            raise ValueError(f"the data of rank {self.rank} is spoiled")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")  # one write, so that lines of different ranks do not mix
    sys.stdout.flush()


def main(strategy: str, devices: int, nodes: int = 1, failing_rank: int | None = None) -> None:
    seed_everything(11, verbose=False)
    net = Net("mlp", blocks=4)
    data = TensorDataset(torch.randn(48, 5), torch.randint(CLASSES, (48,)))
    callbacks: list[Callback] = [_Report()]
    if failing_rank is not None:
        known = inspect.signature(ModelCheckpoint).parameters  # newer releases of lightning save on exceptions
        options: dict[str, Any] = {"save_on_exception": True} if "save_on_exception" in known else {}
        callbacks += [_Fail(failing_rank), ModelCheckpoint("checkpoints", **options)]
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        max_epochs=2,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=failing_rank is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8))
    _say(
        f"process {trainer.global_rank} has {fingerprint(net)} of {sum(p.numel() for p in net.parameters())} parameters"
    )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
