"""What changes on modules whose tensors are cut: sizes that forwards read, forwards that cannot be told, views."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from lightning_sdp._compat import ConvNd, NormBase
from lightning_sdp.components.base import Group
from lightning_sdp.components.blocks import aliases
from lightning_sdp.components.forwards import sliced_class as sliced_class

_T = TypeVar("_T")

Reader = Callable[[Any], Tensor]

ABSENT: Any = object()
"""The state of an attribute that a module does not have."""


@dataclass(frozen=True)
class Edit:
    """One attribute of a module in its two states.

    Attributes:
        module: The module.
        attribute: Name of the attribute; ``"__class__"`` is the module's class.
        full: Its value while the module has its full tensors; may be `ABSENT`.
        local: Its value while the tensors are cut.
    """

    module: nn.Module
    attribute: str
    full: Any
    local: Any

    def cut(self) -> None:
        """Puts the module into the state for cut tensors."""
        self._set(self.local)

    def restore(self) -> None:
        """Puts the module into the state for full tensors."""
        self._set(self.full)

    def _set(self, value: Any) -> None:
        if value is ABSENT:
            self.module.__dict__.pop(self.attribute, None)
        else:
            setattr(self.module, self.attribute, value)


def shape_edits(module: nn.Module, shapes: Mapping[str, torch.Size]) -> list[Edit]:
    """The sizes that a module keeps as attributes, once its own tensors have other shapes.

    Args:
        module: The module, with its full sizes.
        shapes: The new shapes of tensors of its own, e.g. ``{"weight": ..., "bias": ...}``.

    Returns:
        The attributes that change; none for a module of an unknown class, whose forward may read all sizes off its
        tensors.

    Raises:
        ValueError: The module cannot compute with tensors of these shapes.
    """
    sizes = _sizes(module, shapes) if shapes else {}
    edits = [Edit(module, name, getattr(module, name), size) for name, size in sizes.items()]
    return [edit for edit in edits if edit.full != edit.local]


def _sizes(module: nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, int]:
    weight = shapes.get("weight")
    count = next(iter(shapes.values()))[0]
    if isinstance(module, ConvNd):
        return _conv_sizes(module, weight) if weight is not None else {}
    if isinstance(module, NormBase):
        return {"num_features": count}
    if isinstance(module, nn.GroupNorm):
        return {"num_channels": count, "num_groups": _share(module, module.num_groups, module.num_channels, count)}
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        raise ValueError(f"{type(module).__name__} normalizes over the dimension that would be cut.")
    if weight is None:
        return {}
    if isinstance(module, nn.Linear):
        return {"out_features": weight[0], "in_features": weight[1]}
    if isinstance(module, nn.Embedding):
        if weight[0] != module.num_embeddings:
            raise ValueError("An Embedding cannot lack some of its entries.")
        return {"embedding_dim": weight[1]}
    if isinstance(module, nn.PReLU):
        return {"num_parameters": weight[0]}
    if any(cls.__name__ == "Conv1D" for cls in type(module).__mro__):
        return {"nx": weight[0], "nf": weight[1]}
    return {}


def _conv_sizes(conv: ConvNd, weight: torch.Size) -> dict[str, int]:
    # The first dimension of the weight holds the channels of all groups, the second those of one group.
    outer, inner = ("in_channels", "out_channels") if conv.transposed else ("out_channels", "in_channels")
    groups, full = conv.groups, getattr(conv, outer)
    if groups > 1 and weight[0] != full:
        if weight[1] * groups != getattr(conv, inner):
            raise ValueError(f"{type(conv).__name__} of {groups} groups can be cut by groups or within them, not both.")
        groups = _share(conv, groups, full, weight[0])
    return {outer: weight[0], inner: weight[1] * groups, "groups": groups}


def _share(module: nn.Module, groups: int, full: int, local: int) -> int:
    """How many of a module's groups of channels remain."""
    if groups * local % full:
        raise ValueError(f"{type(module).__name__} of {groups} groups cannot keep {local} of {full} channels.")
    return groups * local // full


def proportional_edits(model: nn.Module, group: Group, held_units: int) -> list[Edit]:
    """The attributes of a group that shrink with its units.

    Args:
        model: The model in which the group's names hold, with its full sizes.
        group: The group.
        held_units: How many of its units remain.

    Raises:
        ValueError: An attribute is no multiple of the units.
    """
    edits = []
    for name in group.attributes:
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        full = getattr(module, attribute)
        if full % group.units:
            raise ValueError(f"`{name}` is {full}, not a multiple of the {group.units} units of `{group.name}`.")
        edits.append(Edit(module, attribute, full, full // group.units * held_units))
    return edits


def welded_edits(model: nn.Module, group: Group, held: Sequence[int]) -> list[Edit]:
    """The class, and what it needs to know, of an attention whose heads are cut; see `sliced_class`.

    Args:
        model: The model in which the group's names hold.
        group: The group.
        held: The units that remain, ascending.
    """
    owner = model.get_submodule(group.owner)
    cls = sliced_class(owner) if group.kind == "heads" else None
    if cls is None:
        return []
    edits = [Edit(owner, "__class__", type(owner), cls)]
    if isinstance(owner, nn.MultiheadAttention):
        edits.append(Edit(owner, "_held_heads", ABSENT, tuple(held)))
        # Keeps an nn.TransformerEncoderLayer from computing the attention itself, in its fused fast path ...
        edits.append(Edit(owner, "_qkv_same_embed_dim", owner._qkv_same_embed_dim, False))
        # ... and an nn.TransformerEncoder from nested tensors, which that path alone understands.
        edits += [
            Edit(module, "use_nested_tensor", True, False)
            for module in model.modules()
            if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor and owner in module.modules()
        ]
    return edits


def _by_module(model: nn.Module, values: Mapping[str, _T]) -> dict[str, dict[str, _T]]:
    """Values of tensors, sorted by the modules that have them: those of a tied tensor are several."""
    places = {names[0]: names for names in aliases(model)}
    modules: dict[str, dict[str, _T]] = {}
    seen: dict[tuple[int, str], None] = {}
    for name, value in values.items():
        for place in places.get(name, [name]):
            path, _, leaf = place.rpartition(".")
            key = id(model.get_submodule(path)), leaf
            if key not in seen:  # a module itself may be registered in several places
                seen[key] = None
                modules.setdefault(path, {})[leaf] = value
    return modules


def structure_edits(
    model: nn.Module, shapes: Mapping[str, torch.Size], held: Iterable[tuple[Group, Sequence[int]]]
) -> list[Edit]:
    """All that changes on a model's modules when some of its tensors are cut.

    Args:
        model: The model, with its full sizes.
        shapes: The new shapes of its tensors, by their names in it.
        held: The groups that are cut, with the units that remain, ascending.

    Raises:
        ValueError: A module cannot compute with such tensors; the message names it.
    """
    edits: list[Edit] = []
    for path, own in _by_module(model, shapes).items():
        try:
            edits += shape_edits(model.get_submodule(path), own)
        except ValueError as error:
            raise ValueError(f"`{path}` cannot be cut: {error}") from error
    for group, units in held:
        edits += proportional_edits(model, group, len(units)) + welded_edits(model, group, units)
    return edits


# [Note: Padded tensors] A module that cannot compute with cut tensors may still store them cut: a property of its class
# gives its forward the full tensor, with zeros where entries are missing. Everything else (state dicts, optimizers)
# looks into `_parameters`, where the cut one is.


@dataclass(frozen=True)
class PaddedSpec:
    """Where the stored entries of a parameter belong in the full one.

    Attributes:
        dim: The dimension along which entries are missing.
        size: Size of the full parameter along it.
        runs: The ranges ``[start, stop)`` of the stored entries, ascending.
    """

    dim: int
    size: int
    runs: tuple[tuple[int, int], ...]


def padded_class(module: nn.Module, names: Mapping[str, PaddedSpec]) -> type[nn.Module]:
    """The class that a module takes on while it stores some parameters cut, but computes with full ones.

    Every access rebuilds the full parameter, differentiably.

    Args:
        module: The module.
        names: Which of its own parameters are cut, and how.

    Raises:
        ValueError: Something named is not a parameter of the module's own (buffers are written to in place, which would
            be lost), or the module does not read it by its name.
    """
    if isinstance(module, nn.RNNBase):
        raise ValueError(f"{type(module).__name__} does not read its parameters by their names.")
    for name in names:
        if module._parameters.get(name) is None:
            raise ValueError(f"{type(module).__name__} has no parameter `{name}` of its own.")
    return _reading_class(module, "Padded", {name: _padding(name, spec) for name, spec in names.items()})


def _reading_class(module: nn.Module, prefix: str, readers: Mapping[str, Reader]) -> type[nn.Module]:
    """A subclass of a module's class through whose properties its parameters are read."""
    cls = type(module)
    properties = {name: property(reader) for name, reader in readers.items()}
    return type(f"{prefix}{cls.__name__}", (cls,), {**properties, "__module__": cls.__module__})


def view_edits(model: nn.Module, readers: Mapping[str, Reader]) -> list[Edit]:
    """The classes of modules whose forwards are to read something else in place of some of their parameters.

    Args:
        model: The model.
        readers: What is read, by the names of parameters in the model; called with the module.
    """
    edits = []
    for path, own in _by_module(model, readers).items():
        module = model.get_submodule(path)
        edits.append(Edit(module, "__class__", type(module), _reading_class(module, "Masked", own)))
    return edits


def _padding(name: str, spec: PaddedSpec) -> Reader:
    def view(self: nn.Module) -> Tensor:
        stored = self._parameters[name]
        assert stored is not None
        return pad(stored, spec)

    return view


def padded_edits(model: nn.Module, specs: Mapping[str, PaddedSpec]) -> list[Edit]:
    """The classes of modules that store some of their parameters cut, by the parameters' names in the model.

    Raises:
        ValueError: A parameter cannot be padded; the message names its module. See `padded_class`.
    """
    edits = []
    for path, own in _by_module(model, specs).items():
        module = model.get_submodule(path)
        try:
            edits.append(Edit(module, "__class__", type(module), padded_class(module, own)))
        except ValueError as error:
            raise ValueError(f"`{path}` cannot be padded: {error}") from error
    return edits


def pad(stored: Tensor, spec: PaddedSpec) -> Tensor:
    """The full tensor that stored entries are a part of, with zeros elsewhere."""
    pieces, taken, end = [], 0, 0
    for start, stop in (*spec.runs, (spec.size, spec.size)):
        if start > end:
            pieces.append(stored.new_zeros((*stored.shape[: spec.dim], start - end, *stored.shape[spec.dim + 1 :])))
        if stop > start:
            pieces.append(stored.narrow(spec.dim, taken, stop - start))
        taken, end = taken + stop - start, stop
    return torch.cat(pieces, spec.dim)
