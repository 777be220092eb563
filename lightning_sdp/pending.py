"""Gradients that wait for an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class PendingGradients:
    """Knows which parameters got a gradient, by whatever backward pass, and have not taken part in a step since."""

    def __init__(self) -> None:
        self._fresh: dict[int, Tensor] = {}
        self._handles: dict[str, Any] = {}

    def __bool__(self) -> bool:
        """Whether there is such a gradient, and one that is not zero."""
        grads = (parameter.grad for parameter in self._fresh.values())
        return any(grad is not None and bool(grad.any()) for grad in grads)

    @property
    def have_arrived(self) -> bool:
        """Whether there may be one: cheaper than to look whether it is still there."""
        return bool(self._fresh)

    def follow(self, trained: Mapping[str, Tensor]) -> None:
        """Watches parameters from now on, by name; those that are frozen once they have been thawed and given again."""
        for name, parameter in trained.items():
            if parameter.requires_grad and name not in self._handles:
                self._handles[name] = parameter.register_post_accumulate_grad_hook(self.arrive)

    def arrive(self, parameter: Tensor) -> None:
        """Takes note of a parameter that got a gradient."""
        self._fresh[id(parameter)] = parameter

    def use(self, optimizer: Optimizer) -> None:
        """Forgets those of an optimizer, which has taken a step or skipped it."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._fresh.pop(id(parameter), None)

    def clear(self) -> None:
        """Watches nothing any more."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._fresh.clear()
