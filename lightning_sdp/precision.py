"""Gradient clipping that agrees between ranks that hold different parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_sdp.sync.groups import HolderGroups


def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    owned: Set[int],
    group: dist.ProcessGroup,
    device: torch.device,
    norm_type: float = 2.0,
) -> Tensor:
    """Clips gradients by their norm over the full model; collective over the world.

    Every parameter is counted once, by the lowest rank that holds it, so that the norm is that of one process with the
    full model's averaged gradients, and all ranks scale by the same factor. Ranks without gradients have to call too.

    Args:
        parameters: This rank's parameters.
        max_norm: Norm to clip to.
        owned: ``id`` of the parameters that this rank counts.
        group: The process group of all ranks.
        device: Where the message travels.
        norm_type: p of the p-norm; may be ``inf``.

    Returns:
        The norm before clipping, equal on all ranks; NaN or infinite on all where any gradient is.
    """
    clipped = [p for p in parameters if p.grad is not None]
    counted = [p.grad for p in clipped if id(p) in owned and p.grad is not None]
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
    owned = {id(parameter) for name, parameter in held.items() if groups.holders(name)[0] == groups.rank}
    group, device = groups.world_group, groups.device
    assert group is not None

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        clip_grad_norm_(plugin.main_params(optimizer), clip_val, owned=owned, group=group, device=device)

    plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]


def clip_locally(plugin: Precision) -> None:
    """Gives a precision plugin its own clipping back."""
    plugin.__dict__.pop("clip_grad_by_norm", None)
