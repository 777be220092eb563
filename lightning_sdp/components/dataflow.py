"""The walk over an exported graph that follows the factors of all tensors, see [Note: Factors].

The handlers of the operations are in `operators` and `views`. What has no handler freezes all that it touches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.fx as fx

from lightning_sdp.components.factors import Dim, Dims, freeze, new_dims, size_of


class Dataflow:
    """The factors of all tensors in a graph, and what the walk over the graph has learnt about them.

    Attributes:
        dims: Dimensions of each tensor; a list of them for a node with several outputs.
        source: The parameter or buffer that a node is, or is a mere view or copy of.
        producers: Layers and sums that a tensor's values come from, by way of operations that work entry by entry;
            empty where the values do not depend on the input of the model.
        reads: Parameters and those of their dimensions that are summed over.
        produces: Parameters and those of their dimensions that the result of a layer inherits.
        convolved: Parameters that are weights of convolutions.
    """

    def __init__(self) -> None:
        self.dims: dict[fx.Node, Any] = {}
        self.source: dict[fx.Node, str] = {}
        self.producers: dict[fx.Node, frozenset[fx.Node]] = {}
        self.reads: list[tuple[str, Dim]] = []
        self.produces: list[tuple[str, Dim]] = []
        self.convolved: set[str] = set()

    def visit(self, node: fx.Node) -> None:
        """Works out the dimensions of what an operation returns."""
        call = Operation(self, node)
        self.producers[node] = frozenset().union(*(self.producers.get(operand, ()) for operand in call.tensors))
        value = node.meta.get("val")
        values = value if isinstance(value, (tuple, list)) else [value]
        shapes = [list(v.shape) if isinstance(v, torch.Tensor) else None for v in values]
        outputs = _outputs(call, shapes)
        if outputs is None:
            if call.op in _ASSERTIONS:
                return
            reason = f"no rule for {call.op}" if call.tensors else f"a constant of the forward ({call.op})"
            for operand in call.tensors:
                freeze(self.dims[operand], reason)
            outputs = [None if shape is None else new_dims(shape, reason) for shape in shapes]
            call.new_values()
        self.dims[node] = outputs if isinstance(value, (tuple, list)) else outputs[0]
        if call.op in _VIEWS and call.tensors and call.tensors[0] in self.source:
            self.source[node] = self.source[call.tensors[0]]


class Operation:
    """One operation.

    Attributes:
        flow: The walk that it is part of.
        node: The operation in the graph.
        op: Its name.
        args: Its arguments by name, defaults included.
        tensors: Its operands that are tensors.
    """

    def __init__(self, flow: Dataflow, node: fx.Node) -> None:
        self.flow = flow
        self.node = node
        self.op = getattr(node.target, "__name__", str(node.target))
        self.args: dict[str, Any] = {}
        schema = getattr(node.target, "_schema", None)
        if schema is not None:
            self.op = schema.name.split("::")[-1]
            self.args = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
            self.args.update(zip((a.name for a in schema.arguments), node.args, strict=False))
            self.args.update(node.kwargs)
        self.tensors = [operand for operand in node.all_input_nodes if flow.dims.get(operand) is not None]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result, of the first one if there are several."""
        value = self.node.meta["val"]
        return tuple((value[0] if isinstance(value, (tuple, list)) else value).shape)

    @property
    def first(self) -> Dims:
        """Dimensions of the first operand, in a new list."""
        return self.dims(self.tensors[0])

    def dims(self, node: fx.Node) -> Dims:
        """Dimensions of an operand, in a new list."""
        return list(self.flow.dims[node])

    def axes(self, *names: str) -> list[int]:
        """The dimensions of the first operand that an argument names; all of them if it names none."""
        value = next((self.args[name] for name in names if self.args.get(name) is not None), None)
        rank = len(self.first)
        chosen = [value] if isinstance(value, int) else list(value or range(rank))
        return [axis % rank for axis in chosen] if rank else []

    def depends_on_input(self, node: fx.Node) -> bool:
        """Whether the values of an operand depend on the input of the model."""
        return bool(self.flow.producers.get(node))

    def new_values(self) -> None:
        """Notes that the result is the output of a layer, if it depends on the input of the model."""
        if self.flow.producers[self.node]:
            self.flow.producers[self.node] = frozenset([self.node])


Handler = Callable[[Operation], "Dims | tuple[Dims | None, ...] | None"]  # None: not understood after all
_H = TypeVar("_H", bound=Handler)
_HANDLERS: dict[str, Handler] = {}

_VIEWS = {"view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "alias"}
_VIEWS |= {"clone", "detach", "contiguous", "_to_copy", "lift_fresh_copy", "slice", "select", "unbind"}
_VIEWS |= {"split", "split_with_sizes"}
_ASSERTIONS = {"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range_for_size"}


def _outputs(call: Operation, shapes: list[list[int] | None]) -> list[Dims | None] | None:
    """The dimensions of all that an operation returns, or ``None`` if it is not understood."""
    handler = _HANDLERS.get(call.op)
    if handler is None and torch.Tag.pointwise in getattr(call.node.target, "tags", ()):
        handler = _HANDLERS["pointwise"]
    if handler is None or not shapes or shapes[0] is None:
        return None
    try:
        result = handler(call)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None  # another overload than the handler knows, or a dimension of size 0
    if isinstance(result, list):  # further outputs are like the first (indices), or statistics that nothing should use
        reason = f"statistics of {call.op}"
        result = tuple(result if s == shapes[0] else None if s is None else new_dims(s, reason) for s in shapes)
    if result is None or any(o is not None and [*map(size_of, o)] != s for o, s in zip(result, shapes, strict=True)):
        return None
    return list(result)


def rule(names: str) -> Callable[[_H], _H]:
    """Registers the handler of some operations, separated by spaces."""

    def register(handler: _H) -> _H:
        _HANDLERS.update(dict.fromkeys(names.split(), handler))
        return handler

    return register
