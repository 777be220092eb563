"""Blocks whose activations are computed again in the backward pass, and compiled blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from lightning_sdp import SDPReference, SDPStrategy
from tests.distributed.runs import plan_for, trainer
from tests.models import SHAPES, Net, batches, loader, make

FORWARD = {"coverage": 0.5, "keep_ends": 0}
NEURON = {**FORWARD, "granularity": "neuron"}
BACKWARD = {"masking": "backward"}
MODEL = {"blocks": 4}
KIND = "mlp"


class Recomputing(Net):
    """Every block runs again in the backward pass.

    Args:
        how: ``"reentrant"`` or ``"not reentrant"``: by a function around the block; ``"wrapper"``: by a module; or
            ``"compiled"`` and ``"compiled whole"``: blocks, or the LightningModule, are compiled instead.
    """

    def __init__(self, how: str) -> None:
        super().__init__(KIND, **MODEL)  # type: ignore[arg-type]
        self.how = how

    def transform(self) -> None:
        for i, block in enumerate(self.blocks):
            if self.how == "wrapper":
                self.blocks[i] = checkpoint_wrapper(block)
            elif self.how == "compiled":
                block.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        if self.how in ("wrapper", "compiled", "compiled whole"):
            return super().forward(x)
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.how == "reentrant")  # type: ignore[assignment]
        return self.head(x)


def recomputing(how: str) -> Recomputing:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        net = Recomputing(how).double()
    net.transform()
    net.head.requires_grad_(False)  # so that the first gradients come from within a block
    net.example_input_array = torch.zeros(2, *SHAPES[KIND], dtype=torch.float64)
    return net


def fit(how: str, sdp: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = recomputing(how)
    run = trainer(world, SDPStrategy(**sdp), max_epochs=1, val_check_interval=4, **options)
    model: Any = torch.compile(net, backend="eager") if how == "compiled whole" else net
    run.fit(model, loader(batches(KIND, rank, 8)), loader(batches(KIND, 0, 1)))
    return dict(net.state_dict())


@pytest.mark.parametrize(
    ("how", "sdp"),
    [
        ("reentrant", FORWARD),
        ("not reentrant", NEURON),
        ("wrapper", FORWARD),
        ("reentrant", {**FORWARD, **BACKWARD}),
        ("not reentrant", {**NEURON, **BACKWARD}),
        ("compiled whole", FORWARD),
        pytest.param("compiled", FORWARD, marks=pytest.mark.slow),
        *[pytest.param("compiled", sdp, marks=pytest.mark.slow) for sdp in (NEURON, {**FORWARD, **BACKWARD})],
        *[pytest.param("wrapper", sdp, marks=pytest.mark.slow) for sdp in (NEURON, {**NEURON, **BACKWARD})],
        pytest.param("reentrant", NEURON, marks=pytest.mark.slow),
        pytest.param("reentrant", {**NEURON, **BACKWARD}, marks=pytest.mark.slow),
    ],
)
def test_weights_and_their_names_are_those_of_the_plain_model(pool, how: str, sdp: dict[str, Any]) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    results = pool(3).run(fit, how, sdp, options)
    net = make(KIND, **MODEL)
    net.head.requires_grad_(False)
    plan = plan_for(net, 3, sdp, torch.zeros(2, *SHAPES[KIND], dtype=torch.float64))
    masking = sdp.get("masking", "forward")
    ref = SDPReference(net, plan, net.configure_optimizers(), masking=masking, **options)
    data = [batches(KIND, rank, 8) for rank in range(3)]
    for step in range(4):
        ref.step([own[2 * step : 2 * step + 2] for own in data])
    expected = net.state_dict()
    for full in results:
        assert list(full) == list(expected)
        torch.testing.assert_close(full, dict(expected), rtol=1e-10, atol=1e-10)
