"""SDPMonitor: what it logs, shows and leaves alone."""

from __future__ import annotations

import csv
import io
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_sdp import MaskPlan, SDPMonitor, SDPStrategy, communication_bytes
from tests.distributed.runs import fit_rank, plan_for, trainer
from tests.distributed.test_replan import Change, Replan, changed
from tests.models import SHAPES, batches, loader, make, same_state

BLOCK = {"coverage": 0.5, "keep_ends": 0}
NEURON = {**BLOCK, "granularity": "neuron"}
SHOWN = {"sdp/step_time_max", "sdp/busy_time_spread"}


class Seen(Callback):
    """What ranks report, and what is logged, after every batch."""

    def __init__(self) -> None:
        self.usage: list[list[dict[str, float]]] = []
        self.logged: list[dict[str, float]] = []
        self.shown: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.usage.append(trainer.strategy.usage(rank=trainer.global_rank))
        self.logged.append({name: float(value) for name, value in trainer.logged_metrics.items()})
        self.shown.append({name: float(value) for name, value in trainer.progress_bar_metrics.items()})


class Sleep(Callback):
    """Makes a rank slow in training, or all in validation."""

    def __init__(self, rank: int | None, seconds: float) -> None:
        self.rank, self.seconds = rank, seconds

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == self.rank:
            time.sleep(self.seconds)

    def on_validation_batch_start(self, *_: Any) -> None:
        if self.rank is None:
            time.sleep(self.seconds)


def fit(
    sdp: dict[str, Any] | str,
    directories: list[str],
    every: int | None = 1,
    steps: int = 6,
    callbacks: list[Callback] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains with a monitor and, for every directory, a logger."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    strategy = SDPStrategy(**sdp) if isinstance(sdp, dict) else sdp
    seen, net, out = Seen(), make("mlp"), io.StringIO()
    loggers = [CSVLogger(directory, name="", version="") for directory in directories]
    run = trainer(
        world,
        strategy,
        max_epochs=1,
        callbacks=[*(callbacks or []), SDPMonitor(every), seen],
        **{"logger": loggers, **options},
    )
    validation = {"val_dataloaders": loader(batches("mlp", 9, 1))} if "val_check_interval" in options else {}
    with redirect_stdout(out):
        run.fit(net, loader(batches("mlp", rank, steps * run.accumulate_grad_batches)), **validation)
    assert "sdp/step_time_max" in run.callback_metrics or not seen.shown[-1]
    return {"usage": seen.usage, "logged": seen.logged, "shown": seen.shown, "out": out.getvalue()}


def base_plan(sdp: dict[str, Any]) -> MaskPlan:
    return plan_for(make("mlp"), 3, sdp, torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64))


def expected(plan: MaskPlan, masking: str, worker: int) -> dict[str, float]:
    """Counted by hand: float64 throughout; AdamW has two values per element and a float32 counter per tensor."""
    shapes = {name: p.shape for name, p in make("mlp").named_parameters()}
    masks = {name: plan.element_mask(name, worker, shape) for name, shape in shapes.items()}
    held = sum(int(mask.sum()) for mask in masks.values())
    counters = sum(bool(mask.any()) for mask in masks.values())
    parts = sum(int(mask.sum()) for mask in masks.values() if mask.any() and not mask.all())
    full = sum(shape.numel() for shape in shapes.values())
    return {
        "parameter_bytes": 8 * (held if masking == "forward" else full + parts),
        "gradient_bytes": 8 * held,
        "optimizer_bytes": 16 * held + 4 * counters,
        "sent_bytes": communication_bytes(plan, make("mlp"), masking=masking)[worker],
        "effective_coverage": plan.coverage[worker],
    }


CHANGES: dict[int, Change] = {2: {"masking": "backward", "seed": 3}, 4: {"masking": "forward", "coverage": 0.75}}


@pytest.mark.parametrize("sdp", [pytest.param(BLOCK, marks=pytest.mark.slow), NEURON])
def test_numbers_are_those_counted_by_hand_under_every_plan(pool, tmp_path: Path, sdp: dict[str, Any]) -> None:
    results = pool(3).run(fit, sdp, [str(tmp_path)], callbacks=[Replan(CHANGES)])
    base = plan = base_plan(sdp)
    masking = "forward"
    for step in range(6):
        if step in CHANGES:
            plan, masking = changed(base, CHANGES[step]), CHANGES[step]["masking"]
        rows = results[0]["usage"][step]
        logged = results[0]["logged"][step]
        for rank, row in enumerate(rows):
            assert row["rank"] == rank
            assert row["peak_bytes"] > 2**24, "a process with torch in it"
            numbers = expected(plan, masking, rank)
            assert {name: row[name] for name in numbers} == pytest.approx(numbers, rel=1e-12), f"step {step}"
        for name in numbers:
            values = [row[name] for row in rows]
            statistics = [logged[f"sdp/{name}_{key}"] for key in ("min", "mean", "max")]
            assert statistics == pytest.approx([min(values), sum(values) / 3, max(values)], rel=1e-12)
        for name in ("peak_bytes", "step_time", "busy_time"):
            low, mean, high = (logged[f"sdp/{name}_{key}"] for key in ("min", "mean", "max"))
            assert 0 < low <= mean <= high
        assert logged["sdp/busy_time_spread"] == logged["sdp/busy_time_max"] / logged["sdp/busy_time_mean"] >= 1
        assert logged["sdp/busy_time_max"] <= logged["sdp/step_time_max"]
        for result in results:
            assert result["usage"][step] == rows
            sdp_only = {name: value for name, value in result["logged"][step].items() if name.startswith("sdp/")}
            assert sdp_only == {name: value for name, value in logged.items() if name.startswith("sdp/")}
    for rank in range(3):
        assert bool(results[rank]["out"]) == (rank == 0), "one table"
    table = results[0]["out"]
    assert "What each worker held, sent and took per step" in table
    assert len([line for line in table.splitlines() if " ms " in line]) == 3


def rows_of(directory: Path) -> list[dict[str, str]]:
    with open(directory / "metrics.csv", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row.get("sdp/step_time_mean")]


def test_every_logger_gets_them_every_few_optimizer_steps(pool, tmp_path: Path) -> None:
    """In steps 3 and 6, each of two batches; loggers count from 0."""
    paths = [tmp_path / "a", tmp_path / "b"]
    results = pool(2).run(fit, BLOCK, list(map(str, paths)), every=3, accumulate_grad_batches=2)
    for path in paths:
        rows = rows_of(path)
        assert [row["step"] for row in rows] == ["2", "5"]
        last = results[0]["logged"][-1]
        names = [name for name in rows[-1] if name.startswith("sdp/")]
        assert len(names) == 8 * 3 + 1
        assert {name: float(rows[-1][name]) for name in names} == {name: last[name] for name in names}
    assert [set(shown) & SHOWN for shown in results[0]["shown"]] == [set()] * 5 + [SHOWN] * 7
    for name in SHOWN:
        assert results[0]["shown"][-1][name] == pytest.approx(results[0]["logged"][-1][name], rel=1e-6)


def test_the_trainer_says_how_often_unless_the_monitor_does(pool, tmp_path: Path) -> None:
    pool(2).run(fit, NEURON, [str(tmp_path)], every=None, log_every_n_steps=4)
    assert [row["step"] for row in rows_of(tmp_path)] == ["3"]


def test_the_progress_bar_shows_them_without_a_logger(pool) -> None:
    results = pool(2).run(fit, BLOCK, [], logger=False, enable_progress_bar=True)
    assert set(results[0]["shown"][0]) == SHOWN
    assert results[0]["shown"] == results[1]["shown"]


def count_usage(every: int, steps: int) -> int:
    with mock.patch.object(SDPStrategy, "usage", autospec=True, side_effect=SDPStrategy.usage) as usage:
        run = trainer(2, SDPStrategy(**BLOCK), max_epochs=1, callbacks=[SDPMonitor(every)])
        run.fit(make("mlp"), loader(batches("mlp", torch.distributed.get_rank(), steps)))
    return usage.call_count


def test_nothing_is_collected_where_nobody_sees_it(pool) -> None:
    assert pool(2).run(count_usage, 1, 4) == [1, 1], "the table at the end"
    assert pool(2).run(count_usage, 1, 0) == [0, 0], "no training, no table"


@pytest.mark.parametrize("sdp", [BLOCK, {**BLOCK, "masking": "backward"}, {**BLOCK, "model_averaging_period": 2}])
def test_a_slow_rank_shows_as_spread(pool, tmp_path: Path, sdp: dict[str, Any]) -> None:
    logged = pool(3).run(fit, sdp, [str(tmp_path)], every=4, steps=4, callbacks=[Sleep(1, 0.3)])[0]["logged"][-1]
    assert logged["sdp/step_time_min"] > 0.25 and logged["sdp/busy_time_max"] > 0.25
    assert logged["sdp/busy_time_min"] < 0.2
    assert 1.4 < logged["sdp/busy_time_spread"] <= 3


def test_validation_is_not_part_of_a_step(pool, tmp_path: Path) -> None:
    options = {"val_check_interval": 2, "callbacks": [Sleep(None, 1.0)]}
    logged = pool(2).run(fit, BLOCK, [str(tmp_path)], every=6, **options)[0]["logged"][-1]
    assert logged["sdp/step_time_max"] < 0.3


@pytest.mark.parametrize(
    "sdp",
    [
        {**NEURON, "masking": "backward"},
        *[
            pytest.param(sdp, marks=pytest.mark.slow)
            for sdp in (BLOCK, NEURON, {**NEURON, "model_averaging_period": 2})
        ],
    ],
)
def test_weights_are_bit_equal_with_and_without(pool, tmp_path: Path, sdp: dict[str, Any]) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    without = pool(3).run(fit_rank, sdp, "mlp", 5, {}, **options)
    logger, callbacks = CSVLogger(str(tmp_path)), [SDPMonitor(1)]
    watched = pool(3).run(fit_rank, sdp, "mlp", 5, {}, logger=logger, callbacks=callbacks, **options)
    for a, b in zip(without, watched, strict=True):
        assert same_state(a["full"], b["full"]) and same_state(a["held"], b["held"])


class Unfinished(Callback):
    """Asks when there is nothing to measure."""

    def __init__(self) -> None:
        self.error = ""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        try:
            trainer.strategy.usage()
        except RuntimeError as error:
            self.error = str(error)


def evaluate() -> tuple[str, str]:
    unfinished, out = Unfinished(), io.StringIO()
    with redirect_stdout(out):
        trainer(2, SDPStrategy(**BLOCK), callbacks=[SDPMonitor(), unfinished]).validate(
            make("mlp"), loader(batches("mlp", 9, 1)), verbose=False
        )
    return unfinished.error, out.getvalue()


def test_an_evaluation_has_nothing_to_watch(pool) -> None:
    for error, out in pool(2).run(evaluate):
        assert "strategy.usage measures a running training" in error and not out


def test_another_strategy_is_refused(pool) -> None:
    for error in pool(2).run_expecting_errors(fit, "ddp", []):
        assert error is not None and error[0] == "ValueError"
        assert "SDPMonitor watches what SDPStrategy masks, but the strategy is DDPStrategy: use Trainer(" in error[1]


@pytest.mark.parametrize("every", [0, -1, 2.5, True])
def test_bad_periods_are_refused(every: Any) -> None:
    with pytest.raises(ValueError, match=f"every_n_steps={every} must be a number of steps"):
        SDPMonitor(every)
