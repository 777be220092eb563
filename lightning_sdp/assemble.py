"""The full model from its holders: parameters, state dict and optimizer state, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_sdp.components import ParamSlice
from lightning_sdp.subnetwork import Subnetwork
from lightning_sdp.sync.buffers import BufferSync
from lightning_sdp.sync.groups import HolderGroups
from lightning_sdp.sync.transfer import broadcast, receive, send

_CHUNK_BYTES = 25 * 2**20


def share_initial_state(module: nn.Module, groups: HolderGroups) -> None:
    """Gives every rank the parameters and buffers of rank 0; collective, before the module is carved.

    Tensors stay where they are, also those without data on the meta device; at most a few of them at a time pass
    through the groups' device.
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
            if tensor.is_meta:
                continue
            chunk[name] = tensor
            size += tensor.nbytes
            if size >= _CHUNK_BYTES:
                flush()
                size = 0
        if chunk:
            flush()


def names_by_key(module: nn.Module) -> dict[str, str]:
    """The name of each parameter and buffer by every key that it may have in a state dict; tied ones have several."""
    names: dict[int, str] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {key: names.setdefault(id(tensor), key) for key, tensor in tensors}


class FullModel:
    """Opens and closes the full model on every rank, and collects its state on rank 0.

    Args:
        subnetwork: This worker's part of the module.
        groups: Holder sets and their process groups.
        buffers: The module's buffers.

    Attributes:
        is_open: Whether every rank has the full model in place.
        needs_others: Whether rank 0 lacks something, which other ranks have to send for a checkpoint.
    """

    def __init__(self, subnetwork: Subnetwork, groups: HolderGroups, buffers: BufferSync) -> None:
        self._subnetwork, self._groups, self._buffers = subnetwork, groups, buffers
        self._module = subnetwork.module
        self._tensors: dict[str, Tensor] = dict([*self._module.named_parameters(), *self._module.named_buffers()])
        self._shapes = {name: self._tensors[name].shape for name in subnetwork.cut}
        self.is_open = False
        self.needs_others = any(0 not in holders for holders, _ in groups.partial)

    def open(self) -> None:
        """Puts the full model in place, with equal weights and buffers on every rank; collective.

        Needs the memory of the missing parameters, and of one component more while it lasts.
        """
        assert not self.is_open
        group, rank = self._groups.world_group, self._groups.rank
        # Validation runs in inference mode; tensors made there could not be used in training again.
        with torch.inference_mode(False), torch.no_grad():
            self._buffers.save_local()
            full = self._widened(self._groups.device)
            self._subnetwork.attach()
            self._subnetwork.replace(full)
            for holders, slices in self._groups.partial:
                assert group is not None
                pieces = self._pieces(slices, full)
                received = broadcast(pieces, holders[0], group, rank, self._groups.device)
                if rank not in holders:
                    self._accept(received, pieces, slices)
                elif rank != holders[0]:
                    self._buffers.adopt(received)
            self._buffers.open()
        self.is_open = True

    def close(self) -> None:
        """Frees what this worker lacks; local."""
        with torch.inference_mode(False), torch.no_grad():
            self._subnetwork.release()
            self._subnetwork.detach()
            self._buffers.restore_local()
        self.is_open = False

    def _widened(self, device: torch.device | None) -> dict[str, Tensor]:
        """The cut tensors at full size with this rank's entries in place, by name; on the given or their own device."""
        full = {}
        for name, shape in self._shapes.items():
            local = self._subnetwork.local(name)
            full[name] = torch.empty(shape, dtype=local.dtype, device=device or local.device)
            self._groups.layouts[name].put(local, full[name], self._groups.rank)
        return full

    def _pieces(self, slices: Sequence[ParamSlice], full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Slices of tensors as the module has them now, by name; of cut tensors views, with a number."""
        pieces: dict[str, Tensor] = {}
        for i, part in enumerate(slices):
            tensor = full.get(part.name, self._current(part.name))
            if part.dim is None:
                pieces[part.name] = tensor
            else:
                pieces[f"{part.name}/{i}"] = tensor.narrow(part.dim, part.start, part.stop - part.start)
        return pieces

    def _accept(
        self, received: Mapping[str, Tensor], pieces: Mapping[str, Tensor], slices: Sequence[ParamSlice]
    ) -> None:
        """Puts slices that this rank lacks in their place."""
        whole = {part.name for part in slices if part.dim is None}
        self._subnetwork.fill({name: value for name, value in received.items() if name in whole})
        for name, value in received.items():
            if name not in whole:
                pieces[name].copy_(value)

    def _current(self, name: str) -> Tensor:
        """The tensor that the module has under a name now; buffers may have been replaced."""
        tensor = self._tensors[name]
        return tensor if isinstance(tensor, nn.Parameter) else self._module.get_buffer(name)

    def state_dict(self) -> dict[str, Any]:
        """The full model's state dict, with a plain run's keys in a plain run's order; collective.

        On rank 0 it is complete: what rank 0 lacks comes from its holders into host memory. On other ranks it has the
        same keys and shapes, with stand-ins without data for what they lack.
        """
        if self.is_open or not self._groups.partial:
            return self._module.state_dict()
        return self._collected()

    def _collected(self) -> dict[str, Any]:
        group, rank = self._groups.world_group, self._groups.rank
        # What rank 0 has in part is completed in host memory; a sender makes views of what it has.
        full = self._widened(torch.device("cpu")) if rank == 0 else {}
        with torch.no_grad(), self._subnetwork.whole_structure(), self._buffers.full_statistics_in_place():
            self._subnetwork.fill(full)
            for holders, slices in self._groups.partial:
                if 0 in holders:
                    continue
                if rank == 0:
                    pieces = self._pieces(slices, full)
                    self._accept(receive(pieces, holders[0], group, self._groups.device), pieces, slices)
                elif rank == holders[0]:
                    send(self._own_pieces(slices), 0, group, self._groups.device)
            state = self._module.state_dict()
            self._subnetwork.release()
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> None:
        """Loads what this rank has of a full model's state dict, while the full model is not open; local.

        Args:
            state: The state dict of the full model; only what is held is read.
            strict: Whether the full model has to have its keys and no others.

        Raises:
            RuntimeError: It has others, or shapes differ.
        """
        with self._subnetwork.whole_structure():
            keys, names = list(self._module.state_dict()), names_by_key(self._module)
        wrong = [key for key in keys if key not in state] + [key for key in state if key not in keys]
        if strict and wrong:
            what = "lacks" if wrong[0] in keys else "has"
            raise RuntimeError(
                f"The state dict {what} {wrong[0]!r}, and differs from the model in {len(wrong)} keys. Set "
                "strict_loading=False on the LightningModule to load what fits."
            )
        held = {key: state[key] for key in self._module.state_dict() if key in state}
        for key, value in held.items():
            name = names.get(key, key)
            if name in self._shapes and value.shape == self._shapes[name]:
                held[key] = self._groups.layouts[name].take(value, self._groups.rank)
        self._load(held)
        full = self._buffers.full
        self._buffers.full = {
            n: state[n].to(v.device, v.dtype, copy=True) if n in state else v for n, v in full.items()
        }

    def _load(self, held: Mapping[str, Any]) -> None:
        """Loads what this rank has of a state dict, by key."""
        self._module.load_state_dict(held, strict=False)

    def _own_pieces(self, slices: Sequence[ParamSlice]) -> dict[str, Tensor]:
        """As `_pieces`, of slices that this rank holds, while it stores its part of cut tensors only."""
        pieces: dict[str, Tensor] = {}
        for i, part in enumerate(slices):
            if part.dim is None:
                pieces[part.name] = self._current(part.name)
                continue
            cut = part.name in self._subnetwork.cut
            local = self._subnetwork.local(part.name) if cut else self._current(part.name)
            pieces[f"{part.name}/{i}"] = self._groups.layouts[part.name].view(local, part, self._groups.rank)
        return pieces
