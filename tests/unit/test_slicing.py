"""A module that is cut to some of its units computes what the full one does with the others' entries at zero."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torchvision.models.convnext import CNBlock
from torchvision.models.efficientnet import MBConv, MBConvConfig
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.models.mobilenetv3 import InvertedResidual as InvertedResidualV3
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.swin_transformer import (
    ShiftedWindowAttention,
    ShiftedWindowAttentionV2,
    SwinTransformerBlock,
    SwinTransformerBlockV2,
)
from torchvision.models.vision_transformer import EncoderBlock
from torchvision.ops.misc import FrozenBatchNorm2d, SqueezeExcitation

from lightning_sdp.components.base import Group, Member
from lightning_sdp.components.rules import rule_groups
from lightning_sdp.components.slicing import (
    PaddedSpec,
    padded_class,
    padded_edits,
    proportional_edits,
    shape_edits,
    sliced_class,
)
from tests.unit.cutting import cut

TOLERANCE = 1e-12


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)


def randomized(module: nn.Module) -> nn.Module:
    """No tensor at zero or one, so that none can be wrong unnoticed."""
    generator = torch.Generator().manual_seed(1)
    module.double()  # Some have buffers of float32 in any case.
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return module


def kept(group: Group, share: float = 0.6) -> list[int]:
    """Some of a group's units, neither the first nor consecutive where there are enough of them."""
    count = max(1, int(group.units * share))
    return sorted(torch.randperm(group.units, generator=torch.Generator().manual_seed(3))[:count].tolist())


def independent(groups: list[Group]) -> list[Group]:
    """The groups without those that meet an earlier one in a tensor along another dimension."""
    chosen: list[Group] = []
    dims: dict[str, int] = {}
    for group in groups:
        if all(dims.get(m.name, m.dim) == m.dim for m in group.members):
            dims.update({m.name: m.dim for m in group.members})
            chosen.append(group)
    return chosen


def entries(group: Group, member: Member, units: list[int], size: int) -> Tensor:
    """Which entries along a member's dimension stay; spelled out, not taken from `Member.runs`."""
    number = torch.arange(size) - member.start
    inner = 1
    for factor in member.layout[member.axis + 1 :]:
        inner *= factor
    total = inner * member.layout[member.axis]
    for factor in member.layout[: member.axis]:
        total *= factor
    unit = number // inner % member.layout[member.axis]
    inside = (number >= 0) & (number < total)
    return ~inside | torch.isin(unit, torch.tensor(units))


def outputs(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    values = result.values() if isinstance(result, dict) else result if isinstance(result, (tuple, list)) else ()
    return [tensor for value in values for tensor in outputs(value)]


def check(
    module: nn.Module,
    run: Callable[[nn.Module], Any],
    groups: list[Group] | None = None,
    held: dict[str, list[int]] | None = None,
    mode: bool = True,
) -> nn.Module:
    """Compares a cut module's forward, gradients and buffers to the masked full module's; returns the cut one."""
    module = randomized(module).train(mode)
    groups = independent(rule_groups(module)[0]) if groups is None else groups
    assert groups
    held = {group.name: kept(group) for group in groups} if held is None else held
    full, small = copy.deepcopy(module), copy.deepcopy(module)
    tensors = dict([*full.named_parameters(), *full.named_buffers()])
    masks: dict[tuple[str, int], Tensor] = {}
    for group in groups:
        for member in group.members:
            size = tensors[member.name].shape[member.dim]
            mask = entries(group, member, held[group.name], size)
            masks[member.name, member.dim] = mask & masks.get((member.name, member.dim), torch.ones_like(mask))
    with torch.no_grad():
        for (name, dim), mask in masks.items():
            if isinstance(tensors[name], nn.Parameter):
                tensors[name].index_fill_(dim, (~mask).nonzero().flatten(), 0.0)

    names = [name for name, _ in small.named_parameters()]
    identities = [id(parameter) for parameter in small.parameters()]
    before = {name: p.shape for name, p in small.named_parameters()}
    cut(small, groups, held)
    assert [name for name, _ in small.named_parameters()] == names
    assert [id(parameter) for parameter in small.parameters()] == identities
    assert any(p.shape != before[name] for name, p in small.named_parameters())

    results = []
    for model in (full, small):
        torch.manual_seed(5)
        out = outputs(run(model))
        loss = sum((tensor * torch.linspace(-1, 1, tensor.numel()).view_as(tensor)).sum() for tensor in out)
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()
        results.append(out)
    assert len(results[0]) == len(results[1]) > 0
    for want, got in zip(*results, strict=True):
        assert torch.isfinite(want).all()
        assert (want - got).abs().max() < TOLERANCE * max(1.0, want.abs().max().item())

    local = dict([*small.named_parameters(), *small.named_buffers()])
    for name, tensor in tensors.items():
        grad, mine = tensor.grad, local[name].grad
        is_buffer = not isinstance(tensor, nn.Parameter)
        want, got = (tensor, local[name]) if is_buffer else (grad, mine)
        if want is None or got is None:
            assert want is None and got is None, name
            continue
        for dim in range(want.dim()):
            if (name, dim) in masks:
                want = want.index_select(dim, masks[name, dim].nonzero().flatten())
        assert want.shape == got.shape, name
        if want.is_floating_point():
            assert (want - got).abs().max() < TOLERANCE * max(1.0, want.abs().max().item()), name
    return small


def on(*shape: int) -> Callable[[nn.Module], Any]:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return lambda model: model(x)


# Convolutions.


class GroupNormBlock(BasicBlock):
    """A subclass that inherits the rule, with norms over groups of channels."""

    def __init__(self) -> None:
        super().__init__(6, 8, downsample=nn.Conv2d(6, 8, 1), norm_layer=functools.partial(nn.GroupNorm, 4))


def inverted_v3(use_se: bool, expand: int = 16) -> nn.Module:
    config = InvertedResidualConfig(8, 3, expand, 8, use_se, "HS", 1, 1, 1.0)
    return InvertedResidualV3(config, functools.partial(nn.BatchNorm2d, eps=0.001))


CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "basic": lambda: BasicBlock(6, 6),
    "basic, group norm": GroupNormBlock,
    "basic, frozen norm": lambda: BasicBlock(6, 6, norm_layer=FrozenBatchNorm2d),
    "basic, instance norm": lambda: BasicBlock(6, 6, norm_layer=functools.partial(nn.InstanceNorm2d, affine=True)),
    "bottleneck": lambda: Bottleneck(16, 4),
    "resnext bottleneck": lambda: Bottleneck(32, 8, groups=4, base_width=64),
    "inverted": lambda: InvertedResidual(6, 6, 1, 3),
    "inverted, se": lambda: inverted_v3(True),
    "inverted, no se": lambda: inverted_v3(False),
    "se": lambda: SqueezeExcitation(8, 5),
    "mbconv": lambda: MBConv(MBConvConfig(4, 3, 1, 8, 8, 1), 0.0, nn.BatchNorm2d),
    "convnext": lambda: CNBlock(6, 0.5, 0.0),
}


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, mode: bool) -> None:
    module = CONVOLUTIONS[name]()
    channels = next(p for p in module.parameters() if p.dim() == 4).shape[1]
    channels = {"convnext": 6}.get(name, channels)
    check(module, on(2, channels, 5, 5), mode=mode)


def test_second_group_of_a_bottleneck() -> None:
    module = Bottleneck(16, 4)
    groups, _ = rule_groups(module)
    check(module, on(2, 16, 5, 5), groups=groups[1:])
    both = check(module, on(2, 16, 5, 5), groups=groups)  # Zeros and absence agree even where two groups meet.
    assert both.conv2.weight.shape[:2] == (2, 2)


def test_squeeze_of_a_gate() -> None:
    module = inverted_v3(True)
    groups = {group.owner: group for group in rule_groups(module)[0]}
    check(module, on(2, 8, 5, 5), groups=[groups["block.2"]])


class Upsampler(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 2, 2)
        self.act = nn.PReLU(6)
        self.deep = nn.Conv2d(6, 12, 3, groups=6)
        self.down = nn.ConvTranspose2d(12, 4, 3, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.deep(self.act(self.up(x))))


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_and_multiplied_depthwise_convolutions(groups: int) -> None:
    units = 6 // groups if groups > 1 else 6
    wide = (groups, units) if groups > 1 else (6,)
    axis = 1 if groups > 1 else 0
    deep = (*wide, 2)
    members = [
        Member("up.weight", 1, wide, axis),
        Member("up.bias", 0, wide, axis),
        Member("act.weight", 0, wide, axis),
    ]
    members += [Member("deep.weight", 0, deep, axis), Member("deep.bias", 0, deep, axis)]
    if groups == 1:
        members += [Member("down.weight", 0, deep, axis, reads=True)]
        check(Upsampler(1), on(2, 4, 3, 3), groups=[Group("g", "channels", units, tuple(members))])
        return
    # Whole groups of the last layer: its outputs go too, so that only its edits can be looked at.
    down = Upsampler(groups).down
    edits = shape_edits(down, {"weight": torch.Size((6, 2, 3, 3)), "bias": torch.Size((2,))})
    assert {e.attribute: e.local for e in edits} == {"in_channels": 6, "out_channels": 2, "groups": 1}


# Attention.


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("cls", [ShiftedWindowAttention, ShiftedWindowAttentionV2])
@pytest.mark.parametrize(
    ("size", "window", "shift"),
    [((8, 8), (4, 4), (0, 0)), ((8, 8), (4, 4), (2, 2)), ((7, 9), (4, 3), (2, 1)), ((3, 8), (4, 4), (2, 2))],
    ids=["whole", "shifted", "padded", "covering"],
)
@pytest.mark.parametrize("bias", [True, False])
def test_shifted_windows(
    cls: type[ShiftedWindowAttention], size: Any, window: Any, shift: Any, bias: bool, mode: bool
) -> None:
    attn = cls(12, list(window), list(shift), 4, qkv_bias=bias, proj_bias=bias)
    check(attn, on(2, *size, 12), mode=mode)
    # The replacement alone, with nothing missing.
    replaced, run = copy.deepcopy(attn.double()), on(2, *size, 12)
    replaced.__class__ = sliced_class(attn)
    assert (run(replaced) - run(attn)).abs().max() < TOLERANCE


@pytest.mark.parametrize("cls", [SwinTransformerBlock, SwinTransformerBlockV2])
def test_swin_blocks(cls: type[SwinTransformerBlock]) -> None:
    check(cls(12, 4, [4, 4], [2, 2]), on(2, 8, 8, 12))


MHA = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "other widths": {"kdim": 6, "vdim": 5},
    "extra keys": {"add_bias_kv": True, "add_zero_attn": True},
}


@pytest.mark.parametrize("masked", [None, "2d", "3d", "bool", "padding", "bool padding", "both", "causal"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("options", MHA)
def test_multihead_attention(options: str, batched: bool, need_weights: bool, masked: str | None) -> None:
    attn = nn.MultiheadAttention(12, 4, **MHA[options])
    batch, length, keys = (2 if batched else 1), 5, 7
    if masked == "causal":
        keys = length
    shapes = [(batch, length, 12), (batch, keys, attn.kdim), (batch, keys, attn.vdim)]
    query, key, value = (torch.randn(shape) for shape in shapes)
    if not batched:
        query, key, value = query[0], key[0], value[0]
    elif not attn.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    kwargs: dict[str, Any] = {}
    if masked in ("2d", "both"):
        kwargs["attn_mask"] = torch.randn(length, keys)
    if masked == "3d":
        kwargs["attn_mask"] = torch.randn(batch * 4, length, keys)
    if masked == "bool":
        kwargs["attn_mask"] = torch.rand(batch * 4, length, keys) > 0.7
        kwargs["attn_mask"][..., 0] = False
    if masked == "causal":
        kwargs |= {"attn_mask": nn.Transformer.generate_square_subsequent_mask(length), "is_causal": True}
    if masked in ("padding", "both"):
        kwargs["key_padding_mask"] = torch.randn(batch, keys) if batched else torch.randn(keys)
    if masked == "bool padding":
        kwargs["key_padding_mask"] = torch.arange(keys).expand(batch, -1) > 3
        if not batched:
            kwargs["key_padding_mask"] = kwargs["key_padding_mask"][0]

    def run(model: nn.Module) -> Any:
        # The average over heads differs, as it is one over the held heads.
        out, weights = model(query, key, value, need_weights=need_weights, average_attn_weights=False, **kwargs)
        if not need_weights:
            assert weights is None
            return out
        return out, weights[..., list(held), :, :] if weights.shape[-3] == 4 else weights

    held = [0, 3]
    groups, _ = rule_groups(randomized(attn))
    check(attn, run, groups=groups, held={"heads": held})


def test_average_of_the_held_heads() -> None:
    attn = nn.MultiheadAttention(12, 4)
    x = torch.randn(5, 2, 12)
    small = check(attn, lambda model: model(x, x, x, need_weights=False)[0], held={"heads": [1, 2]})
    each = small(x, x, x, average_attn_weights=False)[1]
    assert each.shape == (2, 2, 5, 5)
    torch.testing.assert_close(small(x, x, x)[1], each.mean(1))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("first", [True, False])
def test_transformer_layers(first: bool, mode: bool, grad: bool) -> None:
    encoder = nn.TransformerEncoderLayer(12, 4, 10, 0.0, batch_first=True, norm_first=first)
    with torch.set_grad_enabled(grad):
        check(encoder, on(2, 5, 12), mode=mode, held={"hidden": [1, 4, 7], "self_attn.heads": [0, 3]})
    decoder = nn.TransformerDecoderLayer(12, 4, 10, 0.0, norm_first=first)
    x, memory = torch.randn(5, 2, 12), torch.randn(3, 2, 12)
    with torch.set_grad_enabled(grad):
        check(decoder, lambda model: model(x, memory), mode=mode)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_no_nested_tensors_reach_cut_heads() -> None:
    layer = nn.TransformerEncoderLayer(12, 4, 10, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    x = torch.randn(2, 5, 12)
    assert encoder.use_nested_tensor
    with torch.no_grad():
        small = check(encoder, lambda model: model(x, src_key_padding_mask=padding)[~padding], mode=False)
    assert not small.use_nested_tensor


def test_vit_block() -> None:
    check(EncoderBlock(4, 12, 10, 0.0, 0.0), on(2, 5, 12))


# Hugging Face.


def llama_like(name: str, heads: int, kv_heads: int, implementation: str) -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        hidden_size=18, intermediate_size=10, num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=11,
        num_hidden_layers=2, head_dim=6, attn_implementation=implementation, pad_token_id=0,
    )  # fmt: skip
    return getattr(transformers, f"{name}Model")(config), torch.arange(10).view(2, 5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_llama_like(name: str, kv_heads: int, implementation: str) -> None:
    model, ids = llama_like(name, 6, kv_heads, implementation)
    small = check(model, lambda m: m(input_ids=ids, use_cache=False).last_hidden_state)
    units = 6 if kv_heads == 1 else kv_heads
    assert small.layers[0].self_attn.o_proj.in_features == 6 * 6 * max(1, int(units * 0.6)) // units


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("cross", [True, False])
def test_gpt2(cross: bool, implementation: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=12, n_head=4, n_layer=2, n_inner=10, vocab_size=11, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, add_cross_attention=cross, attn_implementation=implementation,
    )  # fmt: skip
    ids, memory = torch.arange(10).view(2, 5), torch.randn(2, 3, 12)
    kwargs = {"encoder_hidden_states": memory} if cross else {}
    check(transformers.GPT2Model(config), lambda m: m(input_ids=ids, use_cache=False, **kwargs).last_hidden_state)


@pytest.mark.parametrize("decoder", [True, False])
def test_bert(decoder: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=12, num_attention_heads=4, num_hidden_layers=2, intermediate_size=10, vocab_size=11,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, is_decoder=decoder, add_cross_attention=decoder,
    )  # fmt: skip
    ids, memory = torch.arange(10).view(2, 5), torch.randn(2, 3, 12)
    kwargs = {"encoder_hidden_states": memory, "use_cache": False} if decoder else {}
    check(transformers.BertModel(config), lambda m: m(input_ids=ids, **kwargs).last_hidden_state)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", ["T5", "MT5"])
def test_t5(name: str, gated: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        d_model=12, d_kv=3, d_ff=10, num_layers=2, num_heads=4, vocab_size=11, dropout_rate=0.0,
        feed_forward_proj="gated-gelu" if gated else "relu",
    )  # fmt: skip
    ids = torch.arange(10).view(2, 5)
    model = getattr(transformers, f"{name}Model")(config)
    groups, _ = rule_groups(model)
    counts = (1, 2, 3)  # The stacks are independent of one another, and so are self- and cross-attention.
    heads = [group for group in groups if group.kind == "heads"]
    held = {group.name: kept(group) for group in groups}
    held |= {group.name: list(range(4))[-count:] for group, count in zip(heads, counts, strict=True)}
    check(model, lambda m: m(input_ids=ids, decoder_input_ids=ids, use_cache=False).last_hidden_state, groups, held)


# Unknown classes.


class Attention(nn.Module):
    def __init__(self, kv_heads: int, names: tuple[str, str, str, str] = ("wq", "wk", "wv", "wo")) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.inner_dim = 6, kv_heads, 18
        self.names = names
        for name, width in zip(names[:3], (18, 3 * kv_heads, 3 * kv_heads), strict=True):
            setattr(self, name, nn.Linear(8, width))
        setattr(self, names[3], nn.Sequential(nn.Linear(18, 8), nn.Dropout(0.0)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, o = (getattr(self, name) for name in self.names)
        heads = [y.view(*x.shape[:2], n, -1).transpose(1, 2) for y, n in
                 ((q(x), self.n_heads), (k(x), self.n_kv_heads), (v(x), self.n_kv_heads))]  # fmt: skip
        k, v = (y.repeat_interleave(self.n_heads // self.n_kv_heads, 1) for y in heads[1:])
        out = F.scaled_dot_product_attention(heads[0], k, v).transpose(1, 2)
        return o(out.reshape(*x.shape[:2], self.inner_dim))


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("names", [("wq", "wk", "wv", "wo"), ("to_q", "to_k", "to_v", "to_out")])
def test_attention_by_the_names_of_its_children(names: Any, kv_heads: int) -> None:
    check(Attention(kv_heads, names), on(2, 5, 8))


# What may not be cut.


def test_shapes_that_a_module_cannot_have() -> None:
    size = torch.Size
    with pytest.raises(ValueError, match=r"GroupNorm of 2 groups cannot keep 3 of 8 channels"):
        shape_edits(nn.GroupNorm(2, 8), {"weight": size((3,))})
    with pytest.raises(ValueError, match=r"Conv2d of 4 groups cannot keep 3 of 8 channels"):
        shape_edits(nn.Conv2d(8, 8, 1, groups=4), {"weight": size((3, 2, 1, 1))})
    with pytest.raises(ValueError, match="not both"):
        shape_edits(nn.Conv2d(8, 8, 1, groups=4), {"weight": size((4, 1, 1, 1))})
    with pytest.raises(ValueError, match="LayerNorm normalizes"):
        shape_edits(nn.LayerNorm(8), {"weight": size((4,))})
    with pytest.raises(ValueError, match="Embedding"):
        shape_edits(nn.Embedding(8, 4), {"weight": size((4, 4))})
    assert [e.local for e in shape_edits(nn.Embedding(8, 4), {"weight": size((8, 3))})] == [3]
    assert [e.local for e in shape_edits(nn.Conv2d(8, 8, 1, groups=4), {"weight": size((8, 1, 1, 1))})] == [4]
    assert shape_edits(Attention(2), {"anything": size((1,))}) == []
    with pytest.raises(ValueError, match="`inner_dim` is 13"):
        module = Attention(2)
        module.inner_dim = 13
        proportional_edits(module, Group("g", "heads", 2, (), attributes=("inner_dim",)), 1)


def test_nothing_changes_where_a_cut_fails() -> None:
    norm = nn.Sequential(nn.Linear(4, 8), nn.GroupNorm(2, 8))
    members = (Member("0.weight", 0, (8,)), Member("0.bias", 0, (8,)), Member("1.weight", 0, (8,)))
    with pytest.raises(ValueError, match=r"`1` cannot be cut: GroupNorm"):
        cut(norm, [Group("g", "neurons", 8, members)], {"g": [0, 1, 2]})
    assert norm[0].weight.shape == (8, 4) and norm[0].out_features == 8


def test_edits_can_be_taken_back() -> None:
    layer = nn.TransformerEncoderLayer(12, 4, 10)
    before = {name: dict(vars(m)) for name, m in layer.named_modules()}
    groups, _ = rule_groups(layer)
    tensors = {name: tensor.data for name, tensor in layer.named_parameters()}
    edits = cut(layer, groups, {group.name: [0] for group in groups})
    assert type(layer.self_attn).__name__ == "SlicedMultiheadAttention"
    assert isinstance(layer.self_attn, nn.MultiheadAttention)
    for edit in edits:
        edit.restore()
    for name, tensor in layer.named_parameters():
        tensor.data = tensors[name]
    assert type(layer.self_attn) is nn.MultiheadAttention
    assert {name: dict(vars(m)) for name, m in layer.named_modules()} == before


def test_a_changed_forward_is_not_replaced() -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Heir(nn.MultiheadAttention):
        pass

    assert sliced_class(Own(8, 2)) is None
    assert sliced_class(nn.Linear(2, 2)) is None
    assert sliced_class(Heir(8, 2)) is sliced_class(Heir(8, 2))
    assert rule_groups(Own(8, 2)) == ([], {})
    patched = nn.MultiheadAttention(8, 2)
    patched.forward = patched.forward
    assert sliced_class(patched) is None


# Padding.


def padded(module: nn.Module, specs: dict[str, PaddedSpec]) -> nn.Module:
    small = copy.deepcopy(module)
    for name, spec in specs.items():
        index = torch.cat([torch.arange(*run) for run in spec.runs])
        parameter = small.get_parameter(name)
        parameter.data = parameter.data.index_select(spec.dim, index)
    for edit in padded_edits(small, specs):
        edit.cut()
    return small


@pytest.mark.parametrize("recompute", [False, True])
def test_padded_parameters(recompute: bool) -> None:
    attn = randomized(nn.MultiheadAttention(12, 4))
    runs = {"in_proj_weight": ((3, 6), (9, 15), (30, 36)), "in_proj_bias": ((3, 6), (9, 15), (30, 36))}
    specs = {name: PaddedSpec(0, 36, run) for name, run in runs.items()}
    small = padded(attn, {**specs, "out_proj.weight": PaddedSpec(1, 12, ((0, 3), (6, 9)))})
    full = copy.deepcopy(attn)
    index = {name: torch.cat([torch.arange(*r) for r in run]) for name, run in runs.items()}
    columns = torch.tensor([0, 1, 2, 6, 7, 8])
    with torch.no_grad():
        for name, kept_rows in index.items():
            missing = torch.ones(36, dtype=torch.bool).index_fill(0, kept_rows, False)
            full._parameters[name][missing] = 0.0
        full.out_proj.weight[:, [3, 4, 5, 9, 10, 11]] = 0.0
    x = torch.randn(5, 2, 12, requires_grad=True)

    def run(model: nn.Module) -> Tensor:
        return model(x, x, x, need_weights=False)[0]

    want = run(full)
    got = checkpoint(run, small, use_reentrant=False) if recompute else run(small)
    assert (want - got).abs().max() < TOLERANCE
    for out in (want, got):
        out.square().sum().backward()
    for name, rows in index.items():
        assert (full._parameters[name].grad[rows] - small._parameters[name].grad).abs().max() < TOLERANCE
    assert (full.out_proj.weight.grad[:, columns] - small.out_proj._parameters["weight"].grad).abs().max() < TOLERANCE
    assert small.in_proj_weight.shape == (36, 12) and small.state_dict()["in_proj_weight"].shape == (15, 12)
    assert {name: p.shape for name, p in small.named_parameters()}["out_proj.weight"] == (12, 6)
    small.load_state_dict(small.state_dict())
    assert small.float().in_proj_weight.dtype == torch.float32


def test_what_cannot_be_padded() -> None:
    spec = PaddedSpec(0, 4, ((0, 2),))
    with pytest.raises(ValueError, match="BatchNorm1d has no parameter `running_mean`"):
        padded_class(nn.BatchNorm1d(4), {"running_mean": spec})
    with pytest.raises(ValueError, match="Linear has no parameter `bias`"):
        padded_class(nn.Linear(4, 4, bias=False), {"bias": spec})
    with pytest.raises(ValueError, match="LSTM does not read"):
        padded_class(nn.LSTM(4, 4), {"weight_ih_l0": spec})
    with pytest.raises(ValueError, match="`0` cannot be padded: Linear has no parameter"):
        padded_edits(nn.Sequential(nn.Linear(4, 4)), {"0.scale": spec})
