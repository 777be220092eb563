"""What an exception leaves behind, and that one on a single rank ends the whole job."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_sdp import SDPStrategy
from tests.distributed import program
from tests.distributed.pool import Pool, RankError, launch
from tests.distributed.runs import trainer
from tests.models import MLPBlock, Net, batches, loader, make

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("rank", [1, 0])
def test_exception_on_one_rank_ends_the_job(rank: int) -> None:
    command = [sys.executable, str(Path(program.__file__)), "sdp", "2", "1", str(rank)]
    result = launch(command, world=2, check=False)
    [raised_at] = re.findall(r"^raises at ([\d.]+)$", result.stdout, re.MULTILINE)
    assert time.time() - float(raised_at) < 60
    assert result.returncode != 0
    assert f"ValueError: the data of rank {rank} is spoiled" in result.stdout
    assert "No checkpoint was written to" in result.stdout
    assert re.search(r"^(rank|process) \d", result.stdout, re.MULTILINE) is None


class Boom(Exception):
    pass


class Failing(Net):
    """Raises on every rank, at the place that it is told."""

    def __init__(self, place: str) -> None:
        super().__init__("mlp", optimizer="sgd")
        self.place = place

    def reach(self, place: str) -> None:
        if place == self.place:
            raise Boom(place)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.reach("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.reach("sanity check" if self.trainer.sanity_checking else "validation_step")
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        self.reach("configure_optimizers")
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        self.reach("on_train_start")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.reach("on_before_optimizer_step")

    def on_train_epoch_end(self) -> None:
        self.reach("on_train_epoch_end")

    def on_fit_end(self) -> None:
        self.reach("on_fit_end")


class Save(Callback):
    """Saves when the run fails, as checkpoint callbacks can be told to."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        trainer.save_checkpoint(f"{self.directory}/in-exception.ckpt")


def remains(net: Net, names: list[str], identities: dict[str, int]) -> dict[str, Any]:
    """What is left of us in a module and its process."""
    parameters = dict(net.named_parameters())
    hooks = [n for n, p in parameters.items() if p._post_accumulate_grad_hooks or p._backward_hooks]
    return {
        "whole": list(net.state_dict()) == names and all(type(block) is MLPBlock for block in net.blocks),
        "same objects": {name: id(p) for name, p in parameters.items()} == identities,
        "hooks": hooks,
        "groups": len(dist.distributed_c10d._pg_map),
        "meta": [name for name, p in parameters.items() if p.is_meta],
        "grads on meta": [name for name, p in parameters.items() if p.is_meta and p.grad is not None],
        "finite": all(p.isfinite().all().item() for p in parameters.values() if not p.is_meta),
    }


def error_of(function: Callable[..., Any], *args: Any) -> tuple[str, str]:
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def fail(place: str, sdp: dict[str, Any], directory: str) -> dict[str, Any]:
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(3)
    net = Failing(place)
    names, identities = list(net.state_dict()), {name: id(p) for name, p in net.named_parameters()}
    run = trainer(world, SDPStrategy(**sdp), max_epochs=1, num_sanity_val_steps=1, callbacks=[Save(directory)])
    data = loader(batches("mlp", rank, 3, torch.float32)), loader(batches("mlp", 0, 1, torch.float32))
    raised = error_of(run.fit, net, *data)
    left = remains(net, names, identities)
    assert "clip_grad_by_norm" not in vars(run.precision_plugin)
    lacking = {part.name for c in run.strategy.plan.missing_on(rank) for part in c.slices}
    missing = [name for name in identities if name in lacking]
    saved = error_of(run.save_checkpoint, f"{directory}/saved.ckpt")
    again = error_of(trainer(world, SDPStrategy(**sdp), max_epochs=1).fit, net, data[0])
    return {"raised": raised, "missing": missing, "saved": saved, "again": again, "names": list(identities), **left}


SDP = {"coverage": 0.5, "keep_ends": 0}
NEURON = {**SDP, "granularity": "neuron"}
CARVED = ["training_step", "on_before_optimizer_step", "on_train_start", "configure_optimizers"]
OPEN = ["validation_step", "sanity check", "on_fit_end"]


@pytest.mark.parametrize(
    ("place", "sdp"),
    [
        *[(place, SDP) for place in [*CARVED, *OPEN, "on_train_epoch_end"]],
        *[(place, NEURON) for place in ("training_step", "validation_step")],
        *[
            pytest.param(place, NEURON, marks=pytest.mark.slow)
            for place in [*CARVED[1:], *OPEN[1:], "on_train_epoch_end"]
        ],
    ],
)
def test_exception_leaves_the_module_whole(pool: Pools, place: str, sdp: dict[str, Any], tmp_path: Path) -> None:
    for result in pool(2).run(fail, place, sdp, str(tmp_path)):
        assert result["raised"] == ("Boom", place)
        assert result["whole"] and result["same objects"] and result["finite"]
        assert result["hooks"] == [] and result["groups"] == 1
        assert result["missing"]
        assert result["grads on meta"] == []
        assert result["meta"] in ([], result["missing"])
        if place in CARVED:
            assert result["meta"] == result["missing"]
            kind, message = result["saved"]
            assert kind == "RuntimeError" and repr(result["missing"][0]) in message
            # The blocks are gone, and so training cannot go on unnoticed.
            assert result["again"][0] == "ValueError" and "on the meta device" in result["again"][1]
        if place in OPEN:
            assert result["meta"] == []
    # The weights may be here, but the optimizer state of what rank 0 lacks is on ranks that cannot be asked.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["training_step", "validation_step", "on_before_optimizer_step"])
@pytest.mark.parametrize(
    "sdp",
    [
        {**NEURON, "masking": "backward"},
        {**NEURON, "model_averaging_period": 2},
        {"coverage": 1.0, "model_averaging_period": 3},  # all hold everything, but their weights differ
    ],
)
def test_exception_in_other_regimes_leaves_the_module_whole(
    pool: Pools, sdp: dict[str, Any], place: str, tmp_path: Path
) -> None:
    for result in pool(2).run(fail, place, sdp, str(tmp_path)):
        assert result["raised"] == ("Boom", place)
        assert result["whole"] and result["same objects"] and result["finite"]
        assert result["hooks"] == [] and result["groups"] == 1
        carved = "masking" not in sdp and place in CARVED
        assert result["meta"] == (result["missing"] if carved else [])
    left = {path.name for path in tmp_path.iterdir()}
    # Where rank 0 has everything it may save it; but not in a failure within a period, when holders differ.
    allowed = {"saved.ckpt"} if place == "training_step" else {"saved.ckpt", "in-exception.ckpt"}
    assert left <= (allowed if sdp["coverage"] == 1.0 else set())


@pytest.mark.parametrize("sdp", [SDP, NEURON], ids=["block", "neuron"])
def test_worker_that_holds_everything_loses_nothing(pool: Pools, sdp: dict[str, Any], tmp_path: Path) -> None:
    results = pool(2).run(fail, "training_step", {**sdp, "coverage": [1.0, 0.5]}, str(tmp_path))
    assert results[0]["meta"] == [] == results[0]["missing"]
    assert results[1]["meta"] == results[1]["missing"] != []
    assert all(result["hooks"] == [] and result["groups"] == 1 for result in results)
    for name in ("in-exception.ckpt", "saved.ckpt"):
        checkpoint = torch.load(tmp_path / name, weights_only=True)
        assert list(checkpoint["state_dict"]) == list(Failing("").state_dict())
        assert checkpoint["optimizer_states"][0]["param_groups"][0]["params"] == list(range(len(results[0]["names"])))


def fail_to_move(sdp: dict[str, Any], failing: int) -> dict[str, Any]:
    """The device of one rank has no memory left for what it holds."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(3)
    net, strategy = Failing(""), SDPStrategy(**sdp)
    names, identities = list(net.state_dict()), {name: id(p) for name, p in net.named_parameters()}
    if rank == failing:
        strategy.model_to_device = Mock(side_effect=torch.OutOfMemoryError("no memory left"))  # type: ignore[method-assign]
    raised = error_of(trainer(world, strategy, max_epochs=1).fit, net, loader(batches("mlp", rank, 1, torch.float32)))
    return {"raised": raised, **remains(net, names, identities)}


@pytest.mark.parametrize("sdp", [SDP, NEURON, {**NEURON, "masking": "backward"}], ids=["block", "neuron", "backward"])
def test_a_device_that_is_full_on_one_rank_fails_on_all_and_leaves_the_module_whole(
    pool: Pools, sdp: dict[str, Any]
) -> None:
    for result in pool(2).run(fail_to_move, sdp, 1):
        assert "no memory left" in result["raised"][1]
        assert result["whole"] and result["same objects"] and result["finite"]
        assert result["hooks"] == [] and result["groups"] == 1


def interrupt(sdp: dict[str, Any]) -> dict[str, Any]:
    """Ctrl-C on all ranks: Lightning ends the run gracefully."""
    world, rank = dist.get_world_size(), dist.get_rank()
    net = make("mlp", dtype=torch.float32)
    names, identities = list(net.state_dict()), {name: id(p) for name, p in net.named_parameters()}

    def step(batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise KeyboardInterrupt
        return Net.training_step(net, batch, batch_idx)

    net.training_step = step  # type: ignore[method-assign]
    run: Trainer = trainer(world, SDPStrategy(**sdp), max_epochs=1)
    try:
        run.fit(net, loader(batches("mlp", rank, 3, torch.float32)))
    except (KeyboardInterrupt, SystemExit) as error:
        ended = type(error).__name__
    else:
        ended = ""
    return {"ended": ended, "status": str(run.state.status), **remains(net, names, identities)}


@pytest.mark.parametrize("sdp", [SDP, NEURON], ids=["block", "neuron"])
def test_interrupt_leaves_the_module_whole(pool: Pools, sdp: dict[str, Any]) -> None:
    for result in pool(2).run(interrupt, sdp):
        assert result["ended"] and "interrupted" in result["status"].lower()
        assert result["whole"] and result["same objects"] and result["finite"]
        assert result["hooks"] == [] and result["groups"] == 1


class Alone(Net):
    """Does on rank 0 alone what needs all ranks."""

    def __init__(self, what: str, path: str) -> None:
        super().__init__("mlp")
        self.what, self.path = what, path

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_global_zero and self.what == "save":
            self.trainer.save_checkpoint(self.path)
        elif self.trainer.is_global_zero:
            with self.trainer.strategy.full_model():
                pass


def fit_alone(what: str, sdp: dict[str, Any], path: str) -> None:
    rank = dist.get_rank()
    strategy = SDPStrategy(**sdp, timeout=timedelta(seconds=2))
    trainer(2, strategy, max_epochs=1).fit(Alone(what, path), loader(batches("mlp", rank, 3, torch.float32)))


@pytest.mark.slow
@pytest.mark.parametrize(("what", "name"), [("save", "trainer.save_checkpoint"), ("open", r"strategy.full_model\(\)")])
@pytest.mark.parametrize("sdp", [SDP, NEURON], ids=["block", "neuron"])
def test_what_needs_all_ranks_says_so_where_one_is_alone(
    pool: Pools, tmp_path: Path, what: str, name: str, sdp: dict[str, Any]
) -> None:
    with pytest.raises(RankError, match=f"RuntimeError: {name} needs all processes"):
        pool(2).run(fit_alone, what, sdp, str(tmp_path / "alone.ckpt"))
    assert list(tmp_path.iterdir()) == []
