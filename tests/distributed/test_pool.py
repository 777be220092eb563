"""The rank processes on which the distributed tests run."""

import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from tests.distributed.pool import Pool, RankError, launch

Pools = Callable[[int], Pool]


def _rank_and_pid() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def _double(number: int, *, offset: int = 0) -> torch.Tensor:
    return torch.tensor(number * 2 + offset)


def _sum_of_ranks() -> torch.Tensor:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total


def _disturb_the_process() -> None:
    os.environ["STRAY"] = "1"
    os.chdir("/")
    warnings.simplefilter("error")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(dist.get_rank())
    dist.new_group()


def _process_state() -> tuple[object, ...]:
    draws = random.random(), float(np.random.rand()), torch.rand(1).item()
    groups = len(dist.distributed_c10d._pg_map)
    warnings.warn("would raise under a filter left behind", stacklevel=1)
    return os.environ.get("STRAY"), Path.cwd().name, torch.get_default_dtype(), groups, draws


class _Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(barebones: bool) -> tuple[bool, int, torch.Tensor]:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet["enable_model_summary"] = False
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        max_epochs=1,
        limit_train_batches=3,
        **({"barebones": True} if barebones else quiet),
    )
    model = _Line()
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=2))
    environment = trainer.strategy.cluster_environment
    return isinstance(environment, TorchElasticEnvironment), trainer.world_size, model.layer.weight.detach()


def _raise_on(*ranks: int) -> None:
    print("about to raise")
    if dist.get_rank() in ranks:
        raise ValueError(f"no luck on rank {dist.get_rank()}")


def _raise_before_a_barrier_on(rank: int) -> None:
    _raise_on(rank)
    dist.barrier()


def _sleep_in_a_telling_place() -> None:
    time.sleep(600)


def _get_stuck_after_a_fit_on(rank: int) -> None:
    _fit(barebones=True)
    if dist.get_rank() == rank:
        _sleep_in_a_telling_place()


def _kill_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def _reduce_once_more_on(rank: int) -> None:
    if dist.get_rank() == rank:
        dist.all_reduce(torch.ones(1), async_op=True)


def _return_a_lambda() -> Callable[[], None]:
    return lambda: None


def _pids(pool: Pool) -> list[int]:
    return [pid for _, pid in pool.run(_rank_and_pid)]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_of_a_pool_form_a_group(pool: Pools, world: int) -> None:
    assert [rank for rank, _ in pool(world).run(_rank_and_pid)] == list(range(world))
    assert pool(world).run(_sum_of_ranks) == [torch.tensor(sum(range(world)))] * world


def test_arguments_reach_the_ranks(pool: Pools) -> None:
    assert pool(2).run(_double, 4, offset=1) == [torch.tensor(9)] * 2


def test_calls_share_the_processes_but_not_their_state(pool: Pools) -> None:
    pids = _pids(pool(3))
    assert len({os.getpid(), *pids}) == 4
    clean = pool(3).run(_process_state)
    pool(3).run(_disturb_the_process)
    assert pool(3).run(_process_state) == clean
    assert clean == [clean[0]] * 3
    assert clean[0][:4] == (None, "cwd", torch.float32, 1)
    assert _pids(pool(3)) == pids


@pytest.mark.parametrize("world", [2, 3])
def test_trainer_after_trainer_uses_the_ranks(pool: Pools, world: int) -> None:
    pids = _pids(pool(world))
    first = pool(world).run(_fit, False)
    assert [(elastic, size) for elastic, size, _ in first] == [(True, world)] * world
    for barebones in (True, False, False):
        for _, _, weight in pool(world).run(_fit, barebones):
            torch.testing.assert_close(weight, first[0][2], rtol=0, atol=0)
    assert _pids(pool(world)) == pids


def test_error_on_a_rank_is_shown(pool: Pools) -> None:
    pids = _pids(pool(3))
    with pytest.raises(RankError) as caught:
        pool(3).run(_raise_on, 1)
    text = str(caught.value)
    assert "rank 1 raised" in text and "ValueError: no luck on rank 1" in text and "in _raise_on" in text
    assert "about to raise" in text
    assert "rank 0 finished" in text and "rank 2 finished" in text
    assert _pids(pool(3)) == pids


def test_unpicklable_result_is_an_error(pool: Pools) -> None:
    with pytest.raises(RankError, match=r"rank 0 raised[\s\S]*_return_a_lambda"):
        pool(2).run(_return_a_lambda)


def test_expected_errors_are_returned(pool: Pools) -> None:
    pids = _pids(pool(2))
    assert pool(2).run_expecting_errors(_raise_on, 1) == [None, ("ValueError", "no luck on rank 1")]
    errors = pool(2).run_expecting_errors(_raise_on, 0, 1)
    assert errors == [("ValueError", "no luck on rank 0"), ("ValueError", "no luck on rank 1")]
    assert _pids(pool(2)) == pids


# Each of the following ends a pool. They take different ones where they can, since starting one takes a while.


def test_deadline_shows_where_a_rank_is_stuck(pool: Pools) -> None:
    pids = _pids(pool(4))
    with pytest.raises(AssertionError) as caught:
        pool(4).run(_get_stuck_after_a_fit_on, 2, deadline=4)
    text = str(caught.value)
    assert "_get_stuck_after_a_fit_on passed its deadline of 4 s" in text
    assert all(f"rank {rank} finished" in text for rank in (0, 1, 3))
    assert "rank 2 did not finish" in text and "in _sleep_in_a_telling_place" in text
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_ranks_out_of_step_are_an_error(pool: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.distributed.pool.GRACE", 3)
    with pytest.raises(RankError, match="_reduce_once_more_on returned on all ranks, but left"):
        pool(3).run(_reduce_once_more_on, 0)


def test_killed_rank_is_noticed_at_once(pool: Pools) -> None:
    pids = _pids(pool(2))
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 died with exit code -9 \(SIGKILL\)"):
        pool(2).run(_kill_rank, 1)
    assert time.monotonic() - start < 5
    assert not set(_pids(pool(2))) & set(pids)  # New ranks have started.


def test_ranks_that_wait_for_one_that_raised_are_not_waited_for(pool: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.distributed.pool.GRACE", 1)
    with pytest.raises(RankError) as caught:
        pool(2).run(_raise_before_a_barrier_on, 0)
    text = str(caught.value)
    assert "rank 0 raised" in text and "no luck on rank 0" in text
    assert "rank 1 did not finish" in text and "in barrier" in text


def test_launch_runs_a_script_with_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    line = 'f\'I am {os.environ["RANK"]} {os.environ["GROUP_RANK"]} {sys.argv[1]}\\n\''
    script.write_text(f"import os, sys; os.write(1, {line}.encode())")  # in one piece
    output = launch([script, "--flag"], world=2, nodes=2).stdout
    assert "I am 0 0 --flag" in output and "I am 1 1 --flag" in output


def test_launch_ends_a_command_and_its_children_at_the_deadline(tmp_path: Path) -> None:
    nested = "import subprocess; child = subprocess.Popen(['sleep', '600'], start_new_session=True)"
    command = [sys.executable, "-c", f"{nested}; print('child', child.pid); child.wait()"]
    with pytest.raises(AssertionError, match="did not end within 5 s and printed:\nchild") as caught:
        launch(command, world=1, deadline=5)
    pid = int(str(caught.value).split()[-1])
    end = time.monotonic() + 10  # the kernel takes a moment to end what was killed
    while _runs(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_launch_fails_with_the_program_unless_told_not_to() -> None:
    command = [sys.executable, "-c", "import os; print(os.environ['NODE_RANK']); raise SystemExit(3)"]
    with pytest.raises(AssertionError, match="ended with exit code 3"):
        launch(command, world=1)
    result = launch(command, world=1, check=False)
    assert (result.returncode, result.stdout) == (3, "0\n")
