"""The full model from its holders: parameters, state dict and optimizer state, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from lightning_sdp.plan import MaskPlan
from lightning_sdp.subnetwork import Subnetwork
from lightning_sdp.sync.agreement import agree
from lightning_sdp.sync.buffers import BufferSync
from lightning_sdp.sync.groups import HolderGroups
from lightning_sdp.sync.transfer import broadcast, receive, send

_CHUNK_BYTES = 25 * 2**20


def share_initial_state(module: nn.Module, groups: HolderGroups) -> None:
    """Gives every rank the parameters and buffers of rank 0; collective, before the module is carved.

    Tensors stay where they are; at most a few of them at a time pass through the groups' device.
    """
    if groups.world_group is None:
        return
    chunk: dict[str, Tensor] = {}

    def flush() -> None:
        received = broadcast(chunk, 0, groups.world_group, groups.rank, groups.device)  # type: ignore[arg-type]
        for name, value in received.items():
            chunk[name].detach().copy_(value)
        chunk.clear()

    size = 0
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            chunk[name] = tensor
            size += tensor.nbytes
            if size >= _CHUNK_BYTES:
                flush()
                size = 0
        if chunk:
            flush()


class FullModel:
    """Opens and closes the full model on every rank, and collects its state on rank 0.

    Args:
        subnetwork: This worker's part of the module.
        plan: Who holds what.
        groups: Holder sets and their process groups.
        buffers: The module's buffers.

    Attributes:
        is_open: Whether every rank has the full model in place.
        needs_others: Whether rank 0 lacks something, which other ranks have to send for a checkpoint.
    """

    def __init__(self, subnetwork: Subnetwork, plan: MaskPlan, groups: HolderGroups, buffers: BufferSync) -> None:
        self._subnetwork, self._groups, self._buffers = subnetwork, groups, buffers
        self._module = subnetwork.module
        tensors: dict[str, Tensor] = dict([*self._module.named_parameters(), *self._module.named_buffers()])
        self._partial: list[tuple[tuple[int, ...], dict[str, Tensor]]] = [
            (groups.component_holders[c.name], {part.name: tensors[part.name] for part in c.slices})
            for c in plan.components
            if groups.component_holders[c.name] != groups.world
        ]
        self.is_open = False
        self.needs_others = any(0 not in holders for holders, _ in self._partial)

    def open(self) -> None:
        """Puts the full model in place, with equal weights and buffers on every rank; collective.

        Needs the memory of the missing parameters, and of one component more while it lasts.
        """
        assert not self.is_open
        group, rank = self._groups.world_group, self._groups.rank
        # Validation runs in inference mode; tensors made there could not be used in training again.
        with torch.inference_mode(False), torch.no_grad():
            self._buffers.save_local()
            self._subnetwork.attach()
            for holders, tensors in self._partial:
                assert group is not None
                received = broadcast(self._current(tensors), holders[0], group, rank, self._groups.device)
                if rank not in holders:
                    self._subnetwork.fill(received)
                elif rank != holders[0]:
                    self._buffers.adopt(received)
            self._buffers.open()
        self.is_open = True

    def close(self) -> None:
        """Frees what this worker lacks; local."""
        with torch.inference_mode(False), torch.no_grad():
            self._buffers.restore_local()
            self._subnetwork.release()
            self._subnetwork.detach()
        self.is_open = False

    def _current(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that the module has under these names now; buffers may have been replaced."""
        current = dict(tensors)
        for name, buffer in tensors.items():
            if not isinstance(buffer, nn.Parameter):
                current[name] = self._module.get_buffer(name)
        return current

    def state_dict(self) -> dict[str, Any]:
        """The full model's state dict, with a plain run's keys in a plain run's order; collective.

        On rank 0 it is complete: what rank 0 lacks comes from its holders into host memory. On other ranks it has the
        same keys and shapes, with stand-ins without data for what they lack.
        """
        if self.is_open or not self._partial:
            return self._module.state_dict()
        group, rank = self._groups.world_group, self._groups.rank
        assert group is not None
        with torch.no_grad(), self._subnetwork.whole_structure(), self._buffers.full_statistics_in_place():
            for holders, tensors in self._partial:
                if 0 in holders:
                    continue
                if rank == 0:
                    self._subnetwork.fill(receive(self._current(tensors), holders[0], group, self._groups.device))
                elif rank == holders[0]:
                    send(self._current(tensors), 0, group, self._groups.device)
            state = self._module.state_dict()
            self._subnetwork.release()
        return state


class OptimizerLayout:
    """The places that the full model's parameters have in the optimizers, and this rank's part of them.

    Built while the module has its full structure, so that the optimizers' groups are those of a plain run. It then
    takes the missing parameters out of the optimizers.

    Args:
        module: The module, whole.
        optimizers: Its optimizers, as `configure_optimizers` built them.
        missing: The parameters that this rank lacks, by name.
        plan: Who holds what.
        groups: Holder sets and their process groups.

    Attributes:
        needs_others: Whether rank 0 lacks something, which other ranks have to send for a checkpoint.

    Raises:
        ValueError: An optimizer holds a tensor that is not a parameter of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        missing: Mapping[str, Tensor],
        plan: MaskPlan,
        groups: HolderGroups,
    ) -> None:
        self._groups = groups
        self._remote = [  # what rank 0 lacks, a component at a time
            (groups.component_holders[component.name], [part.name for part in component.slices])
            for component in plan.components
            if 0 not in groups.component_holders[component.name]
        ]
        self.needs_others = bool(self._remote)
        self._name_of = {id(parameter): name for name, parameter in module.named_parameters()}
        lacking = {id(tensor) for tensor in missing.values()}
        self._layout: list[list[list[str]]] = []
        for optimizer in optimizers:
            self._layout.append([self._names(group, i) for i, group in enumerate(optimizer.param_groups)])
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in lacking:
                        optimizer.state.pop(parameter, None)
                group["params"] = [p for p in group["params"] if id(p) not in lacking]

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
        local = optimizer.state_dict()
        layout = self._layout[position]
        numbers = {name: i for i, name in enumerate(name for names in layout for name in names)}

        def own_state() -> dict[int, Any]:
            return self._own_state(optimizer, local, numbers)

        state = own_state() if not self.needs_others else agree(own_state, lambda _: ())
        state |= self._collect(state, numbers)
        start, groups = 0, []
        for names, saved in zip(layout, local["param_groups"], strict=True):
            groups.append({**saved, "params": list(range(start, start + len(names)))})
            start += len(names)
        return {**local, "state": dict(sorted(state.items())), "param_groups": groups}

    def _own_state(self, optimizer: Optimizer, local: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[int, Any]:
        """This rank's state by the full model's positions."""
        state: dict[int, Any] = {}
        for group, saved in zip(optimizer.param_groups, local["param_groups"], strict=True):
            for parameter, local_number in zip(group["params"], saved["params"], strict=True):
                name = self._name_of.get(id(parameter), "")
                if name not in numbers:
                    raise ValueError(
                        f"Parameter {name!r} was added to the optimizer after training began; its place in the full "
                        "model's optimizer state is not known, so that no checkpoint can be written."
                    )
                if local_number in local["state"]:
                    state[numbers[name]] = local["state"][local_number]
        return state

    def _collect(self, state: Mapping[int, Any], numbers: Mapping[str, int]) -> dict[int, Any]:
        """Brings the state of what rank 0 lacks to rank 0, one component at a time."""
        collected: dict[int, Any] = {}
        for holders, names in self._remote:
            wanted = [numbers[name] for name in names if name in numbers]
            if wanted and self._groups.rank == holders[0]:
                self._send_state({number: state[number] for number in wanted if number in state})
            elif wanted and self._groups.rank == 0:
                collected |= self._receive_state(holders[0])
        return collected

    def _send_state(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        group, device = self._groups.world_group, self._groups.device
        tensors = {f"{n}/{k}": v for n, entry in states.items() for k, v in entry.items() if isinstance(v, Tensor)}
        shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        values = {n: {k: v for k, v in e.items() if not isinstance(v, Tensor)} for n, e in states.items()}
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

    def load_state_dict(self, position: int, optimizer: Optimizer, full: Mapping[str, Any]) -> None:
        """Loads this rank's part of a plain run's optimizer state.

        Args:
            position: Which of the optimizers.
            optimizer: The optimizer.
            full: The full model's state dict of that optimizer.

        Raises:
            ValueError: The state has other parameter groups than the optimizer.
        """
        layout = self._layout[position]
        sizes, expected = [len(g["params"]) for g in full["param_groups"]], [len(names) for names in layout]
        if sizes != expected:
            raise ValueError(
                f"The checkpoint's optimizer state has parameter groups of {sizes} parameters; this run's "
                f"optimizer has {expected}."
            )
        state, groups, local_number = {}, [], 0
        for names, saved, group in zip(layout, full["param_groups"], optimizer.param_groups, strict=True):
            number_of = dict(zip(names, saved["params"], strict=True))
            numbers = []
            for parameter in group["params"]:
                number = number_of[self._name_of[id(parameter)]]
                if number in full["state"]:
                    state[local_number] = full["state"][number]
                numbers.append(local_number)
                local_number += 1
            groups.append({**saved, "params": numbers})
        optimizer.load_state_dict({**full, "state": state, "param_groups": groups})
