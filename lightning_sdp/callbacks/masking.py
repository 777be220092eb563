"""Masking regimes: when the full model is open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

if TYPE_CHECKING:
    from lightning_sdp.strategy import SDPStrategy

CHECKPOINT_KEY = "lightning_sdp"


def strategy_of(trainer: Trainer, purpose: str) -> SDPStrategy:
    """The trainer's strategy, if it is the right one.

    Args:
        trainer: The trainer.
        purpose: Which callback needs it, and for what: "X watches", say.

    Raises:
        ValueError: It is another one.
    """
    strategy: Any = trainer.strategy
    if not hasattr(strategy, "replan"):
        raise ValueError(
            f"{purpose} what SDPStrategy masks, but the strategy is {type(strategy).__name__}: use "
            "Trainer(strategy='sdp'), or remove the callback."
        )
    return strategy  # type: ignore[no-any-return]


class MaskingMode(Callback):
    """A masking regime; `SDPStrategy` puts one first among the callbacks."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the plan to the checkpoint."""
        checkpoint[CHECKPOINT_KEY] = trainer.strategy.plan_record()  # type: ignore[attr-defined]


class BackwardMasking(MaskingMode):
    """Each worker runs the full model, and trains what it holds: the full model is always open."""


class ForwardMasking(MaskingMode):
    """Each worker runs only what it holds, except while the model is evaluated or handed to the user.

    As it comes first among the callbacks, the full model is open before any other callback of a stage sees it; the
    strategy's own ``on_validation_end``, which Lightning calls last, closes it. After the sanity check it is closed
    where training starts, and at the end of training it stays open; where it does not, as with shards, tests and
    predictions open it again, and teardown closes it.
    """

    def _open(self, trainer: Trainer) -> None:
        strategy: SDPStrategy = trainer.strategy  # type: ignore[assignment]
        strategy.open_for_evaluation()

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the full model."""
        self._open(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the full model."""
        self._open(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the full model where it is not in place anyway."""
        self._open(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the full model where it is not in place anyway."""
        self._open(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Closes the full model after the sanity check."""
        trainer.strategy.close_full_model()  # type: ignore[attr-defined]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the full model for good."""
        trainer.strategy.open_for_good()  # type: ignore[attr-defined]


MODES: dict[str, type[MaskingMode]] = {"forward": ForwardMasking, "backward": BackwardMasking}
