"""SDPStrategy: Lightning's hooks, each a few lines that delegate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.constants import default_pg_timeout

from lightning_sdp._compat import is_compiled, optimizers_to_device
from lightning_sdp.callbacks import BatchNormRecalibration
from lightning_sdp.callbacks.decisions import decide_alike, decide_locally
from lightning_sdp.callbacks.finetuning import show_own_structure, show_plain_structure
from lightning_sdp.callbacks.masking import MODES, MaskingMode
from lightning_sdp.elementwise import AVERAGED, require_elementwise, require_separate
from lightning_sdp.limits import check_interval, check_options, require_compatible, require_own_files
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
    MaskSettings,
    one_of,
    require_real_parameters,
    require_running,
    runs_without_data,
)
from lightning_sdp.sync.agreement import agree
from lightning_sdp.sync.buffers import tracked_batchnorms
from lightning_sdp.sync.consistency import ConsistencyCheck
from lightning_sdp.sync.groups import HolderGroups


class SDPStrategy(CheckpointHooks):
    """Subnetwork Data Parallelism: every worker trains a structurally complete part of the model on its own data.

    Residual blocks, or neurons, channels and heads, that a worker does not hold are absent from its memory. Gradients
    are averaged over exactly the ranks that hold an element. Evaluation and checkpoints see the full model. (Method:
    arXiv 2507.09029.)

    Args:
        granularity: What a worker may lack: ``"block"``, whole residual blocks, or ``"neuron"``, neurons, channels and
            heads. For neurons the model should have an ``example_input_array``, so that its graph can be read; without
            one only the layers of known classes can be cut.
        masking: ``"forward"``: what a worker lacks does not exist there; ``"backward"``: every worker runs the full
            model, but has gradients and optimizer state only of what it holds. After each step it gets the new values
            of the rest.
        coverage: Share C of the maskable parameters that each worker holds, in (0, 1]; a list gives each worker its
            own.
        num_subnetworks: Number N of workers; it has to divide the number of processes, and neighboring processes form
            one worker. ``"auto"`` is the largest divisor up to 8.
        components: Glob or globs over module names to treat as blocks, or in which to cut neurons (``*`` within a
            segment of a name, ``**`` across segments); ``None`` finds what is maskable.
        keep: Glob or globs over module names that every worker holds.
        keep_ends: Blocks at the ends of the stack that every worker holds: ``[first, last]`` or one number for both.
            ``"auto"`` keeps the first and last of six or more blocks alike, the first of six or more different ones,
            none of fewer.
        on_unsliceable: What becomes of neurons that cannot be cut out of their modules: ``"keep"``: every worker holds
            them; ``"pad"``: a worker stores only its own, and computes with zeros in place of the others;
            ``"error"``: refused.
        balance: What the assignment evens out between workers: ``"params"`` or ``"count"``.
        plan: A `MaskPlan` or the path of its JSON; takes the place of all arguments above but ``masking``.
        seed: Varies the assignment. The global random state is neither read nor changed.
        model_averaging_period: With k > 1, every process takes k steps on its own gradients, and then parameters are
            averaged over their holders, in place of gradients in every step. Forward masking only. Gradients are then
            clipped by their local norm; evaluation and checkpoints see the holders' mean.
        average_optimizer_state: Whether optimizer state is averaged along with parameters, where k > 1.
        bucket_cap_mb: Gradients are averaged in buckets of about this size, in MiB.
        reduce_dtype: In which dtype gradients travel: ``"bfloat16"``, ``"float16"``, ``"float32"`` or ``"float64"``;
            ``None`` is each one's own.
        find_unused_parameters: Accepted so that a DDP configuration carries over. Unused parameters are always handled.
        eval_model: What validation, test and prediction run: the ``"full"`` model, or each worker's ``"subnetwork"``.
        recalibrate_batchnorm: Training batches per rank that re-estimate BatchNorm's statistics for the full model; 0
            uses the mean over holders instead, which rarely fits the full model.
        save_distributed_checkpoint: Whether a checkpoint is a directory to which every process writes a part of what it
            holds, in the format of `torch.distributed.checkpoint`, instead of one file that process 0 writes. Either
            kind is recognized when it is loaded, whatever this says.
        record_inputs: Whether one training batch may be run through the full model before training where neither its
            code nor an ``example_input_array`` tells how its blocks are called.
        check_consistency_every_n_steps: With n > 0, ranks compare after every n-th optimizer step (with
            ``model_averaging_period`` > 1 at the end of that period) the bits of all that they hold in common, and all
            raise an error that names the tensor and the ranks if any differ.
        accelerator: As for `DDPStrategy`.
        parallel_devices: As for `DDPStrategy`.
        cluster_environment: As for `DDPStrategy`.
        checkpoint_io: As for `DDPStrategy`.
        precision_plugin: As for `DDPStrategy`.
        process_group_backend: As for `DDPStrategy`.
        timeout: As for `DDPStrategy`.
        start_method: As for `DDPStrategy`.

    Attributes:
        plan: Who holds what; a `MaskPlan` from setup on.
        masking: The regime, ``"forward"`` or ``"backward"``; `replan` changes both.
        initial_plan: The plan that the arguments lead to, with which training begins.

    Raises:
        ValueError: An argument is not understood.
    """

    plan: MaskPlan | None

    def __init__(
        self,
        granularity: str = "block",
        masking: str = "forward",
        coverage: float | list[float] = 0.5,
        num_subnetworks: int | Literal["auto"] = "auto",
        components: str | list[str] | None = None,
        keep: str | Sequence[str] = (),
        keep_ends: Literal["auto"] | int | list[int] = "auto",
        on_unsliceable: str = "keep",
        balance: str = "params",
        plan: str | MaskPlan | None = None,
        seed: int = 0,
        model_averaging_period: int = 1,
        average_optimizer_state: bool = False,
        bucket_cap_mb: float = 25,
        reduce_dtype: str | None = None,
        find_unused_parameters: bool | None = None,
        eval_model: str = "full",
        recalibrate_batchnorm: int = 16,
        save_distributed_checkpoint: bool = False,
        record_inputs: bool = True,
        check_consistency_every_n_steps: int = 0,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        self.settings = MaskSettings(
            granularity=granularity,
            masking=masking,
            coverage=coverage,
            num_subnetworks=num_subnetworks,
            components=components,
            keep=keep,
            keep_ends=keep_ends,
            on_unsliceable=on_unsliceable,
            balance=balance,
            plan=plan,
            seed=seed,
        )
        check_options(masking, eval_model, model_averaging_period, bucket_cap_mb, reduce_dtype, recalibrate_batchnorm)
        check_interval("check_consistency_every_n_steps", check_consistency_every_n_steps, 0)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.model_averaging_period = model_averaging_period
        self.average_optimizer_state = average_optimizer_state
        self.bucket_cap_mb = bucket_cap_mb
        self.reduce_dtype = reduce_dtype
        self.eval_model = eval_model
        self.recalibrate_batchnorm = recalibrate_batchnorm
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self.record_inputs = record_inputs
        self.check_consistency_every_n_steps = check_consistency_every_n_steps
        self.masking = masking
        self._reset()

    # setup

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
        groups = HolderGroups(self.plan, self.world_size, self.global_rank, self.root_device, self._timeout)
        if fitting and self._layer_sync:
            self._layer_sync.apply(module)
        can_run = self.plan.layouts and masking == "forward" and runs_without_data(module)

        def start() -> None:
            assert self.plan is not None
            self._run = Run(module, self.plan, masking, groups, self.model_to_device)

        try:
            agree(start, lambda _: ())
        except BaseException:
            if self._run is None:  # otherwise teardown sees to it
                groups.destroy()
            raise
        run = self._run
        assert run is not None
        if can_run:
            agree(lambda: require_running(module), lambda _: ())
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
            optimizers_to_device(self.optimizers, self.root_device)
        rank_zero_info(summary(self.plan, len(groups)))

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
            cut = {key: name for key, name in names_of.items() if name in plan.layouts}
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
            self._lost = run.lost()
            run.end()
        clip_locally(self.precision_plugin)
        scale_locally(self.precision_plugin)
        if module is not None and module._trainer is not None:
            show_own_structure(module._trainer.callbacks)  # type: ignore[attr-defined]
            decide_locally(module._trainer.callbacks, self._schedules)  # type: ignore[attr-defined]
        if self._recalibration is not None:
            self._recalibration.reset()
        self._checkpoint_record = None
        self._reset()
