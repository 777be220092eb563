"""Lightning's hooks while a model is trained: steps, the full model, and what a failure changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_sdp.callbacks import BatchNormRecalibration
from lightning_sdp.callbacks.batchnorm import update_statistics
from lightning_sdp.optimizer_state import OptimizerLayout
from lightning_sdp.run import Run
from lightning_sdp.sync.agreement import needing_all
from lightning_sdp.usage import gather, measure


class RunHooks(ParallelStrategy):
    """What happens between setup and teardown, each hook a few lines that delegate to the `Run`.

    Attributes:
        eval_model: What validation, test and prediction run.
    """

    eval_model: str
    _layout: OptimizerLayout | None = None  # outlives a run: the user may save a checkpoint after it

    def _reset(self) -> None:
        """Forgets everything that belongs to one run."""
        self._run: Run | None = None
        self._recalibration: BatchNormRecalibration | None = None
        self._stale_statistics = False
        self._full_model_users = 0

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

    def call_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the LightningModule."""
        return getattr(self.lightning_module, name)(*args, **kwargs)

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

    # failures

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all processes, unless one of them has failed."""
        if not self._interrupted:
            super().barrier(*args, **kwargs)  # type: ignore[safe-super]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcasts an object, unless a process has failed."""
        return obj if self._interrupted else super().broadcast(obj, src)  # type: ignore[safe-super]

    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any = "mean") -> Tensor:
        """Reduces a tensor over all processes, unless one of them has failed."""
        return tensor if self._interrupted else super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]

    def on_exception(self, exception: BaseException) -> None:
        """Nothing to add: messages are clear where they are raised."""
