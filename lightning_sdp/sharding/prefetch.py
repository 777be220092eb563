"""Watches in which order units run, and lets each rank gather them ahead where no rank can wait for another in vain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_sdp.sharding.order import Trace, collectives, common_order, find_cycle, prefetches
from lightning_sdp.sharding.units import Unit
from lightning_sdp.sync.groups import HolderGroups


class Prefetching:
    """Gathering ahead in the backward pass.

    Until `settle` nothing is gathered ahead. Also sees to it that gradients of a unit are reduced right after its
    backward pass on every rank, even on one where nothing before the unit is trained.

    Args:
        module: The sharded module.
        units: The units that this rank has.
    """

    def __init__(self, module: nn.Module, units: Sequence[Unit]) -> None:
        self._modules: dict[str, Any] = {unit.name: module.get_submodule(unit.name) for unit in units}
        self._trace = Trace()
        self._records = True
        self._handles: list[Any] = []
        for name, own in self._modules.items():
            own.set_modules_to_backward_prefetch([own])
            if name:
                enter = own.register_forward_pre_hook(self._entering(name), prepend=True, with_kwargs=True)
                leave = own.register_forward_hook(self._leaving(name))
                self._handles += [enter, leave]

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return None
            leaves, structure = tree_flatten((args, kwargs))
            inputs = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            if self._records:
                self._trace.events.append((name, True))
                if not inputs and name not in self._trace.late:
                    self._trace.late.append(name)
            if not inputs or any(leaves[i].requires_grad for i in inputs):
                return None
            for i in inputs:  # autograd then comes by at the unit's inputs, whatever is trained before it
                leaves[i] = leaves[i] + leaves[i].new_zeros((), requires_grad=True)
            return tree_unflatten(leaves, structure)

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(*_: Any) -> None:
            if self._records and torch.is_grad_enabled():
                self._trace.events.append((name, False))

        return leave

    def stop_recording(self) -> None:
        """Has to be called when the first forward pass has ended."""
        self._records = False

    def settle(self, groups: HolderGroups) -> None:
        """Chooses what is gathered ahead from now on, given what ranks did in the first step; collective.

        Raises:
            RuntimeError: On every rank: ranks may wait for one another in vain.
        """
        traces: list[Any] = [self._trace]
        if groups.world_group is not None:
            traces = [None] * len(groups.world)
            dist.all_gather_object(traces, self._trace, group=groups.world_group)
        if any(trace.repeats for trace in traces):
            return  # every rank gathers a unit when it is its turn
        order = common_order([trace.left for trace in traces])
        ahead = None if order is None else [prefetches(order, trace.left) for trace in traces]
        cycle = None if ahead is None else find_cycle(list(map(collectives, traces, ahead)))
        if order is None or cycle is not None:
            raise RuntimeError(
                "Processes run the model's blocks in different orders, so that they may wait for one another in vain"
                + ("" if cycle is None else f" ({cycle[0][1]!r} and {cycle[1][1]!r}, for example)")
                + ". A forward whose order depends on the data cannot be sharded: use strategy='sdp'."
            )
        held = self._trace.left
        for name, unit in prefetches([*order, ""], [*held, ""]).items():
            self._modules[name].set_modules_to_backward_prefetch([self._modules[unit]])
