"""Another plan: what ranks hold of a model's tensors moves from the old holders directly to the new ones.

[Note: Rounds]
In round s every rank sends to the rank s places after it and receives from the one s places before, in messages of a
bounded size: everybody sends and receives at the same time, nobody waits in a circle, and a rank needs memory for what
it will hold, and for two messages more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdp.components import ParamSlice
from lightning_sdp.plan import MaskPlan
from lightning_sdp.sync.groups import HolderGroups

_MESSAGE_BYTES = 25 * 2**20


@dataclass
class Held:
    """What a rank has of one tensor of the full model.

    Attributes:
        tensors: By any key: tensors that have an element for each one that the rank holds.
        facts: By any key: what a holder of any part has as a whole, in host memory; it has to be picklable.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


_Kind = tuple[torch.dtype, torch.Size]  # of what the sender has of a tensor
_Item = tuple[ParamSlice, str, torch.Size]  # the part of one of a tensor's values that travels, and its shape


class Exchange:
    """Moves what ranks hold under one plan to those who hold it under another.

    What a rank newly holds comes from the source that the old plan names, of several ranks of that worker from the one
    with the same place among them.

    Args:
        plan: The old plan; both have the same components.
        old: Who holds what under it.
        new: Who will hold what; its world group is used.
    """

    def __init__(self, plan: MaskPlan, old: HolderGroups, new: HolderGroups) -> None:
        self._old, self._new = old, new
        self._sends: dict[int, list[ParamSlice]] = {}
        self._gets: dict[int, list[ParamSlice]] = {}
        self._parts: dict[str, list[tuple[ParamSlice, bool, bool]]] = {}  # whether this rank held and will hold it
        rank, n = new.rank, old.ranks_per_worker
        for component in plan.components:
            before, after = old.component_holders[component.name], new.component_holders[component.name]
            for part in component.slices:
                self._parts.setdefault(part.name, []).append((part, rank in before, rank in after))
            for destination in after:
                if destination not in before:
                    source = plan.sources[component.name] * n + destination % n
                    if rank == source:
                        self._sends.setdefault(destination, []).extend(component.slices)
                    if rank == destination:
                        self._gets.setdefault(source, []).extend(component.slices)

    @property
    def names(self) -> list[str]:
        """The tensors that belong to components."""
        return list(self._parts)

    def had(self, name: str) -> bool:
        """Whether this rank held a tensor, or a part of it, under the old plan."""
        return any(before for _, before, _ in self._parts[name])

    @torch.no_grad()
    def run(self, own: dict[str, Held]) -> dict[str, Held]:
        """Moves everything; collective over the world.

        Args:
            own: What this rank holds under the old plan, by tensor name; emptied, so that memory is freed on the way.

        Returns:
            What it holds under the new plan, by tensor name; what stayed the same is the same tensor.
        """
        sent = dict.fromkeys(part.name for parts in self._sends.values() for part in parts)
        notes: list[Any] = [None] * len(self._new.world)
        mine = {n: ({k: (t.dtype, t.shape) for k, t in own[n].tensors.items()}, own[n].facts) for n in sent if n in own}
        if self._new.world_group is not None:
            dist.all_gather_object(notes, mine, group=self._new.world_group)
        received: dict[ParamSlice, dict[str, Tensor]] = {}
        for shift in range(1, len(self._new.world)):
            self._round(shift, own, notes, received)
        told: dict[str, Any] = {}
        for source, parts in self._gets.items():
            told |= {part.name: notes[source][part.name][1] for part in parts if part.name in notes[source]}
        held = {name: self._settle(name, own.pop(name, None), received, told.get(name)) for name in self._parts}
        return {name: entry for name, entry in held.items() if entry is not None}

    def _round(
        self,
        shift: int,
        own: Mapping[str, Held],
        notes: Sequence[Mapping[str, tuple[Mapping[str, _Kind], Any]]],
        received: dict[ParamSlice, dict[str, Tensor]],
    ) -> None:
        group, size, rank = self._new.world_group, len(self._new.world), self._new.rank
        to, source = (rank + shift) % size, (rank - shift) % size
        outgoing = _messages(self._sends.get(to, []), notes[rank])
        incoming = _messages(self._gets.get(source, []), notes[source])
        for out, into in zip_longest(outgoing, incoming):
            operations, arrivals = [], []
            for items in [] if out is None else out.values():
                flat = torch.cat([_view(own[p.name].tensors[key], p, self._old).reshape(-1) for p, key, _ in items])
                operations.append(dist.P2POp(dist.isend, flat, to, group=group))
            for dtype, items in () if into is None else into.items():
                flat = torch.empty(sum(shape.numel() for *_, shape in items), dtype=dtype, device=self._new.device)
                operations.append(dist.P2POp(dist.irecv, flat, source, group=group))
                arrivals.append((flat, items))
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            for flat, items in arrivals:
                pieces = flat.split([shape.numel() for *_, shape in items])
                for (part, key, shape), piece in zip(items, pieces, strict=True):
                    received.setdefault(part, {})[key] = piece.view(shape)

    def _settle(
        self, name: str, own: Held | None, received: dict[ParamSlice, dict[str, Tensor]], facts: Any
    ) -> Held | None:
        """Puts together what this rank had of a tensor and what it got; zero where the source had nothing to send."""
        parts = self._parts[name]
        pieces = {part: received.pop(part, {}) for part, before, after in parts if after and not before}
        if not any(after for *_, after in parts) or (own is None and facts is None):
            return None
        if own is not None and all(before == after for _, before, after in parts):
            return own
        had = {} if own is None else own.tensors
        settled = Held(facts=(facts or {}) | ({} if own is None else own.facts))
        for key in dict.fromkeys([*had, *(key for values in pieces.values() for key in values)]):
            some = had[key] if key in had else next(values[key] for values in pieces.values() if key in values)
            dim = parts[0][0].dim
            shape = list(some.shape)
            if dim is not None:
                shape[dim] = sum(part.stop - part.start for part, _, after in parts if after)
            local = torch.zeros(shape, dtype=some.dtype, device=some.device)
            for part, before, after in parts:
                if after and before and key in had:
                    _view(local, part, self._new).copy_(_view(had[key], part, self._old))
                elif after and not before and key in pieces[part]:
                    _view(local, part, self._new).copy_(pieces[part][key])
            settled.tensors[key] = local
        return settled


def _view(local: Tensor, part: ParamSlice, groups: HolderGroups) -> Tensor:
    """The part of a tensor of the full model in what this rank stores of it."""
    local, layout = local.detach(), groups.layouts.get(part.name)
    if part.dim is None:
        return local
    if layout is None:  # every rank has all of it
        return local.narrow(part.dim, part.start, part.stop - part.start)
    return layout.view(local, part, groups.rank)


def _messages(
    parts: Sequence[ParamSlice], notes: Mapping[str, tuple[Mapping[str, _Kind], Any]]
) -> Iterator[dict[torch.dtype, list[_Item]]]:
    """What travels between two ranks, in messages of a bounded size; the same on both of them."""
    message: dict[torch.dtype, list[_Item]] = {}
    size = 0
    for part in parts:
        for key, (dtype, whole) in notes.get(part.name, ({}, None))[0].items():
            shape = list(whole)
            if part.dim is not None:
                shape[part.dim] = part.stop - part.start
            message.setdefault(dtype, []).append((part, key, torch.Size(shape)))
            size += torch.Size(shape).numel() * dtype.itemsize
        if size >= _MESSAGE_BYTES:
            yield message
            message, size = {}, 0
    if message:
        yield message
