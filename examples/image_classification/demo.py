"""Trains the same ResNet under DDP and under SDP, on two processes each, and compares them.

Run it from the root of the checkout:

    python -m examples.image_classification.demo

Both runs are ordinary Lightning runs that differ in the Trainer's strategy alone: data, seed, epochs and
learning rate are the same. They use two GPUs where there are that many, else two CPU processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

RUNS = {"ddp": "DDP", "sdp": "SDP"}


def options() -> argparse.ArgumentParser:
    """The options of the demo, which its runs share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training images (%(default)s)")
    parser.add_argument("--width", type=int, default=16, help="channels of the ResNet's first stage (%(default)s)")
    parser.add_argument("--coverage", type=float, default=0.5, help="share of the maskable blocks (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of images (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder of the results (%(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs both, prints the table, and returns the exit code; ``None`` takes the arguments of the command line."""
    argv = sys.argv[1:] if argv is None else argv
    args, started = options().parse_args(argv), time.monotonic()
    args.output.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 100)
    results = {}
    for strategy, name in RUNS.items():
        console.rule(f"Training with {name} on two processes")
        result = args.output / f"demo_{strategy}.json"
        result.unlink(missing_ok=True)  # what an earlier demo left is no result of this one
        command = [sys.executable, "-m", "examples.image_classification.demo_run", strategy, *argv]
        code = subprocess.run(command).returncode
        if code or not result.exists():
            console.print(f"The run with {name} failed (exit code {code}); its output is above.", style="bold red")
            return 1
        results[strategy] = json.loads(result.read_text())
    console.print(comparison(results["ddp"], results["sdp"]))
    console.print(f"Who holds what: {args.output / 'demo_plan.png'}", soft_wrap=True)
    console.print(f"This took {time.monotonic() - started:.0f} s.")
    return 0


def comparison(ddp: dict[str, float], sdp: dict[str, float]) -> Table:
    """The results side by side."""
    rows: list[tuple[str, str, Callable[[float], str]]] = [
        ("parameters held per worker", "parameters", "{:,.0f}".format),
        ("gradients + optimizer state per worker", "gradient_and_optimizer_bytes", _mib),
        ("sent per worker and step", "sent_bytes", _mib),
    ]
    caption = "The largest value of any worker. A block that only one worker holds is not sent."
    table = Table(title="Subnetwork Data Parallelism beside DDP", caption=caption)
    table.add_column("")
    for column in (RUNS["ddp"], RUNS["sdp"], "SDP : DDP"):
        table.add_column(column, justify="right")
    accuracies = [result["test_accuracy"] for result in (ddp, sdp)]
    difference = f"{100 * (accuracies[1] - accuracies[0]):+.1f} points"
    table.add_row("test accuracy of the full model", *[f"{a:.1%}" for a in accuracies], difference)
    for label, key, text in rows:
        table.add_row(label, text(ddp[key]), text(sdp[key]), f"{sdp[key] / ddp[key]:.2f}")
    return table


def _mib(size: float) -> str:
    return f"{size / 2**20:.2f} MiB"


if __name__ == "__main__":
    sys.exit(main())
