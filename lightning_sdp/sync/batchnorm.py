"""SyncBatchNorm over those ranks that run it."""

from __future__ import annotations

import torch.nn as nn
from torch import Tensor

from lightning_sdp._compat import BatchNorm
from lightning_sdp.sync.groups import HolderGroups


class LocalSyncBatchNorm(nn.SyncBatchNorm):
    """A SyncBatchNorm that one rank runs alone."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: D102
        output: Tensor = BatchNorm.forward(self, input)  # type: ignore[arg-type]
        return output


def synchronize_over_holders(module: nn.Module, groups: HolderGroups, everywhere: bool) -> None:
    """Lets each SyncBatchNorm of a module synchronize among the ranks that run it.

    Args:
        module: The full model; its SyncBatchNorms change in place.
        groups: Holder sets and their process groups.
        everywhere: Whether every rank runs the full model.
    """
    for name, norm in module.named_modules():
        if isinstance(norm, nn.SyncBatchNorm):
            tensor = next((f"{name}.{key}" for key in (*norm._parameters, *norm._buffers)), name)
            holders = groups.world if everywhere else groups.holders(tensor)
            alone = len(holders) == 1 or groups.rank not in holders
            norm.__class__ = LocalSyncBatchNorm if alone else nn.SyncBatchNorm
            norm.process_group = None if alone else groups.group(holders)
