"""A tensor of a distributed checkpoint: its boxes, who has them and who writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lightning_sdp.layout import TensorLayout
from lightning_sdp.sync.groups import Ranks


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint, and what this rank has of it.

    Attributes:
        size: Its full shape.
        dtype: Its dtype.
        holders: The ranks that have it, if they have all of it.
        local: What this rank stores of it, if anything.
        layout: How it is spread over the ranks, if it is cut.
        lowest: Whether holders may differ, so that the lowest one's values count.
    """

    size: torch.Size
    dtype: torch.dtype
    holders: Ranks
    local: Tensor | None
    layout: TensorLayout | None = None
    lowest: bool = False

    @property
    def nbytes(self) -> int:
        """Its full size in bytes."""
        return self.size.numel() * self.dtype.itemsize

    def is_in(self, value: Tensor) -> bool:
        """Whether a value of a state dict is this tensor, or stands for it."""
        if value.shape != self.size or value.dtype != self.dtype:
            return False
        return value.is_meta or (self.local is not None and value.data_ptr() == self.local.data_ptr())

    def boxes(self) -> Iterator[tuple[ChunkStorageMetadata, Ranks]]:
        """Boxes that cover it once, each with the ranks that can write it."""
        last = 1 if self.lowest else None
        if self.layout is None:
            yield self._box(), self.holders[:last]
        else:
            for part in self.layout.parts:
                for start, stop in part.runs:
                    yield self._box(start, stop), part.holders[:last]

    def held(self, rank: int) -> list[ChunkStorageMetadata]:
        """What a rank stores, as few boxes."""
        if self.layout is None:
            return [self._box()]
        return [self._box(start, stop) for start, stop in self.layout.runs(rank)]

    def _box(self, start: int = 0, stop: int = 0) -> ChunkStorageMetadata:
        offsets, sizes = [0] * len(self.size), list(self.size)
        if self.layout is not None:
            offsets[self.layout.dim], sizes[self.layout.dim] = start, stop - start
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    def view(self, box: ChunkStorageMetadata, rank: int) -> Tensor:
        """A box in what this rank stores; zeros where a holder has nothing, as for state of an unused parameter."""
        if self.local is None:
            return torch.zeros(box.sizes, dtype=self.dtype)
        view = self.local.detach()
        for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            if self.layout is not None and dim == self.layout.dim:
                view = self.layout.narrow(view, start, start + size, rank)
            else:
                view = view.narrow(dim, start, size)
        return view


def share_out(boxes: Sequence[tuple[int, Ranks]], world_size: int) -> list[int]:
    """Chooses who writes what, such that ranks write about as much as one another.

    Args:
        boxes: The size of each box in bytes, and its holders.
        world_size: Number of ranks.

    Returns:
        One holder of each box.
    """
    written, writers = [0] * world_size, [0] * len(boxes)
    for i in sorted(range(len(boxes)), key=lambda i: (len(boxes[i][1]), -boxes[i][0], i)):
        size, holders = boxes[i]
        writers[i] = min(holders, key=lambda rank: (written[rank], rank))
        written[writers[i]] += size
    return writers


def split(box: ChunkStorageMetadata, nbytes: int, limit: float) -> Iterator[ChunkStorageMetadata]:
    """Cuts a box along its first dimension into pieces that are not much larger than a limit."""
    if nbytes <= limit or not box.sizes:
        yield box
        return
    (offset, *offsets), (rows, *sizes) = box.offsets, box.sizes
    step = max(1, int(limit * rows / nbytes))
    for start in range(0, rows, step):
        yield ChunkStorageMetadata(
            torch.Size([offset + start, *offsets]), torch.Size([min(step, rows - start), *sizes])
        )
