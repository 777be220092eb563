"""Precision: loss scaling, half precision, and the dtype in which gradients travel."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_sdp import SDPReference, SDPStrategy
from tests.distributed.runs import WORLDS, Wire, fit_rank, plan_for, reference, trainer
from tests.models import SHAPES, Net, batches, loader, make, same_state

BLOCK = {"coverage": 0.5, "keep_ends": 0}
NEURON = {**BLOCK, "granularity": "neuron"}
STEPS, BAD = 8, {2: 0, 5: 1}  # in these steps the gradient of the first component of that worker is infinite


class ScaledDouble(MixedPrecision):
    """Scales the loss, but computes in the model's own precision, so that results can be compared exactly."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2))

    def autocast_context_manager(self) -> Any:
        return nullcontext()


class Overflow(Callback):
    """Makes one gradient of one rank infinite, of an element that few ranks have."""

    def __init__(self, name: str, worker: int, step: int) -> None:
        self.name, self.worker, self.step = name, worker, step
        self.scales: list[float] = []
        self.weights: list[Tensor] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())
        self.weights.append(pl_module.stem.weight.detach().clone())

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == self.step and trainer.global_rank == self.worker:
            parameters = {n: p for g in trainer.optimizers for n, p in named(trainer)}
            parameters[self.name].grad.view(-1)[0] = float("inf")


def named(trainer: Trainer) -> list[tuple[str, Tensor]]:
    """What this rank trains, by name."""
    return list(trainer.strategy._run.part.trained.items())


def name_of_one(sdp: dict[str, Any], world: int, worker: int) -> str:
    """A tensor of which the worker holds something that another one lacks."""
    plan = plan_for(make("mlp"), world, sdp, torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64))
    held = [
        c for c in plan.components if plan.holders(c.name) != tuple(range(world)) and worker in plan.holders(c.name)
    ]
    return held[0].slices[0].name


def fit_scaled(sdp: dict[str, Any], optimizer: str = "adamw", **options: Any) -> dict[str, Any]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = make("mlp", optimizer=optimizer)
    overflows = [Overflow(name_of_one(sdp, world, worker), worker, step) for step, worker in BAD.items()]
    plugin = ScaledDouble()
    own = plugin.scaler
    run = trainer(world, SDPStrategy(**sdp), max_epochs=1, callbacks=overflows, plugins=plugin, **options)
    run.fit(net, loader(batches("mlp", rank, STEPS)))
    assert plugin.scaler is own
    return {"full": dict(net.state_dict()), "scales": overflows[0].scales, "stems": overflows[0].weights,
            "left": own.get_scale()}  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("sdp", "masking"),
    [
        (BLOCK, "forward"),
        (NEURON, "backward"),
        pytest.param(BLOCK, "backward", marks=pytest.mark.slow),
        pytest.param(NEURON, "forward", marks=pytest.mark.slow),
    ],
)
def test_a_scaler_skips_a_step_on_all_ranks_or_on_none(pool, world: int, sdp: dict[str, Any], masking: str) -> None:
    sdp = {**sdp, "masking": masking}
    results = pool(world).run(fit_scaled, sdp, gradient_clip_val=0.05)
    net = make("mlp")
    plan = plan_for(net, world, sdp, torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64))
    ref = SDPReference(net, plan, net.configure_optimizers(), gradient_clip_val=0.05, masking=masking)
    data = [batches("mlp", rank, STEPS) for rank in range(world)]
    for step in range(STEPS):
        if step not in BAD:
            ref.step([[own[step]] for own in data])
    for result in results:
        torch.testing.assert_close(result["full"], net.state_dict(), rtol=1e-10, atol=1e-10)
        assert result["scales"] == [4, 4, 8, 4, 4, 8, 4, 4] and result["left"] == 8
        for step in BAD:
            assert torch.equal(result["stems"][step], result["stems"][step + 1])
        assert same_state(result["full"], results[0]["full"])


def test_a_scaler_skips_local_steps_on_all_ranks_too(pool) -> None:
    sdp = {**BLOCK, "model_averaging_period": 2}
    results = pool(3).run(fit_scaled, sdp)
    net = make("mlp")
    ref = SDPReference(net, plan_for(net, 3, sdp), net.configure_optimizers(), model_averaging_period=2)
    data = [batches("mlp", rank, STEPS) for rank in range(3)]
    for step in range(STEPS):
        if step not in BAD:
            ref.step([[own[step]] for own in data])
    for result in results:
        torch.testing.assert_close(result["full"], net.state_dict(), rtol=1e-10, atol=1e-10)


class OneBlock(Net):
    """Trains one block only."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.blocks[0].parameters(), lr=0.1)


def fit_one_block() -> dict[str, Tensor]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = OneBlock("mlp", blocks=2).double()
    net.requires_grad_(False).blocks[0].requires_grad_(True)
    run = trainer(world, SDPStrategy(**BLOCK), max_epochs=1, plugins=ScaledDouble())
    run.fit(net, loader(batches("mlp", rank, 4)))
    return dict(net.state_dict())


def test_a_rank_without_gradients_takes_part_in_scaling(pool) -> None:
    results = pool(2).run(fit_one_block)
    assert same_state(results[0], results[1])


def fit_half(sdp: dict[str, Any], precision: str) -> dict[str, Any]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = make("mlp", dtype=torch.float32)
    computed: set[torch.dtype] = set()
    net.head.register_forward_hook(lambda module, inputs, output: computed.add(output.dtype))  # type: ignore[union-attr]
    run = trainer(world, SDPStrategy(**sdp), max_epochs=1, precision=precision, gradient_clip_val=0.5)
    run.fit(net, loader(batches("mlp", rank, 6, torch.float32)))
    assert (
        torch.float16 if precision.startswith("16") else torch.bfloat16
    ) in computed  # float32 while blocks are found
    return dict(net.state_dict())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", pytest.param("16-true", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "sdp", [NEURON, *[pytest.param(sdp, marks=pytest.mark.slow) for sdp in (BLOCK, {**NEURON, "masking": "backward"})]]
)
def test_half_precision_stays_near_the_reference(pool, sdp: dict[str, Any], precision: str) -> None:
    results = pool(3).run(fit_half, sdp, precision)
    expected = reference(3, 3, sdp, "mlp", 6, {"dtype": torch.float32}, gradient_clip_val=0.5)
    start = make("mlp", dtype=torch.float32).state_dict()
    wanted = torch.cat([(value - start[name]).flatten() for name, value in expected.module.state_dict().items()])
    moved = torch.cat([(results[0][name].float() - value).flatten() for name, value in start.items()])
    # Adam's second moments vanish in float16, so that steps are longer.
    assert F.cosine_similarity(moved, wanted, dim=0) > (0.6 if precision == "16-true" else 0.97)
    for name, mine in results[0].items():
        assert mine.dtype == {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(precision, torch.float32)
        assert all(torch.equal(result[name], mine) for result in results)


@pytest.mark.parametrize("sdp", [BLOCK, NEURON])
def test_gradients_travel_in_another_dtype(pool, sdp: dict[str, Any]) -> None:
    """Sums in double precision change nothing; in bfloat16 they are off by its rounding, alike on all holders."""
    model = {"dtype": torch.float32, "optimizer": "sgd"}
    own = pool(3).run(fit_rank, sdp, "mlp", 4, model)
    double = pool(3).run(fit_rank, {**sdp, "reduce_dtype": "float64"}, "mlp", 4, model)
    half = pool(3).run(fit_rank, {**sdp, "reduce_dtype": "bfloat16"}, "mlp", 4, model)
    for name, value in own[0]["full"].items():
        torch.testing.assert_close(double[0]["full"][name], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(half[0]["full"][name], value, rtol=2e-2, atol=2e-3)
        assert all(torch.equal(result["full"][name], half[0]["full"][name]) for result in half)
    assert any(not torch.equal(half[0]["full"][n], v) for n, v in own[0]["full"].items())


def dtypes_that_travel(reduce_dtype: str | None) -> set[str]:
    world, rank, seen = torch.distributed.get_world_size(), torch.distributed.get_rank(), set()
    wire = Wire("all_reduce", lambda tensor: seen.add(str(tensor.dtype)), "on_before_backward", "on_after_backward")
    strategy = SDPStrategy(**{**NEURON, "coverage": 0.67}, reduce_dtype=reduce_dtype)
    data = loader(batches("mlp", rank, 1, torch.float32))
    trainer(world, strategy, max_epochs=1, callbacks=[wire]).fit(make("mlp", dtype=torch.float32), data)
    return seen


def test_only_the_chosen_dtype_is_on_the_wire(pool) -> None:
    assert pool(3).run(dtypes_that_travel, None) == [{"torch.float32"}] * 3
    assert pool(3).run(dtypes_that_travel, "bfloat16") == [{"torch.bfloat16"}] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduce_dtype": "int8"}, "reduce_dtype='int8' is unknown: choose None or 'bfloat16'"),
        ({"reduce_dtype": "bfloat16", "model_averaging_period": 2}, "is for gradients, which do not travel"),
    ],
)
def test_a_dtype_that_cannot_be_used_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SDPStrategy(**arguments)
