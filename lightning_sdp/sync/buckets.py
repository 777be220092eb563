"""Buckets: the flat tensors in which gradients travel, and the places of parameters in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdp.layout import Part, TensorLayout
from lightning_sdp.sync.groups import HolderGroups
from lightning_sdp.sync.schedule import Bucket

_ALIGN = 16  # bytes; kernels that read several elements at once want aligned views


class Slot:
    """One parameter's place in a bucket; without a view only its use flag."""

    __slots__ = ("bucket", "name", "param", "position", "ready", "unused", "view")

    def __init__(self, name: str, param: Tensor, view: Tensor | None, bucket: FlatBucket, position: int) -> None:
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


class PartSlot:
    """The place of a part of a parameter in a bucket: where it lies in the gradient and where in the bucket."""

    __slots__ = ("bucket", "name", "param", "ready", "shape", "start", "views")

    def __init__(
        self, name: str, param: Tensor, bucket: PartBucket, start: int, views: Callable[[Tensor], Sequence[Tensor]]
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
        """Puts the part of this backward pass's gradient, scaled, where it travels."""
        for piece, place in self._pairs(grad):
            torch.mul(piece, self.bucket.scale, out=place)

    def keep(self, grad: Tensor) -> None:
        """Nothing to do: a gradient of which parts travel stays where it is."""

    def give_back(self) -> None:
        """Copies the average into the gradient, if the parameter has one."""
        if self.param.grad is not None:
            for piece, place in self._pairs(self.param.grad):
                piece.copy_(place)


class FlatBucket:
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
            self.slots.append(Slot(entry.name, param, view, self, position))
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


class PartBucket:
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
            self.slots.append(PartSlot(entry.name, params[entry.name], self, self._size, views))
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
