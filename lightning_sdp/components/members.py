"""What rules for groups of units are written with: the members that known layers contribute."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn as nn

from lightning_sdp._compat import ConvNd, NormBase
from lightning_sdp.components.base import Group, Member

POINTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Tanh),
    *(nn.Sigmoid, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.Dropout),
)
HEAD_COUNTS = ("n_heads", "num_heads", "num_attention_heads", "heads")
_KV_COUNTS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads", "kv_heads")
_REPEATS = ("num_key_value_groups", "n_rep")
_WIDTHS = ("inner_dim", "inner_size", "all_head_size")


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is the linear layer of Hugging Face's GPT-2, whose weight is transposed."""
    return any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def _dims(module: nn.Module) -> tuple[int, int] | None:
    """The dimensions of a layer's weight that hold its outputs and its inputs; ``None`` for another module."""
    if isinstance(module, nn.Linear):
        return 0, 1
    if isinstance(module, ConvNd):
        return (1, 0) if module.transposed else (0, 1)
    return (1, 0) if is_conv1d(module) else None


def _layer(module: nn.Module, name: str) -> tuple[nn.Module, int, int]:
    child = module.get_submodule(name)
    dims = _dims(child)
    if dims is None:
        raise ValueError(f"`{name}` is a {type(child).__name__}, not a linear or convolutional layer.")
    return child, *dims


def join(prefix: str, name: str) -> str:
    """A dotted name of two parts, each of which may be empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def produces(module: nn.Module, name: str, layout: Sequence[int], axis: int = 0, start: int = 0) -> list[Member]:
    """The members of a layer whose outputs are the units: the outputs of its weight, and its bias.

    Args:
        module: The module that the rule is for.
        name: Name of the layer in it: a linear layer, a convolution, or a ``Conv1D`` of Hugging Face.
        layout: How the units lie along the outputs, see `Member`.
        axis: Which factor of ``layout`` counts the units.
        start: First output that belongs to them.
    """
    child, out, _ = _layer(module, name)
    bias = [Member(join(name, "bias"), 0, tuple(layout), axis, start)] if child.bias is not None else []
    return [Member(join(name, "weight"), out, tuple(layout), axis, start), *bias]


def reads(module: nn.Module, name: str, layout: Sequence[int], axis: int = 0, start: int = 0) -> list[Member]:
    """The members of a layer whose inputs are the units: the inputs of its weight. Arguments as for `produces`."""
    _, _, into = _layer(module, name)
    return [Member(join(name, "weight"), into, tuple(layout), axis, start, reads=True)]


def scales(module: nn.Module, name: str, layout: Sequence[int], axis: int = 0) -> list[Member]:
    """The members of a norm per channel: its weight, bias and running statistics. Arguments as for `produces`."""
    child = module.get_submodule(name)
    keys = ("weight", "bias", "running_mean", "running_var")
    return [Member(join(name, key), 0, tuple(layout), axis) for key in keys if getattr(child, key, None) is not None]


def chain(module: nn.Module, first: str, between: Sequence[str], last: str, name: str, kind: str) -> list[Group]:
    """The units between two layers, where those in between keep the units apart.

    Grouped convolutions and group norms in between make whole groups of channels the units.

    Args:
        module: The module that the rule is for.
        first: Name of the layer whose outputs are the units.
        between: Names of what lies between, in any order: norms per channel, depthwise and grouped convolutions,
            pointwise functions, squeeze-and-excitation gates.
        last: Name of the layer that reads the units.
        name: Name of the group.
        kind: Kind of the group.

    Returns:
        The group; none where something in between mixes the units.
    """
    widths = {first: width_of(module, first, 0), last: width_of(module, last, 1)}
    units = widths[first]
    for child in between:
        inner = module.get_submodule(child)
        if isinstance(inner, POINTWISE):
            continue
        if isinstance(inner, nn.GroupNorm):
            units, widths[child] = math.gcd(units, inner.num_groups), inner.num_channels
        elif isinstance(inner, ConvNd) and inner.groups > 1 and not inner.transposed:
            units, widths[child] = math.gcd(units, inner.groups), inner.out_channels
        elif isinstance(inner, NormBase) or type(inner).__name__ in ("FrozenBatchNorm2d", "SqueezeExcitation"):
            widths[child] = widths[first]
        else:
            return []
    ends = [module.get_submodule(end) for end in (first, last)]
    if any(getattr(end, "groups", 1) > 1 for end in ends) or any(width % units for width in widths.values()):
        return []
    layouts = {child: (units,) if width == units else (units, width // units) for child, width in widths.items()}
    members = produces(module, first, layouts[first])
    for child in between:
        if child not in layouts:
            continue
        if isinstance(module.get_submodule(child), ConvNd):
            members += produces(module, child, layouts[child])
        elif hasattr(module.get_submodule(child), "fc1"):
            members += reads(module, f"{child}.fc1", layouts[child]) + produces(module, f"{child}.fc2", layouts[child])
        else:
            members += scales(module, child, layouts[child])
    return [Group(name, kind, units, (*members, *reads(module, last, layouts[last])))]


def width_of(module: nn.Module, name: str, side: int) -> int:
    """How many outputs (side 0) or inputs (side 1) a layer has."""
    child, *dims = _layer(module, name)
    groups = child.groups if isinstance(child, ConvNd) and dims[side] == 1 else 1
    return int(child.weight.shape[dims[side]]) * int(groups)  # type: ignore[union-attr,index]


def head_group(
    members: Sequence[Member], units: int, attributes: Sequence[str] = (), name: str = "heads"
) -> list[Group]:
    """One group of heads."""
    return [Group(name, "heads", units, tuple(members), "", tuple(attributes))]


def gated(module: nn.Module, gate: str, up: str, down: str) -> list[Group]:
    """The hidden units of an MLP that reads ``function(gate) * up``, by the names of its layers."""
    width = width_of(module, down, 1)
    if any(width_of(module, name, 0) != width for name in (gate, up)):
        return []
    members = produces(module, gate, (width,)) + produces(module, up, (width,)) + reads(module, down, (width,))
    return [Group("hidden", "neurons", width, tuple(members))]


def attention(module: nn.Module, q: str, k: str, v: str, o: str, width: int) -> list[Group]:
    """The heads of an attention; one unit is a head of keys and values with the queries that it serves.

    Where there is but one such head, its queries are the units.
    """
    queries, keys = width_of(module, q, 0), width_of(module, k, 0)
    if (width_of(module, v, 0), width_of(module, o, 1)) != (keys, queries) or queries % keys or keys % width:
        return []
    heads, kv_heads = queries // width, keys // width
    units = kv_heads if kv_heads > 1 else heads
    layout = (units, width) if heads == units else (units, heads // units, width)
    members = produces(module, q, layout)
    if kv_heads > 1:
        members += produces(module, k, (units, width)) + produces(module, v, (units, width))
    members += reads(module, o, layout)
    counts = dict.fromkeys(HEAD_COUNTS, heads) | dict.fromkeys(_WIDTHS, queries)
    counts |= dict.fromkeys(_KV_COUNTS, kv_heads) if kv_heads > 1 else dict.fromkeys(_REPEATS, heads)
    values = {name: module.__dict__.get(name) for name in counts}
    attributes = [name for name, value in values.items() if type(value) is int and value == counts[name]]
    return head_group(members, units, attributes)
