"""Carves a module down to what one worker holds, and puts it back together.

[Note: Hollow blocks]
A missing block stays in the module tree, hollow: its modules keep their names, their order, their attributes and their
train or eval mode, but their parameters and buffers are None, and calling the block runs its skip path and no hooks.
The block takes a subclass of its own class for that, as torch's FSDP2 does, so that lists, closures and `isinstance` of
the user still hold. Missing Parameter objects keep their identity too: their data becomes a stand-in, one NaN expanded
to the full shape, which takes no memory, which an optimizer accepts, and which nobody can mistake for a weight.
`attach` and `detach` switch between the full structure and the carved one without touching any data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_sdp.components import Skip, named_block
from lightning_sdp.plan import MaskPlan


def stand_in(like: Tensor, device: torch.device | None = None) -> Tensor:
    """One element expanded to the shape of a tensor: NaN, or zero where the dtype has none."""
    value = float("nan") if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), value, dtype=like.dtype, device=device or like.device).expand(like.shape)


class _HollowBlock:
    """Takes one block's call behavior away and gives it back."""

    def __init__(self, block: nn.Module, skip: Skip) -> None:
        self.block = block
        self.full_class = type(block)
        self.hollow_class = _skipping(self.full_class, skip)
        self.own_forward: Any = None

    def detach(self) -> None:
        self.own_forward = self.block.__dict__.pop("forward", None)
        self.block.__class__ = self.hollow_class

    def attach(self) -> None:
        if self.own_forward is not None:
            self.block.__dict__["forward"] = self.own_forward
        self.block.__class__ = self.full_class


def _skipping(cls: type[nn.Module], skip: Skip) -> type[nn.Module]:
    """A subclass whose call and forward are the skip path; hooks of its modules stay registered but do not run."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return skip.function(self, *args, **kwargs)

    return type(f"Missing{cls.__name__}", (cls,), {"__call__": call, "forward": call, "__module__": cls.__module__})


class Subnetwork:
    """One worker's part of a module.

    After construction the module is still whole. `carve` frees what the worker lacks; from then on `attached` tells
    whether the module has its full structure (missing tensors as stand-ins or filled with data) or the carved one.

    Args:
        module: The full model.
        plan: Who holds what.
        worker: Whose part this is.

    Attributes:
        missing: The tensors that the worker lacks, by name in the full model, in the plan's order.
        attached: Whether the module has its full structure.
    """

    def __init__(self, module: nn.Module, plan: MaskPlan, worker: int) -> None:
        self.module = module
        lacking = plan.missing_on(worker)
        tensors: dict[str, Tensor] = dict([*module.named_parameters(), *module.named_buffers()])
        self.missing = {part.name: tensors[part.name] for component in lacking for part in component.slices}
        self.attached = True
        self._device: torch.device | None = None
        blocks = [(c.name, module.get_submodule(c.name)) for c in lacking]
        self._blocks = [_HollowBlock(block, named_block(name, block).skip) for name, block in blocks]
        by_id = {id(tensor): tensor for tensor in self.missing.values()}
        self._places: list[tuple[dict[str, Any], str, Tensor]] = []
        for submodule in module.modules():
            for tree in (submodule._parameters, submodule._buffers):
                self._places += [
                    (tree, key, by_id[id(t)]) for key, t in tree.items() if t is not None and id(t) in by_id
                ]

    def carve(self, device: torch.device | None = None) -> None:
        """Frees the data of what is missing and detaches it.

        Args:
            device: Where the stand-ins live; the device that held tensors will move to.
        """
        self._device = device
        self.release()
        self.detach()

    def detach(self) -> None:
        """Gives the module its carved structure."""
        if self.attached:
            for tree, key, _ in self._places:
                tree[key] = None
            for block in self._blocks:
                block.detach()
            self.attached = False

    def attach(self) -> None:
        """Gives the module its full structure; missing tensors hold whatever data they have."""
        if not self.attached:
            for block in self._blocks:
                block.attach()
            for tree, key, tensor in self._places:
                tree[key] = tensor
            self.attached = True

    def fill(self, data: Mapping[str, Tensor]) -> None:
        """Gives missing tensors data, by name."""
        for name, tensor in data.items():
            self.missing[name].data = tensor

    def release(self) -> None:
        """Takes the data of all missing tensors away again, and their gradients."""
        for tensor in self.missing.values():
            tensor.data = stand_in(tensor, self._device)
            tensor.grad = None

    @contextmanager
    def whole_structure(self) -> Iterator[None]:
        """The full structure for the duration of a block of code."""
        was_attached = self.attached
        self.attach()
        try:
            yield
        finally:
            if not was_attached:
                self.detach()

    def abandon(self) -> None:
        """Restores the structure with missing tensors on the meta device: after a failure their data is elsewhere."""
        self.attach()
        for name, tensor in self.missing.items():
            empty: Tensor = torch.empty_like(tensor, device="meta")
            if isinstance(tensor, nn.Parameter):
                parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                parameter.__dict__.update(tensor.__dict__)
                torch.utils.swap_tensors(tensor, parameter)
            else:
                owner, _, key = name.rpartition(".")
                self.module.get_submodule(owner)._buffers[key] = empty
