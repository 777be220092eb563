"""What is found to be maskable in a model, and what remains where it is missing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision.models as tv
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.swin_transformer import SwinTransformerBlock, SwinTransformerBlockV2

from lightning_sdp import MaskPlan, discover_components, register_block
from lightning_sdp.components import ParamSlice, discover, find_blocks, registry
from lightning_sdp.subnetwork import Subnetwork
from tests.unit.models import (
    DropBlock,
    InPlaceBlock,
    LearnedPositions,
    LlamaBlock,
    ParallelBlock,
    PostNormBlock,
    PreActBlock,
    Residual,
    Stack,
    TupleBlock,
    mlp,
    randomize,
)


@pytest.fixture(autouse=True)
def _own_rules() -> Iterator[None]:
    rules, threads = dict(registry._RULES), torch.get_num_threads()
    torch.set_num_threads(1)  # Small float64 convolutions are many times slower on several.
    yield
    torch.set_num_threads(threads)
    registry._RULES.clear()
    registry._RULES.update(rules)


def names(components: Any) -> list[str]:
    return [component.name for component in components]


def carve_away(module: nn.Module, block: str, **kwargs: Any) -> MaskPlan:
    """Carves a module for a worker that lacks a block."""
    plan = MaskPlan.build(module, num_subnetworks=2, coverage=0.5, **kwargs)
    Subnetwork(module, plan, 1 - plan.holders(block)[0]).carve()
    return plan


def in_sequence(*blocks: nn.Module) -> nn.Sequential:
    return nn.Sequential(*blocks)


def prenorm_encoder(norm_first: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


# What is found.


@pytest.mark.parametrize(
    ("model", "count", "first"),
    [
        ("resnet18", 8, "layer1.0"),
        ("resnet50", 16, "layer1.0"),
        ("wide_resnet50_2", 16, "layer1.0"),
        ("swin_t", 12, "features.1.0"),
        ("swin_v2_t", 12, "features.1.0"),
        ("vit_b_16", 12, "encoder.layers.encoder_layer_0"),
        ("convnext_tiny", 18, "features.1.0"),
        ("mobilenet_v2", 10, "features.3"),
        ("mobilenet_v3_small", 6, "features.3"),
        ("mobilenet_v3_large", 10, "features.1"),
        ("efficientnet_b0", 9, "features.2.1"),
        ("maxvit_t", 33, "blocks.0.layers.0.layers.MBconv"),
    ],
)
def test_blocks_of_torchvision_models_are_found(model: str, count: int, first: str) -> None:
    with torch.device("meta"):
        module = getattr(tv, model)()
    found = discover_components(module)
    assert len(found) == count
    assert found[0].name == first
    order = [name for name, _ in module.named_modules()]
    assert names(found) == sorted(names(found), key=order.index)
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def test_block_names_of_a_resnet() -> None:
    with torch.device("meta"):
        found = discover_components(tv.resnet18())
    assert names(found) == [f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)]
    assert {component.kind for component in found} == {"block"}
    tensors = [f"layer1.0.{m}.{t}" for m in ("conv1", "bn1", "conv2", "bn2") for t in ("weight", "bias")]
    tensors = [name for name in tensors if "conv" not in name or "bias" not in name]
    buffers = [f"layer1.0.bn{i}.{b}" for i in (1, 2) for b in ("running_mean", "running_var", "num_batches_tracked")]
    assert found[0].slices == tuple(ParamSlice(name, None, 0, 0) for name in tensors + buffers)


def nothing_maskable() -> dict[str, Callable[[], nn.Module]]:
    return {
        "vgg": tv.vgg11_bn,
        "densenet": tv.densenet121,
        "mlp": lambda: mlp(4),
        "post-norm encoder": lambda: prenorm_encoder(norm_first=False),
        "post-norm by hand": lambda: in_sequence(PostNormBlock(4), PostNormBlock(4)),
        "added parameter": lambda: in_sequence(LearnedPositions(4), nn.Linear(4, 4)),
        "the whole network is one block": lambda: Residual(),
    }


@pytest.mark.parametrize("model", nothing_maskable())
def test_nothing_is_found_where_there_are_no_blocks(model: str) -> None:
    with torch.device("meta"):
        module = nothing_maskable()[model]()
    assert find_blocks(module)[0] == []
    with pytest.raises(ValueError, match=r"No maskable block was found in \w+\. Name the blocks with `components`"):
        discover(module)


def test_error_tells_why_a_likely_module_is_no_block() -> None:
    with pytest.raises(ValueError, match="'0': no path of additions leads from an input to its output"):
        discover(in_sequence(PostNormBlock(4)))
    with pytest.raises(ValueError, match=r"'layers\.0': the rule for TransformerEncoderLayer does not see"):
        discover(prenorm_encoder(norm_first=False))


@pytest.mark.parametrize("block", [LlamaBlock, TupleBlock, DropBlock, InPlaceBlock, ParallelBlock])
def test_handwritten_blocks_are_found(block: Callable[[int], nn.Module]) -> None:
    assert names(discover_components(in_sequence(nn.Linear(3, 4), block(4), block(4)))) == ["1", "2"]


class _Forward(nn.Module):
    """A block with the forward that a test gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc, self.drop = nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(()))

    def branch(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(x))


class _VariadicBlock(_Forward):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert len(args) == 0 and "gain" not in kwargs and not kwargs.pop("verbose", False)
        return x + self.fc(self.norm(x), *args, **kwargs) * kwargs.get("gain", 1.0)


class _TupleDefaultBlock(_Forward):
    def forward(self, x: Tensor, scales: tuple[float, float] = (1.0, 2.0)) -> Tensor:
        return x + self.branch(x) * scales[1]


class _CheckpointedBlock(_Forward):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.branch, x, use_reentrant=False)


class _LayerDropBlock(_Forward):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.1:
            return x
        return x + self.branch(x)


class _CountingBlock(_Forward):
    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x + self.branch(x)


LENIENT = [_VariadicBlock, _TupleDefaultBlock, _CheckpointedBlock, _LayerDropBlock, _CountingBlock]


@pytest.mark.parametrize("block", LENIENT)
def test_usual_python_in_a_forward_is_no_obstacle(block: type[nn.Module]) -> None:
    for seed in range(3):
        random.seed(seed)
        module = in_sequence(block(), block())
        assert names(discover_components(module)) == ["0", "1"]
        assert [float(block.steps) for block in module] == [0, 0]
    carve_away(module, "0")
    x = torch.randn(2, 4)
    assert module[0](x) is x


class _SelfAttention(_Forward):
    """Adds to a branch a function of the stream that is no identity, though it has no parameters."""

    class _Mix(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    def __init__(self) -> None:
        super().__init__()
        self.mix = self._Mix()

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x, x, x) + self.branch(x)


def test_function_of_several_inputs_is_no_skip_path() -> None:
    assert find_blocks(in_sequence(_SelfAttention()))[0] == []


class _PositionsByEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1], device=x.device))


class _Condition(_Forward):
    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return x + self.branch(condition)


@pytest.mark.parametrize("module", [_PositionsByEmbedding, _Condition])
def test_what_does_not_read_the_stream_is_no_branch(module: type[nn.Module]) -> None:
    assert find_blocks(in_sequence(module(), nn.Linear(4, 4)))[0] == []


class _DropoutBehind(_Forward):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x + self.branch(x), 0.5, self.training)


@pytest.mark.parametrize("found_in_training", [True, False])
def test_dropout_behind_the_addition_follows_the_mode(found_in_training: bool) -> None:
    module = in_sequence(_DropoutBehind(), _DropoutBehind()).train(found_in_training)
    carve_away(module, "0")
    x = torch.ones(100, 4)
    assert set(module.train()[0](x).unique().tolist()) == {0.0, 2.0}
    assert set(module.eval()[0](x).unique().tolist()) == {1.0}


def test_missing_block_does_not_change_its_input_in_place() -> None:
    module = tv.resnet18(num_classes=2)
    carve_away(module, "layer1.0", keep_ends=0)
    x = torch.randn(1, 64, 4, 4)
    before = x.clone()
    torch.testing.assert_close(module.layer1[0](x), before.relu(), rtol=0, atol=0)
    assert torch.equal(x, before)


def test_forward_patched_on_the_instance_does_not_hide_the_block() -> None:
    module = in_sequence(LlamaBlock(4), LlamaBlock(4))
    original = module[0].forward
    module[0].forward = lambda *args, **kwargs: original(*args, **kwargs)
    assert names(discover_components(module)) == ["0", "1"]
    carve_away(module, "0")
    x = torch.randn(2, 3, 4)
    assert module[0](scale=2.0, hidden=x) is x


def test_innermost_blocks_win() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Stack(2, dim=3)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)

    assert names(discover_components(in_sequence(Outer(), Residual()))) == ["0.inner.blocks.0", "0.inner.blocks.1", "1"]


def test_block_in_several_places_is_one_component() -> None:
    block = Residual()
    module = in_sequence(block, block, nn.ModuleDict({"again": block}), Residual())[:2].append(Residual())
    module.first = nn.ModuleList([block])
    found = discover_components(module)
    assert names(found) == ["0", "2"]
    assert [part.name for part in found[0].slices] == ["0.fc.weight", "0.fc.bias"]
    plan = MaskPlan.build(module, num_subnetworks=2, coverage=0.5).fit(module)
    state = module.state_dict()
    subnetwork = Subnetwork(module, plan, 1 - plan.holders("0")[0])
    subnetwork.carve()
    assert module[1] is module[0] is module.first[0]
    x = torch.randn(2, 4)
    assert module[1](x) is x
    assert [name for name, _ in module.named_parameters()] == ["2.fc.weight", "2.fc.bias"]
    subnetwork.attach()
    assert module.state_dict().keys() == state.keys()


def test_preactivation_shortcut_reads_the_first_norm_which_stays() -> None:
    first, second = discover_components(in_sequence(PreActBlock(3, 4, stride=2), PreActBlock(4, 4)))
    tensors = {part.name for part in first.slices}
    assert {"0.conv1.weight", "0.conv2.weight", "0.bn2.weight", "0.bn2.running_var"} <= tensors
    assert not any(name.startswith(("0.shortcut", "0.bn1")) for name in tensors)
    assert "1.bn1.weight" in {part.name for part in second.slices}


# What remains where a block is missing: the full model with silent branches.


def _zero(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


def silence(block: nn.Module, *last_layers: str) -> None:
    """Sets what comes last in each branch to zero."""
    for name in last_layers:
        _zero(block.get_submodule(name))


def _last_norm(block: nn.Module) -> None:
    norms = [module for module in block.modules() if isinstance(module, nn.BatchNorm2d)]
    _zero(norms[-1])


def _swin(block: Callable[..., nn.Module]) -> nn.Module:
    sizes: dict[str, Any] = {"patch_size": [4, 4], "window_size": [4, 4], "embed_dim": 8, "num_heads": [2, 2]}
    return tv.SwinTransformer(**sizes, depths=[2, 2], num_classes=5, block=block)


def _vit() -> nn.Module:
    return tv.VisionTransformer(32, 16, 4, 2, hidden_dim=8, mlp_dim=16, num_classes=5)


def _convnext() -> nn.Module:
    return tv.ConvNeXt([CNBlockConfig(8, 12, 2), CNBlockConfig(12, None, 2)], num_classes=5)


def _maxvit() -> nn.Module:
    return tv.MaxVit((32, 32), 8, 4, [8, 12], [1, 1], 4, 0.0, num_classes=5)


def _attention_or_conv(block: nn.Module) -> None:
    if hasattr(block, "attn_layer"):
        silence(block, "attn_layer.1.merge", "mlp_layer.3")
    else:
        _zero(block.layers[-1])


class _Masked(nn.Module):
    """Calls its blocks with keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(4, 8), nn.ModuleList(LlamaBlock(8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        mask = torch.zeros(x.size(1), x.size(1), dtype=x.dtype).fill_(-3.0).triu(1)
        for layer in self.layers:
            x = layer(mask=mask, hidden=x, scale=0.7)
        return x


class _Tuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TupleBlock(4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask: Tensor | None = torch.full((x.size(1), x.size(1)), 0.5, dtype=x.dtype)
        for layer in self.layers:
            x, _, mask = layer(x, mask=mask)
        return x


class _Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(4, 2, 2, 2, 8, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(src=x, tgt=x.flip(1), tgt_is_causal=False)


def _preact() -> nn.Module:
    return in_sequence(
        nn.Conv2d(3, 4, 3), PreActBlock(4, 4), PreActBlock(4, 6, 2), PreActBlock(6, 6), PreActBlock(6, 7)
    )


Silencer = Callable[[nn.Module], None]
IMAGES, TOKENS = (2, 3, 32, 32), (2, 5, 4)
_ENCODER = ("self_attn.out_proj", "linear2")


def silencers() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Silencer]]:
    return {
        "resnet18": (partial(tv.resnet18, num_classes=5), IMAGES, lambda b: silence(b, "bn2")),
        "resnet50": (partial(tv.ResNet, Bottleneck, [2, 2, 2, 2], 5), IMAGES, lambda b: silence(b, "bn3")),
        "wide resnet": (
            partial(tv.ResNet, Bottleneck, [1, 2, 1, 1], 5, width_per_group=128),
            IMAGES,
            lambda b: silence(b, "bn3"),
        ),
        "resnet with zero-initialized residual": (
            partial(tv.ResNet, BasicBlock, [1, 2, 1, 1], 5, zero_init_residual=True),
            IMAGES,
            lambda b: silence(b, "bn2"),
        ),
        "swin": (partial(_swin, SwinTransformerBlock), IMAGES, lambda b: silence(b, "attn.proj", "mlp.3")),
        "swin v2": (partial(_swin, SwinTransformerBlockV2), IMAGES, lambda b: silence(b, "norm1", "norm2")),
        "vit": (_vit, IMAGES, lambda b: silence(b, "self_attention.out_proj", "mlp.3")),
        "convnext": (_convnext, IMAGES, _zero),
        "mobilenet v2": (partial(tv.mobilenet_v2, width_mult=0.25), IMAGES, _last_norm),
        "mobilenet v3 small": (tv.mobilenet_v3_small, IMAGES, _last_norm),
        "mobilenet v3 large": (partial(tv.mobilenet_v3_large, width_mult=0.5), IMAGES, _last_norm),
        "maxvit": (_maxvit, IMAGES, _attention_or_conv),
        "pre-norm encoder": (
            lambda: in_sequence(nn.Linear(4, 8), prenorm_encoder()),
            TOKENS,
            lambda b: silence(b, *_ENCODER),
        ),
        "encoder and decoder": (
            _Translator,
            TOKENS,
            lambda b: silence(b, *_ENCODER, *(["multihead_attn.out_proj"] if hasattr(b, "multihead_attn") else [])),
        ),
        "llama with keyword arguments": (_Masked, TOKENS, lambda b: silence(b, "self_attn.o_proj", "mlp.down_proj")),
        "tuples": (_Tuples, TOKENS, lambda b: silence(b, "attn.o_proj")),
        "dropout": (
            lambda: in_sequence(DropBlock(4), DropBlock(4)),
            TOKENS,
            lambda b: silence(b, "attn.out_proj", "mlp.2"),
        ),
        "in place": (lambda: in_sequence(InPlaceBlock(4), InPlaceBlock(4)), TOKENS, lambda b: silence(b, "fc")),
        "parallel": (
            lambda: in_sequence(ParallelBlock(4), ParallelBlock(4)),
            TOKENS,
            lambda b: silence(b, "attn.o_proj", "mlp.2"),
        ),
        "pre-activation": (_preact, IMAGES, lambda b: silence(b, "conv2")),
    }


@torch.no_grad()
@pytest.mark.parametrize("model", silencers())
def test_missing_blocks_equal_silent_branches(model: str) -> None:
    make, shape, silencer = silencers()[model]
    full = randomize(make())
    x = torch.randn(shape, dtype=torch.float64)
    plan = MaskPlan.build(full, num_subnetworks=2, coverage=0.5, keep_ends=0)
    assert all(len(plan.holders(component.name)) == 1 for component in plan.components)
    for worker in range(2):
        carved, silent = copy.deepcopy(full), copy.deepcopy(full)
        missing = plan.missing_on(worker)
        assert missing
        for component in missing:
            silencer(silent.get_submodule(component.name))
        Subnetwork(carved, plan, worker).carve()
        expected = silent(x)
        torch.testing.assert_close(carved(x), expected, rtol=1e-12, atol=1e-12)
        assert (full(x) - expected).abs().max() > 1e-6 * expected.abs().max()  # The branches do matter.


def test_downsample_path_stays_with_every_worker() -> None:
    module = tv.resnet18(num_classes=5)
    plan = MaskPlan.build(module, num_subnetworks=2, coverage=0.5, keep_ends=0)
    worker = next(w for w in range(2) if "layer2.0" not in plan.held_by(w))
    component = next(c for c in plan.components if c.name == "layer2.0")
    assert not any("downsample" in part.name for part in component.slices)
    Subnetwork(module, plan, worker).carve()
    kept = [name for name, _ in [*module.named_parameters(), *module.named_buffers()] if name.startswith("layer2.0.")]
    prefix = "layer2.0.downsample."
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert kept == [f"{prefix}{t}" for t in ("0.weight", "1.weight", "1.bias", *(f"1.{s}" for s in statistics))]


def test_calling_convention_of_a_missing_block() -> None:
    x, mask = torch.randn(2, 3, 4), torch.zeros(3, 3)
    llama, tuples = in_sequence(LlamaBlock(4), LlamaBlock(4)), in_sequence(TupleBlock(4), TupleBlock(4))
    for module in (llama, tuples):
        plan = MaskPlan.build(module, num_subnetworks=2, coverage=0.5, keep_ends=0)
        Subnetwork(module, plan, 1 - plan.holders("0")[0]).carve()
    for call in (partial(llama[0], x), partial(llama[0], hidden=x), partial(llama[0], x, None, scale=2.0)):
        assert call() is x
    assert llama[0](scale=1.0, mask=mask, hidden=x) is x
    for call in (partial(tuples[0], x, mask), partial(tuples[0], mask=mask, x=x)):
        out = call()
        assert type(out) is tuple and len(out) == 3
        assert out[0] is x and out[1] is None and out[2] is mask
    assert tuples[0](x)[2] is None
    with pytest.raises(TypeError):
        llama[0](x, unknown=1)


@pytest.mark.parametrize("layer", ["encoder", "decoder"])
def test_missing_transformer_layer_passes_its_input_by_any_name(layer: str) -> None:
    module: nn.Module = prenorm_encoder()
    kwargs: dict[str, Any] = {"src_mask": torch.zeros(5, 5), "src": torch.randn(2, 5, 8)}
    if layer == "decoder":
        module = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, norm_first=True, batch_first=True), 2)
        kwargs = {"memory": torch.randn(2, 5, 8), "tgt": torch.randn(2, 5, 8)}
    carve_away(module, "layers.0")
    assert module.layers[0](**kwargs) is kwargs["tgt" if layer == "decoder" else "src"]


def test_named_module_without_known_skip_passes_its_first_argument() -> None:
    module = in_sequence(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    plan = carve_away(module, "1", components="[12]")
    assert names(plan.components) == ["1", "2"]
    x = torch.randn(2, 4)
    assert module[1](x) is x and module[1](input=x) is x


# register_block


class _Opaque(nn.Module):
    """Not understood by tracing: control flow on data."""

    def __init__(self, dim: int = 4, active: bool = True) -> None:
        super().__init__()
        self.fc, self.shortcut, self.active = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False), active

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        branch = self.fc(x) if x.sum() > 0 else self.fc(-x)
        return self.shortcut(x) * gain + branch


class _Derived(_Opaque):
    pass


@pytest.mark.parametrize("key", [_Opaque, f"{__name__}._Opaque"])
@pytest.mark.parametrize("block", [_Opaque, _Derived])
def test_registered_class_is_a_block(key: Any, block: type[_Opaque]) -> None:
    module = in_sequence(block(), block(), nn.Linear(4, 4)).double()
    assert find_blocks(module)[0] == []

    @register_block(key, path=("shortcut",))
    def skip(self: _Opaque, x: Tensor, gain: float = 1.0) -> Tensor:
        return self.shortcut(x) * gain

    assert callable(skip) and skip.__name__ == "skip"
    assert names(discover_components(module)) == ["0", "1"]
    assert [p.name for p in discover_components(module)[0].slices] == ["0.fc.weight", "0.fc.bias"]
    carve_away(module, "0")
    x = torch.randn(2, 4, dtype=torch.float64)
    torch.testing.assert_close(module[0](x, gain=3.0), 3 * x @ module[0].shortcut.weight.T, rtol=0, atol=1e-14)


def test_registration_may_depend_on_the_module() -> None:
    register_block(_Opaque, applies=lambda block: block.active)(lambda block, x: x)
    assert names(discover_components(in_sequence(_Opaque(active=False), _Opaque()))) == ["1"]


def test_registration_goes_before_tracing_and_the_latest_wins() -> None:
    register_block(Residual)(lambda block, x: x * 2)
    register_block(Residual)(lambda block, x: x * 3)
    module = in_sequence(Residual(), Residual())
    carve_away(module, "0")
    torch.testing.assert_close(module[0](torch.ones(1, 4)), torch.full((1, 4), 3.0))


# components=, keep=, keep_ends=


class _Net(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.net = Stack(depth)
        self.aux = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


@pytest.mark.parametrize(
    ("globs", "expected"),
    [
        ("net.blocks.*", ["net.blocks.0", "net.blocks.1", "net.blocks.2"]),
        ("*.blocks.[02]", ["net.blocks.0", "net.blocks.2"]),
        ("net.blocks.[!1]", ["net.blocks.0", "net.blocks.2"]),
        ("aux.?", ["aux.0", "aux.1"]),
        (["aux.1", "net.blocks.0"], ["net.blocks.0", "aux.1"]),
        ("**.fc", ["net.blocks.0.fc", "net.blocks.1.fc", "net.blocks.2.fc"]),
        ("aux.*", ["aux.0", "aux.1"]),
        ("a*", ["aux"]),
    ],
)
def test_components_globs(globs: str | list[str], expected: list[str]) -> None:
    assert names(discover(_Net(), components=globs).maskable) == expected


def test_star_stays_within_a_segment() -> None:
    with pytest.raises(ValueError, match=r"components: 'net\.blocks\.0' lies inside 'net\.blocks'"):
        discover(_Net(), components="net.**")
    assert names(discover(_Net(), components="net.*").maskable) == ["net.stem", "net.blocks", "net.head"]


@pytest.mark.parametrize("argument", ["components", "keep"])
@pytest.mark.parametrize("globs", ["nett.*", ["net.blocks.0", "nett.*"], "net.stem.weight", "blocks.*", "NET.*"])
def test_glob_without_match_is_named(argument: str, globs: str | list[str]) -> None:
    odd = globs if isinstance(globs, str) else globs[-1]
    message = f"^{argument}='{odd}' matches no module of the model. Module names look like 'net', 'net.stem'"
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        discover(_Net(), **{argument: globs})


def test_nested_components_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"components: 'net\.blocks\.0\.fc' lies inside 'net\.blocks\.0'"):
        discover(_Net(), components=["net.blocks.0.fc", "net.blocks.0"])
    assert names(discover(_Net(11), components=["net.blocks.1", "net.blocks.10"]).maskable)[0] == "net.blocks.1"


@pytest.mark.parametrize(
    ("globs", "kept"),
    [("net.blocks.1", ["1"]), ("net", ["0", "1", "2"]), (["*.blocks.0", "**.2"], ["0", "2"]), ("net.head", [])],
)
def test_keep_globs(globs: str | list[str], kept: list[str]) -> None:
    if len(kept) == 3:
        with pytest.raises(ValueError, match="keep and keep_ends leave nothing to mask: all 3 blocks"):
            discover(_Net(), keep=globs)
        return
    found = discover(_Net(), keep=globs)
    assert [component.name for component, *_ in found.kept] == [f"net.blocks.{i}" for i in kept]
    assert names(found.maskable) == [f"net.blocks.{i}" for i in "012" if i not in kept]
    assert all(reason.startswith("named by keep") for _, reason, _ in found.kept)


def test_keep_of_a_name_does_not_reach_names_that_begin_alike() -> None:
    found = discover(_Net(12), keep="net.blocks.1")
    assert [component.name for component, *_ in found.kept] == ["net.blocks.1"]


def kept_ends(module: nn.Module, keep_ends: Any, **kwargs: Any) -> tuple[int, int]:
    """How many blocks are kept at either end; none may be kept in between."""
    found = discover(module, keep_ends=keep_ends, **kwargs)
    places = [place for *_, place in found.kept]
    total = len(found.maskable) + len(places)
    first = next(i for i in range(total) if i not in places)
    assert places == [*range(first), *range(total - (len(places) - first), total)]
    return first, len(places) - first


def _unlike(depth: int) -> nn.Module:
    return in_sequence(*(Residual(4) for _ in range(depth - 1)), Residual(5))


@pytest.mark.parametrize(
    ("make", "keep_ends", "expected"),
    [
        (lambda: Stack(6), "auto", (1, 1)),
        (lambda: Stack(12), "auto", (1, 1)),
        (lambda: Stack(5), "auto", (0, 0)),
        (lambda: _unlike(6), "auto", (1, 0)),
        (lambda: _unlike(5), "auto", (0, 0)),
        (tv.resnet18, "auto", (1, 0)),
        (tv.vit_b_16, "auto", (1, 1)),
        (tv.swin_t, "auto", (1, 0)),
        (lambda: Stack(6), 2, (2, 2)),
        (lambda: Stack(6), 0, (0, 0)),
        (lambda: Stack(6), [3, 1], (3, 1)),
        (lambda: Stack(6), (0, 2), (0, 2)),
        (lambda: Stack(3), [0, 2], (0, 2)),
    ],
)
def test_kept_ends(make: Callable[[], nn.Module], keep_ends: Any, expected: tuple[int, int]) -> None:
    with torch.device("meta"):
        assert kept_ends(make(), keep_ends) == expected


@pytest.mark.parametrize("keep_ends", ["both", -1, [1], [1, 2, 3], [1, -1], [1.0, 0], None, True, "11", 1.5, {1: 2}])
def test_bad_keep_ends(keep_ends: Any) -> None:
    with pytest.raises(ValueError, match=r"^keep_ends=.* is not understood: give 'auto', a number of blocks, or"):
        discover(Stack(8), keep_ends=keep_ends)


@pytest.mark.parametrize("keep_ends", [3, [5, 1], [9, 9]])
def test_kept_ends_may_not_be_everything(keep_ends: Any) -> None:
    with pytest.raises(ValueError, match="keep and keep_ends leave nothing to mask: all 6 blocks of Stack"):
        discover(Stack(6), keep_ends=keep_ends)


def test_unknown_granularity() -> None:
    with pytest.raises(ValueError, match="granularity='layer' is unknown: choose 'block' or 'neuron'"):
        discover_components(Stack(), "layer")


# Shared tensors


def test_tensor_tied_to_the_outside_stays_shared() -> None:
    module = Stack(3)
    module.head = nn.Linear(4, 4)
    module.head.weight = module.blocks[1].fc.weight
    component = discover_components(module)[1]
    assert [part.name for part in component.slices] == ["blocks.1.fc.bias"]
    carve_away(module, "blocks.1")
    assert module.head.weight is module.blocks[1].fc.weight
    assert module.blocks[1].fc.bias is None
    assert not module.head.weight.isnan().any()
    assert module(torch.randn(2, 3)).isfinite().all()


def test_tensor_tied_between_blocks_stays_shared() -> None:
    module = Stack(3)
    module.blocks[2].fc.bias = module.blocks[0].fc.bias
    assert [[p.name for p in c.slices] for c in discover_components(module)] == [
        ["blocks.0.fc.weight"],
        ["blocks.1.fc.weight", "blocks.1.fc.bias"],
        ["blocks.2.fc.weight"],
    ]


def test_tensor_tied_within_a_block_is_masked_once() -> None:
    module = in_sequence(DropBlock(4), DropBlock(4))
    module[0].norm2.weight = module[0].norm1.weight
    tensors = [part.name for part in discover_components(module)[0].slices]
    assert "0.norm1.weight" in tensors and "0.norm2.weight" not in tensors
    carve_away(module, "0")
    assert module[0].norm1.weight is None and module[0].norm2.weight is None


# No trace is left.


class _Drawing(nn.Module):
    """Draws from every global stream, and notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.latest = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rand(1) + random.random() + np.random.rand()
        self.latest = self.fc(x) * scale
        return x + self.latest


def test_global_random_streams_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def reseeded(seed: int) -> None:
        raise AssertionError(f"the GPUs' streams were seeded with {seed}")

    module = in_sequence(_Drawing(), _Drawing(), Stack(3), _Opaque())
    for seed in (torch.random.manual_seed, random.seed, np.random.seed):
        seed(12345)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", reseeded)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    plan = MaskPlan.build(module, num_subnetworks=2, coverage=0.5, seed=3)
    plan.fit(module)
    Subnetwork(module, plan, 0).carve()
    assert names(plan.components)[:2] == ["0", "1"]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[2], strict=True))


def test_discovery_leaves_no_trace_in_the_module() -> None:
    module = in_sequence(_Drawing(), LlamaBlock(4), tv.resnet18(num_classes=2))
    before = {name: dict(m.__dict__) for name, m in module.named_modules()}
    discover(module)
    after = {name: dict(m.__dict__) for name, m in module.named_modules()}
    assert before.keys() == after.keys()
    for name, state in before.items():
        assert state.keys() == after[name].keys(), name
        assert all(state[key] is after[name][key] for key in state), name
    copy.deepcopy(module)
