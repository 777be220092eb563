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
from lightning_sdp.assignment import assign

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


@pytest.mark.parametrize("hash_seed", ["1", "77"])
def test_another_interpreter_decides_alike(hash_seed: str) -> None:
    code = "import json, sys; from assignment import assign; print([assign(*case) for case in json.loads(sys.argv[1])])"
    # The module is imported by itself, since the package imports torch and lightning.
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(assignment.__file__).parent)}
    command = [sys.executable, "-c", code, json.dumps(CASES)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert ast.literal_eval(run.stdout) == [assign(*case) for case in CASES]


def test_recorded_assignment() -> None:
    """Who fails this test changes the plan of every experiment that is started anew."""
    pairs = [(1, 3), (2, 3), (0, 2), (0, 1)]
    assert assign([1.0] * 8, [0.5] * 4, seed=0) == pairs * 2
    unequal = [(0, 1), (1, 2), (0,), (2,), (0, 2), (2,)]
    assert assign([5.0, 1.0, 1.0, 2.0, 2.0, 1.0], [0.7, 0.5, 0.5], seed=3) == unequal
