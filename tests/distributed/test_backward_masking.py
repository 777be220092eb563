"""Backward masking: full forward, masked gradients, and weights that are equal everywhere after every step."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_sdp import SDPStrategy
from tests.distributed.runs import reference, trainer
from tests.models import batches, loader, make

BACKWARD = {"masking": "backward", "keep_ends": 0}
NEURON = {**BACKWARD, "granularity": "neuron"}


class Hashes(Callback):
    """A hash of all weights after every batch, and what the rank trains."""

    def __init__(self) -> None:
        self.hashes: list[str] = []
        self.trained = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        weights = b"".join(p.detach().numpy().tobytes() for p in pl_module.state_dict().values())
        self.hashes.append(hashlib.sha256(weights).hexdigest())
        groups = trainer.optimizers[0].param_groups
        states = trainer.optimizers[0].state
        parameters = [p for group in groups for p in group["params"]]
        tensors = [v for p in parameters for v in [p.grad, *states[p].values()] if v is not None and v.dim()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        self.trained = sum(storages.values())


def fit(sdp: dict[str, Any], kind: str, steps: int, model: dict[str, Any], **options: Any) -> dict[str, Any]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net, hashes = make(kind, **model), Hashes()
    strategy = SDPStrategy(**sdp)
    classes = [type(m) for m in net.modules()]
    flags = [p.requires_grad for p in net.parameters()]
    run = trainer(world, strategy, max_epochs=1, callbacks=[hashes], **options)
    run.fit(net, loader(batches(kind, rank, steps * run.accumulate_grad_batches)))
    assert [type(m) for m in net.modules()] == classes
    assert [p.requires_grad for p in net.parameters()] == flags
    plan = strategy.plan
    assert plan is not None and plan.sizes is not None and plan.shared_size is not None
    held = plan.shared_size + sum(
        size for c, size in zip(plan.components, plan.sizes, strict=True) if rank in plan.holders(c.name)
    )
    return {"full": dict(net.state_dict()), "hashes": hashes.hashes, "trained": hashes.trained, "held": held}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    ("kind", "sdp"), [("mlp", BACKWARD), ("mlp", NEURON), ("gqa", NEURON), ("conv", BACKWARD), ("conv", NEURON)]
)
def test_ten_steps_equal_the_reference(pool, kind: str, sdp: dict[str, Any], world: int) -> None:
    sdp = {**sdp, "coverage": 0.6}
    model = {"blocks": 3}
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    results = pool(world).run(fit, sdp, kind, 10, model, **options)
    expected = reference(world, world, sdp, kind, 10, model, **options).module.state_dict()
    for result in results:
        assert result["hashes"] == results[0]["hashes"] or kind == "conv"
        assert list(result["full"]) == list(expected)
        for name, value in expected.items():
            if "running" not in name and "tracked" not in name:
                torch.testing.assert_close(result["full"][name], value, rtol=1e-10, atol=1e-10, msg=name)
        # Gradients and AdamW's two states.
        assert abs(result["trained"] / (3 * 8 * result["held"]) - 1) < 0.02
