"""Carving a module down to some of its neurons, channels and heads, and putting it back together."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torchvision.models as tv
from torch import Tensor
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.models.swin_transformer import ShiftedWindowAttention

from lightning_sdp import MaskPlan
from lightning_sdp.components.base import Group
from lightning_sdp.subnetwork import Subnetwork
from tests.models import WIDTH, make
from tests.unit.models import randomize

Build = Callable[[], nn.Module]


class _Encoder(nn.Module):
    """Attention of torch, fused, whose head count is welded to its width."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 4, 12, batch_first=True, norm_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.example_input_array = torch.zeros(2, 3, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


class _Inverted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(InvertedResidual(4, 4, 1, 2), InvertedResidual(4, 4, 1, 3))
        self.example_input_array = torch.zeros(2, 4, 5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class _Tied(nn.Module):
    """Two blocks whose hidden layers share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) for _ in range(2))
        self.blocks[1][0].weight = self.blocks[0][0].weight
        self.blocks[1][1].weight = self.blocks[0][1].weight
        self.example_input_array = torch.zeros(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class _Literal(nn.Module):
    """Heads in a literal of its forward, so that its tensors can only be padded."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.example_input_array = torch.zeros(2, 3, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], 4, 2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


MODELS: dict[str, tuple[Build, dict[str, Any]]] = {
    "mlp": (functools.partial(make, "mlp", blocks=2), {}),
    "gqa": (functools.partial(make, "gqa", blocks=2), {}),
    "conv": (functools.partial(make, "conv", blocks=2), {}),
    "swin": (functools.partial(make, "swin"), {}),
    "encoder": (_Encoder, {}),
    "inverted": (_Inverted, {}),
    "tied": (_Tied, {}),
    "padded": (_Literal, {"on_unsliceable": "pad"}),
}


@functools.cache
def plan_of(kind: str) -> MaskPlan:
    torch.set_num_threads(1)
    build, options = MODELS[kind]
    return MaskPlan.build(build(), num_subnetworks=2, granularity="neuron", keep_ends=0, **options)


def built(kind: str, worker: int = 1) -> tuple[nn.Module, MaskPlan, Subnetwork]:
    module = randomize(MODELS[kind][0]())
    return module, plan_of(kind), Subnetwork(module, plan_of(kind), worker)


def carved(kind: str, worker: int = 1) -> tuple[nn.Module, MaskPlan, Subnetwork]:
    module, plan, subnetwork = built(kind, worker)
    subnetwork.carve()
    return module, plan, subnetwork


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def data_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors(module).items()}


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Classes and plain attributes of all modules."""
    return {
        f"{path}.{key}": value
        for path, m in module.named_modules()
        for key, value in [("class", type(m)), *vars(m).items()]
        if type(value) in (int, bool, tuple, type) or key == "class"
    }


def held_of(plan: MaskPlan, name: str, full: Tensor, worker: int = 1) -> Tensor:
    """The held entries of a full tensor, dense; by the plan's masks rather than its layouts."""
    mask = plan.element_mask(name, worker, full.shape)
    dims = [d for d in range(full.dim()) if not bool(mask.movedim(d, 0).reshape(full.shape[d], -1).all(1).all())]
    for dim in dims:
        rows = mask.movedim(dim, 0).reshape(full.shape[dim], -1).any(1)
        full = full.index_select(dim, rows.nonzero().flatten())
    return full


def groups_of(plan: MaskPlan, kind: str) -> list[Group]:
    return [group for group in plan.groups if group.kind == kind]


# What is gone and what stays


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("worker", [0, 1])
def test_cut_tensors_are_dense_and_the_same_objects(kind: str, worker: int) -> None:
    module, plan, subnetwork = built(kind, worker)
    before, objects = data_of(module), tensors(module)
    subnetwork.carve()
    after = tensors(module)
    assert list(after) == list(objects) and all(after[name] is objects[name] for name in objects)
    assert subnetwork.missing == {} and set(subnetwork.cut) <= set(plan.layouts) and subnetwork.cut
    for name, tensor in after.items():
        expected = held_of(plan, name, before[name], worker)
        assert torch.equal(tensor.detach(), expected), name
        assert tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert (tensor.shape != before[name].shape) == (name in subnetwork.cut)
        assert isinstance(tensor, nn.Parameter) == isinstance(objects[name], nn.Parameter)


@pytest.mark.parametrize("kind", MODELS)
def test_carved_module_computes_what_the_full_one_does_with_zeros(kind: str) -> None:
    module, plan, _ = built(kind)
    zeroed = copy.deepcopy(module)
    with torch.no_grad():
        for name, parameter in zeroed.named_parameters():
            parameter.mul_(plan.element_mask(name, 1, parameter.shape))
    x = torch.randn(module.example_input_array.shape, dtype=torch.float64)
    expected = zeroed(x)
    with torch.no_grad():
        full = module(x)
    Subnetwork(module, plan, 1).carve()
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)
    assert (full - expected).abs().max() > 1e-6
    expected.sum().backward()
    module(x).sum().backward()
    for name, parameter in module.named_parameters():
        gradient = tensors(zeroed)[name].grad
        assert gradient is not None and parameter.grad is not None and parameter.grad.shape == parameter.shape
        torch.testing.assert_close(parameter.grad, held_of(plan, name, gradient), rtol=1e-9, atol=1e-11)


def test_sizes_of_linear_layers_and_head_counts_follow() -> None:
    module, plan, _ = carved("gqa")
    for i, block in enumerate(module.blocks):
        groups = {group.name: group for group in plan.groups}
        heads = len(plan.held_units(groups[f"blocks.{i}.heads"], 1))
        hidden = len(plan.held_units(groups[f"blocks.{i}.hidden"], 1))
        assert (heads, hidden) == (1, 10)
        assert (block.heads, block.kv_heads, block.width) == (2, 1, WIDTH // 4)
        assert (block.query.out_features, block.out.in_features, block.out.out_features) == (6, 6, WIDTH)
        assert block.key_value.out_features == 2 * WIDTH // 4
        assert (block.gate_up.out_features, block.down.in_features) == (20, 10)


def test_sizes_of_convolutions_and_norms_follow() -> None:
    module, plan, _ = carved("conv")
    for block, group in zip(module.blocks, plan.groups, strict=True):
        channels = len(plan.held_units(group, 1))
        assert 0 < channels < group.units
        assert block.conv1.out_channels == block.bn1.num_features == block.conv2.in_channels == channels
        assert block.bn1.running_mean.shape == block.bn1.weight.shape == (channels,)
        assert block.conv2.out_channels == block.bn2.num_features == group.units
    module, _, _ = carved("inverted")
    for block, channels in zip(module.blocks, (4, 6), strict=True):
        depthwise = block.conv[1][0]
        assert depthwise.groups == depthwise.in_channels == depthwise.out_channels == channels
        assert block.conv[2].in_channels == channels and block.conv[2].out_channels == 4


def test_welded_attention_changes_its_class_and_back() -> None:
    module, _, subnetwork = carved("encoder")
    for layer in module.encoder.layers:
        attn = layer.self_attn
        assert isinstance(attn, nn.MultiheadAttention) and type(attn).__name__ == "SlicedMultiheadAttention"
        assert (attn.num_heads, attn.head_dim, attn.embed_dim, attn._held_heads) == (2, 2, 8, attn._held_heads)
        assert attn.in_proj_weight.shape == (12, 8) and attn.out_proj.in_features == 4
    subnetwork.attach()
    for layer in module.encoder.layers:
        assert type(layer.self_attn) is nn.MultiheadAttention and layer.self_attn.num_heads == 4
        assert not hasattr(layer.self_attn, "_held_heads") and layer.self_attn._qkv_same_embed_dim
    swin, _, subnetwork = carved("swin")
    windows = [m for m in swin.modules() if isinstance(m, ShiftedWindowAttention)]
    assert {type(m).__name__ for m in windows} == {"SlicedShiftedWindowAttention"}
    subnetwork.attach()
    assert {type(m) for m in windows} == {ShiftedWindowAttention}


def test_tied_tensors_stay_tied() -> None:
    module, plan, subnetwork = built("tied")
    full = data_of(module)
    assert [group.units for group in plan.groups] == [6]
    subnetwork.carve()
    first, second = module.blocks
    assert first[0].weight is second[0].weight and first[1].weight is second[1].weight
    assert [layer.weight.shape for layer in first] == [(3, 4), (4, 3)]
    assert [block[0].out_features for block in module.blocks] == [3, 3]
    assert [block[1].in_features for block in module.blocks] == [3, 3]
    assert first[0].bias.shape == second[0].bias.shape == (3,)
    subnetwork.attach()
    subnetwork.fill({name: full[name] for name in subnetwork.cut})
    assert module.blocks[0][0].weight is module.blocks[1][0].weight
    assert torch.equal(module.blocks[1][0].weight, full["blocks.0.0.weight"])


def test_padded_tensors_are_stored_cut_and_read_whole() -> None:
    module, plan, subnetwork = built("padded")
    before = data_of(module)
    assert (
        set(plan.padded)
        == set(subnetwork.cut)
        == {*(f"{n}.{t}" for n in "qkv" for t in ("weight", "bias")), "o.weight"}
    )
    subnetwork.carve()
    stored = dict(module.named_parameters())
    assert stored["q.weight"].shape == (4, 8) and stored["o.weight"].shape == (8, 4)
    assert module.state_dict()["q.weight"].shape == (4, 8)
    for layer in (module.q, module.k, module.v):
        mask = plan.element_mask("q.weight", 1, (8, 8))
        name = next(n for n in "qkv" if getattr(module, n) is layer)
        assert torch.equal(layer.weight, before[f"{name}.weight"] * mask)
        assert isinstance(layer, nn.Linear) and type(layer).__name__ == "PaddedLinear"
        assert (layer.in_features, layer.out_features) == (8, 8)
    module(torch.randn(1, 2, 8, dtype=torch.float64)).sum().backward()
    assert stored["q.weight"].grad is not None and stored["q.weight"].grad.shape == (4, 8)
    subnetwork.attach()
    assert type(module.q) is nn.Linear and module.q.weight is stored["q.weight"] and module.q.weight.shape == (8, 8)


def test_worker_that_holds_everything_is_left_alone() -> None:
    module = randomize(make("mlp", blocks=2))
    plan = MaskPlan.build(module, num_subnetworks=2, granularity="neuron", coverage=[1.0, 0.5], keep_ends=0)
    before, objects, attributes = data_of(module), tensors(module), attributes_of(module)
    subnetwork = Subnetwork(module, plan, 0)
    subnetwork.carve()
    assert subnetwork.cut == {} and attributes_of(module) == attributes
    assert all(tensors(module)[name] is objects[name] for name in objects)
    assert all(torch.equal(value, before[name]) for name, value in data_of(module).items())


# There and back


@pytest.mark.parametrize("kind", MODELS)
def test_there_and_back_again(kind: str) -> None:
    module, _, subnetwork = built(kind)
    before, objects, attributes = data_of(module), tensors(module), attributes_of(module)
    x = torch.randn(module.example_input_array.shape, dtype=torch.float64)
    full = module(x).detach()
    for _ in range(2):
        subnetwork.carve()
        local, changed, small = data_of(module), attributes_of(module), module(x)
        assert changed != attributes
        subnetwork.attach()
        assert attributes_of(module) == attributes
        for name, tensor in tensors(module).items():
            assert tensor is objects[name] and tensor.shape == before[name].shape
            if name in subnetwork.cut:  # a stand-in: no memory, and nobody can take it for a weight
                assert tensor.untyped_storage().nbytes() == tensor.element_size() and bool(tensor.isnan().all())
                assert torch.equal(subnetwork.local(name).detach(), local[name])
        subnetwork.fill({name: before[name].clone() for name in subnetwork.cut})
        assert all(torch.equal(value, before[name]) for name, value in data_of(module).items())
        assert torch.equal(module(x), full)
        subnetwork.release()
        assert all(tensor.untyped_storage().nbytes() == tensor.element_size() for tensor in subnetwork.cut.values())
        subnetwork.detach()
        assert attributes_of(module) == changed
        assert all(torch.equal(value, local[name]) for name, value in data_of(module).items())
        assert torch.equal(module(x), small)
        subnetwork.attach()
        subnetwork.fill({name: before[name].clone() for name in subnetwork.cut})


def test_filled_data_does_not_change_what_the_worker_stores_but_replaced_data_does() -> None:
    module, plan, subnetwork = carved("mlp")
    name, stored = "blocks.0.fc1.weight", data_of(module)["blocks.0.fc1.weight"]
    other = torch.randn(8, WIDTH, dtype=torch.float64)
    subnetwork.attach()
    subnetwork.fill({name: other.clone()})
    subnetwork.detach()
    assert torch.equal(module.blocks[0].fc1.weight, stored)
    subnetwork.attach()
    subnetwork.replace({name: other.clone()})
    assert torch.equal(module.blocks[0].fc1.weight, other)
    subnetwork.detach()
    assert torch.equal(module.blocks[0].fc1.weight, held_of(plan, name, other))
    subnetwork.attach()
    subnetwork.replace({name: other * 2})
    subnetwork.release()
    assert module.blocks[0].fc1.weight.isnan().all() and module.blocks[0].fc1.weight.shape == (8, WIDTH)
    subnetwork.detach()
    assert torch.equal(module.blocks[0].fc1.weight, held_of(plan, name, other * 2))


def test_gradients_are_put_aside_while_the_module_is_whole() -> None:
    module, _, subnetwork = carved("gqa")
    module(torch.randn(2, 3, 5, dtype=torch.float64)).sum().backward()
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    with subnetwork.whole_structure():
        for name, parameter in module.named_parameters():
            assert parameter.grad is (None if name in subnetwork.cut else grads[name])
    assert not subnetwork.attached
    for name, parameter in module.named_parameters():
        assert parameter.grad is grads[name] and parameter.grad.shape == parameter.shape
    module.zero_grad(set_to_none=True)
    with subnetwork.whole_structure():
        pass
    assert all(parameter.grad is None for parameter in module.parameters())


def test_gradients_from_before_carving_are_dropped_where_tensors_are_cut() -> None:
    module, _, subnetwork = built("mlp")
    module(torch.randn(2, 5, dtype=torch.float64)).sum().backward()
    subnetwork.carve()
    assert all((p.grad is None) == (name in subnetwork.cut) for name, p in module.named_parameters())


def test_attach_and_detach_may_be_repeated() -> None:
    module, _, subnetwork = carved("encoder")
    changed = attributes_of(module)
    for step in (subnetwork.detach, subnetwork.attach, subnetwork.attach, subnetwork.detach, subnetwork.detach):
        step()
    assert attributes_of(module) == changed
    assert module(torch.randn(2, 3, 8, dtype=torch.float64)).isfinite().all()


def test_optimizer_hooks_and_attributes_of_cut_parameters_survive() -> None:
    module, _, subnetwork = built("mlp")
    weight, seen = module.blocks[0].fc1.weight, []
    weight.no_decay = True
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.shape))
    module.blocks[0].fc2.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    subnetwork.carve()
    before = data_of(module)
    module(torch.randn(2, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert seen == [(4, WIDTH)] and weight.no_decay is True
    assert module.blocks[0].fc2.weight.grad is None and not module.blocks[0].fc2.weight.requires_grad
    assert not torch.equal(weight, before["blocks.0.fc1.weight"])


@pytest.mark.parametrize("kind", ["gqa", "conv", "encoder", "padded"])
@pytest.mark.parametrize("attached", [False, True])
def test_abandoned_module_has_its_structure_with_cut_tensors_on_meta(kind: str, attached: bool) -> None:
    module, _, subnetwork = built(kind)
    before, objects, attributes = data_of(module), tensors(module), attributes_of(module)
    frozen = next(iter(subnetwork.cut))
    objects[frozen].requires_grad_(False)
    subnetwork.carve()
    module(torch.randn(module.example_input_array.shape, dtype=torch.float64)).sum().backward()
    if attached:
        subnetwork.attach()
    subnetwork.abandon()
    after = tensors(module)
    assert list(after) == list(objects) and attributes_of(module) == attributes
    for name, tensor in after.items():
        assert tensor.is_meta == (name in subnetwork.cut), name
        assert tensor.shape == before[name].shape and tensor.dtype == before[name].dtype
        if isinstance(objects[name], nn.Parameter):
            assert tensor is objects[name] and tensor.requires_grad == (name != frozen)
        if not tensor.is_meta:
            assert torch.equal(tensor.detach(), before[name])


def test_copy_of_a_carved_module_is_carved_and_independent() -> None:
    module, _, subnetwork = carved("encoder")
    twin, x = copy.deepcopy(module), torch.randn(2, 3, 8, dtype=torch.float64)
    small = module(x)
    subnetwork.attach()
    assert torch.equal(twin(x), small)
    assert twin.encoder.layers[0].self_attn.num_heads == 2 and module.encoder.layers[0].self_attn.num_heads == 4


def test_stochastic_depth_and_other_classes_of_a_resnet_hold() -> None:
    module = tv.ResNet(tv.resnet.BasicBlock, [1, 1, 1, 1], 5, width_per_group=64)
    plan = MaskPlan.build(module, num_subnetworks=4, granularity="neuron", coverage=0.25, keep_ends=0)
    before = sum(parameter.numel() for parameter in module.parameters())
    Subnetwork(module, plan, 2).carve()
    after = sum(parameter.numel() for parameter in module.parameters())
    cut = sum(plan.sizes or ())
    assert before - after == pytest.approx(0.75 * cut)
    module.train()(torch.randn(2, 3, 32, 32)).sum().backward()
    assert module.layer4[0].bn1.running_mean.shape == (128,) == module.layer4[0].bn1.weight.grad.shape
