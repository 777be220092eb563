"""The full model of a sharded one: for evaluation unit by unit, for checkpoints on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map

from lightning_sdp.assemble import FullModel, names_by_key
from lightning_sdp.sharding.subnetwork import ShardedSubnetwork
from lightning_sdp.sharding.units import Sharding, Unit
from lightning_sdp.sync.buffers import BufferSync
from lightning_sdp.sync.groups import HolderGroups
from lightning_sdp.sync.transfer import broadcast


class ShardedModel(FullModel):
    """Opens and closes the full model, of which no rank ever has more than it would under FSDP.

    While it is open, a unit that some ranks lack is gathered by those that have it when it is about to run; they send
    it to the others, which free it right after.

    Args:
        subnetwork: This worker's part of the module.
        groups: Holder sets and their process groups.
        buffers: The module's buffers.
        sharding: How parameters are sharded.
        policy: The dtypes in which units compute.
    """

    def __init__(
        self,
        subnetwork: ShardedSubnetwork,
        groups: HolderGroups,
        buffers: BufferSync,
        sharding: Sharding,
        policy: MixedPrecisionPolicy,
    ) -> None:
        super().__init__(subnetwork, groups, buffers)
        self._sharded, self._policy = subnetwork, policy
        self._spread = [unit for unit in sharding.units if unit.ranks != groups.world and unit.parameters]
        self._handles: list[Any] = []

    def open(self) -> None:
        """Puts all blocks in place; collective."""
        assert not self.is_open
        group, rank = self._groups.world_group, self._groups.rank
        with torch.inference_mode(False), torch.no_grad():
            self._buffers.save_local()
            self._sharded.open()
            for holders, slices in self._groups.partial:
                names = [part.name for part in slices if part.dim is None]
                if group is None or not names:
                    continue
                pieces = {name: self._module.get_buffer(name) for name in names}
                received = broadcast(pieces, holders[0], group, rank, self._groups.device)
                if rank not in holders:
                    self._sharded.fill(received)
                elif rank != holders[0]:
                    self._buffers.adopt(received)
            self._buffers.open()
        for unit in self._spread:
            module = self._module.get_submodule(unit.name)
            gather = module.register_forward_pre_hook(self._gathering(unit), with_kwargs=True)
            self._handles.append(gather)
            if rank not in unit.ranks:
                self._handles.append(module.register_forward_hook(self._freeing(unit), always_call=True))
        self.is_open = True

    def _gathering(self, unit: Unit) -> Callable[..., Any]:
        holds = self._groups.rank in unit.ranks

        def gather(module: nn.Module, args: Any, kwargs: Any) -> Any:
            group = self._groups.world_group
            assert group is not None
            local = {name.removeprefix(f"{unit.name}."): name for name in unit.parameters}
            own = {name: module.get_parameter(path).detach() for path, name in local.items()}
            dtype = self._policy.param_dtype
            if not holds and dtype is not None:
                own = {name: value.to("meta", dtype) for name, value in own.items()}
            with torch.inference_mode(False), torch.no_grad():
                received = broadcast(own, unit.ranks[0], group, self._groups.rank, self._groups.device)
            if holds:
                return None
            self._sharded.fill(received)
            return _cast((args, kwargs), dtype if self._policy.cast_forward_inputs else None)

        return gather

    def _freeing(self, unit: Unit) -> Callable[..., None]:
        def free(*_: Any) -> None:
            self._sharded.forget(unit.parameters)

        return free

    def close(self) -> None:
        """Takes away the blocks that this worker lacks; local."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        with torch.inference_mode(False), torch.no_grad():
            self._sharded.close()
            self._buffers.restore_local()
        self.is_open = False

    def state_dict(self) -> dict[str, Any]:
        """As `FullModel.state_dict`, whether the model is open or not; in host memory."""
        return self._collected()

    def _load(self, held: Mapping[str, Any]) -> None:
        names, others = names_by_key(self._module), dict(held)
        self._sharded.reshard()
        for key in held:
            name = names.get(key, key)
            if name in self._sharded.cut:
                value = others.pop(key)
                if name in self._sharded.leaves:
                    self._sharded.leaves[name].copy_(value)
        self._module.load_state_dict(others, strict=False)


def _cast(inputs: Sequence[Any], dtype: torch.dtype | None) -> Any:
    """Inputs of a unit in the dtype in which it computes, as FSDP2 casts them."""

    def cast(value: Any) -> Any:
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_real and dtype is not None else value

    return tree_map(cast, inputs)
