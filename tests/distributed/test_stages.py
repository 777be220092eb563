"""Stage after stage in one process, and what a test of a checkpoint sees."""

from __future__ import annotations

import gc
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_sdp import SDPReference, SDPStrategy
from tests.distributed.runs import plan_for, trainer
from tests.models import SHAPES, Net, batches, loader, make, same_state

FORWARD = {"coverage": 0.5, "keep_ends": 0}
NEURON = {**FORWARD, "granularity": "neuron"}
REGIMES = [FORWARD, NEURON, {**FORWARD, "masking": "backward"}, {**NEURON, "masking": "backward"}]


def sweep(sdp: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Trainer after trainer; afterwards each time: process groups, hooks, and tensors that are alive."""
    world, rank = dist.get_world_size(), dist.get_rank()
    left = []
    for _ in range(4):
        net, data = make("conv", blocks=3), loader(batches("conv", rank, 2))
        run = trainer(world, SDPStrategy(**sdp), max_epochs=1)
        run.validate(net, data, verbose=False)
        run.fit(net, data, data)
        run.test(net, data, verbose=False)
        run.fit_loop.max_epochs = 2
        run.fit(net, data)
        run.predict(net, data)
        hooks = sum(len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ()) for p in net.parameters())
        hooks += sum(len(o._optimizer_step_post_hooks) + len(o._optimizer_step_pre_hooks) for o in run.optimizers)
        del net, data, run
        gc.collect()
        alive = sum(isinstance(o, Tensor) for o in gc.get_objects())
        left.append((len(dist.distributed_c10d._pg_map), hooks, alive))
    return left


@pytest.mark.parametrize("sdp", [REGIMES[0], *[pytest.param(s, marks=pytest.mark.slow) for s in REGIMES[1:]]])
def test_nothing_piles_up_over_stages_and_trainers(pool, sdp: dict[str, Any]) -> None:
    for first, *others in pool(2).run(sweep, sdp):
        assert first[:2] == (1, 0)
        assert others == [others[0]] * 3 and others[0][:2] == (1, 0)


def fit_test_fit(sdp: dict[str, Any]) -> dict[str, Tensor]:
    world, rank = dist.get_world_size(), dist.get_rank()
    net, data = make("mlp", blocks=3), batches("mlp", rank, 5)
    run = trainer(world, SDPStrategy(**sdp), max_epochs=1)
    run.fit(net, loader(data[:3]))
    run.test(net, loader(data[:1]), verbose=False)
    run.fit_loop.max_epochs = 2
    run.fit(net, loader(data[3:]))
    return dict(net.state_dict())


@pytest.mark.parametrize("sdp", REGIMES)
def test_a_second_fit_goes_on_from_the_weights_with_a_new_optimizer(pool, sdp: dict[str, Any]) -> None:
    results = pool(3).run(fit_test_fit, sdp)
    net, data = make("mlp", blocks=3), [batches("mlp", rank, 5) for rank in range(3)]
    plan = plan_for(net, 3, sdp, torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64))
    for steps in (range(3), range(3, 5)):
        ref = SDPReference(net, plan, net.configure_optimizers(), masking=sdp.get("masking", "forward"))
        for step in steps:
            ref.step([[own[step]] for own in data])
    for full in results:
        torch.testing.assert_close(full, dict(net.state_dict()), rtol=1e-10, atol=1e-10)


def fit_and_test(directory: str, sdp: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """The path and the test loss of each kind of ``ckpt_path``."""
    world, rank = dist.get_world_size(), dist.get_rank()
    net, data = make("conv", optimizer="momentum"), loader(batches("conv", 50, 2))
    save = ModelCheckpoint(directory, filename="{epoch}", monitor="val_loss", save_top_k=-1, save_last=True)
    run = trainer(world, SDPStrategy(**sdp), max_epochs=3, callbacks=[save], enable_checkpointing=True)
    run.fit(net, loader(batches("conv", rank, 3)), data)
    net.requires_grad_(False)  # an evaluation needs nothing that trains
    losses = {}
    for which, path in ((None, save.last_model_path), ("last", save.last_model_path), ("best", save.best_model_path)):
        options: dict[str, Any] = {} if which is None else {"weights_only": False}
        result = run.test(net, data, ckpt_path=which, verbose=False, **options)
        losses[str(which)] = path, result[0]["test_loss"]
    return losses


@pytest.mark.parametrize("sdp", [FORWARD, {**NEURON, "masking": "backward"}])
def test_a_test_of_a_checkpoint_equals_that_of_one_process(pool, tmp_path: Path, sdp: dict[str, Any]) -> None:
    results = pool(2).run(fit_and_test, str(tmp_path), sdp)
    for losses in results:
        assert losses["None"] == losses["last"] != losses["best"]
        assert losses == results[0]
    [plain] = pool(1).run(evaluate_alone, [results[0][kind][0] for kind in ("last", "best")])
    assert plain == pytest.approx([results[0][kind][1] for kind in ("last", "best")], rel=1e-12)


def evaluate_alone(paths: list[str]) -> list[float]:
    run = trainer(1, "auto")
    data = loader(batches("conv", 50, 2))
    return [
        run.test(make("conv"), data, ckpt_path=path, weights_only=False, verbose=False)[0]["test_loss"]
        for path in paths
    ]


class Uneven(Net):
    """Gathers what it sees in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen = getattr(self, "seen", 0) + 1
        super().validation_step(batch, batch_idx)


def validate_unevenly() -> tuple[int, float, dict[str, Tensor]]:
    world, rank = dist.get_world_size(), dist.get_rank()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        net = Uneven("conv").double()
    run = trainer(world, SDPStrategy(**FORWARD), max_epochs=1, val_check_interval=1)
    run.fit(net, loader(batches("conv", rank, 2)), loader(batches("conv", rank, 1 + rank)))
    return net.seen, float(run.callback_metrics["val_loss"]), dict(net.state_dict())


def test_ranks_may_have_different_numbers_of_validation_batches(pool) -> None:
    results = pool(3).run(validate_unevenly)
    assert [seen for seen, *_ in results] == [2, 4, 6]
    assert len({loss for _, loss, _ in results}) == 1
    assert all(same_state(full, results[0][2]) for *_, full in results)


def fit_and_save_variously(directory: str) -> dict[str, Any]:
    world, rank = dist.get_world_size(), dist.get_rank()
    net = make("mlp", blocks=3)
    saves = [
        ModelCheckpoint(f"{directory}/all", filename="{step}", every_n_train_steps=1, save_top_k=-1),
        ModelCheckpoint(f"{directory}/link", filename="{epoch}", save_last="link"),
        ModelCheckpoint(f"{directory}/time", filename="timed", train_time_interval=timedelta(microseconds=1)),
        ModelCheckpoint(f"{directory}/weights", filename="weights", every_n_epochs=2, save_weights_only=True),
    ]
    run = trainer(world, SDPStrategy(**FORWARD), max_epochs=2, callbacks=saves, enable_checkpointing=True)
    run.fit(net, loader(batches("mlp", rank, 2)))
    return dict(net.state_dict())


def test_all_ways_to_save_checkpoints(pool, tmp_path: Path) -> None:
    full = pool(2).run(fit_and_save_variously, str(tmp_path))[0]
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.ckpt")}
    assert names == {*[f"all/step={i}.ckpt" for i in range(1, 5)], "link/epoch=1.ckpt", "link/last.ckpt",
                     "time/timed.ckpt", "weights/weights.ckpt"}  # fmt: skip
    assert (tmp_path / "link/last.ckpt").is_symlink()
    for name in ("all/step=4", "link/last", "time/timed", "weights/weights"):
        checkpoint = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        assert same_state(checkpoint["state_dict"], full)
        assert ("optimizer_states" in checkpoint) == (name != "weights/weights")
