"""Plans that hand out chunks of neurons and heads: built, read, checked against a model, and shown."""

from __future__ import annotations

import functools
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
import torch.nn as nn
import torchvision.models as tv
from rich.console import Console
from torch import Tensor

from lightning_sdp import Component, MaskPlan, ParamSlice, communication_bytes
from lightning_sdp.components.base import Group, Member
from tests.models import WIDTH, Net, make

WORKERS = 3


@functools.cache
def model(kind: str) -> Net:
    torch.set_num_threads(1)
    return make(kind, blocks=3)


@functools.cache
def plan_of(kind: str, **options: Any) -> MaskPlan:
    return MaskPlan.build(model(kind), num_subnetworks=WORKERS, granularity="neuron", keep_ends=0, **options)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


# Building


def test_chunks_of_an_mlp() -> None:
    plan = plan_of("mlp")
    assert [component.name for component in plan.components] == [
        f"blocks.{block}.hidden[{chunk}]" for block in range(3) for chunk in range(3)
    ]
    assert {component.kind for component in plan.components} == {"neurons"}
    hidden = 16  # of block 1, in chunks of 5, 5 and 6
    assert plan.components[5].slices == (
        ParamSlice("blocks.1.fc1.weight", 0, 10, hidden),
        ParamSlice("blocks.1.fc1.bias", 0, 10, hidden),
        ParamSlice("blocks.1.fc2.weight", 1, 10, hidden),
    )
    assert plan.sizes is not None and plan.sizes[5] == 6 * (WIDTH + 1 + WIDTH)


def test_heads_of_grouped_queries_are_cut_by_their_keys() -> None:
    plan = plan_of("gqa")
    heads = [component for component in plan.components if component.kind == "heads"]
    assert [component.name for component in heads] == [f"blocks.{b}.heads[{c}]" for b in range(3) for c in range(2)]
    width, rows = WIDTH // 4, {(part.name.removeprefix("blocks.0."), part.dim): [] for part in heads[1].slices}
    for part in heads[1].slices:
        rows[part.name.removeprefix("blocks.0."), part.dim].append((part.start, part.stop))
    queries = (2 * width, 4 * width)  # the second head of keys serves queries 2 and 3
    keys, values = (width, 2 * width), (3 * width, 4 * width)
    assert rows == {
        ("query.weight", 0): [queries],
        ("key_value.weight", 0): [keys, values],
        ("key_value.bias", 0): [keys, values],
        ("out.weight", 1): [queries],
    }
    assert [group.attributes for group in plan.groups if group.kind == "heads"] == [
        (f"blocks.{i}.heads", f"blocks.{i}.kv_heads") for i in range(3)
    ]


@pytest.mark.parametrize("kind", ["mlp", "gqa", "conv"])
def test_every_worker_holds_a_part_of_every_group_and_its_share_of_all(kind: str) -> None:
    plan = plan_of(kind)
    for group in plan.groups:
        held = [plan.held_units(group, worker) for worker in range(WORKERS)]
        assert all(held) and sorted({unit for units in held for unit in units}) == list(range(group.units))
        assert all(units == sorted(set(units)) for units in held)
    assert len(plan.holder_sets) <= 2 * WORKERS
    assert all(abs(share - 0.5) < 0.07 for share in plan.coverage) and plan.imbalance < 1.05


@pytest.mark.parametrize("kind", ["mlp", "gqa", "conv"])
def test_sizes_are_those_of_all_entries_that_can_be_cut(kind: str) -> None:
    plan, tensors = plan_of(kind), dict(model(kind).named_parameters())
    cut = [tensors[name] for name in plan.layouts if name in tensors]
    assert plan.sizes is not None and sum(plan.sizes) == sum(tensor.numel() for tensor in cut)
    assert plan.shared_size == sum(tensor.numel() for tensor in tensors.values()) - sum(plan.sizes)
    by_name = dict(zip([c.name for c in plan.components], plan.sizes, strict=True))
    for worker in range(WORKERS):
        masks = [plan.element_mask(name, worker, tensor.shape) for name, tensor in tensors.items()]
        lacking = sum(int((~mask).sum()) for mask in masks)
        assert lacking == sum(by_name[component.name] for component in plan.missing_on(worker))
        assert plan.coverage[worker] == pytest.approx(1 - lacking / sum(plan.sizes))


@pytest.mark.parametrize("kind", ["mlp", "gqa", "conv"])
def test_masks_and_layouts_say_the_same(kind: str) -> None:
    plan = plan_of(kind)
    for name, tensor in tensors_of(model(kind)).items():
        for worker in range(WORKERS):
            mask = plan.element_mask(name, worker, tensor.shape)
            layout = plan.layouts.get(name)
            if layout is None:
                assert mask.all()
                continue
            along = mask.movedim(layout.dim, 0).reshape(tensor.shape[layout.dim], -1)
            assert (along == along[:, :1]).all()
            held = [i for start, stop in layout.runs(worker) for i in range(start, stop)]
            assert along[:, 0].nonzero().flatten().tolist() == held


def test_held_units_of_a_group() -> None:
    group = Group("m.hidden", "neurons", 5, (Member("m.w", 0, (5,)),))
    plan = MaskPlan(2, list(zip(group.chunks(3), ([0], [1], [0, 1]), strict=True)), granularity="neuron")
    assert [len(r) for r in group.ranges(3)] == [1, 2, 2]
    assert [plan.held_units(group, worker) for worker in range(2)] == [[0, 3, 4], [1, 2, 3, 4]]


def test_groups_of_less_units_than_workers_have_as_many_chunks_as_units() -> None:
    plan = MaskPlan.build(model("gqa"), num_subnetworks=8, granularity="neuron", keep_ends=0)
    counts = {group.name: sum(c.name.startswith(f"{group.name}[") for c in plan.components) for group in plan.groups}
    assert counts == {f"blocks.{i}.{what}": n for i in range(3) for what, n in (("heads", 2), ("hidden", 8))}
    assert all(plan.held_units(group, worker) for group in plan.groups for worker in range(8))


def test_a_tensor_may_be_cut_along_one_dimension_only() -> None:
    pairs = [
        (Component("a[0]", "neurons", (ParamSlice("w", 0, 0, 1),)), [0]),
        (Component("b[0]", "neurons", (ParamSlice("w", 1, 0, 1),)), [1]),
    ]
    with pytest.raises(ValueError, match="The plan cuts tensor 'w' along more than one dimension"):
        MaskPlan(2, pairs, granularity="neuron")


def test_a_worker_without_any_chunk_of_a_group_is_named() -> None:
    plan = plan_of("mlp")
    with pytest.raises(ValueError, match=r"The plan gives worker 1 no chunk of 'blocks\.0\.hidden'"):
        plan.with_holders({component.name: (0,) for component in plan.components})


def test_chunks_that_everyone_holds_leave_no_layout() -> None:
    plan = MaskPlan.build(model("mlp"), num_subnetworks=2, granularity="neuron", coverage=1.0, keep_ends=0)
    assert plan.layouts == {} and plan.padded == {} and plan.coverage == (1.0, 1.0)
    assert plan.tensor_holders() == {} and len(plan.components) == 6


# JSON


@pytest.mark.parametrize("kind", ["mlp", "gqa"])
def test_json_round_trip(kind: str) -> None:
    plan = plan_of(kind)
    again = MaskPlan.from_json(plan.to_json())
    assert again == plan and again.components == plan.components and again.granularity == "neuron"
    assert {entry["storage"] for entry in json.loads(plan.to_json())["components"]} == {"sliced"}
    assert again.layouts == plan.layouts and not again.padded


def test_json_of_padded_chunks() -> None:
    component = Component("m.hidden[0]", "heads", (ParamSlice("m.w", 0, 0, 2),), padded=True)
    other = Component("m.hidden[1]", "heads", (ParamSlice("m.w", 0, 2, 4),), padded=True)
    plan = MaskPlan(2, [(component, [0]), (other, [0, 1])], granularity="neuron")
    entries = json.loads(plan.to_json())["components"]
    assert [(entry["kind"], entry["storage"]) for entry in entries] == [("heads", "padded")] * 2
    again = MaskPlan.from_json(plan.to_json())
    assert again == plan and again.components == (component, other) and list(again.padded) == ["m.w"]


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(kind="block"), r"'blocks\.0\.hidden\[0\]' is not a chunk of neurons, channels or heads"),
        (lambda c: c.update(storage="block"), "is not a chunk of neurons, channels or heads"),
        (lambda c: c.update(kind="units"), "has kind 'units' and storage 'sliced'; known are the kinds block, neurons"),
        (lambda c: c.update(storage="dense"), "storage 'dense'; known are .* the storages block, sliced, padded"),
        (lambda c: c["slices"][0].update(dim=None), "is not a chunk"),
        (lambda c: c["slices"][0].update(dim=-1), "is not a chunk"),
        (lambda c: c["slices"][0].update(start=-1), "is not a chunk"),
        (lambda c: c["slices"][0].update(stop=0), "is not a chunk"),
        (lambda c: c["slices"][0].update(start=True), "is not a chunk"),
        (lambda c: c["slices"][0].update(stop="2"), "is not a chunk"),
        (lambda c: c["slices"][0].pop("stop"), r"A slice of 'blocks\.0\.hidden\[0\]' has no key 'stop'"),
        (lambda c: c["slices"][0].update(dim=1), r"cuts tensor 'blocks\.0\.fc1\.weight' along more than one"),
        (lambda c: c.update(holders=[]), r"leaves component 'blocks\.0\.hidden\[0\]' without a holder"),
    ],
)
def test_bad_json_is_a_named_error(change: Change, message: str) -> None:
    data = json.loads(plan_of("mlp").to_json())
    change(data["components"][0])
    with pytest.raises(ValueError, match=message):
        MaskPlan.from_json(json.dumps(data))


# A plan and a model


def changed(kind: str, change: Change) -> MaskPlan:
    data = json.loads(plan_of(kind).to_json())
    change(data)
    return MaskPlan.from_json(json.dumps(data))


@pytest.mark.parametrize("kind", ["mlp", "gqa"])
def test_plan_that_fits_learns_groups_and_sizes(kind: str) -> None:
    built = plan_of(kind)
    read = MaskPlan.from_json(built.to_json())
    assert read.groups == () and read.sizes is None
    fitted = read.fit(make(kind, blocks=3))
    assert fitted == built and fitted.groups == built.groups  # with the attributes that shrink along
    assert (fitted.sizes, fitted.shared_size, fitted.coverage) == (built.sizes, built.shared_size, built.coverage)


class _Wider(Net):
    def __init__(self) -> None:
        super().__init__("mlp", blocks=3)
        self.blocks[1].fc1, self.blocks[1].fc2 = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)


class _Renamed(Net):
    def __init__(self) -> None:
        super().__init__("mlp", blocks=3)
        self.layers = self.blocks
        del self.blocks

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.layers:
            x = block(x)
        return self.head(x)


class _Unbiased(Net):
    def __init__(self) -> None:
        super().__init__("mlp", blocks=3)
        self.blocks[0].fc1 = nn.Linear(WIDTH, 8, bias=False)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: Net("mlp", blocks=2), r"no group of neurons 'blocks\.2\.hidden' is found in it"),
        (_Renamed, r"no group of neurons 'blocks\.0\.hidden' is found in it"),
        (_Wider, r"component 'blocks\.1\.hidden\[0\]' differs in blocks\.1\.fc1\.bias"),
        (_Unbiased, r"component 'blocks\.0\.hidden\[0\]' differs in blocks\.0\.fc1\.bias"),
        (lambda: nn.Linear(2, 2), "no group of neurons"),
    ],
)
def test_plan_that_does_not_fit_names_the_first_difference(other: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match="The plan does not fit the model: .*" + message):
        plan_of("mlp").fit(other())


def test_plan_of_more_chunks_than_there_are_units() -> None:
    def add(data: dict[str, Any]) -> None:
        for i in range(3, 9):
            data["components"].append({**data["components"][0], "name": f"blocks.0.hidden[{i}]"})

    with pytest.raises(ValueError, match=r"it has 9 chunks of 'blocks\.0\.hidden', which has only 8 units"):
        changed("mlp", add).fit(model("mlp"))


def test_plan_of_some_of_the_groups_fits() -> None:
    plan = changed("mlp", lambda data: data.update(components=data["components"][3:6])).fit(model("mlp"))
    assert [group.name for group in plan.groups] == ["blocks.1.hidden"]
    assert plan.sizes is not None and sum(plan.sizes) == 16 * (2 * WIDTH + 1)


# Communication


@pytest.mark.parametrize("kind", ["mlp", "gqa", "conv"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_bytes_sent_are_those_of_each_element(kind: str, ranks: int) -> None:
    plan, sent = plan_of(kind), [0.0] * WORKERS
    for name, parameter in model(kind).named_parameters():
        masks = torch.stack([plan.element_mask(name, worker, parameter.shape) for worker in range(WORKERS)])
        members = masks.sum(0) * ranks
        for worker in range(WORKERS):
            per_element = 2 * (members - 1) / members * parameter.element_size()
            sent[worker] += float((per_element * masks[worker]).sum())
    assert communication_bytes(plan, model(kind), ranks_per_worker=ranks) == pytest.approx(sent, abs=1)
    assert max(sent) < sum(p.numel() * p.element_size() for p in model(kind).parameters()) * 2


# Reports


def rows_of(plan: MaskPlan) -> tuple[str, dict[str, list[str]]]:
    console = Console(record=True, width=200, file=io.StringIO(), legacy_windows=False)
    console.print(plan.table())
    text = console.export_text()
    lines = [[cell.strip() for cell in line.replace("┃", "│").strip("│ ").split("│")] for line in text.splitlines()]
    return text, {cells[0]: cells[1:] for cells in lines if len(cells) > 1}


def test_table_has_a_row_per_group_with_the_chunks_held() -> None:
    plan = plan_of("gqa", keep="blocks.1")
    text, rows = rows_of(plan)
    assert "Who holds what: 4 groups of neurons in 10 chunks, 3 workers" in text
    names = [f"blocks.{i}.{what}{' (kept)' * (i == 1)}" for i in range(3) for what in ("heads", "hidden")]
    assert [name for name in rows if name.startswith("blocks.")] == names
    assert rows["blocks.1.hidden (kept)"][1:] == ["●"] * 3
    for group in plan.groups:
        chunks = [name for name in (c.name for c in plan.components) if name.startswith(f"{group.name}[")]
        held = [sum(name in plan.held_by(worker) for name in chunks) for worker in range(3)]
        assert rows[group.name][1:] == [f"{n}/{len(chunks)}" if n < len(chunks) else "●" for n in held]
    assert "1/2" in rows["blocks.0.heads"]
    cut = sum(plan.sizes or ())
    kept = sum(item.size for item in plan.kept)
    lacking = [
        sum(size for c, size in zip(plan.components, plan.sizes or (), strict=True) if w not in plan.holders(c.name))
        for w in range(3)
    ]
    assert rows["share of all neurons"][1:] == [f"{1 - gone / (cut + kept):.2f}" for gone in lacking]
    assert rows["coverage"][1:] == [f"{share:.2f}" for share in plan.coverage]


def test_explanation_says_what_stayed_whole_and_why() -> None:
    lines = plan_of("gqa", keep="blocks.1").explain().splitlines()
    assert lines[:2] == [
        f"blocks.1.{what}: held by every worker, named by keep (blocks.1)" for what in ("heads", "hidden")
    ]
    assert "hidden: held by every worker: mixed by rms_norm" in lines  # the residual stream
    assert lines[-1] == "Everything outside of the groups of neurons is held by every worker."
    with torch.device("meta"):
        resnet = tv.ResNet(tv.resnet.Bottleneck, [1, 1, 1, 1], 5)
    bottleneck = MaskPlan.build(resnet, num_subnetworks=2, granularity="neuron", keep_ends=[1, 0])
    assert any("layer1.0" in kept.name and "an end of the stack" in kept.reason for kept in bottleneck.kept)
    assert any("it meets the larger group 'layer2.0.conv" in line for line in bottleneck.explain().splitlines())


def test_picture_is_as_dark_as_workers_hold(tmp_path: Path) -> None:
    plan = plan_of("gqa")
    plan.plot(tmp_path / "plan.png")
    pixels = (matplotlib.image.imread(tmp_path / "plan.png")[..., :3] * 255).round().astype(int)
    dark = (pixels == (0x00, 0x72, 0xB2)).all(axis=-1)
    inside = pixels[dark.any(axis=1)]
    held = np.mean([len(plan.held_units(g, w)) / g.units for g in plan.groups for w in range(WORKERS)])
    white = (inside == 255).all(axis=-1).sum()
    assert 0.2 < dark.sum() / (dark.sum() + white) < 0.7 and math.isclose(held, 0.5, abs_tol=0.1)
    full = MaskPlan.build(model("gqa"), num_subnetworks=WORKERS, granularity="neuron", coverage=1.0, keep_ends=0)
    full.plot(tmp_path / "full.png")
    whole = (matplotlib.image.imread(tmp_path / "full.png")[..., :3] * 255).round().astype(int)
    ratio = dark.sum() / (whole == (0x00, 0x72, 0xB2)).all(axis=-1).sum()
    assert abs(ratio - held) < 0.08
