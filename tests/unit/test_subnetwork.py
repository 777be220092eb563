"""Carving a module down to one worker's part, and what survives it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torchvision.models as tv
from torch import Tensor

from lightning_sdp import Component, MaskPlan, ParamSlice
from lightning_sdp.subnetwork import Subnetwork, stand_in
from tests.unit.models import Residual, Stack

MISSING = ("blocks.1", "blocks.3")


def lacking(module: nn.Module, blocks: tuple[str, ...] = MISSING) -> Subnetwork:
    """What worker 1 of 2 has, which lacks the blocks that worker 0 has."""
    found = {
        component.name: component for component in MaskPlan.build(module, num_subnetworks=2, keep_ends=0).components
    }
    pairs = [(component, [0] if name in blocks else [0, 1]) for name, component in found.items()]
    return Subnetwork(module, MaskPlan(2, pairs), worker=1)


def carved(depth: int = 5, **kwargs: Any) -> tuple[Stack, Subnetwork]:
    module = Stack(depth, **kwargs)
    subnetwork = lacking(module)
    subnetwork.carve()
    return module, subnetwork


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def data_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors(module).items()}


# What is gone and what stays


def test_missing_tensors_take_no_memory() -> None:
    module = Stack(5, buffer=True)
    subnetwork = lacking(module)
    assert subnetwork.attached
    subnetwork.carve()
    assert list(subnetwork.missing) == [f"{b}.{t}" for b in MISSING for t in ("fc.weight", "fc.bias", "calls")]
    for tensor in subnetwork.missing.values():
        assert tensor.untyped_storage().nbytes() <= tensor.element_size()
        assert tensor.isnan().all()  # Nobody can take it for a weight.
    assert subnetwork.missing["blocks.1.fc.weight"].shape == (4, 4)


def test_rest_keeps_names_order_and_data() -> None:
    module = Stack(5, buffer=True)
    before, order = data_of(module), list(tensors(module))
    lacking(module).carve()
    after = data_of(module)
    assert list(after) == [name for name in order if not name.startswith(MISSING)]
    for name, value in after.items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert list(module.state_dict()) == [name for name in Stack(5, buffer=True).state_dict() if name in after]
    assert [name for name, _ in module.named_modules()] == [name for name, _ in Stack(5).named_modules()]


def test_indices_and_classes_stay() -> None:
    module, _ = carved()
    assert len(module.blocks) == 5 and list(module.blocks._modules) == list("01234")
    assert all(isinstance(block, Residual) for block in module.blocks)
    assert module.blocks[2].fc.weight is not None and module.blocks[3].fc.weight is None
    assert module.blocks[1].fc.in_features == 4
    x = torch.randn(2, 4)
    assert module.blocks[1](x) is x and module.blocks[1].forward(x) is x
    assert module.blocks[2](x) is not x


def test_gradients_flow_past_missing_blocks() -> None:
    module, subnetwork = carved()
    module(torch.randn(2, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert all(tensor.grad is None for tensor in subnetwork.missing.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_stand_in(dtype: torch.dtype) -> None:
    like = torch.ones(3, 2, dtype=dtype)
    tensor = stand_in(like)
    assert tensor.shape == like.shape and tensor.dtype == dtype
    assert tensor.untyped_storage().nbytes() == tensor.element_size()
    assert bool(tensor.isnan().all()) if tensor.is_floating_point() or tensor.is_complex() else not tensor.any()
    assert stand_in(like, torch.device("meta")).is_meta


def test_worker_that_holds_everything_is_left_alone() -> None:
    module = Stack(5)
    before = tensors(module)
    subnetwork = lacking(module, blocks=())
    subnetwork.carve()
    assert subnetwork.missing == {}
    assert all(tensor is before[name] for name, tensor in tensors(module).items())
    subnetwork.attach()
    assert all(tensor is before[name] for name, tensor in tensors(module).items())


def test_batchnorm_and_downsampling_of_a_resnet() -> None:
    module = tv.resnet18(num_classes=2)
    full = list(module.state_dict())
    subnetwork = lacking(module, ("layer2.0",))
    subnetwork.carve()
    gone = [name for name in full if name.startswith("layer2.0.") and "downsample" not in name]
    assert set(subnetwork.missing) == set(gone) and len(gone) == 12
    assert list(module.state_dict()) == [name for name in full if name not in gone]
    assert subnetwork.missing["layer2.0.bn1.num_batches_tracked"].dtype == torch.int64
    module(torch.randn(2, 3, 32, 32)).sum().backward()
    assert module.layer2[0].downsample[0].weight.grad is not None


# There and back


def test_identity_survives_everything() -> None:
    module = Stack(5, buffer=True)
    before, objects = data_of(module), tensors(module)
    subnetwork = lacking(module)

    def check(attached: bool) -> None:
        assert subnetwork.attached is attached
        names = [name for name in objects if attached or not name.startswith(MISSING)]
        assert list(tensors(module)) == names
        assert all(tensors(module)[name] is objects[name] for name in names)
        assert all(isinstance(tensors(module)[name], nn.Parameter) for name in names if "calls" not in name)

    for _ in range(2):
        subnetwork.carve()
        check(attached=False)
        subnetwork.attach()
        check(attached=True)
        subnetwork.fill({name: before[name].clone() for name in subnetwork.missing})
        check(attached=True)
        for name, value in data_of(module).items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)
        x = torch.randn(2, 3)
        reference = Stack(5, buffer=True)
        reference.load_state_dict(before)
        torch.testing.assert_close(module(x), reference(x), rtol=0, atol=0)
        module(x).sum().backward()
        subnetwork.release()
        check(attached=True)
        assert all(t.untyped_storage().nbytes() <= 4 and t.grad is None for t in subnetwork.missing.values())
        subnetwork.detach()
        check(attached=False)


def test_attach_and_detach_may_be_repeated() -> None:
    module, subnetwork = carved()
    handle = module.blocks[1].register_forward_hook(lambda *_: None)
    for step in (subnetwork.detach, subnetwork.attach, subnetwork.attach, subnetwork.detach, subnetwork.attach):
        step()
    assert type(module.blocks[1]) is Residual
    assert list(module.blocks[1]._forward_hooks) == [handle.id]


def test_whole_structure_ends_also_with_an_error() -> None:
    module, subnetwork = carved()
    with pytest.raises(KeyError), subnetwork.whole_structure():
        assert subnetwork.attached and type(module.blocks[1]) is Residual
        raise KeyError
    assert not subnetwork.attached
    subnetwork.attach()
    with subnetwork.whole_structure():
        assert subnetwork.attached
    assert subnetwork.attached


def test_requires_grad_and_attributes_of_parameters_survive() -> None:
    module = Stack(5)
    module.blocks[1].fc.bias.requires_grad_(False)
    module.blocks[1].fc.weight.no_decay = True  # type: ignore[assignment]
    subnetwork = lacking(module)
    subnetwork.carve()
    subnetwork.attach()
    assert module.blocks[1].fc.weight.requires_grad and not module.blocks[1].fc.bias.requires_grad
    assert module.blocks[1].fc.weight.no_decay is True


def test_tied_parameters_of_missing_blocks_stay_tied() -> None:
    module = Stack(5)
    module.blocks[1].again = nn.Linear(4, 4, bias=False)
    module.blocks[1].again.weight = module.blocks[1].fc.weight
    weight = module.blocks[1].fc.weight
    subnetwork = lacking(module)
    subnetwork.carve()
    assert module.blocks[1].again.weight is None and module.blocks[1].fc.weight is None
    subnetwork.attach()
    assert module.blocks[1].again.weight is module.blocks[1].fc.weight is weight


def test_modes_follow_the_parent() -> None:
    module, subnetwork = carved()
    module.eval()
    assert not module.blocks[1].training and not module.blocks[1].fc.training
    subnetwork.attach()
    assert not module.blocks[1].training and not module.blocks[1].fc.training
    subnetwork.detach()
    module.train()
    subnetwork.attach()
    assert module.blocks[1].training and module.blocks[1].fc.training


# Hooks and patches


class _Calls:
    """Hooks of every kind on one module, and the kinds that were called."""

    def __init__(self, module: nn.Module) -> None:
        self.seen: list[str] = []
        note = self.seen.append
        self.handles = {
            "pre": module.register_forward_pre_hook(lambda *_: note("pre")),
            "pre kwargs": module.register_forward_pre_hook(lambda *_: note("pre kwargs"), with_kwargs=True),
            "forward": module.register_forward_hook(lambda *_: note("forward")),
            "kwargs": module.register_forward_hook(lambda *_: note("kwargs"), with_kwargs=True),
            "always": module.register_forward_hook(lambda *_: note("always"), always_call=True),
            "backward pre": module.register_full_backward_pre_hook(lambda *_: note("backward pre")),
            "backward": module.register_full_backward_hook(lambda *_: note("backward")),
        }

    def of(self, module: nn.Module) -> list[str]:
        """Runs the module both ways, and returns the hooks that this called."""
        self.seen.clear()
        module(torch.randn(2, 3, requires_grad=True)).sum().backward()
        return sorted(self.seen)


ALL_HOOKS = sorted(["pre", "pre kwargs", "forward", "kwargs", "always", "backward pre", "backward"])


@pytest.fixture
def hooked() -> Iterator[tuple[Stack, Subnetwork, _Calls]]:
    module = Stack(5)
    calls = _Calls(module.blocks[1])
    yield module, lacking(module), calls


def restore(subnetwork: Subnetwork) -> None:
    subnetwork.attach()
    subnetwork.fill({name: torch.ones_like(tensor) for name, tensor in subnetwork.missing.items()})


def test_hooks_rest_while_their_block_is_missing(hooked: tuple[Stack, Subnetwork, _Calls]) -> None:
    module, subnetwork, calls = hooked
    assert calls.of(module) == ALL_HOOKS
    subnetwork.carve()
    assert calls.of(module) == []
    restore(subnetwork)
    assert calls.of(module) == ALL_HOOKS
    subnetwork.detach()
    assert calls.of(module) == []


def test_hook_removed_while_its_block_is_missing(hooked: tuple[Stack, Subnetwork, _Calls]) -> None:
    module, subnetwork, calls = hooked
    subnetwork.carve()
    for kind in ("forward", "pre kwargs", "backward"):
        calls.handles[kind].remove()
    restore(subnetwork)
    assert calls.of(module) == ["always", "backward pre", "kwargs", "pre"]


def test_hook_registered_while_its_block_is_missing() -> None:
    module, subnetwork = carved()
    calls = _Calls(module.blocks[1])
    assert calls.of(module) == []
    restore(subnetwork)
    assert calls.of(module) == ALL_HOOKS
    calls.handles["forward"].remove()
    calls.handles["backward"].remove()
    assert calls.of(module) == sorted(set(ALL_HOOKS) - {"forward", "backward"})
    subnetwork.detach()
    calls.handles["pre"].remove()
    subnetwork.attach()
    assert calls.of(module) == ["always", "backward pre", "kwargs", "pre kwargs"]


def test_tensor_hooks_of_missing_parameters_survive() -> None:
    module, seen = Stack(5), []
    module.blocks[1].fc.weight.register_hook(lambda grad: seen.append("grad"))
    module.blocks[1].fc.weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    subnetwork = lacking(module)
    subnetwork.carve()
    restore(subnetwork)
    module(torch.randn(2, 3)).sum().backward()
    assert seen == ["grad", "accumulated"]


def test_forward_patched_on_the_instance_rests_and_returns() -> None:
    module = Stack(5)
    original = module.blocks[1].forward
    patched = module.blocks[1].forward = lambda x: original(x) * 0 + 7
    x = torch.randn(2, 4)
    subnetwork = lacking(module)
    subnetwork.carve()
    assert module.blocks[1](x) is x
    restore(subnetwork)
    assert module.blocks[1].forward is patched
    assert set(module.blocks[1](x).unique().tolist()) == {7.0}
    subnetwork.detach()
    assert module.blocks[1](x) is x
    assert "forward" not in module.blocks[2].__dict__


def test_attributes_set_while_missing_stay() -> None:
    module, subnetwork = carved()
    module.blocks[1].note = "here"
    subnetwork.attach()
    assert module.blocks[1].note == "here"


# Copies and failures


def test_copy_of_a_carved_module_is_carved_and_independent() -> None:
    module, subnetwork = carved(buffer=True)
    twin, x = copy.deepcopy(module), torch.randn(2, 3)
    torch.testing.assert_close(twin(x), module(x), rtol=0, atol=0)
    assert list(tensors(twin)) == list(tensors(module))
    with torch.no_grad():
        twin.blocks[0].fc.weight.zero_()
    assert module.blocks[0].fc.weight.any()
    restore(subnetwork)
    assert twin.blocks[1].fc.weight is None and isinstance(twin.blocks[1], Residual)
    y = torch.randn(2, 4)
    assert twin.blocks[1](y) is y


def test_copy_of_an_attached_module_is_whole() -> None:
    module, subnetwork = carved()
    restore(subnetwork)
    twin, x = copy.deepcopy(module), torch.randn(2, 3)
    subnetwork.release()
    subnetwork.detach()
    assert type(twin.blocks[1]) is Residual
    assert twin(x).isfinite().all() and not torch.equal(twin(x), module(x))


@pytest.mark.parametrize("attached", [False, True])
def test_abandoned_module_has_its_structure_with_missing_tensors_on_meta(attached: bool) -> None:
    module = Stack(5, buffer=True)
    module.blocks[1].fc.bias.requires_grad_(False)
    module.blocks[1].fc.weight.no_decay = True  # type: ignore[assignment]
    before, objects = data_of(module), tensors(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    subnetwork = lacking(module)
    subnetwork.carve()
    module(torch.randn(2, 3)).sum().backward()
    if attached:
        subnetwork.attach()
    subnetwork.abandon()
    after = tensors(module)
    assert list(after) == list(objects)
    assert type(module.blocks[1]) is Residual
    for name, tensor in after.items():
        assert tensor.is_meta == name.startswith(MISSING), name
        assert tensor.shape == before[name].shape and tensor.dtype == before[name].dtype
        if isinstance(objects[name], nn.Parameter):
            assert tensor is objects[name] and isinstance(tensor, nn.Parameter)
            assert tensor.requires_grad == (name != "blocks.1.fc.bias")
        if not tensor.is_meta:
            torch.testing.assert_close(tensor.detach(), before[name], rtol=0, atol=0)
    assert after["blocks.1.fc.weight"].no_decay is True
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in module.parameters()}


def test_plan_may_mask_only_some_tensors_of_a_tree() -> None:
    """Whatever the plan does not name stays, also inside of a missing block."""
    module = Stack(2)
    component = Component("blocks.0", "block", (ParamSlice("blocks.0.fc.weight"),))
    Subnetwork(module, MaskPlan(2, [(component, [0])]), worker=1).carve()
    assert module.blocks[0].fc.weight is None and module.blocks[0].fc.bias is not None
