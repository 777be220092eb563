"""ShardedRun: a run whose parameters are sharded over their holders."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn as nn
from torch import Tensor

from lightning_sdp.assemble import FullModel
from lightning_sdp.plan import MaskPlan
from lightning_sdp.run import Averaging, Run
from lightning_sdp.sharding.model import ShardedModel
from lightning_sdp.sharding.prefetch import Prefetching
from lightning_sdp.sharding.subnetwork import ShardedSubnetwork, ShardOptions
from lightning_sdp.sharding.units import Sharding
from lightning_sdp.subnetwork import Subnetwork
from lightning_sdp.sync.groups import HolderGroups


class ShardedRun(Run):
    """One worker's part in the training of a sharded model; collective to construct.

    FSDP2 averages gradients over their holders, in every backward pass.

    Args:
        module: The full model.
        plan: Who holds what.
        groups: Holder sets and their process groups.
        to_device: Moves the module to the device.
        sharding: How parameters are sharded.
        options: See `ShardOptions`.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: MaskPlan,
        groups: HolderGroups,
        to_device: Callable[[], None],
        sharding: Sharding,
        options: ShardOptions,
    ) -> None:
        self._sharding, self._options = sharding, options
        super().__init__(module, plan, "forward", groups, to_device)
        shards = self._shards
        shards.on_gradient = self._pending.arrive
        self._prefetching: Prefetching | None = Prefetching(module, shards.units)

    @property
    def _shards(self) -> ShardedSubnetwork:
        assert isinstance(self.subnetwork, ShardedSubnetwork)
        return self.subnetwork

    def _make_part(self, worker: int) -> Subnetwork:
        return ShardedSubnetwork(self.module, self.plan, self.groups, self._sharding, self._options)

    def _full_model(self, subnetwork: Subnetwork) -> FullModel:
        assert isinstance(subnetwork, ShardedSubnetwork)
        return ShardedModel(subnetwork, self.groups, self.buffers, self._sharding, self._options.mixed_precision)

    def average(self, how: Averaging) -> None:
        """Notes how gradients travel; FSDP2 averages them."""
        self.how = how

    # one step

    def before_forward(self) -> None:
        """See `Run`."""
        self._in_step = True
        self._shards.follow()
        self._shards.forget_used_gradients()
        if not self._accumulates:
            with self.groups.waiting.measured():
                self.buffers.before_forward()

    def before_backward(self, loss: Tensor) -> None:
        """See `Run`."""
        self._shards.forget_used_gradients()
        if self._prefetching is not None:
            self._prefetching.stop_recording()

    def after_backward(self) -> None:
        """Lets ranks gather ahead from the second step on; collective in the first one."""
        super().after_backward()
        if self._prefetching is not None:
            prefetching, self._prefetching = self._prefetching, None
            prefetching.settle(self.groups)

    # the full model

    @property
    def is_whole(self) -> bool:
        """Never: what every rank has is sharded as well."""
        return False

    @property
    def needs_others(self) -> bool:
        """Whether rank 0 needs other ranks to save the full model."""
        return len(self.groups.world) > 1

    def after_loading(self) -> None:
        """See `Run`."""
        self._shards.reshard()
        super().after_loading()

    def lost(self) -> tuple[str, ...]:
        """Names of the tensors that other ranks would have to complete."""
        return tuple(self._shards.cut)

    def sent_bytes(self) -> float:
        """Bytes that this rank sends per step: each unit is gathered twice, and its gradients are reduced once."""
        policy = self._options.mixed_precision
        total = 0.0
        for unit in self._shards.units:
            ways = self.groups.ranks_per_worker if self.groups.ranks_per_worker > 1 else len(unit.ranks)
            copies = len(unit.ranks) // ways
            gathers = 2 if unit.name and self._options.reshard_after_forward else 1
            for name in unit.parameters:
                leaf, shape = self._shards.leaves[name], self._shards.shape_of(name)
                full = -(-shape[0] // ways) * ways * shape[1:].numel()  # all ranks send equally many rows
                size = (policy.param_dtype or leaf.dtype).itemsize
                total += gathers * full * size * (ways - 1) / ways
                if leaf.requires_grad:
                    size = (policy.reduce_dtype or policy.param_dtype or leaf.dtype).itemsize
                    total += full * size * ((ways - 1) / ways + 2 * (copies - 1) / copies / ways)
        return total
