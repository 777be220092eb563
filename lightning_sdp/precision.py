"""Gradient clipping and loss scaling that agree between ranks that hold different parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_sdp.sync.groups import HolderGroups


def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    owned: Callable[[Tensor], Sequence[Tensor]],
    group: dist.ProcessGroup,
    device: torch.device,
    norm_type: float = 2.0,
) -> Tensor:
    """Clips gradients by their norm over the full model; collective over the world.

    Every element is counted once, by the lowest rank that holds it, so that the norm is that of one process with the
    full model's averaged gradients, and all ranks scale by the same factor. Ranks without gradients have to call too.

    Args:
        parameters: This rank's parameters.
        max_norm: Norm to clip to.
        owned: Returns the views of a parameter's gradient that this rank counts.
        group: The process group of all ranks.
        device: Where the message travels.
        norm_type: p of the p-norm; may be ``inf``.

    Returns:
        The norm before clipping, equal on all ranks; NaN or infinite on all where any gradient is.
    """
    clipped = [p for p in parameters if p.grad is not None]
    counted = [view for p in clipped for view in owned(p)]
    local = get_total_norm(counted, norm_type) if counted else torch.zeros(())
    local = local.to(device, torch.float64)
    if norm_type == float("inf"):
        dist.all_reduce(local, dist.ReduceOp.MAX, group=group)
        total = local
    else:
        power = local**norm_type
        dist.all_reduce(power, group=group)
        total = power ** (1.0 / norm_type)
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in clipped) else torch.float32
    total = total.to(dtype)
    clip_grads_with_norm_(clipped, max_norm, total)
    return total


def clip_over_the_world(plugin: Precision, held: Mapping[str, Tensor], groups: HolderGroups) -> None:
    """Lets a precision plugin, whichever the user chose, clip by the norm over the full model.

    Args:
        plugin: The precision plugin; `clip_locally` undoes it.
        held: This rank's parameters by their names in the full model.
        groups: Holder sets and their process groups.
    """
    names = {id(parameter): name for name, parameter in held.items()}
    group, device, rank = groups.world_group, groups.device, groups.rank
    assert group is not None

    def owned(parameter: Tensor) -> Sequence[Tensor]:
        name, grad = names.get(id(parameter)), parameter.grad
        if name is None or grad is None:
            return []
        layout = groups.layouts.get(name)
        if layout is None:
            return [grad] if groups.holders(name)[0] == rank else []
        own = [part for part in layout.parts if part.holders[0] == rank]
        return [view for part in own for view in layout.views(part, grad, rank)]

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        clip_grad_norm_(plugin.main_params(optimizer), clip_val, owned=owned, group=group, device=device)

    plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]


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


def clip_locally(plugin: Precision) -> None:
    """Gives a precision plugin its own clipping back."""
    plugin.__dict__.pop("clip_grad_by_norm", None)
