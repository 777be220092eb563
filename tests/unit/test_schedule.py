"""The one global order of buckets, and why no two ranks can wait for each other."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdp.assignment import assign
from lightning_sdp.sync.schedule import Bucket, Entry, schedule

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
BOTH, ZERO_TWO, ONE_TWO = (0, 1, 2), (0, 2), (1, 2)


def entry(index: int, numel: int = 1, holders: tuple[int, ...] = BOTH, dtype: torch.dtype = F32) -> Entry:
    return Entry(f"p{index}", index, numel, dtype, holders)


def indices(buckets: Sequence[Bucket]) -> list[list[int]]:
    return [[entry.index for entry in bucket.entries] for bucket in buckets]


def size(entries: Sequence[Entry]) -> int:
    return sum(entry.numel * entry.dtype.itemsize for entry in entries)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Entry], int, frozenset[str], int]:
    """Parameters of a model with a random plan, a cap, parameters that were unused, and the number of workers."""
    workers, count = draw(st.integers(2, 6)), draw(st.integers(1, 10))
    coverage = draw(st.integers(100 // workers + 1, 100)) / 100
    plan = assign([1.0] * count, [coverage] * workers, draw(st.integers(0, 9)))
    shared = tuple(range(workers))
    sets = [draw(st.sampled_from([*plan, shared])) for _ in range(draw(st.integers(1, 30)))]
    dtypes = st.sampled_from([F32, F32, F64, BF16])
    entries = [entry(i, draw(st.integers(0, 40)), held, draw(dtypes)) for i, held in enumerate(sets)]
    late = frozenset(e.name for e in entries if draw(st.integers(0, 4)) == 0)
    return entries, draw(st.sampled_from([1, 40, 160, 10**6])), late, workers


@settings(deadline=None, derandomize=True, max_examples=200)
@given(models(), st.randoms(use_true_random=False))
def test_every_schedule(model: tuple[list[Entry], int, frozenset[str], int], rng: random.Random) -> None:
    entries, cap, late, workers = model
    buckets = schedule(entries, cap, late)

    placed = [e for bucket in buckets for e in bucket.entries]
    assert sorted(placed, key=lambda e: e.index) == entries
    for bucket in buckets:
        assert bucket.entries
        assert {(e.holders, e.dtype) for e in bucket.entries} == {(bucket.holders, bucket.dtype)}
        assert size(bucket.entries[:-1]) < cap
    is_late = [{e.name in late for e in bucket.entries} for bucket in buckets]
    assert is_late == sorted(is_late, key=lambda kinds: True in kinds) and all(len(kinds) == 1 for kinds in is_late)

    shuffled = rng.sample(entries, len(entries))
    assert schedule(shuffled, cap, frozenset(rng.sample(sorted(late), len(late)))) == buckets

    # What a rank computes from the entries that it holds is what it sees of the global order. So any two ranks start
    # the buckets that they have in common, which are the same ones, in the same order.
    own = [schedule([e for e in entries if rank in e.holders], cap, late) for rank in range(workers)]
    for rank in range(workers):
        assert own[rank] == [bucket for bucket in buckets if rank in bucket.holders]
    assert ends(own)


def ends(queues: Sequence[Sequence[Bucket]]) -> bool:
    """Runs the ranks' queues: a bucket goes out when it comes next on all of its holders."""
    left = [list(queue) for queue in queues]
    while any(left):
        ready = next((queue[0] for queue in left if queue and _is_next(queue[0], left)), None)
        if ready is None:
            return False
        for rank in ready.holders:
            left[rank].pop(0)
    return True


def _is_next(bucket: Bucket, queues: Sequence[Sequence[Bucket]]) -> bool:
    return all(queues[rank] and queues[rank][0] == bucket for rank in bucket.holders)


def test_a_cycle_would_be_noticed() -> None:
    a, b = Bucket(BOTH, F32, (entry(0),)), Bucket(BOTH, F32, (entry(1),))
    assert ends([[a, b]] * 3)
    assert not ends([[a, b], [b, a], [a, b]])


def test_order_is_reverse_registration() -> None:
    assert indices(schedule([entry(i) for i in range(4)], 10**6)) == [[3, 2, 1, 0]]
    assert indices(schedule([entry(i) for i in range(4)], 8)) == [[3, 2], [1, 0]]
    assert indices(schedule([entry(i) for i in range(5)], 8)) == [[4, 3], [2, 1], [0]]


@pytest.mark.parametrize(
    ("numels", "cap", "expected"),
    [
        ([1, 1, 1], 12, [[2, 1, 0]]),
        ([1, 1, 1], 11, [[2, 1, 0]]),
        ([1, 1, 1], 8, [[2, 1], [0]]),
        ([100, 1, 1], 8, [[2, 1], [0]]),
        ([1, 100, 1], 8, [[2, 1], [0]]),
        ([1, 1, 100], 8, [[2], [1, 0]]),
        ([0, 0, 2], 8, [[2], [1, 0]]),
    ],
)
def test_bucket_is_closed_when_it_has_reached_the_cap(numels: list[int], cap: int, expected: list[list[int]]) -> None:
    assert indices(schedule([entry(i, numel) for i, numel in enumerate(numels)], cap)) == expected


def test_buckets_stand_in_the_order_in_which_they_become_complete() -> None:
    # Backward reaches 5 first; the bucket of all ranks waits for parameter 0, the others are complete before.
    sets = [BOTH, ONE_TWO, ZERO_TWO, ONE_TWO, ZERO_TWO, BOTH]
    buckets = schedule([entry(i, holders=held) for i, held in enumerate(sets)], 10**6)
    assert indices(buckets) == [[4, 2], [3, 1], [5, 0]]
    assert [bucket.holders for bucket in buckets] == [ZERO_TWO, ONE_TWO, BOTH]


def test_dtypes_travel_apart() -> None:
    buckets = schedule([entry(0), entry(1, dtype=F64), entry(2), entry(3, dtype=F64)], 10**6)
    assert indices(buckets) == [[3, 1], [2, 0]]
    assert [bucket.dtype for bucket in buckets] == [F64, F32]


def test_late_parameters_hold_nothing_up() -> None:
    entries = [entry(i) for i in range(5)]
    assert indices(schedule(entries, 10**6, {"p4", "p1", "unknown"})) == [[3, 2, 0], [4, 1]]
    assert indices(schedule(entries, 4, {"p4"})) == [[3], [2], [1], [0], [4]]


def test_nothing_to_average() -> None:
    assert schedule([], 1) == []
