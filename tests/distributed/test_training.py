"""Training on real ranks against the one-process reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_sdp import SDPStrategy
from tests.distributed.runs import WORLDS, fit_rank, plan_for, reference, trainer
from tests.models import batches, loader, make


def check(
    pool: Any, world: int, workers: int, sdp: dict[str, Any], kind: str, tolerance: float = 1e-10, **options: Any
) -> list[dict[str, Any]]:
    """Fits on ranks and in the reference; the plan has `parts`, weights agree and holders are bit-equal."""
    parts = options.pop("parts", set())
    model = options.pop("model", {})
    steps = options.pop("steps", 10)
    results = pool(world).run(fit_rank, {**sdp, "num_subnetworks": workers}, kind, steps, model, **options)
    ref = reference(world, workers, sdp, kind, steps, model, **options)
    assert parts <= {component.kind for component in ref.plan.components}, "what cannot be cut is kept whole"
    expected = ref.module.state_dict()
    for rank, result in enumerate(results):
        assert list(result["full"]) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(
                result["full"][name],
                value,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, n=name, r=rank: f"{n} on {r}: {m}",
            )
            assert torch.equal(result["full"][name], results[0]["full"][name]), (
                f"{name}: rank {rank} differs from rank 0"
            )
    ranks_per_worker = world // workers
    for name, parameter in make(kind, **model).named_parameters():
        masks = [ref.plan.element_mask(name, rank // ranks_per_worker, parameter.shape) for rank in range(world)]
        full: dict[int, torch.Tensor] = {}
        for rank, (result, mask) in enumerate(zip(results, masks, strict=True)):
            held = result["held"].get(name)
            assert (held is not None) == bool(mask.any()), f"{name} on rank {rank}"
            if held is not None:
                assert held.numel() == mask.sum(), f"{name} on rank {rank}"
                full[rank] = torch.full(mask.shape, torch.nan, dtype=held.dtype).masked_scatter(mask, held)
        for rank, values in full.items():
            for other, others in full.items():
                both = masks[rank] & masks[other]
                assert torch.equal(values[both], others[both]), f"{name} on ranks {rank} and {other}"
    return results


@pytest.mark.parametrize("coverage", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ten_adamw_steps_with_clipping_and_accumulation_equal_the_reference(pool, world: int, coverage: float) -> None:
    check(pool, world, world, {"coverage": coverage}, "mlp", accumulate_grad_batches=3, gradient_clip_val=0.05)


NEURON = {"granularity": "neuron", "keep_ends": 0}


@pytest.mark.parametrize(("kind", "sdp"), [("mlp", {"coverage": 0.5}), ("gqa", {**NEURON, "coverage": 0.6})])
def test_two_workers_on_four_ranks_equal_the_reference(pool, kind: str, sdp: dict[str, Any]) -> None:
    check(pool, 4, 2, sdp, kind, accumulate_grad_batches=2, gradient_clip_val=0.05)


@pytest.mark.parametrize(("world", "coverage"), [(2, 0.5), (3, 0.75), (4, 0.5)])
def test_attention_blocks_with_keyword_and_tuple_equal_the_reference(pool, world: int, coverage: float) -> None:
    check(pool, world, world, {"coverage": coverage}, "attention", gradient_clip_val=0.05)


@pytest.mark.parametrize(("world", "coverage"), [(2, 0.5), (2, 1.0), (3, 0.75), (4, 0.5)])
def test_weights_and_recalibrated_statistics_of_a_batchnorm_model_equal_the_reference(
    pool, world: int, coverage: float
) -> None:
    check(pool, world, world, {"coverage": coverage}, "conv", steps=6, model={"optimizer": "momentum"})


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["mlp", "gqa", "attention", "swin"])
def test_neurons_and_heads_equal_the_reference(pool, kind: str, world: int) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    parts = {"neurons"} if kind == "mlp" else {"neurons", "heads"}
    check(pool, world, world, {**NEURON, "coverage": 0.6}, kind, model={"blocks": 2}, parts=parts, **options)


@pytest.mark.parametrize("world", WORLDS)
def test_channels_of_a_batchnorm_model_equal_the_reference(pool, world: int) -> None:
    model = {"optimizer": "momentum", "blocks": 3}
    check(pool, world, world, {**NEURON, "coverage": 0.5}, "conv", model=model, parts={"channels"})


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_swin_t_equals_the_reference(pool, world: int) -> None:
    check(pool, world, world, {**NEURON, "coverage": 0.5}, "swin_t", parts={"neurons", "heads"})


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_torchvision_basic_blocks_equal_the_reference(pool, world: int) -> None:
    check(pool, world, world, {**NEURON, "coverage": 0.5}, "basic", parts={"channels"})


@pytest.mark.parametrize("world", WORLDS)
def test_padded_heads_equal_the_reference(pool, world: int) -> None:
    sdp = {**NEURON, "coverage": 0.5, "on_unsliceable": "pad"}
    check(pool, world, world, sdp, "fixed", model={"blocks": 2}, parts={"heads"}, gradient_clip_val=0.05)


def test_blocks_found_by_one_training_batch_equal_the_reference(pool) -> None:
    check(pool, 3, 3, {"coverage": 0.67, "keep_ends": 0}, "opaque", model={"blocks": 4})


def test_clipping_by_value_equals_the_reference(pool) -> None:
    options = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}
    check(pool, 3, 3, {"coverage": 0.5}, "mlp", model={"optimizer": "sgd"}, **options)


def test_float32_with_sgd_equals_the_reference_to_single_precision(pool) -> None:
    model = {"dtype": torch.float32, "optimizer": "sgd"}
    check(pool, 2, 2, {"coverage": 0.5}, "mlp", tolerance=1e-6, model=model, accumulate_grad_batches=2)


@pytest.mark.parametrize("sdp", [{}, NEURON])
def test_unequal_coverage_per_worker_equals_the_reference(pool, sdp: dict[str, Any]) -> None:
    check(pool, 3, 3, {**sdp, "coverage": [1.0, 0.5, 0.25]}, "mlp", gradient_clip_val=0.05)


@pytest.mark.parametrize("sdp", [{}, NEURON])
def test_an_optimizer_with_state_from_the_start_equals_the_reference(pool, sdp: dict[str, Any]) -> None:
    check(pool, 3, 3, {**sdp, "coverage": 0.5}, "gqa", model={"optimizer": "adagrad", "blocks": 2}, steps=4)


def test_two_optimizer_groups_keep_their_settings(pool) -> None:
    check(pool, 3, 3, {"coverage": 0.5}, "mlp", model={"groups": True}, gradient_clip_val=0.05)


@pytest.mark.parametrize("sdp", [{}, NEURON])
def test_small_buckets_change_nothing(pool, sdp: dict[str, Any]) -> None:
    options = {"gradient_clip_val": 0.05}
    big = check(pool, 3, 3, {**sdp, "coverage": 0.67}, "mlp", **options)
    small = pool(3).run(fit_rank, {**sdp, "coverage": 0.67, "bucket_cap_mb": 0.0005}, "mlp", 10, {}, **options)
    for a, b in zip(big, small, strict=True):
        for name in a["full"]:
            torch.testing.assert_close(a["full"][name], b["full"][name], rtol=1e-12, atol=1e-12)


def test_more_workers_than_blocks(pool) -> None:
    check(pool, 4, 4, {"coverage": 0.5, "keep_ends": 0}, "mlp", model={"blocks": 2})


@pytest.mark.parametrize("granularity", ["block", "neuron"])
@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_full_coverage_is_ddp_bit_for_bit(pool, kind: str, granularity: str) -> None:
    model = {"dtype": torch.float32}
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    ddp = pool(2).run(fit_rank, "ddp", kind, 10, model, **options)
    sdp = pool(2).run(fit_rank, {"coverage": 1.0, "granularity": granularity}, kind, 10, model, **options)
    for a, b in zip(ddp, sdp, strict=True):
        assert list(a["held"]) == list(b["held"])
        for name in a["held"]:
            assert torch.equal(a["held"][name], b["held"][name]), name
    for name, value in ddp[0]["full"].items():
        assert torch.equal(value, sdp[0]["full"][name]), name


def fit_from_unequal_weights() -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    net = make("conv", optimizer="momentum")
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            tensor.add_(rank)
    trainer(3, SDPStrategy(coverage=0.5), max_epochs=1).fit(net, loader(batches("conv", rank, 2)))
    return dict(net.state_dict())


def test_training_starts_from_the_weights_of_rank_zero(pool) -> None:
    results = pool(3).run(fit_from_unequal_weights)
    ref = reference(3, 3, {"coverage": 0.5}, "conv", 2, {"optimizer": "momentum"})
    for result in results:
        for name, value in ref.module.state_dict().items():
            torch.testing.assert_close(result[name], value, rtol=1e-10, atol=1e-10)


def test_reference_itself_is_plain_averaging_at_full_coverage() -> None:
    """The oracle against torch alone: at C = 1 it is large-batch training on the mean of the ranks' losses."""
    ref = reference(2, 2, {"coverage": 1.0}, "mlp", 3, {})
    net = make("mlp")
    optimizer = net.configure_optimizers()
    data = [batches("mlp", rank, 3) for rank in range(2)]
    for step in range(3):
        optimizer.zero_grad()
        (sum(net.training_step(own[step], 0) for own in data) / 2).backward()
        optimizer.step()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(ref.module.state_dict()[name], value, rtol=1e-12, atol=1e-12)
    assert plan_for(net, 2, {"coverage": 1.0}).coverage == (1.0, 1.0)
