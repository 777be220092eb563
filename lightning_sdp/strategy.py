"""SDPStrategy: Lightning's hooks, each a few lines that delegate."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal
from zipfile import is_zipfile

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightning_sdp._compat import PathType, is_compiled, optimizer_to_device, optimizers_to_device
from lightning_sdp.callbacks import BatchNormRecalibration
from lightning_sdp.callbacks.batchnorm import update_statistics
from lightning_sdp.callbacks.decisions import decide_alike, decide_locally
from lightning_sdp.callbacks.finetuning import show_own_structure, show_plain_structure
from lightning_sdp.callbacks.masking import CHECKPOINT_KEY, MODES, MaskingMode
from lightning_sdp.checkpoint_directory import META, beside, is_checkpoint, move, recover
from lightning_sdp.distributed_checkpoint import SavedDirectory, restored, save_directory
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
from lightning_sdp.report import summary
from lightning_sdp.run import Averaging, Run
from lightning_sdp.settings import (
    MASKINGS,
    MaskSettings,
    one_of,
    require_real_parameters,
    require_running,
    runs_without_data,
)
from lightning_sdp.sync.agreement import agree, needing_all
from lightning_sdp.sync.buffers import tracked_batchnorms
from lightning_sdp.sync.consistency import ConsistencyCheck
from lightning_sdp.sync.groups import HolderGroups
from lightning_sdp.usage import gather, measure


class SDPStrategy(DDPStrategy):
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
        self._checkpoint_record: Mapping[str, Any] | None = None
        self._lost: tuple[str, ...] = ()
        self.plan = None
        self.masking = masking
        self.initial_plan: MaskPlan | None = None
        self._layout: OptimizerLayout | None = None  # outlives a run: the user may save a checkpoint after it
        self._reset()

    def _reset(self) -> None:
        """Forgets everything that belongs to one run."""
        self._run: Run | None = None
        self._to_load: tuple[Mapping[str, Any], bool] | None = None
        self._recalibration: BatchNormRecalibration | None = None
        self._stale_statistics = False
        self._full_model_users = 0
        self._saved: SavedDirectory | None = None
        self._strict = True

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
        agree(lambda: self._check_options(masking), lambda _: ())
        self._require_compatible(self.plan, masking)
        groups = HolderGroups(self.plan, self.world_size, self.global_rank, self.root_device, self._timeout)
        if fitting and self._layer_sync:
            self._layer_sync.apply(module)
        can_run = self.plan.layouts and masking == "forward" and runs_without_data(module)

        def start() -> None:
            assert self.plan is not None
            self._run = Run(module, self.plan, masking, groups, self.model_to_device)
            if self._to_load is not None:
                self._run.load_state_dict(*self._to_load)
                self._to_load = None

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
        self._load_weights()
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

    def _carves(self, trainer: Trainer) -> bool:
        """Whether setup divides the model among the ranks."""
        return trainer.state.fn == TrainerFn.FITTING or self.eval_model != "full"

    def _set_masking(self, masking: str) -> None:
        """Puts a regime's callback in the place of the other's."""
        self.masking = masking
        callbacks = self.lightning_module.trainer.callbacks  # type: ignore[union-attr]
        for i, callback in enumerate(callbacks):
            if isinstance(callback, MaskingMode) and not isinstance(callback, MODES[masking]):
                callbacks[i] = MODES[masking]()

    def _require_compatible(self, plan: MaskPlan, masking: str) -> None:
        require_compatible(
            plan,
            masking,
            syncs_batchnorm=self._layer_sync is not None,
            compiles=is_compiled(self.lightning_module),  # type: ignore[arg-type]
            callbacks=self.lightning_module.trainer.callbacks,  # type: ignore[union-attr]
        )

    def _build_optimizers(self, trainer: Trainer, run: Run) -> None:
        """Lets the user build the optimizers for the full model, and leaves in them what this worker trains."""
        module = self.lightning_module
        assert self.plan is not None and module is not None
        with run.part.whole_structure():
            self.setup_optimizers(trainer)
            names_of = {id(parameter): name for name, parameter in module.named_parameters()}
            cut = {key: name for key, name in names_of.items() if name in self.plan.layouts}
            agree(lambda: require_elementwise(self.optimizers, cut), lambda _: ())
            if run.averaging is not None and self.average_optimizer_state:
                agree(lambda: require_elementwise(self.optimizers, names_of, AVERAGED), lambda _: ())
            if not self.plan.is_complete:
                agree(lambda: require_separate(self.optimizers), lambda _: ())
            self._layout = OptimizerLayout(module, self.optimizers, run.part, self.plan, run.groups)
        run.follow_optimizers(self.optimizers)
        show_plain_structure(trainer.callbacks, self.plain_structure)  # type: ignore[attr-defined]
        decide_alike(trainer.callbacks, self._schedules, self.broadcast)  # type: ignore[attr-defined]
        scale_over_the_world(self.precision_plugin, run.groups)
        self._set_clipping(run)

    @property
    def _schedules(self) -> list[Any]:
        return [config.scheduler for config in self.lr_scheduler_configs]

    def _set_clipping(self, run: Run) -> None:
        if run.everywhere or run.averaging is not None:
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
        is_cut_first = masking == "forward" and bool(new.layouts) and run.everywhere and runs_without_data(module)
        self.close_full_model()
        run.end_period(self.optimizers)
        if new.is_complete or masking == "backward":
            self.open_full_model()
        if run.mask is not None or run.everywhere:
            self._stale_statistics = False
        run.replan(new, masking, layout)
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
        self._check_options(masking)
        self._require_compatible(new, masking)
        layout.require_recorded()
        require_elementwise(self.optimizers, layout.names_of(new.layouts))
        if not new.is_complete:
            require_separate(self.optimizers)
        return new

    def _check_options(self, masking: str) -> None:
        check_options(
            masking,
            self.eval_model,
            self.model_averaging_period,
            self.bucket_cap_mb,
            self.reduce_dtype,
            self.recalibrate_batchnorm,
        )

    # training

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch to the device; training batches are remembered for BatchNorm."""
        module = self.lightning_module
        if self._recalibration is not None and not self._is_open and module is not None and module.trainer.training:
            self._recalibration.record(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's training step on this worker's subnetwork."""
        if self._run is not None:
            self._run.before_forward()
            if self._run.buffers.widths and self._recalibration is not None:
                assert self.lightning_module is not None
                self._recalibration.keep(self.lightning_module)
        self._stale_statistics = True
        output = super().training_step(*args, **kwargs)
        if self._run is not None and not self.lightning_module.automatic_optimization:  # type: ignore[union-attr]
            self._run.after_training_step()
        return output

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the backward pass, which is an empty one where this rank lacks all that trains: others wait for it."""
        if self._run is not None and self._run.part.lacks_trainable and not closure_loss.requires_grad:
            closure_loss = closure_loss + closure_loss.new_zeros((), requires_grad=True)
        return super().backward(closure_loss, *args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepares the averaging of gradients, which runs within the backward pass."""
        if self._run is not None:
            self._run.before_backward(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Averages even if this rank's backward pass reached none of its parameters."""
        if self._run is not None:
            self._run.after_backward()

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Takes a step, or skips it, as a gradient scaler may; then compares what ranks hold in common, if wanted."""
        if self._layout is not None:
            self._layout.require_recorded()
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._run is not None:
            assert self.lightning_module is not None
            self._run.after_optimizer_step(getattr(optimizer, "_optimizer", optimizer))
            self._run.check_consistency(self.lightning_module.trainer.global_step + 1)  # Lightning has yet to count it
        return output

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lets gradients accumulate without averaging."""
        with nullcontext() if self._run is None else self._run.accumulating():
            yield

    # what it takes

    def usage(self, **measured: float) -> list[dict[str, float]]:
        """What every rank holds and sends; collective, between two steps of a training.

        Args:
            measured: What this rank measured itself, with the same names on all ranks.

        Returns:
            For every rank, in order: ``effective_coverage``, the share of all blocks or groups of neurons that it
            holds, kept ones included; ``parameter_bytes``, ``gradient_bytes`` and ``optimizer_bytes``; ``peak_bytes``,
            the most that was allocated on a CUDA device or resident in the process; ``sent_bytes`` per optimizer step,
            as `communication_bytes` forecasts them; and what it measured.

        Raises:
            RuntimeError: Nothing is being trained.
        """
        if self._run is None or self._layout is None:
            raise RuntimeError("strategy.usage measures a running training: call it in a hook of one.")
        own = measure(self._run, self.optimizers)
        return gather(own | measured, self._run.groups)

    def seconds_waited(self) -> float:
        """Seconds that this rank has waited for what others send since the first call in a run; local."""
        return 0.0 if self._run is None else self._run.groups.waiting.seconds()

    # the full model

    @property
    def _is_open(self) -> bool:
        return self._run is not None and self._run.is_open

    @property
    def _interrupted(self) -> bool:
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        return trainer is not None and trainer.interrupted

    @contextmanager
    def full_model(self) -> Iterator[LightningModule]:
        """The full model on every rank, for sampling, export or weight averaging; collective, between two steps.

        Yields:
            The LightningModule, whole, with equal weights and buffers on all ranks.
        """
        assert self.lightning_module is not None
        was_open = self._is_open
        self.open_full_model()
        self._full_model_users += 1
        try:
            yield self.lightning_module
        finally:
            self._full_model_users -= 1
            if not was_open:
                self.close_full_model()

    @needing_all("strategy.full_model()")
    def open_full_model(self) -> None:
        """Puts the full model in place on every rank; collective, and without effect where it is in place."""
        run = self._run
        if run is None or not run.is_carved or run.is_open or self._interrupted:
            return
        run.open()
        self._update_statistics(run)

    def close_full_model(self) -> None:
        """Goes back to this worker's subnetwork; local, and without effect where the full model is not open."""
        if self._run is not None and self._run.is_open:
            self._run.close()

    def open_for_good(self) -> None:
        """Opens the full model at the end of training, unless no process may have all of it."""
        if self._run is not None and not self._run.starts_on_meta:
            self.open_full_model()

    def open_for_evaluation(self) -> None:
        """Opens the full model, unless the subnetworks are to be evaluated."""
        if self.eval_model == "full":
            self.open_full_model()

    def on_validation_end(self) -> None:
        """Closes the full model after every other hook of the stage."""
        if not self.lightning_module.trainer.sanity_checking:  # type: ignore[union-attr]
            self.close_full_model()

    def _update_statistics(self, run: Run) -> None:
        """Re-estimates BatchNorm's statistics for the open full model if training went on; collective."""
        assert self.lightning_module is not None
        if self._stale_statistics and run.buffers.widths:
            update_statistics(run.buffers, self._recalibration, self.lightning_module)
            self._stale_statistics = False

    # checkpoints

    def plan_record(self) -> dict[str, Any]:
        """What a checkpoint remembers of the plan, so that a resumed run keeps it."""
        if self.plan is None or self.initial_plan is None:
            return {}
        return self.settings.record(self.initial_plan, self.plan, self.masking)

    @needing_all("trainer.save_checkpoint")
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The full model's state dict; collective while training, and complete on rank 0.

        Raises:
            RuntimeError: Training failed before, and what other ranks held is lost here.
        """
        assert self.lightning_module is not None
        if self._lost:
            raise RuntimeError(
                f"The model is incomplete: training was interrupted, or began on the meta device, and "
                f"{self._lost[0]!r} and {len(self._lost) - 1} more tensors were held by other processes, as a whole or "
                "in part. Load the last checkpoint instead."
            )
        run = self._run
        if run is None or not run.is_carved or self._cut_off:
            return self.lightning_module.state_dict()
        if self._stale_statistics and run.buffers.widths and not run.is_open:
            with self.full_model():
                pass
        if run.has_drifted:
            rank_zero_warn(
                f"A checkpoint in the middle of a period (model_averaging_period={self.model_averaging_period}) has "
                "the mean of the holders' weights: a run that resumes from it does not go on exactly."
            )
        return run.outline() if self.save_distributed_checkpoint else run.state_dict()

    @needing_all("trainer.save_checkpoint")
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state that the optimizer would have in a plain run; collective, and complete on rank 0.

        With ``save_distributed_checkpoint`` it is what this rank has of it, by the names of parameters.
        """
        optimizer, layout = getattr(optimizer, "_optimizer", optimizer), self._layout
        if layout is None or self._cut_off:
            return super().optimizer_state(optimizer)
        position = self.optimizers.index(optimizer)
        if self.save_distributed_checkpoint:
            return agree(lambda: layout.own_state_dict(position, optimizer), lambda _: ())
        return layout.state_dict(position, optimizer)

    def load_checkpoint(self, checkpoint_path: PathType, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a checkpoint, of local files only those parts that are used, and remembers its plan."""
        known = dict(zip(["weights_only"], args, strict=False)) | kwargs
        path = Path(self.broadcast(checkpoint_path))
        self._saved = None
        if self.is_global_zero:
            recover(path)
        if self.broadcast(path.is_dir() and type(self.checkpoint_io) is TorchCheckpointIO):
            saved = agree(lambda: SavedDirectory(path, known.get("weights_only")), lambda _: ())
            checkpoint = restored(super().load_checkpoint(path / META, *args, **kwargs))
            self._saved = saved
        elif known and type(self.checkpoint_io) is TorchCheckpointIO and is_zipfile(checkpoint_path):
            checkpoint = torch.load(checkpoint_path, map_location="cpu", mmap=True, **known)
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._checkpoint_record = checkpoint.get(CHECKPOINT_KEY)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the full model, also in the middle of training, as a search for a learning rate does; local.

        From a distributed checkpoint it is collective, and a model that setup will carve is not loaded before.
        """
        assert self.lightning_module is not None
        if self._saved is not None:
            self._strict = strict
            if self._run is not None or not self._carves(self.lightning_module.trainer):
                self._load_weights()
        elif self._run is not None:
            self._run.load_state_dict(checkpoint["state_dict"], strict)
            self._stale_statistics = False
        elif is_on_meta(self.lightning_module):
            self._to_load = checkpoint["state_dict"], strict  # when setup has made real what is held
        else:
            super().load_model_state_dict(checkpoint, strict)

    def _load_weights(self) -> None:
        """Reads what this rank has of the model, if a distributed checkpoint is being restored."""
        saved, module = self._saved, self.lightning_module
        if saved is not None and module is not None:
            agree(lambda: saved.load_model(module, self._run, self._strict), lambda _: ())
            self._stale_statistics = False

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads this worker's part of the optimizer states of a plain run."""
        layout, saved = self._layout, self._saved
        if layout is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        for position, (optimizer, state) in enumerate(
            zip(self.optimizers, checkpoint["optimizer_states"], strict=False)
        ):
            if saved is None:
                layout.load_state_dict(position, optimizer, state)
            else:
                own = agree(partial(saved.optimizer_state, position, layout), lambda _: ())
                layout.load_own_state_dict(position, optimizer, {**state, "state": own})
            optimizer_to_device(optimizer, self.root_device)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathType, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint on rank 0 or on all ranks, unless it could not be completed after a failure."""
        if self._cut_off:
            warnings.warn(
                f"No checkpoint was written to {filepath}: after an exception the other processes cannot be asked "
                "for what they hold.",
                stacklevel=2,
            )
            return
        if not self.save_distributed_checkpoint:
            replaces = self.is_global_zero and is_checkpoint(Path(filepath))
            file = beside(Path(filepath), "unfinished") if replaces else filepath
            super().save_checkpoint(checkpoint, file, storage_options)
            if replaces:
                move(Path(file), Path(filepath))
            return
        if storage_options is not None:
            raise TypeError("storage_options cannot be used with save_distributed_checkpoint=True.")
        assert self.lightning_module is not None
        path, lowest = Path(self.broadcast(filepath)), self.model_averaging_period > 1
        save_rest = super().save_checkpoint
        save_directory(path, checkpoint, self.lightning_module, self._run, self._layout, lowest, save_rest)

    # failures and the end

    @property
    def _cut_off(self) -> bool:
        """Whether a checkpoint needs what other ranks hold, but one of them may have failed and not answer."""
        sources = (self._run, self._layout)
        needs_others = any(source is not None and source.needs_others for source in sources)
        return self._interrupted and (needs_others or (self.save_distributed_checkpoint and self.world_size > 1))

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all processes, unless one of them has failed."""
        if not self._interrupted:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcasts an object, unless a process has failed."""
        return obj if self._interrupted else super().broadcast(obj, src)

    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any = "mean") -> Tensor:
        """Reduces a tensor over all processes, unless one of them has failed."""
        return tensor if self._interrupted else super().reduce(tensor, group, reduce_op)

    def on_exception(self, exception: BaseException) -> None:
        """Nothing to add: messages are clear where they are raised."""

    def teardown(self) -> None:
        """Leaves the module whole on every rank, after a failure with its structure whole; frees what was ours."""
        run = self._run
        self.open_for_good()
        if run is not None:
            run.unmask()
        module = self._lightning_module
        if module is not None and any(parameter.is_meta for parameter in module.parameters()):
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
