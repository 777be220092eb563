"""Buffers: what DDP does at full coverage, and BatchNorm's statistics of the full model below it.

[Note: Whose statistics]
A BatchNorm's running statistics describe the activations that it saw. Under forward masking each worker runs a network
of its own, so that no worker's statistics, nor any mixture of them, describe the full model. They stay local while
training, which itself uses the statistics of the batch; the full model's are kept beside them, re-estimated when needed
(`BatchNormRecalibration`), and put in place whenever the full model is open or saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from lightning_sdp._compat import BatchNorm
from lightning_sdp.layout import Part
from lightning_sdp.sync.groups import HolderGroups, Ranks
from lightning_sdp.sync.transfer import broadcast

Statistics = dict[str, tuple[Tensor, Tensor]]  # name of a BatchNorm → running mean, running variance
Weighted = tuple[Tensor, Tensor, Tensor | float]  # running mean, running variance, weight of all or of each channel


def tracked_batchnorms(module: nn.Module) -> dict[str, nn.Module]:
    """The BatchNorm modules of a model that keep running statistics, by name."""
    return {n: m for n, m in module.named_modules() if isinstance(m, BatchNorm) and m.running_mean is not None}


def combine_statistics(statistics: Mapping[str, Weighted]) -> Statistics:
    """Combines the statistics of several samples into those of their union.

    The mean is the weighted mean of the means; the variance follows the law of total variance, the mean of the
    variances plus the variance of the means.

    Args:
        statistics: By name: the weighted sums of means, of variances plus squared means, and of weights.

    Returns:
        Mean and variance by name, for names all of whose channels have positive weight.
    """
    combined: Statistics = {}
    for name, (means, seconds, weight) in statistics.items():
        if torch.as_tensor(weight).gt(0).all():
            mean = means / weight
            combined[name] = (mean, (seconds / weight - mean * mean).clamp_(min=0))
    return combined


def combine_over_ranks(
    local: Mapping[str, Weighted],
    widths: Mapping[str, int],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Statistics:
    """Combines BatchNorm statistics over ranks; collective, and bit-equal on all of them.

    Args:
        local: By name: this rank's mean, variance and weight. Absent names have weight zero.
        widths: Number of channels of every BatchNorm that any rank may have, by name, in one order on all ranks.
        group: The process group; ``None`` for one process.
        device: Where the message travels.

    Returns:
        The combined statistics in float64, for names to which some rank gave weight.
    """
    rows = []
    for name, width in widths.items():
        row = torch.zeros(3, width, dtype=torch.float64, device=device)
        if name in local:
            mean, variance, weight = local[name]
            mean, variance = mean.to(device, torch.float64), variance.to(device, torch.float64)
            row = torch.stack([mean, variance + mean * mean, torch.ones_like(mean)])
            row *= weight.to(row) if isinstance(weight, Tensor) else weight
        rows.append(row.view(-1))
    message = torch.cat(rows)
    if group is not None:
        dist.all_reduce(message, group=group)
    parts = message.split([3 * width for width in widths.values()])
    sums: dict[str, Weighted] = {}
    for (name, width), part in zip(widths.items(), parts, strict=True):
        means, seconds, weights = part.view(3, width)
        sums[name] = (means, seconds, weights)
    return combine_statistics(sums)


class BufferSync:
    """Keeps buffers equal on their holders, and BatchNorm's statistics of the full model beside the local ones.

    Args:
        module: The full model, before it is carved, equal on all ranks.
        groups: Holder sets and their process groups.
        everywhere: Whether every rank runs the full model. Then all buffers are shared, BatchNorm's statistics as well,
            as under DDP.
        full: BatchNorm's statistics of the full model, by buffer name; default: those that the module has.

    Attributes:
        full: BatchNorm's statistics of the full model, where they are kept beside local ones, by buffer name.
        widths: Channels of each BatchNorm with local statistics, by name; none at full coverage.
    """

    def __init__(
        self, module: nn.Module, groups: HolderGroups, everywhere: bool, full: Mapping[str, Tensor] | None = None
    ) -> None:
        self._groups = groups
        self._owners = {name: (_owner(module, name), name.rpartition(".")[2]) for name, _ in module.named_buffers()}
        norms = {} if everywhere else tracked_batchnorms(module)
        self.widths = {name: int(bn.num_features) for name, bn in norms.items()}  # type: ignore[arg-type]
        self._local = {name for name in self._owners if name.rpartition(".")[0] in self.widths}
        statistics = [name for name in self._owners if self._is_statistic(name)]
        self.full = {name: self._get(name).detach().clone() if full is None else full[name] for name in statistics}
        self._saved: dict[str, Tensor] = {}
        self._spread_sets: dict[Ranks, list[tuple[str, Part | None]]] = {}
        for name in self._owners:
            layout = None if everywhere else groups.layouts.get(name)
            holders = groups.world if everywhere else groups.holders(name)
            parts = [(holders, None)] if layout is None else [(part.holders, part) for part in layout.parts]
            for ranks, part in parts:
                if name not in self._local and len(ranks) > 1:
                    self._spread_sets.setdefault(ranks, []).append((name, part))

    def _get(self, name: str) -> Tensor:
        owner, key = self._owners[name]
        buffer = owner._buffers[key]
        assert buffer is not None
        return buffer

    def _is_statistic(self, name: str) -> bool:
        return name in self._local and name.endswith(("running_mean", "running_var"))

    def before_forward(self) -> None:
        """Gives every shared buffer the value of its lowest holder, as DDP does before each forward pass."""
        for ranks, buffers in self.shared_parts():
            views = {f"{name}/{i}": view for name, own in buffers.items() for i, view in enumerate(own)}
            self._spread(views, ranks[0], self._groups.group(ranks))

    def shared_parts(self) -> Iterator[tuple[Ranks, dict[str, list[Tensor]]]]:
        """The ranks with which this rank shares buffers, and by name what of each they share."""
        for ranks, buffers in self._spread_sets.items():
            if self._groups.rank in ranks:
                yield ranks, {name: self._views(name, part) for name, part in buffers}

    def _views(self, name: str, part: Part | None) -> list[Tensor]:
        own = self._get(name)
        return [own] if part is None else self._groups.layouts[name].views(part, own, self._groups.rank)

    def _spread(self, views: Mapping[str, Tensor], source: int, group: dist.ProcessGroup) -> None:
        received = broadcast(views, source, group, self._groups.rank, self._groups.device)
        if self._groups.rank != source:
            torch._foreach_copy_(list(views.values()), [received[key] for key in views])

    def adopt(self, values: Mapping[str, Tensor]) -> None:
        """Copies values into buffers of the module, by name; other names are ignored."""
        known = [name for name in values if name in self._owners]
        if known:
            torch._foreach_copy_([self._get(name) for name in known], [values[name] for name in known])

    def save_local(self) -> None:
        """Remembers this rank's own BatchNorm buffers; the module has its carved structure."""
        held = (name for name in self._owners if name in self._local)
        owned = {name: self._owners[name][0]._buffers[self._owners[name][1]] for name in held}
        self._saved = {name: buffer.detach().clone() for name, buffer in owned.items() if buffer is not None}

    def restore_local(self) -> None:
        """Puts this rank's own BatchNorm buffers back."""
        self.adopt(self._saved)
        self._saved = {}

    def open(self) -> None:
        """Makes what all ranks share equal on all of them, and installs the full model's statistics; collective.

        The module has its full structure, and what is not held by every rank is in place. Integers, and all but
        BatchNorm's statistics, come from the lowest holder.
        """
        everyone = {
            name: self._get(name)
            for name in self._owners
            if self._groups.holders(name) == self._groups.world
            and name not in self.full
            and name not in self._groups.layouts
        }
        if everyone and self._groups.world_group is not None:
            self._spread(everyone, 0, self._groups.world_group)
        self.adopt(self.full)

    def take_loaded(self) -> None:
        """Makes what was loaded into the open full model this rank's own as well."""
        self.full = {name: self._get(name).detach().clone() for name in self.full}
        for name in self._saved:
            layout, loaded = self._groups.layouts.get(name), self._get(name).detach()
            self._saved[name] = loaded.clone() if layout is None else layout.take(loaded, self._groups.rank)

    def set_full(self, statistics: Statistics) -> None:
        """Makes statistics the full model's, and installs them; the full model is open."""
        for name, (mean, variance) in statistics.items():
            for key, value in (("running_mean", mean), ("running_var", variance)):
                old = self.full[f"{name}.{key}"]
                self.full[f"{name}.{key}"] = value.to(old.dtype)
        self.adopt(self.full)

    def reset_local(self) -> None:
        """Gives this rank's own statistics the values of the full model's, as after loading; the module is carved."""
        for name, full in self.full.items():
            owner, key = self._owners[name]
            own, layout = owner._buffers[key], self._groups.layouts.get(name)
            if own is not None:
                own.copy_(full if layout is None else layout.take(full, self._groups.rank))

    def holders_mean(self) -> Statistics:
        """The holders' own statistics combined, each holder with the same weight; collective, while open."""
        local: dict[str, Weighted] = {}
        for name in self.widths:
            mean, variance = self._saved.get(f"{name}.running_mean"), self._saved.get(f"{name}.running_var")
            if mean is not None and variance is not None:
                held = torch.ones_like(mean)
                local[name] = (
                    self._widened(f"{name}.running_mean", mean),
                    self._widened(f"{name}.running_var", variance),
                    self._widened(f"{name}.running_mean", held),
                )
        return self.combine(local)

    def _widened(self, name: str, local: Tensor) -> Tensor:
        """A buffer of this rank at its full width, zero where the rank has no part of it."""
        layout = self._groups.layouts.get(name)
        if layout is None:
            return local
        full = torch.zeros_like(self.full[name])
        layout.put(local, full, self._groups.rank)
        return full

    def combine(self, local: Mapping[str, Weighted]) -> Statistics:
        """Combines statistics over all ranks; collective. See `combine_over_ranks`."""
        return combine_over_ranks(local, self.widths, self._groups.world_group, self._groups.device)

    @contextmanager
    def full_statistics_in_place(self) -> Iterator[None]:
        """Puts the full model's statistics in the module's place for a block of code, without copying."""
        own = {name: self._get(name) for name in self.full}
        for name, value in self.full.items():
            owner, key = self._owners[name]
            owner._buffers[key] = value
        try:
            yield
        finally:
            for name, value in own.items():
                owner, key = self._owners[name]
                owner._buffers[key] = value


def _owner(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])
