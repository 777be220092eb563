"""Backward masking: a worker runs the full model, but computes gradients only for what it holds.

[Note: Held entries]
Every Parameter of the module keeps its full data. One that the worker lacks is frozen, so that autograd neither
computes its gradient nor keeps the activations that only this gradient would need. Of one that the worker holds in
part, the held entries are a leaf of their own, which the optimizer gets in the Parameter's place. Whoever reads the
Parameter from its module (a property of the module's class sees to it) gets its data as a function of the leaf: the
same storage, no copy. In the backward pass the gradient of the full tensor exists until its held entries have been
taken out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_sdp.components.slicing import Edit, view_edits
from lightning_sdp.layout import TensorLayout
from lightning_sdp.plan import MaskPlan


class _HeldEntries(torch.autograd.Function):
    """The full tensor, as a function of those of its entries that are held."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, full: Tensor, layout: TensorLayout, worker: int) -> Tensor:
        ctx.layout, ctx.worker = layout, worker
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return ctx.layout.take(grad, ctx.worker), None, None, None


class GradientMask:
    """One worker's part of the gradients of a module, which itself stays whole.

    Args:
        module: The full model, on its device.
        plan: Who holds what.
        worker: Whose part this is.

    Attributes:
        missing: The parameters that the worker lacks, by name in the full model.
        leaves: What is trained in place of the parameters that the worker holds in part, by their names.
        trained: What the worker trains, by name: parameters, and leaves in place of those held in part.
    """

    def __init__(self, module: nn.Module, plan: MaskPlan, worker: int) -> None:
        self._worker = worker
        self._parameters = dict(module.named_parameters())
        whole = plan.tensor_holders()
        self.missing = {n: p for n, p in self._parameters.items() if n in whole and worker not in whole[n]}
        self._layouts = {
            name: layout
            for name, layout in plan.layouts.items()
            if name in self._parameters and not layout.is_complete(worker)
        }
        self.leaves = {name: nn.Parameter(self._held(name)) for name in self._layouts}
        self.trained = {
            name: self.leaves.get(name, parameter)
            for name, parameter in self._parameters.items()
            if name not in self.missing
        }
        self._wanted = {name: parameter.requires_grad for name, parameter in self.missing.items()}
        self._edits: list[Edit] = view_edits(module, {name: self._reader(name) for name in self._layouts})
        self._guards: dict[str, Any] = {}
        self._versions: dict[str, int] = {}
        for edit in self._edits:
            edit.cut()
        self.note_values()
        self.follow()

    @property
    def lacks_trainable(self) -> bool:
        """Whether the worker lacks parameters that train."""
        return any(self._wanted.values())

    def _held(self, name: str) -> Tensor:
        return self._layouts[name].take(self._parameters[name].detach(), self._worker)

    def _reader(self, name: str) -> Callable[[nn.Module], Tensor]:
        key = name.rpartition(".")[2]
        leaf, layout, parameter, worker = self.leaves[name], self._layouts[name], self._parameters[name], self._worker

        def read(module: nn.Module) -> Tensor:
            own = module._parameters.get(key)
            if own is not None and own is not parameter:  # in a copy of the module, or a functional call
                return own
            if not (torch.is_grad_enabled() and leaf.requires_grad):
                return parameter.detach() if torch.is_grad_enabled() else parameter
            full: Tensor = _HeldEntries.apply(leaf, parameter.detach(), layout, worker)  # type: ignore[no-untyped-call]
            return full

        return read

    @torch.no_grad()
    def follow(self) -> None:
        """Takes over what the user froze or thawed."""
        for name, parameter in self.missing.items():
            if parameter.requires_grad:
                self._wanted[name] = True
                parameter.requires_grad_(False)
            parameter.grad = None
        for name, leaf in self.leaves.items():
            leaf.requires_grad_(self._parameters[name].requires_grad)
            if leaf.requires_grad and name not in self._guards:
                refuse = partial(_refuse_gradient, name)
                self._guards[name] = self._parameters[name].register_post_accumulate_grad_hook(refuse)

    @torch.no_grad()
    def read_values(self) -> None:
        """Takes over the parameters' values, which the user may have changed; has to be called before a step."""
        for name, leaf in self.leaves.items():
            leaf.copy_(self._held(name))
        self.note_values()

    def note_values(self) -> None:
        """Remembers that the leaves have the parameters' values."""
        self._versions = {name: self._parameters[name]._version for name in self.leaves}

    @torch.no_grad()
    def write_back(self) -> None:
        """Gives the parameters the values that their held entries were trained to.

        Raises:
            RuntimeError: The user has changed a parameter too late for the step to know of it.
        """
        for name, leaf in self.leaves.items():
            if self._parameters[name]._version != self._versions.get(name):
                raise RuntimeError(
                    f"{name!r} was changed between the backward pass and the optimizer step, in "
                    "on_before_optimizer_step perhaps. Under backward masking of neurons the step does not see that: "
                    "change weights in on_train_batch_start or on_train_batch_end, or use granularity='block'."
                )
            self._layouts[name].put(leaf, self._parameters[name].detach(), self._worker)

    @contextmanager
    def whole_structure(self) -> Iterator[None]:
        """The model as the user knows it for the duration of a block of code: only what the user froze is frozen."""
        for name, parameter in self.missing.items():
            parameter.requires_grad_(self._wanted[name])
        try:
            yield
        finally:
            for name, parameter in self.missing.items():
                self._wanted[name] = parameter.requires_grad
                parameter.requires_grad_(False)

    def give_up(self) -> None:
        """Gives the module its own structure back for good; only the user's freezing remains."""
        for edit in reversed(self._edits):
            edit.restore()
        for guard in self._guards.values():
            guard.remove()
        for name, parameter in self.missing.items():
            parameter.requires_grad_(self._wanted[name])


def _refuse_gradient(name: str, parameter: Tensor) -> None:
    raise RuntimeError(
        f"A gradient reached {name!r} other than through the forward of its module. Under backward masking of neurons "
        "a loss cannot use parameters directly, e.g. for a penalty: use the optimizer's weight decay, or "
        "granularity='block'."
    )
