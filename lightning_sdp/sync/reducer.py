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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdp._compat import after_backward
from lightning_sdp.sync.groups import HolderGroups
from lightning_sdp.sync.schedule import Bucket, Entry, schedule

_ALIGN = 16  # bytes; kernels that read several elements at once want aligned views
_LATE_AFTER = 4  # backward passes in a row without use, until a parameter moves to the last bucket


class _Slot:
    """One parameter's place in a bucket."""

    __slots__ = ("bucket", "name", "param", "position", "ready", "unused", "view")

    def __init__(self, name: str, param: Tensor, view: Tensor, bucket: _FlatBucket, position: int) -> None:
        self.name, self.param, self.view, self.bucket, self.position = name, param, view, bucket, position
        self.ready = False
        self.unused = 0


class _FlatBucket:
    """A bucket's storage: gradients, then one use flag per parameter."""

    def __init__(self, spec: Bucket, params: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        self.group, self.scale = group, 1.0 / len(spec.holders)
        align = max(_ALIGN // spec.dtype.itemsize, 1)
        offsets, size = [], 0
        for entry in spec.entries:
            offsets.append(size)
            size += -(-entry.numel // align) * align
        device = params[spec.entries[0].name].device
        self.flat = torch.zeros(size + len(spec.entries), dtype=spec.dtype, device=device)
        self.flags = self.flat[size:]
        self.slots = [
            _Slot(entry.name, params[entry.name], _view_like(self.flat, offset, params[entry.name]), self, i)
            for i, (entry, offset) in enumerate(zip(spec.entries, offsets, strict=True))
        ]
        self.pending = 0
        self.active = False
        self.work: Any = None

    def begin(self) -> None:
        """Prepares for a backward pass; a bucket whose parameters are all frozen takes no part in it."""
        self.pending = sum(slot.param.requires_grad for slot in self.slots)
        self.active = self.pending > 0
        self.work = None
        for slot in self.slots:
            slot.ready = False

    def launch(self) -> None:
        """Completes the bucket with what this rank did not use, and starts its sum over the holders."""
        self.flags.fill_(self.scale)
        for slot in self.slots:
            if slot.ready:
                continue
            if slot.param.grad is None:
                slot.view.zero_()
                self.flags[slot.position] = 0
            elif slot.param.grad is slot.view:
                slot.view.mul_(self.scale)
            else:
                torch.mul(slot.param.grad, self.scale, out=slot.view)
                slot.param.grad = slot.view
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)


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

    Attributes:
        enabled: Whether backward passes average; off while micro-batches accumulate.
    """

    def __init__(
        self, params: Mapping[str, Tensor], order: list[str], groups: HolderGroups, bucket_cap_mb: float = 25
    ) -> None:
        self._index = {name: i for i, name in enumerate(order)}
        self._shared = {n: p for n, p in params.items() if len(groups.holders(n)) > 1}
        self._groups = groups
        self._cap_bytes = int(bucket_cap_mb * 2**20)
        self._late: dict[str, None] = {}
        self._stale_layout = False
        self.enabled = True
        self._handles: dict[str, Any] = {}
        self._slots: dict[str, _Slot] = {}
        self._buckets: list[_FlatBucket] = []
        self._next = 0
        self._running = False
        self._tied = False
        self._build()

    @property
    def bucket_bytes(self) -> int:
        """Bytes that the buckets take on this rank, flags included."""
        return sum(bucket.flat.numel() * bucket.flat.element_size() for bucket in self._buckets)

    def _build(self) -> None:
        """Lays out buckets for all parameters that are or once were trainable, keeping gradients that exist."""
        chosen = [n for n, p in self._shared.items() if p.requires_grad or n in self._slots]
        entries = [
            Entry(n, self._index[n], self._shared[n].numel(), self._shared[n].dtype, self._groups.holders(n))
            for n in chosen
        ]
        plan = schedule(entries, self._cap_bytes, self._late.keys())
        buckets = [_FlatBucket(spec, self._shared, self._groups.group(spec.holders)) for spec in plan]
        slots = {slot.name: slot for bucket in buckets for slot in bucket.slots}
        for name, slot in slots.items():
            old = self._slots.get(name)
            if old is not None:
                slot.unused = old.unused
            if slot.param.grad is not None:
                with torch.no_grad():
                    slot.view.copy_(slot.param.grad)
                slot.param.grad = slot.view
            if name not in self._handles:
                hook = partial(self._on_gradient, name)
                self._handles[name] = slot.param.register_post_accumulate_grad_hook(hook)
        self._buckets, self._slots, self._stale_layout = buckets, slots, False

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
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
        for bucket in self._buckets:
            if bucket.active:
                self._settle_unused(bucket)
            bucket.work = None
        self._running = False

    def _begin(self) -> None:
        for bucket in self._buckets:
            bucket.begin()
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
        slot, grad = self._slots[name], param.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise RuntimeError(f"The gradient of {name!r} is sparse, which SDP cannot average: use sparse=False.")
        if not self.enabled:
            if grad is not slot.view:
                slot.view.copy_(grad)
                param.grad = slot.view
            return
        if not self._running:  # a backward pass that did not go through the strategy
            self._begin()
        self._tie_to_backward()
        if slot.ready:
            raise RuntimeError(
                f"The gradient of {name!r} arrived twice in one backward pass. A reentrant activation checkpoint "
                "around a module that is used twice does that: pass use_reentrant=False to it."
            )
        bucket = slot.bucket
        if grad is slot.view:
            grad.mul_(bucket.scale)
        else:
            torch.mul(grad, bucket.scale, out=slot.view)
            param.grad = slot.view
        slot.ready = True
        bucket.pending -= 1
        if bucket.pending == 0:
            self._launch()

    @torch.no_grad()
    def _launch(self, all_remaining: bool = False) -> None:
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.active:
                if bucket.pending > 0 and not all_remaining:
                    return
                bucket.launch()
            self._next += 1

    def _settle_unused(self, bucket: _FlatBucket) -> None:
        """Reads the flags of parameters that this rank did not use: the average, or None if nobody used them."""
        for slot in bucket.slots:
            if slot.param.grad is not None:
                slot.unused = 0
            elif bucket.flags[slot.position].item() > 0:
                slot.param.grad = slot.view
                slot.unused = 0
            elif slot.param.requires_grad:
                slot.unused += 1
                if slot.unused >= _LATE_AFTER and slot.name not in self._late:
                    self._late[slot.name] = None
                    self._stale_layout = True
