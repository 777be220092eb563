"""Time per training step: SDP at several coverages against DDP.

    python -m benchmarks.step_time [--ranks 2] [--granularity block] [--coverage 1 0.75 0.5]
        [--masking forward] [--rounds 20] [--model blocks|resnet]

Every contender is a real `Trainer.fit` with its own strategy, model and AdamW. A process runs all of them, each in a
thread of its own, and only one at a time: after a few steps the running one hands its turn to the next. So one round
holds a few steps of DDP and of each granularity and coverage, and whatever else slows the machine down meets them
alike. The ratio of a contender is the median over rounds of its time over DDP's in the same round.

A step starts at a barrier of all ranks, when the batch is there, and spans Lightning's hooks, forward, backward with
the averaging of gradients, and the optimizer's step. The first round is not counted: it allocates optimizer states
and settles DDP's buckets. Processes have one thread each, and batches are tiny, so that communication and optimizer
matter; freed memory stays with the process, so that page faults do not meet one contender by chance. DDP runs with
``gradient_as_bucket_view=True``, its faster setting. On a machine that does other work the quartiles grow wide: repeat
the run, or give it more rounds.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.common import (
    GRANULARITIES,
    MASKINGS,
    MODELS,
    Contender,
    build_model,
    label,
    make_batches,
    make_strategy,
    make_trainer,
    on_ranks,
)

STEPS_PER_TURN = 4
_WARM_UP_ROUNDS = 1
# largest ratio to DDP, by contender; for the model that consists of blocks
_TARGETS = {
    ("block", 1.0, "forward"): 1.0,
    ("block", 0.5, "forward"): 0.6,
    ("neuron", 1.0, "forward"): 1.0,
    ("neuron", 0.5, "forward"): 0.65,
}


class Turns:
    """Lets several threads run one at a time, in a fixed cyclic order.

    Args:
        threads: How many.
    """

    def __init__(self, threads: int) -> None:
        self._may_run = [threading.Semaphore(int(i == 0)) for i in range(threads)]

    def wait(self, thread: int) -> None:
        """Waits for a thread's turn."""
        self._may_run[thread].acquire()

    def pass_on(self, thread: int) -> None:
        """Gives the turn to the next thread."""
        self._may_run[(thread + 1) % len(self._may_run)].release()


class Stopwatch(Callback):
    """Times every step from a barrier on, and passes the turn on after a few steps.

    Args:
        turns: Whose turn it is.
        thread: The thread that this callback's trainer runs in.

    Attributes:
        seconds: What each step took on this rank.
    """

    def __init__(self, turns: Turns, thread: int) -> None:
        self.turns, self.thread = turns, thread
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, *_: object) -> None:
        """Waits for the turn and for the other ranks."""
        if self.seconds and len(self.seconds) % STEPS_PER_TURN == 0:
            self.turns.pass_on(self.thread)
            self.turns.wait(self.thread)
        dist.barrier()
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: object) -> None:
        """Notes the time."""
        self.seconds.append(time.perf_counter() - self._start)


def measure(model: str, contenders: Sequence[Contender], rounds: int) -> Tensor:
    """Times all contenders on this rank, in turns.

    Args:
        model: Name of the model.
        contenders: Granularities, coverages and maskings; ``None`` is DDP.
        rounds: Turns of each contender that count.

    Returns:
        Seconds by contender, round, step and rank.
    """
    steps = (rounds + _WARM_UP_ROUNDS) * STEPS_PER_TURN
    turns = Turns(len(contenders))
    watches = [Stopwatch(turns, i) for i in range(len(contenders))]
    errors: list[Exception] = []

    def contend(i: int) -> None:
        turns.wait(i)
        try:
            trainer = make_trainer(make_strategy(contenders[i]), steps, watches[i])
            trainer.fit(build_model(model), make_batches(model, steps))
        except Exception as error:
            errors.append(error)
        turns.pass_on(i)

    threads = [threading.Thread(target=contend, args=(i,), daemon=True) for i in range(len(contenders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    own = torch.tensor([watch.seconds for watch in watches]).view(len(contenders), -1, STEPS_PER_TURN)
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    return torch.stack(ranks, dim=-1)[:, _WARM_UP_ROUNDS:]


def report(seconds: Tensor, model: str, contenders: Sequence[Contender]) -> Table:
    """The table of results; the first contender is DDP."""
    ranks = seconds.shape[-1]
    table = Table(
        title=f"Time per step: {model}, {ranks} ranks, {seconds.shape[1]} rounds of {STEPS_PER_TURN} steps each",
        caption="Ratios to DDP: median over rounds; quartiles of the slowest rank's.",
    )
    table.add_column("strategy", no_wrap=True)
    for column in ("ms, mean rank", "ratio", "ms, slowest rank", "ratio", "quartiles", "target"):
        table.add_column(column, justify="right", min_width=5)
    mean, slowest = seconds.mean(-1), seconds.amax(-1)
    for i, contender in enumerate(contenders):
        ratio_of_mean, ratio = (t[i].median(-1).values / t[0].median(-1).values for t in (mean, slowest))
        low, middle, high = ratio.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        target = _TARGETS.get(contender) if contender and model == "blocks" else None
        table.add_row(
            label(contender),
            f"{1e3 * mean[i].median():.1f}",
            f"{ratio_of_mean.quantile(0.5):.3f}",
            f"{1e3 * slowest[i].median():.1f}",
            f"{middle:.3f}",
            f"{low:.2f}–{high:.2f}" if i else "",
            "" if target is None else f"{target:g} {'met' if middle <= target else 'missed'}",
        )
    return table


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Time per training step of SDP against DDP.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--granularity", choices=GRANULARITIES, nargs="+", default=["block"])
    parser.add_argument("--coverage", type=float, nargs="+", default=[1.0, 0.75, 0.5])
    parser.add_argument("--masking", choices=MASKINGS, nargs="+", default=["forward"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", choices=MODELS, default="blocks")
    args = parser.parse_args()
    contenders = [None, *itertools.product(args.granularity, args.coverage, args.masking)]
    seconds = on_ranks(measure, args.ranks, args.model, contenders, args.rounds)
    Console().print(report(seconds, args.model, contenders))


if __name__ == "__main__":
    main()
