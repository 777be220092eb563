"""The one global order of buckets. Pure: derived from names, sizes and holders alone.

[Note: One global order]
Two ranks that share two holder sets must start their collectives in the same order, or each waits for the other. So all
buckets of all ranks have a place in one total order, and each rank launches those that it takes part in in this order,
whatever order its gradients become ready in: a bucket goes out when it is complete *and* all its predecessors on that
rank have gone out; at the end of every backward pass the rest goes out, in order. Any two ranks then agree on the order
of what they share, and no cycle of waiting can arise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Entry:
    """A parameter to average, or the part of one that has the same holders.

    Attributes:
        name: The parameter's name in the full model.
        index: Its place in the full model's registration order.
        numel: Number of elements; 0 for what only has a use flag to send.
        dtype: Of the gradient.
        holders: The ranks that average it, ascending.
        cut: Whether it is a part, which travels in buckets of its own kind.
    """

    name: str
    index: int
    numel: int
    dtype: torch.dtype
    holders: tuple[int, ...]
    cut: bool = False

    @property
    def key(self) -> tuple[tuple[int, ...], str, bool]:
        """What the entries of one bucket have in common."""
        return self.holders, str(self.dtype), self.cut


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together: same holders, same dtype, and all of them parts or none."""

    holders: tuple[int, ...]
    dtype: torch.dtype
    entries: tuple[Entry, ...]
    cut: bool = False


def schedule(entries: Iterable[Entry], cap_bytes: int, late: Set[str] = frozenset()) -> list[Bucket]:
    """Packs parameters into buckets and puts these into the global order.

    Gradients become ready roughly in reverse registration order, so buckets are filled in that order and stand in the
    order in which they become complete. See the note above.

    Args:
        entries: The parameters, of any number of ranks.
        cap_bytes: A bucket is closed when it holds this many bytes.
        late: Names of parameters that went unused; their buckets come last, so that they hold nothing up.

    Returns:
        The buckets, in the order in which every rank launches those that it takes part in.
    """
    ordered = sorted(entries, key=lambda e: (-e.index, e.key))
    punctual = _pack([e for e in ordered if e.name not in late], cap_bytes)
    return punctual + _pack([e for e in ordered if e.name in late], cap_bytes)


def _pack(entries: Sequence[Entry], cap_bytes: int) -> list[Bucket]:
    filling: dict[tuple[tuple[int, ...], str, bool], list[Entry]] = {}
    filled: dict[tuple[tuple[int, ...], str, bool], int] = {}
    closed: list[list[Entry]] = []
    for entry in entries:
        filling.setdefault(entry.key, []).append(entry)
        filled[entry.key] = filled.get(entry.key, 0) + entry.numel * entry.dtype.itemsize
        if filled[entry.key] >= cap_bytes:
            closed.append(filling.pop(entry.key))
            del filled[entry.key]
    closed.extend(filling.values())
    # Parts of one parameter complete at the same time; their holders then decide, so that all ranks agree.
    closed.sort(key=lambda bucket: (-bucket[-1].index, bucket[-1].key))
    return [Bucket(own[0].holders, own[0].dtype, tuple(own), own[0].cut) for own in closed]
