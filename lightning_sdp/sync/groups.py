"""Holder sets and their process groups."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_sdp.components import ParamSlice
from lightning_sdp.plan import MaskPlan
from lightning_sdp.sharding.units import Sharding
from lightning_sdp.sync.waiting import Waiting

Ranks = tuple[int, ...]


def destroy_all_groups() -> None:
    """Ends the threads of all process groups, while there is an interpreter; local.

    A thread of gloo that lets go of the last message's tensors needs the interpreter, and aborts the process when that
    is already being finalized.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # what is left of groups is part of reference cycles
    time.sleep(0.1)  # or in caches of DTensor: their threads get the interpreter now, if they need it


class HolderGroups:
    """One process group per distinct set of ranks that hold something together.

    The set of all ranks gets a world group of our own: the default group belongs to the Trainer's collectives, and ours
    must not come between them. A single holder needs no group. Every rank has to construct this object, with the same
    plan, since creating a group is collective.

    Args:
        plan: Who holds what.
        world_size: Number of ranks; a multiple of the plan's workers.
        rank: The calling rank.
        device: Where tensors live that go through these groups.
        timeout: Of every collective; ``None`` is the backend's default.
        previous: Groups of an earlier plan. Those that are still needed are taken over, the others are freed.
        sharding: How parameters are sharded over their holders, if they are.

    Attributes:
        world: All ranks.
        layouts: How tensors that some rank has only a part of are spread over the ranks, by tensor name.
        partial: What not every rank holds: ranks that hold the same slices of tensors, and these slices.
        world_group: The process group of all ranks.
        waiting: How long this rank waits for others in them.
    """

    def __init__(
        self,
        plan: MaskPlan,
        world_size: int,
        rank: int,
        device: torch.device,
        timeout: timedelta | None = None,
        previous: HolderGroups | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        self.rank, self.device, self.timeout = rank, device, timeout
        self.waiting: Waiting = Waiting(device) if previous is None else previous.waiting
        self.world: Ranks = tuple(range(world_size))
        self.ranks_per_worker = world_size // plan.num_subnetworks
        self._tensor_holders = {name: self.ranks_of(workers) for name, workers in plan.tensor_holders().items()}
        self.layouts = {name: layout.renamed(self.ranks_of) for name, layout in plan.layouts.items()}
        self.component_holders = {c.name: self.ranks_of(plan.holders(c.name)) for c in plan.components}
        slices = [(self.component_holders[c.name], c.slices) for c in plan.components]
        if sharding is not None:
            self.layouts |= sharding.layouts
            unsharded = [(ranks, tuple(p for p in own if p.name not in sharding.layouts)) for ranks, own in slices]
            slices = [*sharding.slices(), *((ranks, own) for ranks, own in unsharded if own)]
        self.partial: list[tuple[Ranks, tuple[ParamSlice, ...]]] = [s for s in slices if s[0] != self.world]
        distinct = dict.fromkeys(self.component_holders.values())
        cap = max(2 * plan.num_subnetworks, 16)
        if len(distinct) > cap:
            warnings.warn(
                f"The plan has {len(distinct)} distinct holder sets, each with a communicator of its own; on GPUs each "
                f"takes memory. Plans that lightning_sdp builds stay at {cap} or fewer.",
                stacklevel=2,
            )
        self._groups: dict[Ranks, dist.ProcessGroup] = {}
        known = {} if previous is None else previous._groups
        meshes = () if sharding is None else sharding.rank_sets
        for ranks in [self.world, *distinct, *meshes]:
            if ranks in known:
                self._groups[ranks] = known.pop(ranks)
            elif (len(ranks) > 1 or ranks in meshes) and ranks not in self._groups:
                group: Any = dist.new_group(list(ranks), timeout=timeout)  # a placeholder on ranks outside of it
                self._groups[ranks] = group
        if previous is not None:
            previous.destroy()
        self.world_group = self._groups.get(self.world) if len(self.world) > 1 else None

    def __len__(self) -> int:
        return len(self._groups)

    def ranks_of(self, workers: Iterable[int]) -> Ranks:
        """The ranks of some workers, ascending; the ranks of one worker are neighbors."""
        n = self.ranks_per_worker
        return tuple(worker * n + i for worker in workers for i in range(n))

    def holders(self, name: str) -> Ranks:
        """The ranks that hold a tensor of the full model, or a part of it."""
        return self._tensor_holders.get(name, self.world)

    def group(self, ranks: Ranks) -> dist.ProcessGroup:
        """The process group of a holder set that the calling rank belongs to."""
        return self._groups[ranks]

    def destroy(self) -> None:
        """Frees the groups; local, so that it is safe after a failure. What comes later uses the default group."""
        for ranks, group in self._groups.items():
            if self.rank in ranks and dist.is_initialized():
                dist.destroy_process_group(group)
        self._groups.clear()
        self.world_group = None
