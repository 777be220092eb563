"""What components cost: their parameters, on real or meta tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn as nn

from lightning_sdp.components import Component, ParamSlice

BALANCES = ("count", "params")


def component_sizes(module: nn.Module, components: Sequence[Component]) -> list[int]:
    """Number of parameters of each component of a model; buffers do not count."""
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}

    def size(part: ParamSlice) -> int:
        shape = shapes.get(part.name)
        if shape is None:
            return 0
        return shape.numel() if part.dim is None else shape.numel() // shape[part.dim] * (part.stop - part.start)

    return [sum(size(part) for part in component.slices) for component in components]


def balanced_costs(sizes: Sequence[int], balance: str) -> list[float]:
    """What an assignment evens out between workers, for each component.

    Args:
        sizes: Number of parameters of each component.
        balance: ``"params"``, or ``"count"``: every component costs the same.

    Raises:
        ValueError: ``balance`` is neither.
    """
    if balance not in BALANCES:
        raise ValueError(f"balance={balance!r} is unknown: choose {' or '.join(map(repr, BALANCES))}.")
    return [1.0] * len(sizes) if balance == "count" else [float(max(size, 1)) for size in sizes]
