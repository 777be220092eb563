"""What tests run on every rank: one fit, and what it left behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch import Tensor

from lightning_sdp import MaskPlan, SDPFSDPStrategy, SDPReference, SDPStrategy
from tests.models import SHAPES, batches, loader, make

# The number of ranks: all three in the long run, one of them always.
WORLDS = [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "num_sanity_val_steps": 0,
}


class Held(Callback):
    """Copies what the rank holds after every training batch; the last copy counts."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.grads: dict[str, Tensor | None] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.weights = {n: p.detach().clone() for n, p in pl_module.named_parameters()}
        self.grads = {n: p.grad if p.grad is None else p.grad.clone() for n, p in pl_module.named_parameters()}


class Wire(Callback):
    """Calls a function with every tensor that a collective gets between two hooks.

    Args:
        name: Of the function in `torch.distributed`.
        see: Is called with the same arguments.
        first: The hook with which it begins.
        last: The hook with which it ends.
    """

    def __init__(self, name: str, see: Callable[..., Any], first: str, last: str) -> None:
        original = getattr(torch.distributed, name)

        def seen(*args: Any, **kwargs: Any) -> Any:
            see(*args)
            return original(*args, **kwargs)

        setattr(self, first, lambda *_: setattr(torch.distributed, name, seen))
        setattr(self, last, lambda *_: setattr(torch.distributed, name, original))


def make_strategy(given: dict[str, Any] | str, dtype: torch.dtype = torch.float64) -> Any:
    """A strategy by its name or by arguments: of SDPFSDPStrategy if ``sharded`` is among them, else of SDPStrategy.

    What shards leaves a model's dtype as it is; it would turn inputs into float32.
    """
    if isinstance(given, str):
        return given
    arguments = dict(given)
    if not arguments.pop("sharded", False):
        return SDPStrategy(**arguments)
    plugin = FSDPPrecision("32-true")
    plugin._desired_input_dtype = dtype
    return SDPFSDPStrategy(**{"precision_plugin": plugin, **arguments})


def full_weights(strategy: Any) -> dict[str, Tensor]:
    """A copy of the full model's state dict; of a model that stays sharded on rank 0, elsewhere nothing. Collective."""
    full = strategy.lightning_module_state_dict()
    if isinstance(strategy, SDPFSDPStrategy) and torch.distributed.get_rank() > 0:
        return {}
    return {name: value.clone() for name, value in full.items()}


def trainer(world: int, strategy: Any, **options: Any) -> Trainer:
    """A quiet trainer over ranks that exist already."""
    warnings.filterwarnings("ignore", module="lightning")
    return Trainer(**{**QUIET, "devices": world, "strategy": strategy, **options})


def fit(
    world: int, rank: int, sdp: dict[str, Any] | str, kind: str, steps: int, model: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Fits a model on this rank's batches.

    Returns:
        ``full``: the module's state dict afterwards; ``held``: weights that the rank held after the last step.
    """
    held = Held()
    net = make(kind, **model)
    dtype = next(net.parameters()).dtype
    callbacks = [held, *options.pop("callbacks", [])]
    run = trainer(world, make_strategy(sdp), max_epochs=1, callbacks=callbacks, **options)
    run.fit(net, loader(batches(kind, rank, steps * run.accumulate_grad_batches, dtype)))
    return {"full": {k: v.clone() for k, v in net.state_dict().items()}, "held": held.weights, "grads": held.grads}


def fit_rank(*args: Any, **options: Any) -> dict[str, Any]:
    """`fit` with world and rank taken from the pool's process group."""
    return fit(torch.distributed.get_world_size(), torch.distributed.get_rank(), *args, **options)


def plan_for(net: LightningModule, workers: int, sdp: dict[str, Any], example_inputs: Any = None) -> MaskPlan:
    """The plan that a strategy with these arguments builds."""
    names = ("granularity", "coverage", "components", "keep", "keep_ends", "on_unsliceable", "balance", "seed")
    settings = {name: value for name, value in sdp.items() if name in names}
    return MaskPlan.build(net, num_subnetworks=workers, example_inputs=example_inputs, **settings)


def reference(
    world: int, workers: int, sdp: dict[str, Any], kind: str, steps: int, model: dict[str, Any], **options: Any
) -> SDPReference:
    """The same run in one process."""
    net = make(kind, **model)
    accumulate = options.pop("accumulate_grad_batches", 1)
    ref = SDPReference(
        net,
        plan_for(net, workers, sdp, torch.zeros(2, *SHAPES[kind], dtype=torch.float64)),
        net.configure_optimizers(),
        ranks_per_worker=world // workers,
        accumulate_grad_batches=accumulate,
        **{k: v for k, v in sdp.items() if k in ("masking", "model_averaging_period", "average_optimizer_state")},
        **options,
    )
    dtype = next(net.parameters()).dtype
    data = [batches(kind, rank, steps * accumulate, dtype) for rank in range(world)]
    for step in range(steps):
        ref.step([own[step * accumulate : (step + 1) * accumulate] for own in data])
    latest = [own[-16:] for own in data]
    ref.install_buffers(latest)
    return ref
