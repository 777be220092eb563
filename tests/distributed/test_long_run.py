"""A thousand steps of everything together: holders stay bit-equal, and nothing piles up."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_sdp import SDPStrategy
from tests.distributed.runs import trainer
from tests.models import Net, batches, loader, same_state

STEPS, ACCUMULATE = 1000, 2
BLOCK = {"coverage": [1.0, 0.5], "keep_ends": 0}
NEURON = {**BLOCK, "granularity": "neuron"}


class Noisy(Net):
    """With dropout on the input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.1, self.training))


class Measure(Callback):
    """Counts tensors that are alive, and memory in bytes, at some steps."""

    def __init__(self) -> None:
        self.tensors: dict[int, int] = {}
        self.memory: dict[int, int] = {}
        self.held: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if step % 200 == 0 and step not in self.tensors and step:
            gc.collect()
            self.tensors[step] = sum(isinstance(o, Tensor) for o in gc.get_objects())
            self.memory[step] = psutil.Process().memory_info().rss
            self.held = {n: p.detach().clone() for n, p in pl_module.named_parameters()}


def fit(directory: str, sdp: dict[str, Any]) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        net = Noisy("conv", blocks=3)
    torch.manual_seed(rank)
    measure, strategy = Measure(), SDPStrategy(**sdp)
    save = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=200, save_top_k=-1)
    run = trainer(
        2, strategy, max_epochs=1, callbacks=[measure, save], enable_checkpointing=True, gradient_clip_val=0.5,
        accumulate_grad_batches=ACCUMULATE, val_check_interval=100 * ACCUMULATE,
    )  # fmt: skip
    data = batches("conv", rank, 50, torch.float32) * (STEPS * ACCUMULATE // 50)
    run.fit(net, loader(data), loader(batches("conv", 9, 2, torch.float32)))
    assert run.global_step == STEPS
    plan = strategy.plan
    assert plan is not None
    masks = {n: plan.element_mask(n, rank, p.shape) for n, p in net.named_parameters()}
    return {"tensors": measure.tensors, "memory": measure.memory, "held": measure.held, "masks": masks,
            "full": dict(net.state_dict())}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("sdp", [BLOCK, {**NEURON, "masking": "backward"}])
def test_a_thousand_steps(pool, tmp_path: Path, sdp: dict[str, Any]) -> None:
    results = pool(2).run(fit, str(tmp_path), sdp, deadline=600)
    assert {path.name for path in tmp_path.iterdir()} == {f"step={step}.ckpt" for step in range(200, 1001, 200)}
    parameters = list(results[0]["masks"])
    for result in results:
        counts = [result["tensors"][step] for step in range(400, 1001, 200)]  # the first one is before the copies
        assert max(counts) - min(counts) <= 2, counts
        assert result["memory"][1000] - result["memory"][200] < 16 * 2**20
        # Under backward masking running statistics are each rank's own, as under DDP.
        names = parameters if "masking" in sdp else list(result["full"])
        assert same_state(*({name: r["full"][name] for name in names} for r in (result, results[0])))
        assert all(value.isfinite().all() for value in result["full"].values())
    for name, held in results[1]["held"].items():  # the first worker holds everything
        other = results[0]["held"][name]
        if "masking" not in sdp:
            other = other[results[1]["masks"][name]].view(held.shape)
        assert torch.equal(held, other), name
