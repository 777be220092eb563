"""Tries out whether a module with cut tensors computes what the full one would without the missing units.

[Note: How a module is tried]
The model's forward runs once without data (fake or meta tensors), to learn what each module is called with. Then the
module that owns a group is called twice with random weights and inputs of these shapes: with its full tensors, zero for
the missing units, and with cut tensors and whatever else has to change about it. The outputs must agree. No weight of
the user's is read or written, and modules alike are tried once. Where sizes are kept in integer attributes that no rule
names, those that are a multiple of the units are candidates, and the smallest set of them that makes the outputs agree
is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.func import functional_call

from lightning_sdp.components.base import Group
from lightning_sdp.components.calls import (
    Call,
    KnownCalls,
    TensorSpec,
    preserved,
    random_tensor,
    required_arguments,
)
from lightning_sdp.components.registry import registered_neurons
from lightning_sdp.components.rules import is_trusted
from lightning_sdp.components.slicing import Edit, PaddedSpec, padded_edits, structure_edits
from lightning_sdp.layout import TensorLayout, make_layout

_MAX_ATTRIBUTES = 6  # more candidates are not tried in all combinations
_EXACT_NUMEL = 2**22  # larger modules are tried in float32
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
_NUMBERING = {"layer_idx", "layer_id", "layer_number", "block_idx"}  # attributes that tell modules alike apart
_STATE = {*vars(nn.Module()), "_is_hf_initialized"} - {"training"}  # what every module has: tensors, children, hooks
_SYNTHETIC = {
    2: (2, 5),
    3: (2, 5),
    4: (2, 6, 6),
    5: (2, 4, 4, 4),
}  # batch and further sizes, by the weight's dimensions


class SelfCheck:
    """Decides for one group after the other whether it can be cut.

    Args:
        module: The full model.
        calls: How its modules are called. Modules of no known class of which that is not known are tried with an input
            that is made up.
    """

    def __init__(self, module: nn.Module, calls: KnownCalls) -> None:
        self._module, self._calls = module, calls
        self._results: dict[Any, tuple[str, ...] | str] = {}

    def slice(self, group: Group) -> Group | str:
        """Tries to cut a group's tensors.

        Returns:
            The group, with the attributes that shrink along; or why it cannot be cut.

        Raises:
            ValueError: The user declared the group with a rule, but it cannot be cut.
        """
        owner = self._module.get_submodule(group.owner)
        trusted = is_trusted(owner)
        key = ("slice", *self._key(group))
        if key not in self._results:
            self._results[key] = self._find_attributes(group, trusted)
        result = self._results[key]
        if not isinstance(result, str):
            return replace(group, attributes=tuple(_join(group.owner, name) for name in result))
        _, rule = registered_neurons(owner)
        if rule is not None and not rule.__module__.startswith("lightning_sdp."):
            raise ValueError(
                f"The rule for {type(owner).__name__} says that {group.name!r} can be cut, but {result}. Its tensors: "
                f"{', '.join(dict.fromkeys(member.name for member in group.members))}."
            )
        return result

    def pad(self, group: Group) -> Group | str:
        """Tries to store a group's parameters in part and to compute with zeros for the rest.

        Returns:
            The group, without attributes and buffers, which stay whole; or why that does not work.
        """
        parameters = dict(self._module.named_parameters())
        members = tuple(member for member in group.members if member.name in parameters)
        group = replace(group, members=members, attributes=())
        key = ("pad", *self._key(group))
        if key not in self._results:
            self._results[key] = self._try_padding(group)
        result = self._results[key]
        return result if isinstance(result, str) else group

    def _call(self, group: Group) -> Call | None:
        # A rule for the very class needs no proof that is worth a batch of real data.
        return self._calls.get(group.owner, needed=not is_trusted(self._module.get_submodule(group.owner)))

    def _key(self, group: Group) -> tuple[Any, ...]:
        """What modules have in common that need to be tried only once."""
        owner = self._module.get_submodule(group.owner)
        own = len(group.owner) + 1 if group.owner else 0
        shapes = tuple((n, t.shape, t.dtype) for n, t in [*owner.named_parameters(), *owner.named_buffers()])
        members = tuple(replace(member, name=member.name[own:]) for member in group.members)
        settings = tuple(
            (name, key, _identity(value))
            for name, m in owner.named_modules()
            for key, value in vars(m).items()
            if key not in _NUMBERING and key not in _STATE
        )
        call = self._call(group)
        classes = tuple(type(m) for m in owner.modules())
        return classes, shapes, settings, members, group.units, group.kind, repr(call)

    def _find_attributes(self, group: Group, trusted: bool) -> tuple[str, ...] | str:
        """Names of attributes of the owner that have to shrink, relative to it; or why it cannot be cut."""
        trial = _Trial(self._module.get_submodule(group.owner), group, self._call(group))
        partial = trial.partial()
        if partial:
            return partial
        given = trial.group.attributes
        others = () if trusted else trial.candidates()
        reason = "no attributes of it could be tried"
        options: Iterable[tuple[str, ...]] = (subset for subset in _subsets(others) if subset != given)
        for attributes in itertools.chain([given], options):
            reason = trial.slice(attributes)
            if not reason:
                return attributes
            if reason.startswith(_NO_CALL):
                break
        if trusted and reason.startswith(_NO_CALL):
            return given
        return reason

    def _try_padding(self, group: Group) -> tuple[str, ...] | str:
        trial = _Trial(self._module.get_submodule(group.owner), group, self._call(group))
        return trial.partial() or trial.pad() or ()


_NO_CALL = "it is not known what it is called with"


class _Trial:
    """One module, tried with some of a group's units missing; names are relative to the module."""

    def __init__(self, owner: nn.Module, group: Group, call: Call | None) -> None:
        own = len(group.owner) + 1 if group.owner else 0
        self.owner = owner
        self.group = replace(
            group,
            owner="",
            members=tuple(replace(member, name=member.name[own:]) for member in group.members),
            attributes=tuple(name[own:] for name in group.attributes),
        )
        self.tensors: dict[str, Tensor] = dict([*owner.named_parameters(), *owner.named_buffers()])
        numel = sum(tensor.numel() for tensor in self.tensors.values())
        self.dtype = torch.float64 if numel <= _EXACT_NUMEL else torch.float32
        self.call = call or self._made_up_call()
        self._expected: dict[tuple[int, ...], Any] = {}

    def _made_up_call(self) -> Call | None:
        """A call with one tensor, as the first layer of the group would take it."""
        first = next((m for m in self.group.members if not m.reads and self.tensors[m.name].dim() > 1), None)
        if first is None or first.dim != 0 or len(required_arguments(self.owner)) != 1:
            return None
        weight = self.tensors[first.name]
        batch, *rest = _SYNTHETIC.get(weight.dim(), ())
        shape = (batch, *rest, weight.shape[1]) if weight.dim() == 2 else (batch, weight.shape[1], *rest)
        return Call((TensorSpec(torch.Size(shape), torch.float32),), {})

    def candidates(self) -> tuple[str, ...]:
        """Integer attributes of the module and what it contains that are multiples of the units."""
        found: dict[tuple[type, str, int], list[str]] = {}
        for path, module in self.owner.named_modules():
            if type(module).__module__.startswith("torch.nn."):
                continue
            for name, value in vars(module).items():
                if type(value) is int and value >= self.group.units and value % self.group.units == 0:
                    found.setdefault((type(module), name, value), []).append(_join(path, name))
        return tuple(" ".join(names) for names in found.values())

    def partial(self) -> str:
        """Why the group cannot be cut because entries of its tensors belong to none of its units, or nothing."""
        for name, layout in self._layouts(range(self.group.units)).items():
            size = self.tensors[name].shape[layout.dim]
            if layout.size < size:
                return (
                    f"its units are only {layout.size} of the {size} entries of {name!r} along dimension {layout.dim}"
                )
        return ""

    def slice(self, attributes: tuple[str, ...]) -> str:
        """Tries cut tensors; returns why that does not work, or nothing."""
        group = replace(self.group, attributes=attributes)
        for held in self._trials():
            layouts = self._layouts(held)
            shapes = {name: layout.local_shape(self.tensors[name].shape, 0) for name, layout in layouts.items()}
            try:
                edits = structure_edits(self.owner, shapes, [(group, held)])
            except ValueError as error:
                return str(error).rstrip(".")
            reason = self._compare(held, edits, layouts)
            if reason:
                return reason
        return ""

    def pad(self) -> str:
        """Tries padded tensors; returns why that does not work, or nothing."""
        for held in self._trials():
            layouts = self._layouts(held)
            specs = {n: PaddedSpec(layout.dim, layout.size, tuple(layout.runs(0))) for n, layout in layouts.items()}
            try:
                edits = padded_edits(self.owner, specs)
            except ValueError as error:
                return str(error).rstrip(".")
            reason = self._compare(held, edits, layouts)
            if reason:
                return reason
        return ""

    def _trials(self) -> list[list[int]]:
        units = range(self.group.units)
        return [list(units[1::2])] + ([[units[-1]]] if len(units) > 3 else [])

    def _layouts(self, held: Sequence[int]) -> dict[str, TensorLayout]:
        """Where the held units (holder 0) and the others (holder 1) lie in each tensor."""
        runs: dict[tuple[str, int], list[Any]] = {}
        for member in self.group.members:
            for unit in range(self.group.units):
                holder = (0,) if unit in held else (1,)
                entries = [(run, holder) for run in member.runs(unit, unit + 1)]
                runs.setdefault((member.name, member.dim), []).extend(entries)
        return {name: make_layout(dim, entries) for (name, dim), entries in runs.items()}

    def _compare(self, held: Sequence[int], edits: Sequence[Edit], layouts: Mapping[str, TensorLayout]) -> str:
        if self.call is None:
            return f"{_NO_CALL}: give the model an example_input_array"
        key = tuple(held)
        try:
            if key not in self._expected:
                parameters = dict(self.owner.named_parameters())
                masked = {name: layout for name, layout in layouts.items() if name in parameters}
                whole = self._run(lambda _, tensor: tensor)
                self._expected[key] = self._run(lambda name, tensor: _masked(tensor, masked.get(name)))
                if all(torch.equal(a, b) for a, b in zip(whole, self._expected[key], strict=True)):
                    return f"{_NO_CALL}: on a sample input its {self.group.kind} make no difference"
        except Exception as error:  # user code
            return f"{_NO_CALL}: it fails on a sample input ({_first_line(error)})"
        expected = self._expected[key]
        for edit in edits:
            edit.cut()
        try:
            actual = self._run(lambda name, tensor: layouts[name].take(tensor, 0) if name in layouts else tensor)
        except Exception as error:  # user code
            return f"its forward cannot do with fewer {self.group.kind} ({_first_line(error)})"
        finally:
            for edit in reversed(edits):
                edit.restore()
        return self._difference(expected, actual)

    def _difference(self, expected: list[Tensor], actual: list[Tensor]) -> str:
        unlike = f"its forward computes something else with fewer {self.group.kind}"
        if not expected or not actual or expected[0].shape != actual[0].shape:
            return unlike
        # A module with a rule for its class may return more that depends on all units, such as attention weights that
        # are averaged over the heads: the rule says that this is not part of the computation.
        count = 1 if is_trusted(self.owner) else len(expected)
        for want, have in zip(expected[:count], actual, strict=False):
            if want.shape != have.shape or not want.is_floating_point():
                continue  # per head, e.g. attention weights
            tolerance = _TOLERANCE.get(want.dtype, 5e-2)
            scale = max(float(want.abs().max()), 1e-3) if want.numel() else 1.0
            if not torch.allclose(want, have, rtol=0, atol=tolerance * scale):
                return unlike
        return ""

    def _run(self, prepare: Callable[[str, Tensor], Tensor]) -> list[Tensor]:
        """Calls the module with random tensors, each prepared by its name; returns the tensors among the outputs."""
        generator = torch.Generator().manual_seed(0)
        assert self.call is not None
        args, kwargs = self.call.with_random_values(self.dtype, generator)
        tensors = {}
        for name, tensor in self.tensors.items():
            tensors[name] = prepare(name, random_tensor(name, tensor, self.dtype, generator))
        outputs: list[Tensor] = []
        with preserved(self.owner), torch.no_grad():
            self.owner.eval()
            result = functional_call(self.owner, tensors, args, kwargs)
        apply_to_collection(result, Tensor, outputs.append)
        return outputs


def _identity(value: Any) -> Any:
    """Equal for attributes that make no difference to a forward: plain values by value, anything else by identity."""
    return repr(value) if type(value).__module__ in ("builtins", "torch") else id(value)


def _masked(tensor: Tensor, layout: TensorLayout | None) -> Tensor:
    if layout is not None:
        for part in layout.parts:
            if 0 not in part.holders:
                for view in layout.views(part, tensor):
                    view.zero_()
    return tensor


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Sets of attributes, the smallest first; each name may stand for several that change together."""
    most = len(names) if len(names) <= _MAX_ATTRIBUTES else 2
    for size in range(most + 1):
        for subset in itertools.combinations(names, size):
            yield tuple(name for joined in subset for name in joined.split())


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0][:150] if text else ''}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
