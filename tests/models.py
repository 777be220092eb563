"""Small models and data that tests on ranks and in the reference build alike."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.models import ResNet, SwinTransformer
from torchvision.models.resnet import BasicBlock

WIDTH, CLASSES = 12, 3
SHAPES = {"mlp": (5,), "attention": (3, 5), "gqa": (3, 5), "conv": (2, 6, 6), "swin": (3, 8, 8)}
SHAPES |= {"fixed": (3, 5), "opaque": (5,), "basic": (3, 64, 64), "swin_t": (3, 32, 32)}


class MLPBlock(nn.Module):
    """Pre-norm residual MLP of a width of its own, so that blocks cost differently."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, hidden)
        self.fc2 = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class AttentionBlock(nn.Module):
    """Pre-norm transformer block that takes a keyword argument and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        y = self.norm1(x)
        y, weights = self.attn(y, y, y, attn_mask=mask)
        x = x + y
        return x + self.mlp(self.norm2(x)), weights


class GQABlock(nn.Module):
    """Pre-norm block with grouped queries, whose head counts are attributes, and a gated MLP."""

    def __init__(self, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, WIDTH // heads
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * kv_heads * self.width)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * 20), nn.Linear(20, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.query(x).view(batch, length, self.heads, self.width).transpose(1, 2)
        k, v = self.key_value(x).view(batch, length, 2, self.kv_heads, self.width).permute(2, 0, 3, 1, 4)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, self.heads * self.width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class FixedHeadsBlock(nn.Module):
    """Attention whose forward has the number of heads written into it, so that no head can be cut out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class OpaqueBlock(nn.Module):
    """A residual block whose forward depends on its data, and which passes a state on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if float(x.detach().abs().max()) > 1e6:
            raise ValueError("diverged")
        return x + state.mean() * self.fc(self.norm(x)), state


class ConvBlock(nn.Module):
    """Residual block with BatchNorm and a projection where the width changes."""

    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout)
        self.conv2, self.bn2 = nn.Conv2d(cout, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout)
        self.shortcut = nn.Sequential(nn.Conv2d(cin, cout, 1), nn.BatchNorm2d(cout)) if cin != cout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Net(LightningModule):
    """A model of one of several kinds, trained on vectors, sequences or images.

    Args:
        kind: ``"mlp"``, ``"attention"``, ``"gqa"``, ``"fixed"``, ``"opaque"``, ``"conv"`` or ``"swin"``.
        blocks: Number of blocks.
        optimizer: ``"adamw"``, ``"adagrad"``, ``"sgd"`` or ``"momentum"``.
        groups: Split the parameters into two optimizer groups by name.
    """

    def __init__(self, kind: str = "mlp", blocks: int = 5, optimizer: str = "adamw", groups: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kind, self.optimizer, self.groups = kind, optimizer, groups
        if kind == "conv":
            self.stem: nn.Module = nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()
            )
            widths = [4, 4, 6, 6, 8, 8][: blocks + 1]
            self.blocks = nn.ModuleList(ConvBlock(a, b) for a, b in pairwise(widths))
            self.head = nn.Linear(widths[-1], CLASSES)
        elif kind == "basic":
            self.net = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)
        elif kind == "swin_t":  # torchvision's Swin-T without its random depth
            self.net = SwinTransformer(
                [4, 4], 96, [2, 2, 6, 2], [3, 6, 12, 24], [7, 7], stochastic_depth_prob=0.0, num_classes=CLASSES
            )
        elif kind == "swin":
            self.swin = SwinTransformer(
                [2, 2], 8, [2, 2], [2, 4], [2, 2], stochastic_depth_prob=0.0, num_classes=CLASSES
            )
        else:
            block = {"mlp": MLPBlock, "attention": AttentionBlock, "gqa": GQABlock, "fixed": FixedHeadsBlock}.get(
                kind, OpaqueBlock
            )
            self.stem = nn.Linear(5, WIDTH)
            self.blocks = nn.ModuleList(block(8 * (i + 1)) if kind == "mlp" else block() for i in range(blocks))
            self.head = nn.Linear(WIDTH, CLASSES)
        self.example_input_array = None if kind == "opaque" else torch.zeros(2, *SHAPES[kind])

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("basic", "swin_t"):
            return self.net(x)
        if self.kind == "swin":
            return self.swin(x)
        x = self.stem(x)
        for block in self.blocks:
            if self.kind == "attention":
                x, _ = block(x, mask=None)
            elif self.kind == "opaque":
                x, _ = block(x, state=torch.ones_like(x))
            else:
                x = block(x)
        if self.kind in ("attention", "gqa", "fixed"):
            x = x.mean(1)
        if self.kind == "conv":
            x = x.mean((2, 3))
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        if self._trainer is not None:
            self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        params: Any = [p for _, p in named]
        if self.groups:
            decay = [p for n, p in named if n.endswith("weight")]
            params = [
                {"params": decay, "weight_decay": 0.1},
                {"params": [p for n, p in named if not n.endswith("weight")]},
            ]
        if self.optimizer == "adamw":
            return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)
        if self.optimizer == "adagrad":
            optimizer = torch.optim.Adagrad(params, lr=0.05)
            for state in optimizer.state.values():
                total = state["sum"]
                total.copy_(torch.linspace(0.1, 0.5, total.numel()).view(total.shape))
            return optimizer
        return torch.optim.SGD(params, lr=0.1, momentum=0.9 if self.optimizer == "momentum" else 0.0)


def make(kind: str = "mlp", dtype: torch.dtype = torch.float64, **options: Any) -> Net:
    """The same model on every rank and in the reference."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Net(kind, **options).to(dtype)


def batches(kind: str, rank: int, count: int, dtype: torch.dtype = torch.float64, size: int = 4) -> list[Any]:
    """A rank's training batches."""
    generator = torch.Generator().manual_seed(1000 + rank)
    shape = SHAPES[kind]
    made = []
    for _ in range(count):
        x = torch.randn(size, *shape, generator=generator, dtype=torch.float64).to(dtype)
        made.append((x, torch.randint(CLASSES, (size,), generator=generator)))
    return made


def loader(made: list[Any]) -> DataLoader:
    """A dataloader over ready batches, in order."""
    return DataLoader(made, batch_size=None, shuffle=False)  # type: ignore[arg-type]


def same_state(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two state dicts have the same keys in the same order and bit-equal values."""
    return list(left) == list(right) and all(torch.equal(left[k], right[k]) for k in left)
