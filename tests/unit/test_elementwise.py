"""Optimizers that may meet tensors that are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdp.elementwise import is_elementwise, require_elementwise


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(3, 4))]


class Custom(Optimizer):
    """An optimizer of a stranger's; what it does is up to those that derive from it."""

    def __init__(self, params: Any, lr: float = 0.1, decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    change = self.update(parameter, parameter.grad, self.state[parameter])
                    parameter.sub_(change + group["decay"] * parameter, alpha=group["lr"])


class SignMomentum(Custom):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        state["mean"] = 0.9 * state.get("mean", torch.zeros_like(gradient)) + gradient
        return state["mean"].sign() * gradient.abs().sqrt()


class NormScaled(Custom):
    """Divides by the norm of the whole gradient, as LAMB and LARS do."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        return gradient / gradient.norm()


class RowScaled(Custom):
    """Divides by the norm of each row: right for a tensor cut by rows, wrong for one cut by columns."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        return gradient / gradient.norm(dim=-1, keepdim=True)


class LateNorm(Custom):
    """Is elementwise in its first step only."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        first = "steps" not in state
        state["steps"] = torch.ones(())
        return gradient if first else gradient / gradient.norm()


class Noisy(Custom):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        return gradient + torch.randn_like(gradient)


class Unconstructible(Custom):
    def __init__(self, params: Any, *, model: nn.Module) -> None:
        super().__init__(params)
        self.model = model

    update = SignMomentum.update


class Failing(Custom):
    pass  # its update raises


class SGD(NormScaled):
    """Has the name of an optimizer that is known."""


Make = Callable[[list[nn.Parameter]], Optimizer]

ACCEPTED: list[Make] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda p: torch.optim.Adam(p, amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
    SignMomentum,
    lambda p: SignMomentum(p, lr=3.0, decay=0.0),
]

REFUSED: list[Make] = [
    torch.optim.Adafactor,
    pytest.param(
        lambda p: torch.optim.Muon(p),
        marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon"),
    ),
    lambda p: torch.optim.LBFGS(p),
    NormScaled,
    RowScaled,
    LateNorm,
    Noisy,
    lambda p: Unconstructible(p, model=nn.Linear(1, 1)),
    Failing,
    SGD,
]


@pytest.mark.parametrize("make", ACCEPTED)
def test_elementwise_optimizers_are_accepted(make: Make) -> None:
    params = parameters()
    optimizer = make(params)
    assert is_elementwise(optimizer)
    require_elementwise([optimizer], {id(params[0]): "a.weight"})
    assert all(torch.equal(parameter, torch.ones_like(parameter)) and parameter.grad is None for parameter in params)
    assert all(not value.any() for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("make", REFUSED)
def test_others_are_refused_with_the_tensor_and_the_ways_out(make: Make) -> None:
    params = parameters()
    optimizer = make(params)
    with pytest.raises(ValueError) as caught:
        require_elementwise([torch.optim.SGD(parameters(), lr=1), optimizer], {id(p): "a.weight" for p in params[1:]})
    message = str(caught.value)
    assert message.startswith(f"{type(optimizer).__name__} updates a tensor as a whole, but 'a.weight' and 0 more")
    assert all(way in message for way in ("SGD or AdamW", "granularity='block'", "keep=..."))


@pytest.mark.parametrize("make", [torch.optim.Adafactor, NormScaled])
def test_whole_tensor_optimizers_may_have_what_is_not_cut(make: Make) -> None:
    params, others = parameters(), parameters()
    require_elementwise([make(others), torch.optim.AdamW(params)], {id(p): "cut" for p in params})
    require_elementwise([make(params)], {})
    require_elementwise([], {id(params[0]): "cut"})


def test_every_group_of_an_optimizer_counts() -> None:
    params = parameters()
    optimizer = NormScaled([{"params": [params[0]]}, {"params": [params[1]], "lr": 0.5}])
    with pytest.raises(ValueError, match="'last' and 0 more"):
        require_elementwise([optimizer], {id(params[1]): "last"})


def test_trial_leaves_the_random_streams_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.no_grad():
        assert not is_elementwise(Noisy(parameters()))
        assert is_elementwise(SignMomentum(parameters()))
    assert torch.equal(torch.get_rng_state(), before)
