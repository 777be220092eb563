"""What a plan costs, against numbers computed by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

from lightning_sdp import Component, MaskPlan, ParamSlice, communication_bytes, discover_components
from tests.unit.models import Stack

# Stack(3): stem 4·3 + 4 = 16, three blocks of 4·4 + 4 = 20 each, head 2·4 + 2 = 10 parameters, of 4 bytes each.
SHARED, BLOCK = 4 * (16 + 10), 4 * 20


def plan_of(module: nn.Module, workers: int, *holders: list[int]) -> MaskPlan:
    return MaskPlan(workers, zip(discover_components(module), holders, strict=True))


@pytest.mark.parametrize(("workers", "ranks_per_worker"), [(2, 1), (3, 1), (8, 1), (2, 2), (4, 3)])
def test_full_coverage_sends_what_data_parallelism_sends(workers: int, ranks_per_worker: int) -> None:
    module = Stack(3)
    world, total = workers * ranks_per_worker, SHARED + 3 * BLOCK
    plan = MaskPlan.build(module, num_subnetworks=workers, coverage=1.0)
    sent = communication_bytes(plan, module, ranks_per_worker=ranks_per_worker)
    assert sent == (round(2 * (world - 1) / world * total),) * workers


def test_each_holder_set_counts_by_its_size() -> None:
    module = Stack(3)
    plan = plan_of(module, 3, [0, 1], [0], [0, 1, 2])
    shared = 4 / 3 * (SHARED + BLOCK)  # 2·(3 − 1)/3; the last block is held by all as well
    pair = 1.0 * BLOCK  # 2·(2 − 1)/2
    assert communication_bytes(plan, module) == (round(shared + pair), round(shared + pair), round(shared))


def test_gradients_count_in_the_dtype_in_which_they_travel() -> None:
    module = Stack(3)
    plan = plan_of(module, 3, [0, 1], [0], [0, 1, 2])
    own, half = communication_bytes(plan, module), communication_bytes(plan, module, reduce_dtype=torch.bfloat16)
    assert half == pytest.approx([bytes_ / 2 for bytes_ in own], abs=1)
    refreshed = communication_bytes(plan, module, masking="backward", reduce_dtype=torch.bfloat16)
    refresh = communication_bytes(plan, module, masking="backward")[2] - own[2]
    assert refreshed[2] == pytest.approx(half[2] + refresh, abs=1), "weights travel in their own dtype"


def test_several_ranks_per_worker_average_among_themselves() -> None:
    module = Stack(3)
    plan = plan_of(module, 2, [0], [0, 1], [1])
    everyone, two = 1.5, 1.0  # 2·(4 − 1)/4 and 2·(2 − 1)/2
    expected = round(everyone * (SHARED + BLOCK) + two * BLOCK)
    assert communication_bytes(plan, module, ranks_per_worker=2) == (expected, expected)
    assert communication_bytes(plan, module) == (SHARED + BLOCK,) * 2


def test_frozen_parameters_buffers_and_dtypes() -> None:
    module = Stack(3, buffer=True)
    plan = plan_of(module, 2, [0], [0, 1], [0, 1])
    module.head.requires_grad_(False)
    module.blocks[1].double()
    assert communication_bytes(plan, module) == (4 * 16 + 2 * BLOCK + BLOCK,) * 2


def test_one_process_sends_nothing() -> None:
    module = Stack(3)
    assert communication_bytes(MaskPlan.build(module, num_subnetworks=1, coverage=1.0), module) == (0,)


def test_tied_parameters_count_once_and_meta_will_do() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    plan = MaskPlan(2, [(Component("2", "block", (ParamSlice("2.weight"),)), [1])])
    assert communication_bytes(plan, module) == (64, 64)
