"""SDPReference: the method in one process, elementwise and slow. The oracle that the fast path is tested against."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from lightning_sdp._compat import BatchNorm
from lightning_sdp.components import Skip
from lightning_sdp.plan import MaskPlan


def _training_loss(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model.training_step(batch, 0)
    return loss


class SDPReference:
    """Trains a full model as SDP on several processes would, by the definition of the method.

    For each rank in turn, the blocks that its worker lacks are skipped, the neurons that it lacks are zeroed, and loss
    and gradients are computed on that rank's data. The gradient of every element is the sum over the ranks that hold
    it, divided by their number; a parameter that none of its holders used has no gradient. One optimizer on the full
    model takes the step. Nothing of the fast path is used: no carving, no buckets, no processes.

    Args:
        module: The full model; it is trained in place.
        plan: Who holds what.
        optimizer: An optimizer on the module's parameters.
        loss: ``loss(module, batch)`` returns a scalar; default: ``module.training_step(batch, 0)``.
        ranks_per_worker: Processes per worker.
        accumulate_grad_batches: Micro-batches per step; each loss is divided by it, as Lightning does.
        gradient_clip_val: Clips the averaged gradient, as ``Trainer(gradient_clip_val=…)``.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        masking: ``"forward"``, or ``"backward"``: every rank runs the full model, and only gradients are masked.
        model_averaging_period: With more than 1, every rank takes steps of its own, and after that many of them the
            parameters are averaged over their holders. Between steps the module has the holders' means.
        average_optimizer_state: Whether floating-point optimizer state is averaged along.
        scheduler: Stepped after every step.

    Attributes:
        module: The full model. Between steps its buffers are those of the last rank; see `install_buffers`.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: MaskPlan,
        optimizer: Optimizer,
        *,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        ranks_per_worker: int = 1,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str = "norm",
        masking: str = "forward",
        model_averaging_period: int = 1,
        average_optimizer_state: bool = False,
        scheduler: Any = None,
    ) -> None:
        self.masking = masking
        self._period, self._average_state, self._steps = model_averaging_period, average_optimizer_state, 0
        self.module, self.plan, self.optimizer, self.scheduler = module, plan, optimizer, scheduler
        self.world_size = plan.num_subnetworks * ranks_per_worker
        self._ranks_per_worker = ranks_per_worker
        self._loss = loss or _training_loss
        self._accumulate = accumulate_grad_batches
        self._clip_val, self._clip_algorithm = gradient_clip_val, gradient_clip_algorithm
        blocks = [component.name for component in plan.components if component.kind == "block"]
        self._skips: dict[str, Skip] = {name: plan.skip(name, module.get_submodule(name)) for name in blocks}
        self._masks = self._masks_of(plan)
        self._norms = {
            n: m for n, m in module.named_modules() if isinstance(m, BatchNorm) and m.running_mean is not None
        }
        self._buffers = [{n: b.clone() for n, b in module.named_buffers()} for _ in range(self.world_size)]
        self._weights = [{n: p.detach().clone() for n, p in module.named_parameters()} for _ in range(self.world_size)]
        self._states: list[Any] = [defaultdict(dict) for _ in range(self.world_size)]

    def _masks_of(self, plan: MaskPlan) -> dict[str, list[Tensor]]:
        """For each tensor and rank the elements that it holds."""
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        ranks = range(self.world_size)
        return {name: [plan.element_mask(name, self._worker(r), t.shape) for r in ranks] for name, t in tensors}

    def replan(
        self, plan: MaskPlan, masking: str | None = None, batches: Sequence[Sequence[Any]] | None = None
    ) -> None:
        """Goes on with another plan or in another regime, between two steps.

        What a rank newly holds of buffers, and of the weights and optimizer state of local steps, is as the rank has it
        that the old plan names as its source. With ``model_averaging_period`` > 1 the period ends first.

        Args:
            plan: Who holds what from now on, with the components of the present plan.
            masking: ``"forward"`` or ``"backward"``; default: as before.
            batches: For `install_buffers`, which is called where ranks run the full model now but did not before.
        """
        masking = masking or self.masking
        if plan == self.plan and masking == self.masking:
            return
        if self._steps % self._period:
            self._end_period()
        self._steps = 0
        ran_everything = self._everywhere()
        if ran_everything:
            self._share_buffers()
        sources = [self._sources(plan, rank) for rank in range(self.world_size)]
        self._buffers = [self._moved(own, self._buffers) for own in sources]
        if self._period > 1:
            self._weights = [self._moved(own, self._weights) for own in sources]
            self._move_states(sources)
        if not ran_everything and (masking == "backward" or plan.is_complete):
            self.install_buffers(batches)
            self._buffers = [{n: b.clone() for n, b in self.module.named_buffers()} for _ in range(self.world_size)]
        self.plan, self.masking, self._masks = plan, masking, self._masks_of(plan)

    def _sources(self, plan: MaskPlan, rank: int) -> dict[str, Tensor]:
        """The rank from which each element comes that a rank has when the plan changes, by tensor name."""
        sources = {name: torch.full(masks[rank].shape, rank) for name, masks in self._masks.items()}
        worker, place = self._worker(rank), rank % self._ranks_per_worker
        for component in self.plan.components:
            if worker in plan.holders(component.name) and worker not in self.plan.holders(component.name):
                source = self.plan.sources[component.name] * self._ranks_per_worker + place
                for part in component.slices:
                    whole, length = sources[part.name], part.stop - part.start
                    (whole if part.dim is None else whole.narrow(part.dim, part.start, length)).fill_(source)
        return sources

    def _moved(self, sources: Mapping[str, Tensor], values: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Tensors by name, with each element as its source has it."""
        names = values[0]
        return {n: torch.stack([own[n] for own in values]).gather(0, sources[n][None])[0] for n in names}

    def _move_states(self, sources: Sequence[Mapping[str, Tensor]]) -> None:
        old = [{p: dict(state) for p, state in states.items()} for states in self._states]
        for rank, own in enumerate(sources):
            for name, p in self.module.named_parameters():
                others = own[name][own[name] != rank]
                told = old[int(others[0])].get(p, {}) if others.numel() else {}
                told = told | (old[rank].get(p, {}) if bool(self._masks[name][rank].any()) else {})
                for key, value in told.items():
                    if isinstance(value, Tensor) and value.shape == p.shape and value.dim():
                        zero = torch.zeros_like(value)
                        value = self._moved(own, [{name: states.get(p, {}).get(key, zero)} for states in old])[name]
                    self._states[rank][p][key] = value.clone() if isinstance(value, Tensor) else value

    def _worker(self, rank: int) -> int:
        return rank // self._ranks_per_worker

    def _everywhere(self) -> bool:
        return self.masking == "backward" or all(bool(mask.all()) for masks in self._masks.values() for mask in masks)

    def _is_local(self, buffer: str) -> bool:
        return not self._everywhere() and buffer.rpartition(".")[0] in self._norms

    @contextmanager
    def subnetwork(self, rank: int) -> Iterator[nn.Module]:
        """The module as a rank runs it: what its worker lacks is skipped, and buffers are that rank's."""
        lacking = [c.name for c in self.plan.missing_on(self._worker(rank)) if c.name in self._skips]
        lacking = [] if self.masking == "backward" else lacking
        missing = [self.module.get_submodule(name) for name in lacking]
        skips = [self._skips[name] for name in lacking]
        own = [block.__dict__.pop("forward", None) for block in missing]
        for block, skip in zip(missing, skips, strict=True):
            block.forward = partial(skip.function, block)  # type: ignore[method-assign]
        self._load_buffers(self._buffers[rank])
        cut = {} if self.masking == "backward" else self.plan.layouts
        whole = {name: p.data for name, p in self.module.named_parameters() if name in cut}
        for name, p in self.module.named_parameters():
            if name in whole:
                p.data = whole[name].masked_fill(~self._masks[name][rank].to(p.device), 0)
        try:
            yield self.module
        finally:
            for name, p in self.module.named_parameters():
                p.data = whole.get(name, p.data)
            for block, forward in zip(missing, own, strict=True):
                del block.forward
                if forward is not None:
                    block.forward = forward  # type: ignore[method-assign]
            self._buffers[rank] = {name: buffer.clone() for name, buffer in self.module.named_buffers()}

    def _load_buffers(self, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                buffer.copy_(values[name])

    def _share_buffers(self) -> None:
        """Gives buffers that holders share the values of the lowest of them."""
        for name in self._buffers[0]:
            if self._is_local(name):
                continue
            shared = self._from_lowest_holders(name)
            for own, mask in zip(self._buffers, self._masks[name], strict=True):
                own[name] = shared.clone() if self.masking == "backward" else torch.where(mask, shared, own[name])

    def _from_lowest_holders(self, name: str) -> Tensor:
        """A buffer with every element from the lowest rank that holds it."""
        value = self._buffers[0][name].clone()
        if self.masking == "backward":
            return value
        for own, mask in zip(self._buffers[::-1], self._masks[name][::-1], strict=True):
            value = torch.where(mask, own[name], value)
        return value

    def step(self, batches: Sequence[Sequence[Any]]) -> list[float]:
        """One optimizer step.

        Args:
            batches: For each rank its micro-batches.

        Returns:
            The ranks' losses, summed over micro-batches.
        """
        if len(batches) != self.world_size:
            raise ValueError(f"batches has {len(batches)} entries for {self.world_size} ranks.")
        grads, losses = self._gradients(batches)
        if self._period > 1:
            self._step_by_rank(grads)
        else:
            for name, p in self.module.named_parameters():
                p.grad = self._average(name, [g.get(name) for g in grads])
            self._clip()
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return losses

    def _gradients(self, batches: Sequence[Sequence[Any]]) -> tuple[list[dict[str, Tensor]], list[float]]:
        """Each rank's gradients by parameter name, and its loss, summed over micro-batches."""
        grads: list[dict[str, Tensor]] = [{} for _ in batches]
        losses = [0.0] * len(batches)
        for i in range(len(batches[0])):
            if i == len(batches[0]) - 1 and self._steps % self._period == 0:
                self._share_buffers()
            for rank, own in enumerate(batches):
                self.module.zero_grad(set_to_none=True)
                self._load_weights(rank)
                with self.subnetwork(rank) as module:
                    loss = self._loss(module, own[i]) / self._accumulate
                    loss.backward()  # type: ignore[no-untyped-call]
                losses[rank] += float(loss.detach())
                for name, p in self.module.named_parameters():
                    if p.grad is not None:
                        grads[rank][name] = grads[rank][name] + p.grad if name in grads[rank] else p.grad.clone()
        return grads, losses

    def _clip(self) -> None:
        if self._clip_val is not None:
            clip = torch.nn.utils.clip_grad_norm_ if self._clip_algorithm == "norm" else torch.nn.utils.clip_grad_value_
            clip(self.module.parameters(), self._clip_val)

    @torch.no_grad()
    def _load_weights(self, rank: int) -> None:
        """Gives the module a rank's own weights, which differ from others' within a period."""
        if self._period > 1:
            for name, p in self.module.named_parameters():
                p.copy_(self._weights[rank][name])

    def _step_by_rank(self, grads: Sequence[dict[str, Tensor]]) -> None:
        """One step of every rank for itself; at the end of a period the average over holders."""
        parameters = dict(self.module.named_parameters())
        for rank, own in enumerate(grads):
            self._load_weights(rank)
            for name, p in parameters.items():
                mask = self._masks[name][rank]
                p.grad = own[name] * mask if name in own and bool(mask.any()) else None
            self._clip()
            self.optimizer.state = self._states[rank]
            self.optimizer.step()
            self._weights[rank] = {name: p.detach().clone() for name, p in parameters.items()}
        self._steps += 1
        if self._steps % self._period == 0:
            self._end_period()
        else:
            self._show_means()

    @torch.no_grad()
    def _show_means(self) -> None:
        """Gives the module the holders' means."""
        for name, p in self.module.named_parameters():
            p.copy_(self._holders_mean(name, [own[name] for own in self._weights]))

    def _end_period(self) -> None:
        """Averages weights, and perhaps optimizer state, over holders."""
        self._show_means()
        parameters = dict(self.module.named_parameters())
        self._weights = [{name: p.detach().clone() for name, p in parameters.items()} for _ in self._weights]
        if self._average_state:
            self._average_states(parameters)

    def _holders_mean(self, name: str, values: Sequence[Tensor]) -> Tensor:
        masks = torch.stack([mask.to(values[0].dtype) for mask in self._masks[name]])
        return (torch.stack(list(values)) * masks).sum(0) / masks.sum(0)

    def _average_states(self, parameters: Mapping[str, Tensor]) -> None:
        for name, p in parameters.items():
            known: dict[str, Any] = {k: v for state in self._states for k, v in state.get(p, {}).items()}
            keys = [k for k, v in known.items() if isinstance(v, Tensor) and v.shape == p.shape and v.dim()]
            for key in keys:
                values = [state.get(p, {}).get(key, torch.zeros_like(p)) for state in self._states]
                mean = self._holders_mean(name, values)
                for state in self._states:
                    if key in state.get(p, {}):
                        state[p][key] = mean.clone()

    def _average(self, name: str, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Per element: the sum over its holders divided by their number; ``None`` if no holder used the parameter."""
        masks = self._masks[name]
        used = [g * m for g, m in zip(grads, masks, strict=True) if g is not None and bool(m.any())]
        if not used:
            return None
        holders = torch.stack([m.to(used[0].dtype) for m in masks]).sum(0)
        return torch.stack(used).sum(0) / holders

    def install_buffers(self, batches: Sequence[Sequence[Any]] | None = None) -> None:
        """Gives the module the full model's buffers, as SDP evaluates and saves it.

        Buffers come from the lowest holder. BatchNorm's statistics, unless every rank holds everything, are those of
        the given batches under the full model: averaged over each rank's batches, and combined over ranks by the law
        of total variance. A BatchNorm in eval mode is left alone.

        Args:
            batches: For each rank the batches to re-estimate with; ``None`` leaves the statistics of rank 0.
        """
        self._share_buffers()
        full = {name: self._from_lowest_holders(name) for name in self._buffers[0]}
        norms = {n: m for n, m in self._norms.items() if m.training}
        if batches is not None and not self._everywhere():
            momenta = {name: norm.momentum for name, norm in norms.items()}
            samples: dict[str, list[tuple[Tensor, Tensor, int]]] = {name: [] for name in norms}
            for own in batches:
                for norm in norms.values():
                    norm.reset_running_stats()
                    norm.momentum = None
                with torch.no_grad():
                    for batch in own:
                        self._loss(self.module, batch)
                for name, norm in norms.items():
                    mean, var = norm.running_mean, norm.running_var
                    assert mean is not None and var is not None
                    samples[name].append((mean.clone(), var.clone(), len(own)))
            for name, norm in norms.items():
                norm.momentum = momenta[name]
                weight = sum(n for *_, n in samples[name])
                mean = torch.stack([m * n for m, _, n in samples[name]]).sum(0) / weight
                var = torch.stack([(v + (m - mean) ** 2) * n for m, v, n in samples[name]]).sum(0) / weight
                full[f"{name}.running_mean"], full[f"{name}.running_var"] = mean, var
        self._load_buffers(full)
