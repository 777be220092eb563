"""Which entries of a cut tensor each holder has, and where they lie there."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sdp import ParamSlice
from lightning_sdp.layout import Part, Run, TensorLayout, make_layout

Runs = list[tuple[Run, tuple[int, ...]]]

thorough = settings(deadline=None, derandomize=True, max_examples=150)

# Six rows in three chunks of two; holder 1 has the first and the last.
CHUNKS: Runs = [((0, 2), (0, 1)), ((2, 4), (0, 2)), ((4, 6), (1, 2))]


def fused() -> TensorLayout:
    """Queries, keys and values of three heads of width 2 in one tensor, the middle head at holder 1 alone."""
    holders = [(0,), (1,), (0, 2)]
    return make_layout(0, [((6 * i + 2 * h, 6 * i + 2 * h + 2), holders[h]) for i in range(3) for h in range(3)])


def rows(size: int, columns: int = 1) -> Tensor:
    """A tensor whose entries tell their row."""
    return torch.arange(size).view(-1, 1).expand(size, columns).clone()


# By hand


def test_runs_in_any_order_become_parts_in_the_order_of_the_tensor() -> None:
    layout = make_layout(0, CHUNKS[::-1])
    assert layout == make_layout(0, CHUNKS)
    assert layout.parts == (Part((0, 1), ((0, 2),)), Part((0, 2), ((2, 4),)), Part((1, 2), ((4, 6),)))
    assert layout.size == 6


def test_neighboring_runs_of_the_same_holders_are_one() -> None:
    layout = make_layout(1, [((4, 6), (0,)), ((0, 2), (1,)), ((2, 4), (1,)), ((6, 9), (1,))])
    assert layout.parts == (Part((1,), ((0, 4), (6, 9))), Part((0,), ((4, 6),)))


def test_what_a_holder_has_in_few_ranges() -> None:
    layout = make_layout(0, CHUNKS)
    assert [layout.runs(holder) for holder in range(3)] == [[(0, 4)], [(0, 2), (4, 6)], [(2, 6)]]
    assert layout.runs(7) == []
    assert layout.parts_of(1) == [layout.parts[0], layout.parts[2]]
    assert [layout.is_complete(holder) for holder in range(3)] == [False] * 3
    whole = make_layout(0, [((0, 2), (0, 1)), ((2, 3), (0,))])
    assert [whole.is_complete(holder) for holder in range(2)] == [True, False]


def test_shape_of_what_a_holder_stores() -> None:
    layout = make_layout(1, CHUNKS)
    assert layout.local_shape((3, 6, 2), 1) == torch.Size([3, 4, 2])
    assert make_layout(0, CHUNKS).local_shape([6], 2) == torch.Size([4])
    assert make_layout(2, [((0, 6), (0,))]).local_shape((1, 2, 6), 0) == torch.Size([1, 2, 6])


def test_taken_entries_are_a_dense_copy_in_order() -> None:
    full = rows(6, columns=2)
    local = make_layout(0, CHUNKS).take(full, 1)
    assert local[:, 0].tolist() == [0, 1, 4, 5] and local.is_contiguous()
    full.zero_()
    assert local[:, 1].tolist() == [0, 1, 4, 5]
    columns = make_layout(1, CHUNKS).take(rows(6, columns=2).t(), 2)
    assert columns.shape == (2, 4) and columns[0].tolist() == [2, 3, 4, 5]


def test_put_writes_a_holders_entries_and_no_others() -> None:
    full = torch.full((6, 1), -1)
    make_layout(0, CHUNKS).put(torch.tensor([[10], [11], [14], [15]]), full, 1)
    assert full.flatten().tolist() == [10, 11, -1, -1, 14, 15]


def test_several_runs_of_a_part() -> None:
    layout = fused()
    assert layout.parts[0].runs == ((0, 2), (6, 8), (12, 14))
    assert layout.runs(0) == [(0, 2), (4, 8), (10, 14), (16, 18)]  # heads 0 and 2, which are neighbors across a seam
    local = layout.take(rows(18), 0)
    assert local.flatten().tolist() == [0, 1, 4, 5, 6, 7, 10, 11, 12, 13, 16, 17]
    shared = layout.parts[2]
    assert shared.holders == (0, 2)
    assert [view.flatten().tolist() for view in layout.views(shared, local, 0)] == [[4, 5], [10, 11], [16, 17]]
    assert [view.flatten().tolist() for view in layout.views(shared, layout.take(rows(18), 2), 2)] == [
        [4, 5],
        [10, 11],
        [16, 17],
    ]


def test_views_write_through() -> None:
    layout, full = fused(), rows(18)
    local = layout.take(full, 0)
    for view in layout.views(layout.parts[0], local, 0):
        view.zero_()
    for view in layout.views(layout.parts[1], full):
        view.fill_(-1)
    assert local.flatten().tolist() == [0, 0, 4, 5, 0, 0, 10, 11, 0, 0, 16, 17]
    assert full.flatten().tolist() == [0, 1, -1, -1, 4, 5, 6, 7, -1, -1, 10, 11, 12, 13, -1, -1, 16, 17]


def test_view_of_one_slice() -> None:
    layout = fused()
    local = layout.take(rows(18), 2)
    for start in (4, 10, 16):
        view = layout.view(local, ParamSlice("qkv", 0, start, start + 2), 2)
        assert view.flatten().tolist() == [start, start + 1]
        assert view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()


def test_a_slice_may_be_a_part_of_a_range() -> None:
    """Two chunks that the same workers hold are one range, but a component's slice is one chunk."""
    layout = make_layout(0, [((0, 2), (1,)), ((2, 4), (0,)), ((4, 6), (0,))])
    assert layout.view(layout.take(rows(6), 0), ParamSlice("w", 0, 4, 6), 0).flatten().tolist() == [4, 5]


def test_other_names_for_the_holders() -> None:
    ranks = make_layout(0, CHUNKS).renamed(lambda workers: tuple(r for w in workers for r in (2 * w, 2 * w + 1)))
    assert [part.holders for part in ranks.parts] == [(0, 1, 2, 3), (0, 1, 4, 5), (2, 3, 4, 5)]
    assert ranks.dim == 0 and [part.runs for part in ranks.parts] == [((0, 2),), ((2, 4),), ((4, 6),)]
    assert ranks.runs(3) == make_layout(0, CHUNKS).runs(1)


# Any layout


@st.composite
def layouts(draw: st.DrawFn) -> tuple[TensorLayout, Tensor, int]:
    """A layout, a tensor that it fits, and the number of holders."""
    holders = draw(st.integers(1, 4))
    sets = st.sets(st.integers(0, holders - 1), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    chunks = draw(st.lists(st.tuples(st.integers(1, 3), sets), min_size=1, max_size=8))
    runs: Runs = []
    for length, chosen in chunks:
        start = runs[-1][0][1] if runs else 0
        runs.append(((start, start + length), chosen))
    dim, shape = draw(st.integers(0, 2)), draw(st.lists(st.integers(1, 3), min_size=3, max_size=3))
    shape[dim] = runs[-1][0][1]
    return make_layout(dim, draw(st.permutations(runs))), torch.randn(shape), holders


@thorough
@given(layouts())
def test_all_holders_together_have_the_tensor(drawn: tuple[TensorLayout, Tensor, int]) -> None:
    layout, full, holders = drawn
    again = torch.full_like(full, float("nan"))
    for holder in range(holders):
        local = layout.take(full, holder) if layout.runs(holder) else None
        if local is None:
            assert not layout.parts_of(holder)
            continue
        assert local.shape == layout.local_shape(full.shape, holder)
        layout.put(local, again, holder)
        own = torch.full_like(full, float("nan"))
        layout.put(local, own, holder)
        assert torch.equal(layout.take(own, holder), local)
        assert int((~own.isnan()).sum()) == local.numel()
    assert torch.equal(again, full)


@thorough
@given(layouts())
def test_a_part_is_the_same_wherever_it_is_looked_at(drawn: tuple[TensorLayout, Tensor, int]) -> None:
    layout, full, holders = drawn
    assert layout.size == full.shape[layout.dim]
    for holder in range(holders):
        for part in layout.parts_of(holder):
            local = layout.take(full, holder)
            pairs = zip(layout.views(part, local, holder), layout.views(part, full), strict=True)
            assert all(torch.equal(here, there) for here, there in pairs)
            for (start, stop), there in zip(part.runs, layout.views(part, full), strict=True):
                assert torch.equal(layout.view(local, ParamSlice("w", layout.dim, start, stop), holder), there)
