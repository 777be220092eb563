"""Carves a module down to what one worker holds, and puts it back together.

[Note: Hollow blocks]
A missing block stays in the module tree, hollow: its modules keep their names, their order, their attributes and their
train or eval mode, but their parameters and buffers are None, and calling the block runs its skip path and no hooks.
The block takes a subclass of its own class for that, as torch's FSDP2 does, so that lists, closures and `isinstance` of
the user still hold. Missing Parameter objects keep their identity too: their data becomes a stand-in, one NaN expanded
to the full shape, which takes no memory, which an optimizer accepts, and which nobody can mistake for a weight.
`attach` and `detach` switch between the full structure and the carved one without touching any data.

[Note: Cut tensors]
A tensor of which the worker has only some neurons, channels or heads stays where it is, under its name and with its
identity, but its data becomes smaller: the held entries, dense and in their order. What the modules around it know of
sizes changes along (components/slicing.py). In the full structure its data is a stand-in of the full shape, or the full
tensor where that has been filled in; a gradient of the smaller shape is put aside meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_sdp.components import Group, Skip
from lightning_sdp.components.slicing import Edit, PaddedSpec, padded_edits, structure_edits
from lightning_sdp.layout import TensorLayout
from lightning_sdp.plan import MaskPlan


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Replaces a tensor's data by data of any shape, which is to be trained.

    A graph of an earlier forward that someone keeps alive remembers the old shape, and would refuse gradients of the
    new one; only a change of dtype makes autograd start anew.
    """
    if tensor.requires_grad and tensor.shape != data.shape:
        tensor.data = torch.empty(0, dtype=torch.float16 if data.dtype != torch.float16 else torch.float32)
    tensor.data = data


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


class _CutTensor:
    """A tensor of which the worker has a part; see the note above."""

    def __init__(self, tensor: Tensor, layout: TensorLayout, worker: int) -> None:
        self.tensor, self.layout, self.worker = tensor, layout, worker
        self.shape = tensor.shape
        self.local: Tensor | None = None  # while the full structure is in place
        self.grad: Tensor | None = None

    def cut(self) -> None:
        set_data(self.tensor, self.layout.take(self.tensor.data, self.worker))

    def attach(self) -> None:
        self.local, self.grad = self.tensor.data, self.tensor.grad
        self.tensor.grad = None
        self.tensor.data = self._stand_in(self.local)

    def release(self) -> None:
        """Forgets the full data, and keeps the worker's part of it if that was to replace what it had."""
        if self.local is None:
            self.cut()
            self.local = self.tensor.data
        self.tensor.data = self._stand_in(self.local)

    def detach(self) -> None:
        self.release()
        assert self.local is not None
        self.tensor.grad = None
        set_data(self.tensor, self.local)
        self.local = None
        self.tensor.grad, self.grad = self.grad, None

    def _stand_in(self, like: Tensor) -> Tensor:
        return stand_in(torch.empty(self.shape, dtype=like.dtype, device="meta"), like.device)


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
        cut: The tensors of which it has a part, by name in the full model.
        trained: The parameters of which it has all or a part, by name in the full model.
        leaves: What is trained in place of the parameters themselves: nothing.
        attached: Whether the module has its full structure.
    """

    def __init__(self, module: nn.Module, plan: MaskPlan, worker: int) -> None:
        self.module = module
        lacking = plan.missing_on(worker)
        tensors: dict[str, Tensor] = dict([*module.named_parameters(), *module.named_buffers()])
        self._tensors = tensors
        self.missing = {part.name: tensors[part.name] for c in lacking for part in c.slices if part.dim is None}
        self._cut = {
            name: _CutTensor(tensors[name], layout, worker)
            for name, layout in plan.layouts.items()
            if not layout.is_complete(worker)
        }
        self.cut = {name: cut.tensor for name, cut in self._cut.items()}
        self.trained = {name: p for name, p in module.named_parameters() if name not in self.missing}
        self.leaves: dict[str, nn.Parameter] = {}
        self.attached = True
        self._device: torch.device | None = None
        blocks = [(c.name, module.get_submodule(c.name)) for c in lacking if c.kind == "block"]
        self._blocks = [_HollowBlock(block, plan.skip(name, block)) for name, block in blocks]
        by_id = {id(tensor): tensor for tensor in self.missing.values()}
        self._places: list[tuple[dict[str, Any], str, Tensor]] = []
        for submodule in module.modules():
            for tree in (submodule._parameters, submodule._buffers):
                self._places += [
                    (tree, key, by_id[id(t)]) for key, t in tree.items() if t is not None and id(t) in by_id
                ]
        self._edits = _edits(module, plan, worker, tensors)

    @property
    def lacks_trainable(self) -> bool:
        """Whether the worker lacks parameters that train."""
        return any(isinstance(tensor, nn.Parameter) and tensor.requires_grad for tensor in self.missing.values())

    def carve(self, device: torch.device | None = None, stored: Mapping[str, Tensor] | None = None) -> None:
        """Frees the data of what is missing and detaches it.

        Args:
            device: Where the stand-ins live; the device that held tensors will move to.
            stored: What the worker is to store, by name, where the module has no data of it.
        """
        self._device, stored = device, stored or {}
        for tensor in self.missing.values():
            self._forget(tensor)
        for name, data in stored.items():
            set_data(self._tensors[name], data)
        for name, cut in self._cut.items():
            if name not in stored:
                cut.cut()
            cut.tensor.grad = None
            cut.attach()  # so that `detach` finds what it expects
        self.detach()

    def give_up(self) -> None:
        """Gives the module its full structure for good: stand-ins for what is missing or cut, or the full data."""
        self.attach()
        for cut in self._cut.values():
            cut.local = cut.grad = None

    def local(self, name: str) -> Tensor:
        """What the worker stores of a cut tensor."""
        cut = self._cut[name]
        return cut.tensor if cut.local is None else cut.local

    def detach(self) -> None:
        """Gives the module its carved structure."""
        if self.attached:
            for tree, key, _ in self._places:
                tree[key] = None
            for block in self._blocks:
                block.detach()
            for cut in self._cut.values():
                cut.detach()
            for edit in self._edits:
                edit.cut()
            self.attached = False

    def attach(self) -> None:
        """Gives the module its full structure; missing tensors hold whatever data they have."""
        if not self.attached:
            for edit in reversed(self._edits):
                edit.restore()
            for cut in self._cut.values():
                cut.attach()
            for block in self._blocks:
                block.attach()
            for tree, key, tensor in self._places:
                tree[key] = tensor
            self.attached = True

    def fill(self, data: Mapping[str, Tensor]) -> None:
        """Gives missing or cut tensors full data, by name, until it is released; the module has its full structure."""
        for name, tensor in data.items():
            (self.missing[name] if name in self.missing else self.cut[name]).data = tensor

    def replace(self, data: Mapping[str, Tensor]) -> None:
        """Like `fill`, for cut tensors; what the worker stores of them will be taken from the data again."""
        for name, tensor in data.items():
            self.cut[name].data = tensor
            self._cut[name].local = None

    def release(self) -> None:
        """Takes the data of all missing tensors away again, and their gradients; the structure is the full one."""
        for tensor in self.missing.values():
            self._forget(tensor)
        for cut in self._cut.values():
            cut.release()

    def _forget(self, tensor: Tensor) -> None:
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
        """Restores the structure with missing tensors on the meta device: after a failure their data is elsewhere.

        Cut tensors are incomplete, so that they count as missing.
        """
        self.attach()
        for name, tensor in {**self.missing, **self.cut}.items():
            empty: Tensor = torch.empty_like(tensor, device="meta")
            if isinstance(tensor, nn.Parameter):
                parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                parameter.__dict__.update(tensor.__dict__)
                try:
                    torch.utils.swap_tensors(tensor, parameter)
                except RuntimeError:  # someone has a weak reference to it
                    for submodule in self.module.modules():
                        for key, value in submodule._parameters.items():
                            if value is tensor:
                                submodule._parameters[key] = parameter
            else:
                owner, _, key = name.rpartition(".")
                self.module.get_submodule(owner)._buffers[key] = empty


def _edits(module: nn.Module, plan: MaskPlan, worker: int, tensors: Mapping[str, Tensor]) -> list[Edit]:
    """What changes on the modules around the cut tensors."""
    padded = plan.padded
    layouts = {name: layout for name, layout in plan.layouts.items() if not layout.is_complete(worker)}
    shapes = {n: layout.local_shape(tensors[n].shape, worker) for n, layout in layouts.items() if n not in padded}
    held: list[tuple[Group, list[int]]] = []
    for group in plan.groups:
        if any(member.name in shapes for member in group.members):
            held.append((group, plan.held_units(group, worker)))
    specs = {
        name: PaddedSpec(layout.dim, layout.size, tuple(layout.runs(worker)))
        for name, layout in layouts.items()
        if name in padded
    }
    return structure_edits(module, shapes, held) + padded_edits(module, specs)
