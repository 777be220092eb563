"""Re-estimates BatchNorm's running statistics for the full model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sdp._compat import BatchNorm
from lightning_sdp.rehearsal import protected, run_training_step
from lightning_sdp.sync.batchnorm import LocalSyncBatchNorm
from lightning_sdp.sync.buffers import BufferSync, Weighted


class BatchNormRecalibration(Callback):
    """Remembers the latest training batches, and runs them through the full model to re-estimate its statistics.

    Under forward masking each worker's running statistics describe its own subnetwork, not the full model. Before the
    full model is evaluated or saved, and if a training step was made since the last time, each rank runs its latest
    batches through ``training_step`` of the full model in train mode without gradients; the statistics are averaged
    over these batches, as `torch.optim.swa_utils.update_bn` does, and combined over the ranks. Nothing else changes:
    logging, optimizers, metrics, other buffers and the random state are protected.

    `SDPStrategy` adds it where the model has BatchNorm; add it yourself to choose the number of batches.

    Args:
        num_batches: Batches per rank.

    Raises:
        ValueError: ``num_batches`` is not positive.
    """

    def __init__(self, num_batches: int = 16) -> None:
        if num_batches < 1:
            raise ValueError(f"num_batches={num_batches} must be at least 1.")
        self.num_batches = num_batches
        self._latest: deque[tuple[Any, int]] = deque(maxlen=num_batches)
        self._arrived: Any = None
        self._batch_idx = 0
        self._modes: dict[nn.Module, bool] = {}

    @property
    def has_batches(self) -> bool:
        """Whether any training batch is remembered."""
        return bool(self._latest)

    def reset(self) -> None:
        """Forgets what belongs to one run."""
        self._latest.clear()
        self._arrived = None
        self._modes = {}

    def record(self, batch: Any) -> None:
        """Takes a training batch as the dataloader gave it, before its transfer to the device."""
        self._arrived = batch

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Learns the number of the batch."""
        self._batch_idx = batch_idx

    def keep(self, module: LightningModule) -> None:
        """Remembers the batch that arrived, and which modules are in train mode."""
        if self._arrived is not None:
            self._latest.append((self._arrived, self._batch_idx))
            self._arrived = None
            self._modes = {module: module.training for module in module.modules()}

    def estimate(self, trainer: Trainer, module: LightningModule, names: list[str]) -> dict[str, Weighted]:
        """Statistics of the open full model on this rank's latest batches; local.

        Args:
            trainer: The trainer.
            module: The full model.
            names: The BatchNorm modules to estimate. Those that the user holds in eval mode are left out.

        Returns:
            By name: mean, variance and the number of batches that the module saw.

        Raises:
            RuntimeError: ``training_step`` failed.
        """
        norms = {name: module.get_submodule(name) for name in names}
        norms = {name: norm for name, norm in norms.items() if self._modes.get(norm, False)}
        if not self._latest or not norms:
            return {}
        with protected(trainer, module), _collecting(norms):
            for submodule, training in self._modes.items():
                submodule.training = training
            for batch, batch_idx in self._latest:
                try:
                    run_training_step(trainer, module, batch, batch_idx)
                except Exception as error:
                    raise RuntimeError(
                        "training_step failed while BatchNorm's statistics were re-estimated for the full model (it "
                        "runs there without gradients, logging and optimizers). Pass recalibrate_batchnorm=0 to leave "
                        "that out."
                    ) from error
            return {name: _statistics(norm) for name, norm in norms.items()}


def update_statistics(
    buffers: BufferSync, recalibration: BatchNormRecalibration | None, module: LightningModule
) -> None:
    """Gives the open full model statistics that fit it: re-estimated, or else its holders' mean; collective.

    Args:
        buffers: The module's buffers.
        recalibration: Estimates on this rank's latest batches; ``None`` where that is off.
        module: The full model.
    """
    local = {} if recalibration is None else recalibration.estimate(module.trainer, module, list(buffers.widths))
    with torch.inference_mode(False), torch.no_grad():
        statistics = buffers.combine(local)
        if not statistics:
            if recalibration is None or not recalibration.has_batches:
                rank_zero_warn(
                    "BatchNorm's statistics for the full model are the mean of its subnetworks' (no training batches "
                    "to re-estimate them, or recalibrate_batchnorm=0), which rarely fits: expect a worse evaluation."
                )
            statistics = buffers.holders_mean()
        buffers.set_full(statistics)


def _statistics(norm: nn.Module) -> tuple[Tensor, Tensor, float]:
    assert isinstance(norm, BatchNorm)
    assert norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None
    return norm.running_mean.clone(), norm.running_var.clone(), float(norm.num_batches_tracked)


@contextmanager
def _collecting(norms: dict[str, nn.Module]) -> Iterator[None]:
    """BatchNorm modules start anew and average over what they see; their momentum and counters come back."""
    saved = {n: (n.momentum, n.num_batches_tracked.clone()) for n in norms.values()}  # type: ignore[operator]
    classes = {norm: type(norm) for norm in norms.values()}
    for norm in norms.values():
        if isinstance(norm, nn.SyncBatchNorm):  # each rank runs batches of its own
            norm.__class__ = LocalSyncBatchNorm
        norm.reset_running_stats()  # type: ignore[operator]
        norm.momentum = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for norm, (momentum, counter) in saved.items():
            norm.__class__ = classes[norm]
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(counter)  # type: ignore[operator,union-attr]
