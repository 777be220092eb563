"""Makes sure that ranks agree, bit for bit, on what they hold in common.

[Note: Which buffers have to agree]
Before a forward, ranks get the buffers that they share from the lowest holder, as under DDP. A forward that changes a
buffer, as BatchNorm changes its statistics, does so from the data of its own rank, and the ranks differ until the next
one. Such a buffer changes on all of its holders. One that differs although some holder has what it had when ranks were
last compared was changed by something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdp.sync.groups import HolderGroups, Ranks

Piece = tuple[str, Ranks]  # name of a tensor, and ranks that hold a part of it together
Pieces = dict[Piece, list[Tensor]]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by bytes per element; int64 from eight on
_CHUNK = 2**22  # elements whose bits are mixed at a time, so that little memory is needed
_FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # odd: multiplying loses nothing
_LOW = 0xFFFFFFFF


class ConsistencyCheck:
    """Compares what ranks hold in common every few optimizer steps.

    Args:
        every_n_steps: After how many steps; at least 1.
    """

    def __init__(self, every_n_steps: int) -> None:
        self._every = every_n_steps
        self._agreed: int | None = None  # the step after which all agreed
        self._sums: dict[Piece, int] = {}

    def after_step(
        self, step: int, held: Callable[[], tuple[Pieces, Pieces]] | None, group: dist.ProcessGroup | None
    ) -> None:
        """Compares, if it is time to; collective.

        Args:
            step: How many optimizer steps have been taken.
            held: Gives the parameters and the buffers that this rank holds together with others; ``None`` within a
                period of local steps, at whose end a comparison that was due is made up for.
            group: The process group of all ranks; ``None`` for one process.

        Raises:
            RuntimeError: On every rank, with the same message: holders disagree.
        """
        if self._agreed is None:
            self._agreed = step - 1
        if held is None or group is None or step // self._every == self._agreed // self._every:
            return
        message = _disagreement(self._table(*held()), group)
        if message is not None:
            raise RuntimeError(
                f"After step {step}, {message}. Something changed it on some ranks only, such as a callback or a "
                "module that does not do the same on every rank. Mend that, and go on from a checkpoint that is not "
                f"newer than step {self._agreed}, after which all ranks agreed."
            )
        self._agreed = step

    def _table(self, parameters: Pieces, buffers: Pieces) -> dict[Piece, tuple[int, bool]]:
        """Checksums, and whether others may differ from them if all of them say so."""
        before = self._sums
        sums = torch.stack([checksum(tensors) for tensors in [*parameters.values(), *buffers.values()]]).tolist()
        self._sums = dict(zip([*parameters, *buffers], sums, strict=True))
        return {piece: (own, piece in buffers and own != before.get(piece)) for piece, own in self._sums.items()}


def pieces_of(trained: Mapping[str, Tensor], groups: HolderGroups) -> Pieces:
    """What a rank has of parameters, by name, split by those with whom it shares it; without what is its own."""
    pieces: Pieces = {}
    for name, parameter in trained.items():
        layout = groups.layouts.get(name)
        if layout is None:
            pieces[name, groups.holders(name)] = [parameter]
        else:
            for part in layout.parts_of(groups.rank):
                pieces[name, part.holders] = layout.views(part, parameter, groups.rank)
    return {piece: tensors for piece, tensors in pieces.items() if len(piece[1]) > 1}


@torch.no_grad()
def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """A 64-bit number that depends on every bit of some tensors and on the positions of their elements.

    Whatever happens to a single element changes it for certain; other changes go unseen with a probability of 2⁻⁶⁴.

    Args:
        tensors: At least one tensor; all on one device.

    Returns:
        A scalar int64 tensor on that device.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    at = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        for bits in flat.view(_BITS.get(flat.element_size(), torch.int64)).split(_CHUNK):
            mixed = torch.arange(at, at + bits.numel(), device=total.device).mul_(_FACTORS[0]).bitwise_xor_(bits.long())
            for factor in _FACTORS[1:]:
                mixed.mul_(factor)
                mixed ^= (mixed >> 32) & _LOW
            total += mixed.sum()
            at += bits.numel()
    return total


def _disagreement(own: Mapping[Piece, tuple[int, bool]], group: dist.ProcessGroup) -> str | None:
    """Who disagrees on what; the same on all ranks."""
    tables: list[Any] = [None] * group.size()
    dist.all_gather_object(tables, own, group=group)
    found = []
    for name, ranks in dict.fromkeys(piece for table in tables for piece in table):
        entries = [tables[rank][name, ranks] for rank in ranks]
        sums = [own for own, _ in entries]
        if len(set(sums)) > 1 and not all(may_differ for _, may_differ in entries):
            usual, _ = Counter(sums).most_common(1)[0]
            odd = [rank for rank, own in zip(ranks, sums, strict=True) if own != usual]
            found.append((name, odd, [rank for rank in ranks if rank not in odd]))
    if not found:
        return None
    name, odd, others = found[0]
    more = f" ({len(found) - 1} more parts of the model differ as well)" if len(found) > 1 else ""
    differ = "differs" if len(odd) == 1 else "differ"
    return f"{_named(odd)} {differ} from {_named(others)} in {name!r}{more}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
