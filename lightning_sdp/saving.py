"""Checkpoints: Lightning's hooks that save and restore a model of which every rank has a part."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_sdp._compat import PathType, optimizer_to_device
from lightning_sdp.callbacks.masking import CHECKPOINT_KEY
from lightning_sdp.checkpoint_directory import META, beside, is_checkpoint, move, recover
from lightning_sdp.distributed_checkpoint import SavedDirectory, restored, save_directory
from lightning_sdp.hooks import RunHooks
from lightning_sdp.materialize import is_on_meta
from lightning_sdp.plan import MaskPlan
from lightning_sdp.settings import MaskSettings
from lightning_sdp.sync.agreement import agree, needing_all


class CheckpointHooks(RunHooks):
    """Saves what a plain run would save, and restores it.

    Attributes:
        settings: The masking arguments.
        plan: Who holds what.
        initial_plan: The plan that training began with.
        masking: The regime.
        model_averaging_period: Steps between averages of parameters.
        save_distributed_checkpoint: Whether checkpoints are directories to which every rank writes.
    """

    settings: MaskSettings
    plan: MaskPlan | None = None
    initial_plan: MaskPlan | None = None
    masking: str
    model_averaging_period: int
    save_distributed_checkpoint: bool
    _checkpoint_record: Mapping[str, Any] | None = None
    _lost: tuple[str, ...] = ()
    _saved: SavedDirectory | None
    _to_load: Callable[[], None] | None  # what setup has to do when it has carved the model

    def _reset(self) -> None:
        super()._reset()
        self._saved, self._to_load = None, None

    def _carves(self, trainer: Trainer) -> bool:
        """Whether setup divides the model among the ranks."""
        return trainer.state.fn == TrainerFn.FITTING or self.eval_model != "full"

    @property
    def _cut_off(self) -> bool:
        """Whether a checkpoint needs what other ranks hold, but one of them may have failed and not answer."""
        sources = (self._run, self._layout)
        needs_others = any(source is not None and source.needs_others for source in sources)
        return self._interrupted and (needs_others or (self.save_distributed_checkpoint and self.world_size > 1))

    @property
    def _state_device(self) -> torch.device:
        """Where optimizer state lives."""
        return self.root_device

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
        module, saved = self.lightning_module, None if "state_dict" in checkpoint else self._saved
        assert module is not None
        load_plainly = super().load_model_state_dict

        def load() -> None:
            if saved is not None:
                saved.load_model(module, self._run, strict)
            elif self._run is not None:
                self._run.load_state_dict(checkpoint["state_dict"], strict)
            else:
                load_plainly(checkpoint, strict)
            self._stale_statistics = False

        if self._run is None and (saved is not None or is_on_meta(module)) and self._carves(module.trainer):
            self._to_load = load
        elif saved is not None:
            agree(load, lambda _: ())
        else:
            load()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads this worker's part of the optimizer states of a plain run."""
        layout, saved = self._layout, self._saved
        if layout is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        for position, (optimizer, state) in enumerate(
            zip(self.optimizers, checkpoint["optimizer_states"], strict=False)
        ):
            if saved is None or "state" in state:
                layout.load_state_dict(position, optimizer, state)
            else:
                own = agree(partial(saved.optimizer_state, position, layout), lambda _: ())
                layout.load_own_state_dict(position, optimizer, {**state, "state": own})
            optimizer_to_device(optimizer, self._state_device)

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
