"""Checkpoints are those of a plain run, and a resumed run goes on exactly."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_sdp import MaskPlan, SDPReference, SDPStrategy
from tests.distributed.runs import trainer
from tests.models import Net, batches, loader, make, same_state

ROOT = Path(__file__).parents[2]


def world_and_rank() -> tuple[int, int]:
    return torch.distributed.get_world_size(), torch.distributed.get_rank()


class Scheduled(Net):
    """With a schedule that steps every batch."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def scheduled(kind: str, optimizer: str = "adamw") -> Scheduled:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Scheduled(kind, groups=True, optimizer=optimizer).double()


def fit_and_save(
    directory: str, kind: str, steps: int, save_at: int | None, resume: str | None, per_epoch: int = 4, **sdp: Any
) -> dict[str, Any]:
    """Fits up to a step and saves with ModelCheckpoint at one."""
    world, rank = world_and_rank()
    net = scheduled(kind)
    callbacks: list[Callback] = []
    if save_at is not None:
        name = f"{kind}-{save_at}"
        callbacks = [ModelCheckpoint(directory, filename=name, every_n_train_steps=save_at, save_top_k=1, monitor=None)]
    strategy = SDPStrategy(**{"coverage": 0.5, **sdp})
    run = trainer(
        world, strategy, max_steps=steps, max_epochs=-1, callbacks=callbacks, gradient_clip_val=0.05,
        enable_checkpointing=bool(callbacks),
    )  # fmt: skip
    options: dict[str, Any] = {"ckpt_path": resume, "weights_only": False} if resume else {}
    run.fit(net, loader(batches(kind, rank, per_epoch)), **options)
    if save_at is not None:
        run.save_checkpoint(f"{directory}/after-fit.ckpt")
    return {"full": {k: v.clone() for k, v in net.state_dict().items()}, "lr": run.optimizers[0].param_groups[0]["lr"],
            "plan": strategy.plan.to_json(), "step": run.global_step}  # type: ignore[union-attr]  # fmt: skip


NEURON = {"granularity": "neuron", "keep_ends": 0}
KINDS = [("mlp", {}), ("conv", {}), ("gqa", NEURON), ("conv", NEURON)]


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(("kind", "sdp"), KINDS)
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(
    pool, tmp_path: Path, kind: str, sdp: dict[str, Any], world: int
) -> None:
    whole = pool(world).run(fit_and_save, str(tmp_path), kind, 8, None, None, **sdp)
    pool(world).run(fit_and_save, str(tmp_path), kind, 4, 4, None, **sdp)
    resumed = pool(world).run(fit_and_save, str(tmp_path), kind, 8, None, str(tmp_path / f"{kind}-4.ckpt"), **sdp)
    for a, b in zip(whole, resumed, strict=True):
        assert (a["step"], a["lr"]) == (b["step"], b["lr"]) and a["step"] == 8
        parameters = [name for name, _ in scheduled(kind).named_parameters()]
        assert same_state({n: a["full"][n] for n in parameters}, {n: b["full"][n] for n in parameters})


@pytest.mark.parametrize(("kind", "sdp"), KINDS)
def test_a_checkpoint_equals_that_of_the_reference(pool, tmp_path: Path, kind: str, sdp: dict[str, Any]) -> None:
    """Weights, key order, statistics and optimizer state, also of what rank 0 does not hold."""
    pool(3).run(fit_and_save, str(tmp_path), kind, 5, 5, None, per_epoch=8, coverage=0.34, **sdp)
    checkpoint = torch.load(tmp_path / f"{kind}-5.ckpt", weights_only=True)
    net = scheduled(kind)
    built = net.configure_optimizers()
    ref = SDPReference(
        net, MaskPlan.from_json(checkpoint["lightning_sdp"]["plan"]), built["optimizer"], gradient_clip_val=0.05,
        scheduler=built["lr_scheduler"]["scheduler"],
    )  # fmt: skip
    data = [batches(kind, rank, 8) for rank in range(3)]
    for step in range(5):
        ref.step([[own[step]] for own in data])
    ref.install_buffers([own[:5] for own in data])
    expected = net.state_dict()
    assert list(checkpoint["state_dict"]) == list(expected)
    for name, value in expected.items():
        assert checkpoint["state_dict"][name].dtype == value.dtype
        torch.testing.assert_close(checkpoint["state_dict"][name], value, rtol=1e-10, atol=1e-10, msg=name)
    mine, plain = checkpoint["optimizer_states"][0], ref.optimizer.state_dict()
    assert [g["params"] for g in mine["param_groups"]] == [g["params"] for g in plain["param_groups"]]
    assert [g["weight_decay"] for g in mine["param_groups"]] == [0.1, plain["param_groups"][1]["weight_decay"]]
    assert list(mine["state"]) == list(plain["state"])
    for number, state in plain["state"].items():
        assert list(mine["state"][number]) == list(state)
        for key, value in state.items():
            torch.testing.assert_close(mine["state"][number][key], value, rtol=1e-10, atol=1e-10)


def test_a_checkpoint_saved_after_fit_equals_the_one_saved_in_it(pool, tmp_path: Path) -> None:
    pool(3).run(fit_and_save, str(tmp_path), "mlp", 4, 4, None, coverage=0.34)
    during, after = (torch.load(tmp_path / name, weights_only=True) for name in ("mlp-4.ckpt", "after-fit.ckpt"))
    assert same_state(during["state_dict"], after["state_dict"])
    assert during["lightning_sdp"] == after["lightning_sdp"]
    a, b = during["optimizer_states"][0], after["optimizer_states"][0]
    assert a["param_groups"] == b["param_groups"] and list(a["state"]) == list(b["state"])
    assert len(a["state"]) == len(list(scheduled("mlp").parameters()))
    for number in a["state"]:
        assert same_state(a["state"][number], b["state"][number])


def test_the_checkpoint_loads_where_this_package_is_not_installed(pool, tmp_path: Path) -> None:
    results = pool(2).run(fit_and_save, str(tmp_path), "mlp", 4, 4, None)
    code = f"""
import sys
sys.modules["lightning_sdp"] = None
import torch
from lightning.pytorch import Trainer
from tests.models import Net, batches, loader
path = {str(tmp_path / "mlp-4.ckpt")!r}
net = Net.load_from_checkpoint(path, weights_only=False)
saved = torch.load(path, weights_only=True)["state_dict"]
assert all(torch.equal(value, saved[name].float()) for name, value in net.state_dict().items())
net.double().load_state_dict(saved)
torch.save(net.state_dict(), {str(tmp_path / "loaded.pt")!r})
class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {{"optimizer": optimizer, "lr_scheduler": {{"scheduler": schedule, "interval": "step"}}}}
again = Scheduled("mlp", groups=True).double()
trainer = Trainer(accelerator="cpu", devices=1, max_steps=6, max_epochs=-1, gradient_clip_val=0.05, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(again, loader(batches("mlp", 0, 4)), ckpt_path=path, weights_only=False)
torch.save((again.state_dict(), trainer.global_step), {str(tmp_path / "resumed.pt")!r})
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert same_state(torch.load(tmp_path / "loaded.pt"), results[0]["full"])
    state, step = torch.load(tmp_path / "resumed.pt")
    checkpoint = torch.load(tmp_path / "mlp-4.ckpt", weights_only=True)
    net = scheduled("mlp")
    built = net.configure_optimizers()
    net.load_state_dict(checkpoint["state_dict"])
    built["optimizer"].load_state_dict(checkpoint["optimizer_states"][0])
    built["lr_scheduler"]["scheduler"].load_state_dict(checkpoint["lr_schedulers"][0])
    for batch in batches("mlp", 0, 2):
        built["optimizer"].zero_grad()
        net.training_step(batch, 0).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        built["optimizer"].step()
        built["lr_scheduler"]["scheduler"].step()
    assert step == 6
    for name, value in net.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12, msg=name)


def fit_with_monitor(directory: str) -> dict[str, Any]:
    world, rank = world_and_rank()
    net = make("conv", optimizer="momentum")
    best = ModelCheckpoint(directory, filename="{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    run = trainer(world, SDPStrategy(coverage=0.5), max_epochs=4, callbacks=[best], enable_checkpointing=True)
    run.fit(net, loader(batches("conv", rank, 3)), loader(batches("conv", 60, 2)))
    report = {"best": best.best_model_path, "score": float(best.best_model_score), "k": dict(best.best_k_models),
              "last": best.last_model_path}  # fmt: skip
    test = run.test(net, loader(batches("conv", 60, 2)), ckpt_path="best", weights_only=False, verbose=False)
    return {**report, "test": test[0]["test_loss"]}


def test_model_checkpoint_with_monitor_top_k_and_last(pool, tmp_path: Path) -> None:
    results = pool(2).run(fit_with_monitor, str(tmp_path))
    assert results[0]["best"] == results[1]["best"]
    assert len(results[0]["k"]) == 2 and all(Path(path).exists() for path in results[0]["k"])
    assert Path(results[0]["last"]).name == "last.ckpt"
    for path, score in results[0]["k"].items():
        net = make("conv").eval()
        net.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        with torch.no_grad():
            losses = [torch.nn.functional.cross_entropy(net(x), y) for x, y in batches("conv", 60, 2)]
        assert float(sum(losses)) / 2 == pytest.approx(float(score), rel=1e-6)
    for result in results:
        assert result["test"] == pytest.approx(result["score"], rel=1e-6)


def test_a_resumed_run_keeps_the_plan_of_its_checkpoint(pool, tmp_path: Path) -> None:
    """Also where new costs would lead to another one; other settings lead to a new plan, and a given plan wins."""
    first = pool(2).run(fit_and_save, str(tmp_path), "mlp", 4, 4, None, balance="count", seed=3)
    path = str(tmp_path / "mlp-4.ckpt")
    other = pool(2).run(fit_and_save, str(tmp_path), "mlp", 2, None, None, balance="params", seed=3)
    assert first[0]["plan"] != other[0]["plan"]
    resumed = pool(2).run(fit_and_save, str(tmp_path), "mlp", 6, None, path, balance="params", seed=3)
    assert resumed[0]["plan"] == first[0]["plan"]
    changed = pool(2).run(fit_and_save, str(tmp_path), "mlp", 6, None, path, balance="params", seed=3, coverage=0.75)
    assert changed[0]["plan"] != first[0]["plan"]
    (tmp_path / "plan.json").write_text(other[0]["plan"])
    given = pool(2).run(fit_and_save, str(tmp_path), "mlp", 6, None, path, plan=str(tmp_path / "plan.json"))
    assert given[0]["plan"] == other[0]["plan"]


def save_after_a_group_was_added(directory: str) -> None:
    """The last block, which only one rank holds, joins the optimizer in training."""
    world, rank = world_and_rank()

    class Growing(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for n, p in self.named_parameters() if "blocks.4" not in n], lr=0.1)

        def on_train_batch_end(self, *_: Any) -> None:
            late = [p for n, p in self.named_parameters() if "blocks.4" in n]
            if late:
                self.trainer.optimizers[0].add_param_group({"params": late})
            self.trainer.save_checkpoint(f"{directory}/grown.ckpt")

    trainer(world, SDPStrategy(coverage=0.5), max_epochs=1).fit(Growing().double(), loader(batches("mlp", rank, 1)))


def test_an_optimizer_that_grew_on_some_ranks_stops_the_save_on_all_of_them(pool, tmp_path: Path) -> None:
    for error in pool(2).run_expecting_errors(save_after_a_group_was_added, str(tmp_path), deadline=30):
        assert error is not None and error[0] == "ValueError"
        assert "'blocks.4.norm.weight' was added to the optimizer after training began" in error[1]
    assert not (tmp_path / "grown.ckpt").exists()


def fit_with_regrouped_optimizer() -> None:
    """A parameter that every rank holds moves to another group after the first step."""
    world, rank = world_and_rank()

    class Regrouping(Net):
        def configure_optimizers(self) -> Any:
            stem = list(self.stem.parameters())
            return torch.optim.SGD([{"params": stem}, {"params": self.head.parameters(), "lr": 0.01}], lr=0.1)

        def on_train_batch_end(self, *_: Any) -> None:
            first, second = self.trainer.optimizers[0].param_groups
            second["params"].append(first["params"].pop())

    trainer(world, SDPStrategy(coverage=0.5), max_epochs=1).fit(Regrouping().double(), loader(batches("mlp", rank, 2)))


def test_parameters_that_changed_their_group_stop_the_next_step(pool) -> None:
    for error in pool(2).run_expecting_errors(fit_with_regrouped_optimizer, deadline=30):
        assert error is not None and error[0] == "ValueError"
        assert "Groups of the optimizer were changed after training began" in error[1]


@pytest.mark.parametrize(
    ("kind", "first", "then"),
    [
        ("mlp", {"coverage": 0.5}, {**NEURON, "coverage": 0.5}),
        ("gqa", {**NEURON, "coverage": 0.34}, {"coverage": 0.5, "keep_ends": 0}),
        ("gqa", {**NEURON, "coverage": 0.5}, {**NEURON, "coverage": 0.75}),
        ("gqa", {**NEURON, "coverage": 0.5}, {"coverage": 1.0}),
    ],
)
def test_a_run_goes_on_in_another_layout(
    pool, tmp_path: Path, kind: str, first: dict[str, Any], then: dict[str, Any]
) -> None:
    """From three ranks on to two, other coverage and granularity; the optimizer's state goes along."""
    pool(3).run(fit_and_save, str(tmp_path), kind, 4, 4, None, **first)
    path = str(tmp_path / f"{kind}-4.ckpt")
    results = pool(2).run(fit_and_save, str(tmp_path), kind, 6, None, path, **then)
    checkpoint = torch.load(path, weights_only=True)
    net = scheduled(kind)
    built = net.configure_optimizers()
    net.load_state_dict(checkpoint["state_dict"])
    built["optimizer"].load_state_dict(checkpoint["optimizer_states"][0])
    built["lr_scheduler"]["scheduler"].load_state_dict(checkpoint["lr_schedulers"][0])
    ref = SDPReference(
        net, MaskPlan.from_json(results[0]["plan"]), built["optimizer"], gradient_clip_val=0.05,
        scheduler=built["lr_scheduler"]["scheduler"],
    )  # fmt: skip
    data = [batches(kind, rank, 4) for rank in range(2)]
    for step in range(2):
        ref.step([[own[step]] for own in data])
    for name, value in net.state_dict().items():
        torch.testing.assert_close(results[0]["full"][name], value, rtol=1e-10, atol=1e-10, msg=name)


def held_bytes(kind: str, sdp: dict[str, Any]) -> dict[str, Any]:
    world, rank = world_and_rank()
    net, strategy = make(kind, dtype=torch.float32, groups=True), SDPStrategy(**sdp)
    held: dict[str, int] = {}

    class Count(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            with tempfile.TemporaryDirectory() as directory:
                trainer.save_checkpoint(f"{directory}/saved.ckpt")  # leaves nothing behind

            def storages(tensors: list[Tensor]) -> int:
                found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
                return sum(found.values())

            parameters = list(pl_module.parameters())
            in_optimizer = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
            assert {id(p) for p in in_optimizer} == {id(p) for p in parameters}
            held["parameters"] = storages([t.data for t in [*parameters, *strategy._run.subnetwork.missing.values()]])
            held["gradients"] = storages([p.grad for p in parameters])
            states = trainer.optimizers[0].state.values()
            held["optimizer"] = storages([v for s in states for v in s.values() if isinstance(v, Tensor) and v.dim()])

    trainer(world, strategy, max_epochs=1, callbacks=[Count()]).fit(net, loader(batches(kind, rank, 2, torch.float32)))
    plan = strategy.plan
    assert plan is not None and plan.sizes is not None and plan.shared_size is not None
    numel = plan.shared_size + sum(
        size for c, size in zip(plan.components, plan.sizes, strict=True) if rank in plan.holders(c.name)
    )
    return {"held": held, "planned": 4 * numel}


@pytest.mark.parametrize(
    ("world", "coverage"), [(3, 0.67), *[pytest.param(n, 0.5, marks=pytest.mark.slow) for n in (2, 4)]]
)
@pytest.mark.parametrize(("kind", "sdp"), [("mlp", {}), ("mlp", NEURON), ("gqa", NEURON)])
def test_a_worker_holds_what_its_components_sum_to(
    pool, world: int, coverage: float, kind: str, sdp: dict[str, Any]
) -> None:
    full = 4 * sum(p.numel() for p in make(kind).parameters())
    for result in pool(world).run(held_bytes, kind, {**sdp, "coverage": coverage}):
        held, planned = result["held"], result["planned"]
        assert planned < full
        total = held["parameters"] + held["gradients"] + held["optimizer"]
        assert abs(total / (4 * planned) - 1) < 0.02, result
        assert abs(held["parameters"] / planned - 1) < 0.02 and abs(held["optimizer"] / (2 * planned) - 1) < 0.02
