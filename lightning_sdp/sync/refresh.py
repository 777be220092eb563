"""Backward masking: after a step, every rank gets from a holder what it does not hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdp.components import ParamSlice
from lightning_sdp.plan import MaskPlan
from lightning_sdp.sync.groups import HolderGroups
from lightning_sdp.sync.transfer import unpack_into

_Key = tuple[tuple[int, ...], int, torch.dtype]  # holders, source, dtype


class Refresh:
    """Broadcasts the held parameters of each component to all ranks.

    What has the same holders and the same source travels in one message per dtype.

    Args:
        parameters: All parameters of the full model, by name.
        plan: Who holds what, and who sends it.
        groups: Holder sets and their process groups.
    """

    def __init__(self, parameters: Mapping[str, Tensor], plan: MaskPlan, groups: HolderGroups) -> None:
        self._groups = groups
        self._parameters = parameters
        self._messages: dict[_Key, list[ParamSlice]] = {}
        for component in plan.components:
            holders = groups.component_holders[component.name]
            if holders == groups.world:
                continue
            source = groups.ranks_of([plan.sources[component.name]])[0]
            for part in component.slices:
                if part.name in parameters:
                    key = holders, source, parameters[part.name].dtype
                    self._messages.setdefault(key, []).append(part)

    @torch.no_grad()
    def run(self) -> None:
        """Refreshes, in place and complete when it returns; collective."""
        group, rank = self._groups.world_group, self._groups.rank
        sent: list[tuple[Any, Tensor, list[Tensor]]] = []
        for (holders, source, dtype), parts in self._messages.items():
            views = [self._view(part) for part in parts]
            if rank == source:
                flat = torch.cat([view.reshape(-1) for view in views])
            else:
                flat = torch.empty(sum(view.numel() for view in views), dtype=dtype, device=views[0].device)
            work = dist.broadcast(flat, source, group=group, async_op=True)
            sent.append((work, flat, [] if rank in holders else views))
        unpack_into(sent)

    def _view(self, part: ParamSlice) -> Tensor:
        """A part of a parameter's data, which the user may have replaced."""
        full = self._parameters[part.name].detach()
        return full if part.dim is None else full.narrow(part.dim, part.start, part.stop - part.start)
