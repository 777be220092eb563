"""SDPFSDPStrategy: subnetworks whose parameters are sharded over their holders."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.nn as nn
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import FSDPStrategy, ParallelStrategy
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from lightning_sdp._compat import call_sharded, is_compiled
from lightning_sdp.base import SubnetworkStrategy
from lightning_sdp.callbacks import MaskingSchedule
from lightning_sdp.elementwise import require_separate
from lightning_sdp.limits import check_interval, check_options
from lightning_sdp.plan import MaskPlan
from lightning_sdp.precision import WorldClipping, clip_over_the_world
from lightning_sdp.run import Run
from lightning_sdp.settings import MaskSettings, one_of
from lightning_sdp.sharding.run import ShardedRun
from lightning_sdp.sharding.subnetwork import ShardOptions
from lightning_sdp.sharding.units import Sharding, shard
from lightning_sdp.sync.agreement import agree
from lightning_sdp.sync.groups import HolderGroups

_REFUSED = {  # arguments of FSDPStrategy, or of what it passes them to, and what to do instead
    "activation_checkpointing": "use activation_checkpointing_policy",
    "device_mesh": "num_subnetworks below the number of processes shards within workers and averages between them",
    "process_group": "the groups follow from the plan",
    "ignored_modules": "every parameter is sharded",
    "ignored_states": "every parameter is sharded",
    "ignored_parameters": "every parameter is sharded",
    "backward_prefetch": "what is gathered ahead follows from the plan",
    "param_init_fn": "a model on the meta device is initialized by reset_parameters() or _init_weights()",
    "use_orig_params": "parameters always keep their names, and groups of them may differ",
    "sync_module_states": "processes always begin with the weights of process 0",
    "forward_prefetch": "leave it out",
    "limit_all_gathers": "leave it out",
}


class _PlainFSDP(FSDPStrategy):
    """Lightning's FSDPStrategy without what it does with torch's older FSDP: saving, restoring, optimizers."""

    call_step: Callable[..., Any]
    setup_optimizers = ParallelStrategy.setup_optimizers
    lightning_module_state_dict = ParallelStrategy.lightning_module_state_dict
    load_model_state_dict = ParallelStrategy.load_model_state_dict
    optimizer_state = ParallelStrategy.optimizer_state
    load_optimizer_state_dict = ParallelStrategy.load_optimizer_state_dict
    save_checkpoint = ParallelStrategy.save_checkpoint
    load_checkpoint = ParallelStrategy.load_checkpoint
    restore_checkpoint_after_setup = ParallelStrategy.restore_checkpoint_after_setup
    lightning_restore_optimizer = ParallelStrategy.lightning_restore_optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's training step."""
        with self.precision_plugin.train_step_context():
            return self.call_step("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's validation step."""
        return self._evaluate("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's test step."""
        return self._evaluate("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's predict step."""
        return self._evaluate("predict_step", *args, **kwargs)

    def _evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        context = getattr(self.precision_plugin, name.replace("step", "step_context").replace("validation", "val"))
        with context():
            return self.call_step(name, *args, **kwargs)


class SDPFSDPStrategy(SubnetworkStrategy, _PlainFSDP):
    """Subnetwork Data Parallelism whose subnetworks are sharded: every block over exactly the processes that hold it.

    Parameters, gradients and optimizer state of a block are divided among its holders, those of the rest among all
    processes, by torch's FSDP2; activations, compute and traffic are those of a subnetwork. Residual blocks only, with
    forward masking. Evaluation runs the full model, of which every process gathers one block at a time. After training
    the module stays sharded; ``trainer.save_checkpoint``, ``trainer.test`` and another ``trainer.fit`` with the same
    strategy go on with it. (Method: arXiv 2507.09029.)

    With ``num_subnetworks`` below the number of processes several neighboring processes form a worker: each worker
    shards its subnetwork within itself, and equal parts are averaged between workers, as hybrid sharding does.

    Args:
        granularity: ``"block"``; as for `SDPStrategy`.
        masking: ``"forward"``; as for `SDPStrategy`.
        coverage: As for `SDPStrategy`.
        num_subnetworks: As for `SDPStrategy`.
        components: As for `SDPStrategy`.
        keep: As for `SDPStrategy`.
        keep_ends: As for `SDPStrategy`.
        balance: As for `SDPStrategy`.
        plan: As for `SDPStrategy`.
        seed: As for `SDPStrategy`.
        eval_model: As for `SDPStrategy`.
        recalibrate_batchnorm: As for `SDPStrategy`.
        record_inputs: As for `SDPStrategy`.
        check_consistency_every_n_steps: As for `SDPStrategy`; processes have equal shards where workers have
            several of them.
        auto_wrap_policy: Modules that are sharded by themselves beside the residual blocks: classes in a set or list,
            or a function as `FSDPStrategy` takes it.
        activation_checkpointing_policy: Modules that recompute their activations in the backward pass: as for
            ``auto_wrap_policy``, or ``"blocks"``: the residual blocks.
        mixed_precision: The dtypes in which blocks compute and gradients travel: torch's ``MixedPrecisionPolicy``, or
            ``MixedPrecision`` without ``buffer_dtype``. Default: by the Trainer's precision.
        cpu_offload: Whether shards and optimizer state stay in host memory: a boolean, ``CPUOffload`` or
            ``CPUOffloadPolicy``.
        sharding_strategy: ``"FULL_SHARD"``, or ``"SHARD_GRAD_OP"``: a block is not freed between its forward and its
            backward pass.
        state_dict_type: ``"full"``: a checkpoint is one file, as from any other strategy; ``"sharded"``: a directory,
            see ``save_distributed_checkpoint`` of `SDPStrategy`. Either kind is recognized when it is loaded.
        accelerator: As for `FSDPStrategy`; the CPU works too.
        parallel_devices: As for `FSDPStrategy`.
        cluster_environment: As for `FSDPStrategy`.
        checkpoint_io: As for `FSDPStrategy`.
        precision_plugin: As for `FSDPStrategy`.
        process_group_backend: As for `FSDPStrategy`.
        timeout: As for `FSDPStrategy`.
        fsdp_options: Other arguments of `FSDPStrategy`, which do not carry over to FSDP2, are refused by name.

    Attributes:
        plan: Who holds what; a `MaskPlan` from setup on.

    Raises:
        ValueError: An argument is not understood.
        TypeError: An argument does not carry over.
    """

    strategy_name = "sdp_fsdp"
    model_averaging_period = 1
    average_optimizer_state = False
    bucket_cap_mb = 25.0
    reduce_dtype = None
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
        balance: str = "params",
        plan: str | MaskPlan | None = None,
        seed: int = 0,
        eval_model: str = "full",
        recalibrate_batchnorm: int = 16,
        record_inputs: bool = True,
        check_consistency_every_n_steps: int = 0,
        auto_wrap_policy: Any = None,
        activation_checkpointing_policy: Any = None,
        mixed_precision: MixedPrecision | MixedPrecisionPolicy | None = None,
        cpu_offload: bool | CPUOffload | CPUOffloadPolicy | None = None,
        sharding_strategy: str | ShardingStrategy = "FULL_SHARD",
        state_dict_type: str = "full",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **fsdp_options: Any,
    ) -> None:
        self.settings = MaskSettings(
            granularity=granularity,
            masking=masking,
            coverage=coverage,
            num_subnetworks=num_subnetworks,
            components=components,
            keep=keep,
            keep_ends=keep_ends,
            balance=balance,
            plan=plan,
            seed=seed,
        )
        _require_blocks(granularity, masking)
        check_options(masking, eval_model, 1, self.bucket_cap_mb, None, recalibrate_batchnorm)
        check_interval("check_consistency_every_n_steps", check_consistency_every_n_steps, 0)
        one_of("state_dict_type", state_dict_type, ("full", "sharded"))
        for name in fsdp_options:
            raise TypeError(f"{name} does not carry over to FSDP2: {_REFUSED.get(name, 'leave it out')}.")
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._wraps = _policy("auto_wrap_policy", auto_wrap_policy)
        self._checkpointing = activation_checkpointing_policy
        if activation_checkpointing_policy != "blocks":
            self._checkpointing = _policy("activation_checkpointing_policy", activation_checkpointing_policy)
        self.mixed_precision = mixed_precision  # type: ignore[assignment]
        self._offload = _offload_policy(cpu_offload)
        self._reshards = _reshards(sharding_strategy)
        if isinstance(mixed_precision, MixedPrecision) and mixed_precision.buffer_dtype is not None:
            raise ValueError("mixed_precision has a buffer_dtype, but FSDP2 leaves buffers as they are: leave it out.")
        self.save_distributed_checkpoint = state_dict_type == "sharded"
        self.eval_model = eval_model
        self.recalibrate_batchnorm = recalibrate_batchnorm
        self.record_inputs = record_inputs
        self.check_consistency_every_n_steps = check_consistency_every_n_steps
        self.masking = masking
        self._sharding: Sharding | None = None
        self._kept: Run | None = None  # what teardown leaves, with the module sharded
        self._reset()

    # setup

    def _carves(self, trainer: Trainer) -> bool:
        return True

    def _make_groups(self, plan: MaskPlan) -> HolderGroups:
        module = self.lightning_module
        assert module is not None
        self._sharding = agree(lambda: shard(module, plan, self.world_size, self._wraps), lambda _: ())
        device, timeout = self.root_device, self._timeout
        groups = HolderGroups(plan, self.world_size, self.global_rank, device, timeout, sharding=self._sharding)
        weakref.finalize(self, groups.destroy)  # they outlive teardown
        return groups

    def _make_run(self, module: LightningModule, plan: MaskPlan, masking: str, groups: HolderGroups) -> Run:
        assert self._sharding is not None
        options = ShardOptions(self._precision_policy(module), self._offload, self._reshards, self._checkpointing)
        return ShardedRun(module, plan, groups, self.model_to_device, self._sharding, options)

    def _precision_policy(self, module: nn.Module) -> MixedPrecisionPolicy:
        given: Any = self.mixed_precision
        if given is None and self.precision_plugin.precision != "32-true":
            given = self.precision_plugin.mixed_precision_config
        if given is None or isinstance(given, MixedPrecisionPolicy):
            return given or MixedPrecisionPolicy()
        own = {parameter.dtype for parameter in module.parameters()}
        param_dtype = None if own == {given.param_dtype} else given.param_dtype
        casts = given.cast_forward_inputs or given.cast_root_forward_inputs
        return MixedPrecisionPolicy(param_dtype, given.reduce_dtype, cast_forward_inputs=casts)

    def setup(self, trainer: Trainer) -> None:
        """Carves the model and shards what this worker holds; collective. See `SDPStrategy`."""
        module = self.lightning_module
        assert module is not None
        agree(lambda: self._require_unsharded(module), lambda _: ())
        super().setup(trainer)

    def _require_unsharded(self, module: LightningModule) -> None:
        is_known = self._run is not None and self._run.module is module
        if not is_known and any(isinstance(own, FSDPModule) for own in module.modules()):
            raise ValueError(
                f"{type(module).__name__} is sharded already. Fit or test it again with the strategy object that has "
                "sharded it, or build it anew and load a checkpoint."
            )
        if self._run is not None and not is_known:
            self._run.end()
            self._reset()

    def _require_possible(self, plan: MaskPlan, masking: str) -> None:
        super()._require_possible(plan, masking)
        module = self.lightning_module
        assert module is not None
        _require_blocks(plan.granularity, masking)
        if is_compiled(module):
            raise ValueError(
                "torch.compile has not been made to work with sdp_fsdp: use strategy='sdp', or do not compile."
            )
        callbacks: list[Any] = module.trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(callback, MaskingSchedule) for callback in callbacks):
            raise ValueError("MaskingSchedule changes who holds what, which sdp_fsdp does not: use strategy='sdp'.")

    def _require_divisible(self, plan: MaskPlan, cut: Any) -> None:
        super()._require_divisible(plan, cut)
        if self.world_size > 1:
            require_separate(self.optimizers)

    def _set_clipping(self, run: Run) -> None:
        clip_over_the_world(self.precision_plugin, WorldClipping(run.module, run.part.trained, run.groups))

    @property
    def _state_device(self) -> torch.device:
        return self.root_device if self._offload is None else torch.device("cpu")

    def replan(self, plan: MaskPlan | str, masking: str | None = None) -> None:
        """Refused: resume from a checkpoint with another plan instead.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("sdp_fsdp cannot change the plan while training: resume from a checkpoint with the new one.")

    # one step

    def call_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the LightningModule as FSDP2 does its forward, so that what it uses is gathered."""
        module = self.lightning_module
        assert module is not None
        if not isinstance(module, FSDPModule):
            return super().call_step(name, *args, **kwargs)
        return call_sharded(module, name, *args, **kwargs)

    # the end

    def open_for_good(self) -> None:
        """The module stays sharded; BatchNorm's statistics become the full model's."""
        if self._run is not None and self._run.buffers.widths and self._stale_statistics:
            with self.full_model():
                pass

    def _leave(self, run: Run) -> None:
        if self._interrupted:
            super()._leave(run)
        else:
            self._kept = run

    def teardown(self) -> None:
        """Leaves the module sharded; after a failure its structure is whole, without data."""
        self._full_model_users = 0
        self.close_full_model()
        super().teardown()
        self._run, self._kept = self._kept, None


def _require_blocks(granularity: str, masking: str) -> None:
    if granularity != "block":
        raise ValueError(
            f"granularity={granularity!r} does not go with sdp_fsdp yet, which shards whole tensors: use 'block', or "
            "strategy='sdp_neuron'."
        )
    if masking != "forward":
        raise ValueError(
            f"masking={masking!r} does not go with sdp_fsdp yet, where a process has parameters only of what it runs: "
            "use 'forward', or strategy='sdp_backward'."
        )


def _policy(argument: str, policy: Any) -> Any:
    is_known = isinstance(policy, (set, frozenset, list, tuple)) and all(isinstance(cls, type) for cls in policy)
    if policy is None or is_known or callable(policy):
        return policy
    raise ValueError(
        f"{argument}={policy!r} must be module classes in a set or list, or a function that is called with module, "
        "recurse and nonwrapped_numel. Other policies of torch's older FSDP do not carry over to FSDP2."
    )


def _offload_policy(given: Any) -> OffloadPolicy | None:
    if isinstance(given, OffloadPolicy):
        return given if isinstance(given, CPUOffloadPolicy) else None
    offloads = given.offload_params if isinstance(given, CPUOffload) else given
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offloads else None


def _reshards(given: str | ShardingStrategy) -> bool:
    name = given.name if isinstance(given, ShardingStrategy) else str(given).upper()
    if name == "NO_SHARD":
        raise ValueError("sharding_strategy='NO_SHARD' shards nothing: use strategy='sdp'.")
    if "HYBRID" in name:
        raise ValueError(
            f"sharding_strategy={name!r} follows from the plan here: set num_subnetworks below the number of "
            "processes, and every worker shards its subnetwork within itself."
        )
    one_of("sharding_strategy", name, ("FULL_SHARD", "SHARD_GRAD_OP"))
    return name == "FULL_SHARD"
