"""What cannot be combined: options with one another, and a plan with what needs the whole model on every process."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelPruning

from lightning_sdp._compat import AVERAGES
from lightning_sdp.plan import MaskPlan
from lightning_sdp.settings import one_of

REDUCE_DTYPES = (None, "bfloat16", "float16", "float32", "float64")


def check_options(
    masking: str,
    eval_model: str,
    model_averaging_period: int,
    bucket_cap_mb: float,
    reduce_dtype: str | None,
    recalibrate_batchnorm: int,
) -> None:
    """Checks a strategy's options beside its `MaskSettings`; see `SDPStrategy` for their meaning.

    Raises:
        ValueError: One is not understood, or two exclude each other.
    """
    one_of("eval_model", eval_model, ("full", "subnetwork"))
    if masking == "backward" and eval_model == "subnetwork":
        raise ValueError(
            "eval_model='subnetwork' needs masking='forward': with 'backward' every worker runs the full model."
        )
    if type(model_averaging_period) is not int or model_averaging_period < 1:
        raise ValueError(f"model_averaging_period={model_averaging_period!r} must be a number of steps, at least 1.")
    if model_averaging_period > 1 and masking == "backward":
        raise ValueError(
            "model_averaging_period > 1 needs masking='forward': under backward masking all weights agree after "
            "every step."
        )
    one_of("reduce_dtype", reduce_dtype, REDUCE_DTYPES)
    if reduce_dtype is not None and model_averaging_period > 1:
        raise ValueError(
            f"reduce_dtype={reduce_dtype!r} is for gradients, which do not travel with model_averaging_period > 1: "
            "leave one of them out."
        )
    if bucket_cap_mb <= 0:
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb} must be positive.")
    if recalibrate_batchnorm < 0:
        raise ValueError(f"recalibrate_batchnorm={recalibrate_batchnorm} must be a number of batches, or 0 for off.")


def check_interval(argument: str, steps: int, least: int) -> None:
    """Checks after how many steps something is to happen.

    Raises:
        ValueError: It is not a number, or below the least.
    """
    if type(steps) is not int or steps < least:
        never = ", or 0 for never" if least == 0 else ""
        raise ValueError(f"{argument}={steps!r} must be a number of steps{never}.")


def require_compatible(
    plan: MaskPlan,
    masking: str,
    *,
    syncs_batchnorm: bool,
    compiles: bool,
    callbacks: Sequence[Callback],
) -> None:
    """Refuses what needs the whole model on every process.

    Args:
        plan: Who holds what.
        masking: ``"forward"`` or ``"backward"``.
        syncs_batchnorm: Whether BatchNorm is to be synchronized over all processes.
        compiles: Whether torch.compile is used.
        callbacks: The trainer's callbacks.

    Raises:
        ValueError: Something of that is there.
    """
    if syncs_batchnorm and masking == "forward" and plan.layouts:
        raise ValueError(
            "sync_batchnorm=True synchronizes a BatchNorm as a whole, but its channels have different holders. Use "
            "sync_batchnorm=False, granularity='block' or masking='backward'."
        )
    if compiles and masking == "backward" and plan.layouts:
        raise ValueError(
            "torch.compile does not see which entries of a weight a process trains under backward masking of neurons. "
            "Use granularity='block' or masking='forward', or do not compile."
        )
    if not plan.is_complete and any(isinstance(callback, ModelPruning) for callback in callbacks):
        raise ValueError(
            "ModelPruning replaces parameters by others of the full model's shape, but processes have parts of them. "
            "Prune the trained model, or use coverage=1."
        )
    averages = next((c for c in callbacks if isinstance(c, AVERAGES)), None)
    if averages is not None and masking == "forward" and not plan.is_complete:
        raise ValueError(
            f"{type(averages).__name__} pairs parameters by their positions, but processes have different ones. Use "
            "masking='backward', or average the full model in `with strategy.full_model()`."
        )


def require_own_files(checkpoint_io: CheckpointIO, callbacks: Sequence[Callback]) -> None:
    """Refuses what does not go with distributed checkpoints.

    Args:
        checkpoint_io: What the strategy would write a plain checkpoint with.
        callbacks: The trainer's callbacks.

    Raises:
        ValueError: There is something.
    """
    if type(checkpoint_io) is not TorchCheckpointIO:
        raise ValueError(
            f"{type(checkpoint_io).__name__} does not go with save_distributed_checkpoint=True: every process writes a "
            "part of the checkpoint, in the format of torch.distributed.checkpoint. Leave one of them out."
        )
    if any(isinstance(callback, AVERAGES) for callback in callbacks):
        raise ValueError(
            "Weight averaging callbacks put a state dict of their own into the checkpoint, which "
            "save_distributed_checkpoint=True cannot take apart. Use save_distributed_checkpoint=False."
        )
