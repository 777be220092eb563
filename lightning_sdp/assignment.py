"""Which workers hold which component: even loads, few distinct holder sets, a connected graph.

[Note: Arcs on a circle]
Each worker is an arc on a circle of circumference 1, as long as its coverage, and the arcs start at equal distances
(for unequal coverages, at distances in proportion to them). Where the arcs' 2N ends cut the circle, each of the at most
2N pieces is covered by one fixed set of workers; a component placed on a piece has these workers for holders. So there
are never more than 2N distinct sets; with one coverage C each has ⌊C·N⌋ or ⌈C·N⌉ members; neighbors overlap wherever
C·N > 1; and components placed in proportion to the pieces' lengths give every worker exactly its coverage.
"""

from __future__ import annotations

import bisect
import hashlib
import warnings
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

_Score = tuple[int, float, float]
_SEARCH_LIMIT = 2_000_000  # worker loads looked at; keeps planning in seconds for a thousand workers
_REFINE_LIMIT = 100_000  # the same for chunks


def assign(costs: Sequence[float], coverage: Sequence[float], seed: int = 0) -> list[tuple[int, ...]]:
    """Chooses the holders of each component.

    In this order of precedence: every component has a holder, each worker's share of the cost comes close to its
    coverage, at most 2N distinct holder sets, a connected graph of workers where the coverage allows one, even loads.
    Deterministic: the same inputs give the same result on every machine.

    Args:
        costs: Cost of each component, positive, in the model's order.
        coverage: Share of the total cost that each worker should hold, in (0, 1]; they sum to at least 1.
        seed: Varies which workers neighbor each other.

    Returns:
        For each component its workers, ascending.
    """
    pieces = _pieces(coverage, seed)
    total = sum(costs)
    room = [float(length) * total for _, length in pieces]
    choice = [0] * len(costs)
    for component in sorted(range(len(costs)), key=lambda j: (-costs[j], j)):
        piece = max(range(len(pieces)), key=lambda i: (room[i], -i))
        choice[component] = piece
        room[piece] -= costs[component]
    sets = [workers for workers, _ in pieces]
    targets = [share * total for share in coverage]
    _improve(choice, list(costs), sets, targets)
    return [sets[piece] for piece in choice]


def _pieces(coverage: Sequence[float], seed: int) -> list[tuple[tuple[int, ...], Fraction]]:
    """The pieces of the circle: the workers that cover each and its length."""
    shares = [Fraction(share).limit_denominator(10**6) for share in coverage]
    order = sorted(range(len(shares)), key=lambda w: hashlib.sha256(f"{seed}:{w}".encode()).digest())
    total, position = sum(shares), Fraction(0)
    arcs: list[tuple[int, Fraction, Fraction]] = []
    for worker in order:
        arcs.append((worker, position, shares[worker]))
        position += shares[worker] / total
    cuts = sorted({Fraction(0)} | {point % 1 for _, start, length in arcs for point in (start, start + length)})
    pieces = []
    for start, stop in zip(cuts, [*cuts[1:], Fraction(1)], strict=True):
        middle = (start + stop) / 2
        workers = tuple(sorted(w for w, begin, length in arcs if (middle - begin) % 1 < length))
        pieces.append((workers, stop - start))
    return [(workers, length) for workers, length in pieces if workers]


class _Loads:
    """Worker loads of an assignment under change, and its score: smaller is better."""

    def __init__(
        self, choice: list[int], costs: list[float], sets: list[tuple[int, ...]], targets: list[float]
    ) -> None:
        self.choice, self.costs, self.sets, self.targets = choice, costs, sets, targets
        self.loads = [0.0] * len(targets)
        for component, piece in enumerate(choice):
            self._add(piece, costs[component])

    def _add(self, piece: int, cost: float) -> None:
        for worker in self.sets[piece]:
            self.loads[worker] += cost

    def move(self, component: int, piece: int) -> None:
        self._add(self.choice[component], -self.costs[component])
        self._add(piece, self.costs[component])
        self.choice[component] = piece

    def score(self) -> _Score:
        off = [abs(load / target - 1) for load, target in zip(self.loads, self.targets, strict=True)]
        return self._parts(), round(max(off), 9), round(sum(o * o for o in off), 9)

    def _parts(self) -> int:
        return _count_parts((self.sets[piece] for piece in dict.fromkeys(self.choice)), len(self.targets))


def _count_parts(sets: Iterable[tuple[int, ...]], workers: int) -> int:
    """Number of groups of workers that no common component connects."""
    parent = list(range(workers))

    def root(worker: int) -> int:
        while parent[worker] != worker:
            worker = parent[worker] = parent[parent[worker]]
        return worker

    for members in sets:
        for worker in members[1:]:
            parent[root(worker)] = root(members[0])
    return sum(parent[w] == w for w in range(workers))


def _improve(choice: list[int], costs: list[float], sets: list[tuple[int, ...]], targets: list[float]) -> None:
    """Moves and swaps components between pieces for as long as that improves the score."""
    loads = _Loads(choice, costs, sets, targets)
    best, budget = loads.score(), _SEARCH_LIMIT
    improved = True
    while improved and best[1:] != (0.0, 0.0) and budget > 0:
        improved = False
        for a in range(len(costs)):
            home = choice[a]
            for piece in range(len(sets)):
                if piece == choice[a] or budget <= 0:
                    continue
                loads.move(a, piece)
                best, improved, keep, budget = _judge(loads, best, improved, budget)
                if not keep:
                    loads.move(a, home)
                else:
                    home = piece
            for b in range(a + 1, len(costs)):
                left, right = choice[a], choice[b]
                if left == right or costs[a] == costs[b] or budget <= 0:
                    continue
                loads.move(a, right)
                loads.move(b, left)
                best, improved, keep, budget = _judge(loads, best, improved, budget)
                if not keep:
                    loads.move(a, left)
                    loads.move(b, right)


def _judge(loads: _Loads, best: _Score, improved: bool, budget: int) -> tuple[_Score, bool, bool, int]:
    score = loads.score()
    better = score < best
    return (score if better else best), improved or better, better, budget - 2 * len(loads.targets)


def assign_chunks(
    groups: Sequence[Sequence[float]], coverage: Sequence[float], seed: int = 0
) -> list[list[tuple[int, ...]]]:
    """Chooses the holders of the chunks of several groups.

    Every worker holds at least one chunk of each group: a coverage that is too low for that is raised to one chunk.
    Beyond that the order of precedence is that of `assign`. The k chunks of a group stand on the circle of the note
    above at equal distances, so that an arc of length C meets ⌊C·k⌋ or ⌈C·k⌉ of them, and from group to group they turn
    such that the workers' loads stay even.

    Args:
        groups: For each group the costs of its chunks, positive, in the model's order.
        coverage: Share of the total cost that each worker should hold, in (0, 1].
        seed: Varies which workers neighbor each other.

    Returns:
        For each group and chunk its workers, ascending.
    """
    loads = _ChunkLoads(coverage)
    chosen = []
    for number, costs in enumerate(groups):
        loads.total += sum(costs)
        shares = [max(share, 1 / len(costs)) for share in coverage]
        turns = _turns(_pieces(shares, seed), len(costs))
        options = [[turn[(chunk + number) % len(costs)] for chunk in range(len(costs))] for turn in turns]
        best = min(range(len(options)), key=lambda i: (loads.score_with(options[i], costs), i))
        loads.add(options[best], costs)
        chosen.append(options[best])
    _refine(chosen, groups, [workers for workers, _ in _pieces(coverage, seed)], loads)
    return chosen


class _ChunkLoads:
    """Worker loads while chunks are handed out; scores are smaller where better."""

    def __init__(self, coverage: Sequence[float]) -> None:
        self.coverage = coverage
        self.loads, self.total = [0.0] * len(coverage), 0.0
        self._sets: dict[tuple[int, ...], int] = {}
        # With few overlaps it depends on where they lie whether the workers are connected.
        self._sparse = sum(coverage) < 2

    def add(self, sets: Sequence[tuple[int, ...]], costs: Sequence[float], sign: int = 1) -> None:
        for workers, cost in zip(sets, costs, strict=True):
            self._sets[workers] = self._sets.get(workers, 0) + sign
            for worker in workers:
                self.loads[worker] += sign * cost

    def score_with(self, sets: Sequence[tuple[int, ...]], costs: Sequence[float]) -> _Score:
        self.add(sets, costs)
        off = [abs(load / (share * self.total) - 1) for load, share in zip(self.loads, self.coverage, strict=True)]
        used = [workers for workers, count in self._sets.items() if count]
        parts = _count_parts(used, len(self.coverage)) if self._sparse else 0
        self.add(sets, costs, sign=-1)
        return parts, round(max(off), 9), round(sum(o * o for o in off), 9)


def _refine(
    chosen: list[list[tuple[int, ...]]],
    groups: Sequence[Sequence[float]],
    sets: Sequence[tuple[int, ...]],
    loads: _ChunkLoads,
) -> None:
    """Moves single chunks to other holders where that improves the loads; matters where there are few groups."""
    if sum(len(costs) for costs in groups) * len(sets) * len(loads.coverage) > _REFINE_LIMIT:
        return
    for own, costs in zip(chosen, groups, strict=True):
        for chunk, cost in enumerate(costs):
            rest = {worker for other, workers in enumerate(own) if other != chunk for worker in workers}
            allowed = [own[chunk]] + [s for s in sets if len(rest.union(s)) == len(loads.coverage)]
            loads.add([own[chunk]], [cost], sign=-1)
            own[chunk] = allowed[min(range(len(allowed)), key=lambda i: (loads.score_with([allowed[i]], [cost]), i))]
            loads.add([own[chunk]], [cost])


def _turns(pieces: Sequence[tuple[tuple[int, ...], Fraction]], count: int) -> list[list[tuple[int, ...]]]:
    """The different ways in which ``count`` points at equal distances can stand on the pieces of the circle.

    Returns:
        For each way the workers at the points.
    """
    edges, position = [], Fraction(0)
    for _, length in pieces:
        edges.append(position)
        position += length
    spacing = Fraction(1, count)
    offsets = sorted({edge % spacing for edge in edges})
    middles = [(a + b) / 2 for a, b in zip(offsets, [*offsets[1:], spacing + offsets[0]], strict=True)]
    turns: dict[tuple[tuple[int, ...], ...], None] = {}
    for middle in middles:
        points = [(middle + i * spacing) % 1 for i in range(count)]
        turns[tuple(pieces[bisect.bisect_right(edges, point) - 1][0] for point in points)] = None
    return [list(turn) for turn in turns]


def check_coverage(coverage: float | Sequence[float], num_subnetworks: int) -> list[float]:
    """Validates a coverage and spells it out per worker.

    Raises:
        ValueError: A share is outside (0, 1], or a list does not have one share per worker or sums to less than one.
    """
    check_shares(coverage)
    single = isinstance(coverage, (int, float))
    shares = [coverage] * num_subnetworks if isinstance(coverage, (int, float)) else list(coverage)
    if len(shares) != num_subnetworks:
        raise ValueError(f"coverage={coverage!r} has {len(shares)} shares for {num_subnetworks} workers.")
    if sum(shares) < 1 - 1e-9:
        if not single:
            raise ValueError(f"coverage={coverage!r} sums to less than 1: some blocks would have no holder.")
        share = 1 / num_subnetworks
        warnings.warn(
            f"coverage={coverage} is less than one of {num_subnetworks} workers: using 1/{num_subnetworks}, so "
            "that every block has a holder.",
            stacklevel=2,
        )
        shares = [share] * num_subnetworks
    return [float(s) for s in shares]


def check_shares(coverage: float | Sequence[float]) -> None:
    """Validates a coverage as far as that goes without the number of workers.

    Raises:
        ValueError: A share is not a number in (0, 1].
    """
    shares: list[Any] = list(coverage) if isinstance(coverage, (list, tuple)) else [coverage]
    if not shares or not all(type(s) in (int, float) and 0 < s <= 1 for s in shares):
        raise ValueError(
            f"coverage={coverage!r} must lie in (0, 1]: the share of the maskable part that a worker holds."
        )
