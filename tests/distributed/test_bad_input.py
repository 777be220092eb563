"""Bad input ends on every rank at once, with one and the same sentence that names the argument."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelPruning, StochasticWeightAveraging

from lightning_sdp import Group, MaskPlan, Member, SDPStrategy, register_neurons
from tests.distributed.pool import Pool
from tests.distributed.runs import trainer
from tests.models import MLPBlock, Net, batches, loader, make

Pools = Callable[[int], Pool]
SECONDS = 15.0


class Foreign(Net):
    """Its optimizer has a parameter that the model has not."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)


class WholeTensor(Net):
    """Its optimizer looks at whole tensors."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class Unreadable(Net):
    """Its forward depends on its data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Together(Net):
    """Its optimizer updates all tensors together."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class NormedMLP(MLPBlock):
    """Normalizes what it hides, and says that it can be cut nevertheless."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.inner = nn.LayerNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(self.inner(self.fc1(self.norm(x))))


def declare_normed() -> None:
    @register_neurons(NormedMLP)
    def groups(block: NormedMLP) -> list[Group]:
        units = block.fc1.out_features
        produced = [Member(name, 0, (units,)) for name in ("fc1.weight", "fc1.bias", "inner.weight", "inner.bias")]
        return [Group("hidden", "neurons", units, (*produced, Member("fc2.weight", 1, (units,), reads=True)))]


def build(model: str, rank: int) -> Net:
    """A model, or one that differs between ranks or is not ready."""
    net = make(model if model in ("conv", "gqa") else "mlp", dtype=torch.float32)
    if model == "no blocks":
        net.blocks = nn.ModuleList()
    elif model == "foreign":
        net = Foreign("mlp")
    elif model == "whole tensors":
        net = WholeTensor("mlp")
    elif model == "compiled":
        net.blocks[1] = torch.compile(net.blocks[1], backend="eager")
    elif model == "lbfgs":
        net = Together("mlp")
    elif model == "unreadable":
        net = Unreadable("gqa")
    elif model == "normed":
        declare_normed()
        net.blocks = nn.ModuleList([NormedMLP(8)])
    elif model == "gqa":
        net.example_input_array = None
    elif model == "half on meta":
        net.stem.to("meta")
    elif model == "lazy":
        net.head = nn.LazyLinear(3)
    elif rank == 1 and model == "extra layer on one rank":
        net.extra = nn.Linear(2, 2)
    elif rank == 1 and model == "extra block on one rank":
        net.blocks.append(make("mlp").blocks[0].float())
    elif rank == 1 and model == "other shape on one rank":
        net.head = nn.Linear(12, 4)
    elif rank == 1 and model == "other dtype on one rank":
        net.head.double()
    return net


def fit(sdp: dict[str, Any], model: str = "mlp", on_one_rank: dict[str, Any] | None = None, **options: Any) -> str:
    world, rank = dist.get_world_size(), dist.get_rank()
    net = build(model, rank)
    if "callback" in options:
        options["callbacks"] = [options.pop("callback")()]
    strategy = SDPStrategy(**{**sdp, **(on_one_rank or {} if rank == 1 else {})})
    run = trainer(world, strategy, max_epochs=1, **options)
    run.fit(net, loader(batches(net.kind, rank, 2, torch.float32)))
    return f"{run.global_step} steps"


def pids() -> int:
    return os.getpid()


def check(ranks: Pool, message: str, sdp: dict[str, Any], **case: Any) -> None:
    """All ranks raise the same error at once, and the processes are fit for the next run."""
    before, start = ranks.run(pids), time.monotonic()
    errors = ranks.run_expecting_errors(fit, sdp, **case)
    assert time.monotonic() - start < SECONDS
    assert None not in errors, errors
    assert len(set(errors)) == 1, errors
    kind, text = errors[0] or ("", "")
    assert kind == "ValueError", errors
    assert message in text
    assert "\n" not in text
    assert ranks.run(fit, {"coverage": 0.5}) == ["2 steps"] * ranks.world
    assert ranks.run(pids) == before


def plan_file(path: Path, change: Callable[[dict[str, Any]], Any] = lambda plan: None, blocks: int = 5) -> str:
    plan = json.loads(MaskPlan.build(Net("mlp", blocks=blocks), num_subnetworks=2).to_json())
    change(plan)
    path.write_text(json.dumps(plan))
    return str(path)


@pytest.mark.parametrize(
    ("sdp", "message"),
    [
        ({"coverage": 0}, "coverage=0 must lie in (0, 1]"),
        ({"coverage": 1.5}, "coverage=1.5 must lie in (0, 1]"),
        ({"coverage": "x"}, "coverage='x' must lie in (0, 1]"),
        ({"coverage": [0.5, 0.5, 0.5]}, "coverage=[0.5, 0.5, 0.5] has 3 shares for 2 workers"),
        ({"coverage": [0.5, 0.4]}, "coverage=[0.5, 0.4] sums to less than 1"),
        ({"granularity": "layer"}, "granularity='layer' is unknown: choose 'block' or 'neuron'"),
        ({"on_unsliceable": "drop"}, "on_unsliceable='drop' is unknown: choose 'keep' or 'pad' or 'error'"),
        ({"masking": "sideways"}, "masking='sideways' is unknown: choose 'forward' or 'backward'"),
        ({"masking": "backward", "model_averaging_period": 2}, "model_averaging_period > 1 needs masking='forward'"),
        ({"masking": "backward", "eval_model": "subnetwork"}, "eval_model='subnetwork' needs masking='forward'"),
        ({"balance": "weight"}, "balance='weight' is unknown: choose 'count' or 'params'"),
        ({"eval_model": "half"}, "eval_model='half' is unknown: choose 'full' or 'subnetwork'"),
        ({"components": "encoder.*"}, "components='encoder.*' matches no module of the model"),
        ({"components": ["blocks.0", "blocks.0.fc1"]}, "components: 'blocks.0.fc1' lies inside 'blocks.0'"),
        ({"keep": ["blocks.0", "encoder.*"]}, "keep='encoder.*' matches no module of the model"),
        ({"keep_ends": [3, 2]}, "keep and keep_ends leave nothing to mask: all 5 blocks of Net"),
        ({"keep_ends": "both"}, "keep_ends='both' is not understood"),
    ],
)
def test_arguments(pool: Pools, sdp: dict[str, Any], message: str) -> None:
    check(pool(2), message, sdp)


def test_number_of_workers_that_does_not_divide_the_world(pool: Pools) -> None:
    check(pool(3), "num_subnetworks=2 does not divide the 3 processes", {"num_subnetworks": 2})


@pytest.mark.parametrize(
    ("change", "blocks", "message"),
    [
        (lambda plan: plan["components"][2].update(holders=[]), 5, "leaves component 'blocks.2' without a holder"),
        (
            lambda plan: plan["components"][2].update(holders=[2]),
            5,
            "gives component 'blocks.2' to workers [2]; N is 2",
        ),
        (lambda plan: plan["components"][2]["slices"].pop(), 5, "component 'blocks.2' differs in blocks.2.fc2.bias"),
        (
            lambda plan: plan.update(num_subnetworks=3),
            5,
            "plan is for 3 workers, which does not divide the 2 processes",
        ),
        (lambda plan: plan.update(version=99), 5, "version 99"),
        (lambda plan: plan.update(color="red"), 5, "unknown key 'color'"),
        (lambda plan: None, 6, "The plan does not fit the model: it has no module 'blocks.5'"),
    ],
)
def test_plan_file(pool: Pools, tmp_path: Path, change: Callable[..., Any], blocks: int, message: str) -> None:
    check(pool(2), message, {"plan": plan_file(tmp_path / "plan.json", change, blocks)})


def test_plan_file_that_is_not_there(pool: Pools, tmp_path: Path) -> None:
    check(pool(2), f"plan='{tmp_path}/none.json' cannot be read: No such file", {"plan": f"{tmp_path}/none.json"})
    there = {"plan": plan_file(tmp_path / "plan.json")}
    check(pool(2), "none.json' cannot be read", there, on_one_rank={"plan": f"{tmp_path}/none.json"})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("extra layer on one rank", "rank 0 has component blocks.0 held by workers"),
        ("extra block on one rank", "rank 1 has blocks.5.norm.weight of shape (12,)"),
        (
            "other shape on one rank",
            "rank 0 has head.weight of shape (3, 12) and torch.float32, rank 1 has head.weight of shape (4, 12)",
        ),
        ("other dtype on one rank", "rank 1 has head.weight of shape (3, 12) and torch.float64"),
    ],
)
def test_models_that_differ_between_ranks(pool: Pools, model: str, message: str) -> None:
    check(pool(2), "The model or its mask plan differs between ranks", {"coverage": 0.5}, model=model)
    errors = pool(2).run_expecting_errors(fit, {"coverage": 0.5}, model=model)
    assert message in (errors[0] or ("", ""))[1]


NEURON = {"granularity": "neuron", "coverage": 0.5}


@pytest.mark.parametrize(
    ("sdp", "model", "message"),
    [
        (
            {"granularity": "block", "model_averaging_period": 2, "average_optimizer_state": True},
            "whole tensors",
            "Adafactor updates a tensor as a whole",
        ),
        ({}, "whole tensors", "Adafactor updates a tensor as a whole, but 'blocks.0.fc1.weight' and"),
        ({}, "gqa", "Give the model an `example_input_array`"),
        ({}, "unreadable", "No maskable group of neurons, channels or heads was found in Unreadable."),
        (
            {},
            "normed",
            "'blocks.0.hidden' can be cut, but `inner` cannot be cut: LayerNorm normalizes over the dimension",
        ),
        ({"components": "stem"}, "mlp", "components='stem': nothing in there can be cut into neurons"),
        ({"components": "blocks.0.fc1"}, "mlp", "components='blocks.0.fc1': nothing in there can be cut into neurons"),
        ({"keep": "blocks"}, "mlp", "keep and keep_ends leave nothing to mask: all 5 groups of neurons of Net"),
    ],
)
def test_neurons_that_cannot_be_cut(pool: Pools, sdp: dict[str, Any], model: str, message: str) -> None:
    check(pool(2), message, {**NEURON, **sdp}, model=model)


@pytest.mark.parametrize("one", [{"coverage": 1.0}, {"seed": 5}, {"keep": "blocks.1"}])
def test_arguments_that_differ_between_ranks(pool: Pools, one: dict[str, Any]) -> None:
    message = "The model or its mask plan differs between ranks: where rank 0 has component blocks."
    check(pool(2), message, {"coverage": 0.5}, on_one_rank=one)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no blocks", "No maskable block was found in Net. Name the blocks with `components`"),
        ("half on meta", "Parameter 'stem.weight' is on the meta device and others are not"),
        ("lazy", "Parameter 'head.weight' is not initialized yet"),
        ("foreign", "parameter group 0 holds a tensor that is no parameter of the model"),
    ],
)
def test_models_that_cannot_be_trained(pool: Pools, model: str, message: str) -> None:
    check(pool(2), message, {"coverage": 0.5}, model=model)


def test_options_of_the_trainer_that_need_whole_tensors(pool: Pools) -> None:
    message = "sync_batchnorm=True synchronizes a BatchNorm as a whole"
    check(pool(2), message, {"coverage": 0.5, "granularity": "neuron"}, model="conv", sync_batchnorm=True)
    assert pool(2).run(fit, {"coverage": 1.0}, model="conv") == ["2 steps"] * 2


@pytest.mark.parametrize(
    ("sdp", "case", "message"),
    [
        ({"coverage": 0.5}, {"callback": EMAWeightAveraging}, "EMAWeightAveraging pairs parameters by their"),
        ({"coverage": 0.5}, {"callback": partial(StochasticWeightAveraging, 0.1)}, "StochasticWeightAveraging pairs"),
        ({"coverage": 0.5}, {"callback": partial(ModelPruning, "l1_unstructured")}, "ModelPruning replaces parameters"),
        ({**NEURON, "masking": "backward"}, {"model": "compiled"}, "torch.compile does not see which entries"),
        ({"coverage": 0.5}, {"model": "lbfgs"}, "LBFGS updates all parameters together"),
        ({"coverage": 0.5, "masking": "backward"}, {"model": "lbfgs"}, "LBFGS updates all parameters together"),
    ],
)
def test_what_would_average_or_step_wrongly(
    pool: Pools, sdp: dict[str, Any], case: dict[str, Any], message: str
) -> None:
    check(pool(2), message, sdp, **case)
