"""What strategies have in common that give every worker a part of the model: from setup to teardown."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_sdp._compat import is_compiled, optimizers_to_device
from lightning_sdp.callbacks import BatchNormRecalibration
from lightning_sdp.callbacks.decisions import decide_alike, decide_locally
from lightning_sdp.callbacks.finetuning import show_own_structure, show_plain_structure
from lightning_sdp.callbacks.masking import MODES, MaskingMode
from lightning_sdp.elementwise import AVERAGED, require_elementwise, require_separate
from lightning_sdp.limits import check_options, require_compatible, require_own_files
from lightning_sdp.materialize import is_on_meta
from lightning_sdp.optimizer_state import OptimizerLayout
from lightning_sdp.plan import MaskPlan
from lightning_sdp.plan_checks import describe_plan, describe_tensors
from lightning_sdp.precision import (
    WorldClipping,
    clip_locally,
    clip_over_the_world,
    scale_locally,
    scale_over_the_world,
)
from lightning_sdp.rehearsal import record_training_calls
from lightning_sdp.replan import replan
from lightning_sdp.report import summary
from lightning_sdp.run import Averaging, Run
from lightning_sdp.saving import CheckpointHooks
from lightning_sdp.settings import (
    MASKINGS,
    one_of,
    require_real_parameters,
    require_running,
    runs_without_data,
)
from lightning_sdp.sync.agreement import agree
from lightning_sdp.sync.buffers import tracked_batchnorms
from lightning_sdp.sync.consistency import ConsistencyCheck
from lightning_sdp.sync.groups import HolderGroups, destroy_all_groups


class SubnetworkStrategy(CheckpointHooks):
    """Carves the model at setup, lets the plan change meanwhile, and leaves the module whole at teardown.

    Attributes:
        model_averaging_period: Steps between averages of parameters.
        average_optimizer_state: Whether optimizer state is averaged along with parameters.
        bucket_cap_mb: Size of a message, in MiB.
        reduce_dtype: In which dtype gradients travel.
        recalibrate_batchnorm: Training batches per rank that re-estimate BatchNorm's statistics.
        record_inputs: Whether one training batch may be run through the full model before training.
        check_consistency_every_n_steps: After how many steps ranks compare what they hold in common.
    """

    model_averaging_period: int
    average_optimizer_state: bool
    bucket_cap_mb: float
    reduce_dtype: str | None
    recalibrate_batchnorm: int
    record_inputs: bool
    check_consistency_every_n_steps: int
    _timeout: timedelta | None

    # setup

    def setup_environment(self) -> None:
        """Connects the processes, and sees to it that they part before the interpreter ends."""
        super().setup_environment()
        atexit.unregister(destroy_all_groups)
        atexit.register(destroy_all_groups)

    def connect(self, model: LightningModule) -> None:
        """Puts the masking regime first among the trainer's callbacks."""
        super().connect(model)
        callbacks = model.trainer.callbacks  # type: ignore[attr-defined]
        if self.save_distributed_checkpoint:
            require_own_files(self.checkpoint_io, callbacks)
        if not any(isinstance(callback, MaskingMode) for callback in callbacks):
            callbacks.insert(0, MODES[self.masking]())

    def setup(self, trainer: Trainer) -> None:
        """Carves the model down to this worker's subnetwork before it moves to the device; collective.

        Raises:
            ValueError: On every rank: the arguments do not fit the model or the world.
        """
        assert self.accelerator is not None and self.lightning_module is not None
        module, fitting = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        if not self._carves(trainer):
            agree(lambda: require_real_parameters(module), lambda _: ())
            super().setup(trainer)
            return
        self._lost, self._layout = (), None
        self.accelerator.setup(trainer)
        if self._run is None:
            self._start(trainer)
        run = self._run
        assert run is not None
        if self._to_load is not None:
            agree(self._to_load, lambda _: ())
            self._to_load = None
        if fitting:
            dtype = None if self.reduce_dtype is None else getattr(torch, self.reduce_dtype)
            run.average(Averaging(self.model_averaging_period, self.average_optimizer_state, self.bucket_cap_mb, dtype))
            if self.check_consistency_every_n_steps:
                run.check = ConsistencyCheck(self.check_consistency_every_n_steps)
            self._build_optimizers(trainer, run)
            self._add_recalibration(trainer, run)
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self._state_device)
        rank_zero_info(summary(run.plan, len(run.groups)))

    def _start(self, trainer: Trainer) -> None:
        """Divides the model among the ranks."""
        module, fitting = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        assert module is not None
        self.precision_plugin.convert_module(module)
        can_record = fitting and self.record_inputs and not is_on_meta(module)
        record = partial(record_training_calls, trainer, module) if can_record else None
        self.initial_plan = agree(
            lambda: self.settings.make_plan(module, self.world_size, self._checkpoint_record, record),
            lambda plan: [*describe_tensors(module), *describe_plan(plan)],
        )
        base = self.initial_plan
        self.plan, masking = agree(
            lambda: self.settings.resumed(base, self._checkpoint_record), lambda now: [*describe_plan(now[0]), now[1]]
        )
        self._set_masking(masking)
        now = self.plan
        agree(lambda: self._require_possible(now, masking), lambda _: ())
        groups = self._make_groups(now)
        if fitting and self._layer_sync:
            self._layer_sync.apply(module)
        can_run = self.plan.layouts and masking == "forward" and runs_without_data(module)

        def start() -> None:
            self._run = self._make_run(module, now, masking, groups)

        try:
            agree(start, lambda _: ())
        except BaseException:
            if self._run is None:  # otherwise teardown sees to it
                groups.destroy()
            raise
        if can_run:
            agree(lambda: require_running(module), lambda _: ())

    def _make_groups(self, plan: MaskPlan) -> HolderGroups:
        """The groups of a plan; collective."""
        return HolderGroups(plan, self.world_size, self.global_rank, self.root_device, self._timeout)

    def _make_run(self, module: LightningModule, plan: MaskPlan, masking: str, groups: HolderGroups) -> Run:
        """What trains the model; collective."""
        return Run(module, plan, masking, groups, self.model_to_device)

    def _set_masking(self, masking: str) -> None:
        """Puts a regime's callback in the place of the other's."""
        self.masking = masking
        callbacks = self.lightning_module.trainer.callbacks  # type: ignore[union-attr]
        for i, callback in enumerate(callbacks):
            if isinstance(callback, MaskingMode) and not isinstance(callback, MODES[masking]):
                callbacks[i] = MODES[masking]()

    def _require_possible(self, plan: MaskPlan, masking: str) -> None:
        """Refuses a plan or a regime that does not go with the options or the trainer."""
        check_options(
            masking,
            self.eval_model,
            self.model_averaging_period,
            self.bucket_cap_mb,
            self.reduce_dtype,
            self.recalibrate_batchnorm,
        )
        require_compatible(
            plan,
            masking,
            syncs_batchnorm=self._layer_sync is not None,
            compiles=is_compiled(self.lightning_module),  # type: ignore[arg-type]
            callbacks=self.lightning_module.trainer.callbacks,  # type: ignore[union-attr]
        )

    def _build_optimizers(self, trainer: Trainer, run: Run) -> None:
        """Lets the user build the optimizers for the full model, and leaves in them what this worker trains."""
        module, plan = self.lightning_module, run.plan
        assert module is not None
        with run.part.whole_structure():
            self.setup_optimizers(trainer)
            names_of = {id(parameter): name for name, parameter in module.named_parameters()}
            cut = {key: name for key, name in names_of.items() if name in run.groups.layouts}
            agree(lambda: self._require_divisible(plan, cut), lambda _: ())
            if run.averaging is not None and self.average_optimizer_state:
                agree(lambda: require_elementwise(self.optimizers, names_of, AVERAGED), lambda _: ())
            self._layout = OptimizerLayout(module, self.optimizers, run.part, plan, run.groups)
        run.follow_optimizers(self.optimizers)
        show_plain_structure(trainer.callbacks, self.plain_structure)  # type: ignore[attr-defined]
        decide_alike(trainer.callbacks, self._schedules, self.broadcast)  # type: ignore[attr-defined]
        scale_over_the_world(self.precision_plugin, run.groups)
        self._set_clipping(run)

    @property
    def _schedules(self) -> list[Any]:
        return [config.scheduler for config in self.lr_scheduler_configs]

    def _require_divisible(self, plan: MaskPlan, cut: Mapping[int, str]) -> None:
        """Refuses optimizers that need more than a rank has, given the names of tensors that are cut by their ids."""
        require_elementwise(self.optimizers, cut)
        if not plan.is_complete:
            require_separate(self.optimizers)

    def _set_clipping(self, run: Run) -> None:
        if run.plan.is_complete or run.averaging is not None:
            clip_locally(self.precision_plugin)
        else:
            clip_over_the_world(self.precision_plugin, WorldClipping(run.module, run.part.trained, run.groups))

    def _add_recalibration(self, trainer: Trainer, run: Run) -> None:
        assert self.lightning_module is not None
        if not tracked_batchnorms(self.lightning_module):
            return
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        own = next((c for c in callbacks if isinstance(c, BatchNormRecalibration)), None)
        if own is None and self.recalibrate_batchnorm:
            own = BatchNormRecalibration(self.recalibrate_batchnorm)
            callbacks.insert(1, own)
        if own is not None:
            own.reset()
        self._recalibration = own

    @contextmanager
    def plain_structure(self) -> Iterator[None]:
        """The structure of module and optimizers in a plain run, to add parameter groups, say; on every rank alike.

        Parameters that this rank lacks or has in part have their full shape, but no data.
        """
        module = self.lightning_module
        with nullcontext() if self._layout is None or module is None else self._layout.in_plain_form(module):
            yield

    # another plan

    @torch.inference_mode(False)
    @torch.no_grad()
    def replan(self, plan: MaskPlan | str, masking: str | None = None) -> None:
        """Goes on training with another plan or in another regime; collective, between two steps.

        Parameters, optimizer state and buffers move from the old holders directly to the new ones. Where a regime in
        which workers run the full model follows one in which they do not, the full model is opened for it. With
        ``model_averaging_period`` > 1 the period ends first.

        Args:
            plan: Who will hold what: `strategy.plan.reassigned(...)`, say, or the path of a plan's JSON.
            masking: ``"forward"`` or ``"backward"``; default: as before.

        Raises:
            RuntimeError: Nothing is being trained.
            ValueError: On every rank: the plan is not one of the same components and workers, gradients wait for an
                optimizer step, or something of the run does not go with the plan or the regime.
        """
        run, layout, module = self._run, self._layout, self.lightning_module
        if run is None or layout is None or module is None or self._interrupted:
            raise RuntimeError("strategy.replan changes a running training: call it in a hook of one.")
        masking = masking or self.masking
        new = agree(lambda: self._checked(plan, masking, run, layout), lambda new: [*describe_plan(new), masking])
        if new == self.plan and masking == self.masking:
            return
        evaluates = self.eval_model == "full" and (module.trainer.validating or module.trainer.sanity_checking)
        was_open = run.is_open or self._full_model_users > 0 or evaluates
        is_cut_first = masking == "forward" and new.layouts and run.runs_everything and runs_without_data(module)
        self.close_full_model()
        run.end_period(self.optimizers)
        if new.is_complete or masking == "backward":
            self.open_full_model()
        if run.runs_everything:
            self._stale_statistics = False
        replan(run, new, masking, layout)
        if self._recalibration is not None and not run.buffers.widths:
            self._recalibration.reset()
        self.plan = new
        self._set_masking(masking)
        self._set_clipping(run)
        if is_cut_first:
            agree(lambda: require_running(module), lambda _: ())
        if was_open:
            self.open_full_model()

    @property
    def is_between_steps(self) -> bool:
        """Whether the plan can change now: a model is being trained, and no gradients wait for an optimizer step."""
        return self._run is not None and self._layout is not None and self._run.is_between_steps

    def _checked(self, plan: MaskPlan | str, masking: str, run: Run, layout: OptimizerLayout) -> MaskPlan:
        """The plan to go on with, if that is possible."""
        assert self.plan is not None
        one_of("masking", masking, MASKINGS)
        new = self.plan.with_holders_of(MaskPlan.load(plan) if isinstance(plan, str) else plan)
        if not run.is_between_steps:
            raise ValueError(
                "The plan can change only between two steps, but a step is under way or gradients are being "
                "accumulated. Call strategy.replan after an optimizer step, or use a MaskingSchedule, which waits."
            )
        self._require_possible(new, masking)
        layout.require_recorded()
        self._require_divisible(new, layout.names_of(new.layouts))
        return new

    def teardown(self) -> None:
        """Leaves the module whole on every rank, after a failure with its structure whole; frees what was ours."""
        run = self._run
        self.open_for_good()
        if run is not None:
            run.unmask()
        module = self._lightning_module
        if module is not None and is_on_meta(module):
            self._lightning_module = None  # it would be moved to the host, but there is no data to move
        super().teardown()
        self._lightning_module = module
        if run is not None:
            self._leave(run)
        clip_locally(self.precision_plugin)
        scale_locally(self.precision_plugin)
        if module is not None and module._trainer is not None:
            show_own_structure(module._trainer.callbacks)  # type: ignore[attr-defined]
            decide_locally(module._trainer.callbacks, self._schedules)  # type: ignore[attr-defined]
        if self._recalibration is not None:
            self._recalibration.reset()
        self._checkpoint_record = None
        self._reset()

    def _leave(self, run: Run) -> None:
        """Frees what a run needed."""
        self._lost = run.lost()
        run.end()
