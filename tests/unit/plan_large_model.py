"""Plans a language model of seven billion parameters without its weights, and prints what that took.

Run in a process of its own by a test: it measures its peak memory.
"""

from __future__ import annotations

import json
import resource
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


class Mixer(nn.Module):
    """Causal attention whose head counts are attributes, of a class and with children that no rule knows."""

    def __init__(self, width: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, width // n_heads
        self.queries = nn.Linear(width, width, bias=False)
        self.keys = nn.Linear(width, n_kv_heads * self.head_dim, bias=False)
        self.values = nn.Linear(width, n_kv_heads * self.head_dim, bias=False)
        self.back = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.queries(x).view(batch, length, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.keys(x).view(batch, length, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.values(x).view(batch, length, self.n_kv_heads, self.head_dim).transpose(1, 2)
        k, v = (t.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.back(y.transpose(1, 2).reshape(batch, length, self.n_heads * self.head_dim))


class Gate(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.back = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(F.silu(self.left(x)) * self.right(x))


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.before, self.mixer = nn.RMSNorm(width), Mixer(width, heads, kv_heads)
        self.between, self.gate = nn.RMSNorm(width), Gate(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.before(x))
        return x + self.gate(self.between(x))


class Language(nn.Module):
    def __init__(
        self,
        depth: int = 32,
        width: int = 4096,
        hidden: int = 11008,
        heads: int = 32,
        kv_heads: int = 32,
        vocabulary: int = 32000,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.stack = nn.ModuleList(Layer(width, hidden, heads, kv_heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.example_input_array = torch.zeros(1, 8, dtype=torch.long)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.stack:
            x = layer(x)
        return self.head(self.norm(x))


def main() -> None:
    """Prints the sizes, the memory and the time of a plan as JSON."""
    from lightning_sdp import MaskPlan

    torch.set_num_threads(1)
    with torch.device("meta"):
        model = Language()
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    plan = MaskPlan.build(model, num_subnetworks=8, granularity="neuron")
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    json.dump(
        {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "on_meta": all(parameter.is_meta for parameter in model.parameters()),
            "groups": [group.name for group in plan.groups],
            "attributes": plan.groups[0].attributes,
            "components": len(plan.components),
            "kept": [kept.name for kept in plan.kept],
            "coverage": plan.coverage,
            "imbalance": plan.imbalance,
            "peak_bytes": after.ru_maxrss * 1024,
            "imported_bytes": before.ru_maxrss * 1024,
            "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "wall_seconds": wall,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
