"""A worker's part of a module whose parameters are sharded over their holders by torch's FSDP2.

[Note: Leaves]
A sharded tensor is a cut tensor: its rank stores some rows of it. `fully_shard` puts DTensors in the parameters' place,
each on the mesh of its holders. Optimizers, clipping and checkpoints work with plain tensors, one per parameter, that
share the memory of the DTensors' local parts: torch's fused and foreach code refuses DTensors of different meshes.
These leaves are what is trained. The parameters of the full structure keep their identity as stand-ins without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_sdp._compat import initialize_shards
from lightning_sdp.plan import MaskPlan
from lightning_sdp.sharding.units import Policy, Sharding, Unit, select
from lightning_sdp.subnetwork import Subnetwork, stand_in
from lightning_sdp.sync.groups import HolderGroups


@dataclass(frozen=True)
class ShardOptions:
    """How a model is sharded.

    Attributes:
        mixed_precision: The dtypes in which units compute and gradients travel.
        offload: Keeps shards in host memory between uses; ``None``: they stay on the device.
        reshard_after_forward: Whether a unit is freed between its forward and its backward pass.
        checkpointing: Which modules recompute their activations in the backward pass, as `select` takes it, or
            ``"blocks"``: the residual blocks; ``None``: no module.
    """

    mixed_precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: OffloadPolicy | None = None
    reshard_after_forward: bool = True
    checkpointing: Policy | str | None = None


class ShardedSubnetwork(Subnetwork):
    """One worker's part of a module, sharded.

    Beside the full structure, in which parameters are stand-ins or filled, and the carved one there is the open one,
    for evaluation: blocks that the worker lacks are back, with stand-ins, and what it holds is sharded.

    Args:
        module: The full model.
        plan: Who holds what.
        groups: Holder sets and their process groups.
        sharding: How parameters are sharded.
        options: See `ShardOptions`.

    Attributes:
        cut: All parameters, by name.
        trained: The leaves, by the names of the parameters that the worker holds.
        leaves: The same.
        sharded: The parameters that take their places in the carved module, by name.
        units: The units that the worker has.
        opened: Whether the blocks that the worker lacks are in place.
        on_gradient: Called with each leaf that gets a gradient.
    """

    def __init__(
        self, module: nn.Module, plan: MaskPlan, groups: HolderGroups, sharding: Sharding, options: ShardOptions
    ) -> None:
        super().__init__(module, plan, groups.rank // groups.ranks_per_worker)
        self._groups, self._options = groups, options
        self.units = [unit for unit in sharding.units if groups.rank in unit.ranks]
        self._blocks_of_plan = [c.name for c in plan.components] + [kept.name for kept in plan.kept]
        self._originals = dict(module.named_parameters())
        self._dtypes = {name: parameter.dtype for name, parameter in self._originals.items()}
        self.cut = dict(self._originals)
        self._shared: list[tuple[dict[str, Any], str, str]] = []  # places of what the worker holds
        names = {id(parameter): name for name, parameter in self.trained.items()}
        for submodule in module.modules():
            tree: dict[str, Any] = submodule._parameters
            self._shared += [(tree, key, names[id(p)]) for key, p in tree.items() if id(p) in names]
        self.sharded: dict[str, nn.Parameter] = {}
        self.opened = False
        self.on_gradient: Callable[[Tensor], None] = lambda leaf: None
        self._watched: set[str] = set()

    def carve(self, device: torch.device | None = None, stored: Mapping[str, Tensor] | None = None) -> None:
        """Leaves of the module what this rank stores.

        Args:
            device: The device on which units run.
            stored: What this rank is to store, by name, where the module has no data of it.
        """
        assert device is not None
        self._device, stored, rows = device, dict(stored or {}), {}
        home = device if self._options.offload is None else torch.device("cpu")
        for name, parameter in self.trained.items():
            own = stored.pop(name) if name in stored else self._groups.layouts[name].take(parameter.data, self._rank)
            rows[name] = own.to(home)
            self._forget(parameter)
        for tensor in self.missing.values():
            self._forget(tensor)
        self.module.to(device)
        self._recompute()
        super().detach()
        self._shard(rows)
        self.trained = self.leaves = {name: self._leaf(name) for name in rows}

    @property
    def _rank(self) -> int:
        return self._groups.rank

    def _recompute(self) -> None:
        """Lets some modules recompute their activations in the backward pass."""
        policy = self._options.checkpointing
        if policy is None:
            return
        names = self._blocks_of_plan if isinstance(policy, str) else select(self.module, policy)
        for name in names:
            module = self.module.get_submodule(name)
            module.forward = _Recomputed(module.forward)  # type: ignore[method-assign]

    def _shard(self, rows: Mapping[str, Tensor]) -> None:
        """Shards the units, and gives the sharded parameters their data."""
        fakes = {name: self._fake(self._originals[name]) for name in rows}
        for tree, key, name in self._shared:
            tree[key] = fakes[name]
        options = self._options
        for unit in self.units:
            fully_shard(
                self.module.get_submodule(unit.name),
                mesh=self._mesh(unit),
                reshard_after_forward=options.reshard_after_forward and bool(unit.name),
                mp_policy=options.mixed_precision,
                offload_policy=options.offload or OffloadPolicy(),
            )
        for tree, key, name in self._shared:
            if name not in self.sharded:
                self.sharded[name] = self._with_data(tree[key], rows[name], self._originals[name])
            tree[key] = self.sharded[name]
        initialize_shards(self.module)  # may give them other memory, with room for equal parts on all ranks
        for unit in self.units:
            module = self._module_of(unit)
            if hasattr(module, "set_reduce_scatter_unused_params"):  # in newer releases of torch
                module.set_reduce_scatter_unused_params(True)

    @staticmethod
    def _fake(like: Tensor) -> nn.Parameter:
        return nn.Parameter(torch.empty(like.shape, dtype=like.dtype, device="meta"), like.requires_grad)

    @staticmethod
    def _with_data(fake: DTensor, rows: Tensor, original: Tensor) -> nn.Parameter:
        sharded = DTensor.from_local(
            rows, fake.device_mesh, fake.placements, run_check=False, shape=fake.shape, stride=fake.stride()
        )
        parameter = nn.Parameter(sharded, requires_grad=original.requires_grad)
        parameter.__dict__.update(original.__dict__)
        return parameter

    def _leaf(self, name: str) -> nn.Parameter:
        sharded = self.sharded[name]
        local: Tensor = sharded.detach().to_local()  # type: ignore[attr-defined]
        return nn.Parameter(local, requires_grad=sharded.requires_grad)

    def _mesh(self, unit: Unit) -> DeviceMesh:
        """The ranks over which a unit is sharded; with several ranks per worker also those that have equal parts."""
        groups, n = self._groups, self._groups.ranks_per_worker
        kind = self._device.type  # type: ignore[union-attr]
        if n == 1:
            return DeviceMesh.from_group(groups.group(unit.ranks), kind)
        first = groups.rank - groups.rank % n
        row = groups.group(tuple(range(first, first + n)))
        if len(unit.ranks) == n:
            return DeviceMesh.from_group(row, kind)
        column = groups.group(unit.ranks[groups.rank % n :: n])
        mesh = torch.tensor(unit.ranks).view(-1, n)
        return DeviceMesh.from_group([column, row], kind, mesh, mesh_dim_names=("replicate", "shard"))

    def _module_of(self, unit: Unit) -> Any:
        return self.module.get_submodule(unit.name)

    # what is trained

    def follow(self) -> None:
        """Takes over what the user froze or thawed, and sees to it that gradients reach the leaves."""
        for name, sharded in self.sharded.items():
            self.leaves[name].requires_grad_(sharded.requires_grad)
            if sharded.requires_grad and name not in self._watched:
                self._watched.add(name)
                sharded.register_post_accumulate_grad_hook(self._passes_on(self.leaves[name]))

    def _passes_on(self, leaf: nn.Parameter) -> Callable[[Tensor], None]:
        def arrive(sharded: Tensor) -> None:
            assert sharded.grad is not None
            leaf.grad = sharded.grad.to_local()  # type: ignore[attr-defined]
            self.on_gradient(leaf)

        return arrive

    def forget_used_gradients(self) -> None:
        """Frees gradients that were set to ``None``, in the optimizers' or in the user's way."""
        for name, sharded in self.sharded.items():
            if self.leaves[name].grad is None:
                sharded.grad = None
            elif sharded.grad is None:
                self.leaves[name].grad = None

    def reshard(self) -> None:
        """Frees what was gathered."""
        for unit in self.units:
            module = self._module_of(unit)
            if isinstance(module, FSDPModule):
                module.reshard()

    # structure

    def detach(self) -> None:
        """Gives the module its carved structure, or the open one if it was open."""
        if not self.attached:
            return
        for name, original in self._originals.items():
            if name in self.sharded:
                self.sharded[name].requires_grad_(original.requires_grad)
        for tree, key, name in self._shared:
            tree[key] = self.sharded[name]
        if self.opened:
            self.attached = False
        else:
            super().detach()

    def attach(self) -> None:
        """Gives the module its full structure; parameters have whatever data they were filled with."""
        if self.attached:
            return
        self.reshard()
        self._put_originals()

    def _put_originals(self) -> None:
        for name, sharded in self.sharded.items():
            self._originals[name].requires_grad_(sharded.requires_grad)
        for tree, key, name in self._shared:
            tree[key] = self._originals[name]
        if self.opened:
            self.attached = True
        else:
            super().attach()

    def open(self) -> None:
        """Puts the blocks that the worker lacks back in place; the structure is the carved one."""
        super().attach()
        self.attached, self.opened = False, True

    def close(self) -> None:
        """Takes them away again."""
        self.reshard()
        self.release()
        self.attached, self.opened = True, False
        super().detach()

    def shape_of(self, name: str) -> torch.Size:
        """The full shape of a parameter."""
        return self._originals[name].shape

    def forget(self, names: Iterable[str]) -> None:
        """Takes the data of some parameters of the full structure away again, in whatever dtype it was."""
        for name in names:
            original = self._originals[name]
            original.data = stand_in(original.detach().to("meta").to(self._dtypes[name]), self._device)

    def local(self, name: str) -> Tensor:
        """What this rank stores of a parameter: some rows, or none."""
        if name in self.leaves:
            return self.leaves[name].detach()
        return self._groups.layouts[name].take(self._originals[name].detach(), self._rank)

    def release(self) -> None:
        """Takes the data of the full structure's parameters away again, and what is missing."""
        for tensor in [*self._originals.values(), *self.missing.values()]:
            self._forget(tensor)

    def abandon(self) -> None:
        """Restores the structure with all parameters on the meta device, after a failure; see `Subnetwork`."""
        for unit in self.units:  # else FSDP2 keeps what a forward has left gathered, and puts its own back later
            module = self._module_of(unit)
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(True)
        self.reshard()
        if not self.attached:
            self._put_originals()
        super().abandon()


class _Recomputed:
    """A module's forward whose activations are computed again in the backward pass."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
