"""The rules for classes of torch, torchvision and transformers, none of which are imported for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn as nn

from lightning_sdp.components.base import Group, Member
from lightning_sdp.components.members import attention, chain, gated, head_group, produces, reads
from lightning_sdp.components.registry import NeuronRule, register_neurons
from lightning_sdp.components.slicing import sliced_class

# Classes of torch and torchvision.


@register_neurons(nn.MultiheadAttention)
def _multihead_attention(attn: nn.MultiheadAttention) -> list[Group]:
    if sliced_class(attn) is None:
        return []
    heads, width = attn.num_heads, attn.head_dim
    members = [Member(name, 0, (3, heads, width), 1) for name in ("in_proj_weight", "in_proj_bias")]
    members += [Member(f"{name}_proj_weight", 0, (heads, width)) for name in "qkv"]
    members += [Member(name, 2, (heads, width)) for name in ("bias_k", "bias_v")]
    return head_group([*members, *reads(attn, "out_proj", (heads, width))], heads, ["num_heads"])


@register_neurons("torch.nn.modules.transformer.TransformerEncoderLayer")
@register_neurons("torch.nn.modules.transformer.TransformerDecoderLayer")
def _transformer_layer(layer: nn.Module) -> list[Group]:
    return chain(layer, "linear1", (), "linear2", "hidden", "neurons")


@register_neurons("torchvision.models.resnet.BasicBlock")
def _basic_block(block: nn.Module) -> list[Group]:
    return chain(block, "conv1", ("bn1",), "conv2", "channels", "channels")


@register_neurons("torchvision.models.resnet.Bottleneck")
def _bottleneck(block: Any) -> list[Group]:
    if block.conv2.groups > 1:
        return chain(block, "conv1", ("bn1", "conv2", "bn2"), "conv3", "channels", "channels")
    first = chain(block, "conv1", ("bn1",), "conv2", "conv1.channels", "channels")
    return first + chain(block, "conv2", ("bn2",), "conv3", "conv2.channels", "channels")


@register_neurons("torchvision.models.mobilenetv2.InvertedResidual")
@register_neurons("torchvision.models.mobilenetv3.InvertedResidual")
@register_neurons("torchvision.models.efficientnet.MBConv")
def _inverted_residual(block: nn.Module) -> list[Group]:
    layers = _layers(block, "conv" if hasattr(block, "conv") else "block")
    convs = [i for i, name in enumerate(layers) if isinstance(block.get_submodule(name), nn.Conv2d)]
    if len(convs) < 3:  # The depthwise convolution reads the block's input itself.
        return []
    first, last = convs[0], convs[-1]
    return chain(block, layers[first], layers[first + 1 : last], layers[last], "channels", "channels")


def _layers(module: nn.Module, name: str) -> list[str]:
    """The names of what a module's `nn.Sequential`, however nested, runs in turn."""
    child = module.get_submodule(name)
    if not isinstance(child, nn.Sequential):
        return [name]
    return [leaf for key, _ in child.named_children() for leaf in _layers(module, f"{name}.{key}")]


@register_neurons("torchvision.ops.misc.SqueezeExcitation")
def _squeeze_excitation(gate: nn.Module) -> list[Group]:
    return chain(gate, "fc1", ("activation",), "fc2", "channels", "channels")


@register_neurons("torchvision.ops.misc.MLP")
def _mlp(mlp: nn.Sequential) -> list[Group]:
    names = [name for name, _ in mlp.named_children()]
    linear = [i for i, module in enumerate(mlp) if isinstance(module, nn.Linear)]
    labels = ["hidden"] if len(linear) == 2 else [f"{names[i]}.hidden" for i in linear[:-1]]
    spans = zip(linear, linear[1:], labels, strict=False)
    return [g for i, j, label in spans for g in chain(mlp, names[i], names[i + 1 : j], names[j], label, "neurons")]


@register_neurons("torchvision.models.convnext.CNBlock")
def _convnext_block(block: nn.Module) -> list[Group]:
    return chain(block, "block.3", ("block.4",), "block.5", "hidden", "neurons")


@register_neurons("torchvision.models.swin_transformer.ShiftedWindowAttention")
@register_neurons("torchvision.models.swin_transformer.ShiftedWindowAttentionV2")
def _window_attention(attn: Any) -> list[Group]:
    if sliced_class(attn) is None:
        return []
    heads = attn.num_heads
    layout = (heads, attn.proj.in_features // heads)
    members = produces(attn, "qkv", (3, *layout), 1)
    if hasattr(attn, "logit_scale"):
        members += [Member("logit_scale", 0, (heads,)), *produces(attn, "cpb_mlp.2", (heads,))]
    else:
        members += [Member("relative_position_bias_table", 1, (heads,))]
    return head_group([*members, *reads(attn, "proj", layout)], heads, ["num_heads"])


# Classes of Hugging Face's transformers.


def _hf(model: str, cls: str) -> Callable[[NeuronRule], NeuronRule]:
    return register_neurons(f"transformers.models.{model}.modeling_{model}.{cls}")


@_hf("llama", "LlamaMLP")
@_hf("mistral", "MistralMLP")
@_hf("qwen2", "Qwen2MLP")
@_hf("qwen3", "Qwen3MLP")
def _gate_up_down(mlp: nn.Module) -> list[Group]:
    return gated(mlp, "gate_proj", "up_proj", "down_proj")


@_hf("llama", "LlamaAttention")
@_hf("mistral", "MistralAttention")
@_hf("qwen2", "Qwen2Attention")
@_hf("qwen3", "Qwen3Attention")
def _grouped_query_attention(attn: Any) -> list[Group]:
    return attention(attn, "q_proj", "k_proj", "v_proj", "o_proj", attn.head_dim)


@_hf("gpt2", "GPT2Attention")
def _gpt2_attention(attn: Any) -> list[Group]:
    layout = (attn.num_heads, attn.head_dim)
    if attn.is_cross_attention:
        members = produces(attn, "q_attn", layout) + produces(attn, "c_attn", (2, *layout), 1)
    else:
        members = produces(attn, "c_attn", (3, *layout), 1)
    return head_group([*members, *reads(attn, "c_proj", layout)], attn.num_heads, ["num_heads", "split_size"])


@_hf("gpt2", "GPT2MLP")
def _gpt2_mlp(mlp: nn.Module) -> list[Group]:
    return chain(mlp, "c_fc", (), "c_proj", "hidden", "neurons")


@_hf("bert", "BertAttention")
def _bert_attention(attn: Any) -> list[Group]:
    inner = attn.get_submodule("self")
    layout = (inner.num_attention_heads, inner.attention_head_size)
    members = [m for name in ("query", "key", "value") for m in produces(attn, f"self.{name}", layout)]
    members += reads(attn, "output.dense", layout)
    return head_group(members, layout[0], ["self.num_attention_heads", "self.all_head_size"])


@_hf("bert", "BertLayer")
def _bert_layer(layer: nn.Module) -> list[Group]:
    return chain(layer, "intermediate.dense", (), "output.dense", "hidden", "neurons")


# The layers of a stack hand on the position bias of the first: in self-attention a learned one, in cross-attention one
# of zeros, but of as many heads. So the layers must agree on the heads.
@_hf("t5", "T5Stack")
@_hf("mt5", "MT5Stack")
def _t5_stack(stack: nn.Module) -> list[Group]:
    groups = []
    for kind in ("SelfAttention", "EncDecAttention"):
        members: list[Member] = []
        attributes: list[str] = []
        heads = 0
        for name, attn in stack.named_modules():
            if name.rpartition(".")[2] != kind:
                continue
            heads, width = int(attn.n_heads), int(attn.key_value_proj_dim)  # type: ignore[arg-type]
            members += [m for key in "qkv" for m in produces(stack, f"{name}.{key}", (heads, width))]
            members += reads(stack, f"{name}.o", (heads, width))
            if attn.has_relative_attention_bias:
                members.append(Member(f"{name}.relative_attention_bias.weight", 1, (heads,)))
            attributes += [f"{name}.n_heads", f"{name}.inner_dim"]
        groups += head_group(members, heads, attributes, f"{kind}.heads") if members else []
    return groups


@_hf("t5", "T5DenseActDense")
@_hf("mt5", "MT5DenseActDense")
def _t5_mlp(mlp: nn.Module) -> list[Group]:
    return chain(mlp, "wi", (), "wo", "hidden", "neurons")


@_hf("t5", "T5DenseGatedActDense")
@_hf("mt5", "MT5DenseGatedActDense")
def _t5_gated_mlp(mlp: nn.Module) -> list[Group]:
    return gated(mlp, "wi_0", "wi_1", "wo")
