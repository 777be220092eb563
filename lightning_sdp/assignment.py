"""Which workers hold which component: even loads, few distinct holder sets, a connected graph.

[Note: Arcs on a circle]
Each worker is an arc on a circle of circumference 1, as long as its coverage, and the arcs start at equal distances
(for unequal coverages, at distances in proportion to them). Where the arcs' 2N ends cut the circle, each of the at most
2N pieces is covered by one fixed set of workers; a component placed on a piece has these workers for holders. So there
are never more than 2N distinct sets; with one coverage C each has ⌊C·N⌋ or ⌈C·N⌉ members; neighbors overlap wherever
C·N > 1; and components placed in proportion to the pieces' lengths give every worker exactly its coverage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

_Score = tuple[int, float, float]
_SEARCH_LIMIT = 2_000_000  # worker loads looked at; keeps planning in seconds for a thousand workers


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
        """Number of groups of workers that no component connects."""
        parent = list(range(len(self.targets)))

        def root(worker: int) -> int:
            while parent[worker] != worker:
                worker = parent[worker] = parent[parent[worker]]
            return worker

        for piece in dict.fromkeys(self.choice):
            for worker in self.sets[piece][1:]:
                parent[root(worker)] = root(self.sets[piece][0])
        return sum(parent[w] == w for w in range(len(parent)))


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
