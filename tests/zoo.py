"""Small models of many kinds, each with example inputs; the builders also work under ``torch.device("meta")``."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision

Built = tuple[nn.Module, Any]


def _image(size: int) -> torch.Tensor:
    return torch.randn(2, 3, size, size)


def _tokens(length: int = 12) -> torch.Tensor:
    return torch.randint(0, 96, (2, length))


class Logits(nn.Module):
    """A language model of transformers as a module that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**inputs).logits


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class GroupedAttention(nn.Module):
    """Attention with rotary positions and fewer heads for keys and values than for queries."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.wq = nn.Linear(width, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor, heads: int) -> torch.Tensor:
            return y.view(*y.shape[:2], heads, self.head_dim).transpose(1, 2)

        def rotate(y: torch.Tensor) -> torch.Tensor:
            first, second = y.chunk(2, -1)
            return y * cos + torch.cat((-second, first), -1) * sin

        query, key = rotate(split(self.wq(x), self.heads)), rotate(split(self.wk(x), self.kv_heads))
        value = split(self.wv(x), self.kv_heads)
        times = self.heads // self.kv_heads
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(x.shape))


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attn = GroupedAttention(width, heads, kv_heads)
        self.mlp = SwiGLU(width, hidden)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """A language model like LLaMA, written by hand."""

    def __init__(
        self,
        width: int = 64,
        layers: int = 2,
        heads: int = 8,
        kv_heads: int = 4,
        hidden: int = 96,
        vocabulary: int = 96,
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        head_dim = width // heads
        frequencies = 1e-4 ** (torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.cat([torch.outer(torch.arange(64).float(), frequencies)] * 2, -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, length = self.emb(ids), ids.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))


class DoubleConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = DoubleConv(3, 8), DoubleConv(8, 16), DoubleConv(16, 32)
        self.raise2, self.up2 = nn.ConvTranspose2d(32, 16, 2, 2), DoubleConv(32, 16)
        self.raise1, self.up1 = nn.ConvTranspose2d(16, 8, 2, 2), DoubleConv(16, 8)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        third = self.middle(F.max_pool2d(second, 2))
        x = self.up2(torch.cat([self.raise2(third), second], 1))
        return self.out(self.up1(torch.cat([self.raise1(x), first], 1)))


def mlp() -> Built:
    layers = [nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 10)]
    return nn.Sequential(*layers), torch.randn(4, 20)


def unet() -> Built:
    return UNet(), _image(16)


def llama() -> Built:
    return Llama(), _tokens()


def resnet18() -> Built:
    return torchvision.models.resnet18(num_classes=10), _image(32)


def _bottlenecks(**options: Any) -> Built:
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 2, 1, 1], num_classes=10, **options), _image(32)


def resnet50() -> Built:
    """ResNet-50, but shallower."""
    return _bottlenecks()


def wide_resnet50() -> Built:
    """WideResNet-50-2, but shallower."""
    return _bottlenecks(width_per_group=128)


def resnext50() -> Built:
    """ResNeXt-50 32x4d, but shallower."""
    return _bottlenecks(groups=32, width_per_group=4)


def mobilenet_v2() -> Built:
    """MobileNetV2, but shallower."""
    setting = [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 2, 2]]
    return torchvision.models.MobileNetV2(num_classes=10, inverted_residual_setting=setting), _image(32)


def mobilenet_v3() -> Built:
    """MobileNetV3, but shallower."""
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    setting = [
        InvertedResidualConfig(16, 3, 16, 16, True, "RE", 2, 1, 1.0),
        InvertedResidualConfig(16, 3, 72, 24, False, "RE", 2, 1, 1.0),
        InvertedResidualConfig(24, 5, 96, 24, True, "HS", 1, 1, 1.0),
    ]
    return MobileNetV3(setting, last_channel=64, num_classes=10), _image(32)


def convnext() -> Built:
    """ConvNeXt, but smaller than the tiny one."""
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(32, 64, 2), CNBlockConfig(64, None, 2)], num_classes=10), _image(32)


def _swin(block: Callable[..., nn.Module], merging: Callable[..., nn.Module]) -> Built:
    model = torchvision.models.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=32,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=[4, 4],
        num_classes=10,
        block=block,
        downsample_layer=merging,
    )
    return model, _image(40)  # 10 x 10 patches: padded to 12 x 12 and shifted


def swin() -> Built:
    from torchvision.models import swin_transformer as module

    return _swin(module.SwinTransformerBlock, module.PatchMerging)


def swin_v2() -> Built:
    from torchvision.models import swin_transformer as module

    return _swin(module.SwinTransformerBlockV2, module.PatchMergingV2)


def vit() -> Built:
    model = torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10
    )
    return model, _image(32)


def _encoder(norm_first: bool) -> Built:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 8, 64)


def encoder_post_norm() -> Built:
    return _encoder(False)


def encoder_pre_norm() -> Built:
    return _encoder(True)


_SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2}
_SIZES |= {"num_attention_heads": 8, "max_position_embeddings": 32}


def hf_llama() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    return Logits(LlamaForCausalLM(LlamaConfig(**_SIZES, num_key_value_heads=4))), {"input_ids": _tokens()}


def hf_mistral() -> Built:
    from transformers import MistralConfig, MistralForCausalLM

    return Logits(MistralForCausalLM(MistralConfig(**_SIZES, num_key_value_heads=2))), {"input_ids": _tokens()}


def hf_qwen3() -> Built:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**_SIZES, num_key_value_heads=4, head_dim=8)
    return Logits(Qwen3ForCausalLM(config)), {"input_ids": _tokens()}


def hf_gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=96, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    return Logits(GPT2LMHeadModel(config)), {"input_ids": _tokens()}


def hf_bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    inputs = {"input_ids": _tokens(), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    return Logits(BertForMaskedLM(BertConfig(**_SIZES))), inputs


def hf_t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=96, d_model=64, d_kv=8, d_ff=80, num_layers=2, num_heads=4)
    return Logits(T5ForConditionalGeneration(config)), {"input_ids": _tokens(), "decoder_input_ids": _tokens(7)}


ZOO: dict[str, Callable[[], Built]] = {
    build.__name__: build
    for build in (
        mlp,
        unet,
        llama,
        resnet18,
        resnet50,
        wide_resnet50,
        resnext50,
        mobilenet_v2,
        mobilenet_v3,
        convnext,
        swin,
        swin_v2,
        vit,
        encoder_post_norm,
        encoder_pre_norm,
        hf_llama,
        hf_mistral,
        hf_qwen3,
        hf_gpt2,
        hf_bert,
        hf_t5,
    )
}
