"""What the benchmarks share: models, strategies to compare, and processes on this machine."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sdp import SDPStrategy

MODELS = {"blocks": (16, 64), "resnet": (2, 3, 16, 16)}  # name → shape of a batch
GRANULARITIES = ("block", "neuron")
MASKINGS = ("forward", "backward")
Contender = tuple[str, float, str] | None  # granularity, coverage and masking; None is DDP
_TIMEOUT = timedelta(seconds=60)
# glibc otherwise gives freed gradients back to the system in some processes and not in others, depending on what was
# allocated when; the page faults that follow are worth up to a tenth of a step. Other C libraries ignore these.
_KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**36),
}


class Block(nn.Module):
    """A pre-norm residual MLP block."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Adds the branch to its input."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Classifier(LightningModule):
    """A network, cross entropy and AdamW."""

    def __init__(self, network: nn.Module, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.network = network
        self.example_input_array = torch.zeros(input_shape)

    def forward(self, inputs: Tensor) -> Tensor:
        """The logits."""
        return self.network(inputs)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch."""
        inputs, targets = batch
        return nn.functional.cross_entropy(self(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def build_model(name: str) -> Classifier:
    """The model of a benchmark, equal on all ranks.

    Args:
        name: ``"blocks"``: 12 like MLP blocks, 12.7M parameters, 99.7 % of them in blocks. ``"resnet"``: torchvision's
            ResNet-18 with a stem for small images, 11.2M parameters.
    """
    torch.manual_seed(0)
    if name == "blocks":
        width = 512
        blocks = [Block(width, 2 * width) for _ in range(12)]
        return Classifier(nn.Sequential(nn.Linear(64, width), *blocks, nn.Linear(width, 10)), MODELS[name])
    from torchvision.models import resnet18

    network = resnet18(num_classes=10)
    network.conv1, network.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return Classifier(network, MODELS[name])


def make_batches(name: str, steps: int) -> DataLoader:
    """One small batch of noise per rank, once for every step."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = MODELS[name]
    batch = torch.randn(shape, generator=generator), torch.randint(0, 10, shape[:1], generator=generator)
    return DataLoader([batch] * steps, batch_size=None)  # type: ignore[arg-type]


def make_strategy(contender: Contender) -> DDPStrategy:
    """SDP with a granularity, a coverage and a masking, or DDP for ``None``."""
    if contender is None:
        return DDPStrategy(gradient_as_bucket_view=True)
    granularity, coverage, masking = contender
    return SDPStrategy(granularity, masking, coverage, keep_ends=0)


def make_trainer(strategy: DDPStrategy, steps: int, callback: Callback) -> Trainer:
    """A Trainer that takes a number of steps on the CPU and does nothing else."""
    return Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=steps,
        use_distributed_sampler=False,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def label(contender: Contender) -> str:
    """How a table names a strategy."""
    return "DDP" if contender is None else f"SDP {contender[0]}s {contender[2]}, C = {contender[1]:g}"


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Runs a function in several processes of one thread each, joined by gloo over the loopback interface.

    Args:
        function: What every process calls; importable.
        ranks: Number of processes.
        *args: Its arguments.

    Returns:
        What rank 0 returns.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(_KEEP_MEMORY)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns where a host has no name
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "result.pt")
        mp.spawn(_process, (function, ranks, port, path, args), nprocs=ranks)
        return torch.load(path)


def _process(rank: int, function: Callable[..., Any], ranks: int, port: int, path: str, args: tuple[Any, ...]) -> None:
    os.environ.update(
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.pytorch")
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=_TIMEOUT)
    result = function(*args)
    if rank == 0:
        torch.save(result, path)
    dist.destroy_process_group()
