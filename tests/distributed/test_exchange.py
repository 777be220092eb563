"""What ranks hold moves with the holders: from another plan's old holders to the new ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sdp import MaskPlan
from lightning_sdp.sync.exchange import Exchange, Held
from lightning_sdp.sync.groups import HolderGroups
from tests.distributed.runs import WORLDS
from tests.models import Net, make


def held_part(plan: MaskPlan, groups: HolderGroups, name: str, full: Tensor) -> Tensor | None:
    """What a rank stores of a tensor, straight from the plan's mask of elements."""
    worker = groups.rank // groups.ranks_per_worker
    mask = plan.element_mask(name, worker, full.shape)
    if not mask.any():
        return None
    layout = plan.layouts.get(name)
    return full[mask].view(full.shape if layout is None else layout.local_shape(full.shape, worker))


def exchange(granularity: str, workers: int) -> list[tuple[str, Any, Any]]:
    net = make("gqa" if granularity == "neuron" else "mlp", blocks=5)
    plan = MaskPlan.build(net, num_subnetworks=workers, granularity=granularity, coverage=0.5, keep_ends=0)
    others = [plan.rotated(1), plan.reassigned(coverage=0.75, seed=1), plan.reassigned(coverage=1.0), plan]
    return [result for other in others for result in move(net, plan, other)]


def move(net: Net, plan: MaskPlan, other: MaskPlan) -> list[tuple[str, Any, Any]]:
    """What the rank has after an exchange, and what it should have."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    groups = len(torch.distributed.distributed_c10d._pg_map)
    old = HolderGroups(plan, world, rank, torch.device("cpu"))
    new = HolderGroups(other, world, rank, torch.device("cpu"), previous=old)
    moves = Exchange(plan, old, new)
    values = {name: p.detach() for name, p in net.named_parameters() if name in moves.names}
    own: dict[str, Held] = {}
    for name, value in values.items():
        part = held_part(plan, old, name, value)
        if part is not None:
            own[name] = Held({"data": part, "state": (2 * part).float()}, {"name": name, "step": torch.tensor(3.0)})
    before = dict(own)
    after = moves.run(own)
    new.destroy()
    assert len(torch.distributed.distributed_c10d._pg_map) == groups
    assert not own
    results = []
    for name, value in values.items():
        expected = held_part(other, new, name, value)
        assert (expected is not None) == (name in after), name
        if expected is not None:
            assert after[name].facts["name"] == name and after[name].facts["step"] == 3.0
            assert other is not plan or after[name] is before[name]
            results.append((name, after[name].tensors, {"data": expected, "state": (2 * expected).float()}))
    return results


def check(all_results: list[list[tuple[str, Any, Any]]]) -> None:
    for results in all_results:
        assert results
        for name, values, expected in results:
            assert values.keys() == expected.keys()
            assert all(torch.equal(values[key], expected[key]) for key in expected), name


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("granularity", ["block", "neuron"])
def test_every_rank_gets_what_it_newly_holds(pool, granularity: str, world: int) -> None:
    check(pool(world).run(exchange, granularity, world))


@pytest.mark.slow
def test_two_ranks_per_worker_get_what_they_newly_hold(pool) -> None:
    check(pool(4).run(exchange, "neuron", 2))
