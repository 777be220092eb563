"""What a plan costs, in formulas. Pure."""

from __future__ import annotations

import torch
import torch.nn as nn

from lightning_sdp.components import Component
from lightning_sdp.plan import MaskPlan


def communication_bytes(
    plan: MaskPlan,
    module: nn.Module,
    *,
    ranks_per_worker: int = 1,
    masking: str = "forward",
    reduce_dtype: torch.dtype | None = None,
) -> tuple[int, ...]:
    """Bytes that each worker's ranks send per step to average gradients, and to refresh what they do not hold.

    A ring all-reduce over H holders sends ``2·(|H|−1)/|H|`` times its payload from every one of them; summed over the
    holder sets that a worker belongs to (the definition is ours). Gradients of trainable parameters count.
    Backward masking adds a broadcast of every component that not all hold to all W ranks: (W−1) times its size, which
    is counted in equal shares for all ranks, as they pass it on among themselves.

    Args:
        plan: Who holds what.
        module: The full model; parameters may be on the meta device.
        ranks_per_worker: Processes per worker.
        masking: ``"forward"`` or ``"backward"``.
        reduce_dtype: In which dtype gradients travel; default: each in its own.

    Returns:
        Bytes sent per step by one rank of each worker.
    """
    holders, layouts = plan.tensor_holders(), plan.layouts
    everyone = tuple(range(plan.num_subnetworks))
    payload: dict[tuple[int, ...], float] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        dtype = reduce_dtype if reduce_dtype and parameter.is_floating_point() else parameter.dtype
        bytes_ = parameter.numel() * dtype.itemsize
        shares = [(holders.get(name, everyone), 1.0)]
        if name in layouts:
            layout = layouts[name]
            shares = [(part.holders, sum(b - a for a, b in part.runs) / layout.size) for part in layout.parts]
        for workers, share in shares:
            payload[workers] = payload.get(workers, 0.0) + share * bytes_
    sent = [0.0] * plan.num_subnetworks
    if masking == "backward":
        world = plan.num_subnetworks * ranks_per_worker
        partial = [component for component in plan.components if plan.holders(component.name) != everyone]
        refreshed = sum(component_bytes(component, module) for component in partial)
        sent = [(world - 1) / world * refreshed] * plan.num_subnetworks
    for workers, size in payload.items():
        members = len(workers) * ranks_per_worker
        for worker in workers:
            sent[worker] += 2 * (members - 1) / members * size
    return tuple(round(total) for total in sent)


def component_bytes(component: Component, module: nn.Module) -> float:
    """Bytes of a component's parameters in the full model."""
    parameters = dict(module.named_parameters())
    total = 0.0
    for part in component.slices:
        if part.name in parameters:
            full = parameters[part.name]
            share = 1.0 if part.dim is None else (part.stop - part.start) / full.shape[part.dim]
            total += share * full.nbytes
    return total
