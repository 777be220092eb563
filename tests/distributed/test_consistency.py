"""Ranks that compare what they hold in common, bit by bit."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_sdp import SDPStrategy
from lightning_sdp.sync import consistency
from tests.distributed.runs import plan_for, trainer
from tests.distributed.test_replan import CHANGES, Replan, changed
from tests.models import SHAPES, Net, batches, loader, make

BLOCK = {"coverage": 0.67, "keep_ends": 0}
NEURON = {**BLOCK, "granularity": "neuron"}
WEIGHT = "blocks.1.fc1.weight"
SHAPE = (16, 12)


class Buffered(Net):
    """A model with a buffer that nothing changes, and one that every forward changes by the data."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean(0).to(self.seen.dtype)
        return super().forward(x) * self.scale.to(x.dtype)


class TwoInTurn(Net):
    """Two optimizers, stepped one after the other in every training step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        body = [p for n, p in self.named_parameters() if not n.startswith("head")]
        return torch.optim.AdamW(body, lr=1e-2, eps=1e-3), torch.optim.SGD(self.head.parameters(), lr=0.1)


MODELS = {"buffered": Buffered, "in turn": TwoInTurn}


class Disturb(Callback):
    """Flips the lowest bit of one element of one tensor on one rank, once, before some optimizer step."""

    def __init__(self, name: str, rank: int, step: int, late: bool = False) -> None:
        self.name, self.rank, self.step, self.late = name, rank, step, late

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not self.late:
            self.disturb(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.late:
            self.disturb(trainer, pl_module)

    def disturb(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == self.step - 1 and trainer.global_rank == self.rank:
            self.step = 0
            tensor = dict([*pl_module.named_parameters(), *pl_module.named_buffers()])[self.name]
            tensor.detach().view(-1)[-1:].view(torch.int64).bitwise_xor_(1)


def fit(
    sdp: dict[str, Any], kind: str, every: int, callbacks: list[Callback], steps: int, **options: Any
) -> tuple[int, int]:
    """Returns how many steps were taken, and how often ranks compared."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    torch.manual_seed(7)
    net = MODELS[kind]().double() if kind in MODELS else make(kind, optimizer=options.pop("optimizer", "adamw"))
    run = trainer(
        world,
        SDPStrategy(**sdp, check_consistency_every_n_steps=every),
        max_epochs=1,
        callbacks=callbacks,
        **options,
    )
    with mock.patch.object(consistency, "_disagreement", side_effect=consistency._disagreement) as compared:
        run.fit(net, loader(batches(net.kind, rank, steps * run.accumulate_grad_batches)))
    return run.global_step, compared.call_count


def some_holders(sdp: dict[str, Any], name: str) -> list[int]:
    """Of three ranks those that hold the last element of a tensor; the one that sends it to the others comes last."""
    net = make("mlp")
    plan = plan_for(net, 3, sdp, torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64))
    sources = {s.name: plan.sources[c.name] for c in plan.components for s in c.slices}  # the last slice counts
    shape = dict(net.named_parameters())[name].shape
    ranks = [rank for rank in range(3) if plan.element_mask(name, rank, shape).view(-1)[-1]]
    return sorted(ranks, key=lambda rank: rank == sources.get(name, 0))


def refused(pool: Any, *case: Any, **options: Any) -> str:
    """The error that all ranks raise."""
    errors = pool(3).run_expecting_errors(fit, *case, **options)
    assert None not in errors and len(set(errors)) == 1, errors
    kind, text = errors[0]
    assert kind == "RuntimeError"
    return text


@pytest.mark.parametrize(
    ("sdp", "name"),
    [
        (BLOCK, WEIGHT),
        pytest.param(BLOCK, "stem.bias", marks=pytest.mark.slow),
        (NEURON, WEIGHT),
        pytest.param({**BLOCK, "masking": "backward"}, WEIGHT, marks=pytest.mark.slow),
        ({**NEURON, "masking": "backward"}, WEIGHT),
    ],
)
def test_one_bit_on_one_rank_stops_all_ranks(pool, sdp: dict[str, Any], name: str) -> None:
    odd, source = some_holders(sdp, name)[0], some_holders(sdp, name)[-1]
    assert odd != source
    text = refused(pool, sdp, "mlp", 2, [Disturb(name, odd, step=3)], 8, accumulate_grad_batches=2)
    found = re.fullmatch(r"After step 4, ranks? (.*) differs? from ranks? (.*) in '(.*)'\. .* step 2, after .*", text)
    assert found is not None and found[3] == name, text
    sides = [[int(rank) for rank in side.split(", ")] for side in found.groups()[:2]]
    compared = [0, 1, 2] if "masking" in sdp else sorted(some_holders(sdp, name))
    assert [odd] in sides and sorted(sides[0] + sides[1]) == compared
    assert sides[0] == [odd] or len(compared) == 2


def test_a_buffer_that_no_forward_changes_has_to_agree(pool) -> None:
    text = refused(pool, BLOCK, "buffered", 1, [Disturb("scale", 1, step=2, late=True)], 4)
    assert text.startswith("After step 2, rank 1 differs from ranks 0, 2 in 'scale'. ")


def test_every_step_of_several_optimizers_counts(pool) -> None:
    text = refused(pool, BLOCK, "in turn", 3, [Disturb("head.weight", 2, step=5, late=True)], 4)
    assert text.startswith("After step 6, rank 2 differs from ranks 0, 1 in 'head.weight'. ")


@pytest.mark.parametrize("sdp", [pytest.param(BLOCK, marks=pytest.mark.slow), NEURON])
def test_holders_of_a_new_plan_are_compared(pool, sdp: dict[str, Any]) -> None:
    changes = {2: {"turns": 1, "coverage": 0.67}}
    plan = changed(plan_for(make("mlp"), 3, sdp, torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64)), changes[2])
    odd = next(rank for rank in (2, 1, 0) if plan.element_mask(WEIGHT, rank, SHAPE).view(-1)[-1])
    text = refused(pool, sdp, "mlp", 1, [Replan(changes), Disturb(WEIGHT, odd, step=4)], 6)
    assert text.startswith("After step 4, ") and f"rank {odd}" in text and f"in {WEIGHT!r}" in text


RIGHT: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (BLOCK, "conv", {"optimizer": "momentum"}),
    (NEURON, "conv", {"optimizer": "momentum"}),
    ({**NEURON, "masking": "backward"}, "conv", {"optimizer": "momentum"}),
    ({"coverage": 1.0}, "conv", {"optimizer": "momentum"}),
    ({**BLOCK, "masking": "backward"}, "mlp", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    (NEURON, "gqa", {"gradient_clip_val": 0.05}),
    (BLOCK, "buffered", {}),
    ({**BLOCK, "masking": "backward"}, "buffered", {"accumulate_grad_batches": 2}),
]


@pytest.mark.parametrize(("sdp", "kind", "options"), RIGHT)
def test_a_correct_run_agrees_after_every_step(pool, sdp: dict[str, Any], kind: str, options: dict[str, Any]) -> None:
    assert pool(3).run(fit, sdp, kind, 1, [], 5, **options) == [(5, 5)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("sdp", [BLOCK, NEURON])
@pytest.mark.parametrize("change", ["another assignment", "to backward masking and back"])
def test_a_correct_run_agrees_through_changes_of_its_plan(pool, sdp: dict[str, Any], change: str) -> None:
    assert pool(3).run(fit, sdp, "mlp", 1, [Replan(CHANGES[change])], 8) == [(8, 8)] * 3


@pytest.mark.parametrize("sdp", [BLOCK, pytest.param(NEURON, marks=pytest.mark.slow)])
def test_local_steps_are_compared_at_the_end_of_their_period(pool, sdp: dict[str, Any]) -> None:
    """Comparisons are due after steps 2, 4, 6 and 8, and come after 3 and 6."""
    assert pool(3).run(fit, {**sdp, "model_averaging_period": 3}, "mlp", 2, [], 8) == [(8, 2)] * 3


def test_nothing_is_compared_unless_it_is_asked_for(pool) -> None:
    assert pool(2).run(fit, BLOCK, "mlp", 0, [Disturb("stem.bias", 1, step=2)], 3) == [(3, 0)] * 2


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.uint8, torch.bool]
)
def test_a_checksum_sees_values_and_places(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(2, (40, 3), generator=generator).to(dtype)
    base = int(consistency.checksum([values]))
    assert int(consistency.checksum([values[:7], values[7:]])) == base
    assert int(consistency.checksum([values.T.clone().T])) == base, "the layout in memory does not matter"
    others = [values.flip(0), values.roll(1, 0), values[:39], ~values if dtype == torch.bool else -values + 1]
    for i in range(0, 120, 7):
        others.append(values.clone())
        element = others[-1].view(-1)[i]
        element.fill_(not element if dtype == torch.bool else element + 1)
    sums = {int(consistency.checksum([other])) for other in others}
    assert base not in sums and len(sums) == len(others)


def test_a_checksum_sees_signs_that_change_in_pairs() -> None:
    values = torch.rand(64, dtype=torch.float64)
    assert int(consistency.checksum([values])) != int(consistency.checksum([-values]))
    assert int(consistency.checksum([torch.zeros(4)])) != int(consistency.checksum([-torch.zeros(4)]))


def test_a_checksum_does_not_depend_on_the_size_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [torch.rand(7, 5), torch.rand(100)]
    whole = int(consistency.checksum(values))
    monkeypatch.setattr(consistency, "_CHUNK", 9)
    assert int(consistency.checksum(values)) == whole
