"""Periodic averaging: parameters are averaged over their holders every few steps, in place of gradients in each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_sdp.sync.groups import HolderGroups
from lightning_sdp.sync.schedule import Bucket, Entry, schedule
from lightning_sdp.sync.transfer import unpack_into


class PeriodicAveraging:
    """Counts the steps of each optimizer, and averages what it trains over the holders at the end of each period.

    Args:
        trained: This rank's parameters by their names in the full model; of cut ones its part.
        order: All parameter names of the full model, in registration order, the same on every rank.
        groups: Holder sets and their process groups.
        period: Optimizer steps between two averages.
        average_state: Whether floating-point optimizer state of a parameter's shape is averaged along.
        bucket_cap_mb: A message is closed at this size, in MiB.
    """

    def __init__(
        self,
        trained: Mapping[str, Tensor],
        order: Sequence[str],
        groups: HolderGroups,
        period: int,
        average_state: bool,
        bucket_cap_mb: float,
    ) -> None:
        self._trained, self._groups, self._period, self._average_state = trained, groups, period, average_state
        self._index = {name: i for i, name in enumerate(order)}
        self._name_of = {id(parameter): name for name, parameter in trained.items()}
        self._cap_bytes = int(bucket_cap_mb * 2**20)
        self._steps: dict[int, int] = {}
        self._own: dict[str, Tensor] = {}

    @property
    def is_at_end(self) -> bool:
        """Whether holders agree: no optimizer has taken a step since the last average."""
        return not any(self._steps.values())

    def after_step(self, optimizer: Optimizer) -> None:
        """Counts a step, and averages if it was the last one of a period; collective among ranks that step alike."""
        steps = (self._steps.get(id(optimizer), 0) + 1) % self._period
        self._steps[id(optimizer)] = steps
        if steps == 0:
            self._end_period(optimizer)

    def end_period(self, optimizers: Iterable[Optimizer]) -> None:
        """Averages early what optimizers trained since the last average; collective."""
        for optimizer in optimizers:
            if self._steps.pop(id(optimizer), 0):
                self._end_period(optimizer)

    def _end_period(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._average({self._name_of[id(p)]: p for p in parameters if id(p) in self._name_of})
        if self._average_state:
            self._average_states(optimizer, parameters)

    def _average_states(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Averages what any rank has state for; one without, because it did not use a parameter, counts with zero."""
        if self._groups.world_group is None:
            return
        parameters = [p for p in parameters if id(p) in self._name_of]
        own = {(key, self._name_of[id(p)]): s for p in parameters for key, s in _state_of(optimizer, p).items()}
        known: list[Any] = [None] * len(self._groups.world)
        dist.all_gather_object(known, list(own), group=self._groups.world_group)
        for key in sorted({key for entries in known for key, _ in entries}):
            anywhere = {name for entries in known for k, name in entries if k == key}
            mine = {self._name_of[id(p)]: p for p in parameters if self._name_of[id(p)] in anywhere}
            self._average({name: own.get((key, name), torch.zeros_like(p)) for name, p in mine.items()})

    def restart(self) -> None:
        """Begins a new period without an average: all weights have been replaced by equal ones."""
        self._steps.clear()
        self._own = {}

    @torch.no_grad()
    def install_mean(self) -> None:
        """Puts the holders' means in the parameters' place; collective."""
        self._own = {name: parameter.detach().clone() for name, parameter in self._trained.items()}
        self._average(self._trained)

    @torch.no_grad()
    def restore_own(self) -> None:
        """Puts the parameters of this rank back."""
        for name, value in self._own.items():
            self._trained[name].copy_(value)
        self._own = {}

    @torch.no_grad()
    def _average(self, tensors: Mapping[str, Tensor]) -> None:
        entries = [entry for name, tensor in tensors.items() for entry in self._entries(name, tensor)]
        sent: list[tuple[Any, Tensor, list[Tensor]]] = []
        for bucket in schedule(entries, self._cap_bytes):
            views = [view for entry in bucket.entries for view in self._views(entry, bucket, tensors[entry.name])]
            flat = torch.cat([view.reshape(-1) for view in views]).mul_(1.0 / len(bucket.holders))
            work = dist.all_reduce(flat, group=self._groups.group(bucket.holders), async_op=True)
            sent.append((work, flat, views))
        unpack_into(sent)

    def _entries(self, name: str, tensor: Tensor) -> Iterable[Entry]:
        layout, index = self._groups.layouts.get(name), self._index[name]
        if layout is None:
            holders = self._groups.holders(name)
            return [Entry(name, index, tensor.numel(), tensor.dtype, holders)] if len(holders) > 1 else []
        entries = []
        for part in layout.parts_of(self._groups.rank):
            if len(part.holders) > 1:
                numel = sum(view.numel() for view in layout.views(part, tensor, self._groups.rank))
                entries.append(Entry(name, index, numel, tensor.dtype, part.holders, cut=True))
        return entries

    def _views(self, entry: Entry, bucket: Bucket, tensor: Tensor) -> list[Tensor]:
        if not entry.cut:
            return [tensor.detach()]
        layout = self._groups.layouts[entry.name]
        part = next(part for part in layout.parts if part.holders == bucket.holders)
        return layout.views(part, tensor.detach(), self._groups.rank)


def _state_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The state of a parameter that has a floating-point value for each of its elements."""
    state = optimizer.state.get(parameter, {})
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape != ()
    }
