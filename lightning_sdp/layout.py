"""How one cut tensor is spread over its holders: which entries each has, and where they lie there. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_sdp.components.base import ParamSlice

Run = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """Entries of a tensor that have the same holders.

    Attributes:
        holders: Who holds them, ascending: workers in a plan, ranks in a run.
        runs: Ranges ``[start, stop)`` along the tensor's dimension in the full tensor, ascending.
    """

    holders: tuple[int, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class TensorLayout:
    """A tensor that is cut along one dimension.

    A holder stores its entries densely, in the order of the full tensor.

    Attributes:
        dim: The dimension.
        parts: Its entries by their holders; together they cover the dimension once.
    """

    dim: int
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Entries along the dimension in the full tensor."""
        return sum(stop - start for part in self.parts for start, stop in part.runs)

    def runs(self, holder: int) -> list[Run]:
        """What a holder has, as ranges in the full tensor, ascending and as few as possible."""
        return _merged(run for part in self.parts if holder in part.holders for run in part.runs)

    def is_complete(self, holder: int) -> bool:
        """Whether a holder has all entries."""
        return self.runs(holder) == [(0, self.size)]

    def parts_of(self, holder: int) -> list[Part]:
        """The parts that a holder has."""
        return [part for part in self.parts if holder in part.holders]

    def local_shape(self, shape: Sequence[int], holder: int) -> torch.Size:
        """Shape of what a holder stores of a tensor of the given full shape."""
        held = sum(stop - start for start, stop in self.runs(holder))
        return torch.Size([*shape[: self.dim], held, *shape[self.dim + 1 :]])

    def take(self, full: Tensor, holder: int) -> Tensor:
        """What a holder stores of a full tensor, as a new dense tensor."""
        runs = self.runs(holder) or [(0, 0)]
        return torch.cat([full.narrow(self.dim, start, stop - start) for start, stop in runs], self.dim)

    def put(self, local: Tensor, full: Tensor, holder: int) -> None:
        """Writes what a holder stores into its places in a full tensor."""
        at = 0
        for start, stop in self.runs(holder):
            full.narrow(self.dim, start, stop - start).copy_(local.narrow(self.dim, at, stop - start))
            at += stop - start

    def views(self, part: Part, tensor: Tensor, holder: int | None = None) -> list[Tensor]:
        """Views of a part in a tensor, run by run.

        Args:
            part: One of the parts.
            tensor: What ``holder`` stores; without a holder the full tensor.
            holder: Whose tensor it is, one that has the part.
        """
        if holder is None:
            return [tensor.narrow(self.dim, start, stop - start) for start, stop in part.runs]
        starts = _local_starts(self.runs(holder), part.runs)
        return [tensor.narrow(self.dim, at, stop - start) for at, (start, stop) in zip(starts, part.runs, strict=True)]

    def view(self, local: Tensor, part: ParamSlice, holder: int) -> Tensor:
        """A view of one slice in what a holder stores of the tensor."""
        return self.narrow(local, part.start, part.stop, holder)

    def narrow(self, local: Tensor, start: int, stop: int, holder: int) -> Tensor:
        """A view of the entries ``start … stop - 1`` of the full tensor, which a holder has, in what it stores."""
        (at,) = _local_starts(self.runs(holder), [(start, stop)])
        return local.narrow(self.dim, at, stop - start)

    def renamed(self, rename: Callable[[tuple[int, ...]], tuple[int, ...]]) -> TensorLayout:
        """The same layout with other names for the holders: ranks for workers."""
        return TensorLayout(self.dim, tuple(Part(rename(part.holders), part.runs) for part in self.parts))


def make_layout(dim: int, runs: Iterable[tuple[Run, tuple[int, ...]]]) -> TensorLayout:
    """Builds a layout from ranges and their holders.

    Args:
        dim: The dimension that is cut.
        runs: Ranges, disjoint, in any order, each with its holders.

    Returns:
        The layout, with the parts in the order of their first entries.
    """
    by_holders: dict[tuple[int, ...], list[Run]] = {}
    for run, holders in sorted(runs):
        by_holders.setdefault(holders, []).append(run)
    return TensorLayout(dim, tuple(Part(holders, tuple(_merged(own))) for holders, own in by_holders.items()))


def _merged(runs: Iterable[Run]) -> list[Run]:
    merged: list[Run] = []
    for start, stop in sorted(runs):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def _local_starts(held: Sequence[Run], wanted: Sequence[Run]) -> list[int]:
    """Where ranges of the full tensor begin in a tensor that stores only ``held`` ones; both ascending."""
    starts, at, index = [], 0, 0
    for start, _ in wanted:
        while not held[index][0] <= start < held[index][1]:
            at += held[index][1] - held[index][0]
            index += 1
        starts.append(at + start - held[index][0])
    return starts
