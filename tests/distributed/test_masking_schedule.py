"""MaskingSchedule: plan and regime change by a table, on real ranks."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_sdp import MaskingSchedule, MaskPlan, SDPReference, SDPStrategy
from tests.distributed.pool import launch
from tests.distributed.runs import WORLDS, plan_for, trainer
from tests.distributed.test_checkpoints import scheduled
from tests.distributed.test_cli import COMMAND
from tests.models import SHAPES, batches, loader, make, same_state

BLOCK = {"coverage": 0.5, "keep_ends": 0}
NEURON = {**BLOCK, "granularity": "neuron"}

REGIMES = [
    {"step": 2, "masking": "backward", "coverage": 0.7},
    {"step": 5, "masking": "forward"},
    {"step": 8, "coverage": 1.0},
]
ROTATION = [
    {"step": 1, "rotate_every_n_steps": 2},
    {"step": 6, "seed": 4, "rotate_every_n_steps": 1},
    {"step": 9, "rotate_every_n_steps": 0},
]


class Seen(Callback):
    """What the plan, the regime and the metrics are in every step."""

    def __init__(self) -> None:
        self.plans: list[str] = []
        self.maskings: list[str] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        strategy = trainer.strategy
        self.plans.append(strategy.plan.to_json())
        self.maskings.append(strategy.masking)
        self.metrics.append({name: float(value) for name, value in trainer.progress_bar_metrics.items()})


def fit_scheduled(
    sdp: dict[str, Any], entries: list[dict[str, Any]], batches_per_epoch: int = 11, **options: Any
) -> dict[str, Any]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net, seen = make("mlp"), Seen()
    run = trainer(world, SDPStrategy(**sdp), callbacks=[MaskingSchedule(entries), seen], **{"max_epochs": 1, **options})
    run.fit(net, loader(batches("mlp", rank, batches_per_epoch)))
    logged = {name: float(value) for name, value in run.logged_metrics.items()}
    return {"full": dict(net.state_dict()), "seen": seen, "logged": logged}


def expected_plans(base: MaskPlan, entries: str) -> list[MaskPlan]:
    """The plan in every of eleven steps."""
    if entries == "regimes":
        more, full = base.reassigned(coverage=0.7), base.reassigned(coverage=1.0)
        return [base] * 2 + [more] * 6 + [full] * 3
    other = base.reassigned(coverage=0.5, seed=4)
    first = [base, base, base, base.rotated(1), base.rotated(1), base.rotated(2)]
    return [*first, other, other.rotated(1), other.rotated(2), other, other]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("sdp", "entries"),
    [
        (NEURON, "regimes"),
        (BLOCK, "rotation"),
        pytest.param(BLOCK, "regimes", marks=pytest.mark.slow),
        pytest.param(NEURON, "rotation", marks=pytest.mark.slow),
    ],
)
def test_a_schedule_of_three_entries_equals_the_reference(pool, world: int, sdp: dict[str, Any], entries: str) -> None:
    table = REGIMES if entries == "regimes" else ROTATION
    results = pool(world).run(fit_scheduled, sdp, table, gradient_clip_val=0.05)
    net = make("mlp")
    plans = expected_plans(plan_for(net, world, sdp, torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64)), entries)
    maskings = ["forward"] * 2 + ["backward"] * 3 + ["forward"] * 6 if entries == "regimes" else ["forward"] * 11
    ref = SDPReference(net, plans[0], net.configure_optimizers(), gradient_clip_val=0.05)
    data = [batches("mlp", rank, 11) for rank in range(world)]
    for step, (plan, masking) in enumerate(zip(plans, maskings, strict=True)):
        ref.replan(plan, masking)
        ref.step([[own[step]] for own in data])
    for result in results:
        seen = result["seen"]
        assert seen.plans == [plan.to_json() for plan in plans]
        assert seen.maskings == maskings
        for metrics, plan, masking in zip(seen.metrics, plans, maskings, strict=True):
            assert metrics["sdp_coverage"] == pytest.approx(sum(plan.coverage) / world)
            assert metrics["sdp_backward"] == float(masking == "backward")
        assert seen.metrics[-1].items() <= result["logged"].items()
        torch.testing.assert_close(result["full"], net.state_dict(), rtol=1e-10, atol=1e-10)


def test_every_worker_holds_every_component_in_the_course_of_a_rotation(pool) -> None:
    entries = [{"step": 0, "rotate_every_n_steps": 2}]
    plans = [MaskPlan.from_json(text) for text in pool(3).run(fit_scheduled, NEURON, entries)[0]["seen"].plans]
    for worker in range(3):
        held = {name for plan in plans for name in plan.held_by(worker)}
        assert held == {component.name for component in plans[0].components}


def test_entries_by_epoch_begin_with_their_epoch(pool) -> None:
    entries = [{"epoch": 1, "masking": "backward"}, {"epoch": 2, "masking": "forward", "rotate_every_n_steps": 1}]
    result = pool(2).run(fit_scheduled, BLOCK, entries, 3, max_epochs=3)[0]["seen"]
    base = plan_for(make("mlp"), 2, BLOCK)
    assert result.maskings == ["forward"] * 3 + ["backward"] * 3 + ["forward"] * 3
    plans = [base] * 6 + [base, base.rotated(1), base]
    assert result.plans == [plan.to_json() for plan in plans]


def test_a_change_waits_until_accumulated_gradients_have_been_used(pool) -> None:
    entries = [{"epoch": 0, "coverage": 1.0}, {"epoch": 1, "coverage": 0.5}]
    result = pool(2).run(fit_scheduled, BLOCK, entries, 3, max_epochs=2, accumulate_grad_batches=2)[0]["seen"]
    shares = [metrics["sdp_coverage"] for metrics in result.metrics]
    assert shares == [1.0] * 3 + [0.5] * 3, "the last batch of an epoch takes a step too"
    by_hand = pool(2).run(fit_by_hand, [{"step": 0, "coverage": 1.0}, {"step": 2, "coverage": 0.5}])
    assert by_hand[0] == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]


class ByHand(LightningModule):
    """Takes its steps itself, after every other batch; a step count moves on only then."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make("mlp")
        self.automatic_optimization = False
        self.example_input_array = torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01, eps=1e-3)


def fit_by_hand(entries: list[dict[str, Any]]) -> list[float]:
    world, rank, seen = torch.distributed.get_world_size(), torch.distributed.get_rank(), Seen()
    run = trainer(world, SDPStrategy(**BLOCK), max_epochs=1, callbacks=[MaskingSchedule(entries), seen])
    run.fit(ByHand(), loader(batches("mlp", rank, 6)))
    return [metrics["sdp_coverage"] for metrics in seen.metrics]


def fit_and_save(
    directory: str, entries: list[dict[str, Any]], steps: int, save_at: int | None, resume: str | None, **sdp: Any
) -> dict[str, Any]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net, seen = scheduled("mlp"), Seen()
    callbacks: list[Callback] = [MaskingSchedule(entries), seen]
    if save_at is not None:
        callbacks.append(ModelCheckpoint(directory, filename="saved", every_n_train_steps=save_at))
    run = trainer(
        world, SDPStrategy(**sdp), max_steps=steps, max_epochs=-1, callbacks=callbacks, gradient_clip_val=0.05,
        enable_checkpointing=save_at is not None,
    )  # fmt: skip
    options: dict[str, Any] = {"ckpt_path": resume, "weights_only": False} if resume else {}
    run.fit(net, loader(batches("mlp", rank, 2)), **options)
    return {"full": dict(net.state_dict()), "plans": seen.plans, "maskings": seen.maskings}


EPOCHS = [{"epoch": 2, "rotate_every_n_steps": 1}, {"epoch": 4, "masking": "backward"}]


@pytest.mark.parametrize(
    ("entries", "saved_at"),
    [
        (REGIMES, 4),
        (ROTATION, 6),
        *[pytest.param(REGIMES, saved_at, marks=pytest.mark.slow) for saved_at in (6, 10)],
        *[pytest.param(ROTATION, saved_at, marks=pytest.mark.slow) for saved_at in (4, 10)],
        *[pytest.param(EPOCHS, saved_at, marks=pytest.mark.slow) for saved_at in (4, 6, 10)],
    ],
)
def test_a_run_resumed_between_two_entries_is_bit_equal_to_an_uninterrupted_one(
    pool, tmp_path: Path, entries: list[dict[str, Any]], saved_at: int
) -> None:
    whole = pool(3).run(fit_and_save, str(tmp_path), entries, 11, None, None, **NEURON)
    pool(3).run(fit_and_save, str(tmp_path), entries, saved_at, saved_at, None, **NEURON)
    resumed = pool(3).run(fit_and_save, str(tmp_path), entries, 11, None, str(tmp_path / "saved.ckpt"), **NEURON)
    for a, b in zip(whole, resumed, strict=True):
        assert a["plans"][saved_at:] == b["plans"] and a["maskings"][saved_at:] == b["maskings"]
        assert same_state(a["full"], b["full"])


class ChangeOnce(Callback):
    """Changes the plan and the regime once, by hand."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            trainer.strategy.replan(trainer.strategy.plan.rotated(1), "backward")


def fit_changed(directory: str, steps: int, save: bool, resume: str | None, **sdp: Any) -> dict[str, Any]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net, seen = scheduled("mlp"), Seen()
    callbacks: list[Callback] = [ChangeOnce(), seen]
    if save:
        callbacks.append(ModelCheckpoint(directory, filename="changed", every_n_train_steps=steps))
    run = trainer(
        world, SDPStrategy(**sdp), max_steps=steps, max_epochs=-1, callbacks=callbacks, enable_checkpointing=save
    )
    options: dict[str, Any] = {"ckpt_path": resume, "weights_only": False} if resume else {}
    run.fit(net, loader(batches("mlp", rank, 4)), **options)
    return {"full": dict(net.state_dict()), "plans": seen.plans, "maskings": seen.maskings}


@pytest.mark.parametrize("sdp", [BLOCK, pytest.param(NEURON, marks=pytest.mark.slow)])
def test_a_resumed_run_keeps_a_plan_that_was_changed_by_hand(pool, tmp_path: Path, sdp: dict[str, Any]) -> None:
    whole = pool(3).run(fit_changed, str(tmp_path), 8, False, None, **sdp)
    pool(3).run(fit_changed, str(tmp_path), 4, True, None, **sdp)
    path = str(tmp_path / "changed.ckpt")
    for a, b in zip(whole, pool(3).run(fit_changed, "", 8, False, path, **sdp), strict=True):
        assert b["plans"] == a["plans"][4:] and b["maskings"] == a["maskings"][4:] == ["backward"] * 4
        assert same_state(a["full"], b["full"])
    other = pool(3).run(fit_changed, "", 6, False, path, **{**sdp, "coverage": 0.7})[0]
    assert other["maskings"] == ["forward"] * 2, "other arguments begin anew"
    assert other["plans"][0] == plan_for(scheduled("mlp"), 3, {**sdp, "coverage": 0.7}).to_json()


BAD_TABLES = [
    ([], "must be a list of at least one entry"),
    ({"step": 0}, "must be a list of at least one entry"),
    ([3], "every entry needs 'epoch', or every entry needs 'step'"),
    ([{"coverage": 0.5}], "every entry needs 'epoch', or every entry needs 'step'"),
    ([{"step": 0, "epoch": 0, "coverage": 0.5}], "every entry needs 'epoch', or every entry needs 'step'"),
    ([{"step": 0, "seed": 1}, {"epoch": 3, "seed": 2}], "every entry needs 'epoch', or every entry needs 'step'"),
    ([{"step": -1, "seed": 1}], "step=-1 must be a number, 0 or more"),
    ([{"step": 1.5, "seed": 1}], "step=1.5 must be a number, 0 or more"),
    ([{"epoch": True, "seed": 1}], "epoch=True must be a number"),
    ([{"step": 4, "seed": 1}, {"step": 4, "seed": 2}], "step 4 does not come after 4"),
    ([{"step": 4, "seed": 1}, {"step": 2, "seed": 2}], "step 2 does not come after 4"),
    ([{"step": 0, "covrage": 0.5}], "unknown key 'covrage'; known are epoch, step, masking, coverage"),
    ([{"step": 0}], "it changes nothing"),
    ([{"step": 0, "masking": "sideways"}], "masking='sideways' is unknown"),
    ([{"step": 0, "coverage": 1.5}], "coverage=1.5 must lie in"),
    ([{"step": 0, "seed": "a"}], "seed='a' must be an integer"),
    ([{"step": 0, "plan": 3}], "plan=3 must be a MaskPlan or the path of one"),
    ([{"step": 0, "plan": "p.json", "seed": 3}], "plan takes the place of coverage and seed"),
    ([{"step": 0, "rotate_every_n_steps": -1}], "rotate_every_n_steps=-1 must be a number of steps"),
]


@pytest.mark.parametrize(("entries", "message"), BAD_TABLES)
def test_a_table_that_is_not_understood_is_refused(entries: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MaskingSchedule(entries)


UNEVEN = plan_for(make("mlp"), 2, {**BLOCK, "coverage": [0.4, 1.0]})


def fit_refused(sdp: dict[str, Any] | str, entries: list[dict[str, Any]]) -> str:
    world = torch.distributed.get_world_size()
    strategy = SDPStrategy(**sdp) if isinstance(sdp, dict) else sdp
    run = trainer(world, strategy, max_epochs=1, callbacks=[MaskingSchedule(entries)])
    with pytest.raises(ValueError) as caught:
        run.fit(make("mlp"), loader(batches("mlp", 0, 2)))
    return str(caught.value)


@pytest.mark.parametrize(
    ("sdp", "entries", "message"),
    [
        ("ddp", [{"step": 0, "coverage": 0.5}], "the strategy is DDPStrategy: use Trainer(strategy='sdp')"),
        (BLOCK, [{"step": 4, "coverage": [0.5, 0.2, 0.7]}], "coverage=[0.5, 0.2, 0.7] has 3 shares for 2 workers"),
        (BLOCK, [{"step": 4, "coverage": [0.5, 0.7], "rotate_every_n_steps": 2}], "Rotate with one coverage for all"),
        (BLOCK, [{"step": 4, "plan": UNEVEN, "rotate_every_n_steps": 2}], "Rotate with one coverage for all"),
        (BLOCK, [{"step": 4, "plan": "no/such/plan.json"}], "plan='no/such/plan.json' cannot be read"),
        (BLOCK, [{"step": 4, "plan": plan_for(make("mlp"), 3, BLOCK)}], "The plan is for 3 workers, but there are 2"),
        ({"plan": plan_for(make("mlp"), 2, BLOCK)}, [{"step": 1, "seed": 4}], "seed alone does not go with"),
    ],
)
def test_a_table_that_does_not_fit_the_run_is_refused_before_training(
    pool, sdp: Any, entries: list[dict[str, Any]], message: str
) -> None:
    for text in pool(2).run(fit_refused, sdp, entries):
        assert message in text


class Vectors(LightningDataModule):
    """The same batches in every epoch."""

    def train_dataloader(self) -> Any:
        rank = int(os.environ.get("LOCAL_RANK", 0))
        return loader([(x.float(), y) for x, y in batches("mlp", rank, 4)])


class KillAfter(Callback):
    """Kills its process without a word."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_run_from_a_file_that_was_killed_goes_on_bit_equal(tmp_path: Path) -> None:
    def fit(name: str, *arguments: str, kill_after: int | None = None) -> Path:
        root = tmp_path / name
        saving = {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 4, "save_top_k": -1}}
        callbacks: list[Any] = [
            {"class_path": "lightning_sdp.MaskingSchedule", "init_args": {"entries": REGIMES}},
            {**saving, "init_args": {**saving["init_args"], "dirpath": str(root), "filename": "{step}"}},
        ]
        if kill_after is not None:
            kill = {"class_path": "tests.distributed.test_masking_schedule.KillAfter"}
            callbacks.append({**kill, "init_args": {"step": kill_after}})
        strategy = {"class_path": "lightning_sdp.SDPStrategy", "init_args": {"keep_ends": 0}}
        config = {
            "seed_everything": 3,
            "model": {"class_path": "tests.models.Net", "init_args": {"blocks": 4}},
            "data": {"class_path": "tests.distributed.test_masking_schedule.Vectors"},
            "trainer": {
                "accelerator": "cpu", "devices": 2, "max_epochs": 3, "logger": False, "callbacks": callbacks,
                "enable_progress_bar": False, "strategy": strategy, "use_distributed_sampler": False,
            },
        }  # fmt: skip
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        launch([COMMAND, "fit", "--config", str(path), *arguments], world=2, check=kill_after is None)
        return root

    whole = fit("whole") / "step=12.ckpt"
    killed = fit("killed", kill_after=6)
    assert not (killed / "step=8.ckpt").exists()
    resumed = fit("resumed", "--ckpt_path", str(killed / "step=4.ckpt")) / "step=12.ckpt"
    a, b = (torch.load(path, weights_only=True) for path in (whole, resumed))
    assert same_state(a["state_dict"], b["state_dict"])
    assert a["lightning_sdp"] == b["lightning_sdp"] and a["callbacks"].keys() == b["callbacks"].keys()
    for one, other in zip(a["optimizer_states"], b["optimizer_states"], strict=True):
        assert all(same_state(one["state"][i], other["state"][i]) for i in one["state"])
