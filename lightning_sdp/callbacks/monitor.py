"""SDPMonitor: memory, traffic and pace of the workers, while they train."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table

from lightning_sdp._compat import log_metrics
from lightning_sdp.callbacks.masking import strategy_of
from lightning_sdp.limits import check_interval
from lightning_sdp.report import usage_table

if TYPE_CHECKING:
    from lightning_sdp.strategy import SDPStrategy

_SHOWN = ("sdp/step_time_max", "sdp/busy_time_spread")  # in the progress bar


class _Moment(NamedTuple):
    """A point of the training: its clock in seconds, the seconds waited for others, and the optimizer steps taken."""

    clock: float
    waited: float
    step: int


class SDPMonitor(Callback):
    """Logs what the workers have, send and take time for, and shows a table of it at the end of training.

    Every number is logged as its minimum, mean and maximum over all processes, ``sdp/step_time_max`` for instance:

    - ``effective_coverage``: share of all blocks, or groups of neurons, that a process holds, kept ones included;
    - ``parameter_bytes``: size of the parameters in its memory;
    - ``gradient_bytes``: size of the gradients of what it trains;
    - ``optimizer_bytes``: size of the optimizer state;
    - ``peak_bytes``: on CUDA the most memory that was allocated, elsewhere the most that the process had resident;
    - ``sent_bytes``: what it sends per optimizer step, as planned; see `communication_bytes`;
    - ``step_time``: seconds per optimizer step, the loading of data included and validation excluded;
    - ``busy_time``: those of these seconds in which it did not wait for other processes.

    ``sdp/busy_time_spread`` is the maximum of the busy times over their mean: 1 where all are equally fast, and more
    where one makes the others wait. (All processes take about the same time for a step, because they wait for the
    slowest.) The progress bar shows it beside ``sdp/step_time_max``.

    Args:
        every_n_steps: After how many optimizer steps to log; default: the trainer's ``log_every_n_steps``.

    Raises:
        ValueError: ``every_n_steps`` is not a positive number, or the trainer's strategy is another one.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None:
            check_interval("every_n_steps", every_n_steps, 1)
        self.every_n_steps = every_n_steps
        self._break_began = self._breaks = 0.0
        self._first = self._last = _Moment(0.0, 0.0, 0)
        self._table: Table | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sees to it that there is something to watch."""
        self._table = None
        _strategy(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._first = self._last = self._now(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock."""
        self._break_began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets the clock go on."""
        self._breaks += time.perf_counter() - self._break_began

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Logs, if it is time to."""
        period = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        is_seen = trainer.loggers or trainer.progress_bar_callback is not None
        if not period or not is_seen or trainer.global_step // period == self._last.step // period:
            return
        now = self._now(trainer)
        with self._break():
            metrics = _over_ranks(_strategy(trainer).usage(**_times(self._last, now)))
            log_metrics(trainer, metrics)
            pl_module.log_dict({name: metrics[name] for name in _SHOWN}, prog_bar=True, logger=False)
        self._last = now

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collects what the table will show of the whole training."""
        now = self._now(trainer)
        if now.step > self._first.step:
            strategy = _strategy(trainer)
            assert strategy.plan is not None
            rows = strategy.usage(**_times(self._first, now))
            self._table = usage_table(rows, strategy.plan.num_subnetworks)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the table, behind the progress bar."""
        if self._table is not None and trainer.is_global_zero:
            Console().print(self._table)

    def _now(self, trainer: Trainer) -> _Moment:
        waited = _strategy(trainer).seconds_waited()
        return _Moment(time.perf_counter() - self._breaks, waited, trainer.global_step)

    @contextmanager
    def _break(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._breaks += time.perf_counter() - began


def _strategy(trainer: Trainer) -> SDPStrategy:
    return strategy_of(trainer, "SDPMonitor watches")


def _times(since: _Moment, now: _Moment) -> dict[str, float]:
    """Mean seconds per step between two moments."""
    steps = now.step - since.step
    seconds, waited = now.clock - since.clock, now.waited - since.waited
    return {"step_time": seconds / steps, "busy_time": (seconds - waited) / steps}


def _over_ranks(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Minimum, mean and maximum of every rank's numbers."""
    metrics: dict[str, float] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        statistics = {"min": min(values), "mean": sum(values) / len(values), "max": max(values)}
        metrics |= {f"sdp/{name}_{key}": value for key, value in statistics.items()}
    metrics["sdp/busy_time_spread"] = metrics["sdp/busy_time_max"] / metrics["sdp/busy_time_mean"]
    return metrics
