"""Backward masking: full forward, masked gradients, and weights that are equal everywhere after every step."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_sdp import SDPStrategy
from tests.distributed.runs import WORLDS, Wire, reference, trainer
from tests.distributed.test_checkpoints import fit_and_save
from tests.models import Net, batches, loader, make, same_state

BACKWARD = {"masking": "backward", "keep_ends": 0}
NEURON = {**BACKWARD, "granularity": "neuron"}


class Hashes(Callback):
    """A hash of all weights after every batch, and what the rank trains."""

    def __init__(self) -> None:
        self.hashes: list[str] = []
        self.trained = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        weights = b"".join(p.detach().numpy().tobytes() for p in pl_module.parameters())
        self.hashes.append(hashlib.sha256(weights).hexdigest())
        groups = trainer.optimizers[0].param_groups
        states = trainer.optimizers[0].state
        parameters = [p for group in groups for p in group["params"]]
        tensors = [v for p in parameters for v in [p.grad, *states[p].values()] if v is not None and v.dim()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        self.trained = sum(storages.values())


def fit(sdp: dict[str, Any], kind: str, steps: int, model: dict[str, Any], **options: Any) -> dict[str, Any]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net, hashes = make(kind, **model), Hashes()
    strategy = SDPStrategy(**sdp)
    classes = [type(m) for m in net.modules()]
    flags = [p.requires_grad for p in net.parameters()]
    run = trainer(world, strategy, max_epochs=1, callbacks=[hashes], **options)
    run.fit(net, loader(batches(kind, rank, steps * run.accumulate_grad_batches)))
    assert [type(m) for m in net.modules()] == classes
    assert [p.requires_grad for p in net.parameters()] == flags
    plan = strategy.plan
    assert plan is not None and plan.sizes is not None and plan.shared_size is not None
    held = plan.shared_size + sum(
        size for c, size in zip(plan.components, plan.sizes, strict=True) if rank in plan.holders(c.name)
    )
    return {"full": dict(net.state_dict()), "hashes": hashes.hashes, "trained": hashes.trained, "held": held}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("kind", "sdp"),
    [("mlp", BACKWARD), ("mlp", NEURON), ("gqa", NEURON), ("attention", NEURON), ("conv", BACKWARD), ("conv", NEURON)],
)
def test_ten_steps_equal_the_reference(pool, kind: str, sdp: dict[str, Any], world: int) -> None:
    sdp = {**sdp, "coverage": 0.6}
    model = {"blocks": 3}
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    results = pool(world).run(fit, sdp, kind, 10, model, **options)
    expected = reference(world, world, sdp, kind, 10, model, **options).module.state_dict()
    for rank, result in enumerate(results):
        assert result["hashes"] == results[0]["hashes"]
        assert list(result["full"]) == list(expected)
        for name, value in expected.items():
            # Every rank has seen its own last batch; what is saved are rank 0's statistics, as under DDP.
            if rank == 0 or not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
                torch.testing.assert_close(result["full"][name], value, rtol=1e-10, atol=1e-10, msg=name)
        # Gradients and AdamW's two states.
        assert abs(result["trained"] / (3 * 8 * result["held"]) - 1) < 0.02


@pytest.mark.parametrize("sdp", [BACKWARD, NEURON])
def test_an_optimizer_with_state_from_the_start_equals_the_reference(pool, sdp: dict[str, Any]) -> None:
    sdp, model = {**sdp, "coverage": 0.5}, {"optimizer": "adagrad", "blocks": 2}
    expected = reference(3, 3, sdp, "gqa", 4, model).module.state_dict()
    for result in pool(3).run(fit, sdp, "gqa", 4, model):
        for name, value in expected.items():
            torch.testing.assert_close(result["full"][name], value, rtol=1e-10, atol=1e-10, msg=name)


def direct_gradients(sdp: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Averaged gradients of one step, and those of autograd on the full model with this rank's data."""
    rank = torch.distributed.get_rank()
    net = make("gqa", blocks=2, optimizer="sgd")
    (batch,) = batches("gqa", rank, 1)
    net.training_step(batch, 0).backward()
    full = {n: p.grad.clone() for n, p in net.named_parameters()}  # type: ignore[union-attr]
    net.zero_grad()
    strategy, seen = SDPStrategy(**sdp), {}

    class Look(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
            trained = strategy._run.mask.trained  # type: ignore[union-attr]
            seen.update({n: p.grad.clone() for n, p in trained.items() if p.grad is not None})

    trainer(3, strategy, max_epochs=1, callbacks=[Look()]).fit(net, loader([batch]))
    masks = {n: strategy.plan.element_mask(n, rank, g.shape) for n, g in full.items()}  # type: ignore[union-attr]
    return {"full": full, "masks": masks}, seen


@pytest.mark.parametrize("sdp", [BACKWARD, NEURON])
def test_gradients_are_those_of_the_full_model_averaged_over_holders(pool, sdp: dict[str, Any]) -> None:
    results = pool(3).run(direct_gradients, {**sdp, "coverage": 0.67})
    for rank, (own, averaged) in enumerate(results):
        for name, mask in own["masks"].items():
            masks = torch.stack([other["masks"][name] for other, _ in results]).double()
            grads = torch.stack([other["full"][name] for other, _ in results])
            expected = ((masks * grads).sum(0) / masks.sum(0))[mask]
            assert (name in averaged) == bool(mask.any()), f"{name} on rank {rank}"
            if name in averaged:
                torch.testing.assert_close(averaged[name].flatten(), expected, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("sdp", [BACKWARD, NEURON])
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(pool, tmp_path: Path, sdp: dict[str, Any]) -> None:
    whole = pool(3).run(fit_and_save, str(tmp_path), "gqa", 8, None, None, **sdp)
    pool(3).run(fit_and_save, str(tmp_path), "gqa", 4, 4, None, **sdp)
    resumed = pool(3).run(fit_and_save, str(tmp_path), "gqa", 8, None, str(tmp_path / "gqa-4.ckpt"), **sdp)
    for a, b in zip(whole, resumed, strict=True):
        assert a["step"] == b["step"] == 8 and same_state(a["full"], b["full"])
    saved = torch.load(tmp_path / "gqa-4.ckpt", weights_only=True)
    states = saved["optimizer_states"][0]["state"].values()
    shapes = sorted(tuple(p.shape) for p in make("gqa").parameters())
    assert sorted(tuple(state["exp_avg"].shape) for state in states) == shapes


@pytest.mark.parametrize(("first", "then"), [("forward", "backward"), ("backward", "forward")])
def test_a_run_goes_on_in_the_other_regime(pool, tmp_path: Path, first: str, then: str) -> None:
    """At full coverage the regimes do the same."""
    sdp = {"coverage": 1.0, "keep_ends": 0}
    whole = pool(2).run(fit_and_save, str(tmp_path), "mlp", 8, None, None, masking=first, **sdp)
    pool(2).run(fit_and_save, str(tmp_path), "mlp", 4, 4, None, masking=first, **sdp)
    path = str(tmp_path / "mlp-4.ckpt")
    resumed = pool(2).run(fit_and_save, str(tmp_path), "mlp", 8, None, path, masking=then, **sdp)
    for a, b in zip(whole, resumed, strict=True):
        assert same_state(a["full"], b["full"])


class Thawing(Net):
    """The second block is frozen and thaws, then the first is frozen; weights are changed by hand once."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.blocks[1].requires_grad_(True)
            with torch.no_grad():
                self.blocks[0].fc1.weight.mul_(0.5)
            for parameter in self.parameters():
                parameter.grad = torch.ones_like(parameter)  # of a backward pass of the user's own
        if batch_idx == 3:
            self.blocks[0].requires_grad_(False)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        mask = self.trainer.strategy._run.mask
        for name, parameter in {} if mask is None else mask.missing.items():
            assert not parameter.requires_grad and parameter.grad is None, name

    def configure_optimizers(self) -> Any:
        for part in (self.blocks[0].norm, self.blocks[1]):
            part.requires_grad_(False)
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.5)


def fit_thawing(sdp: dict[str, Any]) -> list[dict[str, Any]]:
    world, ended = torch.distributed.get_world_size(), []
    for strategy in (SDPStrategy(**sdp), SDPStrategy(coverage=1.0)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            net = Thawing("mlp", blocks=2).double()
        data = batches("mlp", 0, 4)  # the same on all ranks: then every coverage comes to the same
        trainer(world, strategy, max_epochs=1).fit(net, loader(data))
        assert all(p.requires_grad for p in net.blocks[1].parameters())
        assert not any(p.requires_grad for p in net.blocks[0].norm.parameters())
        ended.append(dict(net.state_dict()))
    return ended


@pytest.mark.parametrize("sdp", [BACKWARD, NEURON])
def test_what_the_user_freezes_thaws_and_changes_counts(pool, sdp: dict[str, Any]) -> None:
    for masked, whole in pool(2).run(fit_thawing, {**sdp, "coverage": 0.5}):
        for name, value in whole.items():
            torch.testing.assert_close(masked[name], value, rtol=1e-12, atol=1e-12, msg=name)


def fit_frozen(sdp: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = make("gqa", blocks=2)
    net.blocks[0].requires_grad_(False)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    trainer(world, SDPStrategy(**sdp), max_epochs=1).fit(net, loader(batches("gqa", rank, 2)))
    return before, dict(net.state_dict())


@pytest.mark.parametrize("sdp", [BACKWARD, NEURON])
def test_what_is_frozen_before_the_run_stays(pool, sdp: dict[str, Any]) -> None:
    for before, after in pool(2).run(fit_frozen, {**sdp, "coverage": 0.5}):
        for name, value in before.items():
            assert torch.equal(after[name], value) == name.startswith("blocks.0."), name


def count_sent(sdp: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Elements that each rank broadcasts after one step, and those of the components of which it is the source."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    strategy, sent, planned = SDPStrategy(**sdp), [0] * world, [0] * world

    def count(tensor: torch.Tensor, source: int) -> None:
        sent[source] += tensor.numel()

    wire = Wire("broadcast", count, "on_before_optimizer_step", "on_train_batch_end")
    trainer(world, strategy, max_epochs=1, callbacks=[wire]).fit(make("mlp"), loader(batches("mlp", rank, 1)))
    plan = strategy.plan
    assert plan is not None and plan.sizes is not None
    for component, size in zip(plan.components, plan.sizes, strict=True):
        if len(plan.holders(component.name)) < world:
            planned[plan.sources[component.name]] += size
    return sent, planned


@pytest.mark.parametrize("sdp", [BACKWARD, NEURON])
def test_the_planned_sources_send_what_others_lack(pool, sdp: dict[str, Any]) -> None:
    for sent, planned in pool(3).run(count_sent, {**sdp, "coverage": 0.67}):
        assert sent == planned and all(planned)


class Penalized(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + sum(p.pow(2).sum() for p in self.parameters())


def fit_penalized() -> None:
    net = Penalized("mlp", blocks=2).double()
    strategy = SDPStrategy(**NEURON)
    trainer(2, strategy, max_epochs=1).fit(net, loader(batches("mlp", torch.distributed.get_rank(), 1)))


def test_a_penalty_on_parameters_that_are_held_in_part_is_refused(pool) -> None:
    for error in pool(2).run_expecting_errors(fit_penalized):
        assert error is not None and "other than through the forward of its module" in error[1]
