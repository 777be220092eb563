"""Which components a model has, and which of them every worker keeps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.nn as nn

from lightning_sdp.components.base import Component, Group
from lightning_sdp.components.blocks import Block, block_component, find_blocks, named_block
from lightning_sdp.components.calls import KnownCalls, RecordCalls
from lightning_sdp.components.neurons import (
    ON_UNSLICEABLE,
    check_groups,
    find_groups,
    is_inside,
    lies_inside,
    resolve_conflicts,
    sample_inputs,
    stack_of,
    touches,
    why_nothing,
)
from lightning_sdp.components.registry import Skip

GRANULARITIES = ("block", "neuron")
KeepEnds = Literal["auto"] | int | Sequence[int]

_HOW_TO_NAME = (
    "Name the blocks with `components`, e.g. components='net.layers.*', or declare their class with "
    "`lightning_sdp.register_block`."
)


@dataclass(frozen=True)
class Discovery:
    """The components of a model.

    Attributes:
        maskable: The components that a plan distributes, in the model's order; a group of neurons is one component
            here, which the plan cuts into chunks.
        kept: Components that every worker holds, with the reason and their place among all blocks or groups.
        reasons: What looked maskable but is not, with the reason.
        groups: For neurons the groups that the components are.
        padded: Names of groups whose tensors are stored in part but computed with in full.
        skips: What remains of each block where it is missing, by its name.
    """

    maskable: tuple[Component, ...]
    kept: tuple[tuple[Component, str, int], ...]
    reasons: dict[str, str]
    groups: tuple[Group, ...] = ()
    padded: frozenset[str] = field(default_factory=frozenset)
    skips: dict[str, Skip] = field(default_factory=dict)


def glob_to_regex(pattern: str) -> re.Pattern[str]:
    """Compiles a glob over dotted names: ``*`` and ``?`` stay within one segment, ``**`` spans any number of them."""
    regex, i = "", 0
    while i < len(pattern):
        if pattern.startswith("**", i):
            regex, i = regex + ".*", i + 2
            continue
        char = pattern[i]
        if char == "[" and "]" in pattern[i + 1 :]:
            end = pattern.index("]", i + 1)
            body = pattern[i + 1 : end]
            regex, i = regex + "[" + (f"^{body[1:]}" if body.startswith("!") else body) + "]", end + 1
            continue
        regex += {"*": "[^.]*", "?": "[^.]"}.get(char, re.escape(char))
        i += 1
    return re.compile(regex)


def _globs(value: str | Sequence[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _match(argument: str, patterns: list[str], module: nn.Module) -> list[str]:
    """Names of the modules that any of the globs matches, in the model's order."""
    names = [name for name, _ in module.named_modules() if name]
    matched: dict[str, None] = {}
    for pattern in patterns:
        hits = [name for name in names if glob_to_regex(pattern).fullmatch(name)]
        if not hits:
            examples = ", ".join(repr(n) for n in names[:5])
            raise ValueError(
                f"{argument}={pattern!r} matches no module of the model. Module names look like {examples}; "
                "'*' matches within one segment of a name and '**' across segments."
            )
        matched.update(dict.fromkeys(hits))
    return [name for name in names if name in matched]


def _chosen_blocks(module: nn.Module, patterns: list[str], calls: KnownCalls) -> list[Block]:
    names = _match("components", patterns, module)
    for outer in names:
        inner = next((name for name in names if name.startswith(outer + ".")), None)
        if inner is not None:
            raise ValueError(f"components: {inner!r} lies inside {outer!r}; name only one of the two.")
    return [named_block(name, module.get_submodule(name), calls) for name in names]


def _shapes_in(module: nn.Module, name: str, tensors: Sequence[str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """What tells blocks apart: the names within the block and the shapes of its tensors."""
    shapes = {n: tuple(t.shape) for n, t in [*module.named_parameters(), *module.named_buffers()]}
    return tuple((tensor.removeprefix(name), shapes[tensor]) for tensor in tensors)


def _ends(keep_ends: KeepEnds, shapes: list[Any]) -> tuple[int, int]:
    """How many blocks are kept at either end of a stack; ``shapes`` are equal for blocks alike."""
    if keep_ends == "auto":
        if len(shapes) < 6:
            return 0, 0
        return (1, 1) if len(set(shapes)) == 1 else (1, 0)
    ends = (keep_ends, keep_ends) if isinstance(keep_ends, int) else keep_ends
    if not isinstance(ends, (list, tuple)) or len(ends) != 2 or not all(type(e) is int and e >= 0 for e in ends):
        raise ValueError(
            f"keep_ends={keep_ends!r} is not understood: give 'auto', a number of blocks, or [first, last] numbers."
        )
    return ends[0], ends[1]


def discover(
    module: nn.Module,
    granularity: str = "block",
    components: str | Sequence[str] | None = None,
    keep: str | Sequence[str] = (),
    keep_ends: KeepEnds = 0,
    *,
    on_unsliceable: str = "keep",
    example_inputs: Any = None,
    record: RecordCalls | None = None,
) -> Discovery:
    """Finds what can be masked in a model; nothing is materialized, and parameters may be on the meta device.

    Args:
        module: The full model.
        granularity: ``"block"``: whole residual blocks; ``"neuron"``: coupled neurons, channels and heads.
        components: Glob or globs over module names to treat as blocks, or in which neurons may be cut; ``None`` finds
            them. A named block whose skip path is not known returns its first argument where it is missing.
        keep: Glob or globs over module names that every worker holds, with everything inside them.
        keep_ends: Blocks at the ends of the stack that every worker holds: ``[first, last]`` or one number for both;
            ``"auto"`` keeps the first and the last of six or more blocks alike, the first of six or more different
            ones, and none of fewer.
        on_unsliceable: What becomes of groups of neurons that cannot be cut out of their modules: ``"keep"``,
            ``"pad"`` or ``"error"``.
        example_inputs: Sample input of the model's forward; default: its ``example_input_array``.
        record: Finds out, if need be, how the model's modules are called where there is no sample input.

    Returns:
        The components and those that everyone keeps.

    Raises:
        ValueError: An argument is not understood, a glob matches nothing, or nothing is maskable.
    """
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity={granularity!r} is unknown: choose {' or '.join(map(repr, GRANULARITIES))}.")
    if on_unsliceable not in ON_UNSLICEABLE:
        raise ValueError(
            f"on_unsliceable={on_unsliceable!r} is unknown: choose {' or '.join(map(repr, ON_UNSLICEABLE))}."
        )
    if granularity == "neuron":
        return _discover_neurons(module, components, keep, keep_ends, on_unsliceable, example_inputs, record)
    known = KnownCalls(module, sample_inputs(module, example_inputs), record)
    return _discover_blocks(module, components, keep, keep_ends, known)


def _discover_blocks(
    module: nn.Module,
    components: str | Sequence[str] | None,
    keep: str | Sequence[str],
    keep_ends: KeepEnds,
    calls: KnownCalls,
) -> Discovery:
    reasons: dict[str, str] = {}
    if components is None:
        blocks, reasons = find_blocks(module, calls)
    else:
        blocks = _chosen_blocks(module, _globs(components), calls)
    found = [(block, block_component(module, block)) for block in blocks]
    empty = {block.name: "all its tensors are shared with other parts" for block, comp in found if not comp.slices}
    parts = [comp for _, comp in found if comp.slices]
    reasons.update(empty)
    if not parts:
        why = "".join(f" {name!r}: {reason}." for name, reason in list(reasons.items())[:3])
        raise ValueError(f"No maskable block was found in {type(module).__name__}. {_HOW_TO_NAME}{why}")

    kept_names = _match("keep", _globs(keep), module)
    first, last = _ends(keep_ends, [_shapes_in(module, c.name, [s.name for s in c.slices]) for c in parts])
    maskable, kept = [], []
    for index, part in enumerate(parts):
        keeper = next((k for k in kept_names if is_inside(part.name, [k])), None)
        if keeper is not None:
            kept.append((part, f"named by keep ({keeper})", index))
        elif index < first or index >= len(parts) - last:
            kept.append((part, f"an end of the stack (keep_ends={[first, last]})", index))
        else:
            maskable.append(part)
    if not maskable:
        raise ValueError(
            f"keep and keep_ends leave nothing to mask: all {len(parts)} blocks of {type(module).__name__} are held "
            f"by every worker. Keep fewer, e.g. keep_ends=0. {_HOW_TO_NAME}"
        )
    return Discovery(tuple(maskable), tuple(kept), reasons, skips={block.name: block.skip for block in blocks})


def _discover_neurons(
    module: nn.Module,
    components: str | Sequence[str] | None,
    keep: str | Sequence[str],
    keep_ends: KeepEnds,
    on_unsliceable: str,
    example_inputs: Any,
    record: RecordCalls | None,
) -> Discovery:
    sample = sample_inputs(module, example_inputs)
    known = KnownCalls(module, sample, record)
    found = find_groups(module, sample)
    reasons = found.reasons
    stack = stack_of(module, found.groups, known)
    if components is None:
        groups = [group for group in found.groups if not stack or lies_inside(group, stack)]
        reasons |= {g.name: "it lies outside of the residual blocks" for g in found.groups if g not in groups}
    else:
        groups = _chosen_groups(module, _globs(components), found.groups, reasons)
    groups = resolve_conflicts(module, groups, reasons)

    kept_names = _match("keep", _globs(keep), module)
    tensors = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
    first, last = _ends(keep_ends, [_shapes_in(module, s, [n for n in tensors if is_inside(n, [s])]) for s in stack])
    ends = stack[:first] + stack[len(stack) - last :]
    cut, kept = [], []
    for index, group in enumerate(groups):
        keeper = next((k for k in kept_names if touches(group, [k])), None)
        if keeper is not None:
            kept.append((_whole(group), f"named by keep ({keeper})", index))
        elif touches(group, ends):
            kept.append((_whole(group), f"in a block at an end of the stack (keep_ends={[first, last]})", index))
        else:
            cut.append(group)
    if not groups:
        raise ValueError(why_nothing(module, sample, reasons))
    if not cut:
        raise ValueError(
            f"keep and keep_ends leave nothing to mask: all {len(groups)} groups of neurons of "
            f"{type(module).__name__} are held by every worker. Keep fewer, e.g. keep_ends=0."
        )
    checked, padded = check_groups(module, cut, known, on_unsliceable, reasons)
    if not checked:
        raise ValueError(why_nothing(module, sample, {g.name: reasons[g.name] for g in cut}))
    return Discovery(tuple(_whole(group) for group in checked), tuple(kept), reasons, tuple(checked), frozenset(padded))


def _whole(group: Group) -> Component:
    return Component(group.name, group.kind, group.chunk(0, group.units))


def _chosen_groups(
    module: nn.Module, patterns: list[str], groups: Sequence[Group], reasons: dict[str, str]
) -> list[Group]:
    matches = {pattern: _match("components", [pattern], module) for pattern in patterns}
    everything = [name for matched in matches.values() for name in matched]
    chosen = [group for group in groups if lies_inside(group, everything)]
    for pattern, matched in matches.items():
        if any(touches(group, matched) for group in chosen):
            continue
        why = [f"{n}: {r}" for n, r in reasons.items() if is_inside(n, matched)]
        why += [f"{group.name} reaches beyond it" for group in groups if touches(group, matched)]
        outer = [(n, r) for n, r in reasons.items() if is_inside(matched[0], [n.rpartition(".")[0]])]
        why += [f"{n}: {r}" for n, r in outer] or ["no neurons are known there"]
        raise ValueError(
            f"components={pattern!r}: nothing in there can be cut into neurons, channels or heads. {why[0]}. Name "
            "modules that contain both the layer that produces the neurons and the one that reads them."
        )
    return chosen


def discover_components(module: nn.Module, granularity: str = "block", example_inputs: Any = None) -> list[Component]:
    """Lists every maskable component of a model, in its order; see `discover` for the arguments and errors."""
    return list(discover(module, granularity, example_inputs=example_inputs).maskable)
