"""How the modules of a model are called: shapes and types without data, to try modules out on random values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_sdp._compat import isolate_rng


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its data."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """The arguments of a call, with a `TensorSpec` in place of every tensor."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def with_random_values(
        self, dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments to call the module with: random where floating, zero where integer, and true where boolean.

        Objects of an unknown kind, such as caches of keys and values, may hold tensors of another call: they are left
        out, or ``None`` where arguments are given by position.
        """

        def value(spec: TensorSpec) -> Tensor:
            if spec.dtype == torch.bool:
                return torch.ones(spec.shape, dtype=spec.dtype)
            if not spec.dtype.is_floating_point:
                return torch.zeros(spec.shape, dtype=spec.dtype)
            return torch.empty(spec.shape, dtype=dtype).uniform_(-1.7, 1.7, generator=generator)

        args = tuple(v if _is_plain(v) else None for v in self.args)
        kwargs = {name: v for name, v in self.kwargs.items() if _is_plain(v)}
        return apply_to_collection(args, TensorSpec, value), apply_to_collection(kwargs, TensorSpec, value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, (TensorSpec, bool, int, float, complex, str, torch.dtype, torch.device))


@contextmanager
def recorded_calls(module: nn.Module) -> Iterator[dict[str, Call]]:
    """Records, while a block of code runs, how each module of a model is called first.

    Yields:
        The calls by the names of the modules.
    """
    calls: dict[str, Call] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in calls:
                calls[name] = Call(_without_data(args), _without_data(kwargs))

        return hook

    handles = [m.register_forward_pre_hook(record(name), with_kwargs=True) for name, m in module.named_modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


RecordCalls = Callable[[], Mapping[str, Call]]


class KnownCalls:
    """How a model's modules are called, found out when first asked.

    Args:
        module: The model.
        example_inputs: Sample input of its forward, or ``None``.
        record: Finds out in another way, where there is no sample input.
    """

    def __init__(self, module: nn.Module, example_inputs: Any, record: RecordCalls | None = None) -> None:
        self._module, self._example_inputs, self._record = module, example_inputs, record
        self._calls: Mapping[str, Call] | None = None

    def get(self, name: str, *, needed: bool = True) -> Call | None:
        """How a module is called; ``None`` where that is not known.

        Args:
            name: Its name in the model.
            needed: Whether it is worth running real data through the model.
        """
        if self._calls is None and self._example_inputs is not None:
            self._calls = self._run_example()
        elif self._calls is None and needed:
            self._calls = {} if self._record is None else self._record()
        return None if self._calls is None else self._calls.get(name)

    def _run_example(self) -> Mapping[str, Call]:
        try:
            return run_without_data(self._module, self._example_inputs)
        except Exception as error:  # user code
            reason = error
        if not any(parameter.is_meta for parameter in self._module.parameters()):
            try:
                return run_with_data(self._module, self._example_inputs)
            except Exception as error:  # user code
                reason = error
        rank_zero_warn(f"The sample input cannot be run through {type(self._module).__name__}: {reason}")
        return {}


def run_without_data(module: nn.Module, example_inputs: Any) -> dict[str, Call]:
    """Runs a model's forward without computing anything.

    Args:
        module: The model; parameters may be on any device, also on meta.
        example_inputs: Sample input of its forward: a tensor, a tuple or list of arguments, or a dict of keyword ones.

    Returns:
        How each module was called first, by its name.

    Raises:
        Exception: Whatever the forward raises.
    """
    with recorded_calls(module) as calls, on_meta(module):
        _run(module, apply_to_collection(example_inputs, Tensor, lambda tensor: tensor.to("meta")))
    return calls


def run_with_data(module: nn.Module, example_inputs: Any) -> dict[str, Call]:
    """The same for a forward that depends on its data: runs it, and takes back what it changes about the model."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with recorded_calls(module) as calls, preserved(module):
            _run(module, apply_to_collection(example_inputs, Tensor, lambda tensor: tensor.to(device)))
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)
    return calls


@torch.no_grad()
def _run(module: nn.Module, inputs: Any) -> None:
    module.eval()
    if isinstance(inputs, dict):
        module(**inputs)
    else:
        module(*inputs if isinstance(inputs, (tuple, list)) else (inputs,))


@contextmanager
def on_meta(module: nn.Module) -> Iterator[None]:
    """Puts twins without data in the place of a model's tensors, and takes back what is done to the model meanwhile.

    Neither data nor the tensors themselves are touched; tensors that a forward makes have no data either.
    """
    twins: dict[int, Tensor] = {}

    def twin(tensor: Tensor) -> Tensor:
        if id(tensor) not in twins:
            like = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            twins[id(tensor)] = nn.Parameter(like, requires_grad=tensor.requires_grad) if is_parameter else like
        return twins[id(tensor)]

    with preserved(module):
        for m in module.modules():
            trees: tuple[dict[str, Any], ...] = (m.__dict__, m._parameters, m._buffers)
            for tree in trees:
                tree.update({name: twin(value) for name, value in tree.items() if isinstance(value, Tensor)})
            if isinstance(m.__dict__.get("_device"), torch.device):  # what a LightningModule believes to be on
                m.__dict__["_device"] = torch.device("meta")
        with torch.device("meta"):
            yield


@contextmanager
def preserved(module: nn.Module) -> Iterator[None]:
    """Takes back what a forward without data changes: attributes, registered tensors, modes and random streams."""
    trees = [
        (tree, dict(tree)) for m in module.modules() for tree in (m.__dict__, m._parameters, m._buffers, m._modules)
    ]
    try:
        with isolate_rng():
            yield
    finally:
        for tree, before in trees:
            tree.clear()
            tree.update(before)


def required_arguments(module: nn.Module) -> list[str]:
    """Names of the arguments that a module's forward cannot do without."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(module.forward).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind in kinds]


def random_tensor(name: str, like: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random values for a parameter or buffer of a model, of a scale that keeps activations in bounds.

    Args:
        name: Its name; running variances are positive, and the weights of norms are as well.
        like: The tensor; its integers are kept where it has data.
        dtype: Of floating-point values.
        generator: Where they come from.
    """
    if not like.is_floating_point():
        return torch.zeros_like(like, device="cpu") if like.is_meta else like.detach().cpu()
    values = torch.empty(like.shape, dtype=dtype).uniform_(-1, 1, generator=generator)
    if name.endswith("running_var"):
        return values.abs_().add_(0.5)
    if like.dim() > 1:
        return values.mul_((3 / max(like[0].numel(), 1)) ** 0.5)
    return values.mul_(0.5).add_(0.7) if name.endswith("weight") else values


def _without_data(collection: Any) -> Any:
    return apply_to_collection(collection, Tensor, lambda tensor: TensorSpec(tensor.shape, tensor.dtype))
