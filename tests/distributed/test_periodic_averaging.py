"""Local steps, and parameters averaged over their holders every few of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_sdp import SDPReference, SDPStrategy
from tests.distributed.runs import WORLDS, Wire, fit_rank, plan_for, reference, trainer
from tests.distributed.test_checkpoints import fit_and_save
from tests.distributed.test_gradients import switched_batches, switching
from tests.models import batches, loader, make, same_state

BLOCK = {"coverage": 0.6, "keep_ends": 0}
NEURON = {**BLOCK, "granularity": "neuron"}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("kind", "sdp"),
    [
        ("mlp", {**BLOCK, "model_averaging_period": 3}),
        ("mlp", {**BLOCK, "model_averaging_period": 5, "average_optimizer_state": True}),
        ("gqa", {**NEURON, "model_averaging_period": 3, "average_optimizer_state": True}),
    ],
)
def test_ten_steps_equal_the_reference(pool, kind: str, sdp: dict[str, Any], world: int) -> None:
    """Ten steps with periods of three end in the middle of one: then the full model is the holders' mean."""
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    results = pool(world).run(fit_rank, sdp, kind, 10, {"blocks": 3}, **options)
    expected = reference(world, world, sdp, kind, 10, {"blocks": 3}, **options).module.state_dict()
    for result in results:
        assert same_state(result["full"], results[0]["full"])
        for name, value in expected.items():
            torch.testing.assert_close(result["full"][name], value, rtol=1e-10, atol=1e-10, msg=name)


def test_batchnorm_at_full_coverage_equals_the_reference(pool) -> None:
    sdp = {"coverage": 1.0, "model_averaging_period": 2}
    results = pool(2).run(fit_rank, sdp, "conv", 6, {"optimizer": "momentum"})
    expected = reference(2, 2, sdp, "conv", 6, {"optimizer": "momentum"}).module.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(results[0]["full"][name], value, rtol=1e-10, atol=1e-10, msg=name)


def count_sent(sdp: dict[str, Any], steps: int) -> int:
    """Elements that this rank puts into sums during training."""
    world, rank, sent = torch.distributed.get_world_size(), torch.distributed.get_rank(), []
    wire = Wire("all_reduce", lambda tensor: sent.append(tensor.numel()), "on_train_epoch_start", "on_train_epoch_end")
    run = trainer(world, SDPStrategy(**sdp), max_epochs=1, callbacks=[wire])
    run.fit(make("mlp"), loader(batches("mlp", rank, steps)))
    return sum(sent)


@pytest.mark.parametrize("sdp", [BLOCK, NEURON])
def test_the_traffic_falls_by_the_period(pool, sdp: dict[str, Any]) -> None:
    every = pool(3).run(count_sent, sdp, 12)
    for period in (3, 4):
        rarely = pool(3).run(count_sent, {**sdp, "model_averaging_period": period}, 12)
        for a, b in zip(every, rarely, strict=True):
            assert 0.9 * a / period <= b <= a / period  # without use flags and padding
    both = pool(3).run(count_sent, {**sdp, "model_averaging_period": 4, "average_optimizer_state": True}, 12)
    for a, b in zip(every, both, strict=True):
        assert 0.9 * 3 * a / 4 <= b <= 3 * a / 4  # two moments of Adam along


def fit_and_look(sdp: dict[str, Any], validate: bool) -> dict[str, Any]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net, seen = make("gqa", blocks=2), []

    class Look(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append({n: v.clone() for n, v in pl_module.state_dict().items()})

    options: dict[str, Any] = {"val_check_interval": 1} if validate else {"limit_val_batches": 0}
    run = trainer(world, SDPStrategy(**sdp), max_epochs=1, callbacks=[Look()], **options)
    run.fit(net, loader(batches("gqa", rank, 5)), loader(batches("gqa", 0, 1)))
    return {"seen": seen, "full": dict(net.state_dict())}


def test_evaluation_in_the_middle_of_a_period_sees_the_mean_and_changes_nothing(pool) -> None:
    sdp = {**NEURON, "model_averaging_period": 3}
    without, with_it = (pool(3).run(fit_and_look, sdp, validate) for validate in (False, True))
    for a, b in zip(without, with_it, strict=True):
        assert same_state(a["full"], b["full"])
        assert len(b["seen"]) == 5
        for step, seen in enumerate(b["seen"]):
            assert same_state(seen, with_it[0]["seen"][step])
            expected = reference(3, 3, sdp, "gqa", step + 1, {"blocks": 2}).module.state_dict()
            for name, value in expected.items():
                torch.testing.assert_close(seen[name], value, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("sdp", [BLOCK, NEURON])
def test_a_run_resumes_exactly_from_the_end_of_a_period(pool, tmp_path: Path, sdp: dict[str, Any]) -> None:
    """Optimizer state is averaged along: without that it is every holder's own, and only one of them is saved."""
    sdp = {**sdp, "model_averaging_period": 2, "average_optimizer_state": True}
    whole = pool(3).run(fit_and_save, str(tmp_path), "mlp", 8, None, None, **sdp)
    pool(3).run(fit_and_save, str(tmp_path), "mlp", 4, 4, None, **sdp)
    resumed = pool(3).run(fit_and_save, str(tmp_path), "mlp", 8, None, str(tmp_path / "mlp-4.ckpt"), **sdp)
    for a, b in zip(whole, resumed, strict=True):
        assert a["step"] == b["step"] == 8 and same_state(a["full"], b["full"])


def state_memory() -> tuple[int, int]:
    """Bytes of the storages of a state dict within a period, and of what the rank holds."""
    rank, seen = torch.distributed.get_rank(), []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            state = trainer.strategy.lightning_module_state_dict()
            seen.append(
                sum({v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in state.values()}.values())
            )
            seen.append(sum(p.nbytes for p in pl_module.parameters()))

    strategy = SDPStrategy(**BLOCK, model_averaging_period=3)
    trainer(2, strategy, max_epochs=1, callbacks=[Look()]).fit(make("mlp"), loader(batches("mlp", rank, 1)))
    return seen[0], seen[1]


def test_other_ranks_do_not_allocate_the_full_model_for_a_checkpoint_within_a_period(pool) -> None:
    _, (state, held) = pool(2).run(state_memory)
    assert state < 1.02 * held


def test_a_checkpoint_in_the_middle_of_a_period_has_the_mean(pool, tmp_path: Path) -> None:
    sdp = {**BLOCK, "model_averaging_period": 3}
    without = pool(2).run(fit_and_save, str(tmp_path), "mlp", 5, None, None, **sdp)
    ended = pool(2).run(fit_and_save, str(tmp_path), "mlp", 5, 4, None, **sdp)
    assert same_state(without[0]["full"], ended[0]["full"]), "saving changes nothing"
    saved = torch.load(tmp_path / "mlp-4.ckpt", weights_only=True)["state_dict"]
    expected = pool(2).run(fit_and_save, str(tmp_path), "mlp", 4, None, None, **sdp)[0]["full"]
    assert same_state(saved, expected)


def fit_switching(sdp: dict[str, Any], pattern: str) -> dict[str, Any]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = switching()
    trainer(world, SDPStrategy(**sdp), max_epochs=1).fit(net, loader(switched_batches(rank, 8, pattern)))
    return dict(net.state_dict())


@pytest.mark.parametrize("pattern", ["only rank 0", "by rank and step"])
def test_state_that_only_some_ranks_have_is_averaged_without_waiting_for_the_others(pool, pattern: str) -> None:
    sdp = {"coverage": 1.0, "model_averaging_period": 2, "average_optimizer_state": True}
    results = pool(3).run(fit_switching, sdp, pattern)
    net = switching()
    options = {"model_averaging_period": 2, "average_optimizer_state": True}
    ref = SDPReference(net, plan_for(net, 3, sdp), net.configure_optimizers(), **options)
    data = [switched_batches(rank, 8, pattern) for rank in range(3)]
    for step in range(8):
        ref.step([[own[step]] for own in data])
    for result in results:
        for name, value in net.state_dict().items():
            torch.testing.assert_close(result[name], value, rtol=1e-10, atol=1e-10, msg=name)
