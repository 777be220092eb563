"""What a component is: a named part of the model that a worker may lack."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParamSlice:
    """A part of one tensor of the full model.

    Attributes:
        name: Name of the parameter or buffer in the full model, e.g. ``"net.blocks.3.mlp.fc1.weight"``.
        dim: Dimension along which the slice is cut; ``None`` is the whole tensor.
        start: First index along ``dim``.
        stop: One past the last index along ``dim``.
    """

    name: str
    dim: int | None = None
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Component:
    """A maskable part of the model: what its non-holders lack.

    Attributes:
        name: Name of the component, for a block the name of its module.
        kind: ``"block"``: a residual block without its skip path.
        slices: The tensors that belong to it, in registration order.
    """

    name: str
    kind: str
    slices: tuple[ParamSlice, ...]
