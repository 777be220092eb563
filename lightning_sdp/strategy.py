"""SDPStrategy: subnetworks under Lightning's DDP."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.constants import default_pg_timeout

from lightning_sdp.base import SubnetworkStrategy
from lightning_sdp.limits import check_interval, check_options
from lightning_sdp.plan import MaskPlan
from lightning_sdp.settings import MaskSettings


class SDPStrategy(SubnetworkStrategy, DDPStrategy):
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
