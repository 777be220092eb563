"""sync_batchnorm=True: each SyncBatchNorm belongs to those who run it. (Its forward needs an accelerator.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from lightning.pytorch import Callback

from lightning_sdp import SDPStrategy
from lightning_sdp.sync.batchnorm import LocalSyncBatchNorm
from tests.distributed.runs import plan_for, trainer
from tests.models import batches, loader, make


class Look(Callback):
    """Which ranks each BatchNorm synchronizes, when the fit starts."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.ranks = {
            name: [] if type(norm) is LocalSyncBatchNorm else dist.get_process_group_ranks(norm.process_group)
            for name, norm in pl_module.named_modules()
            if isinstance(norm, nn.SyncBatchNorm)
        }


def look(sdp: dict[str, Any]) -> tuple[dict[str, list[int]], set[str]]:
    net, seen = make("conv", blocks=4), Look()
    run = trainer(dist.get_world_size(), SDPStrategy(**sdp), max_steps=0, callbacks=[seen], sync_batchnorm=True)
    run.fit(net, loader(batches("conv", 0, 1)))
    return seen.ranks, {type(m).__name__ for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


@pytest.mark.parametrize("masking", ["forward", "backward"])
def test_a_batchnorm_synchronizes_the_ranks_that_run_it(pool, masking: str) -> None:
    sdp = {"coverage": 0.6, "keep_ends": 0, "masking": masking}
    plan = plan_for(make("conv", blocks=4), 3, sdp)
    sizes = {len(plan.holders(c.name)) for c in plan.components}
    assert sizes == {1, 2}
    for rank, (ranks, left) in enumerate(pool(3).run(look, sdp)):
        for name, own in ranks.items():
            holders = [0, 1, 2]
            if masking == "forward":  # what a shortcut normalizes is everyone's
                holders = list(plan.tensor_holders().get(f"{name}.weight", holders))
            assert own == (holders if rank in holders and len(holders) > 1 else []), name
        assert not any("Sync" in name for name in left)


def test_alone_it_is_a_batchnorm() -> None:
    x = torch.randn(4, 3, 2, dtype=torch.float64)
    sync, plain = nn.SyncBatchNorm(3).double(), nn.BatchNorm1d(3).double()
    sync.__class__ = LocalSyncBatchNorm
    for _ in range(2):
        assert torch.equal(sync(x), plain(x))
    assert all(torch.equal(a, b) for a, b in zip(sync.buffers(), plain.buffers(), strict=True))
    assert torch.equal(sync.eval()(x), plain.eval()(x))
