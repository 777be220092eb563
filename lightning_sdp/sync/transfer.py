"""Moves several tensors between ranks in one message per dtype."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _by_dtype(tensors: Mapping[str, Tensor]) -> dict[torch.dtype, list[str]]:
    names: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(tensor.dtype, []).append(name)
    return names


def _pack(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat([t.detach().to(device).reshape(-1) for t in tensors])


def _unpack(flat: Tensor, like: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    parts = flat.split([like[name].numel() for name in names])
    return {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}


def broadcast(
    tensors: Mapping[str, Tensor], source: int, group: dist.ProcessGroup, rank: int, device: torch.device
) -> dict[str, Tensor]:
    """Broadcasts named tensors from one rank to all ranks of a group.

    Args:
        tensors: On the source the data; elsewhere tensors of the same shapes and dtypes, whose data is not read.
        source: Global rank that has the data.
        group: The process group; every member has to call.
        rank: The calling rank.
        device: Where the messages travel.

    Returns:
        The source's tensors by name, on every rank, as new tensors on ``device``.
    """
    messages = []
    for dtype, names in _by_dtype(tensors).items():
        if rank == source:
            flat = _pack([tensors[name] for name in names], device)
        else:
            flat = torch.empty(sum(tensors[name].numel() for name in names), dtype=dtype, device=device)
        messages.append((names, flat, dist.broadcast(flat, source, group=group, async_op=True)))
    received: dict[str, Tensor] = {}
    for names, flat, work in messages:
        work.wait()  # type: ignore[union-attr]
        received |= _unpack(flat, tensors, names)
    return received


def send(
    tensors: Mapping[str, Tensor], destination: int, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Sends named tensors to one rank, which has to call `receive` with tensors of the same names and shapes."""
    for names in _by_dtype(tensors).values():
        dist.send(_pack([tensors[name] for name in names], device), destination, group=group)


def receive(
    like: Mapping[str, Tensor], source: int, group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, Tensor]:
    """Receives what another rank sends with `send`; returns new tensors in host memory."""
    received: dict[str, Tensor] = {}
    for dtype, names in _by_dtype(like).items():
        flat = torch.empty(sum(like[name].numel() for name in names), dtype=dtype, device=device)
        dist.recv(flat, source, group=group)
        received |= _unpack(flat.cpu(), like, names)
    return received


def unpack_into(sent: Iterable[tuple[Any, Tensor, Sequence[Tensor]]]) -> None:
    """Waits for collectives on flat tensors, and copies each into the views that it stands for, in order.

    Args:
        sent: The work handle, the flat tensor, and the views that take its values; no views where it is not needed.
    """
    for work, flat, views in sent:
        work.wait()
        start = 0
        for view in views:
            view.copy_(flat[start : start + view.numel()].view(view.shape))
            start += view.numel()
