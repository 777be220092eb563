"""Residual blocks: which modules are one, and what belongs to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn as nn

from lightning_sdp.components.base import Component, ParamSlice
from lightning_sdp.components.calls import KnownCalls
from lightning_sdp.components.registry import Skip, first_argument, registered_skip
from lightning_sdp.components.skips import identity_skip, is_unreadable, trace_skip


@dataclass(frozen=True)
class Block:
    """A residual block of a module.

    Attributes:
        name: Its name in the module.
        module: The block itself.
        skip: What remains of it where it is missing.
    """

    name: str
    module: nn.Module
    skip: Skip


def _listed_alike(module: nn.Module) -> set[str]:
    """Names of modules that stand beside another one of their class in a list or sequence."""
    names = set()
    for path, parent in module.named_modules():
        if isinstance(parent, (nn.ModuleList, nn.Sequential)):
            children = list(parent.named_children())
            counts = Counter(type(child) for _, child in children)
            names |= {f"{path}.{name}" if path else name for name, child in children if counts[type(child)] > 1}
    return names


def _is_candidate(module: nn.Module) -> bool:
    known = type(module).__module__
    return (
        not known.startswith(("torch.nn.", "torchmetrics."))
        and not isinstance(module, torch.jit.ScriptModule)
        and next(module.parameters(), None) is not None
    )


def find_blocks(module: nn.Module, calls: KnownCalls | None = None) -> tuple[list[Block], dict[str, str]]:
    """Finds the residual blocks of a module, in registration order.

    Args:
        module: The full model; parameters may be on the meta device.
        calls: How the modules are called; asked only if a forward cannot be read.

    Returns:
        The blocks, and for modules that might have been one the reason why they are not.
    """
    reasons: dict[str, str] = {}
    seen: dict[int, None] = {}
    alike = _listed_alike(module)

    def visit(name: str, current: nn.Module) -> list[Block]:
        if id(current) in seen:
            return []
        seen[id(current)] = None
        known, skip = registered_skip(current)
        if known:
            if skip is None:
                reasons[name] = f"the rule for {type(current).__name__} does not see a residual block in it"
            return [Block(name, current, skip)] if skip is not None and name else []
        found = [
            block
            for child_name, child in current.named_children()
            for block in visit(f"{name}.{child_name}" if name else child_name, child)
        ]
        if found or not name or not _is_candidate(current):
            return found
        traced = trace_skip(current)
        if isinstance(traced, str) and name in alike and is_unreadable(traced) and calls is not None:
            call = calls.get(name)
            traced = traced if call is None else identity_skip(current, call)
        if isinstance(traced, Skip):
            return [Block(name, current, traced)]
        if next(current.children(), None) is not None or name in alike:
            reasons[name] = traced
        return []

    return visit("", module), reasons


def named_block(name: str, module: nn.Module, calls: KnownCalls | None = None) -> Block:
    """A module that the user names as a block, and its skip path.

    Args:
        name: Its name in the model.
        module: The block.
        calls: How the model's modules are called; asked only if the block's forward cannot be read.

    Returns:
        The block with its registered skip path, or else the one that is read or tried out, or else its first argument.
    """
    _, skip = registered_skip(module)
    traced = trace_skip(module) if skip is None else skip
    if isinstance(traced, str) and is_unreadable(traced) and calls is not None:
        call = calls.get(name)
        traced = traced if call is None else identity_skip(module, call)
    return Block(name, module, traced if isinstance(traced, Skip) else Skip(first_argument(module)))


def block_component(model: nn.Module, block: Block) -> Component:
    """The component of a block: the tensors that belong to it alone.

    A tensor that is also registered outside the block (tied weights), or that the skip path needs, is not part of
    it: every worker holds it. The block itself may be registered in several places.

    Args:
        model: The full model.
        block: One of its blocks.

    Returns:
        The component, named after the block, with whole parameters and buffers in registration order.
    """
    inside = tuple(f"{name}." for name, m in model.named_modules(remove_duplicate=False) if m is block.module)
    kept = tuple(f"{place}{child}." for place in inside for child in block.skip.path)
    slices = []
    for names in aliases(model):
        if all(name.startswith(inside) and not name.startswith(kept) for name in names):
            slices.append(ParamSlice(names[0]))
    return Component(block.name, "block", tuple(slices))


def aliases(model: nn.Module) -> Iterator[list[str]]:
    """Yields, for each parameter and then each buffer of a model, all names it is registered under."""
    named: tuple[Callable[..., Iterator[tuple[str, torch.Tensor]]], ...] = (model.named_parameters, model.named_buffers)
    for iterate in named:
        names: dict[int, list[str]] = {}
        for name, tensor in iterate(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
        yield from names.values()
