"""Runs the user's ``training_step`` outside of training, without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torchmetrics import Metric

from lightning_sdp._compat import BatchNorm, isolate_rng, metric_counters, train_dataloader
from lightning_sdp.components.calls import Call, recorded_calls


def record_training_calls(trainer: Trainer, module: LightningModule) -> Mapping[str, Call]:
    """Runs one training batch through the model as it stands, to learn how its modules are called; local.

    Args:
        trainer: The trainer, set up as far as the strategy's setup.
        module: The model, whole, on whatever device it is.

    Returns:
        The calls by module name; none where that fails, with a warning that says why.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    statistics = {buffer: buffer.clone() for buffer in module.buffers()}
    try:
        with protected(trainer, module), recorded_calls(module) as calls:
            batch, batch_idx, _ = next(iter(CombinedLoader(train_dataloader(trainer), "max_size_cycle")))
            module.train()
            run_training_step(trainer, module, batch, batch_idx, device)
        return calls
    except Exception as error:  # user code
        rank_zero_warn(
            f"No training batch could be run to learn how the model's modules are called "
            f"({type(error).__name__}: {error}). Name the blocks with `components`."
        )
        return {}
    finally:
        for buffer, value in statistics.items():
            buffer.copy_(value)


def run_training_step(
    trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, device: torch.device | None = None
) -> None:
    """Calls ``training_step`` with a batch as the dataloader gave it."""
    batch = trainer.strategy.batch_to_device(batch, device, dataloader_idx=0)
    args = (batch, batch_idx)
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    with trainer.precision_plugin.train_step_context():
        trainer.strategy.call_step("training_step", *args if takes_index else args[:1])  # type: ignore[attr-defined]


@contextmanager
def protected(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Runs ``training_step`` without a trace: no gradients, and everything that it may change comes back."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(isolate_rng())
        stack.enter_context(_state_restored(module))
        stack.enter_context(_silenced(trainer, module))
        yield


@contextmanager
def _state_restored(module: LightningModule) -> Iterator[None]:
    modes = {submodule: submodule.training for submodule in module.modules()}
    buffers = {b: b.clone() for m in module.modules() if not isinstance(m, BatchNorm) for b in m.buffers(recurse=False)}
    metrics = [m for m in module.modules() if isinstance(m, Metric)]
    states: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({k: _copied(v) for k, v in m.metric_state.items()}, metric_counters(m)) for m in metrics
    ]
    try:
        yield
    finally:
        for submodule, training in modes.items():
            submodule.training = training
        for buffer, value in buffers.items():
            buffer.copy_(value)
        for metric, (state, counters) in zip(metrics, states, strict=True):
            for key, value in state.items():
                setattr(metric, key, value)
            metric.__dict__.update(counters)


def _copied(state: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    return state.clone() if isinstance(state, Tensor) else list(state)


class _Inert:
    """Stands for an optimizer or scheduler: every method does nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _nothing

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _nothing(*_: Any, **__: Any) -> _Inert:
    return _Inert()


@contextmanager
def _silenced(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """``training_step`` neither logs nor optimizes, and believes that it trains."""
    patches: dict[str, Any] = {"log": _nothing, "log_dict": _nothing}
    if not module.automatic_optimization:
        for name in ("manual_backward", "clip_gradients", "toggle_optimizer", "untoggle_optimizer"):
            patches[name] = _nothing
        patches["optimizers"] = _inert_like(module.optimizers())
        patches["lr_schedulers"] = _inert_like(module.lr_schedulers())
    loggers, stage = trainer.loggers, trainer.state.stage
    module.__dict__.update(patches)
    trainer.loggers = [DummyLogger() for _ in loggers]
    trainer.training = True
    try:
        yield
    finally:
        for name in patches:
            module.__dict__.pop(name)
        trainer.loggers = loggers
        trainer.state.stage = stage


def _inert_like(value: Any) -> Callable[..., Any]:
    inert = [_Inert() for _ in value] if isinstance(value, (list, tuple)) else _Inert()
    return lambda *_, **__: inert
