"""What a component is: a named part of the model that a worker may lack; and the groups that neurons come in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

KINDS = ("block", "neurons", "channels", "heads")


@dataclass(frozen=True)
class ParamSlice:
    """A part of one tensor of the full model.

    Attributes:
        name: Name of the parameter or buffer in the full model, e.g. ``"net.blocks.3.mlp.fc1.weight"``.
        dim: Dimension along which the slice is cut; ``None`` is the whole tensor.
        start: First index along ``dim``.
        stop: One past the last index along ``dim``.
    """

    name: str
    dim: int | None = None
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Component:
    """A maskable part of the model: what its non-holders lack.

    Attributes:
        name: Name of the component: for a block the name of its module, for a chunk of a group the group's name and
            the chunk's number, e.g. ``"net.blocks.3.mlp.hidden[2]"``.
        kind: ``"block"``: a residual block without its skip path; ``"neurons"``, ``"channels"`` or ``"heads"``: a chunk
            of such units.
        slices: The tensors, or parts of tensors, that belong to it; whole tensors in registration order.
        padded: Whether workers store their part only, but compute with the full tensor, zero elsewhere.
    """

    name: str
    kind: str
    slices: tuple[ParamSlice, ...]
    padded: bool = False

    @property
    def group(self) -> str:
        """Name of the group that a chunk belongs to."""
        return self.name.rpartition("[")[0]


@dataclass(frozen=True)
class Member:
    """How the units of a group lie along one dimension of a tensor.

    The entries ``start … start + prod(layout) - 1`` along ``dim`` are numbered row-major by the factors in ``layout``;
    the factor ``axis`` counts the units. A fused projection of queries, keys and values with h heads of width d is
    ``layout=(3, h, d), axis=1``. A tensor may be a member several times, for several ranges.

    Attributes:
        name: Name of the parameter or buffer in the full model.
        dim: The dimension.
        layout: Sizes of the factors, outermost first.
        axis: Which factor counts the units.
        start: First entry along ``dim``.
        reads: Whether the tensor consumes the units (the columns of the next layer) rather than producing or scaling
            them.
    """

    name: str
    dim: int
    layout: tuple[int, ...]
    axis: int = 0
    start: int = 0
    reads: bool = False

    def runs(self, first: int, last: int) -> list[tuple[int, int]]:
        """The ranges ``[start, stop)`` along ``dim`` of the units ``first … last - 1``, ascending."""
        inner = math.prod(self.layout[self.axis + 1 :])
        outer = math.prod(self.layout[: self.axis])
        block = self.layout[self.axis] * inner
        starts = [self.start + i * block for i in range(outer)]
        if first == 0 and last == self.layout[self.axis]:
            return [(starts[0], starts[-1] + block)]
        return [(begin + first * inner, begin + last * inner) for begin in starts]


@dataclass(frozen=True)
class Group:
    """Units that every member tensor has in common, so that they can only be cut together.

    Attributes:
        name: E.g. ``"net.blocks.3.mlp.hidden"``.
        kind: ``"neurons"``, ``"channels"`` or ``"heads"``.
        units: How many there are.
        members: The tensors that have them.
        owner: Name of the innermost module that contains all members; empty for the model itself.
        attributes: Names of integer attributes (``"net.blocks.3.attn.n_heads"``) that forwards read and that shrink in
            proportion to the units.
    """

    name: str
    kind: str
    units: int
    members: tuple[Member, ...]
    owner: str = ""
    attributes: tuple[str, ...] = ()

    def chunk(self, first: int, last: int) -> tuple[ParamSlice, ...]:
        """The slices that the units ``first … last - 1`` take up."""
        return tuple(
            ParamSlice(member.name, member.dim, start, stop)
            for member in self.members
            for start, stop in member.runs(first, last)
        )

    def chunks(self, count: int, padded: bool = False) -> list[Component]:
        """Cuts the group into chunks of whole units, as equal as they come.

        Args:
            count: How many chunks; fewer where there are fewer units.
            padded: How the chunks are stored, see `Component`.

        Returns:
            The chunks, in the order of their units.
        """
        return [
            Component(f"{self.name}[{i}]", self.kind, self.chunk(units.start, units.stop), padded)
            for i, units in enumerate(self.ranges(count))
        ]

    def ranges(self, count: int) -> list[range]:
        """The units of each chunk."""
        count = min(count, self.units)
        cuts = [i * self.units // count for i in range(count + 1)]
        return [range(first, last) for first, last in pairwise(cuts)]
