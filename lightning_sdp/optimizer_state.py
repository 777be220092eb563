"""Optimizer state in the full model's terms: what a plain run would save, from what each rank holds, and back."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from lightning_sdp.components import ParamSlice
from lightning_sdp.gradient_mask import GradientMask
from lightning_sdp.plan import MaskPlan
from lightning_sdp.subnetwork import Subnetwork
from lightning_sdp.sync.agreement import agree
from lightning_sdp.sync.exchange import Held
from lightning_sdp.sync.groups import HolderGroups
from lightning_sdp.sync.transfer import receive, send

Part = Subnetwork | GradientMask


class OptimizerLayout:
    """The places that the full model's parameters have in the optimizers, and this rank's part of them.

    Built while the module has its full structure, so that the optimizers' groups are those of a plain run. It then
    leaves in the optimizers what this rank trains.

    Args:
        module: The module, whole.
        optimizers: Its optimizers, as `configure_optimizers` built them.
        part: This rank's part of the module.
        plan: Who holds what.
        groups: Holder sets and their process groups.

    Attributes:
        needs_others: Whether rank 0 lacks something, which other ranks have to send for a checkpoint.
        shapes: The full model's shapes, by parameter.
        trained: What this rank trains, by parameter.
        layouts: How parameters that some rank has only a part of are spread over the ranks.

    Raises:
        ValueError: An optimizer holds a tensor that is not a parameter of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        part: Part,
        plan: MaskPlan,
        groups: HolderGroups,
    ) -> None:
        self._optimizers = list(optimizers)
        self.shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        self._known = {id(parameter): name for name, parameter in module.named_parameters()}
        self._name_of = self._known
        self._layout = self._record()
        states = [self._pop_states(optimizer) for optimizer in optimizers]  # some have state from the start
        self.follow(part, plan, groups)
        for optimizer, own in zip(optimizers, states, strict=True):
            for name in filter(part.trained.__contains__, own):
                optimizer.state[part.trained[name]] = self._own_part(name, own[name])

    def follow(self, part: Part, plan: MaskPlan, groups: HolderGroups) -> None:
        """Puts what this rank trains in its recorded place in the optimizers, without state.

        Args:
            part: This rank's part of the module.
            plan: Who holds what.
            groups: Holder sets and their process groups.
        """
        self._part, self._plan, self._groups, self.trained = part, plan, groups, dict(part.trained)
        self._remote = [(holders, slices) for holders, slices in groups.partial if 0 not in holders]
        self.needs_others = bool(self._remote)
        self._name_of = self._known | {id(tensor): name for name, tensor in part.trained.items()}
        self.layouts = {name: layout for name, layout in groups.layouts.items() if name in self.shapes}
        for optimizer, layout in zip(self._optimizers, self._layout, strict=True):
            for names, group in zip(layout, optimizer.param_groups, strict=True):
                group["params"] = [part.trained[name] for name in names if name in part.trained]

    @property
    def rank(self) -> int:
        """The calling rank."""
        return self._groups.rank

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of all ranks while something is trained."""
        return self._groups.world_group

    def names_of(self, wanted: Container[str]) -> dict[int, str]:
        """The names of this rank's tensors that are wanted, by their ``id``."""
        return {id(tensor): name for name, tensor in self.trained.items() if name in wanted}

    def require_recorded(self) -> None:
        """Refuses optimizers that have got or lost parameters or groups.

        Raises:
            ValueError: One of them has.
        """
        for layout, optimizer in zip(self._layout, self._optimizers, strict=True):
            expected = [[id(self.trained[name]) for name in names if name in self.trained] for names in layout]
            present = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
            if present == expected:
                continue
            known = {parameter for own in expected for parameter in own}
            added = next((self._name_of.get(p, "") for own in present for p in own if p not in known), None)
            what = "Groups of the optimizer were" if added is None else f"Parameter {added!r} was"
            raise ValueError(
                f"{what} {'changed' if added is None else 'added to the optimizer'} after training began; the places "
                "in the full model's optimizer state are not known. Do it on every process within `with "
                "trainer.strategy.plain_structure():`, or freeze parameters at the start instead of leaving them out."
            )

    @contextmanager
    def in_plain_form(self, module: nn.Module) -> Iterator[None]:
        """The structure of a plain run for a block of code, which may add parameter groups.

        What this rank lacks, or has in part, has no data meanwhile. State stays where it is.
        """
        with self._part.whole_structure():
            parameters = dict(module.named_parameters())
            for layout, optimizer in zip(self._layout, self._optimizers, strict=True):
                for names, group in zip(layout, optimizer.param_groups, strict=True):
                    group["params"] = [parameters[name] for name in names]
            try:
                yield
            finally:  # also where the block has failed: its error may be caught further up
                self._layout = self._record()
                self.follow(self._part, self._plan, self._groups)

    def _record(self) -> list[list[list[str]]]:
        """The names in each group of each optimizer."""
        return [[self._names(group, i) for i, group in enumerate(o.param_groups)] for o in self._optimizers]

    def _pop_states(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """Takes the state of parameters out of an optimizer, by their names."""
        states = {}
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            if parameter in optimizer.state:
                states[self._name_of[id(parameter)]] = optimizer.state.pop(parameter)
        return states

    def take_states(self) -> dict[str, Held]:
        """Takes this rank's state out of the optimizers, by parameter, in the form in which it can move."""
        taken: dict[str, Held] = {}
        for position, optimizer in enumerate(self._optimizers):
            for name, state in self._pop_states(optimizer).items():
                held = taken.setdefault(name, Held())
                for key, value in state.items():
                    if self._is_elementwise(name, value):
                        held.tensors[f"{position}/{key}"] = value
                    else:
                        device = value.device if isinstance(value, Tensor) else None
                        own = value.cpu() if isinstance(value, Tensor) else value
                        held.facts[f"{position}/{key}"] = own, device is not None and device.type != "cpu"
        return taken

    def put_states(self, states: Mapping[str, Held]) -> None:
        """Gives the optimizers the state of what this rank trains, as `take_states` returns it."""
        for name, held in states.items():
            values = dict(held.tensors)
            values |= {k: v.to(self._groups.device) if moved else v for k, (v, moved) in held.facts.items()}
            for place, value in values.items():
                position, _, key = place.partition("/")
                self._optimizers[int(position)].state[self.trained[name]][key] = value

    def _is_elementwise(self, name: str, value: Any) -> bool:
        """Whether a value of a parameter's state can move in parts, or as the parameter does: as a whole."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return False
        return name not in self.layouts or self.is_local(name, value)

    def _names(self, group: Mapping[str, Any], position: int) -> list[str]:
        names = [self._name_of.get(id(parameter)) for parameter in group["params"]]
        if None in names:
            raise ValueError(
                f"The optimizer's parameter group {position} holds a tensor that is no parameter of the model (number "
                f"{names.index(None)} of it). Build the optimizer in configure_optimizers from self.parameters()."
            )
        return [name for name in names if name is not None]

    def state_dict(self, position: int, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict that the optimizer would have in a plain run; collective, complete on rank 0.

        Args:
            position: Which of the optimizers.
            optimizer: The optimizer.

        Returns:
            State by the full model's positions, tensors from other ranks in host memory; on ranks other than 0 only
            what they hold.

        Raises:
            ValueError: On every rank: the optimizer of some rank got parameters that it did not have at the start.
        """

        def own_state() -> dict[str, Any]:
            return self.own_state_dict(position, optimizer)

        local = agree(own_state, lambda _: ()) if self.needs_others else own_state()
        numbers = {name: i for i, name in enumerate(name for names in self._layout[position] for name in names)}
        state = {numbers[name]: entry for name, entry in local["state"].items()}
        if self.needs_others:
            state = self._collect(state, numbers)
        return {**local, "state": dict(sorted(state.items()))}

    def own_state_dict(self, position: int, optimizer: Optimizer) -> dict[str, Any]:
        """What this rank has of the optimizer's state dict, by parameter; local.

        Args:
            position: Which of the optimizers.
            optimizer: The optimizer.

        Returns:
            State by the names of parameters, of cut ones this rank's part; groups with the positions of a plain run.

        Raises:
            ValueError: The optimizer got parameters that it did not have at the start.
        """
        self.require_recorded()
        local = optimizer.state_dict()
        state: dict[str, Any] = {}
        start, groups = 0, []
        for names, group, saved in zip(
            self._layout[position], optimizer.param_groups, local["param_groups"], strict=True
        ):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                if number in local["state"]:
                    state[self._name_of[id(parameter)]] = local["state"][number]
            groups.append({**saved, "params": list(range(start, start + len(names)))})
            start += len(names)
        return {**local, "state": state, "param_groups": groups}

    def _collect(self, state: dict[int, Any], numbers: Mapping[str, int]) -> dict[int, Any]:
        """Brings the state of what rank 0 lacks to rank 0, one component at a time; there the state becomes full."""
        rank, own = self._groups.rank, state
        if rank == 0:
            names = {number: name for name, number in numbers.items()}
            state = {number: self._full_size(names[number], entry) for number, entry in state.items()}
        for holders, slices in self._remote:
            wanted = [part for part in slices if part.name in numbers]
            if wanted and rank == holders[0]:
                self._send_state({i: (part, own.get(numbers[part.name])) for i, part in enumerate(wanted)})
            elif wanted and rank == 0:
                for i, entry in self._receive_state(holders[0]).items():
                    self._put_state(wanted[i], entry, state.setdefault(numbers[wanted[i].name], {}))
        return state

    def _full_size(self, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        """State of a parameter with its cut tensors at full size in host memory, this rank's entries in place."""
        if name not in self.layouts:
            return dict(entry)
        layout, shape = self.layouts[name], self.shapes[name]
        full: dict[str, Any] = {}
        for key, value in entry.items():
            full[key] = value
            if self.is_local(name, value):
                full[key] = torch.zeros(shape, dtype=value.dtype)
                layout.put(value, full[key], self._groups.rank)
        return full

    def is_local(self, name: str, value: Any) -> bool:
        """Whether a value of the optimizer's state has an element for each one that this rank has of a parameter."""
        if name not in self.layouts or not isinstance(value, Tensor):
            return False
        layout, shape = self.layouts[name], self.shapes[name]
        return value.shape == layout.local_shape(shape, self._groups.rank) and value.dim() > 0

    def _send_state(self, wanted: Mapping[int, tuple[ParamSlice, Mapping[str, Any] | None]]) -> None:
        group, device = self._groups.world_group, self._groups.device
        tensors: dict[str, Tensor] = {}
        values: dict[int, dict[str, Any]] = {}
        for i, (part, entry) in wanted.items():
            if entry is None:
                continue
            values[i] = {}
            for key, value in entry.items():
                if self.is_local(part.name, value):
                    value = self.layouts[part.name].view(value, part, self._groups.rank)
                if isinstance(value, Tensor):
                    tensors[f"{i}/{key}"] = value
                else:
                    values[i][key] = value
        shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        dist.send_object_list([shapes, values], 0, group=group, device=device)
        send(tensors, 0, group, device)

    def _receive_state(self, source: int) -> dict[int, dict[str, Any]]:
        group, device = self._groups.world_group, self._groups.device
        message: list[Any] = [None, None]
        dist.recv_object_list(message, source, group=group, device=device)
        shapes, states = message
        like = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in shapes.items()}
        for name, tensor in receive(like, source, group, device).items():
            number, _, key = name.partition("/")
            states[int(number)][key] = tensor
        return states

    def _put_state(self, part: ParamSlice, received: Mapping[str, Any], entry: dict[str, Any]) -> None:
        """Puts the received state of a parameter, or of one slice of it, into the full state."""
        for key, value in received.items():
            if part.dim is None or part.name not in self.layouts or not isinstance(value, Tensor) or value.dim() == 0:
                entry[key] = value
            else:
                shape = self.shapes[part.name]
                full = entry.setdefault(key, torch.zeros(shape, dtype=value.dtype))
                full.narrow(part.dim, part.start, part.stop - part.start).copy_(value)

    def _own_part(self, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of this rank's part of the full state of a parameter."""
        own = {key: value.clone() if isinstance(value, Tensor) else value for key, value in entry.items()}
        if name in self.layouts:
            layout, shape = self.layouts[name], self.shapes[name]
            whole = [key for key, value in entry.items() if getattr(value, "shape", None) == shape]
            own |= {key: layout.take(entry[key], self._groups.rank) for key in whole}
        return own

    def load_state_dict(self, position: int, optimizer: Optimizer, full: Mapping[str, Any]) -> None:
        """Loads this rank's part of a plain run's optimizer state.

        Args:
            position: Which of the optimizers.
            optimizer: The optimizer.
            full: The full model's state dict of that optimizer.

        Raises:
            ValueError: The state has other parameter groups than the optimizer.
        """
        places = zip(self._layout[position], full["param_groups"], strict=False)
        numbers = {name: i for names, group in places for name, i in zip(names, group["params"], strict=False)}
        own = {
            name: self._own_part(name, full["state"][number])
            for name, number in numbers.items()
            if name in self.trained and number in full["state"]
        }
        self.load_own_state_dict(position, optimizer, {**full, "state": own})

    def load_own_state_dict(self, position: int, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        """Loads what `own_state_dict` returns; local.

        Args:
            position: Which of the optimizers.
            optimizer: The optimizer.
            saved: The state dict; more state than this rank needs does no harm.

        Raises:
            ValueError: The state has other parameter groups than the optimizer.
        """
        layout = self._layout[position]
        sizes, expected = [len(g["params"]) for g in saved["param_groups"]], [len(names) for names in layout]
        if sizes != expected:
            raise ValueError(
                f"The checkpoint's optimizer state has parameter groups of {sizes} parameters; this run's "
                f"optimizer has {expected}."
            )
        state, groups, number = {}, [], 0
        for facts, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
            numbers = []
            for parameter in group["params"]:
                name = self._name_of[id(parameter)]
                if name in saved["state"]:
                    state[number] = saved["state"][name]
                numbers.append(number)
                number += 1
            groups.append({**facts, "params": numbers})
        optimizer.load_state_dict({**saved, "state": state, "param_groups": groups})
