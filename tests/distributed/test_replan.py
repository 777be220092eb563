"""A training that goes on with other plans and regimes, against the one-process reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_sdp import MaskPlan, SDPReference, SDPStrategy
from lightning_sdp.components import Component, ParamSlice
from tests.distributed.runs import WORLDS, plan_for, trainer
from tests.models import SHAPES, batches, loader, make

Change = dict[str, Any]  # coverage, seed, turns, masking

BLOCK = {"coverage": 0.5, "keep_ends": 0}
NEURON = {**BLOCK, "granularity": "neuron"}
STEPS = 10
CHANGES: dict[str, dict[int, Change]] = {
    "another assignment": {3: {"seed": 5}, 6: {"seed": 9}},
    "up to full coverage and back": {3: {"coverage": 1.0}, 7: {"coverage": 0.5, "seed": 3}},
    "to backward masking and back": {3: {"masking": "backward"}, 7: {"masking": "forward", "seed": 3}},
    "rotated": {step: {"turns": step // 2} for step in range(2, STEPS, 2)},
}
BACKWARD = {
    "another assignment": {3: {"seed": 5}, 6: {"seed": 9, "coverage": 0.75}},
    "to forward masking": {4: {"masking": "forward", "seed": 5}},
    "up to full coverage and back": {3: {"coverage": 1.0}, 7: {"coverage": 0.5, "seed": 3}},
}


def changed(base: MaskPlan, change: Change) -> MaskPlan:
    plan = base.reassigned(coverage=change.get("coverage", 0.5), seed=change.get("seed", 0))
    return plan.rotated(change.get("turns", 0))


class Replan(Callback):
    """Changes the plan before certain steps, and looks at what the rank has afterwards."""

    def __init__(self, changes: dict[int, Change]) -> None:
        self.changes = dict(changes)
        self.sizes: list[tuple[int, int]] = []
        self.state: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        change = self.changes.pop(trainer.global_step, None)
        if change is not None:
            strategy = trainer.strategy
            self.base = getattr(self, "base", strategy.plan)
            strategy.replan(changed(self.base, change), change.get("masking"))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states = [
            v for p in parameters for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor) and v.dim()
        ]
        self.sizes.append((sum(p.numel() for p in pl_module.parameters()), sum(v.numel() for v in states)))
        assert set(map(id, optimizer.state)) <= set(map(id, parameters)), "no state of what left"

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.state = trainer.strategy.optimizer_state(trainer.optimizers[0])


def fit_changing(
    sdp: dict[str, Any], kind: str, steps: int, model: dict[str, Any], changes: dict[int, Change], **options: Any
) -> dict[str, Any]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net, replan = make(kind, **model), Replan(changes)
    run = trainer(world, SDPStrategy(**sdp), max_epochs=1, callbacks=[replan], **options)
    run.fit(net, loader(batches(kind, rank, steps * run.accumulate_grad_batches)))
    return {"full": dict(net.state_dict()), "sizes": replan.sizes, "state": replan.state}


def reference_changing(
    world: int, workers: int, sdp: dict[str, Any], kind: str, steps: int, model: dict[str, Any], changes: Any, **options
) -> SDPReference:
    net = make(kind, **model)
    base = plan_for(net, workers, sdp, torch.zeros(2, *SHAPES[kind], dtype=torch.float64))
    known = ("masking", "model_averaging_period", "average_optimizer_state")
    ref = SDPReference(
        net,
        base,
        net.configure_optimizers(),
        ranks_per_worker=world // workers,
        **{k: v for k, v in sdp.items() if k in known},
        **options,
    )
    k = options.get("accumulate_grad_batches", 1)
    data = [batches(kind, rank, steps * k) for rank in range(world)]
    since = 0  # the step from which on BatchNorm's statistics are local
    for step in range(steps):
        if step in changes:
            ran_everything = ref.masking == "backward" or ref.plan.is_complete
            plan, masking = changed(base, changes[step]), changes[step].get("masking")
            ref.replan(plan, masking, [own[since * k : step * k][-16:] for own in data])
            since = step if ran_everything else since
        ref.step([own[step * k : (step + 1) * k] for own in data])
    ref.install_buffers([own[since * k :][-16:] for own in data])
    return ref


def check(
    pool: Any, world: int, workers: int, sdp: dict[str, Any], kind: str, changes: dict[int, Change], **options: Any
) -> None:
    """Weights, optimizer state and sizes are those of the reference, which goes through the same changes."""
    model, steps = options.pop("model", {}), options.pop("steps", STEPS)
    sdp = {**sdp, "num_subnetworks": workers}
    results = pool(world).run(fit_changing, sdp, kind, steps, model, changes, **options)
    ref = reference_changing(world, workers, sdp, kind, steps, model, changes, **options)
    for rank, result in enumerate(results):
        for name, value in ref.module.state_dict().items():
            torch.testing.assert_close(
                result["full"][name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name, r=rank: f"{n} on {r}: {m}"
            )
            assert torch.equal(result["full"][name], results[0]["full"][name]), f"{name} on rank {rank}"
    if sdp.get("model_averaging_period", 1) == 1:
        expected = ref.optimizer.state_dict()
        assert results[0]["state"]["param_groups"] == expected["param_groups"]
        torch.testing.assert_close(results[0]["state"]["state"], expected["state"], rtol=1e-10, atol=1e-10)
    base = plan_for(make(kind, **model), workers, sdp, torch.zeros(2, *SHAPES[kind], dtype=torch.float64))
    plan, masking = base, sdp.get("masking", "forward")
    shapes = {name: p.shape for name, p in make(kind, **model).named_parameters()}
    for step in range(steps):
        if step in changes:
            plan, masking = changed(base, changes[step]), changes[step].get("masking") or masking
        for rank, result in enumerate(results):
            worker = rank // (world // workers)
            held = sum(int(plan.element_mask(name, worker, shape).sum()) for name, shape in shapes.items())
            full = sum(shape.numel() for shape in shapes.values())
            weights, state = result["sizes"][(step + 1) * options.get("accumulate_grad_batches", 1) - 1]
            assert weights == (held if masking == "forward" else full), f"step {step}, rank {rank}"
            if model.get("optimizer", "adamw") == "adamw":
                assert state == 2 * held, f"step {step}, rank {rank}"


# A few in the fast run, all of them in the long one.
MATRIX = [
    pytest.param(
        sdp, change, marks=() if (sdp is NEURON) == ("up" in change or "backward" in change) else pytest.mark.slow
    )
    for sdp in (BLOCK, NEURON)
    for change in CHANGES
]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("sdp", "change"), MATRIX)
def test_ten_steps_with_changes_equal_the_reference(pool, world: int, sdp: dict[str, Any], change: str) -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    check(pool, world, world, sdp, "gqa", CHANGES[change], model={"blocks": 3}, **options)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("sdp", "change"),
    [
        (NEURON, "another assignment"),
        (BLOCK, "to forward masking"),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(BLOCK, "another assignment"), (NEURON, "to forward masking")]
        ],
        *[pytest.param(sdp, "up to full coverage and back", marks=pytest.mark.slow) for sdp in (BLOCK, NEURON)],
    ],
)
def test_changes_that_begin_with_backward_masking_equal_the_reference(
    pool, world: int, sdp: dict[str, Any], change: str
) -> None:
    check(pool, world, world, {**sdp, "masking": "backward"}, "mlp", BACKWARD[change], gradient_clip_val=0.05)


@pytest.mark.parametrize("sdp", [BLOCK, NEURON])
def test_two_ranks_of_a_worker_equal_the_reference(pool, sdp: dict[str, Any]) -> None:
    changes = {3: {"seed": 5}, 5: {"masking": "backward"}, 7: {"masking": "forward", "turns": 1}}
    check(pool, 4, 2, sdp, "mlp", changes, gradient_clip_val=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {3: {"seed": 5}, 6: {"coverage": 0.75}},
        {3: {"coverage": 1.0}, 6: {"seed": 5}},
        {3: {"masking": "backward"}, 6: {"masking": "forward"}},
    ],
)
@pytest.mark.parametrize("sdp", [pytest.param(BLOCK, marks=pytest.mark.slow), NEURON])
def test_buffers_and_statistics_of_batchnorm_equal_the_reference(pool, sdp: dict[str, Any], changes: Any) -> None:
    check(pool, 3, 3, sdp, "conv", changes, model={"optimizer": "momentum", "blocks": 3})


@pytest.mark.parametrize(
    ("sdp", "average_state"),
    [
        (BLOCK, True),
        (NEURON, False),
        pytest.param(BLOCK, False, marks=pytest.mark.slow),
        pytest.param(NEURON, True, marks=pytest.mark.slow),
    ],
)
def test_a_change_within_a_period_ends_it_and_equals_the_reference(
    pool, sdp: dict[str, Any], average_state: bool
) -> None:
    sdp = {**sdp, "model_averaging_period": 3, "average_optimizer_state": average_state}
    check(pool, 3, 3, sdp, "gqa", {4: {"seed": 5}, 6: {"coverage": 1.0}, 8: {"turns": 1}}, model={"blocks": 2})


@pytest.mark.parametrize("optimizer", ["adagrad", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sdp", [pytest.param(BLOCK, marks=pytest.mark.slow), NEURON])
def test_state_from_the_start_and_no_state_equal_the_reference(pool, sdp: dict[str, Any], optimizer: str) -> None:
    check(pool, 3, 3, sdp, "gqa", CHANGES["rotated"], model={"blocks": 2, "optimizer": optimizer, "groups": True})


def fit_with(
    sdp: dict[str, Any], steps: int, callbacks: list[Callback], kind: str = "mlp", **options: Any
) -> LightningModule:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = make(kind)
    run = trainer(world, SDPStrategy(**sdp), max_epochs=1, callbacks=callbacks, **options)
    run.fit(net, loader(batches(kind, rank, steps)))
    return net


class KeepGraphs(Callback):
    """Keeps graphs of the present model alive, as a user who collects losses with their graphs does."""

    def __init__(self) -> None:
        self.graphs: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any):
        self.graphs.append(pl_module.training_step(batch, 0))


def fit_and_keep_graphs(sdp: dict[str, Any]) -> dict[str, Tensor]:
    return dict(fit_with(sdp, 6, [KeepGraphs(), Replan(CHANGES["rotated"])]).state_dict())


@pytest.mark.parametrize("masking", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_graphs_that_the_user_keeps_alive_change_nothing(pool, masking: str) -> None:
    sdp = {**NEURON, "masking": masking}
    expected = reference_changing(3, 3, sdp, "mlp", 6, {}, CHANGES["rotated"]).module.state_dict()
    for full in pool(3).run(fit_and_keep_graphs, sdp):
        torch.testing.assert_close(full, expected, rtol=1e-10, atol=1e-10)


class Freeze(Callback):
    """Freezes all that a rank has of the maskable part before a step, and says later what is frozen."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            for name, parameter in pl_module.named_parameters():
                if name.endswith("fc1.weight"):
                    parameter.requires_grad_(False)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.frozen = {n: not p.requires_grad for n, p in pl_module.named_parameters()}


def fit_frozen(sdp: dict[str, Any], changes: dict[int, Change]) -> dict[str, bool]:
    freeze = Freeze()
    fit_with(sdp, 5, [freeze, Replan(changes)])
    return freeze.frozen


@pytest.mark.parametrize("sdp", [BLOCK, NEURON])
def test_what_the_user_froze_stays_frozen_on_new_holders(pool, sdp: dict[str, Any]) -> None:
    for frozen in pool(3).run(fit_frozen, sdp, {2: {"seed": 5}, 4: {"turns": 1}}):
        assert any(frozen.values())
        assert all(is_frozen == name.endswith("fc1.weight") for name, is_frozen in frozen.items())


class Groups(Callback):
    """Counts process groups after each change."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts.append(len(torch.distributed.distributed_c10d._world.pg_map))


def fit_and_count_groups() -> tuple[int, list[int], int]:
    groups = Groups()
    before = len(torch.distributed.distributed_c10d._world.pg_map)
    fit_with(BLOCK, 10, [Replan({s: {"turns": s} for s in range(1, 10)}), groups])
    return before, groups.counts, len(torch.distributed.distributed_c10d._world.pg_map)


def test_groups_do_not_pile_up(pool) -> None:
    for before, counts, after in pool(4).run(fit_and_count_groups):
        assert max(counts) - before <= 9 and after == before  # the world's and at most 2N holder sets


class Steps(Callback):
    """Changes the plan in hooks other than the start of a batch."""

    def __init__(self, hook: str, change: Change) -> None:
        self.hook, self.change = hook, change

    def _apply(self, trainer: Trainer, hook: str) -> None:
        if hook == self.hook:
            trainer.strategy.replan(changed(trainer.strategy.plan, self.change), self.change.get("masking"))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._apply(trainer, "on_train_epoch_start")

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._apply(trainer, "on_validation_epoch_end")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 4:
            self._apply(trainer, "on_train_batch_end")


def fit_in_hook(sdp: dict[str, Any], hook: str, change: Change) -> dict[str, Tensor]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = make("mlp")
    run = trainer(world, SDPStrategy(**sdp), max_epochs=1, callbacks=[Steps(hook, change)], val_check_interval=4)
    run.fit(net, loader(batches("mlp", rank, 7)), loader(batches("mlp", 0, 2)))
    return dict(net.state_dict())


@pytest.mark.parametrize("change", [{"seed": 5}, {"masking": "backward"}, {"coverage": 1.0}])
@pytest.mark.parametrize(
    ("hook", "step"),
    [
        pytest.param("on_train_epoch_start", 0, marks=pytest.mark.slow),
        ("on_validation_epoch_end", 4),
        pytest.param("on_train_batch_end", 4, marks=pytest.mark.slow),
    ],
)
def test_the_plan_can_change_in_any_hook_between_steps(pool, hook: str, step: int, change: Change) -> None:
    expected = reference_changing(3, 3, NEURON, "mlp", 7, {}, {step: change}).module.state_dict()
    for full in pool(3).run(fit_in_hook, NEURON, hook, change):
        torch.testing.assert_close(full, expected, rtol=1e-10, atol=1e-10)


class Bad(Callback):
    """Asks for what cannot be, notes the message, and trains on."""

    def __init__(self, attempts: dict[int, Any]) -> None:
        self.attempts, self.messages = attempts, []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.attempts:
            plan, masking = self.attempts[batch_idx](trainer.strategy.plan)
            with pytest.raises(ValueError) as caught:
                trainer.strategy.replan(plan, masking)
            self.messages.append(str(caught.value))


def _other_workers(plan: MaskPlan) -> Any:
    return MaskPlan(2, [(c, [0, 1]) for c in plan.components], granularity=plan.granularity), None


def _other_granularity(plan: MaskPlan) -> Any:
    return MaskPlan.build(make("mlp"), num_subnetworks=3, granularity="block"), None


def _other_components(plan: MaskPlan) -> Any:
    return MaskPlan(3, [(c, [0, 1, 2]) for c in plan.components[:-1]], granularity=plan.granularity), None


def _more_components(plan: MaskPlan) -> Any:
    held = [(c, plan.holders(c.name)) for c in plan.components]
    extra = Component("blocks.9", "neurons", (ParamSlice("blocks.9.norm.weight"),))
    return MaskPlan(3, [*held, (extra, [0, 1, 2])], granularity=plan.granularity), None


def _other_entries(plan: MaskPlan) -> Any:
    held = [(c, plan.holders(c.name)) for c in plan.components]
    first, workers = held[0]
    held[0] = Component(first.name, first.kind, first.slices[:-1]), workers
    return MaskPlan(3, held, granularity=plan.granularity), None


def _unequal(plan: MaskPlan) -> Any:
    return plan.reassigned(seed=torch.distributed.get_rank()), None


def _regime(plan: MaskPlan) -> Any:
    return plan, "sideways"


def _missing_file(plan: MaskPlan) -> Any:
    return "no/such/plan.json", None


def _rotated(plan: MaskPlan) -> Any:
    return plan.rotated(1), None


def _backward(plan: MaskPlan) -> Any:
    return plan, "backward"


ATTEMPTS = {
    0: _other_workers,
    1: _more_components,
    2: _other_granularity,
    3: _other_entries,
    4: _other_components,
    6: _unequal,
    7: _regime,
    8: _missing_file,
    9: _rotated,
}
MESSAGES = [
    "The plan is for 2 workers, but there are 3",
    "The plan has a component 'blocks.9', which the present one has not",
    "The plan is one of blocks, but neurons are held",
    "The plan has other entries in component",
    "The plan says nothing about component",
    "differs between ranks",
    "masking='sideways' is unknown",
    "plan='no/such/plan.json' cannot be read",
    "gradients are being accumulated",
]


def fit_badly(attempts: dict[int, Any], sdp: dict[str, Any], **options: Any) -> tuple[list[str], dict[str, Tensor]]:
    bad = Bad(attempts)
    net = fit_with(sdp, 12, [bad], **options)
    return bad.messages, dict(net.state_dict())


def test_what_cannot_be_is_refused_on_every_rank_and_training_goes_on(pool) -> None:
    results = pool(3).run(fit_badly, ATTEMPTS, NEURON, accumulate_grad_batches=2)
    expected = reference_changing(3, 3, NEURON, "mlp", 6, {}, {}, accumulate_grad_batches=2).module.state_dict()
    for messages, full in results:
        assert len(messages) == len(MESSAGES)
        for message, part in zip(messages, MESSAGES, strict=True):
            assert part in message
        torch.testing.assert_close(full, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("sdp", "message"),
    [
        ({"model_averaging_period": 2}, "model_averaging_period > 1 needs masking='forward'"),
        ({"eval_model": "subnetwork"}, "eval_model='subnetwork' needs masking='forward'"),
    ],
)
def test_backward_masking_is_refused_where_it_is_refused_from_the_start(
    pool, sdp: dict[str, Any], message: str
) -> None:
    for messages, _ in pool(2).run(fit_badly, {3: _backward}, {**BLOCK, **sdp}):
        assert len(messages) == 1 and message in messages[0]


def test_without_a_running_training_there_is_no_plan_to_change() -> None:
    with pytest.raises(RuntimeError, match="changes a running training"):
        SDPStrategy().replan("plan.json")
