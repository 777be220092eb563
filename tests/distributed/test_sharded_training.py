"""sdp_fsdp: subnetworks sharded over their holders train as the reference does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch import Tensor

from lightning_sdp import SDPFSDPStrategy
from tests.distributed.runs import reference, trainer
from tests.models import batches, loader, make


def double() -> FSDPPrecision:
    """Lets a model of float64 stay what it is."""
    plugin = FSDPPrecision("32-true")
    plugin._desired_input_dtype = torch.float64
    return plugin


class Usage(Callback):
    """What the ranks hold after the last batch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.usage = trainer.strategy.usage()  # type: ignore[attr-defined]


def fit(sdp: dict[str, Any], kind: str, steps: int, model: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Fits a sharded model on this rank's batches.

    Returns:
        ``full``: on rank 0 the full model's state dict; ``optimizer``: there its optimizer's; ``usage``.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    usage = Usage()
    strategy = SDPFSDPStrategy(**sdp)
    run = trainer(
        world, strategy, max_epochs=1, callbacks=[usage, *options.pop("callbacks", [])], plugins=[double()], **options
    )
    net = make(kind, **model)
    run.fit(net, loader(batches(kind, rank, steps * run.accumulate_grad_batches)))
    full = strategy.lightning_module_state_dict()
    state = strategy.optimizer_state(strategy.optimizers[0])
    first = {"full": {k: v.clone() for k, v in full.items()}, "optimizer": state} if rank == 0 else {}
    return {**first, "usage": usage.usage}


def assert_close(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(result) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=0, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")


WORLDS = [(2, 2), (3, 3), (4, 4), (4, 2)]


@pytest.mark.parametrize(("world", "workers"), WORLDS)
@pytest.mark.parametrize("checkpointing", [None, "blocks"])
@pytest.mark.parametrize("coverage", [0.75, 0.5])
def test_twenty_steps_equal_the_reference(
    pool: Any, world: int, workers: int, coverage: float, checkpointing: str | None
) -> None:
    sdp = {"coverage": coverage, "num_subnetworks": workers, "keep_ends": 0}
    own = {**sdp, "activation_checkpointing_policy": checkpointing}
    model = {"blocks": 5}
    results = pool(world).run(fit, own, "mlp", 20, model)
    ref = reference(world, workers, sdp, "mlp", 20, model)
    assert_close(results[0]["full"], ref.module.state_dict())
