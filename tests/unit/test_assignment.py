"""Which workers hold which component: holders, loads, sets and links."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdp import assignment
from lightning_sdp.assignment import assign, assign_chunks, check_coverage

Holders = Sequence[tuple[int, ...]]

thorough = settings(deadline=None, derandomize=True, max_examples=120)


def loads_of(holders: Holders, costs: Sequence[float], workers: int) -> list[float]:
    return [sum(cost for cost, held in zip(costs, holders, strict=True) if w in held) for w in range(workers)]


def islands(holders: Holders, workers: int) -> int:
    """Number of groups of workers that no component links."""
    group = list(range(workers))
    for held in holders:
        merged = {group[worker] for worker in held}
        group = [min(merged) if g in merged else g for g in group]
    return len(set(group))


def check_holders(holders: Holders, workers: int) -> None:
    for held in holders:
        assert held and list(held) == sorted(set(held))
        assert set(held) <= set(range(workers))
    assert len(set(holders)) <= 2 * workers


@st.composite
def uniform(draw: st.DrawFn) -> tuple[int, float]:
    """A number of workers and a coverage of which each component gets one holder at least."""
    workers = draw(st.integers(1, 16))
    return workers, draw(st.integers(math.ceil(1000 / workers), 1000)) / 1000


@thorough
@given(uniform(), st.integers(1, 40), st.integers(0, 99))
def test_like_components(size: tuple[int, float], count: int, seed: int) -> None:
    workers, coverage = size
    holders = assign([7.0] * count, [coverage] * workers, seed)
    check_holders(holders, workers)
    each = Fraction(coverage).limit_denominator(1000) * workers
    assert {len(held) for held in holders} <= {math.floor(each), math.ceil(each)}
    loads = loads_of(holders, [1.0] * count, workers)
    links = count * (each - 1)  # Holders beyond the first, which is what links workers.
    if links >= workers - 1 or each == 1:
        assert all(abs(load - coverage * count) < 1.5 for load in loads)
    if links >= 1.25 * (workers - 1):
        assert islands(holders, workers) == 1
    if each == 1:
        assert max(loads) - min(loads) <= 1 and islands(holders, workers) == workers


@thorough
@given(uniform(), st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(0, 99))
def test_unlike_components(size: tuple[int, float], costs: list[int], seed: int) -> None:
    workers, coverage = size
    holders = assign([float(cost) for cost in costs], [coverage] * workers, seed)
    check_holders(holders, workers)
    each = Fraction(coverage).limit_denominator(1000) * workers
    assert {len(held) for held in holders} <= {math.floor(each), math.ceil(each)}
    if len(costs) * (each - 1) >= 1.25 * (workers - 1):
        assert islands(holders, workers) == 1
        for load in loads_of(holders, costs, workers):
            assert abs(load - coverage * sum(costs)) <= 1.25 * max(costs)


@thorough
@given(st.lists(st.integers(50, 1000), min_size=1, max_size=12), st.integers(1, 40), st.integers(0, 99))
def test_coverage_of_each_worker(thousandths: list[int], count: int, seed: int) -> None:
    coverage = [share / 1000 for share in thousandths]
    total = sum(coverage)
    if total < 1:
        coverage = [share / total for share in coverage]
    holders = assign([1.0] * count, coverage, seed)
    check_holders(holders, len(coverage))
    if count * (total - 1) >= 2 * (len(coverage) - 1):
        for load, share in zip(loads_of(holders, [1.0] * count, len(coverage)), coverage, strict=True):
            assert abs(load - share * count) <= 2


@pytest.mark.parametrize(
    ("workers", "count", "coverage"),
    [
        (2, 64, 0.5),
        (3, 60, 0.5),
        (4, 48, 0.75),
        (5, 80, 0.4),
        (7, 64, 0.5),
        (8, 64, 0.375),
        (16, 64, 0.5),
        (3, 31, 1.0),
    ],
)
def test_many_like_components_are_shared_out_within_five_percent(workers: int, count: int, coverage: float) -> None:
    for seed in range(3):
        loads = loads_of(assign([1.0] * count, [coverage] * workers, seed), [1.0] * count, workers)
        assert max(loads) <= 1.05 * sum(loads) / workers
        assert all(abs(load / count - coverage) < 0.02 for load in loads)


@pytest.mark.parametrize(
    ("workers", "count", "coverage", "sizes"),
    [
        (4, 8, 0.5, [2] * 8),
        (4, 8, 0.25, [1] * 8),
        (4, 8, 0.375, [1, 1, 1, 1, 2, 2, 2, 2]),  # 1.5 holders on average
        (3, 4, 0.5, [1, 1, 2, 2]),
        (2, 3, 1.0, [2] * 3),
        (1, 5, 1.0, [1] * 5),
        (8, 2, 0.5, [4, 4]),
        (16, 1, 0.25, [4]),
    ],
)
def test_number_of_holders(workers: int, count: int, coverage: float, sizes: list[int]) -> None:
    assert sorted(len(held) for held in assign([1.0] * count, [coverage] * workers)) == sizes


@pytest.mark.parametrize("workers", [2, 3, 4, 6, 8])
def test_loads_are_equal_where_they_can_be(workers: int) -> None:
    for per_worker in range(1, workers + 1):
        holders = assign([1.0] * workers, [per_worker / workers] * workers)
        assert loads_of(holders, [1.0] * workers, workers) == [per_worker] * workers
        assert islands(holders, workers) == (workers if per_worker == 1 else 1)


def test_unequal_coverage_is_honored() -> None:
    coverage = [1.0, 0.5, 0.25, 0.25]
    holders = assign([1.0] * 32, coverage)
    assert loads_of(holders, [1.0] * 32, 4) == [32, 16, 8, 8]


def test_expensive_components_are_spread() -> None:
    costs = [100.0, 100.0, 1.0, 1.0, 1.0, 1.0]
    assert sorted(loads_of(assign(costs, [0.5, 0.5]), costs, 2)) == [102, 102]


def test_seed_changes_who_is_who_but_not_the_loads() -> None:
    plans = {tuple(assign([1.0] * 12, [0.5] * 6, seed)) for seed in range(6)}
    assert len(plans) > 1
    for holders in plans:
        assert loads_of(holders, [1.0] * 12, 6) == [6] * 6


CASES = [
    ([1.0] * 8, [0.5] * 4, 0),
    ([float(1 + i % 5) for i in range(23)], [0.3] * 7, 5),
    ([2.0] * 9, [0.9, 0.4, 0.2], 1),
]


CHUNK_CASES = [
    ([[3.0] * 4] * 5, [0.5] * 4, 0),
    ([[float(1 + i)] * (2 + i % 4) for i in range(7)], [0.4] * 5, 3),
    ([[2.0, 1.0, 2.0], [5.0] * 2], [0.9, 0.4, 0.2], 1),
]


@pytest.mark.parametrize("hash_seed", ["1", "77"])
def test_another_interpreter_decides_alike(hash_seed: str) -> None:
    code = (
        "import json, sys; from assignment import assign, assign_chunks; blocks, chunks = json.loads(sys.argv[1])\n"
        "print(([assign(*case) for case in blocks], [assign_chunks(*case) for case in chunks]))"
    )
    # The module is imported by itself, since the package imports torch and lightning.
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(assignment.__file__).parent)}
    command = [sys.executable, "-c", code, json.dumps([CASES, CHUNK_CASES])]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    blocks, chunks = ast.literal_eval(run.stdout)
    assert blocks == [assign(*case) for case in CASES]
    assert chunks == [assign_chunks(*case) for case in CHUNK_CASES]


def test_recorded_assignment() -> None:
    """Who fails this test changes the plan of every experiment that is started anew."""
    pairs = [(1, 3), (2, 3), (0, 2), (0, 1)]
    assert assign([1.0] * 8, [0.5] * 4, seed=0) == pairs * 2
    unequal = [(0, 1), (1, 2), (0,), (2,), (0, 2), (2,)]
    assert assign([5.0, 1.0, 1.0, 2.0, 2.0, 1.0], [0.7, 0.5, 0.5], seed=3) == unequal


# Chunks of groups

Groups = list[list[float]]
wide = settings(deadline=None, derandomize=True, max_examples=80)


def chunk_loads(chosen: Sequence[Holders], groups: Groups, workers: int) -> list[float]:
    own = [loads_of(holders, costs, workers) for holders, costs in zip(chosen, groups, strict=True)]
    return [sum(loads) for loads in zip(*own, strict=True)]


def check_chunks(chosen: Sequence[Holders], groups: Groups, workers: int) -> None:
    """No chunk is lost, and every worker can run every group."""
    assert [len(holders) for holders in chosen] == [len(costs) for costs in groups]
    for holders in chosen:
        for held in holders:
            assert held and list(held) == sorted(set(held)) and set(held) <= set(range(workers))
        assert set(range(workers)) == {worker for held in holders for worker in held}


@st.composite
def chunked(draw: st.DrawFn) -> tuple[int, Groups, float, int]:
    """Workers, groups of like chunks (no more of them than workers), a coverage and a seed."""
    workers = draw(st.integers(2, 12))
    sizes = draw(st.lists(st.tuples(st.integers(2, workers), st.integers(1, 50)), min_size=1, max_size=10))
    coverage = draw(st.integers(math.ceil(1000 / workers), 1000)) / 1000
    return workers, [[float(cost)] * count for count, cost in sizes], coverage, draw(st.integers(0, 99))


@wide
@given(chunked())
def test_chunks_of_any_groups(drawn: tuple[int, Groups, float, int]) -> None:
    workers, groups, coverage, seed = drawn
    chosen = assign_chunks(groups, [coverage] * workers, seed)
    check_chunks(chosen, groups, workers)
    assert chosen == assign_chunks(groups, [coverage] * workers, seed)
    total, loads = sum(map(sum, groups)), chunk_loads(chosen, groups, workers)
    if all(coverage >= 1 / len(costs) for costs in groups):
        assert len({held for holders in chosen for held in holders}) <= 2 * workers
        # An arc of length C meets ⌊C·k⌋ or ⌈C·k⌉ of k chunks, so that one group is off by less than a chunk; turned
        # against each other, groups do not add that up.
        assert all(abs(load - coverage * total) < 1.25 * max(map(max, groups)) for load in loads)
    raised = [max(coverage, 1 / len(costs)) for costs in groups]
    target = sum(share * sum(costs) for share, costs in zip(raised, groups, strict=True))
    assert all(abs(load - target) <= sum(costs[0] for costs in groups) for load in loads)
    if coverage == 1:
        assert all(held == tuple(range(workers)) for holders in chosen for held in holders)


@wide
@given(st.integers(2, 12), st.integers(8, 24), st.integers(1, 20), st.integers(0, 9))
def test_many_like_groups_are_shared_out_within_five_percent(
    workers: int, count: int, twentieths: int, seed: int
) -> None:
    coverage = max(twentieths / 20, 1 / workers)
    groups = [[3.0] * workers] * count
    chosen = assign_chunks(groups, [coverage] * workers, seed)
    check_chunks(chosen, groups, workers)
    loads = chunk_loads(chosen, groups, workers)
    assert max(loads) * workers <= 1.05 * sum(loads)
    assert all(abs(load / (3 * workers * count) - coverage) < 0.03 for load in loads)


@wide
@given(
    st.lists(st.integers(150, 1000), min_size=2, max_size=8),
    st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=8), min_size=1, max_size=6),
    st.integers(0, 9),
)
def test_chunks_where_each_worker_has_its_own_coverage(
    thousandths: list[int], costs: list[list[int]], seed: int
) -> None:
    coverage, workers = [share / 1000 for share in thousandths], len(thousandths)
    if sum(coverage) < 1:
        coverage = [share / sum(coverage) for share in coverage]
    groups = [[float(cost) for cost in own[:workers]] for own in costs]
    chosen = assign_chunks(groups, coverage, seed)
    check_chunks(chosen, groups, workers)


def test_coverage_of_each_worker_is_honored_over_groups() -> None:
    groups, coverage = [[1.0] * 8] * 8, [1.0, 0.5, 0.25, 0.25]
    loads = chunk_loads(assign_chunks(groups, coverage), groups, 4)
    assert loads[0] == 64
    assert all(abs(load / 64 - share) < 0.05 for load, share in zip(loads, coverage, strict=True))


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_full_coverage_gives_every_chunk_to_everyone(workers: int) -> None:
    everyone = tuple(range(workers))
    groups = [[1.0] * workers, [5.0, 1.0]]
    assert assign_chunks(groups, [1.0] * workers) == [[everyone] * len(costs) for costs in groups]


def test_coverage_below_one_chunk_is_raised_to_it() -> None:
    """Eight workers at a quarter, but a group of two chunks: everyone holds one of them, and no more."""
    chosen = assign_chunks([[1.0] * 2, [1.0] * 8], [0.25] * 8)
    assert [sum(worker in held for held in chosen[0]) for worker in range(8)] == [1] * 8
    assert [sum(worker in held for held in chosen[1]) for worker in range(8)] == [2] * 8
    with pytest.warns(UserWarning, match=r"coverage=0\.05 is less than one of 8 workers: using 1/8"):
        assert check_coverage(0.05, 8) == [0.125] * 8


def test_workers_are_linked_where_the_coverage_allows_it() -> None:
    for seed in range(5):
        groups = [[1.0] * 4] * 6
        assert islands([held for own in assign_chunks(groups, [0.375] * 4, seed) for held in own], 4) == 1
        disjoint = assign_chunks(groups, [0.25] * 4, seed)
        assert {len(held) for own in disjoint for held in own} == {1}


def test_seed_changes_who_holds_which_chunk_but_not_the_loads() -> None:
    groups = [[1.0] * 6] * 6
    plans = {tuple(map(tuple, assign_chunks(groups, [0.5] * 6, seed))) for seed in range(6)}
    assert len(plans) > 1
    assert all(chunk_loads(chosen, groups, 6) == [18] * 6 for chosen in plans)


def test_groups_turn_so_that_they_do_not_burden_the_same_workers() -> None:
    """At C·k = 2.5 some workers hold two chunks of a group and some three; the next group makes up for it."""
    groups = [[1.0] * 5] * 4
    chosen = assign_chunks(groups, [0.5] * 5)
    assert all(set(loads_of(own, groups[0], 5)) <= {2, 3} for own in chosen)
    assert chunk_loads(chosen, groups, 5) == [10] * 5


def test_recorded_assignment_of_chunks() -> None:
    """Who fails this test changes the plan of every experiment that is started anew."""
    assert assign_chunks([[1.0] * 4, [2.0] * 4, [1.0] * 2], [0.5] * 4, seed=0) == [
        [(1, 3), (2, 3), (0, 2), (0, 1)],
        [(2, 3), (0, 2), (0, 1), (1, 3)],
        [(1, 3), (0, 2)],
    ]
