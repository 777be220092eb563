"""A checkpoint of any layout resumes under any other: ranks, granularity, regime, DDP and one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import Optimizer

from lightning_sdp import MaskPlan, SDPReference
from tests.distributed.runs import full_weights, make_strategy, plan_for, trainer
from tests.models import SHAPES, Net, batches, loader

Layout = tuple[int, Any]  # the number of ranks, and arguments of SDPStrategy or the name of another strategy

SAVED_AFTER, THEN = 3, 2  # steps
BLOCK = {"keep_ends": 0}
NEURON = {**BLOCK, "granularity": "neuron"}
BACKWARD = {"masking": "backward"}
SHARDED = {**BLOCK, "sharded": True}
LAYOUTS: dict[str, Layout] = {"one device": (1, "auto"), "sdp alone": (1, {}), "ddp": (2, "ddp")}
LAYOUTS |= {f"{world} sharded": (world, {**SHARDED, "coverage": 0.67}) for world in (2, 3)}
LAYOUTS["4 sharded in pairs"] = 4, {**SHARDED, "coverage": 0.5, "num_subnetworks": 2}
for world, coverage in ((2, 0.5), (3, 0.67), (4, 0.5)):
    for granularity in (BLOCK, NEURON):
        for masking in ({}, BACKWARD):
            name = " ".join([str(world), granularity.get("granularity", "block"), *masking.values()])
            LAYOUTS[name] = world, {**granularity, **masking, "coverage": coverage}

ALGORITHMS: dict[str, Callable[..., Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "amsgrad": partial(torch.optim.AdamW, lr=0.01, eps=1e-3, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-3, momentum=0.5, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, eps=1e-3, initial_accumulator_value=0.1),
}
OPTIMIZERS = [*ALGORITHMS, "two optimizers", "interleaved groups", "frozen"]


class Resumed(Net):
    """A model with one of `OPTIMIZERS`; they step by hand, so that there may be two.

    Args:
        how: Which one. Of two, the second has the blocks; ``"frozen"``: a block neither trains nor is in the optimizer.
    """

    def __init__(self, how: str) -> None:
        super().__init__("gqa", blocks=3)
        self.how, self.automatic_optimization = how, False
        if how == "frozen":
            self.blocks[0].requires_grad_(False)

    def configure_optimizers(self) -> list[Optimizer]:
        adamw, momentum = ALGORITHMS["amsgrad"], ALGORITHMS["momentum"]
        named = {n: p for n, p in self.named_parameters() if p.requires_grad}
        if self.how == "two optimizers":
            rest, blocks = ([p for n, p in named.items() if n.startswith("blocks") == there] for there in (False, True))
            return [momentum(rest), adamw(blocks)]
        if self.how == "interleaved groups":
            matrices, vectors = ([p for p in named.values() if (p.dim() > 1) == there] for there in (True, False))
            return [adamw([{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "lr": 0.02}])]
        return [ALGORITHMS.get(self.how, adamw)(list(named.values()))]

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        own: Any = self.optimizers()
        optimizers = own if isinstance(own, list) else [own]
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()


def resumed(how: str) -> Resumed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        net = Resumed(how).double()
    net.example_input_array = torch.zeros(2, *SHAPES["gqa"], dtype=torch.float64)
    return net


def fit(given: Any, how: str, directory: str, resume: str | None) -> tuple[dict[str, Tensor], str]:
    """Trains an epoch and saves, or resumes and trains another; returns weights (sharded: on rank 0) and the plan."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = resumed(how)
    save = ModelCheckpoint(directory, filename="saved", save_on_train_epoch_end=True)
    run = trainer(
        world, make_strategy(given), max_epochs=1 if resume is None else 2, enable_checkpointing=resume is None,
        callbacks=[save] if resume is None else [],
    )  # fmt: skip
    data = batches("gqa", rank, SAVED_AFTER + THEN)
    if resume is None:
        run.fit(net, loader(data[:SAVED_AFTER]))
    else:
        run.fit(net, loader(data[SAVED_AFTER:]), ckpt_path=resume, weights_only=False)
    assert run.current_epoch == (1 if resume is None else 2)
    plan = run.strategy.plan if isinstance(given, dict) else plan_for(net, world, {"coverage": 1.0})  # type: ignore
    return full_weights(run.strategy), plan.to_json()


class Together:
    """Several optimizers that step as one."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def check(pool: Any, saved: Path, target: Layout, how: str) -> None:
    """Goes on from a checkpoint; beside it the reference starts from its weights and optimizer state."""
    world, given = target
    results = pool(world).run(fit, given, how, str(saved.parent), str(saved))
    checkpoint = torch.load(saved, weights_only=True)
    net = resumed(how)
    optimizers = net.configure_optimizers()
    net.load_state_dict(checkpoint["state_dict"])
    for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
        optimizer.load_state_dict(state)
    masking = given.get("masking", "forward") if isinstance(given, dict) else "forward"
    plan, together = MaskPlan.from_json(results[0][1]), Together(optimizers)
    ref = SDPReference(
        net, plan, together, ranks_per_worker=world // plan.num_subnetworks, masking=masking,
        loss=lambda model, batch: model.loss(batch),
    )  # fmt: skip
    data = [batches("gqa", rank, SAVED_AFTER + THEN)[SAVED_AFTER:] for rank in range(world)]
    for step in range(THEN):
        ref.step([[own[step]] for own in data])
    expected = net.state_dict()
    assert list(results[0][0]) == list(expected)
    for full, _ in results:
        torch.testing.assert_close(full, {name: expected[name] for name in full}, rtol=1e-10, atol=1e-10)


Saved = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def saved(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Gives the checkpoint of a layout and an optimizer, which is made once."""
    made: dict[tuple[str, str], Path] = {}

    def of(layout: str, how: str) -> Path:
        if (layout, how) not in made:
            directory = tmp_path_factory.mktemp("saved")
            world, given = LAYOUTS[layout]
            pool(world).run(fit, given, how, str(directory), None)
            made[layout, how] = directory / "saved.ckpt"
        return made[layout, how]

    return of


DIAGONAL = [
    ("3 block", "2 neuron", "amsgrad"),
    ("2 neuron backward", "3 block", "momentum"),
    ("ddp", "3 neuron", "two optimizers"),
    ("3 neuron", "one device", "interleaved groups"),
    ("one device", "3 block backward", "rmsprop"),
    ("3 neuron backward", "2 neuron backward", "frozen"),
    ("3 sharded", "2 block", "amsgrad"),
    ("3 neuron", "2 sharded", "two optimizers"),
    ("2 sharded", "4 sharded in pairs", "interleaved groups"),
]
NAMES = list(LAYOUTS)
REST = [
    (first, then, OPTIMIZERS[(NAMES.index(first) + 2 * NAMES.index(then)) % len(OPTIMIZERS)])
    for first in NAMES
    for then in NAMES
]
PLAIN = [pytest.param(how, marks=[] if how == "interleaved groups" else pytest.mark.slow) for how in OPTIMIZERS]


@pytest.mark.parametrize(
    ("first", "then", "how"),
    [*DIAGONAL, *[pytest.param(*case, marks=pytest.mark.slow) for case in REST if case not in DIAGONAL]],
)
def test_a_checkpoint_resumes_in_another_layout(pool, saved: Saved, first: str, then: str, how: str) -> None:
    check(pool, saved(first, how), LAYOUTS[then], how)


@pytest.mark.parametrize("how", PLAIN)
def test_a_checkpoint_has_the_optimizer_state_of_a_plain_run(pool, saved: Saved, how: str) -> None:
    """One that a plain optimizer on the full model takes, with state for every parameter that trains."""
    states = torch.load(saved("2 neuron backward", how), weights_only=True)["optimizer_states"]
    optimizers = resumed(how).configure_optimizers()
    for state, optimizer in zip(states, optimizers, strict=True):
        plain = optimizer.state_dict()["param_groups"]
        assert [g["params"] for g in state["param_groups"]] == [g["params"] for g in plain]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        assert list(state["state"]) == list(range(len(parameters)))
        for number, parameter in enumerate(parameters):
            tensors = [v for v in state["state"][number].values() if isinstance(v, Tensor) and v.dim()]
            assert tensors and all(v.shape == parameter.shape and v.isfinite().all() for v in tensors)
