"""Every model, both granularities: a worker's subnetwork computes what the full model does without what it lacks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
import torchvision.models
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_sdp import MaskPlan, SDPReference
from lightning_sdp.subnetwork import Subnetwork
from tests.unit.models import randomize
from tests.zoo import ZOO

WORKERS = 4
NO_BLOCKS = {"mlp", "unet", "encoder_post_norm", "hf_bert"}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small float64 convolutions are many times slower on several
    yield
    torch.set_num_threads(threads)


def build(name: str, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    if name.startswith("hf_"):
        pytest.importorskip("transformers")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, inputs = ZOO[name]()
        module = randomize(module).to(dtype)
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    generator = torch.Generator().manual_seed(1)

    def fill(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor if tensor.bool().any() else torch.randint(9, tensor.shape, generator=generator)
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(dtype)

    if isinstance(inputs, dict):
        return module, {key: fill(value) for key, value in inputs.items()}
    return module, tuple(fill(value) for value in inputs)


def outputs_and_gradients(module: nn.Module, inputs: Any) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    module.zero_grad()
    output = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    sum((o * torch.linspace(0.5, 1, o.numel(), dtype=o.dtype).view_as(o)).sum() for o in outputs).backward()  # type: ignore[union-attr]
    return [o.detach() for o in outputs], {n: p.grad for n, p in module.named_parameters()}


def close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    scale = max(float(expected.abs().max()), 1e-30) if expected.numel() else 1.0
    assert actual.shape == expected.shape, what
    assert bool(torch.isfinite(expected).all()), what
    assert float((actual - expected).abs().max()) <= tolerance * scale, what


def check(module: nn.Module, inputs: Any, granularity: str, tolerance: float) -> None:
    options: dict[str, Any] = {"granularity": granularity, "coverage": 0.5, "keep_ends": 0, "example_inputs": inputs}
    plan = MaskPlan.build(module, num_subnetworks=WORKERS, **options)
    whole, _ = outputs_and_gradients(module, inputs)
    reference = SDPReference(copy.deepcopy(module), plan, torch.optim.SGD(module.parameters(), 0.1))
    missing = 0
    for worker in range(WORKERS):
        with reference.subnetwork(worker) as masked:
            masked.eval()
            expected, gradients = outputs_and_gradients(masked, inputs)
        carved = copy.deepcopy(module)
        Subnetwork(carved, plan, worker).carve()
        actual, own = outputs_and_gradients(carved, inputs)
        for have, want in zip(actual, expected, strict=True):
            close(have, want, tolerance, f"output of worker {worker}")
        heard = any(float((a - b).abs().max()) > 1e-6 for a, b in zip(expected, whole, strict=True))
        assert heard or not plan.missing_on(worker)
        largest = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
        for parameter, gradient in own.items():
            full = gradients[parameter]
            layout = plan.layouts.get(parameter)
            assert (gradient is None) == (full is None), parameter
            if gradient is not None and full is not None:
                held = full if layout is None else layout.take(full, worker)
                # Some gradients are zero but for rounding, as that of a key's bias: so all are measured by the largest.
                assert float((gradient - held).abs().max()) <= tolerance * largest, f"{parameter} on worker {worker}"
                missing += full.numel() - gradient.numel()
    assert missing > 0 or granularity == "block"


def torchvision_model(name: str) -> tuple[nn.Module, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = randomize(getattr(torchvision.models, name)(num_classes=10))
    return module, (torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["block", "neuron"])
@pytest.mark.parametrize(
    "name",
    ["resnet50", "wide_resnet50_2", "mobilenet_v2", "mobilenet_v3_large", "convnext_tiny", "swin_t", "swin_v2_t"],
)
def test_subnetwork_of_a_full_torchvision_model_equals_the_masked_model(name: str, granularity: str) -> None:
    check(*torchvision_model(name), granularity, 1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), pytest.param(torch.float32, 1e-6, marks=pytest.mark.slow)],
    ids=["double", "single"],
)
@pytest.mark.parametrize("granularity", ["block", "neuron"])
@pytest.mark.parametrize("name", list(ZOO))
def test_subnetwork_equals_the_masked_model(name: str, granularity: str, dtype: torch.dtype, tolerance: float) -> None:
    if granularity == "block" and name in NO_BLOCKS:
        pytest.skip("has no residual blocks")
    check(*build(name, dtype), granularity, tolerance)
