"""Traced discovery: the groups of coupled neurons of any model whose forward can be exported.

[Note: Traced groups]
The forward is exported with fake tensors (``torch.export``), and its graph is walked from the inputs to the outputs to
find out which dimensions run over the same units, see [Note: Factors]. A *group* is a factor that is free, that some
parameter produces (the rows of a layer) and that some parameter reads (the columns of the next). Everything registered
that carries the factor is a member: biases, the statistics of a batch norm, position biases of attention heads. As the
factor was never mixed along the way, the model computes the same without a unit as with the columns that read it set
to zero. Where several free factors lie along one dimension, the outermost is the group: heads rather than their width.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import itertools
import logging
import math
import operator
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map_only

from lightning_sdp._compat import isolate_rng
from lightning_sdp.components import operators, views  # noqa: F401  (they register their handlers)
from lightning_sdp.components.base import Group, Member
from lightning_sdp.components.blocks import aliases
from lightning_sdp.components.dataflow import Dataflow
from lightning_sdp.components.factors import VOCABULARY, Dims, Factor, freeze, leaves, new_dims

_INPUT, _OUTPUT = "an input of the model", "an output of the model"


class TracingError(ValueError):
    """The forward of a model cannot be exported with its example inputs."""


@dataclass(frozen=True)
class Traced:
    """What a trace found.

    Attributes:
        groups: Groups of coupled units, in the registration order of their first members. Two of them may meet in one
            tensor, along different dimensions.
        whole: Reasons why other units have to stay together, by the names that their groups would have.
    """

    groups: tuple[Group, ...]
    whole: dict[str, str]


def trace_groups(module: nn.Module, example_inputs: Any) -> Traced:
    """Finds the groups of coupled neurons, channels and heads of a module by exporting its forward.

    The forward runs on fake tensors, in eval mode; the module, its mode and the random streams are left as they were.

    Args:
        module: The model; parameters may be on the meta device.
        example_inputs: Inputs of the forward as in Lightning's ``example_input_array``: a tensor, a tuple or list of
            arguments, or a dict of keyword arguments.

    Returns:
        The groups, and why other units have to stay together.

    Raises:
        TracingError: If the forward cannot be exported.
    """
    program = _export(module, example_inputs)
    canonical = {name: names[0] for names in aliases(module) for name in names}
    flow, tensors = _walk(program, canonical)
    return _collect(
        module, flow, {name: tensors[name] for name in dict.fromkeys(canonical.values()) if name in tensors}
    )


# The graph


class _TensorsOnly(nn.Module):
    """Calls a module and returns the tensors in what it returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(_tensors(self.module(*args, **kwargs)))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(_tensors, value.values()))
    elif isinstance(value, (tuple, list)):
        yield from itertools.chain.from_iterable(map(_tensors, value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from itertools.chain.from_iterable(map(_tensors, vars(value).values()))
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise TracingError(f"the forward returns a {type(value).__name__}, which may hide tensors")


def _export(module: nn.Module, example_inputs: Any) -> torch.export.ExportedProgram:
    """The graph of a forward, without operations in place."""
    tensor = next(itertools.chain(module.parameters(), module.buffers()), torch.empty(0))
    inputs = tree_map_only(torch.Tensor, lambda value: value.detach().to(tensor.device), example_inputs)
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    args = () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    if "use_cache" in inspect.signature(module.forward).parameters:  # language models: a cache is no output to keep
        kwargs.setdefault("use_cache", False)
    try:
        with _untouched(module), _quiet(), isolate_rng(include_cuda=False), torch.no_grad():
            for current in module.modules():
                current.training = False
            program = torch.export.export(_TensorsOnly(module), args, kwargs, strict=False)
            return program.run_decompositions({})
    except Exception as error:  # user code under fake tensors raises anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
        raise TracingError(f"{type(module).__name__} cannot be exported with the example inputs ({reason})") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences warnings, logs and prints."""
    disabled = logging.root.manager.disable
    try:
        logging.disable(logging.CRITICAL)
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """Takes back what a forward does to the attributes of modules; it cannot change the values of tensors."""
    dicts: list[Any] = [d for m in module.modules() for d in (m.__dict__, m._parameters, m._buffers, m._modules)]
    plain = [value for attributes in dicts for value in attributes.values() if type(value) in (dict, list, set)]
    before = [(value, value.copy()) for value in [*dicts, *plain]]
    try:
        yield
    finally:
        for value, content in before:
            if isinstance(value, list):
                value[:] = content
            else:
                value.clear()
                value.update(content)


def _walk(program: torch.export.ExportedProgram, canonical: dict[str, str]) -> tuple[Dataflow, dict[str, Dims]]:
    """Follows the factors through the graph; returns them with those of each parameter and buffer, by its name."""
    flow, tensors = Dataflow(), dict[str, Dims]()
    signature = program.graph_signature
    registered = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    user_inputs = set(signature.user_inputs)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor):
            name = canonical.get(registered.get(node.name, "").removeprefix("module."))
            if name is not None:
                parametrised = "it is parametrized" if ".parametrizations." in f".{name}" else None
                flow.dims[node] = tensors.setdefault(name, new_dims(value.shape, parametrised))
                flow.source[node] = name
                continue
            given = node.name in user_inputs
            flow.dims[node] = new_dims(value.shape, _INPUT if given else "a tensor that is not registered")
            flow.producers[node] = frozenset([node]) if given else frozenset()
        elif node.op == "output":
            for operand in node.all_input_nodes:
                freeze(flow.dims.get(operand) or (), _OUTPUT)
        elif node.target is operator.getitem and isinstance(node.args[0].meta.get("val"), (tuple, list)):
            parent, index = node.args
            flow.dims[node] = flow.dims[parent][index]
            flow.producers[node] = flow.producers[parent]
            if parent in flow.source:
                flow.source[node] = flow.source[parent]
        elif node.op == "call_function":
            flow.visit(node)
    return flow, tensors


# The groups


class _Collector:
    """Makes groups of the factors that parameters produce.

    Attributes:
        places: Where each factor lies: parameters and buffers in registration order, with the dimension.
        produced: Factors of several units that some parameter produces, in registration order.
        read: Those of them that some parameter reads.
    """

    def __init__(self, module: nn.Module, flow: Dataflow, tensors: dict[str, Dims]) -> None:
        self.module = module
        self.tensors = tensors
        self.convolved = flow.convolved
        self.places: dict[Factor, list[tuple[str, int]]] = defaultdict(list)
        for name, dims in tensors.items():
            for axis, dim in enumerate(dims):
                for factor in leaves(dim):
                    self.places[factor].append((name, axis))
        self.reads = {(name, factor) for name, dim in flow.reads for factor in leaves(dim)}
        self.produces = {(name, factor) for name, dim in flow.produces for factor in leaves(dim)}
        makers = {factor for _, factor in self.produces}
        self.produced = [factor for factor in self.places if factor.size > 1 and factor in makers]
        self.read = {factor for _, factor in self.reads}.intersection(self.produced)
        for factor in self.read:
            for name, count in Counter(name for name, _ in self.places[factor]).items():
                if count > 1 or {(name, factor)} <= self.reads & self.produces:
                    freeze([[factor]], f"{name} would have to be cut in two ways")

    def choose(self) -> dict[Factor, None]:
        """The free factors that become groups: of several along one dimension the outermost."""
        depth = {factor: 0 for factor in self.produced if factor in self.read and factor.frozen is None}
        for dim in itertools.chain.from_iterable(self.tensors.values()):
            for i, factor in enumerate(f for f in leaves(dim) if f in depth):
                depth[factor] = max(depth[factor], i)
        taken: set[tuple[str, int]] = set()
        chosen = set()
        for factor in sorted(depth, key=depth.__getitem__):
            if taken.isdisjoint(self.places[factor]):
                taken.update(self.places[factor])
                chosen.add(factor)
        return {factor: None for factor in self.produced if factor in chosen}

    def member(self, factor: Factor, name: str, axis: int) -> Member:
        """How a factor lies in a tensor; neighbours that are frozen anyway count as one factor."""
        layout: list[int] = []
        previous = None
        for current in leaves(self.tensors[name][axis]):
            if current is factor:
                at = len(layout)
            if previous is not None and previous.frozen and current.frozen and factor not in (previous, current):
                layout[-1] *= current.size
            else:
                layout.append(current.size)
            previous = current
        reads = (name, factor) in self.reads and (name, factor) not in self.produces
        return Member(name, axis, tuple(layout), at, reads=reads)

    def group(self, factor: Factor) -> Group:
        """The group of a factor, named after its owner."""
        members = tuple(self.member(factor, name, axis) for name, axis in self.places[factor])
        if factor.attended and any(math.prod(m.layout[m.axis + 1 :]) > 1 for m in members):
            kind = "heads"
        else:
            kind = "channels" if any(m.name in self.convolved for m in members) else "neurons"
        paths = [member.name.split(".")[:-1] for member in members]
        owner = [parts[0] for parts in itertools.takewhile(lambda p: len(set(p)) == 1, zip(*paths, strict=False))]
        while owner and isinstance(self.module.get_submodule(".".join(owner)), (nn.ModuleList, nn.ModuleDict)):
            owner.pop()
        return Group(_name(".".join(owner), kind), kind, factor.size, members, ".".join(owner))

    def name_after_producer(self, factor: Factor, kind: str) -> str:
        """A more particular name: after the first layer that produces the units."""
        first = next(name for name, _ in self.places[factor] if (name, factor) in self.produces)
        return _name(first.rpartition(".")[0], kind)


def _name(path: str, kind: str) -> str:
    label = "hidden" if kind == "neurons" else kind
    return f"{path}.{label}" if path else label


def _collect(module: nn.Module, flow: Dataflow, tensors: dict[str, Dims]) -> Traced:
    """Makes groups of the free factors, given all parameters and buffers in registration order."""
    collector = _Collector(module, flow, tensors)
    found = {factor: collector.group(factor) for factor in collector.choose()}
    counts = Counter(group.name for group in found.values())
    groups: dict[str, Group] = {}
    for factor, group in found.items():
        name = group.name if counts[group.name] == 1 else collector.name_after_producer(factor, group.kind)
        numbered = (f"{name}{i}" for i in itertools.count(2))
        while name in groups or (counts[name] and name != group.name):
            name = next(numbered)
        groups[name] = dataclasses.replace(group, name=name)

    covered = {place for factor in found for place in collector.places[factor]}
    whole: dict[str, str] = {}
    for factor in sorted(collector.produced, key=lambda factor: factor not in collector.read):
        is_class = factor.frozen in (_OUTPUT, VOCABULARY) and factor not in collector.read
        if factor.frozen and not is_class and covered.isdisjoint(collector.places[factor]):
            group = collector.group(factor)
            name = collector.name_after_producer(factor, group.kind) if group.name in groups else group.name
            whole.setdefault(name, factor.frozen)
    return Traced(tuple(groups.values()), whole)
