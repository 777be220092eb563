"""Whether the components of a plan are parts of a model, as a plan that comes from a file has to prove."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn as nn

from lightning_sdp.components import Component, Discovery, discover
from lightning_sdp.components.calls import RecordCalls
from lightning_sdp.components.neurons import discover_groups


def fit_groups(
    components: Sequence[Component], module: nn.Module, example_inputs: Any, record: RecordCalls | None
) -> Discovery:
    """Finds the groups of neurons that planned chunks belong to.

    Raises:
        ValueError: The model has no such group, or its chunks are others.
    """
    chunks: dict[str, list[Component]] = {}
    for component in components:
        chunks.setdefault(component.group, []).append(component)
    padded = {name for name, own in chunks.items() if any(chunk.padded for chunk in own)}
    groups, reasons = discover_groups(module, list(chunks), padded=padded, example_inputs=example_inputs, record=record)
    for group in groups:
        planned, actual = chunks[group.name], group.chunks(len(chunks[group.name]), group.name in padded)
        if len(planned) != len(actual):
            raise ValueError(
                f"The plan does not fit the model: it has {len(planned)} chunks of {group.name!r}, which has only "
                f"{group.units} units."
            )
        for have, want in zip(planned, actual, strict=True):
            if have.name != want.name or set(have.slices) != set(want.slices):
                odd = sorted({part.name for part in set(have.slices) ^ set(want.slices)})
                names = ", ".join(odd[:3]) or want.name
                raise ValueError(f"The plan does not fit the model: component {have.name!r} differs in {names}.")
    return Discovery(tuple(components), (), reasons, tuple(groups), frozenset(padded))


def fit_blocks(
    components: Sequence[Component], module: nn.Module, example_inputs: Any, record: RecordCalls | None
) -> Discovery:
    """Finds the blocks that a plan names.

    Raises:
        ValueError: The model has no such module or tensor, or a tensor is registered outside of its block as well.
    """
    modules = dict(module.named_modules())
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    seen: dict[str, str] = {}
    for component in components:
        if component.name not in modules:
            raise ValueError(
                f"The plan does not fit the model: it has no module {component.name!r}. "
                "Build the plan from this model, or pass plan=None."
            )
        for part in component.slices:
            if part.name not in tensors:
                raise ValueError(f"The plan does not fit the model: it has no tensor {part.name!r}.")
            if part.name in seen:
                raise ValueError(f"The plan gives {part.name!r} to {seen[part.name]!r} and {component.name!r}.")
            if not part.name.startswith(component.name + "."):
                raise ValueError(f"The plan's component {component.name!r} cannot own {part.name!r}.")
            seen[part.name] = component.name
    names = [component.name for component in components]
    found = discover(module, "block", names, example_inputs=example_inputs, record=record)
    for planned, actual in zip(sorted(components, key=str), sorted(found.maskable, key=str), strict=True):
        if planned.name != actual.name or set(planned.slices) != set(actual.slices):
            odd = set(planned.slices) ^ set(actual.slices)
            which = ", ".join(sorted(part.name for part in odd)[:3]) or actual.name
            raise ValueError(f"The plan does not fit the model: component {planned.name!r} differs in {which}.")
    return found
