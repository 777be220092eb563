"""Every way of starting the processes ends in the same full model, on all of them."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from tests.distributed import exit_program, program
from tests.distributed.pool import Pool, launch
from tests.distributed.runs import QUIET
from tests.models import Net, batches, loader, make

PROGRAM = str(Path(program.__file__))
COMMAND = [sys.executable, PROGRAM]
PARAMETERS = sum(parameter.numel() for parameter in Net("mlp", blocks=4).parameters())


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    """What the first launcher of a granularity ended with; the others have to end there, too."""
    return {}


@pytest.mark.parametrize(
    ("strategy", "arguments", "nodes", "processes"),
    [
        ("sdp", [*COMMAND, "sdp", "2"], 1, [0, 1]),
        pytest.param("sdp_neuron", [*COMMAND, "sdp_neuron", "2"], 1, [0, 1], marks=pytest.mark.slow),
        ("sdp_spawn", [*COMMAND, "sdp_spawn", "2"], 1, [0]),  # The others end within fit.
        ("sdp_fork", [*COMMAND, "sdp_fork", "2"], 1, [0]),
        ("torchrun", [PROGRAM, "sdp", "2"], 1, [0, 1]),
        ("torchrun on two nodes", [PROGRAM, "sdp", "1", "2"], 2, [0, 1]),
    ],
)
def test_launchers(
    reference: dict[str, str], strategy: str, arguments: list[str], nodes: int, processes: list[int]
) -> None:
    output = launch(arguments, world=2, nodes=nodes, deadline=90).stdout
    ranks = dict(re.findall(r"^rank (\d of 2) held \d+ has (\w+)$", output, re.MULTILINE))
    assert sorted(ranks) == ["0 of 2", "1 of 2"], output
    ended = re.findall(r"^process (\d) has (\w+) of (\d+) parameters$", output, re.MULTILINE)
    assert sorted(int(rank) for rank, *_ in ended) == processes, output
    assert {number for *_, number in ended} == {str(PARAMETERS)}
    hashes = {*ranks.values(), *(value for _, value, _ in ended)}
    assert len(hashes) == 1, output
    assert reference.setdefault("neuron" if strategy == "sdp_neuron" else "block", hashes.pop()) == next(
        iter(ranks.values())
    ), output
    assert all(int(held) < PARAMETERS for held in re.findall(r"held (\d+)", output))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_no_thread_of_gloo_outlives_the_interpreter() -> None:
    """Such a thread aborts the process when it lets go of a tensor too late, now and then."""
    output = launch([exit_program.__file__, "sdp"], world=2, deadline=90).stdout
    assert re.findall(r"at the end: (\d+) threads", output) == ["0", "0"], output


def fit_on_one_device(strategy: str) -> tuple[dict[str, Tensor], int, list[str], str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning_sdp")]
    for logger in loggers:
        logger.addHandler(handler)
    net = make("conv", dtype=torch.float32)
    trainer = Trainer(**QUIET, devices=1, strategy=strategy, max_epochs=2, gradient_clip_val=0.1)
    trainer.fit(net, loader(batches("conv", 0, 6, torch.float32)), loader(batches("conv", 1, 2, torch.float32)))
    trainer.validate(net, loader(batches("conv", 1, 2, torch.float32)), verbose=False)
    for logger in loggers:
        logger.removeHandler(handler)
    return dict(net.state_dict()), trainer.world_size, messages, type(trainer.strategy).__name__


@pytest.mark.parametrize("name", ["sdp", "sdp_neuron"])
def test_one_process_trains_the_whole_model_as_a_single_device_does(pool: Callable[[int], Pool], name: str) -> None:
    [(plain, _, _, kind)] = pool(1).run(fit_on_one_device, "auto")
    [(ours, world, messages, own)] = pool(1).run(fit_on_one_device, name)
    assert (kind, own, world) == ("SingleDeviceStrategy", "SDPStrategy", 1)
    assert list(ours) == list(plain)
    for name in plain:
        torch.testing.assert_close(ours[name], plain[name], rtol=0, atol=0, msg=name)
    assert messages.count("SDP with one worker: it trains the whole model.") == 1
    assert not dist.is_initialized()
