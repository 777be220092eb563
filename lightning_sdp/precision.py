"""Gradient clipping and loss scaling that agree between ranks that hold different parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_sdp.sync.groups import HolderGroups


class WorldClipping:
    """Clips gradients by their norm over the full model, of which every rank has a part.

    Every element is counted once, by the lowest rank that holds it, so that the norm is that of one process with the
    full model's averaged gradients, and all ranks scale by the same factor.

    Args:
        module: The module that is trained.
        trained: What this rank trains of it, by name in the full model.
        groups: Holder sets and their process groups.
    """

    def __init__(self, module: nn.Module, trained: Mapping[str, Tensor], groups: HolderGroups) -> None:
        self._groups = groups
        self._names = {id(tensor): name for name, tensor in trained.items()}
        own = {id(parameter): name for name, parameter in module.named_parameters()}
        self._leaves = {key: trained[name] for key, name in own.items() if name in trained}

    def clip(
        self,
        parameters: Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """See `clip_grad_norm_`."""
        group, device = self._groups.world_group, self._groups.device
        trained = [self._leaves.get(id(p), p) for p in parameters]
        clipped = [p for p in trained if p.grad is not None]
        counted = [view for p in clipped for view in self._counted(p)]
        local = get_total_norm(counted, norm_type) if counted else torch.zeros(())
        local = local.to(device, torch.float64)
        is_largest = norm_type == float("inf")
        total = local if is_largest else local**norm_type
        if group is not None:
            dist.all_reduce(total, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=group)
        total = total if is_largest else total ** (1.0 / norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"The gradients' norm of order {norm_type} over the full model is {float(total)}, so they cannot be "
                "clipped. Pass error_if_nonfinite=False to scale them by it all the same."
            )
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in clipped) else torch.float32
        total = total.to(dtype)
        clip_grads_with_norm_(clipped, max_norm, total)
        return total

    def _counted(self, parameter: Tensor) -> Sequence[Tensor]:
        """The parts of a parameter's gradient that this rank counts."""
        name, grad, rank = self._names.get(id(parameter)), parameter.grad, self._groups.rank
        if name is None or grad is None:
            return []
        layout = self._groups.layouts.get(name)
        if layout is None:
            return [grad] if self._groups.holders(name)[0] == rank else []
        own = [part for part in layout.parts if part.holders[0] == rank]
        return [view for part in own for view in layout.views(part, grad, rank)]


_running: WorldClipping | None = None  # of the training that is under way in this process


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clips gradients by their norm over the full model: `torch.nn.utils.clip_grad_norm_` for training under SDP.

    Every element is counted once, however many processes hold it, and all processes scale by the same factor. For code
    that clips by itself; ``Trainer(gradient_clip_val=...)`` and ``self.clip_gradients(...)`` do the same. Collective:
    all processes have to call it, with the same parameters of the full model as far as they have them. Where every
    process has whole gradients of its own, and outside of training under SDP, it is torch's function.

    Args:
        parameters: A parameter or several; those without a gradient do not count.
        max_norm: Norm to clip to.
        norm_type: p of the p-norm; may be ``inf``.
        error_if_nonfinite: Whether a norm that is NaN or infinite is an error.

    Returns:
        The norm before clipping, a scalar, equal on all processes; NaN or infinite on all where any gradient is.

    Raises:
        RuntimeError: On every process: the norm is not finite, and that is an error.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    clip = torch.nn.utils.clip_grad_norm_ if _running is None else _running.clip
    return clip(given, max_norm, norm_type, error_if_nonfinite)


def clip_over_the_world(plugin: Precision, clipping: WorldClipping) -> None:
    """Lets a precision plugin, whichever the user chose, and `clip_grad_norm_` clip by the norm over the full model.

    Args:
        plugin: The precision plugin; `clip_locally` undoes it.
        clipping: Knows what this rank counts.
    """
    global _running
    _running = clipping

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        clipping.clip(plugin.main_params(optimizer), clip_val)

    plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]


def clip_locally(plugin: Precision) -> None:
    """Gives a precision plugin and `clip_grad_norm_` torch's own clipping back."""
    global _running
    _running = None
    plugin.__dict__.pop("clip_grad_by_norm", None)


class WorldGradScaler(ShardedGradScaler):
    """A gradient scaler that skips a step on all ranks if any gradient of any rank is infinite.

    Args:
        own: The scaler whose place it takes, and whose state it goes on with.
        group: The process group of all ranks.
    """

    def __init__(self, own: torch.amp.GradScaler, group: dist.ProcessGroup) -> None:
        super().__init__(own._device, process_group=group)
        self.own = own
        self.load_state_dict(own.state_dict())

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        """For optimizers that unscale in their own step, such as fused ones."""
        found = super()._check_inf_per_device(optimizer)
        for value in found.values():
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self.process_group)
        return found


def scale_over_the_world(plugin: Precision, groups: HolderGroups) -> None:
    """Lets a precision plugin that scales the loss skip steps on all ranks alike; `scale_locally` undoes it."""
    own = getattr(plugin, "scaler", None)
    if own is not None and own.is_enabled() and groups.world_group is not None:
        plugin.scaler = WorldGradScaler(own, groups.world_group)  # type: ignore[attr-defined]


def scale_locally(plugin: Precision) -> None:
    """Gives a precision plugin its own scaler back, in the state that was reached."""
    scaler = getattr(plugin, "scaler", None)
    if isinstance(scaler, WorldGradScaler):
        scaler.own.load_state_dict(scaler.state_dict())
        plugin.scaler = scaler.own  # type: ignore[attr-defined]
