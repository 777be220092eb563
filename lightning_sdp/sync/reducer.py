"""Bucketed gradient averaging over holders, overlapped with the backward pass.

[Note: How a gradient is averaged]
Each bucket is one flat tensor. When autograd has accumulated a parameter's gradient, it is scaled by 1/|H| into its
place in the bucket, and from then on ``param.grad`` is a view of that place: gradients are stored once. A complete
bucket is summed over its holders while the backward pass goes on (see [Note: One global order] in schedule.py).
Accumulated micro-batches land in the same place unscaled, and the last one scales and sends the sum. Where gradients
are to travel in another dtype, a copy of the bucket in that dtype is summed and copied back.

[Note: None is not zero]
Behind a bucket's gradients stands one flag per parameter: whether this rank used it. The flags are summed with the
rest. A parameter that this rank did not use contributes zeros; if the summed flag says that another holder used it, its
gradient here is the average; if nobody did, it is None on all holders, and the optimizer leaves the parameter alone.

[Note: Parts of a parameter]
A parameter that is cut has parts with different holders, which cannot lie in one bucket; so its gradient is a tensor of
its own. Each part is scaled into a bucket of its holders and copied back after the sum, and such buckets exist only
while they travel; what has a single holder stays where it is. The parts of one parameter have one gradient, which is
None or is not: so its use flag is summed over all ranks, in the last bucket of the world.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_sdp._compat import after_backward
from lightning_sdp.sync.buckets import FlatBucket, PartBucket, PartSlot, Slot
from lightning_sdp.sync.groups import HolderGroups
from lightning_sdp.sync.schedule import Entry, schedule

_LATE_AFTER = 4  # backward passes in a row without use, until a parameter moves to the last bucket


class GradientReducer:
    """Averages gradients over the holders of each parameter during the backward pass.

    Args:
        params: The held parameters by their names in the full model.
        order: All parameter names of the full model, in registration order, the same on every rank.
        groups: Holder sets and their process groups.
        bucket_cap_mb: A bucket is closed at this size, in MiB.
        reduce_dtype: In which dtype gradients travel; default: each in its own.

    Attributes:
        enabled: Whether backward passes average; off while micro-batches accumulate.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        order: list[str],
        groups: HolderGroups,
        bucket_cap_mb: float = 25,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self._index = {name: i for i, name in enumerate(order)}
        self._shared = {n: p for n, p in params.items() if len(groups.holders(n)) > 1}
        self._groups = groups
        self._cap_bytes, self._reduce_dtype = int(bucket_cap_mb * 2**20), reduce_dtype
        self._late: dict[str, None] = {}
        self._stale_layout = False
        self.enabled = True
        self._handles: dict[str, Any] = {}
        self._slots: dict[str, list[Slot | PartSlot]] = {}
        self._buckets: list[FlatBucket | PartBucket] = []
        self._next = 0
        self._running = False
        self._tied = False
        self._build()

    @property
    def bucket_bytes(self) -> int:
        """Bytes that the buckets take on this rank all the time, flags included."""
        return sum(bucket.flat.nbytes for bucket in self._buckets if isinstance(bucket, FlatBucket))

    def _build(self) -> None:
        """Lays out buckets for all parameters that are or once were trainable, keeping gradients that exist."""
        chosen = [n for n, p in self._shared.items() if p.requires_grad or n in self._slots]
        specs = schedule([e for name in chosen for e in self._entries(name)], self._cap_bytes, self._late.keys())
        unused = {name: slot.unused for name, own in self._slots.items() for slot in own if isinstance(slot, Slot)}
        self._slots = {}
        self._buckets = []
        for spec in specs:
            group = self._groups.group(spec.holders)
            reduce_dtype = self._reduce_dtype if spec.dtype.is_floating_point else None
            if spec.cut:
                self._buckets.append(PartBucket(spec, self._shared, self._groups, group, reduce_dtype))
            else:
                self._buckets.append(FlatBucket(spec, self._shared, group, reduce_dtype))
            for slot in self._buckets[-1].slots:
                self._slots.setdefault(slot.name, []).append(slot)
                if isinstance(slot, Slot):
                    slot.unused = unused.get(slot.name, 0)
        for name, slots in self._slots.items():
            param = self._shared[name]
            for slot in slots:
                if param.grad is not None:
                    with torch.no_grad():
                        slot.keep(param.grad)
            if name not in self._handles:
                self._handles[name] = param.register_post_accumulate_grad_hook(partial(self._on_gradient, name))
        self._stale_layout = False

    def _entries(self, name: str) -> list[Entry]:
        """What of a parameter travels, and between whom."""
        param, index, world = self._shared[name], self._index[name], self._groups.world
        layout = self._groups.layouts.get(name)
        if layout is None:
            return [Entry(name, index, param.numel(), param.dtype, self._groups.holders(name))]
        entries = [Entry(name, index - len(self._index), 0, param.dtype, world)]  # the use flag, behind everything
        for part in layout.parts_of(self._groups.rank):
            if len(part.holders) > 1:
                numel = sum(view.numel() for view in layout.views(part, param, self._groups.rank))
                entries.append(Entry(name, index, numel, param.dtype, part.holders, cut=True))
        return entries

    def remove(self) -> None:
        """Takes the hooks off the parameters; gradients stay what they are."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._buckets, self._slots = [], {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes only accumulate for the duration of a block of code."""
        was_enabled, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = was_enabled

    def prepare(self, loss: Tensor) -> None:
        """Has to be called before a backward pass, on every rank.

        Args:
            loss: What the backward pass starts from. A hook on it ties the end of averaging to the end of the outermost
                backward pass, also where activation checkpoints run backward passes inside it.
        """
        self._running = False
        if self._stale_layout or any(p.requires_grad and n not in self._slots for n, p in self._shared.items()):
            self._build()
        if self.enabled:
            self._begin()
            if loss.requires_grad:
                loss.register_hook(self._tie_to_backward)

    def finish(self) -> None:
        """Launches what has not gone out, in order, and waits for everything; idempotent."""
        if not self._running:
            return
        self._launch(all_remaining=True)
        flat = [bucket for bucket in self._buckets if isinstance(bucket, FlatBucket) and bucket.active]
        with self._groups.waiting.measured():
            for bucket in flat:
                bucket.arrive()
            for bucket in flat:
                self._settle_unused(bucket)
                bucket.work = None
            for parts in self._buckets:
                if isinstance(parts, PartBucket) and parts.work is not None:
                    parts.arrive()
        self._running = False

    def _begin(self) -> None:
        """Prepares for a backward pass; a bucket whose parameters are all frozen takes no part in it."""
        for bucket in self._buckets:
            bucket.pending = sum(slot.param.requires_grad for slot in bucket.slots)
            bucket.active = bucket.pending > 0
            bucket.work = None
            for slot in bucket.slots:
                slot.ready = False
        self._next = 0
        self._running = True
        self._tied = False

    def _tie_to_backward(self, grad: Tensor | None = None) -> None:
        if self._running and not self._tied:
            self._tied = True
            after_backward(self.finish)

    def _on_gradient(self, name: str, param: Tensor) -> None:
        # Only backward(create_graph=True) leaves gradients on here. Entering no_grad for every parameter would take
        # longer than all the rest of this.
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._take(name, param)
        else:
            self._take(name, param)

    def _take(self, name: str, param: Tensor) -> None:
        """Puts a gradient that has arrived into its bucket, and launches what that completes."""
        slots, grad = self._slots[name], param.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise RuntimeError(f"The gradient of {name!r} is sparse, which SDP cannot average: use sparse=False.")
        if not self.enabled:
            for slot in slots:
                slot.keep(grad)
            return
        if not self._running:  # a backward pass that did not go through the strategy
            self._begin()
        self._tie_to_backward()
        if slots[0].ready:
            raise RuntimeError(
                f"The gradient of {name!r} arrived twice in one backward pass. A reentrant activation checkpoint "
                "around a module that is used twice does that: pass use_reentrant=False to it."
            )
        complete = False
        for slot in slots:
            slot.take(grad)
            slot.ready = True
            slot.bucket.pending -= 1
            complete |= slot.bucket.pending == 0
        if complete:
            self._launch()

    @torch.no_grad()
    def _launch(self, all_remaining: bool = False) -> None:
        self._receive_parts()
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.active:
                if bucket.pending > 0 and not all_remaining:
                    return
                bucket.launch()
            self._next += 1

    def _receive_parts(self) -> None:
        """Takes in parts that have been summed meanwhile, so that their buckets take no memory any more."""
        for bucket in self._buckets[: self._next]:
            if isinstance(bucket, PartBucket) and bucket.work is not None:
                unused = any(slot.param.grad is None for slot in bucket.slots)
                if unused or not bucket.work.is_completed():
                    return
                bucket.arrive()

    def _settle_unused(self, bucket: FlatBucket) -> None:
        """Reads the flags of parameters that this rank did not use: the average, or None if nobody used them."""
        for slot in bucket.slots:
            if slot.param.grad is not None:
                slot.unused = 0
            elif bucket.flags[slot.position].item() > 0:
                slot.param.grad = torch.zeros_like(slot.param) if slot.view is None else slot.view
                slot.unused = 0
            elif slot.param.requires_grad:
                slot.unused += 1
                if slot.unused >= _LATE_AFTER and slot.name not in self._late:
                    self._late[slot.name] = None
                    self._stale_layout = True
