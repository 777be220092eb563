"""Run: the parts that work together while one model is trained, from setup to teardown. Knows no Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from lightning_sdp.assemble import FullModel, share_initial_state
from lightning_sdp.gradient_mask import GradientMask
from lightning_sdp.materialize import is_on_meta, materialize
from lightning_sdp.pending import PendingGradients
from lightning_sdp.plan import MaskPlan
from lightning_sdp.subnetwork import Subnetwork
from lightning_sdp.sync.averaging import PeriodicAveraging
from lightning_sdp.sync.batchnorm import synchronize_over_holders
from lightning_sdp.sync.buffers import BufferSync
from lightning_sdp.sync.consistency import ConsistencyCheck, Pieces, pieces_of
from lightning_sdp.sync.groups import HolderGroups
from lightning_sdp.sync.reducer import GradientReducer
from lightning_sdp.sync.refresh import Refresh
from lightning_sdp.theory import communication_bytes


@dataclass(frozen=True)
class Averaging:
    """How holders average; see `SDPStrategy`.

    Attributes:
        period: Steps between averages of parameters; with 1, gradients are averaged in every step.
        average_state: Whether optimizer state is averaged along with parameters.
        bucket_cap_mb: Size of a message, in MiB.
        reduce_dtype: In which dtype gradients travel; ``None``: their own.
    """

    period: int
    average_state: bool
    bucket_cap_mb: float
    reduce_dtype: torch.dtype | None


class Run:
    """One worker's part in the training of a model; collective to construct.

    Args:
        module: The full model; it becomes this worker's part of it, on the device.
        plan: Who holds what.
        masking: ``"forward"`` or ``"backward"``.
        groups: Holder sets and their process groups.
        to_device: Moves the module to the device.

    Attributes:
        plan: Who holds what.
        groups: Holder sets and their process groups.
        runs_everything: Whether every rank runs everything.
        part: This worker's part: of the model under forward masking, of its gradients under backward masking.
        subnetwork: The part, under forward masking.
        mask: The part, under backward masking.
        buffers: The module's buffers.
        starts_on_meta: Whether the module was on the meta device, and no process may ever need all of it.
        reducer: Averages gradients in every step; ``None`` with periodic averaging, or without training.
        averaging: Averages parameters every few steps.
        how: How holders average; ``None`` without training.
        check: Sees to it that holders agree; ``None`` unless the user wants it.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: MaskPlan,
        masking: str,
        groups: HolderGroups,
        to_device: Callable[[], None],
    ) -> None:
        share_initial_state(module, groups)
        self.module, self.starts_on_meta = module, is_on_meta(module)
        stored = self._materialize(plan, masking, groups) if self.starts_on_meta else {}
        self.reducer: GradientReducer | None = None
        self.averaging: PeriodicAveraging | None = None
        self.check: ConsistencyCheck | None = None
        self._order = [name for name, _ in module.named_parameters()]
        self.how: Averaging | None = None
        self._accumulates = False
        self._in_step = False  # between forward and backward pass
        self._pending = PendingGradients()
        self._handles: list[Any] = []
        self.take_part(plan, masking, groups, to_device, stored)

    def _materialize(self, plan: MaskPlan, masking: str, groups: HolderGroups) -> dict[str, Tensor]:
        """Makes real what this worker holds of a module on the meta device; collective."""
        seed: list[Any] = [torch.initial_seed()]
        if groups.world_group is not None:
            dist.broadcast_object_list(seed, 0, group=groups.world_group, device=groups.device)
        everywhere, rank = masking == "backward", groups.rank
        cut = {n: layout for n, layout in groups.layouts.items() if not everywhere and not layout.is_complete(rank)}

        def holds(name: str) -> bool:
            return everywhere or rank in groups.holders(name)

        return materialize(self.module, groups.device, seed[0], holds, cut, rank)

    def take_part(
        self,
        plan: MaskPlan,
        masking: str,
        groups: HolderGroups,
        to_device: Callable[[], None] = lambda: None,
        stored: Mapping[str, Tensor] | None = None,
        statistics: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Makes a whole module this worker's part of it.

        Args:
            plan: Who holds what.
            masking: ``"forward"`` or ``"backward"``.
            groups: Holder sets and their process groups.
            to_device: Moves the module to the device.
            stored: What this rank is to store of tensors of which the module has no data, by name.
            statistics: BatchNorm's statistics of the full model, where the module does not have them.
        """
        worker = groups.rank // groups.ranks_per_worker
        self.groups, self.plan = groups, plan
        self.runs_everything = plan.is_complete or masking == "backward"
        synchronize_over_holders(self.module, groups, self.runs_everything)
        self.buffers = BufferSync(self.module, groups, self.runs_everything, statistics)
        self.subnetwork: Subnetwork | None = None
        self.mask: GradientMask | None = None
        self._full: FullModel | None = None
        self._refresh: Refresh | None = None
        self.part: Subnetwork | GradientMask
        if masking == "backward":
            to_device()
            self.part = self.mask = GradientMask(self.module, plan, worker)
            self._refresh = Refresh(dict(self.module.named_parameters()), plan, groups)
        else:
            self.part = self.subnetwork = self._make_part(worker)
            self._full = self._full_model(self.subnetwork)
            try:
                self.subnetwork.carve(groups.device, stored)
                to_device()
            except BaseException:  # memory that ran out, say
                self.subnetwork.abandon()
                raise
        if self.how is not None:
            self.average(self.how)

    def _make_part(self, worker: int) -> Subnetwork:
        """A worker's subnetwork; the module is whole."""
        return Subnetwork(self.module, self.plan, worker)

    def _full_model(self, subnetwork: Subnetwork) -> FullModel:
        """What puts the full model in place of a subnetwork."""
        return FullModel(subnetwork, self.groups, self.buffers)

    def follow_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Does what has to happen around every step of these optimizers, whoever calls it."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for optimizer in optimizers:
            before = optimizer.register_step_pre_hook(lambda *_: self._before_step())
            after = optimizer.register_step_post_hook(lambda own, *_: self._after_step(own))
            self._handles += [before, after]

    def average(self, how: Averaging) -> None:
        """Averages gradients over their holders in every step, or parameters every few steps."""
        self.how = how
        trained, order, groups = self.part.trained, self._order, self.groups
        if how.period == 1:
            self.reducer = GradientReducer(trained, order, groups, how.bucket_cap_mb, how.reduce_dtype)
        else:
            self.averaging = PeriodicAveraging(trained, order, groups, how.period, how.average_state, how.bucket_cap_mb)

    # one step

    def before_forward(self) -> None:
        """Has to be called before every forward of training, on every rank."""
        self._in_step = True
        if self.mask is not None:
            self.mask.follow()
        self._pending.follow(self.part.trained)
        reduces = self.reducer is not None and self.reducer.enabled
        starts_period = self.averaging is not None and self.averaging.is_at_end and not self._accumulates
        if reduces or starts_period:
            with self.groups.waiting.measured():
                self.buffers.before_forward()

    def before_backward(self, loss: Tensor) -> None:
        """Has to be called before every backward pass, on every rank."""
        if self.reducer is not None:
            self.reducer.prepare(loss)

    def after_backward(self) -> None:
        """Averages even if this rank's backward pass reached none of its parameters."""
        self._in_step = False
        if self.reducer is not None:
            self.reducer.finish()
            if self.mask is not None and self.reducer.enabled:
                self.mask.read_values()

    def _before_step(self) -> None:
        """Takes over what the user did to weights after the backward pass, if that is not still to come in the step."""
        if self.mask is not None and self._pending.have_arrived:
            self.mask.read_values()

    def _after_step(self, optimizer: Optimizer) -> None:
        """Makes weights equal again where an optimizer step calls for it; collective."""
        self.after_optimizer_step(optimizer)
        if self.averaging is not None:
            with self.groups.waiting.measured():
                self.averaging.after_step(optimizer)
        if self.mask is not None and self._refresh is not None:
            self.mask.write_back()
            with self.groups.waiting.measured():
                self._refresh.run()
            self.mask.note_values()

    def after_training_step(self) -> None:
        """Has to be called when no backward pass of this step is to come any more."""
        self._in_step = False

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Has to be called after every step, also one that a gradient scaler skipped: its gradients have been used."""
        self._in_step = False
        self._pending.use(optimizer)

    def check_consistency(self, step: int) -> None:
        """Compares what ranks hold in common, if the user wants it and it is time to; collective.

        Args:
            step: How many optimizer steps have been taken.

        Raises:
            RuntimeError: On every rank: holders disagree.
        """
        if self.check is not None:
            self.check.after_step(step, None if self.has_drifted else self._held_together, self.groups.world_group)

    def _held_together(self) -> tuple[Pieces, Pieces]:
        """The parameters and the buffers that this rank holds together with others."""
        if self.mask is not None:
            shared: Pieces = {(name, self.groups.world): [p] for name, p in self.module.named_parameters()}
        else:
            shared = pieces_of(self.part.trained, self.groups)
        buffers = {(name, ranks): own for ranks, parts in self.buffers.shared_parts() for name, own in parts.items()}
        return shared, buffers

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Lets gradients accumulate without averaging."""
        if self.reducer is not None:
            with self.reducer.paused():
                yield
            return
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    # another plan

    @property
    def is_between_steps(self) -> bool:
        """Whether no forward waits for its backward pass, and no gradients wait for an optimizer step."""
        return not self._in_step and not self._pending

    def end_period(self, optimizers: Sequence[Optimizer]) -> None:
        """Ends a period of local steps early; collective."""
        if self.averaging is not None:
            self.averaging.end_period(optimizers)

    def forget_gradients(self) -> None:
        """Drops gradients, and what follows them."""
        if self.reducer is not None:
            self.reducer.remove()
        self._pending.clear()
        for parameter in [*self.module.parameters(), *self.part.leaves.values()]:
            parameter.grad = None

    # the full model

    @property
    def is_carved(self) -> bool:
        """Whether the module lacks something while the full model is not open."""
        return self._full is not None

    @property
    def is_open(self) -> bool:
        """Whether the full model is in place of a carved one."""
        return self._full is not None and self._full.is_open

    @property
    def is_whole(self) -> bool:
        """Whether the module itself has all there is now."""
        return self._full is None or self.is_open

    @property
    def has_drifted(self) -> bool:
        """Whether holders' weights differ: within a period of local steps."""
        return self.averaging is not None and not self.averaging.is_at_end

    @property
    def needs_others(self) -> bool:
        """Whether rank 0 needs other ranks to save the full model."""
        return self.has_drifted or (self._full is not None and self._full.needs_others)

    def open(self) -> None:
        """Puts the full model in place of a carved one; collective."""
        assert self._full is not None
        if self.reducer is not None:
            self.reducer.enabled = False
        if self.averaging is not None and self.has_drifted:
            self.averaging.install_mean()
        self._full.open()

    def close(self) -> None:
        """Goes back to this worker's subnetwork; local."""
        assert self._full is not None
        self._full.close()
        if self.averaging is not None:
            self.averaging.restore_own()
        if self.reducer is not None:
            self.reducer.enabled = True

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> None:
        """Loads a full model's state dict; local."""
        if self.is_whole:
            self.module.load_state_dict(state, strict)
        else:
            assert self._full is not None
            self._full.load_state_dict(state, strict)
        self.after_loading()

    def state_dict(self) -> dict[str, Any]:
        """The full model's state dict; collective, and complete on rank 0."""
        assert self._full is not None
        with self.means_in_place() as installed:
            state = self._full.state_dict()
            if installed and self.groups.rank == 0:  # rank 0's own weights come back in the place of the means
                trained = {p.untyped_storage().data_ptr() for p in self.part.trained.values()}
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in trained:
                        state[name] = value.clone()
            return state

    @contextmanager
    def means_in_place(self) -> Iterator[bool]:
        """Holders' means in the weights' place for a block of code, where they differ; collective."""
        if self.averaging is None or not self.has_drifted or self.is_open:
            yield False
            return
        self.averaging.install_mean()
        try:
            yield True
        finally:
            self.averaging.restore_own()

    # parts of the full model

    def outline(self) -> dict[str, Any]:
        """A carved model's state dict with the keys and shapes of the full one; local.

        What not every rank has as a whole is on the meta device.
        """
        with self.part.whole_structure(), self.buffers.full_statistics_in_place():
            state = self.module.state_dict()
        for name, value in state.items():
            is_partial = name in self.groups.layouts or self.groups.holders(name) != self.groups.world
            if is_partial and name not in self.buffers.full:
                state[name] = torch.empty_like(value, device="meta")
        return state

    def local(self, name: str, tensor: Tensor) -> Tensor | None:
        """What this rank stores of a parameter or buffer, while the model is carved."""
        if name in self.part.missing:
            return None
        is_cut = self.subnetwork is not None and name in self.subnetwork.cut
        return self.subnetwork.local(name) if is_cut else tensor  # type: ignore[union-attr]

    def after_loading(self) -> None:
        """Has to be called after parameters and buffers of the module were given values; local."""
        with torch.no_grad():
            if self.is_open:
                self.buffers.take_loaded()
            else:
                self.buffers.reset_local()
        if self.averaging is not None:
            self.averaging.restart()

    def sent_bytes(self) -> float:
        """Bytes that this rank sends per optimizer step, by `communication_bytes`."""
        assert self.how is not None
        with self.part.whole_structure():
            sent = communication_bytes(
                self.plan,
                self.module,
                ranks_per_worker=self.groups.ranks_per_worker,
                masking="forward" if self.mask is None else "backward",
                reduce_dtype=self.how.reduce_dtype,
            )
        return sent[self.groups.rank // self.groups.ranks_per_worker] / self.how.period

    # the end

    def lost(self) -> tuple[str, ...]:
        """Names of the tensors that other ranks would have to complete; none where the full model is in place."""
        if self.subnetwork is None or self.is_open:
            return ()
        return (*self.subnetwork.missing, *self.subnetwork.cut)

    def unmask(self) -> None:
        """Gives a module whose gradients are masked its own structure back; local."""
        if self.mask is not None:
            self.mask.give_up()

    def end(self) -> None:
        """Frees hooks and process groups; what is incomplete goes to the meta device. Local."""
        if self.subnetwork is not None and self.lost():
            self.subnetwork.abandon()
        if self.reducer is not None:
            self.reducer.remove()
        self._pending.clear()
        for handle in self._handles:
            handle.remove()
        self.groups.destroy()
