"""The skip path of a residual block: read off the forward of its module, with the children as black boxes.

[Note: What a skip path is]
The forward of one module is traced symbolically (torch.fx) with every child as a leaf, so that a few nodes remain.
Seen backwards from the output, the skip path runs over additions and parameter-free functions of one input to an
argument of the forward: ``x + f(x)``, ``relu(x + f(x))``, ``x + f(x) + g(x)``. Where an addition has no such operand,
one of its operands may be a projection: modules in a row, applied to the argument, and fewer of them than in the other
operand (a ResNet's ``downsample``). What is added has to depend on the argument's values: positions or a bias are no
branch. A module with parameters *after* the addition (a post-norm) or any other function ends the search: such a module
stays whole. Innermost modules win, so that a whole network that adds its input to its output does not count as one
block.

[Note: Blocks that cannot be read]
Where a forward cannot be traced but it is known how the module is called (components/calls.py), modules of one class in
a list or sequence are tried out: with all parameters zero every branch that ends in a layer is silent, so that a block
with an identity skip returns its input, exactly, and a post-norm or a plain layer does not.
"""

from __future__ import annotations

import inspect
import operator
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch.func import functional_call

from lightning_sdp._compat import isolate_rng
from lightning_sdp.components.calls import Call, preserved, random_tensor
from lightning_sdp.components.registry import Skip

_ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
_UNARY = {"relu", "relu_", "gelu", "silu", "leaky_relu", "tanh", "sigmoid", "hardtanh", "hardswish", "elu", "relu6"}
_UNARY |= {"dropout", "contiguous", "clone", "to", "float", "type_as", "mish", "softplus"}
_UNREADABLE = "its forward cannot be traced"
_SHAPE_METHODS = {"size", "dim", "numel", "stride", "new_zeros", "new_ones"}


class _LeafTracer(fx.Tracer):
    """Traces one module: children are leaves, and variadic arguments are empty."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        variadic = node.op == "placeholder" and str(node.target).startswith("*")
        return _Nothing(node, self) if variadic else super().proxy(node)


class _Nothing(fx.Proxy):
    """``*args`` or ``**kwargs`` of a call without such arguments."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return False

    def __contains__(self, key: object) -> bool:
        return False

    def keys(self) -> Any:
        return ()

    def get(self, key: str, default: Any = None) -> Any:
        return default

    pop = get


@dataclass(frozen=True)
class _SkipPath:
    """Runs the nodes of a traced skip path: an argument of the forward through parameter-free functions and modules."""

    signature: inspect.Signature
    argument: str
    nodes: tuple[fx.Node, ...]
    extra_outputs: tuple[str | None, ...] | None  # further elements of a returned tuple: arguments passed on, or None

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        value = bound.arguments[self.argument]
        if self.nodes and _is_parameter_free(block, self.nodes[0]):
            # Behind the addition a function may work in place (a ResNet's ReLU does); the block's input must not
            # change.
            value = value.clone()
        for node in self.nodes:
            if node.op == "call_module":
                function: Callable[..., Any] = block.get_submodule(str(node.target))
            elif node.op == "call_method":
                function = getattr(type(value), str(node.target))
            else:
                function = node.target  # type: ignore[assignment]
            mode = {"training": block.training} if "training" in node.kwargs else {}
            value = function(value, *node.args[1:], **{**node.kwargs, **mode})
        if self.extra_outputs is None:
            return value
        return (value, *(name and bound.arguments[name] for name in self.extra_outputs))


def _input_nodes(node: fx.Node) -> list[fx.Node]:
    return list(node.all_input_nodes)


def _is_addition(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and node.target in _ADDITIONS and len(_input_nodes(node)) == 2


def _is_single_input(node: fx.Node) -> bool:
    """Whether a node's first argument is the only one that is not constant."""
    others: list[fx.Node] = []
    fx.node.map_arg((node.args[1:], node.kwargs), others.append)
    return len(_input_nodes(node)) == 1 and not others


def _reads_values(node: fx.Node, argument: fx.Node) -> bool:
    """Whether a node depends on the values of an argument, and not merely on its shape."""
    seen: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current is argument:
            return True
        of_shape = current.target is getattr or (current.op == "call_method" and current.target in _SHAPE_METHODS)
        if current not in seen and not of_shape:
            seen[current] = None
            stack.extend(_input_nodes(current))
    return False


def _is_parameter_free(block: nn.Module, node: fx.Node) -> bool:
    """Whether a node is a function of one tensor without parameters."""
    if not _is_single_input(node):
        return False
    if node.op == "call_module":
        child = block.get_submodule(str(node.target))
        return next(child.parameters(), None) is None and next(child.buffers(), None) is None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in _UNARY


def _identity_path(block: nn.Module, node: fx.Node) -> list[fx.Node] | None:
    if node.op == "placeholder":
        return [node]
    if _is_addition(node):
        paths = (_identity_path(block, operand) for operand in _input_nodes(node))
        return next(([*path, node] for path in paths if path is not None), None)
    if _is_parameter_free(block, node):
        path = _identity_path(block, _input_nodes(node)[0])
        return None if path is None else [*path, node]
    return None


def _projection_path(block: nn.Module, node: fx.Node) -> list[fx.Node] | None:
    if node.op == "placeholder":
        return [node]
    if (node.op == "call_module" and _is_single_input(node)) or _is_parameter_free(block, node):
        path = _projection_path(block, _input_nodes(node)[0])
        return None if path is None else [*path, node]
    return None


def _count_modules(node: fx.Node) -> int:
    seen: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in seen:
            seen[current] = None
            stack.extend(_input_nodes(current))
    return sum(n.op == "call_module" for n in seen)


def _find_path(block: nn.Module, output: fx.Node) -> list[fx.Node] | None:
    """Nodes of the skip path from an argument to the output, with the additions; see the note above."""
    tail: list[fx.Node] = []
    node = output
    while not _is_addition(node):
        if not _is_parameter_free(block, node):
            return None
        tail.insert(0, node)
        node = _input_nodes(node)[0]
    path = _identity_path(block, node)
    if path is None:
        for operand, other in (_input_nodes(node), _input_nodes(node)[::-1]):
            candidate = _projection_path(block, operand)
            if candidate is not None and _count_modules(operand) < _count_modules(other):
                path = [*candidate, node]
                break
    if path is None:
        return None
    branches = [operand for addition in path if _is_addition(addition) for operand in _input_nodes(addition)]
    if not any(_reads_values(branch, path[0]) for branch in branches if branch not in path):
        return None
    return path + tail


@contextmanager
def _untouched(block: nn.Module) -> Iterator[None]:
    """Takes back what a traced forward does to its module and to the global random streams."""
    state = dict(block.__dict__)
    trees = [(tree, dict(tree)) for tree in (block._parameters, block._buffers, block._modules)]
    values = [(buffer, buffer.clone()) for buffer in block.buffers(recurse=False)]
    try:
        with isolate_rng(include_cuda=False):
            torch.default_generator.manual_seed(0)  # what is drawn must not differ between ranks
            random.seed(0)
            yield
    finally:
        for current, before in [(block.__dict__, state), *trees]:
            current.clear()
            current.update(before)
        for buffer, value in values:
            with torch.no_grad():
                buffer.copy_(value)


def _trace_output(block: nn.Module, concrete_args: dict[str, Any]) -> Any:
    """What the traced forward of a block returns; raises what user code under a tracer raises, which is anything."""
    with _untouched(block):
        graph = _LeafTracer().trace(block, concrete_args=concrete_args)
    return next(node for node in graph.nodes if node.op == "output").args[0]


def _arguments_passed_on(output: Any) -> tuple[str | None, ...] | None:
    """For each further element of a returned tuple the argument that it is, or ``None``; ``None`` without a tuple."""
    if not isinstance(output, (tuple, list)) or not output:
        return None
    return tuple(str(o.target) if isinstance(o, fx.Node) and o.op == "placeholder" else None for o in output[1:])


def trace_skip(block: nn.Module) -> Skip | str:
    """Finds the skip path of a residual block by tracing its forward.

    Optional arguments of the forward are traced at their defaults. A block that returns a tuple has its skip path in
    the first element; where it is missing, the others are ``None`` unless they are arguments passed through.

    Args:
        block: The module; parameters may be on the meta device.

    Returns:
        The skip, or the reason why the module is not understood as a residual block.
    """
    signature = inspect.signature(type(block).forward.__get__(block))
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    defaults = {n: p.default for n, p in signature.parameters.items() if p.default is not p.empty and p.kind in kinds}
    defaults = {n: value for n, value in defaults.items() if not isinstance(value, (tuple, list, dict))}
    try:
        output = _trace_output(block, defaults)
    except Exception as error:
        return f"{_UNREADABLE} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    extra = _arguments_passed_on(output)
    if extra is not None:
        output = output[0]
        if None in extra and defaults:  # an optional argument passed on looks like a constant: try without defaults
            with suppress(Exception):
                again = _arguments_passed_on(_trace_output(block, {})) or ()
                extra = tuple(first or second for first, second in zip(extra, again, strict=True))
    path = _find_path(block, output) if isinstance(output, fx.Node) else None
    if path is None:
        return "no path of additions leads from an input to its output"
    argument = str(path[0].target).lstrip("*")
    nodes = tuple(node for node in path[1:] if not _is_addition(node))
    children = dict.fromkeys(str(n.target).split(".")[0] for n in nodes if n.op == "call_module")
    return Skip(_SkipPath(signature, argument, nodes, extra), tuple(children))


def is_unreadable(reason: str) -> bool:
    """Whether `trace_skip` found nothing because it could not read the forward at all."""
    return reason.startswith(_UNREADABLE)


def identity_skip(block: nn.Module, call: Call) -> Skip | str:
    """Finds the skip path of a residual block by calling it with parameters that are zero; see the note above.

    Args:
        block: The module; parameters may be on the meta device, and are neither read nor written.
        call: How it is called.

    Returns:
        The skip, or the reason why the module does not return an argument of its own.
    """
    signature = inspect.signature(block.forward)
    generator = torch.Generator().manual_seed(0)
    tensors = dict([*block.named_parameters(), *block.named_buffers()])
    values = {name: random_tensor(name, t, torch.float64, generator) for name, t in tensors.items()}
    silent = {n: torch.zeros_like(v) if isinstance(tensors[n], nn.Parameter) else v for n, v in values.items()}
    args, kwargs = call.with_random_values(torch.float64, generator)
    try:
        with preserved(block), torch.no_grad():
            block.eval()
            output, loud = (functional_call(block, chosen, args, kwargs) for chosen in (silent, values))
        bound = signature.bind(*args, **kwargs)
    except Exception as error:  # user code
        return f"it cannot be tried out ({type(error).__name__}: {error})"
    bound.apply_defaults()
    several = isinstance(output, (tuple, list))
    first, other = (output[0], loud[0]) if several and output else (output, loud)
    tensor = isinstance(first, torch.Tensor) and first.is_floating_point()
    passed = [
        name for name, v in bound.arguments.items() if tensor and isinstance(v, torch.Tensor) and torch.equal(v, first)
    ]
    if not passed or torch.equal(first, other):
        return "with its parameters at zero it does not return its input, as a residual block would"
    extra = None
    if several:
        extra = tuple(next((n for n, v in bound.arguments.items() if v is o), None) for o in output[1:])
    return Skip(_SkipPath(signature, passed[0], (), extra))
