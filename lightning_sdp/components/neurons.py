"""Coupled neurons, channels and heads: which groups of them a model has, and which of these may be cut.

[Note: Which groups are maskable]
A registered rule goes before what tracing the model's graph finds. Where a model has residual blocks, only groups
within them count, so that the stem, the head and what lies between stages stay whole; where it has none, the elements
of its module lists take their place, and failing that the whole model. Two groups may meet in one tensor, one along its
rows and one along its columns: then only the larger one is cut, so that every entry of the tensor keeps a holder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_sdp.components.base import Group
from lightning_sdp.components.blocks import find_blocks
from lightning_sdp.components.calls import KnownCalls, RecordCalls, on_meta
from lightning_sdp.components.rules import rule_groups
from lightning_sdp.components.selfcheck import SelfCheck
from lightning_sdp.components.tracing import TracingError, trace_groups

ON_UNSLICEABLE = ("keep", "pad", "error")

_HOW_TO_TRACE = (
    "Give the model an `example_input_array`, a sample input of its forward, so that its graph can be read, or declare "
    "the class of its layers with `lightning_sdp.register_neurons`."
)


@dataclass(frozen=True)
class Candidates:
    """The groups that a model has.

    Attributes:
        groups: All of them, in the model's order; several may meet in one tensor.
        reasons: Why other parts cannot be cut, by name.
    """

    groups: tuple[Group, ...]
    reasons: dict[str, str]


def find_groups(module: nn.Module, example_inputs: Any = None) -> Candidates:
    """Finds the coupled groups of a model by rules and, with a sample input, by tracing.

    Args:
        module: The full model; parameters may be on the meta device.
        example_inputs: Sample input of its forward, see `sample_inputs`.
    """
    groups, reasons = rule_groups(module)
    if example_inputs is not None:
        try:
            with on_meta(module):
                inputs = apply_to_collection(example_inputs, Tensor, lambda tensor: tensor.to("meta"))
                traced = trace_groups(module, inputs)
        except TracingError as error:
            reasons[type(module).__name__] = str(error)
        else:
            taken = {(member.name, member.dim) for group in groups for member in group.members}
            names = {group.name for group in groups}
            for group in traced.groups:
                if not any((member.name, member.dim) in taken for member in group.members):
                    groups.append(group if group.name not in names else replace(group, name=f"{group.name}.traced"))
            reasons = {**traced.whole, **reasons}
    order = {name: i for i, (name, _) in enumerate(_tensors(module))}
    groups.sort(key=lambda group: min(order[member.name] for member in group.members))
    return Candidates(tuple(groups), reasons)


def sample_inputs(module: nn.Module, example_inputs: Any = None) -> Any:
    """The sample input to trace a model with: the given one, else its ``example_input_array``, else ``None``.

    Floating-point tensors get the dtype of the parameters, as a precision plugin would give it to a batch.
    """
    sample = example_inputs if example_inputs is not None else getattr(module, "example_input_array", None)
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    return apply_to_collection(sample, Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)


def stack_of(module: nn.Module, groups: Sequence[Group], calls: KnownCalls) -> list[str]:
    """Names of the blocks that a model's groups lie in, in the model's order; see the note above."""
    blocks, _ = find_blocks(module, calls)
    if blocks:
        return [block.name for block in blocks]
    elements: dict[str, None] = {}
    lists = [name for name, m in module.named_modules() if isinstance(m, nn.ModuleList)]
    for group in groups:
        for outer in lists:
            if group.owner.startswith(f"{outer}."):
                index = group.owner.removeprefix(f"{outer}.").partition(".")[0]
                elements[f"{outer}.{index}"] = None
                break
    return list(elements)


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a tensor or module lies in one of the modules, or is one."""
    return any(module == "" or name == module or name.startswith(f"{module}.") for module in modules)


def lies_inside(group: Group, modules: Collection[str]) -> bool:
    """Whether all tensors of a group lie in some of the modules."""
    return all(is_inside(member.name, modules) for member in group.members)


def touches(group: Group, modules: Collection[str]) -> bool:
    """Whether any tensor of a group lies in one of the modules."""
    return any(is_inside(member.name, modules) for member in group.members)


def resolve_conflicts(module: nn.Module, groups: Sequence[Group], reasons: dict[str, str]) -> list[Group]:
    """Leaves, of groups that meet in one tensor, only the larger one; see the note above."""
    shapes = {name: tensor.shape for name, tensor in _tensors(module)}

    def size(group: Group) -> int:
        return sum(shapes[name].numel() for name in dict.fromkeys(member.name for member in group.members))

    cut: dict[str, tuple[int, str]] = {}
    chosen: dict[str, None] = {}
    for group in sorted(groups, key=size, reverse=True):
        rival = next(
            (cut[m.name] for m in group.members if m.name in cut and cut[m.name][0] != m.dim),
            None,
        )
        if rival is not None:
            reasons[group.name] = f"it meets the larger group {rival[1]!r} in one tensor, and only one can be cut"
            continue
        chosen[group.name] = None
        cut.update({member.name: (member.dim, group.name) for member in group.members})
    return [group for group in groups if group.name in chosen]


def check_groups(
    module: nn.Module,
    groups: Sequence[Group],
    calls: KnownCalls,
    on_unsliceable: str,
    reasons: dict[str, str],
    padded: Collection[str] = (),
) -> tuple[list[Group], set[str]]:
    """Sees to it that cutting a group leaves a module that computes what the full one would without the units.

    Args:
        module: The full model.
        groups: The groups to cut.
        calls: How the model's modules are called.
        on_unsliceable: What becomes of groups for which that fails: ``"keep"``, ``"pad"`` or ``"error"``.
        reasons: Takes why a group is kept whole, by its name.
        padded: Names of groups to pad in any case.

    Returns:
        The groups that can be cut, with the attributes that shrink along, and the names of those to pad.

    Raises:
        ValueError: A group cannot be cut, and ``on_unsliceable`` is ``"error"``.
    """
    check = SelfCheck(module, calls)
    checked: list[Group] = []
    pad: set[str] = set()
    for group in groups:
        result = check.pad(group) if group.name in padded else check.slice(group)
        if isinstance(result, str) and on_unsliceable == "pad" and group.name not in padded:
            sliced_reason, result = result, check.pad(group)
            if isinstance(result, str):
                result = f"{sliced_reason}; padded: {result}"
            else:
                pad.add(group.name)
        elif group.name in padded:
            pad.add(group.name)
        if isinstance(result, Group):
            checked.append(result)
            continue
        if on_unsliceable == "error":
            raise ValueError(
                f"{group.name!r} cannot be cut: {result}. Name it with keep, or use on_unsliceable='keep' or 'pad'."
            )
        reasons[group.name] = result
    return checked, pad


def discover_groups(
    module: nn.Module,
    names: Sequence[str],
    *,
    padded: Collection[str],
    example_inputs: Any = None,
    record: RecordCalls | None = None,
) -> tuple[list[Group], dict[str, str]]:
    """Finds the groups of the given names again, for a plan that was made before.

    Returns:
        The groups, in the order of the names, and why other parts of the model are whole.

    Raises:
        ValueError: The model does not have such a group, or it cannot be cut as the plan says.
    """
    sample = sample_inputs(module, example_inputs)
    found = find_groups(module, sample)
    by_name = {group.name: group for group in found.groups}
    for name in names:
        if name not in by_name:
            why = found.reasons.get(name) or next(iter(found.reasons.values()), "")
            hint = f" ({why})" if why else ""
            raise ValueError(
                f"The plan does not fit the model: no group of neurons {name!r} is found in it{hint}. "
                "Build the plan from this model, or pass plan=None."
            )
    reasons: dict[str, str] = {}
    known = KnownCalls(module, sample, record)
    groups, _ = check_groups(module, [by_name[name] for name in names], known, "error", reasons, padded)
    return groups, reasons


def why_nothing(module: nn.Module, sample: Any, reasons: Mapping[str, str]) -> str:
    """The error text for a model without any maskable group."""
    why = "".join(f" {name}: {reason}." for name, reason in list(reasons.items())[:3])
    hint = f" {_HOW_TO_TRACE}" if sample is None else ""
    return f"No maskable group of neurons, channels or heads was found in {type(module).__name__}.{hint}{why}"


def _tensors(module: nn.Module) -> list[tuple[str, Any]]:
    return [*module.named_parameters(), *module.named_buffers()]
