"""What is decided by a logged value is decided alike on all processes: by the value that rank 0 has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_sdp._compat import MONITORED

Broadcast = Callable[[Any], Any]


def decide_alike(callbacks: Iterable[Callback], schedules: Iterable[Any], broadcast: Broadcast) -> None:
    """Lets checkpoint callbacks and plateau schedules decide by rank 0's values; `decide_locally` undoes it.

    A value that is logged without ``sync_dist=True`` differs between processes. Learning rates would come apart, and so
    would what holders have in common; and processes would take different checkpoints for the best.

    Args:
        callbacks: The trainer's callbacks.
        schedules: Of the learning rates.
        broadcast: Returns rank 0's argument on all ranks.
    """
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint):
            setattr(callback, MONITORED, _by_rank_zero(getattr(callback, MONITORED), broadcast))
    for schedule in schedules:
        if isinstance(schedule, ReduceLROnPlateau):
            schedule.__class__ = _plateau_by_rank_zero(type(schedule), broadcast)


def decide_locally(callbacks: Iterable[Callback], schedules: Iterable[Any]) -> None:
    """Gives callbacks and schedules their own decisions back."""
    for callback in callbacks:
        callback.__dict__.pop(MONITORED, None)
    for schedule in schedules:
        if isinstance(schedule, _PlateauByRankZero):
            schedule.__class__ = type(schedule).__bases__[1]


def _by_rank_zero(candidates: Callable[..., dict[str, Any]], broadcast: Broadcast) -> Callable[..., dict[str, Any]]:
    def shared(*args: Any) -> dict[str, Any]:
        own = {name: v.cpu() if isinstance(v, Tensor) else v for name, v in candidates(*args).items()}
        values: dict[str, Any] = broadcast(own)
        return values

    return shared


class _PlateauByRankZero:
    """Marks the schedules whose class is exchanged."""


def _plateau_by_rank_zero(cls: type[ReduceLROnPlateau], broadcast: Broadcast) -> type[ReduceLROnPlateau]:
    """The class of a schedule, except that it steps by rank 0's value; its state dict would show an attribute."""

    def step(self: Any, metrics: Any, *args: Any, **kwargs: Any) -> None:
        cls.step(self, broadcast(float(metrics)), *args, **kwargs)

    return type(cls.__name__, (_PlateauByRankZero, cls), {"step": step})
