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
    """A parameter to average: its place in the full model's registration order, its size and its holders."""

    name: str
    index: int
    numel: int
    dtype: torch.dtype
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients travel together: same holders, same dtype."""

    holders: tuple[int, ...]
    dtype: torch.dtype
    entries: tuple[Entry, ...]


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
    ordered = sorted(entries, key=lambda e: -e.index)
    punctual = _pack([e for e in ordered if e.name not in late], cap_bytes)
    return punctual + _pack([e for e in ordered if e.name in late], cap_bytes)


def _pack(entries: Sequence[Entry], cap_bytes: int) -> list[Bucket]:
    filling: dict[tuple[tuple[int, ...], torch.dtype], list[Entry]] = {}
    filled: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
    closed: list[list[Entry]] = []
    for entry in entries:
        key = (entry.holders, entry.dtype)
        filling.setdefault(key, []).append(entry)
        filled[key] = filled.get(key, 0) + entry.numel * entry.dtype.itemsize
        if filled[key] >= cap_bytes:
            closed.append(filling.pop(key))
            del filled[key]
    closed.extend(filling.values())
    closed.sort(key=lambda bucket: -bucket[-1].index)
    return [Bucket(bucket[0].holders, bucket[0].dtype, tuple(bucket)) for bucket in closed]
