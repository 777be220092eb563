"""Traced discovery: the groups it finds in many models, that they are sound, and what it refuses."""

import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from lightning_sdp.components.base import Group, Member
from lightning_sdp.components.factors import leaves, new_dims, reshape, take, unify
from lightning_sdp.components.tracing import Traced, TracingError, trace_groups
from tests.zoo import ZOO

KINDS = {
    "mlp": {"neurons": 2},
    "unet": {"channels": 8},
    "llama": {"heads": 2, "neurons": 2},
    "resnet18": {"channels": 8},
    "resnet50": {"channels": 11},  # two for each block, and the stem
    "wide_resnet50": {"channels": 11},
    "resnext50": {"channels": 6},  # one for each block: the groups of its convolution
    "mobilenet_v2": {"channels": 7},
    "mobilenet_v3": {"channels": 7, "neurons": 1},
    "convnext": {"neurons": 4},
    "swin": {"heads": 3, "neurons": 3},
    "swin_v2": {"heads": 3, "neurons": 6},  # with the networks of the position biases
    "vit": {"heads": 2, "neurons": 2},
    "encoder_post_norm": {"heads": 2, "neurons": 2},
    "encoder_pre_norm": {"heads": 2, "neurons": 2},
    "hf_llama": {"heads": 2, "neurons": 2},
    "hf_mistral": {"heads": 2, "neurons": 2},
    "hf_qwen3": {"heads": 2, "neurons": 2},
    "hf_gpt2": {"heads": 2, "neurons": 2},
    "hf_bert": {"heads": 2, "neurons": 2},
    "hf_t5": {"heads": 3, "neurons": 4},  # each kind of attention shares its heads over all layers
}
Layout = tuple[str, int, tuple[int, ...], int, bool]


@functools.cache
def traced(name: str) -> tuple[nn.Module, Any, Traced]:
    if name.startswith("hf_"):
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    module, inputs = ZOO[name]()
    module.eval()
    return module, inputs, trace_groups(module, inputs)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def layouts(group: Group, prefix: str = "") -> list[Layout]:
    return [(m.name.removeprefix(prefix), m.dim, m.layout, m.axis, m.reads) for m in group.members]


def find(result: Traced, name: str) -> Group:
    return next(group for group in result.groups if group.name == name)


@pytest.mark.parametrize("name", ZOO)
def test_groups_of_the_zoo(name: str) -> None:
    module, _, result = traced(name)
    assert Counter(group.kind for group in result.groups) == KINDS[name]
    names = [group.name for group in result.groups]
    assert len(set(names)) == len(names)
    order = {tensor: i for i, tensor in enumerate(tensors_of(module))}
    firsts = [order[group.members[0].name] for group in result.groups]
    assert firsts == sorted(firsts)
    assert not set(names) & set(result.whole)


@pytest.mark.parametrize("name", ZOO)
def test_units_partition_their_dimensions(name: str) -> None:
    module, _, result = traced(name)
    tensors = tensors_of(module)
    for group in result.groups:
        assert group.units >= 2
        assert any(member.reads for member in group.members)
        for member in group.members:
            assert member.layout[member.axis] == group.units
            runs = sorted(run for unit in range(group.units) for run in member.runs(unit, unit + 1))
            assert [stop for _, stop in runs[:-1]] == [start for start, _ in runs[1:]]
            assert (runs[0][0], runs[-1][1]) == (0, tensors[member.name].shape[member.dim])
            assert not group.owner or member.name.startswith(f"{group.owner}.")


def entries(tensors: dict[str, torch.Tensor], members: list[Member], units: int) -> list[torch.Tensor]:
    """What every second unit takes up in the members."""
    runs = [(member, run) for member in members for unit in range(0, units, 2) for run in member.runs(unit, unit + 1)]
    return [tensors[member.name].narrow(member.dim, start, stop - start) for member, (start, stop) in runs]


def call(module: nn.Module, inputs: Any) -> torch.Tensor:
    return module(**inputs) if isinstance(inputs, dict) else module(inputs)


@pytest.mark.parametrize("name", ZOO)
def test_a_unit_that_nothing_reads_does_not_matter(name: str) -> None:
    module, inputs, result = traced(name)
    torch.manual_seed(1)
    tensors = tensors_of(module)
    module.double()
    if isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
        inputs = inputs.double()
    with torch.no_grad():
        for parameter in module.parameters():  # what is initialised to zeros or ones would hide errors
            parameter.add_(0.05 * torch.randn_like(parameter))
        before = {key: value.clone() for key, value in tensors.items()}
        reference = call(module, inputs)
        picked = {group.name.rpartition(".")[2]: group for group in result.groups}
        for group in {result.groups[0].name: result.groups[0], **picked}.values():
            scaling = [member for member in group.members if not member.reads]
            for part in entries(tensors, [member for member in group.members if member.reads], group.units):
                part.zero_()
            without = call(module, inputs)
            assert not torch.equal(without, reference), group.name
            for part in entries(tensors, scaling, group.units):
                part.add_(torch.rand_like(part) + 0.5)
            assert torch.equal(call(module, inputs), without), group.name
            for key, value in before.items():
                tensors[key].copy_(value)


@pytest.mark.parametrize("name", ["mlp", "llama", "vit", "encoder_pre_norm", "hf_gpt2"])
def test_meta_parameters_give_the_same_groups(name: str) -> None:
    _, _, result = traced(name)
    with torch.device("meta"):
        module, inputs = ZOO[name]()
    assert trace_groups(module, inputs) == result


def test_members_of_a_bottleneck() -> None:
    _, _, result = traced("wide_resnet50")
    group = find(result, "layer2.1.conv2.channels")
    assert (group.units, group.owner) == (256, "layer2.1")
    assert layouts(group, "layer2.1.") == [
        ("conv2.weight", 0, (256,), 0, False),
        ("bn2.weight", 0, (256,), 0, False),
        ("bn2.bias", 0, (256,), 0, False),
        ("conv3.weight", 1, (256,), 0, True),
        ("bn2.running_mean", 0, (256,), 0, False),
        ("bn2.running_var", 0, (256,), 0, False),
    ]


def test_members_of_a_grouped_convolution() -> None:
    _, _, result = traced("resnext50")
    group = find(result, "layer1.0.channels")
    assert group.units == 32
    weights = [layout for layout in layouts(group, "layer1.0.") if "conv" in layout[0]]
    assert weights == [
        ("conv1.weight", 0, (32, 4), 0, False),
        ("conv2.weight", 0, (32, 4), 0, False),
        ("conv3.weight", 1, (32, 4), 0, True),
    ]


def test_members_of_grouped_query_attention() -> None:
    expected = [(4, 2, 8), (4, 8), (4, 8), (4, 2, 8)]
    group = find(traced("llama")[2], "layers.0.attn.heads")
    assert [(m.layout, m.axis) for m in group.members] == [(layout, 0) for layout in expected]
    assert [m.reads for m in group.members] == [False, False, False, True]
    group = find(traced("hf_llama")[2], "model.model.layers.1.self_attn.heads")
    assert [(m.layout, m.axis) for m in group.members] == [(layout, 0) for layout in expected]


@pytest.mark.parametrize(
    ("name", "group", "dim"),
    [
        ("vit", "encoder.layers.encoder_layer_1.self_attention.heads", 0),
        ("encoder_post_norm", "layers.0.self_attn.heads", 0),
        ("hf_gpt2", "model.transformer.h.0.attn.heads", 1),
    ],
)
def test_members_of_fused_attention(name: str, group: str, dim: int) -> None:
    members = find(traced(name)[2], group).members
    assert [(m.dim, m.layout, m.axis, m.reads) for m in members] == [
        (dim, (3, 4, 16), 1, False),
        (0, (3, 4, 16), 1, False),
        (1 - dim, (4, 16), 0, True),
    ]


def test_position_biases_are_members() -> None:
    group = find(traced("swin")[2], "features.1.1.attn.heads")
    assert ("relative_position_bias_table", 1, (2,), 0, False) in layouts(group, "features.1.1.attn.")
    group = find(traced("swin_v2")[2], "features.1.1.attn.heads")
    members = layouts(group, "features.1.1.attn.")
    assert ("logit_scale", 0, (2,), 0, False) in members
    assert ("cpb_mlp.2.weight", 0, (2,), 0, False) in members
    group = find(traced("hf_t5")[2], "model.encoder.heads")
    assert len(group.members) == 9


def test_squeeze_and_excitation_is_coupled() -> None:
    group = find(traced("mobilenet_v3")[2], "features.3.block.channels")
    members = layouts(group, "features.3.block.")
    assert ("2.fc1.weight", 1, (96,), 0, True) in members
    assert ("2.fc2.weight", 0, (96,), 0, False) in members
    assert ("1.0.weight", 0, (96,), 0, False) in members


# The algebra


def sizes(dims: list[Any]) -> list[list[int]]:
    return [[factor.size for factor in leaves(dim)] for dim in dims]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((2, 12, 4, 4), (2, 3, 4, 16), [[2], [3], [4], [4, 4]]),
        ((1, 6, 1), (6,), [[6]]),
        ((24,), (2, 1, 12), [[2], [], [12]]),
        ((2, 3, 4), (6, 4), [[2, 3], [4]]),
        ((2, 2, 9), (4, 3, 3), [[2, 2], [3], [3]]),
        ((), (1, 1), [[], []]),
    ],
)
def test_reshape(before: tuple[int, ...], after: tuple[int, ...], expected: list[list[int]]) -> None:
    dims = new_dims(before)
    result = reshape(dims, before, after)
    assert sizes(result) == expected
    assert {factor for dim in dims for factor in leaves(dim)} == {factor for dim in result for factor in leaves(dim)}
    assert not any(factor.frozen for dim in result for factor in leaves(dim))


def test_reshape_freezes_only_what_it_cannot_factor() -> None:
    dims = new_dims((2, 6, 5))
    result = reshape(dims, (2, 6, 5), (3, 4, 5))
    assert [[bool(factor.frozen) for factor in leaves(dim)] for dim in dims + result] == [[True], [True], [False]] * 2


def test_unify_splits_and_freezes() -> None:
    (first, second), (third,) = new_dims((4, 6)), new_dims((24,))
    unify(third, first + second)
    assert leaves(third) == leaves(first + second)
    cut = take(third, 8)
    assert cut is not None and sizes([*cut, second]) == [[4, 2], [3], [2, 3]]
    left, right = new_dims((4, 3)), new_dims((3, 4))
    unify(left[0] + left[1], right[0] + right[1])
    assert all(factor.frozen for dim in left + right for factor in leaves(dim))


# Single rules


class Between(nn.Module):
    """Two layers with something in between."""

    def __init__(self, between: Callable[..., Any], first: nn.Module, second: nn.Module, extra: Any = None) -> None:
        super().__init__()
        self.first, self.between, self.second = first, between, second
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.second(self.between(hidden) if self.extra is None else self.between(hidden, self.extra))


def between_linears(between: Callable[..., Any], extra: Any = None, width: int = 12) -> Traced:
    module = Between(between, nn.Linear(8, 12), nn.Linear(width, 5), extra)
    return trace_groups(module, torch.randn(3, 4, 8))


def between_convs(between: Callable[..., Any], extra: Any = None, second: nn.Module | None = None) -> Traced:
    module = Between(between, nn.Conv2d(3, 12, 3, padding=1), second or nn.Conv2d(12, 5, 3), extra)
    return trace_groups(module, torch.randn(2, 3, 8, 8))


FREE = {
    "identity": lambda h: h,
    "relu": F.relu,
    "hardswish": F.hardswish,
    "glu-like": lambda h: F.silu(h) * h.tanh(),
    "in place": lambda h: F.relu_(h).mul_(2),
    "cast": lambda h: h.double().float(),
    "mean over the rest": lambda h: h - h.mean(1, keepdim=True),
    "softmax over the rest": lambda h: h.softmax(1),
    "rolled elsewhere": lambda h: h.roll(1, 1),
    "there and back": lambda h: h.reshape(12, 12).reshape(3, 4, 12),
    "transposed": lambda h: h.mT.flip(2).mT,
    "halves, reunited": lambda h: torch.cat([h[:, :2] * 2, h[:, 2:]], 1),
    "assigned": lambda h: torch.zeros_like(h).copy_(h),
    "maximum": lambda h: torch.maximum(h, h.exp()),
}
FROZEN = {
    "mixed by layer_norm": lambda h: F.layer_norm(h, (12,)),
    "mixed by rms_norm": lambda h: F.rms_norm(h, (12,)),
    "mixed by mean": lambda h: h - h.mean(-1, keepdim=True),
    "mixed by linalg_vector_norm": lambda h: F.normalize(h, dim=-1),
    "mixed by amax": lambda h: h / h.amax(-1, keepdim=True),
    "mixed by softmax": lambda h: h.softmax(-1),
    "mixed by cumsum": lambda h: h.cumsum(-1),
    "mixed by roll": lambda h: h.roll(1, -1),
    "mixed by flip": lambda h: h.flip(-1),
    "mixed by sort": lambda h: h.sort(-1).values,
    "picked by index": lambda h: h[..., torch.arange(11, -1, -1)],
    "padded": lambda h: F.pad(h, (1, -1)),
    "cut by slice": lambda h: torch.cat([h[..., 1:], h[..., :1]], -1),
    "a constant of the forward (arange)": lambda h: h * torch.arange(12),
    "reshaped across its units": lambda h: h.reshape(18, 8).relu().reshape(3, 4, 12),
    "no rule for unfold": lambda h: h.unfold(-1, 2, 2).flatten(-2),
    "contracted between activations (matmul)": lambda h: h.mT @ h @ h.mT @ torch.ones(3, 4, 12),
}


@pytest.mark.parametrize("between", FREE.values(), ids=FREE)
def test_free(between: Callable[..., Any]) -> None:
    result = between_linears(between)
    assert [group.units for group in result.groups] == [12]
    assert layouts(result.groups[0]) == [
        ("first.weight", 0, (12,), 0, False),
        ("first.bias", 0, (12,), 0, False),
        ("second.weight", 1, (12,), 0, True),
    ]


@pytest.mark.parametrize(("reason", "between"), FROZEN.items(), ids=FROZEN)
def test_frozen(reason: str, between: Callable[..., Any]) -> None:
    result = between_linears(between)
    assert result.groups == ()
    assert reason in result.whole.values()


def test_frozen_outer_factor_leaves_the_inner_one() -> None:
    result = between_linears(lambda h: h.view(3, 4, 3, 4).softmax(2).flatten(2))
    assert [(m.layout, m.axis) for m in result.groups[0].members] == [((3, 4), 1)] * 3


def test_of_two_free_factors_the_outer_one_is_the_group() -> None:
    result = between_linears(lambda h: h.view(3, 4, 3, 4).relu().flatten(2))
    assert [(m.layout, m.axis) for m in result.groups[0].members] == [((3, 4), 0)] * 3


def test_chunks_of_a_fused_projection() -> None:
    def gate(h: torch.Tensor) -> torch.Tensor:
        value, weight = h.chunk(2, -1)
        return value * weight.sigmoid()

    for between in (gate, lambda h: F.glu(h, -1)):
        group = between_linears(between, width=6).groups[0]
        assert [(m.layout, m.axis, m.reads) for m in group.members] == [
            ((2, 6), 1, False),
            ((2, 6), 1, False),
            ((6,), 0, True),
        ]


def test_unregistered_tensors_freeze() -> None:
    class Scaled(nn.Module):
        def __init__(self, registered: bool) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 5)
            if registered:
                self.register_buffer("scale", torch.rand(12))
            else:
                self.scale = torch.rand(12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x) * self.scale)

    (group,) = trace_groups(Scaled(True), torch.randn(2, 8)).groups
    assert layouts(group)[-1] == ("scale", 0, (12,), 0, False)
    result = trace_groups(Scaled(False), torch.randn(2, 8))
    assert (result.groups, result.whole) == ((), {"hidden": "a tensor that is not registered"})


def test_outputs_freeze() -> None:
    class WithHidden(Between):
        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.first(x)
            return {"out": self.second(hidden), "states": [hidden]}

    module = WithHidden(F.relu, nn.Linear(8, 12), nn.Linear(12, 5))
    result = trace_groups(module, torch.randn(2, 8))
    assert (result.groups, result.whole) == ((), {"hidden": "an output of the model"})


def test_residual_streams_freeze() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 12), nn.Linear(12, 6)
            self.head, self.position = nn.Linear(6, 5), nn.Parameter(torch.randn(6))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            x = self.embed(x) + self.position
            return self.head(x + self.second(self.first(x) + mask))

    result = trace_groups(Residual(), (torch.randn(2, 8), torch.randn(2, 1)))
    assert [(group.name, group.units) for group in result.groups] == [("hidden", 12)]
    assert result.whole == {"embed.hidden": "part of the residual stream"}


def test_parametrized_weights_are_kept_whole() -> None:
    class Same(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight.clone()

    def same(layer: nn.Module) -> nn.Module:
        return nn.utils.parametrize.register_parametrization(layer, "weight", Same())

    for change in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm, same):
        module = nn.Sequential(change(nn.Linear(8, 12)), nn.ReLU(), change(nn.Linear(12, 5)))
        assert trace_groups(module, torch.randn(2, 8)).groups == ()
    assert set(trace_groups(module, torch.randn(2, 8)).whole.values()) == {"it is parametrized"}


def test_weights_computed_in_the_forward_are_kept_whole() -> None:
    class Standardised(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight * 2, self.bias)

    module = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), Standardised(12, 5))
    result = trace_groups(module, torch.randn(2, 8))
    assert (result.groups, result.whole) == ((), {"hidden": "its weight is computed in the forward"})


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
            self.again.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.again(x).relu(), self.first.weight.t())

    assert trace_groups(Tied(), torch.randn(2, 8)).groups == ()
    twice = nn.Linear(12, 12)
    result = trace_groups(nn.Sequential(nn.Linear(8, 12), twice, nn.ReLU(), twice, nn.Linear(12, 5)), torch.randn(2, 8))
    assert result.groups == ()
    assert "1.weight would have to be cut in two ways" in result.whole.values()


def test_norms_between_convolutions() -> None:
    (group,) = between_convs(lambda h, norm: norm(h), nn.BatchNorm2d(12)).groups
    assert len(group.members) == 7
    (group,) = between_convs(lambda h, norm: norm(h), nn.BatchNorm2d(12, track_running_stats=False)).groups
    assert len(group.members) == 5
    (group,) = between_convs(lambda h, norm: norm(h), nn.InstanceNorm2d(12, affine=True)).groups
    assert len(group.members) == 5
    (group,) = between_convs(lambda h, norm: norm(h), nn.GroupNorm(3, 12)).groups
    assert {(m.layout, m.axis) for m in group.members} == {((3, 4), 0)}
    assert between_convs(lambda h, norm: norm(h), nn.GroupNorm(1, 12)).groups == ()


@pytest.mark.parametrize(
    "between",
    [
        lambda h: F.max_pool2d(h, 2),
        lambda h: F.interpolate(h, scale_factor=2, mode="bilinear"),
        lambda h: F.pad(h, (1, 1, 1, 1)),
        lambda h: h * h.mean((2, 3), keepdim=True),
        lambda h: h.roll((1, 1), (2, 3)),
        F.dropout2d,
    ],
)
def test_spatial_operations_leave_the_channels_free(between: Callable[..., Any]) -> None:
    assert [group.units for group in between_convs(between).groups] == [12]


def test_convolutions() -> None:
    (group,) = between_convs(lambda h, conv: conv(h), nn.Conv2d(12, 12, 3, groups=12)).groups
    assert layouts(group)[-1] == ("extra.bias", 0, (12,), 0, False)
    (group,) = between_convs(lambda h, conv: conv(h), nn.Conv2d(12, 24, 3, groups=12), nn.Conv2d(24, 5, 1)).groups
    assert ("second.weight", 1, (12, 2), 0, True) in layouts(group)
    assert ("extra.weight", 0, (12, 2), 0, False) in layouts(group)
    first, second = between_convs(lambda h, conv: conv(h), nn.ConvTranspose2d(12, 6, 2), nn.Conv2d(6, 5, 1)).groups
    assert ("extra.weight", 0, (12,), 0, True) in layouts(first)
    assert ("extra.weight", 1, (6,), 0, False) in layouts(second)
    conv = nn.ConvTranspose2d(12, 6, 2, groups=3)
    (group,) = between_convs(lambda h, conv: conv(h), conv, nn.Conv2d(6, 5, 1)).groups
    assert ("extra.weight", 0, (3, 4), 0, False) in layouts(group)
    assert ("second.weight", 1, (3, 2), 0, True) in layouts(group)


def test_convolution_into_a_linear_layer() -> None:
    (group,) = between_convs(lambda h: h.flatten(1), second=nn.Linear(12 * 64, 5)).groups
    assert layouts(group)[-1] == ("second.weight", 1, (12, 64), 0, True)


def test_channel_shuffle() -> None:
    def shuffle(h: torch.Tensor) -> torch.Tensor:
        return h.view(2, 3, 4, 8, 8).transpose(1, 2).reshape(h.shape)

    (group,) = between_convs(shuffle).groups
    assert [(m.name, m.layout, m.axis) for m in group.members] == [
        ("first.weight", (3, 4), 0),
        ("first.bias", (3, 4), 0),
        ("second.weight", (4, 3), 1),
    ]
    assert between_convs(shuffle, second=nn.Conv2d(12, 12, 3, groups=3)).groups == ()  # the output has the same factors
    assert between_convs(lambda h: F.pixel_shuffle(h, 2), second=nn.Conv2d(3, 5, 1)).groups == ()


def test_recurrent_layers_are_kept_whole() -> None:
    for layer in (nn.LSTM(12, 12), nn.GRU(12, 12)):
        assert between_linears(lambda h, recurrent: recurrent(h)[0], layer).groups == ()


def test_attention_with_grouped_queries_in_one_operation() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 6 * 4 + 2 * 2 * 4), nn.Linear(24, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            grouped = self.qkv(x).view(2, 7, 2, 5, 4)  # for each of two: three queries, a key and a value
            query, key, value = grouped.split([3, 1, 1], 3)
            query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in (query, key, value))
            out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
            return self.out(out.transpose(1, 2).flatten(2))

    (group,) = trace_groups(Attention(), torch.randn(2, 7, 8)).groups
    assert (group.kind, group.name) == ("heads", "heads")
    assert [(m.layout, m.axis) for m in group.members] == [((2, 20), 0), ((2, 20), 0), ((2, 12), 0)]


def test_einsum() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(3, 8, 4)), nn.Parameter(torch.randn(3, 4, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("bhe,hed->bd", torch.einsum("bd,hde->bhe", x, self.up).relu(), self.down)

    result = trace_groups(Heads(), torch.randn(2, 8))
    assert [(group.units, layouts(group)) for group in result.groups] == [
        (3, [("up", 0, (3,), 0, False), ("down", 0, (3,), 0, True)]),
        (4, [("up", 2, (4,), 0, False), ("down", 1, (4,), 0, True)]),
    ]


# The call itself


def test_forms_of_example_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 5)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)) * scale

    x, scale = torch.randn(2, 8), torch.ones(5)
    results = [trace_groups(Two(), inputs) for inputs in ((x, scale), [x, scale], {"scale": scale, "x": x})]
    assert results[0].groups and results[0] == results[1] == results[2]


def test_lightning_module() -> None:
    class Wrapped(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, _ = ZOO["mlp"]()
            self.save_hyperparameters()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    result = trace_groups(Wrapped(), torch.randn(2, 20))
    assert [(group.name, group.owner) for group in result.groups] == [
        ("net.0.hidden", "net"),
        ("net.2.hidden", "net"),
    ]


def test_bare_language_model() -> None:
    module, inputs, result = traced("hf_llama")
    bare = trace_groups(module.get_submodule("model"), inputs)
    assert [f"model.{group.name}" for group in bare.groups] == [group.name for group in result.groups]


def test_failure_says_why() -> None:
    class Branching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(TracingError, match="Branching cannot be exported with the example inputs"):
        trace_groups(Branching(8, 8), torch.randn(2, 8))
    with pytest.raises(TracingError, match="Linear cannot be exported"):
        trace_groups(nn.Linear(8, 8), torch.randn(2, 7))
    assert issubclass(TracingError, ValueError)


def test_leaves_no_trace() -> None:
    class Restless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 5)
            self.register_buffer("calls", torch.zeros(()))
            self.count, self.seen, self.cache = 0, [1], {"a": 1}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            self.seen.append(len(self.seen))
            self.cache["b"] = 2
            self.calls += 1
            x = x + random.random() + np.random.rand() + torch.rand(8)
            return self.second(F.dropout(self.norm(self.first(x)), 0.5, self.training))

    module = Restless().train()
    module.norm.eval()
    before = {name: (id(tensor), tensor.clone()) for name, tensor in tensors_of(module).items()}
    keys = set(module.__dict__)
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    trace_groups(module, torch.ones(2, 8))
    assert state == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert {name: m.training for name, m in module.named_modules()} == {
        "": True,
        "first": True,
        "norm": False,
        "second": True,
    }
    assert (module.count, module.seen, module.cache, set(module.__dict__)) == (0, [1], {"a": 1}, keys)
    after = tensors_of(module)
    assert all(id(after[name]) == which and torch.equal(after[name], value) for name, (which, value) in before.items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())
