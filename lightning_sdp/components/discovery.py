"""Which components a model has, and which of them every worker keeps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch.nn as nn

from lightning_sdp.components.base import Component
from lightning_sdp.components.blocks import Block, block_component, find_blocks, named_block

GRANULARITIES = ("block",)
KeepEnds = Literal["auto"] | int | Sequence[int]

_HOW_TO_NAME = (
    "Name the blocks with `components`, e.g. components='net.layers.*', or declare their class with "
    "`lightning_sdp.register_block`."
)


@dataclass(frozen=True)
class Discovery:
    """The components of a model.

    Attributes:
        maskable: The components that a plan distributes, in the model's order.
        kept: Components that every worker holds, with the reason and their place among all blocks.
        reasons: Modules that looked like a block but are not understood as one, with the reason.
    """

    maskable: tuple[Component, ...]
    kept: tuple[tuple[Component, str, int], ...]
    reasons: dict[str, str]


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


def _chosen_blocks(module: nn.Module, patterns: list[str]) -> list[Block]:
    names = _match("components", patterns, module)
    for outer in names:
        inner = next((name for name in names if name.startswith(outer + ".")), None)
        if inner is not None:
            raise ValueError(f"components: {inner!r} lies inside {outer!r}; name only one of the two.")
    return [named_block(name, module.get_submodule(name)) for name in names]


def _shape_of(module: nn.Module, component: Component) -> tuple[tuple[str, tuple[int, ...]], ...]:
    shapes = {n: tuple(t.shape) for n, t in [*module.named_parameters(), *module.named_buffers()]}
    return tuple((s.name.removeprefix(component.name), shapes[s.name]) for s in component.slices)


def _ends(keep_ends: KeepEnds, module: nn.Module, components: list[Component]) -> tuple[int, int]:
    if keep_ends == "auto":
        if len(components) < 6:
            return 0, 0
        return (1, 1) if len({_shape_of(module, c) for c in components}) == 1 else (1, 0)
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
) -> Discovery:
    """Finds what can be masked in a model; nothing is materialized, and parameters may be on the meta device.

    Args:
        module: The full model.
        granularity: ``"block"``: whole residual blocks.
        components: Glob or globs over module names to treat as blocks; ``None`` finds them. A named module whose skip
            path is not known returns its first argument where it is missing.
        keep: Glob or globs over module names that every worker holds, with everything inside them.
        keep_ends: Blocks at the ends of the stack that every worker holds: ``[first, last]`` or one number for both;
            ``"auto"`` keeps the first and the last of six or more blocks alike, the first of six or more different
            ones, and none of fewer.

    Returns:
        The components and those that everyone keeps.

    Raises:
        ValueError: An argument is not understood, a glob matches nothing, or nothing is maskable.
    """
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity={granularity!r} is unknown: choose {' or '.join(map(repr, GRANULARITIES))}.")
    reasons: dict[str, str] = {}
    if components is None:
        blocks, reasons = find_blocks(module)
    else:
        blocks = _chosen_blocks(module, _globs(components))
    found = [(block, block_component(module, block)) for block in blocks]
    empty = {block.name: "all its tensors are shared with other parts" for block, comp in found if not comp.slices}
    parts = [comp for _, comp in found if comp.slices]
    reasons.update(empty)
    if not parts:
        why = "".join(f" {name!r}: {reason}." for name, reason in list(reasons.items())[:3])
        raise ValueError(f"No maskable block was found in {type(module).__name__}. {_HOW_TO_NAME}{why}")

    kept_names = _match("keep", _globs(keep), module)
    first, last = _ends(keep_ends, module, parts)
    maskable, kept = [], []
    for index, part in enumerate(parts):
        keeper = next((k for k in kept_names if part.name == k or part.name.startswith(k + ".")), None)
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
    return Discovery(tuple(maskable), tuple(kept), reasons)


def discover_components(module: nn.Module, granularity: str = "block") -> list[Component]:
    """Lists every maskable component of a model, in its order; see `discover` for the arguments and errors."""
    return list(discover(module, granularity).maskable)
