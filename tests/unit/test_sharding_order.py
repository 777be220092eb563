"""The order of gathers and reductions: no plan lets ranks wait for one another in a circle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdp.sharding.order import Collective, Trace, collectives, common_order, find_cycle, prefetches

ROOT = ""


def trace(units: Sequence[str], late: Sequence[str] = ()) -> Trace:
    """Of a rank that runs the model's own unit around these."""
    inner = [(unit, enters) for unit in units for enters in (True, False)]
    return Trace([(ROOT, True), *inner, (ROOT, False)], list(late))


def entered(units: Sequence[str], held: Sequence[str], late: Sequence[str] = ()) -> list[Collective]:
    mine = [unit for unit in units if unit in held]
    return collectives(trace(mine, [u for u in late if u in held]), prefetches([*units, ROOT], [*mine, ROOT]))


def entered_by_default(held: Sequence[str]) -> list[Collective]:
    """What FSDP2 does by itself: a rank gathers ahead the unit that it runs next."""
    left = [*held, ROOT]
    return collectives(trace(held), {left[0]: left[0], **{name: before for before, name in pairwise(left)}})


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[str], list[list[str]]]:
    """Units in the model's order, and those that each rank has; all ranks have the model's own."""
    units = [f"u{i}" for i in range(draw(st.integers(1, 9)))]
    subsets = st.lists(st.sampled_from(units), unique=True)
    return units, draw(st.lists(subsets, min_size=2, max_size=8))


@settings(max_examples=300, deadline=None)
@given(plans(), st.data())
def test_no_plan_has_a_cycle(plan: tuple[list[str], list[list[str]]], data: st.DataObject) -> None:
    units, ranks = plan
    late = data.draw(st.lists(st.sampled_from(units), unique=True, max_size=2).map(sorted))
    assert find_cycle([entered(units, held, late) for held in ranks]) is None


@settings(max_examples=100, deadline=None)
@given(plans())
def test_every_unit_is_gathered_twice_and_reduced_once(plan: tuple[list[str], list[list[str]]]) -> None:
    units, ranks = plan
    for held in ranks:
        done = entered(units, held)
        assert sorted(done) == sorted((what, u) for what in ("forward", "backward", "reduce") for u in [*held, ROOT])
        for unit in [*held, ROOT]:
            assert done.index(("forward", unit)) < done.index(("backward", unit)) < done.index(("reduce", unit))


def test_gathering_ahead_what_a_rank_runs_next_has_a_cycle() -> None:
    """The fault that the common order prevents: rank 0 asks for a where rank 1 reduces c, which rank 0 does later."""
    ranks = [["a", "c"], ["a", "b", "c"], ["a", "b"]]
    cycle = find_cycle([entered_by_default(held) for held in ranks])
    assert cycle is not None
    assert ("backward", "a") in cycle
    assert find_cycle([entered("abc", held) for held in ranks]) is None


def test_gathers_ahead_only_the_neighbor_in_the_full_model() -> None:
    assert prefetches(list("wxyz"), list("wxz")) == {"w": "w", "x": "w", "z": "z"}


def test_collectives_of_a_rank() -> None:
    assert entered("abc", ["a", "b"], late=["a"]) == [
        ("forward", ROOT),
        ("forward", "a"),
        ("forward", "b"),
        ("backward", ROOT),
        ("backward", "b"),
        ("backward", "a"),
        ("reduce", "b"),
        ("reduce", ROOT),
        ("reduce", "a"),
    ]


def test_one_order_for_all_ranks() -> None:
    assert common_order(["ac", "ab", "bc"]) == ["a", "b", "c"]
    assert common_order(["ab", "bc", "ca"]) is None


def test_a_unit_that_runs_twice_repeats() -> None:
    assert trace(["a", "b"]).repeats is False
    assert trace(["a", "b", "a"]).repeats is True
