"""Hand-written blocks and small models on which the unit tests agree."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


def mlp(dim: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))


class Residual(nn.Module):
    """The least of a residual block; with ``buffer`` it has one of its own as well."""

    def __init__(self, dim: int = 4, buffer: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(dim, dim)
        if buffer:
            self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(x)


class Stack(nn.Module):
    """A stem, residual blocks, a head."""

    def __init__(self, depth: int = 4, dim: int = 4, buffer: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(3, dim)
        self.blocks = nn.ModuleList(Residual(dim, buffer) for _ in range(depth))
        self.head = nn.Linear(dim, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LlamaAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        scores = self.q_proj(x) @ self.k_proj(x).transpose(-1, -2) * scale
        if mask is not None:
            scores = scores + mask
        weights = scores.softmax(-1)
        return self.o_proj(weights @ self.v_proj(x)), weights


class LlamaMLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.down_proj = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    """Pre-norm, with keyword arguments, an optional mask and control flow on it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.self_attn, self.mlp = LlamaAttention(dim), LlamaMLP(dim)

    def forward(self, hidden: Tensor, mask: Tensor | None = None, *, scale: float = 0.5) -> Tensor:
        if mask is not None:
            mask = mask * 1.0
        residual = hidden
        hidden, _ = self.self_attn(self.input_layernorm(hidden), mask=mask, scale=scale)
        hidden = residual + hidden
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class TupleBlock(nn.Module):
    """Returns a tuple: the stream, its attention weights, and the mask as it came."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), LlamaAttention(dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        update, weights = self.attn(self.norm(x), mask)
        return x + update, weights, mask


class DropBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.drop = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.Dropout(0.1)
        self.attn, self.mlp = nn.MultiheadAttention(dim, 2, batch_first=True), mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.drop(self.attn(y, y, y, need_weights=False)[0])
        x = x + self.drop(self.mlp(self.norm2(x)))
        return x


class InPlaceBlock(nn.Module):
    """Adds in place, after activations of the stream."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        y = self.fc(x)
        y += x
        return torch.tanh(y)


class ParallelBlock(nn.Module):
    """Attention and MLP side by side, as in GPT-J."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(dim), LlamaAttention(dim), mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.attn(y)[0] + self.mlp(y) + x


class PreActBlock(nn.Module):
    """A WideResNet's block; its shortcut reads what the first norm and activation give."""

    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(out)
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(width, out, 1, stride, bias=False) if stride != 1 or width != out else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(x))
        skip = x if self.shortcut is None else self.shortcut(out)
        out = self.conv2(F.relu(self.bn2(self.conv1(out))))
        return torch.add(skip, out)


class PostNormBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.mlp = LlamaAttention(dim), mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x)[0])
        return self.norm2(x + self.mlp(x))


class LearnedPositions(nn.Module):
    """Adds a parameter to the stream, which makes no residual block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 9, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[:, : x.size(1)]


def randomize(model: nn.Module) -> nn.Module:
    """Float64 and eval mode, with weights and statistics that make every branch heard, whatever its initialization."""
    generator = torch.Generator().manual_seed(1)
    model.double().eval()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(0.1 + torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype))
            if tensor.dim() > 1 and tensor.is_floating_point():
                tensor.sub_(0.6).mul_(2 / tensor[0].numel() ** 0.5)
    return model
