"""The algebra of factored dimensions.

[Note: Factors]
A dimension of a tensor is a tuple of *factors*, outermost first: the 96 output features of a fused projection of
queries, keys and values may be ``(3, 4, 8)``, and the 4 heads among them are the same factor as the 4 heads along the
input of the projection that follows. A factor is one set of units throughout the model. Operations tell

- that two dimensions run over the same units (`unify`),
- that a dimension consists of several (`take`, `reshape`), or
- that its units must stay together (`freeze`): they are mixed, renumbered, or seen from outside.

Factors only ever get finer and more equal, and a frozen factor stays frozen, so that the order in which a graph is
walked does not matter. Dimensions of size 1 have no factors: what is broadcast along them has nothing to do with the
units of the other operand. Where two dimensions cannot be made to agree, all their factors are frozen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

VOCABULARY = "numbered by the input of an embedding"


class Factor:
    """A set of units that lies along dimensions of many tensors.

    Attributes:
        size: Number of units.
        frozen: Why the units have to stay together; ``None`` if they do not.
        attended: Whether activations were contracted with each other for every unit on its own, as attention heads are.
    """

    __slots__ = ("_parts", "_same", "attended", "frozen", "size")

    def __init__(self, size: int, frozen: str | None = None, attended: bool = False) -> None:
        self.size = size
        self.frozen = frozen
        self.attended = attended
        self._same: Factor | None = None  # the factor that this one was found to be equal to
        self._parts: tuple[Factor, Factor] | None = None  # outer and inner, once split

    def __repr__(self) -> str:
        return f"Factor({self.size}{', frozen' if self.frozen else ''})"

    def find(self) -> Factor:
        """The representative of all factors known to be equal to this one."""
        root = self
        while root._same is not None:
            root = root._same
        current = self
        while current._same is not None:
            current._same, current = root, current._same
        return root

    def split(self, outer: int) -> tuple[Factor, Factor]:
        """Splits the units into ``outer`` times the rest."""
        inner = self.size // outer
        self._parts = Factor(outer, self.frozen, self.attended), Factor(inner, self.frozen, self.attended)
        return self._parts

    def merge(self, other: Factor) -> None:
        """Declares two unsplit factors of one size to be the same units."""
        if self is not other:
            other._same = self
            self.frozen = self.frozen or other.frozen
            self.attended = self.attended or other.attended


Dim = tuple[Factor, ...]
Dims = list[Dim]


def new_dim(size: int, frozen: str | None = None) -> Dim:
    """A dimension of units that nothing is known about."""
    return () if size == 1 else (Factor(size, frozen),)


def new_dims(shape: Iterable[int], frozen: str | None = None) -> Dims:
    """The dimensions of a tensor that nothing is known about."""
    return [new_dim(int(size), frozen) for size in shape]


def leaves(dim: Iterable[Factor]) -> Dim:
    """The dimension in the finest factors known by now."""
    found: list[Factor] = []
    stack = list(dim)[::-1]
    while stack:
        factor = stack.pop().find()
        if factor._parts is None:
            found.append(factor)
        else:
            stack.extend(factor._parts[::-1])
    return tuple(found)


def size_of(dim: Iterable[Factor]) -> int:
    """The size of a dimension."""
    return math.prod(factor.size for factor in dim)


def freeze(dims: Iterable[Iterable[Factor]], reason: str) -> None:
    """Keeps the units of some dimensions together; the first reason given for a factor stands."""
    for dim in dims:
        for factor in leaves(dim):
            factor.frozen = factor.frozen or reason


def unify(first: Dim, second: Dim) -> None:
    """Declares that two dimensions run over the same units, splitting factors as needed; freezes both if it fails."""
    left, right = list(leaves(first)), list(leaves(second))
    while left and right:
        a, b = left.pop().find(), right.pop().find()
        if a._parts or b._parts:  # split in a previous round, where a factor occurs twice
            left.extend(leaves([a]))
            right.extend(leaves([b]))
        elif a.size == b.size:
            a.merge(b)
        elif a.size % b.size == 0:
            left.extend(a.split(a.size // b.size))
            right.append(b)
        elif b.size % a.size == 0:
            right.extend(b.split(b.size // a.size))
            left.append(a)
        else:
            left.append(a)
            right.append(b)
            break
    freeze([left, right], "its sizes do not fit together")


def take(dim: Dim, count: int) -> tuple[Dim, Dim] | None:
    """Cuts the outermost ``count`` off a dimension, splitting a factor if need be.

    Args:
        dim: The dimension.
        count: Product of the factors to cut off.

    Returns:
        The outer part and the rest, or ``None`` if no factor can be split so that it comes out even.
    """
    rest = list(leaves(dim))
    head: list[Factor] = []
    while count > 1:
        if not rest:
            return None
        factor = rest.pop(0)
        if count % factor.size == 0:
            head.append(factor)
            count //= factor.size
        elif factor.size % count == 0:
            outer, inner = factor.split(count)
            head.append(outer)
            rest.insert(0, inner)
            # Equal factors further on were split along with this one.
            head, rest, count = list(leaves(head)), list(leaves(rest)), 1
        else:
            return None
    return tuple(head), tuple(rest)


def reshape(dims: Sequence[Dim], before: Sequence[int], after: Sequence[int]) -> Dims:
    """Splits and merges dimensions as a view does.

    Runs of dimensions whose sizes have the same product are matched with each other; a run that cannot be factored is
    frozen, and the others are not touched by that.

    Args:
        dims: The dimensions.
        before: Their sizes.
        after: The new sizes.

    Returns:
        The new dimensions.
    """
    result: Dims = []
    position = 0
    while len(result) < len(after):
        start, old, new = len(result), 1, 1
        first, stop = position, start
        while True:
            if stop < len(after) and (stop == start or new < old):
                new *= after[stop]
                stop += 1
            elif position < len(dims) and old < new:
                old *= before[position]
                position += 1
            elif old == new:
                break
            else:
                raise ValueError(f"sizes {tuple(before)} cannot be viewed as {tuple(after)}")
        run: Dim | None = tuple(factor for dim in dims[first:position] for factor in dim)
        for size in after[start:stop]:
            cut = None if run is None else take(run, size)
            if cut is None:
                freeze(dims[first:position], "reshaped across its units")
                del result[start:]
                result += new_dims(after[start:stop], "reshaped across its units")
                break
            head, run = cut
            result.append(head)
    return result
