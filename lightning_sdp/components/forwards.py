"""Attention whose heads are cut.

[Note: Welded forwards]
`nn.MultiheadAttention` and torchvision's shifted-window attention take the width of a head to be the width of their
input divided by the number of heads. No attribute tells them otherwise, so that modules with cut heads change their
class to a subclass with another forward, which does not ask how wide the input is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

_SLICED: dict[type[nn.Module], type[nn.Module]] = {}


def sliced_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that a module takes on while its heads are cut; ``None`` where its own class will do.

    A module that does not run the forward which is to be replaced has none either.
    """
    if "forward" in module.__dict__:
        return None
    forward = type(module).forward
    replacement = _FORWARDS.get(f"{forward.__module__}.{forward.__qualname__}")
    if replacement is None:
        return None
    cls = type(module)
    if cls not in _SLICED:
        _SLICED[cls] = type(f"Sliced{cls.__name__}", (cls,), {"forward": replacement, "__module__": cls.__module__})
    return _SLICED[cls]


def _multihead_attention(
    self: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The forward of `nn.MultiheadAttention` for the held heads; the weights are those of the held heads."""
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    batched = query.dim() == 3
    if not batched:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        key_padding_mask = key_padding_mask.unsqueeze(0) if key_padding_mask is not None else None
    elif not self.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    if is_causal and key_padding_mask is None and not need_weights:
        attn_mask = None  # The hint suffices.
    else:
        is_causal = False

    if self.in_proj_weight is not None:
        weights: Sequence[Tensor] = self.in_proj_weight.chunk(3)
    else:
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
    biases = self.in_proj_bias.chunk(3) if self.in_proj_bias is not None else (None, None, None)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    extra = 0
    if self.bias_k is not None and self.bias_v is not None:
        k, v = (torch.cat([x, b.expand(len(x), 1, -1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
        extra += 1
    if self.add_zero_attn:
        k, v = (torch.cat([x, x.new_zeros(len(x), 1, x.shape[2])], 1) for x in (k, v))
        extra += 1
    q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))

    bias = None
    if attn_mask is not None:
        bias = _additive(attn_mask, q.dtype)
        if bias.dim() == 3:  # Batch and heads of the full module in one dimension.
            bias = bias.unflatten(0, (len(q), -1))[:, list(self._held_heads)]  # type: ignore[index,arg-type]
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, q.dtype)[:, None, None]
        bias = padding if bias is None else bias + padding
    if bias is not None and extra:
        bias = F.pad(bias, (0, extra))

    dropout = self.dropout if self.training else 0.0
    attention = None
    if need_weights:
        scores = q * math.sqrt(1.0 / self.head_dim) @ k.transpose(-2, -1)
        attention = F.dropout((scores if bias is None else scores + bias).softmax(-1), dropout)
        out = attention @ v
        attention = attention.mean(1) if average_attn_weights else attention
    else:
        out = F.scaled_dot_product_attention(q, k, v, bias, dropout, is_causal)
    out = F.linear(out.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
    if not batched:
        return out.squeeze(0), attention.squeeze(0) if attention is not None else None
    return out if self.batch_first else out.transpose(0, 1), attention


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is added to the scores, of one that may be boolean (true: not to be attended to)."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _window_attention(self: Any, x: Tensor) -> Tensor:
    """The forward of torchvision's shifted-window attention, versions 1 and 2, for the held heads."""
    height, width = x.shape[1:3]
    rows, cols = self.window_size
    x = F.pad(x, (0, 0, 0, -width % cols, 0, -height % rows))
    batch, padded_height, padded_width, _ = x.shape
    # A window that covers the whole map need not shift.
    down = self.shift_size[0] if rows < padded_height else 0
    right = self.shift_size[1] if cols < padded_width else 0
    x = x.roll((-down, -right), (1, 2))
    windows = _to_windows(x, rows, cols)  # (batch, windows, tokens, channels)

    bias, cosine = self.qkv.bias, hasattr(self, "logit_scale")
    if cosine and bias is not None:  # Version 2 has no bias for the keys, but keeps its place.
        queries, keys, values = bias.chunk(3)
        bias = torch.cat([queries, torch.zeros_like(keys), values])
    qkv = F.linear(windows, self.qkv.weight, bias).unflatten(-1, (3, self.num_heads, -1))
    q, k, v = qkv.permute(3, 0, 1, 4, 2, 5)  # (batch, windows, heads, tokens, width of a head)
    if cosine:
        scale = self.logit_scale.clamp(max=math.log(100.0)).exp()
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * scale
    else:
        scores = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)
    scores = scores + self.get_relative_position_bias()
    if down or right:
        apart = _regions(x, rows, cols, down, right)
        scores = scores + apart.to(scores.dtype).mul(-100.0)[:, None]
    attention = F.dropout(scores.softmax(-1), self.attention_dropout, self.training)

    out = (attention @ v).transpose(2, 3).flatten(3)
    out = F.dropout(F.linear(out, self.proj.weight, self.proj.bias), self.dropout, self.training)
    out = out.unflatten(1, (padded_height // rows, -1)).unflatten(3, (rows, cols))
    out = out.transpose(2, 3).reshape(batch, padded_height, padded_width, -1).roll((down, right), (1, 2))
    return out[:, :height, :width].contiguous()


def _to_windows(x: Tensor, rows: int, cols: int) -> Tensor:
    """Splits a map (batch, height, width, channels) into windows (batch, windows, tokens, channels)."""
    x = x.unflatten(2, (-1, cols)).unflatten(1, (-1, rows))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _regions(x: Tensor, rows: int, cols: int, down: int, right: int) -> Tensor:
    """Which pairs of tokens of a window (windows, tokens, tokens) are no neighbours but for the cyclic shift."""

    def bands(size: int, window: int, shift: int) -> Tensor:
        position = torch.arange(size, device=x.device)
        return (position >= size - window).int() + (position >= size - shift).int() if shift else position * 0

    labels = 3 * bands(x.shape[1], rows, down)[:, None] + bands(x.shape[2], cols, right)
    tokens = _to_windows(labels[None, :, :, None], rows, cols)[0]
    return tokens != tokens.transpose(1, 2)


_FORWARDS: dict[str, Any] = {
    "torch.nn.modules.activation.MultiheadAttention.forward": _multihead_attention,
    "torchvision.models.swin_transformer.ShiftedWindowAttention.forward": _window_attention,
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2.forward": _window_attention,
}
