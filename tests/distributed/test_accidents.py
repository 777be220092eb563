"""Signals, a process that is killed, and a disk that is full: the job ends, and the last checkpoint is whole."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.distributed import failing_program
from tests.distributed.pool import launch
from tests.models import Net


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "rank", "message"),
    [
        ("full disk", "0", "File too large"),
        ("SIGTERM", "0", ""),
        ("killed while saving", "0", ""),
        ("SIGTERM", "all", ""),
        ("SIGTERM", "1", ""),
        ("SIGINT", "all", "Detected KeyboardInterrupt"),
        ("SIGKILL", "0", ""),
        ("SIGKILL", "1", ""),
    ],
)
def test_the_job_ends_and_the_last_checkpoint_is_whole(tmp_path: Path, what: str, rank: str, message: str) -> None:
    command = [sys.executable, str(Path(failing_program.__file__)), what, rank, str(tmp_path)]
    result = launch(command, world=2, check=False)
    happened = [float(at) for at in re.findall(r"^happens at ([\d.]+)$", result.stdout, re.MULTILINE)]
    assert happened and time.time() - min(happened) < 60, result.stdout
    assert "came to the end" not in result.stdout
    assert result.returncode != 0 or what == "SIGTERM", result.stdout  # which Lightning ends with SystemExit
    assert message in result.stdout
    files = {path.name for path in tmp_path.iterdir() if path.suffix == ".ckpt"}
    assert "saved.ckpt" in files and files <= {"saved.ckpt", "on_exception.ckpt"}
    net = Net("mlp", blocks=4)
    for file in files:
        checkpoint = torch.load(tmp_path / file, weights_only=True)
        net.load_state_dict(checkpoint["state_dict"])
        net.configure_optimizers().load_state_dict(checkpoint["optimizer_states"][0])
        assert checkpoint["global_step"] >= 2
        assert all(value.isfinite().all() for value in checkpoint["state_dict"].values())
