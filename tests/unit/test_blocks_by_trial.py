"""Blocks whose forward cannot be read, found by calling them with parameters that are zero."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from lightning_sdp import MaskPlan, discover_components
from lightning_sdp.components.calls import Call, KnownCalls, recorded_calls
from lightning_sdp.components.discovery import discover
from lightning_sdp.components.skips import identity_skip, is_unreadable, trace_skip
from lightning_sdp.subnetwork import Subnetwork
from tests.unit.models import randomize

SAMPLE = torch.zeros(2, 3, 4)


class Opaque(nn.Module):
    """A branch behind a condition on a shape, which a trace cannot decide; what becomes of it is up to others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 4)

    def branch(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(x)) if x.shape[0] > 1 else self.fc(x)

    def forward(self, x: Tensor) -> Any:
        return x + self.branch(x)


class OnData(Opaque):
    def branch(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.sum() > 0 else self.fc(-x)


class PostNorm(Opaque):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.fc(x) if x.shape[0] > 1 else x)


class Plain(Opaque):
    def forward(self, x: Tensor) -> Tensor:
        return self.branch(x)


class Halved(Opaque):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x + self.branch(x)


class Biased(Opaque):
    """Adds something that is no parameter, so that without the branch its input does not come out."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) + 1


class Unused(Opaque):
    """Returns its input, whatever its parameters are: there is nothing to leave out."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[0] > 1 else x + self.fc(x)


class Tuples(Opaque):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> tuple[Any, ...]:
        update = self.branch(x)
        return x + scale * update, update, mask


class Lists(Opaque):
    def forward(self, memory: Tensor, x: Tensor) -> list[Tensor]:
        return [x + self.branch(memory) + self.branch(x), memory]


class Model(nn.Module):
    """Calls its blocks in turn."""

    def __init__(self, block: Callable[[], nn.Module], depth: int = 3) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(4, 4), nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if isinstance(block, Tuples):
                x, _, _ = block(x, mask=torch.ones(3, 3), scale=2.0)
            elif isinstance(block, Lists):
                x, _ = block(x.flip(0), x)
            else:
                x = block(x)
        return x


def recording(module: nn.Module, runs: list[int] | None = None) -> Callable[[], Mapping[str, Call]]:
    """Runs real data through a model, as the strategy does with a training batch."""

    def record() -> Mapping[str, Call]:
        if runs is not None:
            runs.append(1)
        with recorded_calls(module) as calls, torch.no_grad():
            module(torch.randn(2, 3, 4))
        return calls

    return record


def names(components: Any) -> list[str]:
    return [component.name for component in components]


BLOCKS = [f"blocks.{i}" for i in range(3)]


@pytest.mark.parametrize("block", [Opaque, OnData, Tuples, Lists])
def test_forward_that_cannot_be_read_needs_a_sample_of_its_input(block: type[nn.Module]) -> None:
    module, runs = Model(block), list[int]()
    traced = trace_skip(module.blocks[0])
    assert isinstance(traced, str) and is_unreadable(traced)
    with pytest.raises(ValueError, match=r"No maskable block was found .*'blocks\.0': its forward cannot be traced"):
        discover_components(module)
    assert names(discover(module, record=recording(module, runs)).maskable) == BLOCKS
    assert runs == [1]  # once for all of them
    assert names(discover_components(module, example_inputs=SAMPLE)) == BLOCKS
    module.example_input_array = SAMPLE
    assert names(discover(module, record=recording(module, runs)).maskable) == BLOCKS and runs == [1]


class Failing(OnData):
    def branch(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.sum() > 0 else self.missing


def test_sample_input_that_the_model_cannot_run_on_is_a_warning() -> None:
    module = Model(Failing)
    nn.init.zeros_(module.stem.bias)
    with (
        pytest.warns(UserWarning, match="The sample input cannot be run through Model.*has no attribute 'missing'"),
        pytest.raises(ValueError, match="its forward cannot be traced"),
    ):
        discover(module, example_inputs=SAMPLE)


@pytest.mark.parametrize("block", [PostNorm, Plain, Halved, Biased, Unused])
def test_what_is_no_block_with_an_identity_is_rejected_with_the_reason(block: type[nn.Module]) -> None:
    message = r"'blocks\.0': with its parameters at zero it does not return its input, as a residual block would"
    with pytest.raises(ValueError, match=message):
        discover_components(Model(block), example_inputs=SAMPLE)


def test_linear_layers_in_a_row_are_no_blocks() -> None:
    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.shape[0] > 1 else -x)

    module = nn.Sequential(Layer(4, 4), Layer(4, 4), Layer(4, 4))
    with pytest.raises(ValueError, match="'0': with its parameters at zero it does not return its input"):
        discover_components(module, example_inputs=SAMPLE)


def test_only_modules_that_stand_beside_others_of_their_class_are_tried() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Opaque(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="its forward cannot be traced"):
        discover_components(module, example_inputs=SAMPLE)
    assert names(discover(module, components="1", example_inputs=SAMPLE).maskable) == ["1"]  # named, all the same


def test_block_that_fails_when_it_is_tried_out_says_so() -> None:
    class Picky(Opaque):
        def forward(self, x: Tensor) -> Tensor:
            if not (x == x.round()).all():
                raise RuntimeError("whole numbers only")
            return super().forward(x)

    module = Model(Picky)
    with recorded_calls(module) as calls:
        module.stem(SAMPLE)
    calls["blocks.0"] = calls["stem"]
    reason = identity_skip(module.blocks[0], calls["blocks.0"])
    assert reason == "it cannot be tried out (RuntimeError: whole numbers only)"


@torch.no_grad()
@pytest.mark.parametrize("block", [Opaque, OnData, Tuples, Lists])
def test_missing_blocks_equal_silent_branches(block: type[nn.Module]) -> None:
    module = randomize(Model(block))
    x, silent = torch.randn(2, 3, 4, dtype=torch.float64), copy.deepcopy(module)
    sample = Model(block)
    plan = MaskPlan.build(module, num_subnetworks=2, keep_ends=0, record=recording(sample))
    assert set(plan.skips) == set(BLOCKS)
    missing = names(plan.missing_on(1))
    for name in missing:
        for parameter in silent.get_submodule(name).fc.parameters():
            parameter.zero_()
    assert 0 < len(missing) < 3 and not torch.equal(module(x), silent(x))
    Subnetwork(module, plan, 1).carve()
    torch.testing.assert_close(module(x), silent(x), rtol=1e-12, atol=1e-12)


def test_missing_block_returns_what_it_was_tried_to_return() -> None:
    module = Model(Tuples)
    plan = MaskPlan.build(module, num_subnetworks=2, keep_ends=0, example_inputs=SAMPLE)
    worker = 1 - plan.holders("blocks.0")[0]
    Subnetwork(module, plan, worker).carve()
    x, mask = torch.randn(2, 3, 4), torch.zeros(3, 3)
    for out in (module.blocks[0](x, mask), module.blocks[0](mask=mask, x=x, scale=3.0)):
        assert type(out) is tuple and out[0] is x and out[1] is None and out[2] is mask
    module = Model(Lists)
    plan = MaskPlan.build(module, num_subnetworks=2, keep_ends=0, example_inputs=SAMPLE)
    Subnetwork(module, plan, 1 - plan.holders("blocks.0")[0]).carve()
    first, second = module.blocks[0](mask, x)
    assert first is x and second is mask  # and not the first argument


def test_plan_from_a_file_finds_the_skips_again() -> None:
    module = Model(Lists)
    plan = MaskPlan.build(module, num_subnetworks=2, keep_ends=0, record=recording(module))
    read = MaskPlan.from_json(plan.to_json())
    assert read.skips == {}
    fitted = read.fit(module, record=recording(module))
    assert set(fitted.skips) == set(BLOCKS) and fitted == plan
    Subnetwork(module, fitted, 1 - fitted.holders("blocks.0")[0]).carve()
    x = torch.randn(2, 3, 4)
    assert module.blocks[0](torch.zeros(2, 3, 4), x)[0] is x


def test_trial_leaves_no_trace() -> None:
    class Counting(Opaque):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))
            self.latest = None

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            self.latest = x
            return x + torch.dropout(self.branch(x), 0.5, self.training)

    module = Model(Counting)
    torch.manual_seed(5)
    random.seed(5)
    before, python, values = torch.get_rng_state(), random.getstate(), copy.deepcopy(module.state_dict())
    state = {name: dict(m.__dict__) for name, m in module.named_modules()}
    assert names(discover_components(module, example_inputs=SAMPLE)) == BLOCKS
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == python
    assert all(torch.equal(value, values[name]) for name, value in module.state_dict().items())
    for name, m in module.named_modules():
        assert m.__dict__.keys() == state[name].keys() and m.training
        assert all(m.__dict__[key] is value for key, value in state[name].items())


def test_calls_are_recorded_without_data_and_once() -> None:
    module = Model(Tuples)
    calls = KnownCalls(module, SAMPLE)
    call = calls.get("blocks.1")
    assert call is not None and call.kwargs["scale"] == 2.0 and not call.kwargs["mask"].dtype.is_complex
    assert call.args[0].shape == (2, 3, 4) and call.kwargs["mask"].shape == (3, 3)
    assert calls.get("nowhere") is None
    runs: list[int] = []
    recorded = KnownCalls(module, None, recording(module, runs))
    assert recorded.get("blocks.0", needed=False) is None and runs == []
    assert recorded.get("blocks.0") is not None and recorded.get("blocks.1", needed=False) is not None and runs == [1]
    assert all(not m._forward_pre_hooks for m in module.modules())
