"""Coupled units of known classes of modules, found without running the model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.nn as nn
from torch import Tensor

from lightning_sdp.components import known  # Registers its rules.
from lightning_sdp.components.base import KINDS, Group
from lightning_sdp.components.members import HEAD_COUNTS, attention, gated, join, width_of
from lightning_sdp.components.registry import registered_neurons

_PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("wq", "wk", "wv", "wo"),
    ("to_q", "to_k", "to_v", "to_out"),
)


def is_trusted(module: nn.Module) -> bool:
    """Whether a module's groups come from a rule for the very forward that it runs.

    Otherwise they are guessed from its children, or its class overrides the forward of the class that has a rule; such
    groups need a numerical check.
    """
    cls, _ = registered_neurons(module)
    return cls is not None and "forward" not in module.__dict__ and type(module).forward is cls.forward  # type: ignore[attr-defined]


def rule_groups(model: nn.Module) -> tuple[list[Group], dict[str, str]]:
    """Finds the units of all modules whose class, or whose children's names, are known.

    Where the rules of two modules claim the same entries of a tensor, the outer module's counts.

    Args:
        model: The full model; its tensors may be on the meta device.

    Returns:
        The groups, in the model's order and with names in the model; and, by name, the groups that cannot be used,
        with the reason. Groups may meet in a tensor along different dimensions.

    Raises:
        ValueError: A rule's groups do not fit its module.
    """
    names = _Names(model)
    claimed: dict[tuple[str, int], list[range]] = {}
    groups: list[Group] = []
    reasons: dict[str, str] = {}
    for path, module in model.named_modules():
        for group in _module_groups(path, module, reasons):
            named = _named(group, path)
            spans = _spans(named)
            if any(_overlap(span, other) for key, span in spans for other in claimed.get(key, ())):
                continue
            for key, span in spans:
                claimed.setdefault(key, []).append(span)
            reason = "it has one unit only" if group.units == 1 else names.foreign(module, path, group)
            if reason is None:
                groups.append(named)
            else:
                reasons[named.name] = reason
    return groups, reasons


def _module_groups(path: str, module: nn.Module, reasons: dict[str, str]) -> list[Group]:
    """What the rule for a module says, with relative names, if it fits the module.

    A rule of ours that does not fit (a layer may have been replaced) is a reason to keep the module whole; one of the
    user's is an error.
    """
    cls, rule = registered_neurons(module)
    where = f"The rule for {(cls or type(module)).__qualname__}, applied to `{path or type(module).__name__}`,"
    try:
        groups = [_checked(module, group, where) for group in (rule or _guess)(module)]
        spans = [entry for group in groups for entry in _spans(group)]
        for (a, first), (b, second) in itertools.combinations(spans, 2):
            if a == b and _overlap(first, second):
                raise ValueError(f"{where} claims entries of `{a[0]}` along dimension {a[1]} twice.")
        if len({group.name for group in groups}) < len(groups):
            raise ValueError(f"{where} returned several groups of one name.")
    except (ValueError, AttributeError) as error:
        if rule is not None and rule.__module__ != known.__name__:
            raise
        reasons[path or type(module).__name__] = str(error)
        return []
    return groups


class _Names:
    """All names of a model's modules and tensors, those of shared ones included."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[int, list[str]] = {}
        self.tensors: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self.modules.setdefault(id(module), []).append(path)
        for tensors in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
            for name, tensor in tensors:
                self.tensors.setdefault(id(tensor), []).append(name)

    def foreign(self, module: nn.Module, path: str, group: Group) -> str | None:
        """Why a group cannot be cut: one of its tensors is computed, or is known elsewhere in the model too."""
        for member in group.members:
            own = {join(other, member.name) for other in self.modules[id(module)]}
            found = self.tensors.get(id(_get(module, member.name)))
            if found is None:
                return f"`{join(path, member.name)}` is not stored, but computed"
            others = [name for name in found if name not in own]
            if others:
                return f"`{join(path, member.name)}` is also `{others[0]}`"
        return None


def _spans(group: Group) -> list[tuple[tuple[str, int], range]]:
    """The tensors and dimensions of a group, with the entries that it takes up."""
    return [((m.name, m.dim), range(m.start, m.start + math.prod(m.layout))) for m in group.members]


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def _named(group: Group, path: str) -> Group:
    """The group with names in the model."""
    return replace(
        group,
        name=join(path, group.name),
        owner=join(path, group.owner),
        members=tuple(replace(member, name=join(path, member.name)) for member in group.members),
        attributes=tuple(join(path, name) for name in group.attributes),
    )


def _get(module: nn.Module, name: str) -> Any:
    """What a dotted name stands for; raises AttributeError."""
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), leaf)


def _checked(module: nn.Module, group: Group, where: str) -> Group:
    """The group without members that the module has as ``None``, if all else fits."""

    def wrong(what: str) -> ValueError:
        return ValueError(f"{where} returned a group `{group.name}` that does not fit: {what}.")

    if group.kind not in KINDS[1:]:
        raise wrong(f"its kind is {group.kind!r}, but must be one of {KINDS[1:]}")
    members = []
    for member in group.members:
        try:
            tensor = _get(module, member.name)
        except AttributeError:
            raise wrong(f"there is no tensor `{member.name}`") from None
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise wrong(f"`{member.name}` is no tensor")
        if not 0 <= member.dim < tensor.dim():
            raise wrong(f"`{member.name}` of shape {tuple(tensor.shape)} has no dimension {member.dim}")
        last = member.start + math.prod(member.layout)
        if member.start < 0 or last > tensor.shape[member.dim]:
            raise wrong(
                f"layout {member.layout} of `{member.name}` ends at {last} of {tensor.shape[member.dim]} entries"
            )
        if not 0 <= member.axis < len(member.layout) or member.layout[member.axis] != group.units:
            raise wrong(f"axis {member.axis} of layout {member.layout} of `{member.name}` is not {group.units} units")
        members.append(member)
    if not members:
        raise wrong("it has no members")
    for name in group.attributes:
        try:
            value = _get(module, name)
        except AttributeError:
            raise wrong(f"there is no attribute `{name}`") from None
        if type(value) is not int or value % group.units:
            raise wrong(f"the attribute `{name}` is {value!r}, not a multiple of {group.units} units")
    return replace(group, members=tuple(members))


# Unknown classes with well-known children.


def _guess(module: nn.Module) -> list[Group]:
    for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        if all(_linear(module, name) == name for name in (gate, up, down)):
            return gated(module, gate, up, down)
    for names in _PROJECTIONS:
        found = [_linear(module, name) for name in names]
        if None not in found:
            q, k, v, o = (name or "" for name in found)
            width = _head_width(module, width_of(module, q, 0))
            return attention(module, q, k, v, o, width) if width and not _mixed(module, (q, k, v, o)) else []
    return []


def _linear(module: nn.Module, name: str) -> str | None:
    """The name of a linear child, or of the one that a child begins with (a projection and its dropout)."""
    child = getattr(module, name, None)
    if isinstance(child, (nn.Sequential, nn.ModuleList)) and len(child):
        name, child = f"{name}.0", child[0]
    return name if isinstance(child, nn.Linear) else None


def _head_width(module: nn.Module, width: int) -> int | None:
    """The entries per head, where a module says so."""
    for name in ("head_dim", *HEAD_COUNTS):
        value = getattr(module, name, None)
        if type(value) is int and value > 0 and width % value == 0:
            return value if name == "head_dim" else width // value
    return None


def _mixed(module: nn.Module, projections: Sequence[str]) -> bool:
    """Whether other parameters, e.g. those of a norm over all heads, are as wide as a projection's outputs."""
    own = [f"{name}." for name in projections]
    widths = {width_of(module, name, 0) for name in projections[:3]}
    others = [p for name, p in module.named_parameters() if not name.startswith(tuple(own))]
    return any(widths & set(p.shape) for p in others)
