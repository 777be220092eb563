"""A program that trains, and at its very end prints how many of gloo's threads are still there.

Argument: the strategy's name.
"""

import atexit
import sys
from pathlib import Path


def _report() -> None:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    sys.stdout.write(f"at the end: {sum('gloo' in name for name in names)} threads of gloo\n")
    sys.stdout.flush()


def main(strategy: str) -> None:
    import torch
    from lightning.pytorch import Trainer

    from tests.distributed.runs import QUIET
    from tests.models import batches, loader, make

    trainer = Trainer(**QUIET, strategy=strategy, devices=2, max_epochs=1)
    trainer.fit(make(dtype=torch.float32), loader(batches("mlp", 0, 3, torch.float32)))


if __name__ == "__main__":
    atexit.register(_report)  # the first one registered runs last
    main(sys.argv[1])
