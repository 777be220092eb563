"""Bytes sent per training step, counted by the kernel, against the plan's own forecast.

    python -m benchmarks.traffic [--ranks 2|3|4] [--granularity block] [--coverage 0.5 1]
        [--masking forward] [--steps 20] [--model blocks|resnet]

All ranks run on this machine and talk over the loopback interface, whose transmit counter therefore adds up what every
rank sends. It is read at barriers before and after a number of steps of a real `Trainer.fit`, once the first steps
have passed. The forecast is `communication_bytes`, summed over ranks; DDP's is that of a plan with C = 1.

To count nothing else, the benchmark starts itself again in a network namespace of its own, where the machine allows it
(``unshare -rn``); otherwise other traffic over loopback counts as well, and a line above the table says so.

Nothing is subtracted. Besides payload the counter sees the TCP/IP headers of every segment (66 bytes per up to 64 KiB),
the receivers' acknowledgments, which on loopback are transmitted by the same interface, gloo's message headers, our use
flags (one number per parameter) and the last barrier. All of this is overhead that the forecast leaves out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch import Callback
from rich.console import Console
from rich.table import Table

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
from lightning_sdp import MaskPlan, communication_bytes

_WARM_UP_STEPS = 6  # more than DDP and SDP need to settle their buckets
_IN_NAMESPACE = "LIGHTNING_SDP_TRAFFIC_NAMESPACE"


def transmitted_bytes() -> int:
    """Bytes that the loopback interface has transmitted since it came up."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    loopback = next(line for line in lines if line.strip().startswith("lo:"))
    return int(loopback.partition(":")[2].split()[8])


class Counter(Callback):
    """Reads the counter around the steps after the first few.

    Args:
        steps: How many steps count.

    Attributes:
        bytes_per_step: What all ranks together sent.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.bytes_per_step = 0.0
        self._seen = 0
        self._before = 0

    def on_train_batch_end(self, *_: object) -> None:
        """Reads the counter while no rank can send."""
        self._seen += 1
        if self._seen in (_WARM_UP_STEPS, _WARM_UP_STEPS + self.steps):
            dist.barrier()
            now = transmitted_bytes()
            dist.barrier()
            self.bytes_per_step = (now - self._before) / self.steps
            self._before = now


def measure(model: str, contenders: Sequence[Contender], steps: int) -> list[float]:
    """Bytes per step that all ranks together send, for each contender; ``None`` is DDP."""
    results = []
    for contender in contenders:
        counter = Counter(steps)
        total = _WARM_UP_STEPS + steps
        trainer = make_trainer(make_strategy(contender), total, counter)
        trainer.fit(build_model(model), make_batches(model, total))
        results.append(counter.bytes_per_step)
    return results


def forecast(model: str, contender: Contender, ranks: int) -> int:
    """Bytes per step that the plan expects all ranks together to send."""
    module = build_model(model)
    granularity, coverage, masking = contender or ("block", 1.0, "forward")
    plan = MaskPlan.build(module, num_subnetworks=ranks, granularity=granularity, coverage=coverage, keep_ends=0)
    return sum(communication_bytes(plan, module, masking=masking))


def enter_namespace() -> bool:
    """Starts this program again in a network namespace of its own.

    Returns:
        Whether this process is in one already; ``False`` if the machine does not allow it.
    """
    if os.environ.get(_IN_NAMESPACE):
        return True
    enter = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    try:
        subprocess.run([*enter, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    os.environ[_IN_NAMESPACE] = "1"
    os.execvp(enter[0], [*enter, sys.executable, "-m", "benchmarks.traffic", *sys.argv[1:]])


def report(measured: Sequence[float], model: str, contenders: Sequence[Contender], ranks: int) -> Table:
    """The table of results; the first contender is DDP."""
    table = Table(title=f"MB sent per step by all ranks: {model}, {ranks} ranks", caption="Headers and ACKs included.")
    table.add_column("strategy")
    for column in ("measured", "forecast", "measured / forecast", "of DDP's"):
        table.add_column(column, justify="right")
    for contender, value in zip(contenders, measured, strict=True):
        expected = forecast(model, contender, ranks)
        table.add_row(
            label(contender),
            f"{value / 1e6:.3f}",
            f"{expected / 1e6:.3f}",
            f"{value / expected:.4f}" if expected else "",
            f"{value / measured[0]:.3f}",
        )
    return table


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Bytes sent per training step against the plan's forecast.")
    parser.add_argument("--ranks", type=int, choices=(2, 3, 4), default=2)
    parser.add_argument("--granularity", choices=GRANULARITIES, nargs="+", default=["block"])
    parser.add_argument("--coverage", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--masking", choices=MASKINGS, nargs="+", default=["forward"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", choices=MODELS, default="blocks")
    args = parser.parse_args()
    alone = enter_namespace()
    contenders = [None, *itertools.product(args.granularity, args.coverage, args.masking)]
    measured = on_ranks(measure, args.ranks, args.model, contenders, args.steps)
    if not alone:
        print("No network namespace is permitted here: other traffic over loopback counts as well.")
    Console().print(report(measured, args.model, contenders, args.ranks))


if __name__ == "__main__":
    main()
