"""Users who run backward passes, clip and step by themselves: adversarial training, a gradient penalty, hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sdp import SDPReference, SDPStrategy, clip_grad_norm_
from tests.distributed.runs import plan_for, trainer
from tests.models import SHAPES, WIDTH, MLPBlock, Net, batches, loader

FORWARD = {"coverage": 0.5, "keep_ends": 0}
NEURON = {**FORWARD, "granularity": "neuron"}
REGIMES = [FORWARD, NEURON, {**FORWARD, "masking": "backward"}, {**NEURON, "masking": "backward"}]
SAMPLE = torch.zeros(2, *SHAPES["mlp"], dtype=torch.float64)


def network(out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, WIDTH), MLPBlock(8), MLPBlock(16), nn.Linear(WIDTH, out))


class Adversarial(LightningModule):
    """A generator and a critic; the critic has a gradient penalty, and two steps for one of the generator.

    Args:
        toggles: Whether the other optimizer's parameters are frozen meanwhile.
    """

    TURNS = ("critic", "critic", "generator")

    def __init__(self, toggles: bool) -> None:
        super().__init__()
        self.toggles, self.automatic_optimization = toggles, False
        self.generator, self.critic = network(5), network(1)
        self.example_input_array = SAMPLE

    def forward(self, z: Tensor) -> Tensor:
        return self.critic(self.generator(z))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(part.parameters(), lr=0.01, eps=1e-3) for part in (self.generator, self.critic)]

    def losses(self, batch: Any, turn: int) -> list[Callable[[], Tensor]]:
        """What is to be differentiated before one step."""
        real, z = batch[0], batch[0].flip(0) * (turn + 1)

        def criticize() -> Tensor:
            fake = self.generator(z).detach()
            between = (0.3 * real + 0.7 * fake).requires_grad_()
            (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).pow(2).mean()
            return self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty

        if self.TURNS[turn] == "critic":
            return [criticize]
        return [lambda half=half: -self(half).mean() for half in z.chunk(2)]  # type: ignore[misc]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = dict(zip(("generator", "critic"), self.optimizers(), strict=True))
        for turn, name in enumerate(self.TURNS):
            optimizer = optimizers[name]
            if self.toggles:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            for loss in self.losses(batch, turn):
                self.manual_backward(loss())
            clip_grad_norm_(getattr(self, name).parameters(), 0.05)
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)


def adversarial(toggles: bool = False) -> Adversarial:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Adversarial(toggles).double()


def fit_adversarial(sdp: dict[str, Any], toggles: bool) -> dict[str, Tensor]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = adversarial(toggles)
    trainer(world, SDPStrategy(**sdp), max_epochs=1).fit(net, loader(batches("mlp", rank, 3)))
    return dict(net.state_dict())


@pytest.mark.parametrize(("sdp", "toggles"), [(REGIMES[0], True), *[(sdp, False) for sdp in REGIMES[1:]]])
def test_adversarial_training_with_a_gradient_penalty_equals_the_reference(
    pool, sdp: dict[str, Any], toggles: bool
) -> None:
    results = pool(3).run(fit_adversarial, sdp, toggles)
    net = adversarial()
    optimizers = dict(zip(("generator", "critic"), net.configure_optimizers(), strict=True))
    plan = plan_for(net, 3, sdp, SAMPLE)
    assert {name.split(".")[0] for name in plan.tensor_holders() | plan.layouts} == {"generator", "critic"}
    ref = SDPReference(net, plan, optimizers["critic"], masking=sdp.get("masking", "forward"))
    data = [batches("mlp", rank, 3) for rank in range(3)]
    for step in range(3):
        for turn, part in enumerate(net.TURNS):
            own = {f"{part}.{name}": p for name, p in getattr(net, part).named_parameters()}
            grads: dict[str, Tensor] = {name: torch.zeros_like(p) for name, p in own.items()}
            for rank in range(3):
                net.zero_grad()
                with ref.subnetwork(rank):
                    for loss in net.losses(data[rank][step], turn):
                        loss().backward()
                for name, p in own.items():
                    if p.grad is not None:
                        grads[name] += p.grad * plan.element_mask(name, rank, p.shape)
            for name, p in own.items():
                p.grad = grads[name] / sum(plan.element_mask(name, rank, p.shape).double() for rank in range(3))
            torch.nn.utils.clip_grad_norm_(own.values(), 0.05)
            optimizers[part].step()
    for full in results:
        torch.testing.assert_close(full, dict(net.state_dict()), rtol=1e-10, atol=1e-10)


class Clipping(Net):
    """Clips by itself, and keeps the norms."""

    def __init__(self, norm_type: float) -> None:
        super().__init__("mlp", blocks=3)
        self.norm_type, self.norms = norm_type, []
        self.example_input_array = SAMPLE

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.norms.append(float(clip_grad_norm_(self.parameters(), 0.02, self.norm_type)))


def clipping(norm_type: float) -> Clipping:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Clipping(norm_type).double()


def fit_clipping(sdp: dict[str, Any], norm_type: float) -> tuple[dict[str, Tensor], list[float]]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = clipping(norm_type)
    trainer(world, SDPStrategy(**sdp), max_epochs=1).fit(net, loader(batches("mlp", rank, 3)))
    return dict(net.state_dict()), net.norms


@pytest.mark.parametrize(
    ("sdp", "norm_type"),
    [*zip(REGIMES, (float("inf"), 3.0, 1.0, 2.0), strict=True), ({"coverage": 1.0}, 2.0)],
)
def test_a_hook_that_clips_by_itself_equals_the_reference(pool, sdp: dict[str, Any], norm_type: float) -> None:
    results = pool(3).run(fit_clipping, sdp, norm_type)
    net = clipping(norm_type)
    plan = plan_for(net, 3, sdp, SAMPLE)
    ref = SDPReference(net, plan, net.configure_optimizers(), masking=sdp.get("masking", "forward"))
    ref._clip = lambda: net.configure_gradient_clipping(None)  # type: ignore[method-assign]
    data = [batches("mlp", rank, 3) for rank in range(3)]
    for step in range(3):
        ref.step([[own[step]] for own in data])
    assert min(net.norms) > 0.02
    for full, norms in results:
        assert norms == pytest.approx(net.norms, rel=1e-10)
        torch.testing.assert_close(full, dict(net.state_dict()), rtol=1e-10, atol=1e-10)


class Spoiled(Clipping):
    """One rank has a gradient that is not a number, in a block that few ranks hold."""

    def __init__(self, strict: bool) -> None:
        super().__init__(2.0)
        self.strict = strict

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        held = [p for n, p in self.named_parameters() if n.startswith("blocks.")]
        if self.global_rank == 1:
            held[0].grad.fill_(torch.nan)  # type: ignore[union-attr]
        self.norms.append(float(clip_grad_norm_(self.parameters(), 0.02, error_if_nonfinite=self.strict)))


def fit_spoiled(strict: bool) -> list[float]:
    net = Spoiled(strict).double()
    trainer(3, SDPStrategy(**FORWARD), max_epochs=1).fit(net, loader(batches("mlp", net.global_rank, 1)))
    return net.norms


def test_a_norm_that_is_not_finite_is_so_on_all_ranks(pool) -> None:
    assert all(norm != norm for (norm,) in pool(3).run(fit_spoiled, False))
    for error in pool(3).run_expecting_errors(fit_spoiled, True):
        assert error is not None and error[0] == "RuntimeError"
        assert "norm of order 2.0 over the full model is nan" in error[1]


def test_outside_of_training_it_is_torch_s_function() -> None:
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.full((2,), 3.0)
    assert clip_grad_norm_(weights[0], 1.0) == pytest.approx(18**0.5)
    assert clip_grad_norm_(iter(weights), 100.0) == pytest.approx(19**0.5)
    assert weights[1].grad.tolist() == [3.0, 3.0]  # type: ignore[union-attr]


class SecondBackward(Net):
    """Differentiates another loss after the backward pass, in Lightning's hook, through modules of its own choice."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.batch = batch
        return super().training_step(batch, batch_idx)

    def second(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.blocks[1](self.blocks[0](self.stem(batch[0]))).pow(2).mean()

    def on_after_backward(self) -> None:
        self.second(self.batch).backward()


def second_backward() -> SecondBackward:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = SecondBackward("mlp", blocks=3).double()
    net.example_input_array = SAMPLE
    return net


def fit_second_backward(sdp: dict[str, Any]) -> dict[str, Tensor]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    net = second_backward()
    trainer(world, SDPStrategy(**sdp), max_epochs=1, gradient_clip_val=0.05).fit(net, loader(batches("mlp", rank, 3)))
    return dict(net.state_dict())


@pytest.mark.parametrize("sdp", REGIMES)
def test_gradients_made_in_a_hook_after_the_backward_pass_are_averaged_too(pool, sdp: dict[str, Any]) -> None:
    results = pool(3).run(fit_second_backward, sdp)
    net = second_backward()
    plan, masking = plan_for(net, 3, sdp, SAMPLE), sdp.get("masking", "forward")

    def both(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + model.second(batch)

    ref = SDPReference(net, plan, net.configure_optimizers(), gradient_clip_val=0.05, masking=masking, loss=both)
    data = [batches("mlp", rank, 3) for rank in range(3)]
    for step in range(3):
        ref.step([[own[step]] for own in data])
    for full in results:
        torch.testing.assert_close(full, dict(net.state_dict()), rtol=1e-10, atol=1e-10)
