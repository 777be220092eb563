"""The plan as an object: built, read, checked against a model, and shown."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
import torch.nn as nn
import torchvision.models as tv
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from lightning_sdp import Component, MaskPlan, ParamSlice
from tests.unit.models import Stack


def small_plan(**kwargs: Any) -> MaskPlan:
    """Three components, of 20, 20 and 40 parameters, on three workers."""
    return MaskPlan(
        3,
        [
            (Component("a", "block", (ParamSlice("a.weight"), ParamSlice("a.bias"))), (2, 0)),
            (Component("b", "block", (ParamSlice("b.weight"),)), (0,)),
            (Component("c", "block", (ParamSlice("c.weight"),)), [0, 2, 2]),
        ],
        **{"sizes": [20, 20, 40], **kwargs},
    )


def holders_of(plan: MaskPlan) -> dict[str, tuple[int, ...]]:
    return {component.name: plan.holders(component.name) for component in plan.components}


# Who holds what


def test_views_of_a_plan_agree() -> None:
    plan = small_plan()
    assert holders_of(plan) == {"a": (0, 2), "b": (0,), "c": (0, 2)}
    assert [plan.held_by(worker) for worker in range(3)] == [("a", "b", "c"), (), ("a", "c")]
    assert [[c.name for c in plan.missing_on(worker)] for worker in range(3)] == [[], ["a", "b", "c"], ["b"]]
    assert plan.holder_sets == {(0, 2): ("a", "c"), (0,): ("b",)}
    assert list(plan.holder_sets) == [(0, 2), (0,)]
    expected = {"a.weight": (0, 2), "a.bias": (0, 2), "b.weight": (0,), "c.weight": (0, 2)}
    assert plan.tensor_holders() == expected
    assert plan.coverage == (1.0, 0.0, 0.75)
    assert plan.imbalance == pytest.approx(80 * 3 / 140)
    assert repr(plan) == "MaskPlan(3 components, 3 workers, coverage [1, 0, 0.75])"


def test_cost_is_sizes_unless_given_and_one_without_sizes() -> None:
    assert small_plan(costs=[1.0, 2.0, 1.0]).coverage == (1.0, 0.0, 0.5)
    assert small_plan(sizes=None).coverage == pytest.approx((1.0, 0.0, 2 / 3))


def test_element_mask() -> None:
    component = Component(
        "a", "block", (ParamSlice("a.weight", 0, 1, 3), ParamSlice("a.weight", 0, 4, 5), ParamSlice("a.b"))
    )
    plan = MaskPlan(2, [(component, [1]), (Component("b", "block", (ParamSlice("b.w"),)), [0])])
    mask = plan.element_mask("a.weight", 0, (5, 2))
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[True] * 2, [False] * 2, [False] * 2, [True] * 2, [False] * 2]
    assert plan.element_mask("a.weight", 1, torch.Size((5, 2))).all()
    assert plan.element_mask("a.b", 0, ()).tolist() is False
    assert plan.element_mask("b.w", 0, (2,)).tolist() == [True, True]
    assert plan.element_mask("b.w", 1, (2,)).tolist() == [False, False]
    assert plan.element_mask("elsewhere", 0, (2, 2)).all()


@pytest.mark.parametrize(
    ("holders", "message"),
    [
        ([], "leaves component 'a' without a holder: its parameters would be lost"),
        ([0, 3], r"gives component 'a' to workers \[0, 3\]; N is 3"),
        ([-1], r"gives component 'a' to workers \[-1\]; N is 3"),
    ],
)
def test_impossible_holders(holders: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskPlan(3, [(Component("a", "block", ()), holders)])


def test_component_named_twice() -> None:
    component = Component("a", "block", ())
    with pytest.raises(ValueError, match="names a component twice"):
        MaskPlan(2, [(component, [0]), (component, [1])])


# Building


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    st.integers(1, 16), st.integers(1, 24), st.integers(5, 100), st.sampled_from(["params", "count"]), st.integers(0, 9)
)
def test_built_plans(workers: int, depth: int, percent: int, balance: str, seed: int) -> None:
    coverage = percent / 100
    with torch.device("meta"):
        module = Stack(depth)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options: dict[str, Any] = {"keep_ends": 0, "balance": balance, "seed": seed}
        plan = MaskPlan.build(module, num_subnetworks=workers, coverage=coverage, **options)
    assert bool(caught) == (coverage * workers < 1 - 1e-9)
    assert [component.name for component in plan.components] == [f"blocks.{i}" for i in range(depth)]
    assert all(plan.holders(component.name) for component in plan.components)
    assert len(plan.holder_sets) <= 2 * workers
    expected = max(coverage, 1 / workers)
    if depth * (expected * workers - 1) >= workers - 1:
        assert all(abs(share - expected) <= 1.5 / depth for share in plan.coverage)
    assert MaskPlan.from_json(plan.to_json()) == plan
    assert MaskPlan.build(module, num_subnetworks=workers, coverage=expected, **options) == plan


def test_coverage_of_less_than_one_worker_is_raised_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"coverage=0\.1 is less than one of 4 workers: using 1/4"):
        plan = MaskPlan.build(Stack(8), num_subnetworks=4, coverage=0.1, keep_ends=0)
    assert plan.coverage == (0.25,) * 4
    assert set(map(len, plan.holder_sets)) == {1}


def test_coverage_per_worker() -> None:
    plan = MaskPlan.build(Stack(8), num_subnetworks=3, coverage=[1.0, 0.5, 0.25], keep_ends=0)
    assert plan.coverage == (1.0, 0.5, 0.25)
    for shares in ([1.0, 0.5], [1.0] * 4, []):
        with pytest.raises(ValueError, match=r"^coverage=\["):
            MaskPlan.build(Stack(8), num_subnetworks=3, coverage=shares)
    with pytest.raises(ValueError, match="sums to less than 1: some blocks would have no holder"):
        MaskPlan.build(Stack(8), num_subnetworks=3, coverage=[0.2, 0.2, 0.2])


@pytest.mark.parametrize("coverage", [0, 1.5, -0.5, float("nan"), "x", None, True, [0.5, 0], [0.5, "1"], "0.5"])
def test_bad_coverage(coverage: Any) -> None:
    with pytest.raises(ValueError, match=r"^coverage=.* must lie in \(0, 1\]"):
        MaskPlan.build(Stack(8), num_subnetworks=2, coverage=coverage)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_subnetworks": 0}, "num_subnetworks=0 must be"),
        ({"balance": "weight"}, "balance='weight' is unknown: choose 'count' or 'params'"),
        ({"granularity": "layer"}, "granularity='layer' is unknown: choose 'block' or 'neuron'"),
        ({"on_unsliceable": "x"}, "on_unsliceable='x' is unknown: choose 'keep' or 'pad' or 'error'"),
        ({"components": "x.*"}, r"components='x\.\*' matches no module"),
        ({"keep": ["x"]}, "keep='x' matches no module"),
        ({"keep_ends": "x"}, "keep_ends='x' is not understood"),
    ],
)
def test_bad_arguments_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        MaskPlan.build(Stack(8), **{"num_subnetworks": 2, **kwargs})


def test_balance_by_params_and_by_count() -> None:
    with torch.device("meta"):
        resnet = tv.resnet18()
    by_params = MaskPlan.build(resnet, num_subnetworks=2, keep_ends=0, balance="params")
    by_count = MaskPlan.build(resnet, num_subnetworks=2, keep_ends=0, balance="count")
    assert [len(by_count.held_by(worker)) for worker in (0, 1)] == [4, 4]
    assert by_count.coverage == (0.5, 0.5)
    sizes = dict(zip(holders_of(by_params), by_params.sizes or (), strict=True))
    held = [sum(sizes[name] for name in by_params.held_by(worker)) for worker in (0, 1)]
    assert by_params.coverage == tuple(size / sum(sizes.values()) for size in held)
    assert by_params.imbalance < 1.1
    counted = [sum(sizes[name] for name in by_count.held_by(worker)) for worker in (0, 1)]
    assert max(held) < max(counted)


def test_sizes_of_a_built_plan() -> None:
    plan = MaskPlan.build(Stack(8, buffer=True), num_subnetworks=2)
    assert plan.sizes == (20,) * 6  # Buffers do not count.
    assert [(kept.name, kept.size, kept.position) for kept in plan.kept] == [("blocks.0", 20, 0), ("blocks.7", 20, 7)]
    assert plan.shared_size == 16 + 10 + 2 * 20
    lines = plan.explain().splitlines()
    assert lines[0] == "blocks.0: held by every worker, an end of the stack (keep_ends=[1, 1])"
    assert len(lines) == 3 and "outside of the blocks" in lines[2]


def test_seed_changes_the_plan() -> None:
    plans = {MaskPlan.build(Stack(12), num_subnetworks=6, seed=seed) for seed in range(5)}
    assert len(plans) > 1
    assert len({plan.coverage for plan in plans}) == 1


def test_other_holders_of_the_same_components() -> None:
    model = Stack(6)
    plan = MaskPlan.build(model, num_subnetworks=3, coverage=0.5, keep_ends=0)
    assert plan.reassigned(coverage=0.67, seed=3) == MaskPlan.build(
        model, num_subnetworks=3, coverage=0.67, keep_ends=0, seed=3
    )
    assert plan.reassigned(coverage=1.0).is_complete and not plan.is_complete
    turned = plan.rotated(1)
    for name, holders in holders_of(plan).items():
        assert turned.holders(name) == tuple(sorted((worker + 1) % 3 for worker in holders))
    assert turned.sizes == plan.sizes and plan.rotated(3) == plan
    seen = [{name for turn in range(3) for name in plan.rotated(turn).held_by(worker)} for worker in range(3)]
    assert seen == [set(holders_of(plan))] * 3
    with pytest.raises(ValueError, match="does not know the sizes"):
        small_plan(sizes=None).reassigned()
    with pytest.raises(ValueError, match="balance='flops' is unknown"):
        plan.reassigned(balance="flops")
    with pytest.raises(ValueError, match="says nothing about component 'b'"):
        small_plan().with_holders({"a": (0,), "c": (1,)})


def _recorded(block: int, holders: list[int]) -> dict[str, Any]:
    tensors = [f"blocks.{block}.fc.weight", f"blocks.{block}.fc.bias", f"blocks.{block}.calls"]
    slices = [{"name": name, "dim": None, "start": 0, "stop": 0} for name in tensors]
    return {"name": f"blocks.{block}", "kind": "block", "storage": "block", "slices": slices, "holders": holders}


def test_recorded_plan() -> None:
    """A plan lies in checkpoints and files as JSON, so neither its form nor the assignment may change unawares."""
    plan = MaskPlan.build(Stack(3, buffer=True), num_subnetworks=3, coverage=0.5, seed=0)
    components = [_recorded(0, [0, 1]), _recorded(1, [2]), _recorded(2, [0, 2])]
    recorded = {"version": 1, "num_subnetworks": 3, "granularity": "block", "components": components}
    assert plan.to_json() == json.dumps(recorded, indent=1)


def test_another_process_builds_the_same_plan() -> None:
    code = (
        "import torch, torchvision\n"
        "from lightning_sdp.plan import MaskPlan\n"
        "with torch.device('meta'):\n"
        "    print(MaskPlan.build(torchvision.models.resnet18(), num_subnetworks=4, coverage=0.4, seed=2).to_json())\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    with torch.device("meta"):
        plan = MaskPlan.build(tv.resnet18(), num_subnetworks=4, coverage=0.4, seed=2)
    assert run.stdout.strip() == plan.to_json(), run.stderr


# JSON


def test_json_round_trip(tmp_path: Path) -> None:
    plan = MaskPlan.build(Stack(5, buffer=True), num_subnetworks=3, coverage=0.6)
    plan.save(tmp_path / "plan.json")
    for again in (MaskPlan.load(tmp_path / "plan.json"), MaskPlan.load(str(tmp_path / "plan.json"))):
        assert again == plan and hash(again) == hash(plan)
        assert again.components == plan.components
        assert holders_of(again) == holders_of(plan)
        assert again.num_subnetworks == 3 and again.granularity == "block"
    assert plan != MaskPlan.build(Stack(5, buffer=True), num_subnetworks=3, coverage=1.0)
    assert plan != plan.to_json()


def edited(change: Callable[[dict[str, Any]], Any]) -> str:
    data = json.loads(MaskPlan.build(Stack(3), num_subnetworks=2).to_json())
    change(data)
    return json.dumps(data)


def component(data: dict[str, Any], **changes: Any) -> None:
    data["components"][0].update(changes)


def part(data: dict[str, Any], **changes: Any) -> None:
    data["components"][0]["slices"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(color="red"), "The plan has an unknown key 'color'"),
        (lambda d: component(d, color="red"), "A component of the plan has an unknown key 'color'"),
        (lambda d: part(d, color="red"), "A slice of 'blocks.0' has an unknown key 'color'"),
        (lambda d: d.pop("granularity"), "The plan has no key 'granularity'"),
        (lambda d: d["components"][1].pop("holders"), "A component of the plan has no key 'holders'"),
        (lambda d: d["components"][1]["slices"][0].pop("dim"), "A slice of 'blocks.1' has no key 'dim'"),
        (lambda d: d.update(version=2), "The plan has version 2; this lightning_sdp reads version 1"),
        (lambda d: d.update(version=2, color="red"), "The plan has version 2"),
        (lambda d: d.update(version="1"), "The plan has version '1'"),
        (lambda d: d.update(granularity="layer"), "The plan has granularity 'layer'; known: block, neuron"),
        (lambda d: d.update(granularity="neuron"), "'blocks.0' is not a chunk of neurons, channels or heads"),
        (lambda d: d.update(num_subnetworks=0), "num_subnetworks"),
        (lambda d: d.update(num_subnetworks="2"), "num_subnetworks"),
        (lambda d: d.update(num_subnetworks=2.0), "num_subnetworks"),
        (lambda d: component(d, holders=[]), "leaves component 'blocks.0' without a holder"),
        (lambda d: component(d, holders=[2]), r"gives component 'blocks.0' to workers \[2\]; N is 2"),
        (lambda d: component(d, holders=[-1]), r"gives component 'blocks.0' to workers \[-1\]"),
        (lambda d: component(d, holders=["0"]), "'blocks.0'"),
        (lambda d: component(d, holders=[0.5]), "'blocks.0'"),
        (lambda d: component(d, holders=1), "'blocks.0'"),
        (lambda d: component(d, slices={}), "'blocks.0'"),
        (lambda d: component(d, slices=["x"]), "A slice of 'blocks.0' is not an object"),
        (lambda d: component(d, name=["x"]), "name"),
        (lambda d: component(d, kind="heads"), "'blocks.0' is not a whole block"),
        (lambda d: component(d, storage="sliced"), "'blocks.0' is not a whole block"),
        (lambda d: part(d, dim=0), "'blocks.0' is not a whole block"),
        (lambda d: d.update(components=d["components"] * 2), "names a component twice"),
        (lambda d: d.update(components=[]), "no component"),
        (lambda d: d.update(components={}), "components"),
        (lambda d: d.update(components=["x"]), "A component of the plan is not an object"),
    ],
)
def test_bad_json_is_a_named_error(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskPlan.from_json(edited(change))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("", "not valid JSON"), ("[1]", "not an object")]
)
def test_text_that_is_no_plan(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskPlan.from_json(text)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b"{"])
def test_file_that_is_no_plan_is_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "some plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"some plan\.json"):
        MaskPlan.load(path)
    with pytest.raises(ValueError, match=str(tmp_path)):
        MaskPlan.load(tmp_path)


# A plan and a model


def test_plan_that_fits_learns_sizes() -> None:
    built = MaskPlan.build(Stack(4), num_subnetworks=2, keep="blocks.1")
    read = MaskPlan.from_json(built.to_json())
    assert read.sizes is None
    fitted = read.fit(Stack(4))
    assert fitted == built
    assert fitted.sizes == built.sizes == (20,) * 3
    assert fitted.shared_size == built.shared_size


class _OtherBlocks(Stack):
    def __init__(self) -> None:
        super().__init__(4)
        self.blocks[1].fc = nn.Linear(4, 4, bias=False)


class _Tied(Stack):
    def __init__(self) -> None:
        super().__init__(4)
        self.extra = nn.Linear(4, 4)
        self.extra.weight = self.blocks[1].fc.weight


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (lambda: Stack(3), ["blocks.3"]),
        (_OtherBlocks, ["blocks.1.fc.bias"]),
        (lambda: Stack(4, buffer=True), ["blocks.0", "calls"]),
        (_Tied, ["blocks.1.fc.weight"]),
        (lambda: nn.Linear(1, 1), ["blocks.0"]),
    ],
)
def test_plan_that_does_not_fit_names_the_first_difference(model: Callable[[], nn.Module], names: list[str]) -> None:
    plan = MaskPlan.build(Stack(4), num_subnetworks=2)
    with pytest.raises(ValueError, match="The plan does not fit the model") as caught:
        plan.fit(model())
    assert all(name in str(caught.value) for name in names)


def _one(name: str, *tensors: str) -> tuple[Component, list[int]]:
    return Component(name, "block", tuple(ParamSlice(tensor) for tensor in tensors)), [0]


@pytest.mark.parametrize(
    ("pairs", "name"),
    [
        ([_one("blocks.0", "blocks.0.fc.weight")], "blocks.0.fc.bias"),
        ([_one("blocks.0", "blocks.0.fc.weight", "blocks.0.fc.bias", "head.bias")], "head.bias"),
        ([_one("blocks.0", "blocks.0.fc.weight", "blocks.0.fc.bias", "blocks.1.fc.bias")], "blocks.1.fc.bias"),
        (
            [
                _one("blocks.0", "blocks.0.fc.weight", "blocks.0.fc.bias"),
                _one("blocks.0.fc", "blocks.0.fc.weight", "blocks.0.fc.bias"),
            ],
            "blocks.0.fc",
        ),
        ([_one("", "head.bias")], "''"),
    ],
)
def test_plan_by_hand_that_does_not_fit(pairs: list[tuple[Component, list[int]]], name: str) -> None:
    with pytest.raises(ValueError) as caught:
        MaskPlan(2, pairs).fit(Stack(2))
    assert f"'{name}'" in str(caught.value) or name in str(caught.value)


def test_plan_for_a_part_of_the_blocks_fits() -> None:
    tensors = ("blocks.1.fc.weight", "blocks.1.fc.bias")
    plan = MaskPlan(2, [_one("blocks.1", *tensors)]).fit(Stack(2))
    assert plan.sizes == (20,)
    assert plan.shared_size == 16 + 20 + 10


# Reports


def rendered(plan: MaskPlan, width: int = 200) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), legacy_windows=False)
    console.print(plan.table())
    return console.export_text()


def rows_of(text: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.replace("┃", "│").strip("│ ").split("│")] for line in text.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if len(cells) > 1}


def test_table_shows_marks_shares_and_sizes() -> None:
    plan = MaskPlan.build(Stack(8), num_subnetworks=2, seed=0)
    text = rendered(plan)
    assert "Who holds what: 6 blocks, 2 workers" in text
    rows = rows_of(text)
    assert rows["component"] == ["parameters", "0", "1"]
    assert rows["blocks.0 (kept)"] == rows["blocks.7 (kept)"] == ["20", "●", "●"]
    order = [name.split()[0] for name in rows if name.startswith("blocks.")]
    assert order == [f"blocks.{i}" for i in range(8)]
    for name, holders in holders_of(plan).items():
        assert rows[name] == ["20", *("●" if worker in holders else "·" for worker in (0, 1))]
    assert rows["coverage"] == ["", "0.50", "0.50"]
    assert rows["share of all blocks"] == ["", "0.62", "0.62"]  # (2 + 3) of 8
    assert rows["parameters held"] == ["186", "126", "126"]


def test_table_of_a_plan_without_sizes_and_of_many_workers() -> None:
    text = rendered(small_plan(sizes=None))
    assert rows_of(text)["b"] == ["", "●", "·", "·"]
    assert "share of all blocks" not in text
    wide = rows_of(rendered(MaskPlan.build(Stack(20), num_subnetworks=20, coverage=0.5, keep_ends=0)))
    assert wide["component"] == ["parameters", *map(str, range(16)), "…"]
    assert wide["coverage"][1:] == ["0.50"] * 16 + ["…"]


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1000, "1k"), (11_173_962, "11.2M"), (7e9, "7G"), (999_999, "1M")]
)
def test_counts_have_three_digits(number: float, text: str) -> None:
    from lightning_sdp.report import format_count

    assert format_count(number) == text


def test_plot_is_a_picture(tmp_path: Path) -> None:
    plan = MaskPlan.build(Stack(8), num_subnetworks=4, seed=0)
    plan.plot(tmp_path / "plan.png")
    pixels = (matplotlib.image.imread(tmp_path / "plan.png")[..., :3] * 255).round().astype(int).reshape(-1, 3)
    held, kept = ((pixels == color).all(axis=1).sum() for color in [(0x00, 0x72, 0xB2), (0x9E, 0xCA, 0xE1)])
    assert len(np.unique(pixels, axis=0)) > 2
    assert 0.3 < kept / held < 8 / 12  # cells of kept and of held blocks; the former are hatched
    MaskPlan.from_json(plan.to_json()).plot(str(tmp_path / "plan.svg"))
    assert "<svg" in (tmp_path / "plan.svg").read_text()
