"""When the full model is open, what evaluation sees, and that training goes on as if nothing had happened."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from lightning.pytorch import Callback
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from lightning_sdp import BatchNormRecalibration, SDPStrategy
from tests.distributed.runs import reference, trainer
from tests.models import Net, batches, loader, make, same_state


def world_and_rank() -> tuple[int, int]:
    return torch.distributed.get_world_size(), torch.distributed.get_rank()


def copied(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


class Stages(Callback):
    """Records at every hook of a stage how many parameters the module has and a sum of its weights."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, float]] = []

    def _look(self, hook: str, net: nn.Module) -> None:
        parameters = list(net.parameters())
        self.seen.append((hook, len(parameters), float(sum(p.detach().double().sum() for p in parameters))))

    def __getattribute__(self, name: str) -> Any:
        if (
            name.startswith("on_")
            and name.split("_")[-1] in ("start", "end")
            and "batch" not in name
            and "fit" not in name
        ):
            return lambda trainer, net, *_: self._look(name, net)
        return super().__getattribute__(name)


def fit_with_stages(eval_model: str) -> dict[str, Any]:
    world, rank = world_and_rank()
    net, stages = make("mlp"), Stages()
    data, val = batches("mlp", rank, 4), batches("mlp", 0, 2)
    run = trainer(world, SDPStrategy(coverage=0.5, eval_model=eval_model), max_epochs=2, callbacks=[stages],
                  num_sanity_val_steps=1)  # fmt: skip
    identities = {n: id(p) for n, p in net.named_parameters()}
    run.fit(net, loader(data), loader(val))
    kept = {n: id(p) for n, p in net.named_parameters()} == identities
    return {"seen": stages.seen, "kept": kept, "metrics": {k: float(v) for k, v in run.callback_metrics.items()}}


def test_every_callback_of_an_evaluation_sees_the_same_full_model(pool) -> None:
    results = pool(3).run(fit_with_stages, "full")
    full = len(list(make("mlp").parameters()))
    hooks = [hook for hook, *_ in results[0]["seen"]]
    evaluations = [h for h in hooks if "validation" in h or "sanity" in h]
    assert {"on_sanity_check_start", "on_sanity_check_end", "on_validation_start", "on_validation_end"} <= set(
        evaluations
    )
    for result in results:
        assert result["kept"]
        for (hook, count, total), (_, _, first) in zip(result["seen"], results[0]["seen"], strict=True):
            if hook in evaluations or hook == "on_train_end":
                assert count == full, hook
                assert total == first, hook
            elif hook in ("on_train_start", "on_train_epoch_start"):
                assert count < full, hook
    assert len({r["metrics"]["val_loss"] for r in results}) == 1


def test_subnetworks_are_evaluated_on_request(pool) -> None:
    full = len(list(make("mlp").parameters()))
    for result in pool(2).run(fit_with_stages, "subnetwork"):
        counts = {hook: count for hook, count, _ in result["seen"]}
        assert counts["on_validation_end"] < full
        assert counts["on_train_end"] == full


class LocalBuffers(Callback):
    """Copies the rank's own buffers after every training batch; the last copy counts."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.buffers = {n: b.clone() for n, b in pl_module.named_buffers()}


NEURON = {"granularity": "neuron", "keep_ends": 0}


def fit_with_validation(kind: str, validate: bool, sdp: dict[str, Any]) -> dict[str, Tensor]:
    world, rank = world_and_rank()
    net, local = make(kind, optimizer="momentum"), LocalBuffers()
    options: dict[str, Any] = (
        {"val_check_interval": 2, "num_sanity_val_steps": 1} if validate else {"limit_val_batches": 0}
    )
    strategy = SDPStrategy(coverage=0.5, **sdp)
    run = trainer(world, strategy, max_epochs=1, accumulate_grad_batches=3, callbacks=[local], **options)
    run.fit(net, loader(batches(kind, rank, 7)), loader(batches(kind, rank, 2)))
    return {**{n: p.detach().clone() for n, p in net.named_parameters()}, **local.buffers}


@pytest.mark.parametrize(("kind", "sdp"), [("mlp", {}), ("conv", {}), ("attention", NEURON), ("conv", NEURON)])
def test_validation_in_the_middle_of_accumulation_changes_nothing(pool, kind: str, sdp: dict[str, Any]) -> None:
    without = pool(3).run(fit_with_validation, kind, False, sdp)
    with_it = pool(3).run(fit_with_validation, kind, True, sdp)
    for a, b in zip(without, with_it, strict=True):
        assert same_state(a, b)


class Busy(Net):
    """Draws random numbers, keeps a metric, a counter and a log in training, which recalibration must not touch."""

    def __init__(self) -> None:
        super().__init__("conv", optimizer="momentum")
        self.accuracy = MulticlassAccuracy(3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.drawn: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.drawn.append(float(torch.rand(())) + random.random() + float(np.random.rand()))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        random.random(), np.random.rand()
        self.steps += 1
        logits = self(torch.nn.functional.dropout(x, 0.1))
        self.accuracy(logits, y)
        self.log("train_accuracy", self.accuracy)
        return torch.nn.functional.cross_entropy(logits, y)


def busy() -> Busy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Busy().double()


def fit_busy(recalibrate: int) -> dict[str, Any]:
    world, rank = world_and_rank()
    net, flags = busy(), []
    strategy = SDPStrategy(coverage=0.5, recalibrate_batchnorm=recalibrate)
    run = trainer(world, strategy, max_epochs=1, val_check_interval=2)
    net.on_validation_start = lambda: flags.append(any(m.training for m in net.modules()))  # type: ignore[method-assign]
    run.fit(net, loader(batches("conv", rank, 6)), loader(batches("conv", rank, 1)))
    return {
        "drawn": net.drawn,
        "count": int(net.accuracy.update_count),
        "steps": int(net.steps),
        "metric": float(run.callback_metrics["train_accuracy"]),
        "flags": flags,
        "weights": {n: p.detach().clone() for n, p in net.named_parameters()},
        "dtype": {b.dtype for n, b in net.named_buffers() if n.endswith("num_batches_tracked")},
    }


def test_recalibration_leaves_no_trace_in_training(pool) -> None:
    """Beside a run that does not recalibrate: validation itself draws from the global stream in both."""
    without, with_it = pool(2).run(fit_busy, 0), pool(2).run(fit_busy, 16)
    for a, b in zip(without, with_it, strict=True):
        assert same_state(a["weights"], b["weights"])
        assert a["drawn"] == b["drawn"] and len(set(a["drawn"])) == 6
        assert (a["count"], a["steps"], a["metric"]) == (b["count"], b["steps"], b["metric"])
        assert b["flags"] == [False, False, False]
        assert b["dtype"] == {torch.int64}


def fit_statistics(recalibrate: int, own_callback: int = 0, freeze: bool = False) -> dict[str, Any]:
    world, rank = world_and_rank()
    net = make("conv", optimizer="momentum")
    frozen = net.blocks[2].bn1
    if freeze:
        with torch.no_grad():
            frozen.running_mean.fill_(0.25)
            frozen.running_var.fill_(2.0)
        frozen.eval()
    local = LocalBuffers()
    callbacks: list[Callback] = [local, *([BatchNormRecalibration(own_callback)] if own_callback else [])]
    run = trainer(
        world, SDPStrategy(coverage=0.5, recalibrate_batchnorm=recalibrate), max_epochs=1, callbacks=callbacks
    )
    run.fit(net, loader(batches("conv", rank, 6)))
    return {"full": copied(net), "local": local.buffers, "mode": frozen.training}


def test_a_batchnorm_that_the_user_froze_is_left_alone(pool) -> None:
    for result in pool(2).run(fit_statistics, 16, freeze=True):
        assert not result["mode"]
        assert torch.equal(result["full"]["blocks.2.bn1.running_mean"], torch.full((6,), 0.25, dtype=torch.float64))
        assert torch.equal(result["full"]["blocks.2.bn1.running_var"], torch.full((6,), 2.0, dtype=torch.float64))
        assert not torch.equal(result["full"]["blocks.2.bn2.running_var"], torch.ones(6, dtype=torch.float64))


def test_the_number_of_batches_can_be_chosen_by_argument_or_by_callback(pool) -> None:
    ref = reference(2, 2, {"coverage": 0.5}, "conv", 6, {"optimizer": "momentum"})
    ref.install_buffers([batches("conv", rank, 6)[-2:] for rank in range(2)])
    for arguments in ((2,), (16, 2)):
        for result in pool(2).run(fit_statistics, *arguments):
            for name, value in ref.module.state_dict().items():
                torch.testing.assert_close(result["full"][name], value, rtol=1e-10, atol=1e-10)


def test_without_recalibration_the_statistics_are_the_holders_mean(pool) -> None:
    results = pool(3).run(fit_statistics, 0)
    for name in ("stem.1", "blocks.0.bn1", "blocks.3.bn2"):
        own = [r["local"] for r in results if f"{name}.running_mean" in r["local"]]
        means = torch.stack([values[f"{name}.running_mean"] for values in own])
        variances = torch.stack([values[f"{name}.running_var"] for values in own])
        for result in results:
            full = result["full"]
            torch.testing.assert_close(full[f"{name}.running_mean"], means.mean(0), rtol=1e-12, atol=1e-12)
            total = variances.mean(0) + means.var(0, unbiased=False)
            torch.testing.assert_close(full[f"{name}.running_var"], total, rtol=1e-10, atol=1e-12)
            assert same_state(full, results[0]["full"])


def fit_then_evaluate() -> dict[str, Any]:
    world, rank = world_and_rank()
    net = make("conv", optimizer="momentum")
    run = trainer(world, SDPStrategy(coverage=0.5), max_epochs=1)
    run.fit(net, loader(batches("conv", rank, 5)))
    after_fit, data = copied(net), loader(batches("conv", 50, 3))
    test = run.test(net, data, verbose=False)[0]["test_loss"]
    validated = run.validate(net, data, verbose=False)[0]["val_loss"]
    predicted = run.predict(net, data)
    fitted_again = trainer(world, SDPStrategy(coverage=0.75), max_epochs=1)
    unchanged = same_state(after_fit, copied(net))
    fitted_again.fit(net, loader(batches("conv", rank, 2)))
    return {"full": after_fit, "test": test, "val": validated, "predicted": predicted, "unchanged": unchanged,
            "again": copied(net)}  # fmt: skip


def test_stages_after_fit_run_the_full_model_like_a_plain_module(pool) -> None:
    results = pool(2).run(fit_then_evaluate)
    net = make("conv")
    net.load_state_dict(results[0]["full"])
    net.eval()
    with torch.no_grad():
        outputs = [net(x) for x, _ in batches("conv", 50, 3)]
    losses = [nn.functional.cross_entropy(o, y) for o, (_, y) in zip(outputs, batches("conv", 50, 3), strict=True)]
    for result in results:
        assert result["unchanged"]
        assert result["test"] == pytest.approx(float(sum(losses)) / 3, rel=1e-6)
        assert result["val"] == pytest.approx(result["test"], rel=1e-12)
        for mine, expected in zip(result["predicted"], outputs, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
        assert same_state(result["again"], results[0]["again"])


def evaluate_subnetworks() -> dict[str, Any]:
    """Outside of fit, on request: each rank its own subnetwork."""
    world, rank = world_and_rank()
    net = make("conv")
    before, strategy = copied(net), SDPStrategy(coverage=0.5, eval_model="subnetwork")
    run, data = trainer(world, strategy), batches("conv", 50, 2)
    predicted = run.predict(net, loader(data))
    lacking = [c.name for c in strategy.plan.missing_on(rank)]  # type: ignore[union-attr]
    return {"predicted": predicted, "lacking": lacking, "unchanged": same_state(before, copied(net))}


def test_subnetworks_are_evaluated_on_request_outside_of_fit(pool) -> None:
    for result in pool(2).run(evaluate_subnetworks):
        assert result["unchanged"] and result["lacking"]
        net = make("conv").eval()
        for name in result["lacking"]:
            block = net.get_submodule(name)
            block.forward = lambda x, block=block: torch.relu(block.shortcut(x))
        for mine, (x, _) in zip(result["predicted"], batches("conv", 50, 2), strict=True):
            torch.testing.assert_close(mine, net(x).detach(), rtol=1e-12, atol=1e-12)


def open_in_training(kind: str, sdp: dict[str, Any]) -> list[Any]:
    world, rank = world_and_rank()
    net, seen = make(kind), []
    strategy = SDPStrategy(**sdp)

    class Sampler(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            before = {n: (id(p), id(p.grad)) for n, p in pl_module.named_parameters()}
            with strategy.full_model() as full, strategy.full_model(), torch.no_grad():
                seen.append({**copied(full), "output": full(batches(kind, 50, 1)[0][0])})
            assert before == {n: (id(p), id(p.grad)) for n, p in pl_module.named_parameters()}
            for p in strategy._run.subnetwork.missing.values():  # type: ignore[union-attr]
                assert p.untyped_storage().nbytes() == p.element_size() and bool(p.isnan().all())
            for p in strategy._run.subnetwork.cut.values():  # type: ignore[union-attr]
                assert p.untyped_storage().nbytes() == p.nbytes

    trainer(world, strategy, max_epochs=1, callbacks=[Sampler()]).fit(net, loader(batches(kind, rank, 3)))
    return seen


@pytest.mark.parametrize(
    ("kind", "sdp"),
    [
        ("mlp", {"coverage": 0.5}),
        ("gqa", {**NEURON, "coverage": 0.5}),
        ("mlp", {**NEURON, "coverage": [1.0, 0.5, 0.4]}),
    ],
)
def test_the_full_model_opens_at_any_step_boundary_and_its_memory_is_freed(
    pool, kind: str, sdp: dict[str, Any]
) -> None:
    results = pool(3).run(open_in_training, kind, sdp)
    for step in range(3):
        ref = reference(3, 3, sdp, kind, step + 1, {})
        for seen in results:
            assert same_state(seen[step], results[0][step])
            expected = {**ref.module.state_dict(), "output": ref.module(batches(kind, 50, 1)[0][0]).detach()}
            for name, value in expected.items():
                torch.testing.assert_close(seen[step][name], value, rtol=1e-10, atol=1e-10)


def change_the_open_model(sdp: dict[str, Any]) -> dict[str, Tensor]:
    """Halves all weights after the first step."""
    world, rank = world_and_rank()
    net, strategy = make("gqa", blocks=2), SDPStrategy(**sdp)

    class Halve(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                with strategy.full_model() as full, torch.no_grad():
                    for p in full.parameters():
                        p.mul_(0.5)

    trainer(world, strategy, max_epochs=1, callbacks=[Halve()]).fit(net, loader(batches("gqa", rank, 3)))
    return copied(net)


@pytest.mark.parametrize("sdp", [{"coverage": 0.5, "keep_ends": 0}, {**NEURON, "coverage": 0.5}])
def test_what_the_user_changes_in_the_open_model_stays(pool, sdp: dict[str, Any]) -> None:
    results = pool(3).run(change_the_open_model, sdp)
    ref = reference(3, 3, sdp, "gqa", 1, {"blocks": 2})
    with torch.no_grad():
        for p in ref.module.parameters():
            p.mul_(0.5)
    data = [batches("gqa", rank, 3) for rank in range(3)]
    for step in (1, 2):
        ref.step([[own[step]] for own in data])
    for result in results:
        for name, value in ref.module.state_dict().items():
            torch.testing.assert_close(result[name], value, rtol=1e-10, atol=1e-10)


def shared_buffers(coverage: float) -> dict[str, Any]:
    """Buffers that training changes differently on every rank, in a block and outside."""
    world, rank = world_and_rank()

    class Counting(Net):
        def __init__(self) -> None:
            super().__init__("mlp", blocks=3)
            self.register_buffer("seen", torch.zeros(2))
            self.blocks[1].register_buffer("mark", torch.zeros(2, dtype=torch.bool))
            self.blocks[1].register_buffer("count", torch.zeros(2, dtype=torch.int64))
            self.before: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.before.append(float(self.seen[0]))
            self.seen = self.seen + 1 + rank  # a new tensor under the old name
            if self.blocks[1].count is not None:
                self.blocks[1].count += 1 + rank
            return super().training_step(batch, batch_idx)

    net, strategy = Counting().double(), SDPStrategy(coverage=coverage, keep_ends=0)
    trainer(world, strategy, max_epochs=1).fit(net, loader(batches("mlp", rank, 3)))
    block = net.blocks[1]
    lowest = strategy.plan.holders("blocks.1")[0]  # type: ignore[union-attr]
    return {"before": net.before, "seen": net.seen, "mark": block.mark, "count": block.count, "lowest": lowest}


@pytest.mark.parametrize("coverage", [0.5, 0.67, 1.0])
def test_other_buffers_come_from_the_lowest_holder(pool, coverage: float) -> None:
    for result in pool(3).run(shared_buffers, coverage):
        assert result["before"] == [0.0, 1.0, 2.0]
        assert result["seen"].tolist() == [3.0, 3.0]
        assert result["count"].tolist() == [3 * (1 + result["lowest"])] * 2
        assert result["mark"].dtype == torch.bool and result["mark"].tolist() == [False, False]
