"""Plans and regimes that change in the midst of what users do: evaluation, several optimizers, resuming, refusals."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor

from lightning_sdp import MaskingSchedule, MaskPlan, SDPReference, SDPStrategy
from tests.distributed.runs import plan_for, trainer
from tests.distributed.test_gradients import switched_batches, switching
from tests.distributed.test_masking_schedule import Seen, fit_scheduled
from tests.distributed.test_replan import BLOCK, NEURON, Bad, changed, check, fit_with
from tests.models import SHAPES, Net, batches, loader, make, same_state

pytestmark = pytest.mark.slow


def size(module: Any) -> int:
    return sum(p.numel() for p in module.parameters())


class At(Callback):
    """Calls a function before one step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act, self.out = step, act, None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.step:
            self.out = self.act(trainer, pl_module)


def replan_to(change: dict[str, Any]) -> Any:
    return lambda t, m: t.strategy.replan(changed(t.strategy.plan, change), change.get("masking"))


class Validated(Callback):
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.sizes.append(size(pl_module))


def fit_and_validate(sdp: dict[str, Any], change: dict[str, Any]) -> list[int]:
    world, rank, seen = torch.distributed.get_world_size(), torch.distributed.get_rank(), Validated()
    run = trainer(world, SDPStrategy(**sdp), max_epochs=1, callbacks=[At(1, replan_to(change)), seen])
    run.fit(make("mlp"), loader(batches("mlp", rank, 3)), loader(batches("mlp", 0, 1)))
    return seen.sizes


def test_validation_after_a_change_to_forward_masking_sees_the_full_model(pool) -> None:
    sdp, change = {**BLOCK, "masking": "backward"}, {"masking": "forward"}
    assert pool(3).run(fit_and_validate, sdp, change) == [[size(make("mlp"))]] * 3


def _unequal_regime(plan: MaskPlan) -> Any:
    return plan, ("forward", "backward")[torch.distributed.get_rank() % 2]


def fit_unequal() -> list[str]:
    bad = Bad({1: _unequal_regime})
    fit_with(NEURON, 3, [bad])
    return bad.messages


def test_different_regimes_on_ranks_are_refused(pool) -> None:
    for messages in pool(3).run(fit_unequal):
        assert len(messages) == 1 and "differs between ranks" in messages[0]


def fit_in_full_model(change: dict[str, Any]) -> tuple[int, int, dict[str, Tensor]]:
    def act(t: Any, m: Any) -> Any:
        with t.strategy.full_model() as full:
            replan_to(change)(t, m)
            inside = size(full), {n: p.detach().clone() for n, p in full.named_parameters()}
        return inside, size(m)

    at = At(2, act)
    fit_with(NEURON, 3, [at])
    (inside, values), after = at.out
    return inside, after, values


@pytest.mark.parametrize(
    "change", [{"seed": 5}, pytest.param({"coverage": 1.0}, marks=pytest.mark.slow), {"masking": "backward"}]
)
def test_the_full_model_stays_open_for_its_user(pool, change: dict[str, Any]) -> None:
    results = pool(3).run(fit_in_full_model, change)
    for inside, after, values in results:
        assert inside == size(make("mlp")) and (after < inside) == (change == {"seed": 5})
        assert same_state(values, results[0][2])


class InHook(Callback):
    def __init__(self, hook: str, change: dict[str, Any]) -> None:
        self.hook, self.change = hook, change

    def _go(self, trainer: Any, hook: str) -> None:
        if hook == self.hook and trainer.global_step == 4:
            replan_to(self.change)(trainer, None)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._go(trainer, "open")

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._go(trainer, "closed")


def fit_open_or_closed(sdp: dict[str, Any], hook: str, change: dict[str, Any]) -> dict[str, Tensor]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = make("conv", optimizer="momentum", blocks=3)
    callbacks = [InHook(hook, change)]
    run = trainer(world, SDPStrategy(**sdp), max_epochs=1, callbacks=callbacks, val_check_interval=4)
    run.fit(net, loader(batches("conv", rank, 7)), loader(batches("conv", 0, 1)))
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("period", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_change_while_the_full_model_is_open_is_one_while_it_is_closed(pool, period: int) -> None:
    sdp = {**BLOCK, "model_averaging_period": period, "recalibrate_batchnorm": 0}
    a, b = (pool(3).run(fit_open_or_closed, sdp, hook, {"seed": 5}) for hook in ("open", "closed"))
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def fit_with_same_plan(again: bool) -> dict[str, Tensor]:
    callbacks = [At(4, lambda t, m: t.strategy.replan(t.strategy.plan))] if again else []
    net = fit_with({**NEURON, "model_averaging_period": 3}, 7, callbacks, "gqa")
    return dict(net.state_dict())


def test_the_present_plan_changes_nothing_within_a_period(pool) -> None:
    for one, other in zip(pool(3).run(fit_with_same_plan, True), pool(3).run(fit_with_same_plan, False), strict=True):
        assert same_state(one, other)


class Odd(Net):
    def __init__(self, name: str) -> None:
        super().__init__("mlp", blocks=3)
        self.name = name

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.name)(self.parameters(), lr=0.01)


def refused(case: str) -> list[str]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    attempt = {1: lambda plan: (plan.reassigned(coverage=0.5), "forward")}
    sdp, net, callbacks = {**BLOCK, "coverage": 1.0}, make("mlp", blocks=3), []
    if case == "averages":
        sdp, callbacks = {**BLOCK, "masking": "backward"}, [StochasticWeightAveraging(1e-2)]
    if case == "elementwise":
        sdp, net = {**NEURON, "coverage": 1.0}, Odd("Adafactor").double()
    if case == "separate":
        net = Odd("LBFGS").double()
    bad = Bad(attempt)
    run = trainer(world, SDPStrategy(**sdp), max_epochs=1, callbacks=[*callbacks, bad])
    run.fit(net, loader(batches("mlp", rank, 3)))
    return bad.messages


REFUSED = {
    "averages": "pairs parameters by their positions",
    "elementwise": "updates a tensor as a whole",
    "separate": "LBFGS updates all parameters together",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_with_the_new_plan_is_refused(pool, case: str) -> None:
    for messages in pool(2).run(refused, case):
        assert len(messages) == 1 and REFUSED[case] in messages[0]


def fit_then_look(sdp: dict[str, Any], changes: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    def act(t: Any, m: Any) -> Any:
        seen = []
        for change in [None, *changes]:
            if change is not None:
                replan_to(change)(t, m)
            with t.strategy.full_model() as full:
                seen.append({n: b.clone() for n, b in full.named_buffers() if "running" in n})
        return seen

    at = At(3, act)
    fit_with(sdp, 4, [at], "conv")
    return at.out


@pytest.mark.parametrize("sdp", [pytest.param(BLOCK, marks=pytest.mark.slow), NEURON, {**BLOCK, "coverage": 1.0}])
def test_changes_without_training_keep_the_statistics_of_the_full_model(pool, sdp: dict[str, Any]) -> None:
    changes = [{"seed": 5, "masking": "forward"}, {"seed": 6}, {"turns": 1}, {"coverage": 1.0}]
    for first, *others in pool(3).run(fit_then_look, sdp, changes):
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=False)


class Halves(Net):
    def __init__(self) -> None:
        super().__init__("mlp", blocks=4)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        first = [p for n, p in named if n.endswith("weight")]
        return [
            torch.optim.AdamW(first, lr=0.01, eps=1e-3),
            torch.optim.SGD([p for n, p in named if not n.endswith("weight")], lr=0.1, momentum=0.9),
        ]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))
        for optimizer in self.optimizers():
            optimizer.step()


def fit_halves(sdp: dict[str, Any], changes: dict[int, dict[str, Any]]) -> list[Any]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    states: list[Any] = []

    def look(t: Any, m: Any) -> None:
        states.extend(deepcopy(t.strategy.optimizer_state(o)) for o in t.optimizers)

    acts = [At(step, replan_to(change)) for step, change in changes.items()] + [At(5, look)]
    net = Halves().double()
    torch.manual_seed(7)
    run = trainer(world, SDPStrategy(**sdp), max_epochs=1, callbacks=acts)
    run.fit(net, loader(batches("mlp", rank, 6)))
    return states


@pytest.mark.parametrize("sdp", [pytest.param(BLOCK, marks=pytest.mark.slow), NEURON])
def test_states_of_two_optimizers_stay_apart(pool, sdp: dict[str, Any]) -> None:
    adam, sgd = pool(3).run(fit_halves, sdp, {2: {"seed": 5}, 4: {"turns": 1}})[0]
    assert all(
        state.keys() == {"step", "exp_avg", "exp_avg_sq"} and state["step"] == 5 for state in adam["state"].values()
    )
    assert all(state.keys() == {"momentum_buffer"} for state in sgd["state"].values())
    named = dict(Halves().named_parameters())
    sizes = (
        [p.shape for n, p in named.items() if n.endswith("weight")],
        [p.shape for n, p in named.items() if not n.endswith("weight")],
    )
    assert [s["exp_avg"].shape for s in adam["state"].values()] == sizes[0]
    assert [s["momentum_buffer"].shape for s in sgd["state"].values()] == sizes[1]


# schedule: entries with plans, and what later entries take over


def test_entries_with_a_plan_and_after_one(pool, tmp_path) -> None:
    base = plan_for(make("mlp"), 3, BLOCK)
    given = base.reassigned(coverage=0.8, seed=3)
    path = tmp_path / "plan.json"
    given.save(path)
    entries = [
        {"step": 1, "seed": 4}, {"step": 2, "plan": str(path)}, {"step": 3, "masking": "backward"},
        {"step": 4, "coverage": 0.7}, {"step": 5, "plan": given}, {"step": 6, "coverage": 0.5, "masking": "forward"},
    ]  # fmt: skip
    seen = pool(3).run(fit_scheduled, BLOCK, entries, 7)[0]["seen"]
    plans = [
        base, base.reassigned(coverage=0.5, seed=4), given, given,
        base.reassigned(coverage=0.7), given, base.reassigned(coverage=0.5),
    ]  # fmt: skip
    assert [MaskPlan.from_json(text) for text in seen.plans] == plans
    assert seen.maskings == ["forward"] * 3 + ["backward"] * 3 + ["forward"]


def test_entries_keep_the_balance_of_the_strategy(pool) -> None:
    sdp = {**BLOCK, "balance": "count"}
    plans = pool(2).run(fit_scheduled, sdp, [{"step": 1, "coverage": 0.6, "seed": 2}], 2)[0]["seen"].plans
    base = plan_for(make("mlp"), 2, sdp)
    assert base.reassigned(coverage=0.6, seed=2, balance="count") != base.reassigned(coverage=0.6, seed=2)
    assert plans[1] == base.reassigned(coverage=0.6, seed=2, balance="count").to_json()


def fit_twice(entries: list[dict[str, Any]]) -> list[list[str]]:
    world, rank, schedule, out = (
        torch.distributed.get_world_size(),
        torch.distributed.get_rank(),
        MaskingSchedule(entries),
        [],
    )
    for _ in range(2):
        seen = Seen()
        run = trainer(world, SDPStrategy(**BLOCK), max_epochs=1, callbacks=[schedule, seen])
        run.fit(make("mlp"), loader(batches("mlp", rank, 5)))
        out.append(seen.plans)
    return out


@pytest.mark.parametrize(
    "entry", [pytest.param({"coverage": 1.0}, marks=pytest.mark.slow), {"rotate_every_n_steps": 2}]
)
def test_a_schedule_serves_a_second_fit(pool, entry: dict[str, Any]) -> None:
    first, second = pool(2).run(fit_twice, [{"step": 1, **entry}])[0]
    assert first == second and len(set(first)) > 1


def fit_different_tables() -> str:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    entries = [{"step": 1, "plan": "no/such.json"} if rank else {"step": 1, "coverage": 0.7}]
    run = trainer(world, SDPStrategy(**BLOCK), max_epochs=1, callbacks=[MaskingSchedule(entries)])
    with pytest.raises(ValueError) as caught:
        run.fit(make("mlp"), loader(batches("mlp", rank, 3)))
    return str(caught.value)


def test_a_table_that_one_rank_cannot_honor_is_refused_on_all(pool) -> None:
    assert all("cannot be read" in text for text in pool(2).run(fit_different_tables))


def fit_by_hand_and_table() -> list[str]:
    world, rank, seen = torch.distributed.get_world_size(), torch.distributed.get_rank(), Seen()
    by_hand = At(1, lambda t, m: t.strategy.replan(t.strategy.plan, "backward"))
    schedule = MaskingSchedule([{"step": 3, "coverage": 1.0}])
    run = trainer(world, SDPStrategy(**BLOCK), max_epochs=1, callbacks=[by_hand, schedule, seen])
    run.fit(make("mlp"), loader(batches("mlp", rank, 5)))
    return seen.maskings


def test_an_entry_leaves_what_it_does_not_mention_to_the_strategys_arguments(pool) -> None:
    assert pool(2).run(fit_by_hand_and_table)[0] == ["forward", "backward", "backward", "forward", "forward"]


def fit_regime(path: str, turns: int, steps: int, save: bool, resume: str | None, **sdp: Any) -> Seen:
    """Goes over to backward masking, and a rotated plan, in a run that is saved."""
    world, rank, seen = torch.distributed.get_world_size(), torch.distributed.get_rank(), Seen()
    callbacks: list[Any] = [seen]
    if save:
        callbacks += [At(1, lambda t, m: t.strategy.replan(t.strategy.plan.rotated(turns), "backward"))]
        callbacks += [ModelCheckpoint(path, filename="regime", every_n_train_steps=steps)]
    options: dict[str, Any] = {"ckpt_path": resume, "weights_only": False} if resume else {}
    run = trainer(
        world, SDPStrategy(**sdp), max_steps=steps, max_epochs=-1, callbacks=callbacks, enable_checkpointing=save
    )
    run.fit(make("mlp"), loader(batches("mlp", rank, 4)), **options)
    return seen


def test_a_regime_that_was_changed_by_hand_is_resumed(pool, tmp_path) -> None:
    pool(2).run(fit_regime, str(tmp_path), 0, 3, True, None, **BLOCK)
    path = str(tmp_path / "regime.ckpt")
    assert pool(2).run(fit_regime, "", 0, 5, False, path, **BLOCK)[0].maskings == ["backward"] * 2


def test_a_run_that_starts_with_another_regime_begins_anew(pool, tmp_path) -> None:
    pool(2).run(fit_regime, str(tmp_path), 1, 3, True, None, **BLOCK)
    backward = {**BLOCK, "masking": "backward"}
    seen = pool(2).run(fit_regime, "", 1, 5, False, str(tmp_path / "regime.ckpt"), **backward)[0]
    assert seen.plans == [plan_for(make("mlp"), 2, BLOCK).to_json()] * 2


def fit_and_leave(sdp: dict[str, Any]) -> dict[str, Any]:
    def act(t: Any, m: Any) -> Any:
        before = {n: b.clone() for n, b in m.named_buffers() if "running" in n}
        replan_to({"seed": 5, "masking": "forward"})(t, m)
        grads = [n for n, p in m.named_parameters() if p.grad is not None]
        with t.strategy.full_model() as full:
            after = {n: b.clone() for n, b in full.named_buffers() if "running" in n}
        groups = t.strategy._run.groups
        return {"before": before, "after": after, "grads": grads, "timeouts": (groups.timeout, t.strategy._timeout)}

    at = At(3, act)
    fit_with(sdp, 4, [at], "conv")
    return at.out


@pytest.mark.parametrize("sdp", [{**BLOCK, "coverage": 1.0}, {**NEURON, "masking": "backward"}, NEURON])
def test_what_a_rank_has_right_after_a_change(pool, sdp: dict[str, Any]) -> None:
    results = pool(3).run(fit_and_leave, sdp)
    for result in results:
        assert not result["grads"] and result["timeouts"][0] == result["timeouts"][1]
        assert same_state(result["after"], results[0]["after"])
        if sdp != NEURON:
            assert same_state(result["after"], results[0]["before"]), "rank 0's, as under DDP"


@pytest.mark.slow
@pytest.mark.parametrize("sdp", [BLOCK, NEURON])
def test_batchnorm_with_two_ranks_per_worker_equals_the_reference(pool, sdp: dict[str, Any]) -> None:
    changes = {3: {"seed": 5}, 5: {"coverage": 1.0}, 7: {"turns": 1}}
    check(pool, 4, 2, sdp, "conv", changes, model={"optimizer": "momentum", "blocks": 3})


@pytest.mark.slow
@pytest.mark.parametrize("sdp", [BLOCK, NEURON])
def test_local_steps_with_two_ranks_per_worker_equal_the_reference(pool, sdp: dict[str, Any]) -> None:
    sdp = {**sdp, "model_averaging_period": 3}
    check(pool, 4, 2, sdp, "gqa", {4: {"seed": 5}, 6: {"coverage": 1.0}}, model={"blocks": 3})


@pytest.mark.parametrize("sdp", [{**BLOCK, "coverage": 1.0}, {**NEURON, "coverage": 1.0, "masking": "backward"}])
def test_a_run_that_begins_with_full_coverage_equals_the_reference(pool, sdp: dict[str, Any]) -> None:
    check(pool, 3, 3, sdp, "mlp", {3: {"seed": 5}}, steps=6, gradient_clip_val=0.05)


class OverEpochs(Net):
    """Takes a step after every other batch, counted over epochs."""

    def __init__(self) -> None:
        super().__init__("mlp", blocks=4)
        self.automatic_optimization, self.count = False, 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))
        self.count += 1
        if self.count % 2 == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()


def fit_over_epochs() -> list[str]:
    world, rank, seen = torch.distributed.get_world_size(), torch.distributed.get_rank(), Seen()
    schedule = MaskingSchedule([{"epoch": 1, "masking": "backward"}])
    run = trainer(world, SDPStrategy(**BLOCK), max_epochs=2, callbacks=[schedule, seen])
    run.fit(OverEpochs().double(), loader(batches("mlp", rank, 3)))
    return seen.maskings


def test_an_entry_waits_for_gradients_of_the_epoch_before(pool) -> None:
    assert pool(2).run(fit_over_epochs)[0] == ["forward"] * 4 + ["backward"] * 2


class MidValidation(Callback):
    """Goes over to forward masking in the midst of a validation."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step == 2:
            trainer.strategy.replan(trainer.strategy.plan, "forward")

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.sizes.append(size(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.sizes.append(-size(pl_module))


def fit_mid_validation() -> list[int]:
    world, rank, seen = torch.distributed.get_world_size(), torch.distributed.get_rank(), MidValidation()
    sdp = {**NEURON, "masking": "backward"}
    run = trainer(world, SDPStrategy(**sdp), max_epochs=1, callbacks=[seen], val_check_interval=2)
    run.fit(make("mlp"), loader(batches("mlp", rank, 3)), loader(batches("mlp", 0, 2)))
    return seen.sizes


def test_a_validation_that_began_with_the_full_model_ends_with_it(pool) -> None:
    full = size(make("mlp"))
    for sizes in pool(3).run(fit_mid_validation):
        assert sizes[:4] == [-full, -full, full, full] and -full < sizes[4] < 0


def resume_refused(path: str, **sdp: Any) -> str:
    world = torch.distributed.get_world_size()
    run = trainer(world, SDPStrategy(**sdp), max_steps=5, max_epochs=-1)
    with pytest.raises(ValueError) as caught:
        run.fit(make("mlp"), loader(batches("mlp", 0, 4)), ckpt_path=path, weights_only=False)
    return str(caught.value)


@pytest.mark.parametrize(
    "options", [{"model_averaging_period": 4}, pytest.param({"eval_model": "subnetwork"}, marks=pytest.mark.slow)]
)
def test_options_that_exclude_a_resumed_regime_are_refused(pool, tmp_path, options: dict[str, Any]) -> None:
    pool(2).run(fit_regime, str(tmp_path), 0, 3, True, None, **BLOCK)
    for text in pool(2).run(resume_refused, str(tmp_path / "regime.ckpt"), **{**BLOCK, **options}):
        assert "needs masking='forward'" in text


def fit_with_unused_layers(sdp: dict[str, Any]) -> dict[str, Tensor]:
    world, rank, net = torch.distributed.get_world_size(), torch.distributed.get_rank(), switching()
    callbacks = [At(3, replan_to({"seed": 5}))]
    run = trainer(world, SDPStrategy(**sdp), max_epochs=1, callbacks=callbacks)
    run.fit(net, loader(switched_batches(rank, 8, "only rank 0")))
    return dict(net.state_dict())


@pytest.mark.parametrize(
    "sdp", [pytest.param({**BLOCK, "coverage": 0.6}, marks=pytest.mark.slow), {**NEURON, "coverage": 0.6}]
)
def test_state_that_a_rank_has_not_needed_yet_comes_from_the_source(pool, sdp: dict[str, Any]) -> None:
    sdp = {**sdp, "model_averaging_period": 2}
    results = pool(3).run(fit_with_unused_layers, sdp)
    net = switching()
    plan = plan_for(net, 3, sdp, torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64))
    ref = SDPReference(net, plan, net.configure_optimizers(), model_averaging_period=2)
    data = [switched_batches(rank, 8, "only rank 0") for rank in range(3)]
    for step in range(8):
        if step == 3:
            ref.replan(changed(plan, {"seed": 5}))
        ref.step([[own[step]] for own in data])
    for full in results:
        torch.testing.assert_close(full, net.state_dict(), rtol=1e-10, atol=1e-10)


class Unequal(Halves):
    """One optimizer steps after every batch, the other after every second; gradients may come by hand."""

    def __init__(self, raw: bool, probes: bool) -> None:
        super().__init__()
        self.raw, self.probes = raw, probes

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        loss.backward() if self.raw else self.manual_backward(loss)
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            second.step()
            second.zero_grad()
        if self.probes and batch_idx % 2:
            self.manual_backward(self(batch[0]).square().mean())
            self.zero_grad()


def fit_unequal_steps(raw: bool, probes: bool) -> list[str]:
    world, rank, seen = torch.distributed.get_world_size(), torch.distributed.get_rank(), Seen()
    schedule = MaskingSchedule([{"step": 4, "masking": "backward"}])  # global_step counts both optimizers' steps
    run = trainer(world, SDPStrategy(**{**BLOCK, "coverage": 1.0}), max_epochs=1, callbacks=[schedule, seen])
    run.fit(Unequal(raw, probes).double(), loader(batches("mlp", rank, 6)))
    return seen.maskings


@pytest.mark.parametrize(("raw", "probes"), [(False, False), (True, False), (False, True)])
def test_an_entry_waits_for_the_optimizer_that_steps_rarely(pool, raw: bool, probes: bool) -> None:
    assert pool(2).run(fit_unequal_steps, raw, probes)[0] == ["forward"] * 4 + ["backward"] * 2


class InStep(Callback):
    """Asks for another plan between forward and backward pass."""

    def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            with pytest.raises(ValueError) as caught:
                trainer.strategy.replan(trainer.strategy.plan.rotated(1))
            self.message = str(caught.value)


def fit_in_step() -> str:
    callback = InStep()
    fit_with(NEURON, 3, [callback])
    return callback.message


def test_a_change_between_forward_and_backward_is_refused(pool) -> None:
    assert all("a step is under way" in message for message in pool(2).run(fit_in_step))


class KnowsItsWidth(Net):
    """Its forward knows how many neurons each block has."""

    def __init__(self) -> None:
        super().__init__("mlp", blocks=2)
        self.widths = [block.fc1.out_features for block in self.blocks]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, width in zip(self.blocks, self.widths, strict=True):
            hidden = torch.nn.functional.gelu(block.fc1(block.norm(x)))
            if hidden.shape[-1] != width:
                raise RuntimeError(f"{hidden.shape[-1]} neurons are not {width}")
            x = x + block.fc2(hidden)
        return self.head(x)


def fit_cut_late() -> None:
    net = KnowsItsWidth().double()
    net.example_input_array = torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64)
    fit = At(1, replan_to({"coverage": 0.5}))
    run = trainer(2, SDPStrategy(**{**NEURON, "coverage": 1.0}), max_epochs=1, callbacks=[fit])
    run.fit(net, loader(batches("mlp", torch.distributed.get_rank(), 3)))


def test_a_model_that_cannot_be_cut_is_named_when_it_is_cut(pool) -> None:
    for error in pool(2).run_expecting_errors(fit_cut_late):
        assert error is not None and error[0] == "ValueError" and "once its neurons are cut" in error[1]
