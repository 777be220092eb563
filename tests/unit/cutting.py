"""Cuts a module by hand, without a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn as nn
from torch import Tensor

from lightning_sdp.components.base import Group
from lightning_sdp.components.slicing import Edit, structure_edits


def cut(module: nn.Module, groups: Sequence[Group], held: Mapping[str, Sequence[int]]) -> list[Edit]:
    """Cuts a module down to some of its units, in place; tensors keep their identity, and lose their gradients.

    Args:
        module: The module in which the groups' names hold, with its full sizes.
        groups: The groups to cut; no two may meet in a tensor along different dimensions, unless both are wanted.
        held: The units that remain, by the names of groups; a group that is not named stays whole.

    Returns:
        What has changed besides the tensors.

    Raises:
        ValueError: A module cannot be cut like this. Nothing has changed then.
    """
    groups = [group for group in groups if group.name in held]
    tensors: dict[str, Tensor] = dict([*module.named_parameters(), *module.named_buffers()])
    keep: dict[tuple[str, int], Tensor] = {}
    for group in groups:
        for member in group.members:
            key = member.name, member.dim
            if key not in keep:
                keep[key] = torch.ones(tensors[member.name].shape[member.dim], dtype=torch.bool)
            keep[key][member.start : member.start + math.prod(member.layout)] = False
            for unit in held[group.name]:
                for start, stop in member.runs(unit, unit + 1):
                    keep[key][start:stop] = True

    shapes: dict[str, list[int]] = {}
    for (name, dim), mask in keep.items():
        shapes.setdefault(name, list(tensors[name].shape))[dim] = int(mask.sum())
    sizes = {name: torch.Size(shape) for name, shape in shapes.items()}
    edits = structure_edits(module, sizes, [(group, sorted(held[group.name])) for group in groups])
    for (name, dim), mask in keep.items():
        tensor = tensors[name]
        tensor.grad = None
        tensor.data = tensor.data.index_select(dim, mask.nonzero().flatten().to(tensor.device))
    for edit in edits:
        edit.cut()
    return edits
