"""Every private name of torch and lightning that this package needs, and what has to be mended about public ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from lightning.fabric.utilities.optimizer import _optimizer_to_device as optimizer_to_device
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.fabric.utilities.types import _PATH as PathType
from lightning.pytorch import Trainer, callbacks
from lightning.pytorch.utilities.seed import isolate_rng as _isolate_rng
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.conv import _ConvNd as ConvNd

__all__ = [
    "AVERAGES",
    "MONITORED",
    "BatchNorm",
    "ConvNd",
    "NormBase",
    "PathType",
    "after_backward",
    "call_sharded",
    "initialize_shards",
    "is_compiled",
    "isolate_rng",
    "log_metrics",
    "metric_counters",
    "optimizer_to_device",
    "optimizers_to_device",
    "train_dataloader",
]

AVERAGES = tuple(  # callbacks that average weights; the second one came with lightning 2.6
    getattr(callbacks, name) for name in ("StochasticWeightAveraging", "WeightAveraging") if hasattr(callbacks, name)
)
MONITORED = "_monitor_candidates"  # the method of ModelCheckpoint that returns by what it decides
_METRIC_COUNTERS = ("_update_count", "_computed", "_forward_cache", "_is_synced", "_cache")


def after_backward(function: Any) -> None:
    """Calls a function when the backward pass that is under way has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Takes back what a block of code draws from the global random streams; Lightning's does not after an error."""
    error: BaseException | None = None
    with _isolate_rng(include_cuda):
        try:
            yield
        except BaseException as caught:
            error = caught
    if error is not None:
        raise error


def is_compiled(module: nn.Module) -> bool:
    """Whether a LightningModule, or a module in it, goes through torch.compile."""
    return getattr(module, "_compiler_ctx", None) is not None or any(
        "_orig_mod" in m._modules or getattr(m, "_compiled_call_impl", None) is not None for m in module.modules()
    )


def log_metrics(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Gives metrics to all loggers of a trainer, at the step at which `LightningModule.log` would; on all ranks."""
    trainer._logger_connector.log_metrics(metrics)  # type: ignore[arg-type]


def metric_counters(metric: nn.Module) -> dict[str, Any]:
    """What a torchmetrics metric remembers besides its states."""
    return {name: metric.__dict__[name] for name in _METRIC_COUNTERS if name in metric.__dict__}


def train_dataloader(trainer: Trainer) -> Any:
    """What the user gave a trainer as training data: one or several dataloaders."""
    source = trainer.fit_loop._data_source
    return source.dataloader()


def call_sharded(root: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of a module that FSDP2 has sharded as it would call the forward.

    The forward of the same module, called by the method, is part of that call: by itself it would end by giving the
    parameters away that the method and the backward pass still need.
    """
    state: Any = root._get_fsdp_state()  # type: ignore[operator]
    hooks: list[tuple[Any, int]] = [
        (root._forward_pre_hooks, state._pre_forward_hook_handle.id),
        (root._forward_hooks, state._post_forward_hook_handle.id),
    ]
    own = [registered[key] for registered, key in hooks]
    args, kwargs = state._pre_forward(root, args, kwargs)
    try:
        for registered, key in hooks:
            registered[key] = lambda *_: None
        output = getattr(root, name)(*args, **kwargs)
    finally:
        for (registered, key), hook in zip(hooks, own, strict=True):
            registered[key] = hook
    return state._post_forward(root, args, output)


def initialize_shards(root: nn.Module) -> None:
    """Does what FSDP2 would do in the first forward: it settles where the shards of all units within a module lie."""
    root._get_fsdp_state()._lazy_init()  # type: ignore[operator,union-attr]
