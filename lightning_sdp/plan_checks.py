"""Whether a plan can be used: it leaves nothing without a holder, and its components are parts of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.nn as nn

from lightning_sdp.components import Component, Discovery, discover
from lightning_sdp.components.calls import RecordCalls
from lightning_sdp.components.neurons import discover_groups

if TYPE_CHECKING:
    from lightning_sdp.plan import MaskPlan


def describe_plan(plan: MaskPlan) -> list[str]:
    """A plan in lines, for ranks to compare."""
    lines = [f"component {c.name} held by workers {plan.holders(c.name)}" for c in plan.components]
    lines += [f"{c.name} as {c.slices}, padded={c.padded}" for c in plan.components]
    return lines + [f"attributes {group.attributes} of {group.name}" for group in plan.groups]


def describe_tensors(module: nn.Module) -> list[str]:
    """The parameters and buffers of a model in lines, for ranks to compare."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [f"{name} of shape {tuple(t.shape)} and {t.dtype}" for name, t in tensors]


def require_same_components(plan: MaskPlan, other: MaskPlan) -> None:
    """Refuses a plan that says who holds the components of something else.

    Args:
        plan: The plan that fits.
        other: The other one.

    Raises:
        ValueError: It has another granularity, other workers or other components.
    """
    instead = "To go on with it, save a checkpoint and resume from it with the other plan."
    if other.granularity != plan.granularity:
        raise ValueError(f"The plan is one of {other.granularity}s, but {plan.granularity}s are held. {instead}")
    if other.num_subnetworks != plan.num_subnetworks:
        raise ValueError(
            f"The plan is for {other.num_subnetworks} workers, but there are {plan.num_subnetworks}. {instead}"
        )
    mine, theirs = [{c.name: (c.slices, c.padded) for c in each.components} for each in (plan, other)]
    for name in mine:
        if name not in theirs:
            raise ValueError(f"The plan says nothing about component {name!r}. {instead}")
        if mine[name] != theirs[name]:
            raise ValueError(f"The plan has other entries in component {name!r}. {instead}")
    for name in theirs:
        if name not in mine:
            raise ValueError(f"The plan has a component {name!r}, which the present one has not. {instead}")


def check_holders(pairs: Sequence[tuple[Component, Sequence[int]]], num_subnetworks: int, granularity: str) -> None:
    """Checks what a plan says without knowing the model.

    Args:
        pairs: The components with their holders.
        num_subnetworks: Number of workers N.
        granularity: ``"block"`` or ``"neuron"``.

    Raises:
        ValueError: Something is wrong; see `MaskPlan`.
    """
    if type(num_subnetworks) is not int or num_subnetworks < 1:
        raise ValueError(f"num_subnetworks={num_subnetworks!r} must be a number of workers, at least 1.")
    if not pairs:
        raise ValueError("The plan has no component.")
    if len({component.name for component, _ in pairs}) < len(pairs):
        raise ValueError("The plan names a component twice.")
    dims: dict[str, int | None] = {}
    served: dict[str, set[int]] = {}
    for component, workers in pairs:
        name = component.name
        if not isinstance(workers, (list, tuple)) or not all(type(worker) is int for worker in workers):
            raise ValueError(f"The plan's holders of {name!r} are {workers!r}: give a list of worker numbers.")
        if not workers:
            raise ValueError(f"The plan leaves component {name!r} without a holder: its parameters would be lost.")
        if min(workers) < 0 or max(workers) >= num_subnetworks:
            raise ValueError(f"The plan gives component {name!r} to workers {list(workers)}; N is {num_subnetworks}.")
        for part in component.slices:
            if dims.setdefault(part.name, part.dim) != part.dim:
                raise ValueError(f"The plan cuts tensor {part.name!r} along more than one dimension.")
        served.setdefault(component.group, set()).update(workers)
    for group, holders in served.items() if granularity == "neuron" else ():
        for worker in range(num_subnetworks):
            if worker not in holders:
                raise ValueError(
                    f"The plan gives worker {worker} no chunk of {group!r}: every worker runs every layer, so that it "
                    "needs at least one."
                )


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
            _require_same(have, want)
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
        _require_same(planned, actual)
    return found


def _require_same(planned: Component, actual: Component) -> None:
    odd = sorted({part.name for part in set(planned.slices) ^ set(actual.slices)})
    if planned.name != actual.name or odd:
        which = ", ".join(odd[:3]) or actual.name
        raise ValueError(f"The plan does not fit the model: component {planned.name!r} differs in {which}.")
