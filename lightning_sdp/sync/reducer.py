"""Bucketed gradient averaging over holders, overlapped with the backward pass.

[Note: How a gradient is averaged]
Each bucket is one flat tensor. When autograd has accumulated a parameter's gradient, it is scaled by 1/|H| into its
place in the bucket, and from then on ``param.grad`` is a view of that place: gradients are stored once. A complete
bucket is summed over its holders while the backward pass goes on (see [Note: One global order] in schedule.py).
Accumulated micro-batches land in the same place unscaled, and the last one scales and sends the sum.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdp._compat import after_backward
from lightning_sdp.layout import Part, TensorLayout
from lightning_sdp.sync.groups import HolderGroups
from lightning_sdp.sync.schedule import Bucket, Entry, schedule

_ALIGN = 16  # bytes; kernels that read several elements at once want aligned views
_LATE_AFTER = 4  # backward passes in a row without use, until a parameter moves to the last bucket


class _Slot:
    """One parameter's place in a bucket; without a view only its use flag."""

    __slots__ = ("bucket", "name", "param", "position", "ready", "unused", "view")

    def __init__(self, name: str, param: Tensor, view: Tensor | None, bucket: _FlatBucket, position: int) -> None:
        self.name, self.param, self.view, self.bucket, self.position = name, param, view, bucket, position
        self.ready = False
        self.unused = 0

    def take(self, grad: Tensor) -> None:
        """Puts the gradient of this backward pass, scaled, where it travels."""
        if self.view is None:
            if grad.requires_grad:  # after backward(create_graph=True)
                self.param.grad = grad.detach()
        elif grad is self.view:
            grad.mul_(self.bucket.scale)
        else:
            torch.mul(grad, self.bucket.scale, out=self.view)
            self.param.grad = self.view

    def keep(self, grad: Tensor) -> None:
        """Keeps the gradient of a backward pass that only accumulates."""
        if self.view is not None and grad is not self.view:
            self.view.copy_(grad)
            self.param.grad = self.view


class _PartSlot:
    """The place of a part of a parameter in a bucket: where it lies in the gradient and where in the bucket."""

    __slots__ = ("bucket", "name", "param", "ready", "shape", "start", "views")

    def __init__(
        self, name: str, param: Tensor, bucket: _PartBucket, start: int, views: Callable[[Tensor], Sequence[Tensor]]
    ) -> None:
        self.name, self.param, self.bucket, self.start, self.views = name, param, bucket, start, views
        self.ready = False

    def _pairs(self, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of the gradient, each with its place in the bucket."""
        at = self.start
        for piece in self.views(grad):
            yield piece, self.bucket.storage[at : at + piece.numel()].view(piece.shape)
            at += piece.numel()

    def take(self, grad: Tensor) -> None:
        for piece, place in self._pairs(grad):
            torch.mul(piece, self.bucket.scale, out=place)

    def keep(self, grad: Tensor) -> None:
        pass

    def give_back(self) -> None:
        """Copies the average into the gradient, if the parameter has one."""
        if self.param.grad is not None:
            for piece, place in self._pairs(self.param.grad):
                piece.copy_(place)


class _FlatBucket:
    """A bucket's storage: gradients, then one use flag per parameter."""

    def __init__(
        self, spec: Bucket, params: Mapping[str, Tensor], group: dist.ProcessGroup, reduce_dtype: torch.dtype | None
    ) -> None:
        self.group, self.scale, self._reduce_dtype = group, 1.0 / len(spec.holders), reduce_dtype
        align = max(_ALIGN // spec.dtype.itemsize, 1)
        offsets, size = [], 0
        for entry in spec.entries:
            offsets.append(size)
            size += -(-entry.numel // align) * align
        device = params[spec.entries[0].name].device
        self.flat = torch.zeros(size + len(spec.entries), dtype=spec.dtype, device=device)
        self.flags = self.flat[size:]
        self._sent = self.flat
        self.slots = []
        for position, (entry, offset) in enumerate(zip(spec.entries, offsets, strict=True)):
            param = params[entry.name]
            view = None if entry.numel < param.numel() else _view_like(self.flat, offset, param)
            self.slots.append(_Slot(entry.name, param, view, self, position))
        self.pending = 0
        self.active = False
        self.work: Any = None

    def launch(self) -> None:
        """Completes the bucket with what this rank did not use, and starts its sum over the holders."""
        self.flags.fill_(self.scale)
        for slot in self.slots:
            if slot.ready:
                continue
            if slot.param.grad is not None:
                slot.take(slot.param.grad)
                continue
            self.flags[slot.position] = 0
            if slot.view is not None:
                slot.view.zero_()
        self._sent = self.flat if self._reduce_dtype is None else self.flat.to(self._reduce_dtype)
        self.work = dist.all_reduce(self._sent, group=self.group, async_op=True)

    @torch.no_grad()
    def arrive(self) -> None:
        """Waits for the averages."""
        self.work.wait()
        if self._sent is not self.flat:
            self.flat.copy_(self._sent)
        self._sent = self.flat


class _PartBucket:
    """A bucket of parts of parameters; it has storage only while it travels."""

    def __init__(
        self,
        spec: Bucket,
        params: Mapping[str, Tensor],
        groups: HolderGroups,
        group: dist.ProcessGroup,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.group, self.scale = group, 1.0 / len(spec.holders)
        self._dtype, self._device = reduce_dtype or spec.dtype, params[spec.entries[0].name].device
        self._size = 0
        self._storage: Tensor | None = None
        self.slots = []
        for entry in spec.entries:
            layout = groups.layouts[entry.name]
            part = next(part for part in layout.parts if part.holders == spec.holders)
            views = partial(_views_of, layout, part, groups.rank)
            self.slots.append(_PartSlot(entry.name, params[entry.name], self, self._size, views))
            self._size += entry.numel
        self.pending = 0
        self.active = False
        self.work: Any = None

    @property
    def storage(self) -> Tensor:
        """The flat tensor that travels."""
        if self._storage is None:
            self._storage = torch.empty(self._size, dtype=self._dtype, device=self._device)
        return self._storage

    def launch(self) -> None:
        """Completes the bucket with what this rank did not use, and starts its sum over the holders."""
        for slot in self.slots:
            if not slot.ready:
                grad = slot.param.grad
                slot.take(torch.zeros_like(slot.param) if grad is None else grad)
        self.work = dist.all_reduce(self.storage, group=self.group, async_op=True)

    @torch.no_grad()
    def arrive(self) -> None:
        """Puts the averages into the gradients, and frees the storage."""
        self.work.wait()
        for slot in self.slots:
            slot.give_back()
        self.work = self._storage = None


def _views_of(layout: TensorLayout, part: Part, rank: int, grad: Tensor) -> Sequence[Tensor]:
    return layout.views(part, grad, rank)


def _view_like(flat: Tensor, offset: int, param: Tensor) -> Tensor:
    """A view of a flat tensor with a parameter's shape and, where that is dense, its memory layout."""
    dense = param.numel() == 0 or torch.empty_like(param, device="meta").stride() == param.stride()
    if dense:
        return flat.as_strided(param.size(), param.stride(), offset)
    return flat[offset : offset + param.numel()].view(param.size())


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
        self._slots: dict[str, list[_Slot | _PartSlot]] = {}
        self._buckets: list[_FlatBucket | _PartBucket] = []
        self._next = 0
        self._running = False
        self._tied = False
        self._build()

    @property
    def bucket_bytes(self) -> int:
        """Bytes that the buckets take on this rank all the time, flags included."""
        return sum(bucket.flat.nbytes for bucket in self._buckets if isinstance(bucket, _FlatBucket))

    def _build(self) -> None:
        """Lays out buckets for all parameters that are or once were trainable, keeping gradients that exist."""
        chosen = [n for n, p in self._shared.items() if p.requires_grad or n in self._slots]
        specs = schedule([e for name in chosen for e in self._entries(name)], self._cap_bytes, self._late.keys())
        unused = {name: slot.unused for name, own in self._slots.items() for slot in own if isinstance(slot, _Slot)}
        self._slots = {}
        self._buckets = []
        for spec in specs:
            group = self._groups.group(spec.holders)
            reduce_dtype = self._reduce_dtype if spec.dtype.is_floating_point else None
            if spec.cut:
                self._buckets.append(_PartBucket(spec, self._shared, self._groups, group, reduce_dtype))
            else:
                self._buckets.append(_FlatBucket(spec, self._shared, group, reduce_dtype))
            for slot in self._buckets[-1].slots:
                self._slots.setdefault(slot.name, []).append(slot)
                if isinstance(slot, _Slot):
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
        flat = [bucket for bucket in self._buckets if isinstance(bucket, _FlatBucket) and bucket.active]
        with self._groups.waiting.measured():
            for bucket in flat:
                bucket.arrive()
            for bucket in flat:
                self._settle_unused(bucket)
                bucket.work = None
            for parts in self._buckets:
                if isinstance(parts, _PartBucket) and parts.work is not None:
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
            if isinstance(bucket, _PartBucket) and bucket.work is not None:
                unused = any(slot.param.grad is None for slot in bucket.slots)
                if unused or not bucket.work.is_completed():
                    return
                bucket.arrive()

    def _settle_unused(self, bucket: _FlatBucket) -> None:
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
