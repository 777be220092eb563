"""sdp_fsdp: precision, offloading, a start on the meta device, failures, and what is refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

from lightning_sdp import MaskingSchedule, SDPFSDPStrategy, SDPMonitor, SDPReference
from tests.distributed.runs import full_weights, make_strategy, plan_for, reference, trainer
from tests.distributed.test_sharded_training import assert_close, check
from tests.models import SHAPES, MLPBlock, Net, batches, loader, make

GIVEN = {"coverage": 0.5, "keep_ends": 0}
SHARDED = {**GIVEN, "sharded": True}


def fit_half(precision: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], float, set[torch.dtype]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    strategy, net = SDPFSDPStrategy(**GIVEN, **options), make("mlp", dtype=torch.float32)
    computed: set[torch.dtype] = set()
    net.head.register_forward_hook(lambda module, inputs, output: computed.add(output.dtype))  # type: ignore[union-attr]
    run = trainer(world, strategy, max_epochs=1, precision=precision, gradient_clip_val=0.5)
    run.fit(net, loader(batches("mlp", rank, 6, torch.float32)))
    [validated] = run.validate(net, loader(batches("mlp", 0, 2, torch.float32)), verbose=False)
    return full_weights(strategy), validated["val_loss"], computed


@pytest.mark.parametrize(
    ("precision", "options", "dtype"),
    [
        ("bf16-true", {}, torch.bfloat16),
        ("32-true", {"mixed_precision": MixedPrecisionPolicy(cast_forward_inputs=False)}, torch.float32),
        ("16-mixed", {}, torch.float16),
        ("32-true", {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)}, torch.bfloat16),
        ("bf16-mixed", {}, torch.bfloat16),
    ],
)
def test_half_precision_stays_near_the_reference(
    pool: Any, precision: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    results = pool(3).run(fit_half, precision, options)
    mine, loss, _ = results[0]
    ref = reference(3, 3, GIVEN, "mlp", 6, {"dtype": torch.float32}, gradient_clip_val=0.5)
    start = make("mlp", dtype=torch.float32).state_dict()
    wanted = torch.cat([(value - start[name]).flatten() for name, value in ref.module.state_dict().items()])
    moved = torch.cat([(mine[name].float() - value).flatten() for name, value in start.items()])
    assert F.cosine_similarity(moved, wanted, dim=0) > 0.97
    kept = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {value.dtype for value in mine.values()} == {kept}
    net = make("mlp", dtype=torch.float32)
    net.load_state_dict(mine)
    with torch.no_grad():
        data = batches("mlp", 0, 2, torch.float32)
        expected = sum(float(F.cross_entropy(net(x), y)) for x, y in data) / len(data)
    assert loss == pytest.approx(expected, rel=0.01)
    assert all(other == loss and computed == {dtype} for _, other, computed in results)


@pytest.mark.parametrize("offload", [True, CPUOffloadPolicy(pin_memory=False)])
def test_offloading_changes_nothing(pool: Any, offload: Any) -> None:
    check(pool, 3, 3, {"cpu_offload": offload}, gradient_clip_val=0.05)


class Start(Callback):
    """The full weights before the first step."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.full = full_weights(trainer.strategy)
        self.on_meta = [n for n, p in pl_module.named_parameters() if p.to_local().is_meta]
        self.held = sum(p.to_local().numel() for p in pl_module.parameters())


def fit_from_meta(workers: int) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)
    with torch.device("meta"):
        net = Net("mlp").double()
    net.example_input_array = torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64)
    start, strategy = Start(), make_strategy({**SHARDED, "num_subnetworks": workers})
    trainer(world, strategy, max_epochs=1, callbacks=[start]).fit(net, loader(batches("mlp", rank, 4)))
    return {"start": start.full, "end": full_weights(strategy), "on meta": start.on_meta, "held": start.held}


@pytest.mark.parametrize(("world", "workers"), [(2, 2), (4, 2), (3, 3)])
def test_a_model_on_meta_trains_like_the_reference_from_equal_values(pool: Any, world: int, workers: int) -> None:
    results = pool(world).run(fit_from_meta, workers)
    net = make("mlp")
    net.load_state_dict(results[0]["start"])
    for name, parameter in net.named_parameters():
        if parameter.dim() > 1:
            bound = (1 / parameter[0].numel()) ** 0.5  # of torch's own initialization
            assert 0.3 * bound < parameter.std() < bound, name
    plan = plan_for(net, workers, GIVEN, torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64))
    ref = SDPReference(net, plan, net.configure_optimizers(), ranks_per_worker=world // workers)
    data = [batches("mlp", rank, 4) for rank in range(world)]
    for step in range(4):
        ref.step([[own[step]] for own in data])
    assert_close(results[0]["end"], net.state_dict())
    assert [result["on meta"] for result in results] == [[]] * world
    stored = sum(result["held"] for result in results)
    held = sum(plan.element_mask(n, w, p.shape).sum() for n, p in net.named_parameters() for w in range(workers))
    assert stored == (sum(p.numel() for p in net.parameters()) if world == workers else held)


class Boom(Exception):
    pass


class Failing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            raise Boom
        return super().training_step(batch, batch_idx)


def fail() -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    net, strategy = Failing("mlp").double(), make_strategy(SHARDED)
    names = list(net.state_dict())
    run = trainer(world, strategy, max_epochs=1)
    with pytest.raises(Boom):
        run.fit(net, loader(batches("mlp", rank, 3)))
    with pytest.raises(RuntimeError, match=r"incomplete.*Load the last checkpoint"):
        run.save_checkpoint("nowhere")
    return {
        "names": list(net.state_dict()) == names,
        "blocks": all(isinstance(b, MLPBlock) and "Missing" not in type(b).__name__ for b in net.blocks),
        "meta": [f"{n} {type(p)} {p.device} {tuple(p.shape)}" for n, p in net.named_parameters() if not p.is_meta],
        "groups": len(dist.distributed_c10d._pg_map),
    }


def test_an_exception_leaves_the_structure_whole_without_data(pool: Any) -> None:
    assert pool(3).run(fail) == [{"names": True, "blocks": True, "meta": [], "groups": 1}] * 3


def watch() -> tuple[dict[str, float], list[dict[str, float]]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    usage: list[Any] = []

    class Usage(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            usage[:] = trainer.strategy.usage()

    run = trainer(
        world, make_strategy(SHARDED), max_epochs=1, callbacks=[SDPMonitor(every_n_steps=2), Usage()],
        enable_progress_bar=True,
    )  # fmt: skip
    run.fit(make("mlp"), loader(batches("mlp", rank, 4)))
    return {name: float(value) for name, value in run.progress_bar_metrics.items()}, usage


def test_the_monitor_shows_what_shards_take(pool: Any) -> None:
    total = 8 * sum(p.numel() for p in make("mlp").parameters())
    for _, usage in pool(3).run(watch):
        assert sum(row["parameter_bytes"] for row in usage) == total
        assert sum(row["gradient_bytes"] for row in usage) == total
        assert sum(row["optimizer_bytes"] for row in usage) == pytest.approx(2 * total, rel=0.02)


OLD = {"all_gather": "_into_tensor", "reduce_scatter": "_tensor"}


class Traffic(Callback):
    """Counts what FSDP2's collectives send in the last step, in rings, beside what the strategy forecasts."""

    def __init__(self) -> None:
        self.sent = 0.0

    def count(self, name: str, share: Callable[[int], float], size: Callable[..., int]) -> None:
        original = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.sent += size(*args, **kwargs) * share(dist.get_world_size(kwargs["group"]))
            return original(*args, **kwargs)

        self.restore = [*getattr(self, "restore", []), lambda: setattr(dist, name, original)]
        setattr(dist, name, counted)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:

            def bytes_of(tensor: Tensor) -> int:
                return tensor.numel() * tensor.element_size()

            def full(*args: Any, **kwargs: Any) -> int:
                return max(map(bytes_of, [*args, *(v for v in kwargs.values() if isinstance(v, Tensor))]))

            is_new = hasattr(dist, "all_gather_single")  # the names in newer releases of torch
            for name in ("all_gather", "reduce_scatter"):
                self.count(name + ("_single" if is_new else OLD[name]), lambda n: (n - 1) / n, full)
            self.count("all_reduce", lambda n: 2 * (n - 1) / n, lambda t, *_, **__: bytes_of(t))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            for restore in self.restore:
                restore()
            self.forecast = trainer.strategy.usage()[trainer.global_rank]["sent_bytes"]


def measure_traffic(given: dict[str, Any]) -> tuple[float, float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    traffic = Traffic()
    net = make("attention", blocks=4)
    trainer(world, make_strategy({**SHARDED, **given}), max_epochs=1, callbacks=[traffic]).fit(
        net, loader(batches("attention", rank, 3))
    )
    return traffic.sent, traffic.forecast


@pytest.mark.parametrize(
    ("world", "given"), [(3, {}), (4, {"num_subnetworks": 2}), (2, {"sharding_strategy": "SHARD_GRAD_OP"}), (4, {})]
)
def test_the_forecast_of_the_traffic_is_what_is_sent(pool: Any, world: int, given: dict[str, Any]) -> None:
    for sent, forecast in pool(world).run(measure_traffic, given):
        assert sent == pytest.approx(forecast)


class Change(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        trainer.strategy.replan(trainer.strategy.plan.rotated(1))


def refused(what: str) -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    net: Any = make("mlp")
    given, callbacks = dict(SHARDED), []
    if what == "compile":
        net = torch.compile(net)
    elif what == "schedule":
        callbacks = [MaskingSchedule([{"epoch": 0, "coverage": 0.5}, {"epoch": 1, "coverage": 1.0}])]
    elif what == "replan":
        callbacks = [Change()]
    elif what == "scalar":
        net.stem.register_parameter("scale", torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64)))
    elif what == "neuron plan":
        given["plan"] = plan_for(net, world, {"granularity": "neuron", "coverage": 0.5})
        del given["coverage"], given["keep_ends"]
    with pytest.raises((ValueError, RuntimeError)) as caught:
        trainer(world, make_strategy(given), max_epochs=1, callbacks=callbacks).fit(
            net, loader(batches("mlp", rank, 2))
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("compile", "torch.compile has not been made to work with sdp_fsdp"),
        ("schedule", "MaskingSchedule changes who holds what"),
        ("scalar", "'stem.scale' is a scalar"),
        ("neuron plan", "granularity='neuron' does not go with sdp_fsdp yet"),
        ("replan", "sdp_fsdp cannot change the plan while training"),
    ],
)
def test_what_is_refused_is_refused_on_every_rank(pool: Any, what: str, message: str) -> None:
    for said in pool(2).run(refused, what):
        assert message in said


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"granularity": "neuron"}, ValueError, "granularity='neuron' does not go with sdp_fsdp"),
        ({"masking": "backward"}, ValueError, "masking='backward' does not go with sdp_fsdp"),
        ({"sharding_strategy": "NO_SHARD"}, ValueError, "NO_SHARD.*use strategy='sdp'"),
        ({"sharding_strategy": "HYBRID_SHARD"}, ValueError, "HYBRID_SHARD.*num_subnetworks"),
        ({"sharding_strategy": "ALL"}, ValueError, "sharding_strategy"),
        ({"state_dict_type": "local"}, ValueError, "state_dict_type"),
        ({"auto_wrap_policy": 3}, ValueError, "auto_wrap_policy=3"),
        ({"activation_checkpointing_policy": "all"}, ValueError, "activation_checkpointing_policy='all'"),
        ({"mixed_precision": MixedPrecision(buffer_dtype=torch.float16)}, ValueError, "buffer_dtype"),
        ({"use_orig_params": True}, TypeError, "use_orig_params does not carry over to FSDP2"),
        ({"device_mesh": (2, 2)}, TypeError, "device_mesh does not carry over.*num_subnetworks"),
    ],
)
def test_arguments_that_do_not_carry_over_are_named(arguments: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        SDPFSDPStrategy(**arguments)
