"""What users do around a step: raw optimizers, weights changed by hand, copies, and little that trains."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor
from torch.func import functional_call

from lightning_sdp import BatchNormRecalibration, SDPReference, SDPStrategy
from tests.distributed.runs import plan_for, trainer
from tests.models import SHAPES, Net, batches, loader, same_state

FORWARD = {"coverage": 0.5, "keep_ends": 0}
BACKWARD = {**FORWARD, "masking": "backward"}
NEURON = {**BACKWARD, "granularity": "neuron"}


def run(net: Net, sdp: dict[str, Any], data: list[Any], **options: Any) -> dict[str, Tensor]:
    world = torch.distributed.get_world_size()
    trainer(world, SDPStrategy(**sdp), max_epochs=1, **options).fit(net, loader(data))
    return dict(net.state_dict())


def seeded(cls: type[Net], *args: Any, **options: Any) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return cls(*args, **options).double()


class Manual(Net):
    """Steps the optimizer by itself, in Lightning's wrapping or raw."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__("mlp", blocks=2)
        self.wrapped, self.automatic_optimization = wrapped, False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=self.wrapped)
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()


def fit_manually(sdp: dict[str, Any], wrapped: bool) -> dict[str, Tensor]:
    return run(seeded(Manual, wrapped), sdp, batches("mlp", torch.distributed.get_rank(), 4))


@pytest.mark.parametrize("sdp", [FORWARD, BACKWARD, NEURON, {**FORWARD, "model_averaging_period": 2}])
def test_a_raw_optimizer_steps_like_a_wrapped_one(pool, sdp: dict[str, Any]) -> None:
    wrapped, raw = (pool(3).run(fit_manually, sdp, how) for how in (True, False))
    for a, b in zip(wrapped, raw, strict=True):
        assert same_state(a, b) and same_state(b, raw[0])
    start = seeded(Manual, True).state_dict()
    assert all(not torch.equal(raw[0][name], value) for name, value in start.items())


class TwoOptimizers(Net):
    """The first blocks and the rest learn from different losses in turn, as the halves of a GAN do."""

    def __init__(self, toggles: bool = False) -> None:
        super().__init__("mlp", blocks=4)
        self.toggles, self.automatic_optimization = toggles, False

    def halves(self) -> list[list[str]]:
        names = [name for name, _ in self.named_parameters()]
        first = [name for name in names if name.startswith(("stem", "blocks.0", "blocks.1"))]
        return [first, [name for name in names if name not in first]]

    def configure_optimizers(self) -> Any:
        parameters = dict(self.named_parameters())
        return [torch.optim.AdamW([parameters[n] for n in half], lr=0.01, eps=1e-3) for half in self.halves()]

    def loss(self, batch: Any, turn: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], label_smoothing=0.2 * turn)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for turn, optimizer in enumerate(self.optimizers()):
            if self.toggles:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch, turn))
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)


def fit_two_optimizers(sdp: dict[str, Any], toggles: bool) -> tuple[dict[str, Tensor], list[bool]]:
    net = seeded(TwoOptimizers, toggles)
    full = run(net, sdp, batches("mlp", torch.distributed.get_rank(), 4))
    return full, [parameter.requires_grad for parameter in net.parameters()]


@pytest.mark.parametrize("toggles", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "sdp",
    [
        FORWARD,
        NEURON,
        *[pytest.param(sdp, marks=pytest.mark.slow) for sdp in ({**NEURON, "masking": "forward"}, BACKWARD)],
    ],
)
def test_two_optimizers_in_turn_equal_the_reference(pool, sdp: dict[str, Any], toggles: bool) -> None:
    results = pool(3).run(fit_two_optimizers, sdp, toggles)
    net = seeded(TwoOptimizers)
    parameters, optimizers = dict(net.named_parameters()), net.configure_optimizers()
    plan = plan_for(net, 3, sdp, torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64))
    ref = SDPReference(net, plan, optimizers[0], masking=sdp.get("masking", "forward"))
    data = [batches("mlp", rank, 4) for rank in range(3)]
    for step in range(4):
        for turn, (names, optimizer) in enumerate(zip(net.halves(), optimizers, strict=True)):
            grads: dict[str, list[Tensor | None]] = {name: [] for name in names}
            for rank, own in enumerate(data):
                net.zero_grad()
                with ref.subnetwork(rank):
                    net.loss(own[step], turn).backward()
                for name in names:
                    grads[name].append(parameters[name].grad)
            for name, own_grads in grads.items():
                masks = [plan.element_mask(name, rank, parameters[name].shape).double() for rank in range(3)]
                total = sum(g * mask for g, mask in zip(own_grads, masks, strict=True) if g is not None)
                parameters[name].grad = total / sum(masks)
            optimizer.step()
    for full, train in results:
        assert all(train)
        torch.testing.assert_close(full, net.state_dict(), rtol=1e-10, atol=1e-10)


class Normalized(Net):
    """Normalizes a weight in every forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.blocks[0].fc1.weight.copy_(F.normalize(self.blocks[0].fc1.weight, dim=1))
        return super().training_step(batch, batch_idx)


class Clamped(Manual):
    """Clamps a weight between the backward pass and the step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        self.blocks[0].fc1.weight.data.clamp_(-0.1, 0.1)
        optimizer.step()


def fit_changed(sdp: dict[str, Any], clamped: bool) -> list[dict[str, Tensor]]:
    """With the same data on all ranks every coverage comes to the same."""
    nets = [seeded(Clamped, True) if clamped else seeded(Normalized, "mlp", blocks=2) for _ in range(2)]
    return [run(net, own, batches("mlp", 0, 3)) for net, own in zip(nets, (sdp, {"coverage": 1.0}), strict=True)]


@pytest.mark.parametrize("clamped", [False, True], ids=["normalized", "clamped"])
@pytest.mark.parametrize("sdp", [BACKWARD, NEURON])
def test_weights_changed_before_the_step_are_those_that_step(pool, sdp: dict[str, Any], clamped: bool) -> None:
    for masked, whole in pool(2).run(fit_changed, sdp, clamped):
        for name, value in whole.items():
            torch.testing.assert_close(masked[name], value, rtol=1e-12, atol=1e-12, msg=name)


class LateChange(Callback):
    """Changes a cut weight when the step has begun."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            pl_module.blocks[0].fc1.weight.mul_(0.5)


def fit_with_late_change(sdp: dict[str, Any]) -> dict[str, Tensor]:
    net = seeded(Net, "mlp", blocks=2)
    return run(net, sdp, batches("mlp", torch.distributed.get_rank(), 2), callbacks=[LateChange()])


def test_a_weight_changed_too_late_for_the_step_is_an_error(pool) -> None:
    for error in pool(2).run_expecting_errors(fit_with_late_change, NEURON):
        assert error is not None and "'blocks.0.fc1.weight' was changed between the backward pass and" in error[1]


def read_copies() -> list[Tensor]:
    rank, seen = torch.distributed.get_rank(), []

    class Copy(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            layer = pl_module.blocks[0].fc1
            own = copy.deepcopy(layer)
            with torch.no_grad():
                for parameter in own.parameters():
                    parameter.zero_()
            x = torch.ones(1, layer.in_features, dtype=torch.float64)
            zeros = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
            seen.extend([own(x), functional_call(layer, zeros, (x,)), layer(x)])

    run(seeded(Net, "mlp", blocks=2), NEURON, batches("mlp", rank, 1), callbacks=[Copy()])
    return [value.detach() for value in seen]


def test_a_copy_has_weights_of_its_own(pool) -> None:
    for copied, called, layer in pool(2).run(read_copies):
        assert not copied.any() and not called.any() and layer.any()


def fit_one_block(sdp: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[int, ...]]:
    """Only one block trains, which not all ranks hold; and what its holder alone would train."""
    rank = torch.distributed.get_rank()
    net, alone = (seeded(Net, "mlp", blocks=2, optimizer="sgd") for _ in range(2))
    for own in (net, alone):
        for name, parameter in own.named_parameters():
            parameter.requires_grad_(name.startswith("blocks.0."))
    strategy = SDPStrategy(**sdp)
    trainer(2, strategy, max_epochs=1).fit(net, loader(batches("mlp", rank, 3)))
    holders = strategy.plan.holders("blocks.0")  # type: ignore[union-attr]
    optimizer = alone.configure_optimizers()
    for batch in batches("mlp", holders[0], 3):
        optimizer.zero_grad()
        alone.training_step(batch, 0).backward()
        optimizer.step()
    return dict(net.state_dict()), dict(alone.state_dict()), holders


def test_all_that_trains_may_be_on_another_rank(pool) -> None:
    for trained, expected, holders in pool(2).run(fit_one_block, BACKWARD):
        assert len(holders) == 1
        for name, value in expected.items():
            torch.testing.assert_close(trained[name], value, rtol=1e-12, atol=1e-12, msg=name)
    results = pool(2).run(fit_one_block, FORWARD)
    start = seeded(Net, "mlp", blocks=2).state_dict()
    for trained, *_ in results:
        assert same_state(trained, results[0][0])
        for name, value in start.items():
            assert torch.equal(trained[name], value) != name.startswith("blocks.0."), name


def remembered_batches() -> tuple[int, int]:
    net, recalibration = seeded(Net, "conv", blocks=2), BatchNormRecalibration(4)
    run(net, FORWARD, batches("conv", torch.distributed.get_rank(), 3), callbacks=[recalibration])
    return len(recalibration._latest), len(recalibration._modes)


def test_no_batch_is_kept_after_a_run(pool) -> None:
    assert pool(2).run(remembered_batches) == [(0, 0)] * 2
