"""What a rank's part in a training takes: memory and traffic."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_sdp.report import effective_coverage
from lightning_sdp.run import Run
from lightning_sdp.sync.groups import HolderGroups


def measure(run: Run, optimizers: Sequence[Optimizer]) -> dict[str, float]:
    """Measures one rank, between two steps; local.

    Args:
        run: The rank's part in the training.
        optimizers: What trains it.

    Returns:
        See `SDPStrategy.usage`.
    """
    groups, part = run.groups, run.part
    worker = groups.rank // groups.ranks_per_worker
    cut = {} if run.subnetwork is None else run.subnetwork.cut
    trained = {n: run.subnetwork.local(n) if run.subnetwork and n in cut else p for n, p in part.trained.items()}
    stored = [*trained.values()] if run.mask is None else [*run.module.parameters(), *run.mask.leaves.values()]
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    return {
        "effective_coverage": effective_coverage(run.plan)[worker],
        "parameter_bytes": _total(stored),
        "gradient_bytes": _total(own for name, own in trained.items() if part.trained[name].requires_grad),
        "optimizer_bytes": _total(value for value in states if isinstance(value, Tensor)),
        "peak_bytes": _peak_memory(groups.device),
        "sent_bytes": run.sent_bytes(),
    }


def gather(numbers: Mapping[str, float], groups: HolderGroups) -> list[dict[str, float]]:
    """Every rank's numbers, by rank; collective, with the same names on all ranks."""
    if groups.world_group is None:
        return [dict(numbers)]
    own = torch.tensor([*numbers.values()], dtype=torch.float64, device=groups.device)
    rows = [torch.empty_like(own) for _ in groups.world]
    dist.all_gather(rows, own, group=groups.world_group)
    return [dict(zip(numbers, row, strict=True)) for row in torch.stack(rows).tolist()]


def _total(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _peak_memory(device: torch.device) -> int:
    """The most bytes that were allocated on an accelerator, or resident in the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
